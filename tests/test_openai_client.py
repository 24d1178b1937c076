"""The real openai client, sync and async, against the fake engine and against the tiny model."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from server_process import HI

SHARED = ("-cs", 8192, "--parallel", 4, "-chunk_size", 256)  # as in test_real_engine.py
ASK = {"model": "m", "messages": HI}
GREEDY = ASK | {"temperature": 0, "max_tokens": 12}


def client_of(server, key="none", **options):
    return OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=20, **options)


def async_client_of(server):
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture(params=["fake", "real"])
def server(request, fake_server, real_server):
    """The same requests to both engines."""
    if request.param == "fake":
        return fake_server([f" w{i}" for i in range(40)])
    return real_server(*SHARED)


def said(stream):
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


# ---- Chat ----------------------------------------------------------------------------------------


def test_a_chat_and_its_stream_say_the_same(server):
    client = client_of(server)
    whole = client.chat.completions.create(**GREEDY)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert said(chunks) == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1 and chunks[0].id != whole.id


def test_a_stream_ends_with_usage_when_asked(server):
    options = {"include_usage": True}
    chunks = list(
        client_of(server).chat.completions.create(**GREEDY, stream=True, stream_options=options)
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client_runs_several_at_once(server):
    async def ask(client, stream):
        answer = await client.chat.completions.create(**GREEDY, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in answer])

    async def main():
        async with async_client_of(server) as client:
            return await asyncio.gather(*(ask(client, stream) for stream in (True, False) * 3))

    assert len(set(asyncio.run(main()))) == 1


def test_leaving_a_stream_frees_the_slot(server):
    fields = ASK | {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with client_of(server).chat.completions.create(**fields, stream=True) as stream:
        next(iter(stream))
    server.wait_idle()


def test_three_choices_come_with_their_indices(server):
    client = client_of(server)
    whole = client.chat.completions.create(**GREEDY, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 36
    texts, finishes = ["", "", ""], {}
    for chunk in client.chat.completions.create(**GREEDY, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == dict.fromkeys(range(3), "length")


def test_log_probabilities_belong_to_the_tokens_of_the_text(server):
    client = client_of(server)
    choice = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0 and entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) <= 3
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001
    streamed = []
    stream = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_log_probabilities_without_alternatives(server):
    choice = client_of(server).chat.completions.create(**GREEDY, logprobs=True).choices[0]
    assert [entry.top_logprobs for entry in choice.logprobs.content] == [[]] * 12


def test_a_stop_string_ends_the_text(fake_server):
    server = fake_server(["one two ", "thr", "ee fo", "ur five"])
    choice = client_of(server).chat.completions.create(**ASK, stop=["three four"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("one two ", "stop")


# ---- The other routes ----------------------------------------------------------------------------


def test_the_legacy_completions_say_the_same_with_stream(server):
    client = client_of(server)
    fields = {"model": "m", "prompt": ["Once", "Twice"], "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 16
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_the_models_list_names_the_one_that_is_served(server):
    models = client_of(server).models.list().data
    answer = client_of(server).chat.completions.create(**GREEDY)
    assert [model.id for model in models] == [answer.model]


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"temperature": "hot"}, {"messages": []}, {"n": 0}, {"max_tokens": -5}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_bad_request_error(fake_server, fields, stream):
    server = fake_server(["x"])
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(server).chat.completions.create(**(ASK | fields), stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert next(iter(fields)) in caught.value.message


def test_a_prompt_that_is_too_long_tells_its_size(real_server):
    server = real_server(*SHARED)
    messages = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(server).chat.completions.create(model="m", messages=messages)
    assert caught.value.type == "exceed_context_size_error"
    assert caught.value.body["n_prompt_tokens"] > caught.value.body["n_ctx"]


def test_keys_and_paths_map_to_the_clients_own_errors(fake_server):
    server = fake_server(["x"], "--api-key", "right")
    assert client_of(server, "right").chat.completions.create(**ASK).choices[0].message.content
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").chat.completions.create(**ASK)
    with pytest.raises(openai.NotFoundError):
        client_of(server, "right").files.list()


def test_a_failure_of_the_engine_is_an_internal_server_error(fake_server):
    server = fake_server(["par", {"error": "planted"}])
    client = client_of(server)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ASK)
    stream = client.chat.completions.create(**ASK, stream=True)
    with pytest.raises(openai.APIError, match="planted"):
        said(stream)
    server.wait_idle()

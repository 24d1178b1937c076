"""Clients that other people wrote for llama-server, each doing what its README shows.

They are langchain-llama-cpp, llm-llama-server, llamacpp-client and litellm. Not here is
llama-cpp-haystack: it speaks no HTTP and has no URL to set, but loads a GGUF file into its own
process, through llama-cpp-python, which the registry has as source alone, to be compiled.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import httpx
import llm
import llm_llama_server
import openai
import pytest
import requests
from click.testing import CliRunner
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_llama_cpp import ChatLlama, exceptions
from llamacpp_client import LlamaCppClient, LlamaCppServerAddress
from llm.cli import cli
from pydantic import BaseModel
from server_process import HI, chat_replies, sse_data

SHARED = ("-cs", 8192, "--parallel", 4, "-chunk_size", 256)  # as in test_real_engine.py
WORDS = [f" wörd{i}" for i in range(8)]
THOUGHTFUL = ["Let me", " see.", "</think>", "\n\nHello", " there."]
FAILING = ["par", {"error": "planted"}]
TOO_LONG = "word " * 9000

pytestmark = pytest.mark.filterwarnings("ignore")  # what the clients deprecate of each other


class Paint(BaseModel):
    """A shape that ends by itself, however little the model knows."""

    colour: Literal["red", "green"]
    glossy: bool


def look_up(city: str) -> str:
    """Tells the weather of a city."""
    return f"Sunny in {city}"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No client reaches for the network, or for the files and keys of who runs the tests."""
    monkeypatch.setenv("LANGSMITH_TRACING_V2", "false")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")  # llm and litellm want one


@pytest.fixture
def real(real_server):
    return real_server(*SHARED)


# ---- langchain-llama-cpp -------------------------------------------------------------------------


def langchain(server, **fields):
    defaults = {"model": "m", "base_url": server.url, "max_retries": 0, "timeout": 20}
    return ChatLlama(**(defaults | fields))


def gathered(chunks):
    whole, *rest = chunks
    for chunk in rest:
        whole += chunk
    return whole


def test_langchain_gets_text_usage_and_timings_streamed_or_not(real):
    model = langchain(real, temperature=0, max_tokens=12)
    whole, streamed = model.invoke("Say hi."), gathered(model.stream("Say hi."))
    assert whole.content == streamed.content != ""
    for message in (whole, streamed):
        assert message.usage_metadata["output_tokens"] == 12
        assert message.usage_metadata["input_tokens"] > 0
        assert message.response_metadata["timings"]["predicted_n"] == 12
        assert message.response_metadata["timings"]["predicted_per_second"] > 0
        assert message.response_metadata["finish_reason"] == "length"


def test_langchain_gets_a_thought_apart_and_sends_it_back(fake_server):
    model = langchain(fake_server(THOUGHTFUL, think=True))
    first = model.invoke("Say hi.")
    for message in (first, gathered(model.stream("Say hi."))):
        assert message.content == "Hello there."
        assert message.additional_kwargs["reasoning_content"] == "Let me see."
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    parts = [{"type": "text", "text": "Once more."}]
    talk = [SystemMessage("Be kind."), HumanMessage("Say hi."), first, HumanMessage(parts)]
    second = model.invoke(talk)
    assert second.content == "Hello there."
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_langchain_runs_several_at_once(real):
    model = langchain(real, temperature=0, max_tokens=8)

    async def streamed():
        return gathered([chunk async for chunk in model.astream("Say hi.")])

    async def main():
        return await asyncio.gather(model.ainvoke("Say hi."), streamed(), model.ainvoke("Say hi."))

    assert len({message.content for message in asyncio.run(main())}) == 1


def test_langchain_gets_a_schema_kept_by_the_grammar(real):
    model = langchain(real, max_tokens=100)
    paint = model.with_structured_output(Paint, method="json_schema").invoke("Choose.")
    assert isinstance(paint, Paint)


def test_langchain_gets_any_json_object(fake_server):
    model = langchain(fake_server(['{"colour":', ' "red"}']))
    answer = model.with_structured_output(method="json_mode").invoke("Choose.")
    assert answer == {"colour": "red"}


def test_langchain_shows_its_tools_to_the_model(real):
    model = langchain(real, max_tokens=4)
    with_tools = model.bind_tools([look_up]).invoke("Is it sunny?")
    plain = model.invoke("Is it sunny?")
    assert with_tools.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


def test_langchain_may_set_every_sampler_and_setting_that_there_is(real):
    samplers = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    samplers |= {"xtc_probability": 0.1, "xtc_threshold": 0.1, "samplers": ["top_k", "temperature"]}
    samplers |= {"adaptive_target": -1.0, "logit_bias": {"5": -1.0}}
    penalties = {"repeat_penalty": 1.1, "repeat_last_n": 32, "presence_penalty": 0.1}
    penalties |= {"frequency_penalty": 0.1, "dry_multiplier": 0.5, "dry_base": 1.75}
    penalties |= {"dry_allowed_length": 2, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["."]}
    off = {"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1.0, "dynatemp_range": 0.0, "lora": []}
    rest = {"logprobs": True, "top_logprobs": 2, "timings_per_token": True, "ignore_eos": True}
    rest |= {"cache_prompt": True, "id_slot": -1, "stop": ["\t\t"], "max_tokens": 6}
    model = langchain(real, **samplers, **penalties, **off, **rest)
    for message in (model.invoke("Say hi."), gathered(model.stream("Say hi."))):
        assert message.usage_metadata["output_tokens"] == 6
        entries = message.response_metadata["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 6


def test_langchain_gets_log_probabilities_of_words_that_might_have_become_a_stop(fake_server):
    fields = {"stop": [WORDS[3] + " and more"], "logprobs": True, "max_tokens": 4}
    model = langchain(fake_server(WORDS), **fields)
    for message in (gathered(model.stream("Say hi.")), model.invoke("Say hi.")):
        assert message.content == "".join(WORDS[:4])
        entries = message.response_metadata["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == WORDS[:4]


def test_langchain_that_leaves_a_stream_frees_the_slot(fake_server):
    server = fake_server(WORDS, delay=0.01)
    stream = langchain(server, ignore_eos=True, max_tokens=1000).stream("Say hi.")
    next(stream)
    server.wait_busy(1)
    stream.close()
    server.wait_idle()


@pytest.mark.parametrize(
    ("script", "fields", "error"),
    [
        (WORDS, {"temperature": -1}, exceptions.LlamaInvalidRequestError),
        (FAILING, {}, exceptions.LlamaAPIError),
    ],
)
def test_langchain_raises_its_own_errors(fake_server, script, fields, error):
    model = langchain(fake_server(script), **fields)
    with pytest.raises(error):
        model.invoke("Say hi.")
    with pytest.raises(error):
        list(model.stream("Say hi."))


def test_langchain_without_a_key_raises_its_own_error(fake_server):
    with pytest.raises(exceptions.LlamaAuthenticationError):
        langchain(fake_server(WORDS, "--api-key", "right")).invoke("Say hi.")


def test_langchain_knows_a_prompt_that_is_too_long_by_its_size(real):
    with pytest.raises(exceptions.LlamaContextOverflowError) as caught:
        langchain(real).invoke(TOO_LONG)
    assert caught.value.n_prompt_tokens > caught.value.n_ctx > 0


class LlamaSwap(httpx.HTTPTransport):
    """What llama-swap in front of a server does with a path."""

    def handle_request(self, request):
        request.url = request.url.copy_with(path=request.url.path.removeprefix("/upstream/m"))
        return super().handle_request(request)


def test_langchain_reads_the_servers_defaults_through_llama_swap(fake_server):
    server = fake_server(WORDS, "--temp", 0.25, "-cs", 4096)
    with httpx.Client(transport=LlamaSwap()) as client:
        defaults = langchain(server, http_client=client).get_server_defaults()
    assert (defaults["temperature"], defaults["n_ctx"]) == (0.25, 4096)
    with pytest.raises(exceptions.LlamaModelNotFoundError):
        langchain(server).get_server_defaults()


# ---- llm-llama-server ----------------------------------------------------------------------------


@pytest.fixture
def point(monkeypatch):
    """Points the plugin to a server: its own URL, http://localhost:8080/v1, is not to be set."""

    def to(server):
        url = property(lambda model: server.url + "/v1", lambda model, value: None)
        for kind in (llm_llama_server.LlamaServer, llm_llama_server.AsyncLlamaServer):
            monkeypatch.setattr(kind, "api_base", url, raising=False)

    return to


def run_llm(*args):
    """What the command `llm` prints and its exit code."""
    result = CliRunner().invoke(cli, list(args))
    return result.output, result.exit_code


def test_llm_prompts_streamed_or_not(real, point):
    point(real)
    model = llm.get_model("llama-server")
    fields = {"temperature": 0, "max_tokens": 12, "seed": 3, "stop": "never"}
    streamed = model.prompt("say hi", **fields)
    whole = model.prompt("say hi", stream=False, **fields)
    assert "".join(streamed) == whole.text() != ""
    for usage in (streamed.usage(), whole.usage()):
        assert usage.output == 12 and usage.input == whole.usage().input > 0


def test_llm_prompts_as_a_command_and_goes_on_where_it_was(fake_server, point):
    point(fake_server(WORDS))
    said = "".join(WORDS)
    assert run_llm("-m", "llama-server", "say hi") == (f"{said}\n", 0)
    assert run_llm("-c", "-s", "Be kind.", "once more") == (f"{said}\n", 0)
    logs = json.loads(run_llm("logs", "--json")[0])
    assert [log["response"] for log in logs] == [said, said]
    assert logs[0]["input_tokens"] < logs[1]["input_tokens"]


def test_llm_is_asynchronous_too(fake_server, point):
    point(fake_server(WORDS))

    async def main():
        response = llm.get_async_model("llama-server").prompt("say hi")
        return await response.text(), await response.usage()

    text, usage = asyncio.run(main())
    assert text == "".join(WORDS) and usage.output == len(WORDS) + 1  # and what ends the answer


def test_llm_shows_its_tools_to_the_model(real, point):
    point(real)
    model = llm.get_model("llama-server-tools")
    with_tools = model.prompt("time?", tools=[look_up], max_tokens=4)
    plain = model.prompt("time?", max_tokens=4)
    assert with_tools.text() and plain.text()
    assert with_tools.usage().input > plain.usage().input


def test_llm_is_told_that_there_are_no_images(fake_server, point):
    point(fake_server(WORDS))
    image = llm.Attachment(type="image/png", content=b"\x89PNG")
    with pytest.raises(openai.BadRequestError, match="image"):
        llm.get_model("llama-server-vision").prompt("describe", attachments=[image]).text()


def test_llm_says_why_it_has_no_answer(fake_server, point):
    point(fake_server(FAILING))
    output, exit_code = run_llm("-m", "llama-server", "say hi")
    assert "Error: planted" in output and exit_code == 1
    point(fake_server(WORDS, "--api-key", "right"))
    output, exit_code = run_llm("-m", "llama-server", "say hi")
    assert "Invalid API Key" in output and exit_code == 1
    assert run_llm("-m", "llama-server", "say hi", "--key", "right")[1] == 0


def test_llm_lists_the_models_of_an_endpoint_and_asks_one_for_json(real):
    url = real.url + "/v1"
    assert run_llm("openai", "endpoint", url, "--models") == ("fp16\n", 0)
    schema = json.dumps(Paint.model_json_schema())
    output, exit_code = run_llm("openai", "endpoint", url, "Go.", "-m", "fp16", "--schema", schema)
    assert exit_code == 0 and Paint.model_validate_json(output)


# ---- llamacpp-client -----------------------------------------------------------------------------


def llamacpp(server):
    return LlamaCppClient([LlamaCppServerAddress("localhost", server.port)])


async def all_of(pieces):
    return b"".join([piece async for piece in pieces])


def test_llamacpp_client_completes_streamed_or_not(real):
    fields = {"temperature": 0, "n_predict": 8, "stop": ["never"]}
    whole = llamacpp(real).new_completion("Once upon a time", **fields)
    *parts, last = llamacpp(real).new_stream_completion("Once upon a time", **fields)
    assert "".join(part.content for part in parts) == whole.content != "" == last.content
    assert whole.tokens_predicted == 8 and whole.tokens_cached > 0
    assert last.stop and not any(part.stop for part in parts)
    for end in (whole, last):
        assert (end.stop_type, end.truncated) == ("limit", False)
        assert end.tokens_evaluated == whole.tokens_evaluated > 1


def test_llamacpp_client_passes_any_field_and_the_whole_answer(real):
    answer = llamacpp(real).completion("Once", temperature=0, n_predict=4, n_probs=2)
    assert len(answer["completion_probabilities"]) == answer["tokens_predicted"] == 4
    assert answer["generation_settings"]["n_predict"] == 4
    assert answer["timings"]["predicted_n"] == 4


def test_llamacpp_client_passes_the_bytes_of_a_stream(fake_server):
    server = fake_server(WORDS)
    raw = asyncio.run(all_of(llamacpp(server).async_completion("Once", stream=True)))
    events = [json.loads(data) for data in sse_data(raw)]
    assert "".join(event["content"] for event in events) == "".join(WORDS)
    assert events[-1]["stop_type"] == "eos"


def test_llamacpp_client_chats(fake_server):
    client = llamacpp(fake_server(WORDS))
    whole = client.v1_chat_completions(HI)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "".join(WORDS)}
    raw = asyncio.run(all_of(client.async_v1_chat_completions(HI, stream=True)))
    (reply,) = chat_replies(sse_data(raw))
    assert (reply.content, reply.finish) == ("".join(WORDS), "stop")


def test_llamacpp_client_raises_a_refusal_or_hands_it_on(fake_server):
    server = fake_server(WORDS)
    for complete in (llamacpp(server).new_completion, llamacpp(server).new_stream_completion):
        with pytest.raises(requests.HTTPError) as caught:
            list(complete("Once", temperature=-1))
        assert caught.value.response.status_code == 400
    for answer in (
        llamacpp(server).completion("Once", temperature=-1),
        llamacpp(server).v1_chat_completions(HI, temperature=-1),
    ):
        assert answer["error"]["code"] == 400 and "temperature" in answer["error"]["message"]


# ---- litellm -------------------------------------------------------------------------------------


@pytest.fixture
def litellm(alone):
    """The module, quiet. Its import takes seconds, so only the tests that use it wait for it."""
    import litellm

    litellm.suppress_debug_info = True
    return litellm


def ask(server, provider="openai", **fields):
    """The arguments of litellm's functions."""
    base = {"model": f"{provider}/m", "api_base": server.url + "/v1", "api_key": "none"}
    return base | {"messages": HI, "max_retries": 0} | fields


@pytest.mark.parametrize("provider", ["openai", "llamafile", "lm_studio", "hosted_vllm"])
def test_litellm_chats_whatever_it_takes_the_server_for(fake_server, litellm, provider):
    request = ask(fake_server(WORDS), provider, max_tokens=5)
    choice = litellm.completion(**request).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("".join(WORDS[:5]), "length")
    chunks = list(litellm.completion(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(WORDS[:5])
    assert chunks[-1].choices[0].finish_reason == "length"


def test_litellm_counts_the_tokens_of_a_stream_as_the_server_does(real, litellm):
    request = ask(real, temperature=0, max_tokens=12)
    whole = litellm.completion(**request)
    stream = litellm.completion(**request, stream=True, stream_options={"include_usage": True})
    built = litellm.stream_chunk_builder(list(stream))
    assert built.choices[0].message.content == whole.choices[0].message.content != ""
    for usage in (whole.usage, built.usage):
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_litellm_gets_a_thought_apart(fake_server, litellm):
    request = ask(fake_server(THOUGHTFUL, think=True))
    message = litellm.completion(**request).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**request, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    said = "".join(delta.content or "" for delta in deltas)
    assert (message.reasoning_content, message.content) == (thought, said)
    assert (thought, said) == ("Let me see.", "Hello there.")


def test_litellm_gets_schemas_choices_log_probabilities_and_our_own_fields(real, litellm):
    answer = litellm.completion(**ask(real, response_format=Paint, max_tokens=100))
    assert Paint.model_validate_json(answer.choices[0].message.content)
    extra = {"top_k": 1, "cache_prompt": True}
    fields = {"n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 3, "extra_body": extra}
    first, second = litellm.completion(**ask(real, **fields)).choices
    assert first.message.content == second.message.content  # top_k was heard
    for choice in (first, second):
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 3


def test_litellm_completes_text_streamed_or_not(real, litellm):
    request = ask(real, "text-completion-openai", prompt="Once", temperature=0, max_tokens=8)
    del request["messages"]
    whole = litellm.text_completion(**request)
    chunks = litellm.text_completion(**request, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text != ""
    assert whole.usage.completion_tokens == 8


def test_litellm_runs_several_at_once(real, litellm):
    request = ask(real, temperature=0, max_tokens=8)

    async def main():
        return await asyncio.gather(*(litellm.acompletion(**request) for _ in range(4)))

    assert len({answer.choices[0].message.content for answer in asyncio.run(main())}) == 1


def test_litellm_finds_the_model_that_is_served(fake_server, litellm):
    models = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_base=fake_server(WORDS, "--alias", "mine").url,
    )
    assert models == ["mine"]


def test_litellm_routes_around_a_server_that_fails(fake_server, litellm):
    models = [
        {"model_name": name, "litellm_params": ask(fake_server(script)) | {"messages": None}}
        for name, script in (("first", FAILING), ("second", WORDS))
    ]
    router = litellm.Router(models, fallbacks=[{"first": ["second"]}], num_retries=0)
    answer = router.completion("first", HI)
    assert answer.choices[0].message.content == "".join(WORDS)


def test_litellm_raises_its_own_errors(fake_server, real, litellm):
    failing, locked = fake_server(FAILING), fake_server(WORDS, "--api-key", "right")
    long_messages = [{"role": "user", "content": TOO_LONG}]
    for error, request in (
        (litellm.InternalServerError, ask(failing)),
        (litellm.AuthenticationError, ask(locked)),
        (litellm.BadRequestError, ask(failing, temperature=-1)),
        (litellm.ContextWindowExceededError, ask(real, messages=long_messages)),
    ):
        with pytest.raises(error):
            litellm.completion(**request)
    with pytest.raises(litellm.ServiceUnavailableError, match="planted"):
        list(litellm.completion(**ask(failing), stream=True))


def test_litellm_is_told_that_there_are_no_embeddings_and_no_reranking(fake_server, litellm):
    base = {"api_base": fake_server(WORDS).url + "/v1", "api_key": "none"}
    with pytest.raises(openai.APIError) as caught:
        litellm.embedding(model="openai/m", input=["a"], max_retries=0, **base)
    assert caught.value.status_code in (404, 501)
    with pytest.raises(openai.APIError) as caught:
        litellm.rerank(model="hosted_vllm/m", query="a", documents=["b"], **base)
    assert caught.value.status_code in (404, 501)

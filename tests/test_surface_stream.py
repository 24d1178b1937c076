"""Streams as clients see them: cases 1, 4 to 6 and 8 to 12 of the project's list of faults."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from openai import OpenAI
from server_process import HI, Reader, eventually, http_request, in_threads, sse_data

CHAT = "/v1/chat/completions"
PARROT = [b"\xf0\x9f", b"\xa6", b"\x9c o", b"k ", b"\xe6\x9d", b"\xb1"]
AB = ["A", "B", {"end": "length"}]


# ---- Case 1: characters split over tokens --------------------------------------------------------


def test_a_character_split_over_tokens_arrives_whole(fake_server):
    reply = fake_server(PARROT).chat()
    assert reply.content == "🦜 ok 東"
    assert not any("\ufffd" in text for _, text in reply.deltas)


def test_a_character_of_a_thought_split_over_tokens_arrives_whole(fake_server):
    reply = fake_server([*PARROT, "</think>", *PARROT], think=True).chat()
    assert reply.said == ("🦜 ok 東", "🦜 ok 東", "stop")
    assert not any("\ufffd" in text for _, text in reply.deltas)


def test_a_replacement_character_that_the_model_says_gets_through(fake_server):
    server = fake_server([b"\xef\xbf\xbd", "x", b"\xef\xbf", b"\xbd", "y"])
    assert server.chat().content == "\ufffdx\ufffdy"
    assert server.completion(prompt="a")["content"] == "\ufffdx\ufffdy"


def test_half_a_character_at_the_end_does_not_stall_the_answer(fake_server):
    reply = fake_server(["ab", b"\xf0\x9f"]).chat()
    assert reply.content.startswith("ab") and reply.finish == "stop"
    assert reply.content in ("ab", "ab\ufffd")


def test_line_separators_do_not_break_events(fake_server):
    text = "a\u2028b\u2029c\u0085d\r\ne\rf\x00g\ufeff"
    server = fake_server([text])
    assert server.chat().content == text
    with server.open_stream({}) as (reader, _, headers):
        assert reader.body(headers).isascii()


def test_a_lone_surrogate_in_a_request_is_rendered_and_answered(fake_server):
    server = fake_server(["x"])
    messages = [{"role": "user", "content": "a\ud800b"}]
    assert server.chat(messages=messages).content == "x"
    assert "a" in server.rendered(messages=messages)
    assert server.completion(prompt="a\ud800b")["content"] == "x"


# ---- Case 4: how a stream ends -------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", "/v1/completions", "/completion"])
def test_a_stream_ends_with_its_mark_and_the_connection_goes_on(fake_server, path):
    server = fake_server(["A", "B"])
    with server.connect() as sock:
        body = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
        sock.sendall(http_request(path, body | {"stream": True}))
        reader = Reader(sock)
        status, headers = reader.head()
        assert status == 200 and headers["transfer-encoding"] == "chunked"
        raw = reader.body(headers)
        if path == "/completion":
            assert b"[DONE]" not in raw
            assert json.loads(sse_data(raw)[-1])["stop"] is True
        else:
            assert raw.endswith(b"\n\ndata: [DONE]\n\n") and raw.count(b"[DONE]") == 1
            chunks = [json.loads(data) for data in sse_data(raw)[:-1]]
            finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
            assert [f for f in finishes if f is not None] == ["stop"]
            assert finishes[-1] == "stop"
        sock.sendall(http_request("/health"))
        assert reader.answer()[0] == 200


# ---- Case 5: the usage chunk ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
def test_no_usage_chunk_unless_asked_for(fake_server, options):
    reply = fake_server(["A", "B"]).chat(**options)
    assert all(len(chunk["choices"]) == 1 for chunk in reply.events)
    assert not any(chunk.get("usage") for chunk in reply.events)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_usage_chunk_follows_the_finish_and_equals_the_whole_answers(fake_server, path):
    server = fake_server(["A", "B"])
    body = {"messages": HI, "prompt": "Hi", "stream_options": {"include_usage": True}}
    *chunks, last, done = server.stream(path, body)
    assert done == "[DONE]"
    last = json.loads(last)
    assert last["choices"] == []
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    assert not any(json.loads(chunk).get("usage") for chunk in chunks)
    usage = server.ok(path, body)["usage"]
    assert last["usage"] == usage
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["completion_tokens"] == 3  # the stop token counts, as with llama-server


# ---- Case 6: first and last delta ----------------------------------------------------------------


@pytest.mark.parametrize("script", [AB, ["A", "B", "C"]], ids=["limit", "max_tokens"])
def test_first_delta_has_the_role_and_the_finish_chunk_an_empty_delta(fake_server, script):
    reply = fake_server(script).chat(max_tokens=2)
    choices = [chunk["choices"][0] for chunk in reply.events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "A"},
        {"content": "B"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_an_empty_answer_still_has_role_and_finish(fake_server):
    reply = fake_server([]).chat()
    assert reply.said == ("", "", "stop")
    assert [chunk["choices"][0]["delta"] for chunk in reply.events] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_a_models_name_is_sent_as_it_is_also_with_percent_signs(fake_server):
    server = fake_server(["100%"], "--alias", "50%b%d%")
    reply = server.chat()
    assert reply.content == "100%"
    assert {chunk["model"] for chunk in reply.events} == {"50%b%d%"}


# ---- Log-probabilities of held text --------------------------------------------------------------


@pytest.mark.parametrize("script", [["x", "a"], ["x", "a", "bc"], ["x", "ab", "y"]], ids=str)
def test_log_probabilities_are_the_same_streamed_or_not_when_a_stop_string_holds(
    fake_server, script
):
    """The end releases what was held, a found stop string drops it: with its log-probabilities."""
    server = fake_server(script)
    said = "".join(script).partition("abc")[0]
    for path in (CHAT, "/v1/completions"):
        body = {"messages": HI, "prompt": "Hi", "stop": ["abc"]}
        body["logprobs"] = True if path == CHAT else 1
        whole = server.ok(path, body)["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in whole) == said
        chunks = [json.loads(event) for event in server.stream(path, body)[:-1]]
        parts = [chunk["choices"][0].get("logprobs") or {} for chunk in chunks]
        assert [entry for part in parts for entry in part.get("content", [])] == whole
    body = {"prompt": "Hi", "stop": ["abc"], "n_probs": 1}
    whole = server.completion(**body)["completion_probabilities"]
    assert "".join(entry["token"] for entry in whole) == said


# ---- Case 8: refusals come before the status line ------------------------------------------------


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ({"messages": [{"role": "user", "content": "word " * 1024}]}, "context size"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ],
    ids=["too-long", "bad-grammar", "wrong-type", "no-messages", "unknown-role"],
)
def test_a_bad_request_is_a_400_also_with_stream(fake_server, members, names):
    server = fake_server(None, "-cs", 512)
    server.refused(CHAT, {"messages": HI} | members, names)
    server.assert_alive()


# ---- Case 9: failure after tokens were sent ------------------------------------------------------

BREAKS = ["par", "tial", {"error": "planted fault"}]


def test_a_failure_after_tokens_is_an_error_event_and_no_success(fake_server):
    server = fake_server(BREAKS)
    for path in (CHAT, "/v1/completions", "/completion"):
        events = server.stream(path, {"messages": HI, "prompt": "Hi"})
        *chunks, error = [json.loads(event) for event in events]
        assert error["error"]["code"] == 500 and error["error"]["type"] == "server_error"
        assert "Traceback" not in error["error"]["message"]
        raw = json.dumps(chunks)
        assert "par" in raw and "tial" in raw and "[DONE]" not in raw
        assert not re.search(r'"finish_reason": "|"stop": true', raw)
    server.wait_idle()
    assert server.get("/health")[0] == 200


def test_a_failure_without_stream_is_a_500(fake_server):
    server = fake_server(BREAKS)
    for path in (CHAT, "/v1/completions", "/completion"):
        status, answer = server.post(path, {"messages": HI, "prompt": "Hi"})
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert answer["error"].keys() >= {"code", "message", "type"}
    server.wait_idle()


# ---- Case 10: silence is filled with comments ----------------------------------------------------


def test_a_silent_stream_gets_its_head_at_once_and_comments_between_events(fake_server):
    """Prefill and each token take 2.2 s here; the second stream waits for the only slot."""
    server = fake_server(["A", "B"], "--sse-ping-interval", 0.5, "--parallel", 1, delay=2.2)
    with server.open_stream({"max_tokens": 2}) as (reader, status, headers):
        assert status == 200  # came without waiting for the prompt
        first = reader.chunk()
        assert first.startswith(b":") and first.endswith(b"\n\n")
        with server.open_stream({"max_tokens": 1}) as (queued, status, _):
            assert status == 200 and queued.chunk().startswith(b":")
            assert server.n_busy() == 1
            raw = first
            chunks = [first]
            while piece := reader.chunk():
                chunks.append(piece)
                raw += piece
        assert [json.loads(e)["choices"][0]["finish_reason"] for e in sse_data(raw)[:-1]][-1]
        comments = [i for i, piece in enumerate(chunks) if piece.startswith(b":")]
        tokens = [i for i, piece in enumerate(chunks) if b'"content":"' in piece]
        assert comments[0] < tokens[0], "none in prefill"
        assert any(tokens[0] < i < tokens[-1] for i in comments), "none between tokens"
        for piece in chunks:  # never inside an event
            assert piece.endswith(b"\n\n") and piece.startswith((b":", b"data: "))


def test_the_openai_client_reads_a_stream_with_comments(fake_server):
    server = fake_server(["A"], "--sse-ping-interval", 0.2, delay=1.3)
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="m", messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "A"


# ---- Case 11: nothing between the model and the client buffers -----------------------------------


def test_each_token_is_written_by_itself_with_headers_that_keep_proxies_from_buffering(fake_server):
    server = fake_server(list("abcdefgh"), delay=0.15)
    with server.connect() as sock:
        body = {"messages": HI, "stream": True}
        sock.sendall(http_request(CHAT, body, headers={"Accept-Encoding": "gzip, br"}))
        reader = Reader(sock)
        status, headers = reader.head()
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        assert headers["transfer-encoding"] == "chunked"
        assert "content-length" not in headers and "content-encoding" not in headers
        arrivals, texts = [], []
        while piece := reader.chunk():
            arrivals.append(time.monotonic())
            texts.append(re.findall(rb'"content":"([^"]+)"', piece))
    assert [text for text in texts if text] == [[b"%c" % c] for c in b"abcdefgh"]
    assert arrivals[-1] - arrivals[0] > 0.5 * 8 * 0.15, "everything came at once"


# ---- Case 12: a reader that stops reading --------------------------------------------------------


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("no /proc here")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1]) * 1024


def test_a_stalled_reader_takes_little_memory_harms_nobody_and_loses_its_slot(fake_server):
    server = fake_server(["x" * 1024], "--max-tokens-cap", 0, "-cs", 1_000_000, delay=0.0005)
    server.assert_alive()
    before = resident_bytes(server.process.pid)
    with server.connect(receive_buffer=4096) as stalled:
        body = {"messages": HI, "stream": True, "max_tokens": 200_000, "ignore_eos": True}
        stalled.sendall(http_request(CHAT, body))
        assert Reader(stalled).head()[0] == 200
        most = 0

        def is_free() -> bool:
            nonlocal most
            most = max(most, resident_bytes(server.process.pid))
            in_threads(lambda: server.ok(CHAT, {"messages": HI, "max_tokens": 3}))
            return server.n_busy() == 0

        eventually(is_free, "the stalled job was cancelled")
    assert most - before < 32 * 1024 * 1024
    server.assert_alive()

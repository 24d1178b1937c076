"""Anything at all to a running server: bytes to its port, and JSON bodies to every route.

Whatever comes, there is no 500, no traceback in the log, every refusal is JSON in the error
envelope (a 501 is one: of what is not supported), and afterwards the server is healthy and idle.
The budget here is fixed and the examples are the same in every run. For hours of new ones:

    FUZZ_EXAMPLES=100000 python -m pytest tests/test_fuzz.py

http11.py has fuzz tests of its own without sockets (test_http11_properties.py), and fuzz_http11.py
runs it under atheris, which looks for new paths through the code.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_process import HI, PATIENCE_S, http_request, sse_data

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import exl3_serve

N_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def budget(n):
    """So many examples, always the same; with FUZZ_EXAMPLES as many, new ones in every run."""
    return settings(max_examples=N_EXAMPLES or n, derandomize=not N_EXAMPLES, print_blob=True)


def check_error(status, body):
    """A refusal: in the envelope, and at the client's cost."""
    error = json.loads(body)["error"]
    assert error["code"] == status and isinstance(error["type"], str), body
    assert isinstance(error["message"], str) and "Traceback" not in error["message"], body
    # 501: a transfer coding that is not understood, or what this server or model does not have
    assert status < 500 or (status == 501 and error["type"] == "not_supported_error"), body


def strict_json(text):
    """JSON as the standard has it: without NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def check_events(raw):
    """A stream of JSON events, none of which is an error of ours."""
    for data in sse_data(raw):
        event = strict_json(data) if data != "[DONE]" else {}
        assert event.get("error", {}).get("code", 400) < 500, event


# ---- Bytes ---------------------------------------------------------------------------------------

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
SEEDS = [
    http_request("/health"),
    http_request("/props?a=%41&a", method="HEAD"),
    http_request("http://127.0.0.1/v1/models"),
    http_request("*", method="OPTIONS", headers={"Access-Control-Request-Headers": "x"}),
    http_request(CHAT, {"messages": HI, "max_tokens": 2}),
    http_request(CHAT, {"messages": HI, "max_tokens": 2, "stream": True}),
    http_request(COMPLETION, {"prompt": "ab", "n_predict": 2}, headers={"Expect": "100-continue"}),
    http_request("/v1/completions", {"prompt": [1, 2]}, headers={"X-Api-Key": "k"}),
    http_request("/tokenize", {"content": "é"}) + http_request("/slots"),
    http_request("/slots/0?action=save", {"filename": "a"}) + http_request("/metrics"),
    http_request("/tokenize", {"content": "a"}).replace(b"HTTP/1.1", b"HTTP/1.0"),
    b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'8\r\n{"tokens\r\n8;x=y\r\n": [97]}\r\n0\r\nX: y\r\n\r\n',
]
FRAGMENTS = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"%00", b"%", b"//", b"\r\n\r\n", b","),
    *(b"Content-Length: 3\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close\r\n", b"Host: evil.example\r\n"),
    *(b"Origin: null\r\n", b"Content-Encoding: gzip\r\n", b"Upgrade: h2c\r\n", b" folded\r\n"),
    *(b"Expect: 100-continue\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n", b"9" * 5000),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"HTTP/9.9", b"A" * 70_000),
]
INSERT, DELETE, REPEAT, CHANGE, CUT, SPLICE = range(6)
EDITS = st.lists(
    st.tuples(
        st.integers(INSERT, SPLICE),
        st.floats(0, 1),
        st.integers(1, 30),
        st.sampled_from(FRAGMENTS) | st.binary(min_size=1, max_size=4),
    ),
    max_size=5,
)
LAST = http_request("/health", headers={"Connection": "close"})


def edited(data, edits):
    for kind, place, n, piece in edits:
        at = int(place * len(data))
        before, here, after = data[:at], data[at : at + n], data[at + n :]
        match kind:
            case 0:
                data = before + piece + here + after
            case 1:
                data = before + after
            case 2:
                data = before + here + here + after
            case 3:
                data = before + piece[:n] + after
            case 4:
                data = before
            case 5:
                data = before + SEEDS[n % len(SEEDS)]
    return data


def sent_and_heard(server, data):
    """All that is answered to these bytes and one more request. Who would wait for more bytes is
    told after a moment that there are none."""
    with server.connect() as sock:
        heard = b""
        try:
            sock.sendall(data + LAST)
            sock.settimeout(0.02)
            while True:
                try:
                    piece = sock.recv(65536)
                except TimeoutError:
                    sock.settimeout(PATIENCE_S)
                    sock.shutdown(socket.SHUT_WR)
                    continue
                if not piece:
                    return heard
                heard += piece
        except (ConnectionError, OSError) as exc:
            assert not isinstance(exc, TimeoutError), f"not closed: {data!r}"
            return heard


def check_answers(raw):
    """Each answer in what a connection said; only a stream may be cut, by our own leaving."""
    while raw:
        head, mark, raw = raw.partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        assert match and mark, head
        status = int(match[1])
        if status == 100:
            continue
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length is None:  # a stream, or one to HTTP/1.0: the rest is its own
            return
        n = 0 if raw.startswith(b"HTTP/1.1 ") else int(length[1])  # that was HEAD
        body, raw = raw[:n], raw[n:]
        if status >= 400 and body:
            check_error(status, body)


@pytest.fixture
def short_server(fake_server):
    server = fake_server(None, "--max-tokens-cap", 8, "--metrics", think=True)
    yield server
    assert server.get("/health") == (200, {"status": "ok"})
    server.wait_idle()


def test_whatever_bytes_come_refusals_are_json_and_nothing_breaks(short_server):
    @given(st.sampled_from(SEEDS), EDITS)
    @example(SEEDS[0], [])
    @example(SEEDS[4], [(CHANGE, 0.0, 4, b"\x16\x03\x01")])  # TLS to a plain port
    @example(SEEDS[4], [(INSERT, 0.5, 1, b"Content-Length: 3\r\n")])
    @example(SEEDS[4], [(CUT, 0.9, 1, b"x")])
    @example(SEEDS[5], [(INSERT, 0.1, 1, b"A" * 70_000)])
    @example(SEEDS[11], [(INSERT, 0.7, 1, b"ffffffffffffffffff\r\n")])
    @example(SEEDS[11], [(INSERT, 0.2, 1, b"Content-Length: 3\r\n")])
    @example(SEEDS[9], [])
    @example(SEEDS[8], [(SPLICE, 0.3, 9, b"x")])
    @budget(450)
    def check(seed, edits):
        check_answers(sent_and_heard(short_server, edited(seed, edits)))

    check()


# ---- JSON ----------------------------------------------------------------------------------------


class Raw(str):
    """JSON as it is written, also where Python has no value for it."""


TWICE = "\0twice"  # ends the name of a member that is there a second time


def written(value):
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        names = ((json.dumps(name.removesuffix(TWICE)), member) for name, member in value.items())
        return "{" + ",".join(f"{name}:{written(member)}" for name, member in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": []},
    {"role": "tool", "content": "r", "tool_call_id": "x"},
]
SNIPPET = {"filename": "f", "text": "t"}
# Of every route bodies that it takes
GENERATION = {"n_predict": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": [[5, -1.5]]}
BODIES = {
    CHAT: [
        {"messages": HI, "max_tokens": 2},
        {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", "stream": True, "n": 2},
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"messages": HI, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1}},
    ],
    COMPLETION: [
        {"prompt": "ab"} | GENERATION,
        {"prompt": [["a", 98], "cd"], "n_probs": 2, "stream": True, "return_progress": True},
        {"prompt": "ab", "grammar": 'root ::= "a" | "b"', "n_predict": 2},
        {"prompt": "ab", "json_schema": SCHEMA, "n_predict": 2, "timings_per_token": True},
    ],
    "/v1/completions": [
        {"prompt": [97, 98], "max_tokens": 2, "logprobs": 1, "n": 2},
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/tokenize": [{"content": ["a", 98], "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [97, 98]}],
    "/apply-template": [{"messages": TALK, "tools": [TOOL]}],
    "/infill": [
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [SNIPPET], "prompt": "c"}
        | GENERATION,
        {"input_prefix": "a", "input_suffix": "b", "stream": True, "n_predict": 2},
    ],
    "/v1/chat/completions/input_tokens": [{"messages": TALK, "tools": [TOOL]}],
    "/v1/chat/completions/control": [{"id": "chatcmpl-x", "action": "reasoning_end"}],
    "/lora-adapters": [[], [{"id": 0, "scale": 0.5}]],
    "/slots/0": [{"filename": "a"}],
    "/v1/embeddings": [{"input": ["a"]}],
}
MORE_NAMES = """prompt stop logit_bias logprobs content tokens tool_choice role text type function
name parameters schema tool_calls reasoning_content model user id_slot add_special with_pieces
include_usage strict json_schema properties enum pattern $ref items minLength maximum
id action filename scale input""".split()
NAMES = sorted({*exl3_serve.FIELDS, *exl3_serve.ABSENT_SAMPLERS, *MORE_NAMES})
ODD = [
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e300, -1e300, 2**31, 2**63, -(2**63)),
    *(10**40, Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("1E+2"), Raw("9" * 5000), Raw("-0")),
    *("", "a", "\0", "\ud800", "\udc00x", "\ufeff", "\u2028", "é🦜", "a" * 3000, "<|im_end|>"),
    *("5", "-1", "auto", "user", "assistant", "<think>", 'root ::= "', "root ::= root", "{{ x }}"),
    *([], [[]], [None], [""], ["a", 1], [1e300], [[1, 2, 3]], [["a", False]], [-1], [2**31]),
    *({}, {"": None}, {"type": "object"}, {"a": {"b": []}}, {"5": -100}, {"$ref": "#"}, [{}]),
    *({"pattern": "(((a+)+)+"}, {"enum": []}, {"type": "json_schema"}, {"minLength": 10**9}),
    *(Raw("[" * 500 + "]" * 500), Raw("[" * 100_000), Raw('{"a":' * 500 + "1" + "}" * 500)),
    *(Raw('"\\ud83d"'), Raw("[1,]"), Raw("{'a': 1}"), Raw("/* */"), Raw("")),
]
FITTING = object()  # stands for a value at the edge of what the field may be
OBJECTS = [body for bodies in BODIES.values() for body in bodies if isinstance(body, dict)]
VALID = [value for body in OBJECTS for value in body.values()]
REPLACE, DELETE, DOUBLE, SET, SWAP = range(5)
CHANGES = st.lists(
    st.tuples(
        st.integers(REPLACE, SWAP),
        st.integers(0, 2**20),
        st.sampled_from(NAMES),
        st.just(FITTING)
        | st.sampled_from(ODD)
        | st.sampled_from(VALID)
        | st.integers()
        | st.floats()
        | st.text(),
    ),
    min_size=1,
    max_size=4,
)


def fitting(name, number):
    """A value of the field's type: about its least or its most, or a length that it may have."""
    kind, low, high, item = exl3_serve.FIELDS.get(name, (int, 0, 100, object))
    if isinstance(kind, tuple):
        return kind[number % len(kind)]
    low, high = max(low, -1e30), min(high, 1e30)
    if kind in (int, float):
        return kind([low, high, low - 1, high + 1, min(high, low + 2)][number % 5])
    if kind is list:
        items = {str: "a", dict: TOOL}.get(item, HI[0])
        return [items] * [0, 1, 2, int(min(high, 80)), int(min(high, 80)) + 1][number % 5]
    return {bool: bool(number % 2), dict: SCHEMA, str: "low"}[kind]


def places(value):
    """(container, key) of all that is inside a value, itself left out."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def changed(body, changes):
    body = json.loads(json.dumps(body))
    for kind, number, name, value in changes:
        value = fitting(name, number) if value is FITTING else value
        value = json.loads(json.dumps(value)) if isinstance(value, (dict, list)) else value
        found = list(places(body))
        container, key = found[number % len(found)] if found else (body, name)
        objects = [body, *(c[k] for c, k in found if isinstance(c[k], dict))]
        some_object = objects[number % len(objects)]  # or the list that is the whole body
        match kind:
            case 0 if found:
                container[key] = value
            case 1 if found:
                del container[key]
            case 2 if isinstance(container, dict):
                container[key + TWICE] = value
            case 4 if found:
                other, place = found[number // 7 % len(found)]
                if other[place] is not container and container[key] is not other:
                    copies = json.loads(json.dumps([container[key], other[place]]))
                    other[place], container[key] = copies
            case _ if isinstance(some_object, list):
                some_object.append(value)
            case _:
                some_object[name] = value
    return written(body).encode()


def ask_and_check(server, path, body):
    began = time.monotonic()
    status, headers, answer = server.request("POST", path, body)
    assert time.monotonic() - began < PATIENCE_S / 2
    if status != 200:
        check_error(status, answer)
    elif headers["content-type"].startswith("text/event-stream"):
        check_events(answer)
    else:
        strict_json(answer)


BODY = st.sampled_from([(path, body) for path, bodies in BODIES.items() for body in bodies])
NEST = {"a": Raw("[" * 900 + "]" * 900)}
EXAMPLES = [
    (CHAT, HI[0] | {"messages": HI, "chat_template_kwargs": NEST}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "schema": NEST}}),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}], "stream": True}),
    (CHAT, {"messages": HI, "n": 64, "logprobs": True, "top_logprobs": 100}),
    (COMPLETION, {"prompt": "a", "temperature": Raw("1e999")}),
    (COMPLETION, {"prompt": "a", "seed": Raw("9" * 5000)}),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": Raw("1e300")}}),
    (COMPLETION, {"prompt": "a", "grammar": "root ::= root"}),
    (COMPLETION, {"prompt": "a", "stop": ["a"] * 65}),
    (COMPLETION, {"prompt": [[]]}),
    ("/tokenize", {"content": Raw("[" * 100_000)}),
    ("/detokenize", {"tokens": [2**31]}),
]


def fuzz_json(server, n):
    for path, body in EXAMPLES:
        ask_and_check(server, path, written(body).encode())

    @given(BODY, CHANGES)
    @budget(n)
    def check(path_and_body, changes):
        path, body = path_and_body
        ask_and_check(server, path, changed(body, changes))

    check()
    assert server.get("/health") == (200, {"status": "ok"})
    server.wait_idle()


def test_whatever_json_comes_the_fake_engine_has_no_500(short_server):
    fuzz_json(short_server, 800)


def test_whatever_json_comes_the_real_engine_has_no_500(real_server):
    fuzz_json(real_server("-cs", 2048, "--parallel", 4, "--max-tokens-cap", 3), 150)

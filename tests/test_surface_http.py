"""HTTP as clients speak it: cases 55, 56, 58, 60, 62, 63 and 66 of the project's list of faults.

The limits and deadlines themselves are tested in test_http11.py; here is what needs the routes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import time

import pytest
from server_process import HI, Reader, http_request

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": HI}).encode()
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def server(fake_server):
    return fake_server(["x"])


@pytest.fixture
def guarded(fake_server):
    return fake_server(["x"], "--api-key", "secret")


def content_of(answer):
    status, _, body = answer
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


# ---- Case 55: chunked bodies ---------------------------------------------------------------------


def chunked_head(path=CHAT):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    return head.encode() + b"Trailer: X-Sum\r\n\r\n"


def test_a_chunked_body_is_read_whatever_its_chunks(server):
    with server.connect() as sock:
        for size in (1, 7, len(BODY)):
            chunks = [BODY[i : i + size] for i in range(0, len(BODY), size)]
            framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(c), c) for c in chunks)
            sock.sendall(chunked_head() + framed + b"0\r\nX-Sum: 1\r\n\r\n")
            assert content_of(Reader(sock).answer()) == "x"


def test_a_post_without_a_body_is_a_400_at_once(server):
    with server.connect() as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % CHAT.encode())
        status, _, body = Reader(sock).answer()
        assert status == 400 and json.loads(body)["error"]["code"] == 400
        sock.sendall(chunked_head() + b"0\r\n\r\n")
        assert Reader(sock).answer()[0] == 400
        sock.sendall(http_request("/health"))
        assert Reader(sock).answer()[0] == 200


# ---- Case 56: content types ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/json; charset=utf-8",
        "text/plain",
        "application/x-www-form-urlencoded",
        "APPLICATION/JSON",
        "nonsense",
    ],
)
def test_json_is_read_whatever_its_content_type(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert content_of(server.request("POST", CHAT, BODY, headers)) == "x"


def test_a_compressed_body_is_a_415_or_read(server):
    headers = {"Content-Encoding": "gzip"}
    status, _, body = server.request("POST", CHAT, gzip.compress(BODY), headers)
    assert status in (415, 200), body
    assert "valid JSON" not in body.decode()


# ---- Case 58: early refusals and the rest of the body --------------------------------------------

REFUSED = {
    "wrong-key": (CHAT, "POST", {"Authorization": "Bearer wrong"}, 300_000, 401),
    "unknown-path": ("/nowhere", "POST", KEY, 300_000, 404),
    "wrong-method": ("/health", "POST", KEY, 300_000, 405),
    "too-large": (CHAT, "POST", KEY, 10 * 1024**3, 413),
    "no-json": (CHAT, "POST", KEY, 300_000, 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_after_a_refusal_the_next_request_is_never_misread(guarded, name):
    """Drained and answered, or closed after an answer that can be read whole."""
    path, method, headers, size, expected = REFUSED[name]
    with guarded.connect() as sock:
        head = http_request(path, None, method, headers | {"Content-Length": str(size)})
        sock.sendall(head)
        with contextlib.suppress(ConnectionError):  # allowed only if a close was announced
            for _ in range(10):
                sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * (min(size, 1_000_000) // 10 - 16))
                time.sleep(0.01)
        reader = Reader(sock)
        status, fields, body = reader.answer()
        assert status == expected
        assert json.loads(body)["error"]["code"] == expected
        if "close" in fields.get("connection", "").lower():
            assert reader.rest() == b""
        else:
            sock.sendall(http_request("/health"))
            assert reader.answer()[0] == 200


def test_a_refusal_of_a_stream_keeps_the_connection_usable(guarded):
    with guarded.connect() as sock:
        reader = Reader(sock)
        for _ in range(3):
            body = {"messages": HI, "stream": True, "temperature": "hot"}
            sock.sendall(http_request(CHAT, body, headers=KEY))
            assert reader.answer()[0] == 400
        sock.sendall(http_request(CHAT, BODY, headers=KEY))
        assert content_of(reader.answer()) == "x"


# ---- Case 60: Expect: 100-continue ---------------------------------------------------------------


def expecting(size, version="1.1", expect="100-continue", **headers):
    fields = {"Host": "localhost", "Expect": expect, "Content-Length": str(size)} | headers
    lines = [f"POST {CHAT} HTTP/{version}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def test_a_client_that_expects_100_gets_it_and_then_its_answer(guarded):
    body = BODY + b" " * (2_000_000 - len(BODY))
    with guarded.connect() as sock:
        sock.sendall(expecting(len(body), **KEY))
        reader = Reader(sock)
        assert reader.head() == (100, {})
        sock.sendall(body)
        assert content_of(reader.answer()) == "x"


@pytest.mark.parametrize(
    ("size", "key", "status"), [(2_000_000, "wrong", 401), (10 * 1024**3, "secret", 413)]
)
def test_who_is_refused_is_not_told_to_continue(guarded, size, key, status):
    with guarded.connect() as sock:
        sock.sendall(expecting(size, Authorization=f"Bearer {key}"))
        reader = Reader(sock)
        answer = reader.answer()
        assert answer[0] == status and answer[1]["connection"] == "close"
        assert reader.rest() == b""


def test_http_1_0_gets_no_100(guarded):
    with guarded.connect() as sock:
        sock.sendall(expecting(len(BODY), version="1.0", **KEY) + BODY)
        reader = Reader(sock)
        status, headers = reader.head()
        assert status == 200 and "transfer-encoding" not in headers
        assert json.loads(reader.rest())["choices"]


def test_an_unknown_expectation_is_a_417_or_ignored(guarded):
    with guarded.connect() as sock:
        sock.sendall(expecting(len(BODY), expect="foo", **KEY) + BODY)
        assert Reader(sock).answer()[0] in (200, 417)


# ---- Case 62: slow senders -----------------------------------------------------------------------


def test_hundreds_of_silent_clients_do_not_keep_others_out(server):
    starts = [b""] * 200 + [b"GET /he"] * 50 + [http_request(CHAT, BODY)[:-10]] * 50
    with contextlib.ExitStack() as stack:
        for start in starts:
            stack.enter_context(server.connect()).sendall(start)
        assert server.chat().content == "x"
        assert server.get("/health")[0] == 200


# ---- Case 63: CORS -------------------------------------------------------------------------------

ORIGIN = {"Origin": "http://ui.example"}
ASKED = "authorization,content-type,x-api-key,anthropic-version,x-stainless-os"
PREFLIGHT = ORIGIN | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": ASKED,
}


def check_preflight(server):
    status, headers, _ = server.request("OPTIONS", CHAT, None, PREFLIGHT)
    assert status in (200, 204)
    assert headers["access-control-allow-origin"] in ("http://ui.example", "*")
    assert "POST" in headers["access-control-allow-methods"]
    allowed = headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(ASKED.split(",")) <= set(allowed)


def test_a_preflight_needs_no_key(guarded):
    check_preflight(guarded)


def test_a_preflight_is_answered_while_loading(own_server):
    server = own_server("--fake", "--api-key", "k", program="serve_faulty.py", FAULTY_LOAD_S="20")
    server.wait_listening()
    check_preflight(server)
    status, headers, _ = server.request("GET", "/health", None, ORIGIN)
    assert status == 503 and "access-control-allow-origin" in headers


def test_every_kind_of_answer_has_the_cors_headers(guarded, fake_server):
    breaking = fake_server([{"error": "planted"}], "--api-key", "secret")
    streaming = json.dumps({"messages": HI, "stream": True}).encode()
    for server, method, path, body, key, status in (
        (guarded, "POST", CHAT, BODY, {}, 401),
        (guarded, "GET", "/nowhere", None, KEY, 404),
        (guarded, "PUT", "/health", None, KEY, 405),
        (guarded, "POST", CHAT, b"{", KEY, 400),
        (guarded, "POST", CHAT, BODY, KEY, 200),
        (guarded, "POST", CHAT, streaming, KEY, 200),
        (breaking, "POST", CHAT, BODY, KEY, 500),
    ):
        code, headers, _ = server.request(method, path, body, ORIGIN | key)
        assert code == status
        assert headers["access-control-allow-origin"] in ("http://ui.example", "*"), (path, status)
        if headers["access-control-allow-origin"] != "*":
            assert "origin" in headers["vary"].lower()


def test_without_a_key_only_loopback_origins_are_served(server, fake_server):
    """Design, section 5: any web page could otherwise drive the model."""
    for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"):
        status, headers, _ = server.request("POST", CHAT, BODY, {"Origin": origin})
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
    for origin in ("http://ui.example", "null", "http://localhost.evil.example", "file://"):
        status, headers, body = server.request("POST", CHAT, BODY, {"Origin": origin})
        assert status == 403 and "access-control-allow-origin" not in headers
        assert json.loads(body)["error"]["code"] == 403
    wide = fake_server(["x"], "--cors-origins", "http://ui.example")
    status, headers, _ = wide.request("POST", CHAT, BODY, ORIGIN)
    assert (status, headers["access-control-allow-origin"]) == (200, "http://ui.example")


def test_without_a_key_only_loopback_host_names_are_served(server, fake_server):
    """Design, section 5: a web page may point its own name at 127.0.0.1 (DNS rebinding)."""
    for host in ("localhost", "localhost:80", "127.0.0.1:9", "[::1]:9", "LOCALHOST"):
        assert server.request("GET", "/health", None, {"Host": host})[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "localhost.", "a@localhost"):
        status = server.request("POST", CHAT, BODY, {"Host": host})[0]
        assert status == 403 or host in ("", "localhost."), host
    wide = fake_server(["x"], "--allowed-hosts", "box.lan")
    assert wide.request("GET", "/health", None, {"Host": "box.lan:80"})[0] == 200


# ---- Case 66: HEAD and wrong methods -------------------------------------------------------------


def test_head_is_get_without_its_body(server):
    with server.connect() as sock:
        reader = Reader(sock)
        for path in ("/health", "/v1/models", "/", "/nope", "/props", "/slots"):
            sock.sendall(http_request(path, method="HEAD"))
            status, headers = reader.head()
            sock.sendall(http_request(path))
            expected, fields, body = reader.answer()
            assert status == expected
            assert headers.keys() == fields.keys()
            assert headers["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/health", "GET"),
        ("DELETE", "/v1/models", "GET"),
        ("PATCH", "/completion", "POST"),
        ("POST", "/props", "GET"),
        ("HEAD", CHAT, "POST"),
    ],
)
def test_a_wrong_method_on_a_known_path_is_a_405_with_allow(server, method, path, allowed):
    with server.connect() as sock:
        sock.sendall(http_request(path, method=method))
        reader = Reader(sock)
        status, headers = reader.head()
        body = b"" if method == "HEAD" else reader.body(headers)
        assert status == 405 and allowed in headers["allow"].split(", ")
        assert headers["content-type"].startswith("application/json")
        if body:
            assert json.loads(body)["error"]["code"] == 405
        sock.sendall(http_request("/health"))
        assert reader.answer()[0] == 200


@pytest.mark.parametrize("path", ["//v1/chat/completions", CHAT + "/", CHAT + "?a=b&c"])
def test_double_and_trailing_slashes_and_queries_are_forgiven(server, path):
    with server.connect() as sock:
        sock.sendall(http_request(path, BODY))
        assert content_of(Reader(sock).answer()) == "x"


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/chat", "/health/x", "/%00", "/../props"])
def test_an_unknown_path_is_a_json_404(server, path):
    status, body = server.get(path)
    assert status == 404 and body["error"]["code"] == 404


def test_every_answer_says_who_answers(server):
    for path in ("/health", "/nowhere"):
        name = server.request("GET", path)[1]["server"]
        assert name.startswith("exl3-serve/") and " exllamav3/" in name

"""http11.py by the sections of its essay, over real sockets."""

from __future__ import annotations

import contextlib
import errno
import gc
import http.client
import os
import socket
import ssl
import struct
import subprocess
import time
import tracemalloc

import h11
import httpx
import pytest
from http_harness import (
    ScriptedApp,
    chunk,
    eventually,
    parse_head,
    read_all,
    read_answer,
    request,
    serving,
)

import http11

RST = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send a reset

# ---- Requests ----------------------------------------------------------------------------------


def make(head: bytes) -> http11.Request:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head)
    event = connection.next_event()
    assert isinstance(event, h11.Request)
    return http11.make_request(event)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", {}),
        ("/v1/models?a=1&b=%20x&a=2&c", "/v1/models", {"a": "2", "b": " x", "c": ""}),
        ("/a%2Fb%C3%A9", "/a/bé", {}),
        ("//v1//models/", "//v1//models/", {}),
        ("http://example.org:8080/p?q=1", "/p", {"q": "1"}),
        ("HTTP://example.org", "/", {}),
        ("https://example.org?q=1", "/", {"q": "1"}),
        ("*", "*", {}),
        ("foo", "foo", {}),
        ("/x?", "/x", {}),
        ("?", "/", {}),
        ("/%ff", "/�", {}),
    ],
)
def test_a_target_is_split_into_decoded_path_and_query(target, path, query):
    made = make(f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (made.path, made.query) == (path, query)


def test_the_authority_of_an_absolute_target_overrules_host():
    made = make(b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert made.headers["host"] == "evil.example"
    assert make(b"GET http:///x HTTP/1.1\r\nHost: localhost\r\n\r\n").headers["host"] == ""


def test_header_names_are_lower_case_and_duplicates_are_joined():
    made = make(b"GET / HTTP/1.0\r\nX-A: 1\r\nx-a:  2 \r\nX-B: \xe9\r\n\r\n")
    assert made.headers == {"x-a": "1, 2", "x-b": "é"}
    assert (made.method, made.body, made.context) == ("GET", b"", None)


# ---- Answers -----------------------------------------------------------------------------------


def test_an_answer_has_length_date_common_headers_and_stays_open():
    with serving() as served, served.connect() as sock:
        for body in (b"one", b"two"):
            sock.sendall(request("/echo", body))
            status, headers, answer = read_answer(sock)
            assert (status, answer, headers["content-length"]) == (200, body, "3")
            assert headers["server"] == "scripted" and "connection" not in headers
            assert headers["date"].endswith("GMT")


def test_connection_close_and_http_1_0_close_after_the_answer():
    with serving() as served:
        for head in (
            b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
            b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        ):
            status, headers = parse_head(served.exchange(head))
            assert (status, headers["connection"]) == (200, "close")


@pytest.mark.parametrize("path", ["/big?n=10", "/start", "/nothing"])
def test_head_is_get_without_a_body_and_keeps_the_connection(path):
    with serving() as served, served.connect() as sock:
        refused = {"x_refuse": "404"} if path == "/nothing" else {}
        sock.sendall(request(path, method="HEAD", **refused))
        if path == "/start":
            exchange = served.held()
            served.call(exchange.write, b"not sent")
            served.call(exchange.end, b"nor this")
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(1)
            assert parse_head(head)[1]["transfer-encoding"] == "chunked"
        else:
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(1)
            length = parse_head(head)[1]["content-length"]
            assert length == {"/big?n=10": "10", "/nothing": "7"}[path]
        sock.sendall(request("/echo", b"next"))
        assert read_answer(sock)[2] == b"next"


def test_204_has_neither_body_nor_length_and_keeps_the_connection():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/status?code=204") + request("/echo", b"next"))
        status, headers, _ = read_answer(sock)
        assert status == 204 and "content-length" not in headers
        assert read_answer(sock)[2] == b"next"
        sock.sendall(request("/start?code=204"))
        served.call(served.held().end)
        assert read_answer(sock)[0] == 204
        sock.sendall(request("/echo", b"next"))
        assert read_answer(sock)[2] == b"next"


def test_a_stream_is_chunked_for_1_1_and_raw_until_close_for_1_0():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/stream?dot", b"ab"))
        reply = b""
        while not reply.endswith(b"0\r\n\r\n"):
            reply += sock.recv(100)
        head, _, body = reply.partition(b"\r\n\r\n")
        assert body == b"1\r\na\r\n1\r\nb\r\n1\r\n.\r\n0\r\n\r\n"
        headers = parse_head(head)[1]
        assert headers["content-type"] == "text/event-stream"
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        assert headers["transfer-encoding"] == "chunked" and "content-length" not in headers
        sock.sendall(request("/echo", b"next"))
        assert read_answer(sock)[2] == b"next"
        reply = served.exchange(b"POST /stream HTTP/1.0\r\nContent-Length: 2\r\n\r\nab")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert body == b"ab" and parse_head(head)[1]["connection"] == "close"


def test_every_write_arrives_at_once_and_last_write_tells_when():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/start"))
        exchange = served.held()
        while not sock.recv(1000).endswith(b"\r\n\r\n"):
            pass
        before = exchange.last_write
        for piece in (b"first", b"second"):
            served.call(exchange.write, piece)
            assert sock.recv(1000) == chunk(piece)
        assert exchange.last_write > before
        served.call(exchange.end)
        served.call(exchange.end)  # complete: does nothing
        served.call(exchange.write, b"late")
        served.call(exchange.start, 200, [])
        served.call(exchange.respond, http11.Response(200))
        assert sock.recv(1000) == b"0\r\n\r\n"
        assert not exchange.gone and served.app.gone == []


def test_nodelay_is_set():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo"))
        read_answer(sock)
        connection = served.connection()
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_header_that_cannot_be_sent_is_the_apps_fault_and_injects_nothing(caplog):
    with serving() as served:
        reply = served.exchange(request("/bad-header"))
        assert reply.startswith(b"HTTP/1.1 500") and b"Set-Cookie" not in reply
    assert "Illegal header value" in caplog.text


def test_a_header_beyond_latin_1_is_replaced():
    class App(ScriptedApp):
        def common_headers(self, request):
            return [("X-Name", "é日")]

    with serving(App()) as served, served.connect() as sock:
        sock.sendall(request("/echo"))
        assert read_answer(sock)[1]["x-name"] == "é?"


# ---- Request bodies ----------------------------------------------------------------------------


def test_a_chunked_body_with_extension_and_trailer_is_put_together():
    with serving() as served, served.connect() as sock:
        chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in b"hello")
        sock.sendall(request("/echo", Transfer_Encoding="chunked", method="POST"))
        sock.sendall(chunks + b"0\r\nX-Trailer: 1\r\n\r\n")
        assert read_answer(sock)[2] == b"hello"
        sock.sendall(request("/echo", method="POST"))
        assert read_answer(sock)[2] == b""


def test_a_large_body_arrives_whole_and_fast():
    body = os.urandom(1 << 20) * 64
    with serving() as served, served.connect() as sock:
        started = time.perf_counter()
        sock.sendall(request("/status?code=200", body))
        assert read_answer(sock)[0] == 200
        assert served.app.requests[0].body == body
        assert time.perf_counter() - started < 5
        connection = served.connection()
        eventually(lambda: connection.request is None)  # and with it the body


def test_an_announced_body_over_the_limit_is_413_at_once_with_a_readable_reply():
    with serving(body_bytes=1000) as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="10000000000"))
        sock.sendall(b"x" * 1_000_000)
        reply = read_all(sock)
        assert reply.startswith(b"HTTP/1.1 413") and reply.endswith(b"limit of 1000 bytes")
        assert parse_head(reply.partition(b"\r\n\r\n")[0])[1]["connection"] == "close"
        assert served.app.requests == []


def test_a_chunked_body_is_413_as_soon_as_its_sum_passes_the_limit():
    with serving(body_bytes=1000) as served, served.connect() as sock:
        sock.sendall(request("/echo", Transfer_Encoding="chunked", method="POST"))
        sock.sendall(chunk(b"x" * 600))
        sock.sendall(chunk(b"x" * 401))
        assert read_all(sock).startswith(b"HTTP/1.1 413")
        assert served.app.requests == []
        assert served.exchange(request("/echo", b"x" * 1000, Connection="close")).startswith(
            b"HTTP/1.1 200"
        )


# ---- Early refusal (case 58) -------------------------------------------------------------------


@pytest.mark.parametrize("status", ["401", "404", "405"])
def test_a_refused_body_is_drained_and_the_next_request_is_read_right(status):
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="300000", x_refuse=status))
        for _ in range(30):
            sock.sendall(b"GET /phantom HTTP/1.1\r\n\r\n".ljust(10000, b"x"))
        sock.sendall(request("/echo", b"next"))
        answer = read_answer(sock)
        assert (answer[0], answer[2]) == (int(status), b"refused")
        assert "connection" not in answer[1]
        assert read_answer(sock)[2] == b"next"
        assert [r.path for r in served.app.requests] == ["/echo"]
        assert len(served.app.heads) == 2


def test_a_request_with_two_lengths_is_refused_and_the_connection_closed():
    with serving() as served:
        both = request("/echo", method="POST", Content_Length="5", Transfer_Encoding="chunked")
        reply = served.exchange(both + b"0\r\n\r\n" + request("/echo", b"phantom"))
        assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1") == 1
        assert served.app.requests == []


def test_a_refused_chunked_body_is_drained_too():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Transfer_Encoding="chunked", x_refuse="401"))
        sock.sendall(chunk(b"GET /phantom HTTP/1.1\r\n\r\n" * 1000) + b"0\r\n\r\n")
        sock.sendall(request("/echo", b"next"))
        assert read_answer(sock)[0] == 401
        assert read_answer(sock)[2] == b"next"
        assert [r.path for r in served.app.requests] == ["/echo"]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"Content_Length": "10000000"}, b"x" * 500_000),
        ({"Transfer_Encoding": "chunked"}, chunk(b"x" * 2_000_000)),  # too large
        ({"Transfer_Encoding": "chunked"}, b"no chunk\r\n"),
    ],
)
def test_a_refused_body_that_cannot_be_drained_closes_with_a_readable_reply(header, body):
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", x_refuse="401", **header))
        sock.sendall(body)
        reply = read_all(sock)
        assert reply.endswith(b"refused")
        assert parse_head(reply.partition(b"\r\n\r\n")[0])[1]["connection"] == "close"
        sock.sendall(b"x" * 500_000)
        eventually(lambda: sock.close() or not served.server.connections)


def test_a_refused_body_that_comes_too_late_gets_the_refusal():
    with serving(body_timeout=0.1) as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="5", x_refuse="401"))
        assert read_all(sock).startswith(b"HTTP/1.1 401")
        assert served.app.requests == []


def test_a_client_that_ignores_the_close_is_cut_after_the_linger_time():
    with serving(linger_timeout=0.1) as served, served.connect() as sock:
        sock.sendall(request("/echo", Connection="close"))
        assert read_all(sock)
        eventually(lambda: not served.server.connections)


def test_a_client_that_keeps_sending_is_cut_after_the_linger_time():
    with serving(linger_timeout=0.1) as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="100000000000"))
        with pytest.raises(OSError, match=r"reset|pipe|abort"):
            while True:
                sock.sendall(b"x" * 100_000)


# ---- Expect: 100-continue (case 60) ------------------------------------------------------------


def test_100_continue_comes_before_the_body_is_sent():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="5", Expect="100-continue"))
        assert sock.recv(1000) == b"HTTP/1.1 100 \r\n\r\n"
        sock.sendall(b"hello")
        assert read_answer(sock)[2] == b"hello"


def test_a_refused_expectation_gets_the_final_status_and_a_close():
    with serving(body_bytes=1000) as served:
        for status, headers in (
            (401, {"x_refuse": "401", "Content_Length": "5"}),
            (413, {"Content_Length": "2000"}),
        ):
            reply = served.exchange(request("/", method="POST", Expect="100-continue", **headers))
            answered, fields = parse_head(reply.partition(b"\r\n\r\n")[0])
            assert (answered, fields["connection"]) == (status, "close")
        assert served.app.requests == []


def test_1_0_gets_no_100_and_an_unknown_expectation_is_ignored():
    with serving() as served:
        head = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
        assert served.exchange(head).startswith(b"HTTP/1.1 200")
        reply = served.exchange(request("/", b"x", Expect="foo", Connection="close"))
        assert reply.startswith(b"HTTP/1.1 200")


# ---- Pipelining --------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order_also_when_the_first_is_slow():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/hold") + request("/echo", b"2") + request("/echo", b"3"))
        exchange = served.held()
        assert len(served.app.requests) == 1
        served.call(exchange.respond, http11.Response(200, b"1"))
        assert [read_answer(sock)[2] for _ in range(3)] == [b"1", b"2", b"3"]


def test_what_is_read_ahead_of_an_answer_is_bounded():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/hold"))
        exchange = served.held()
        connection = served.connection()
        pipelined = request("/echo", b"x" * 1_000_000) + request("/echo", b"last")
        sock.setblocking(False)
        sent = 0
        while connection.transport.is_reading():
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(pipelined[sent : sent + 10000])
        ahead = len(connection.h11.trailing_data[0])
        assert ahead <= http11.READ_AHEAD_BYTES + http11.READ_BYTES
        sock.settimeout(10)
        served.call(exchange.respond, http11.Response(200, b"1"))
        assert read_answer(sock)[2] == b"1"
        sock.sendall(pipelined[sent:])
        assert read_answer(sock)[2] == b"x" * 1_000_000
        assert read_answer(sock)[2] == b"last"


def test_a_client_that_pipelines_without_reading_is_not_served_on():
    with serving() as served, served.connect(receive_buffer=4096) as sock:
        n_requests, size = 300, 100_000
        sock.sendall(request(f"/big?n={size}") * n_requests)
        connection = served.connection()
        eventually(lambda: not connection.transport.is_reading(), "reading paused")
        assert served.call(connection.transport.get_write_buffer_size) < 4 * size
        assert len(served.app.requests) < n_requests
        for _ in range(n_requests):
            assert len(read_answer(sock)[2]) == size


def test_a_waiting_pipelined_request_starts_when_the_client_goes_on_reading_a_stream():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/start") + request("/echo", b"next"))
        exchange = served.held()
        served.call(exchange.end, b"x" * 20_000_000)
        while not (data := sock.recv(1 << 20)).endswith(b"next"):
            assert data


# ---- Anything that is not HTTP -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000, 431),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nrest", 405),
    ],
)
def test_a_protocol_error_is_answered_in_the_apps_form_and_closed(sent, status):
    with serving() as served:
        reply = served.exchange(sent + (b"" if status != 405 else request("/", Connection="close")))
        assert reply.startswith(b"HTTP/1.1 %d " % status) and b"X-Error: yes" in reply
        assert b"Connection: close" in reply
        assert status == 405 or served.app.requests == []


def test_an_upgrade_is_ignored():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", Upgrade="websocket", Connection="upgrade"))
        assert read_answer(sock)[0] == 200
        sock.sendall(request("/echo", b"next"))
        assert read_answer(sock)[2] == b"next"


# ---- Faults of the app -------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/raise", "/raise-head", "/bad-refusal"])
def test_an_exception_before_the_answer_is_logged_and_a_500(path, caplog):
    with serving() as served:
        reply = served.exchange(request(path, b"secret", Authorization="Bearer secret"))
        assert reply.startswith(b"HTTP/1.1 500") and b"planted" not in reply
    assert ("planted" in caplog.text or path == "/bad-refusal") and "secret" not in caplog.text


def test_an_exception_within_an_answer_is_logged_and_a_drop(caplog):
    with serving() as served:
        reply = b""
        with contextlib.suppress(ConnectionResetError):
            reply = served.exchange(request("/raise-within"))
        assert not reply.endswith(b"0\r\n\r\n")
        eventually(lambda: served.app.gone)
    assert "planted within" in caplog.text


# ---- A vanished client -------------------------------------------------------------------------


def leave(sock: socket.socket, how: str) -> None:
    if how == "RST":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
    if how == "half-close":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()


def test_the_app_hears_once_of_the_end_of_each_request_with_what_was_answered():
    with serving() as served:
        with served.connect() as sock:
            for path, fields in (("/echo", {}), ("/echo", {"x_refuse": "401"}), ("/raise", {})):
                sock.sendall(request(path, **fields))
                read_answer(sock)
        with served.connect() as sock:
            sock.sendall(request("/body", b"half")[:-2])
            eventually(lambda: len(served.app.heads) == 4)
        with served.connect() as sock:
            sock.sendall(request("/start"))
            eventually(lambda: served.app.held)
        with served.connect() as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            read_answer(sock)
        eventually(lambda: len(served.app.done) == 6)
    ends = {("/body", 400), ("/start", 499), (None, 400)}
    assert served.app.done[:3] == [("/echo", 200), ("/echo", 401), ("/raise", 500)]
    assert set(served.app.done[3:]) == ends
    assert {head.peer for head in served.app.heads} == {"127.0.0.1"}


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
@pytest.mark.parametrize("path", ["/hold", "/start"])
def test_a_client_that_leaves_while_an_answer_is_due_is_noticed_once(how, path):
    with serving() as served:
        sock = served.connect()
        sock.sendall(request(path, b"body"))
        exchange = served.held()
        leave(sock, how)
        eventually(lambda: exchange.gone)
        assert served.app.gone == [exchange]
        served.call(exchange.start, 200, [])
        served.call(exchange.write, b"x")
        served.call(exchange.end, b"x")
        served.call(exchange.respond, http11.Response(200))
        eventually(lambda: not served.server.connections)
        assert served.app.gone == [exchange]
        sock.close()


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
def test_a_client_may_leave_after_any_byte_of_its_request(how):
    whole = request("/hold", b"body")
    with serving(linger_timeout=0.1) as served:
        for n in range(len(whole)):
            with served.connect() as sock:
                sock.sendall(whole[:n])
                leave(sock, how)
        eventually(lambda: not served.server.connections)
        assert served.app.requests == [] and served.app.gone == []


def test_a_body_cut_by_a_half_close_is_400():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/hold", b"body")[:-1])
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_what_was_answered_at_once_reaches_a_client_that_half_closed():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/big?n=3000000") + request("/echo", b"x") * 50)
        sock.shutdown(socket.SHUT_WR)
        reply = read_all(sock)
        assert reply.count(b"HTTP/1.1 200") == 51 and len(reply) > 3_000_000


def test_a_request_whose_fin_came_before_it_was_read_is_gone_at_once():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/echo", b"x") * 50 + request("/hold"))
        sock.shutdown(socket.SHUT_WR)
        exchange = served.held()
        eventually(lambda: exchange.gone)
        assert served.app.gone == [exchange]


def test_a_client_that_leaves_is_noticed_also_after_it_was_slow_to_read_an_earlier_answer():
    with serving() as served, served.connect(receive_buffer=4096) as sock:
        sock.sendall(request("/big?n=20000000") + request("/hold"))
        connection = served.connection()
        eventually(lambda: not connection.transport.is_reading(), "reading paused")
        assert len(read_answer(sock)[2]) == 20_000_000
        exchange = served.held()
        sock.close()
        eventually(lambda: exchange.gone)
        assert served.app.gone == [exchange]


def test_a_client_without_on_gone_may_leave_too():
    class App(ScriptedApp):
        def on_request(self, exchange):
            self.held.append(exchange)

    with serving(App()) as served:
        sock = served.connect()
        sock.sendall(request("/hold"))
        exchange = served.held()
        sock.close()
        eventually(lambda: exchange.gone)


# ---- A slow reader (case 12) -------------------------------------------------------------------


def test_a_stalled_reader_is_cut_by_the_bound_while_others_are_served():
    with serving(write_bytes=100_000) as served, served.connect(receive_buffer=4096) as sock:
        sock.sendall(request("/start"))
        exchange = served.held()
        n_sent = 0
        while not exchange.gone:
            served.call(exchange.write, b"x" * 1000)
            n_sent += 1000
            assert n_sent < 50_000_000
        with served.connect() as other:
            other.sendall(request("/echo", b"fine"))
            assert read_answer(other)[2] == b"fine"
        eventually(lambda: served.app.gone)
        assert served.app.gone == [exchange]


def test_a_stalled_reader_is_cut_by_the_write_timeout():
    with serving(write_timeout=0.2) as served, served.connect(receive_buffer=4096) as sock:
        sock.sendall(request("/start"))
        exchange = served.held()
        served.call(exchange.write, b"x" * 20_000_000)
        eventually(lambda: exchange.gone)
        assert served.app.gone == [exchange]


def read_slowly(sock):
    """Bytes received until the server closes; slowly in the first second."""
    received, started = 0, time.monotonic()
    while piece := sock.recv(1 << 20):
        received += len(piece)
        time.sleep(0.01 if time.monotonic() - started < 1 else 0)
    return received


def test_a_slow_reader_that_goes_on_reading_is_not_cut():
    limits = {"write_timeout": 0.3, "idle_timeout": 0.1, "linger_timeout": 0.1}
    with serving(**limits) as served, served.connect(receive_buffer=200_000) as sock:
        sock.sendall(request("/big?n=30000000", Connection="close"))
        assert read_slowly(sock) > 30_000_000


def test_a_body_larger_than_the_bound_is_one_answer_not_a_stall():
    with serving(write_bytes=1000) as served, served.connect() as sock:
        sock.sendall(request("/big?n=30000000"))
        assert len(read_answer(sock)[2]) == 30_000_000


# ---- A slow sender (case 62) -------------------------------------------------------------------


def drip(sock: socket.socket, data: bytes) -> bytes:
    """Sends a byte at a time until the server answers; returns what it says until it closes."""
    sock.settimeout(0.02)
    for byte in data:
        with contextlib.suppress(TimeoutError):
            sock.sendall(b"%c" % byte)
            if first := sock.recv(1000):
                sock.settimeout(10)
                return first + read_all(sock)
            return b""
    raise AssertionError("never answered")


def test_a_head_that_never_ends_is_408_however_it_drips():
    with serving(header_timeout=0.3) as served, served.connect() as sock:
        reply = drip(sock, request("/echo", X_Padding="x" * 10000))
        assert reply.startswith(b"HTTP/1.1 408")


def test_a_body_that_drips_is_408():
    with serving(body_timeout=0.3) as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="10000"))
        assert drip(sock, b"x" * 10000).startswith(b"HTTP/1.1 408")
        assert served.app.requests == []


def test_a_body_that_keeps_the_rate_may_take_longer_than_the_timeout():
    with serving(body_timeout=0.1, body_rate=1000) as served, served.connect() as sock:
        sock.sendall(request("/echo", method="POST", Content_Length="5000"))
        for _ in range(5):
            sock.sendall(b"x" * 1000)
            time.sleep(0.1)  # the slow sender: 0.5 s in all
        assert len(read_answer(sock)[2]) == 5000


def test_silent_and_idle_connections_are_closed_without_a_word():
    with serving(header_timeout=0.1, idle_timeout=0.1) as served:
        assert served.exchange(b"") == b""
        with served.connect() as sock:
            sock.sendall(request("/echo"))
            assert read_answer(sock)[0] == 200
            assert read_all(sock) == b""


def test_no_deadline_hits_an_answer_that_is_due():
    tiny = {"header_timeout": 0.05, "body_timeout": 0.05, "idle_timeout": 0.05}
    with serving(**tiny, write_timeout=0.05) as served, served.connect() as sock:
        sock.sendall(request("/hold"))
        exchange = served.held()
        time.sleep(0.3)  # six times every deadline
        served.call(exchange.respond, http11.Response(200, b"late"))
        assert read_answer(sock)[2] == b"late"


# ---- Server ------------------------------------------------------------------------------------


def test_over_the_cap_a_connection_gets_503_and_a_close():
    with serving(connections=2) as served:
        with served.connect() as one, served.connect() as two:
            for sock in (one, two):
                sock.sendall(request("/echo"))
                assert read_answer(sock)[0] == 200
            assert served.exchange(b"").startswith(b"HTTP/1.1 503")
            eventually(lambda: len(served.server.connections) == 2)
        eventually(lambda: not served.server.connections)
        assert served.exchange(request("/", Connection="close")).startswith(b"HTTP/1.1 200")


def test_a_stop_closes_listener_and_idle_lets_answers_finish_and_says_close():
    with serving() as served:
        idle, half, busy, streaming = (served.connect() for _ in range(4))
        idle.sendall(request("/echo"))
        assert read_answer(idle)[0] == 200
        half.sendall(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nha")
        busy.sendall(request("/hold"))
        held = served.held()
        streaming.sendall(request("/start"))
        stream = served.held()
        eventually(lambda: len(served.app.heads) == 4)
        served.call(served.server.stop_accepting)
        with pytest.raises(ConnectionRefusedError):
            served.connect()
        assert read_all(idle) == b""
        assert not served.wait_idle(0.05)
        served.call(held.respond, http11.Response(200, b"done"))
        head, _, body = read_all(busy).partition(b"\r\n\r\n")
        assert body == b"done" and parse_head(head)[1]["connection"] == "close"
        served.call(stream.end, b"bye")
        assert read_all(streaming).endswith(b"bye\r\n0\r\n\r\n")
        half.sendall(b"lf")
        assert b"Connection: close" in read_all(half)
        assert served.wait_idle(5)
        for sock in (idle, half, busy, streaming):
            sock.close()


def test_closing_the_server_drops_what_is_left_and_tells_the_app():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/start"))
        exchange = served.held()
        served.call(served.server.close)
        eventually(lambda: exchange.gone)
        assert served.app.gone == [exchange]
        with contextlib.suppress(ConnectionResetError):
            assert not read_all(sock).endswith(b"0\r\n\r\n")


def test_wait_idle_waits_for_unread_bytes_of_complete_answers():
    with serving() as served, served.connect() as sock:
        sock.sendall(request("/big?n=20000000"))
        eventually(lambda: served.app.requests)
        assert not served.wait_idle(0.05)
        assert len(read_answer(sock)[2]) == 20_000_000
        assert served.wait_idle(5)


def test_a_reset_between_the_last_write_and_the_half_close_is_harmless(monkeypatch):
    with serving(linger_timeout=0.1) as served, served.connect() as sock:
        sock.sendall(request("/hold", Connection="close"))
        exchange = served.held()
        connection = served.connection()

        def reset() -> None:
            raise OSError(errno.ENOTCONN, "not connected")

        monkeypatch.setattr(connection.transport, "write_eof", reset)
        served.call(exchange.respond, http11.Response(200))
        assert read_all(sock)
        eventually(lambda: not served.server.connections)


def test_an_idle_connection_costs_less_than_8_kib():
    with serving() as served:
        socks = [served.connect() for _ in range(10)]  # warm up
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            socks += [served.connect() for _ in range(200)]
            for sock in socks:
                sock.sendall(request("/echo", b"x" * 100_000))
            for sock in socks:
                read_answer(sock)
            served.app.requests.clear()
            served.app.heads.clear()
            eventually(lambda: len(served.server.connections) == 210)
            gc.collect()
            used = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        for sock in socks:
            sock.close()
        assert used / 200 < 8192


# ---- TLS ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tls_contexts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += (
        " -keyout key.pem -out cert.pem -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except OSError:
        pytest.skip("no openssl command")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=folder / "cert.pem")


@contextlib.contextmanager
def serving_tls(contexts, **limits):
    """A server with TLS, and a function that connects to it."""
    with serving(tls=contexts[0], **limits) as served:

        def connect(receive_buffer: int | None = None) -> ssl.SSLSocket:
            plain = served.connect(receive_buffer)
            return contexts[1].wrap_socket(plain, server_hostname="localhost")

        yield served, connect


def test_tls_keeps_the_connection_and_streams_each_write_at_once(tls_contexts):
    with serving_tls(tls_contexts) as (served, connect), connect() as sock:
        for body in (b"1", b"x" * 3_000_000, b"2"):
            sock.sendall(request("/echo", body))
            assert read_answer(sock)[2] == body
        sock.sendall(request("/echo", b"3") + request("/start"))
        assert read_answer(sock)[2] == b"3"
        exchange = served.held()
        while not sock.recv(1000).endswith(b"\r\n\r\n"):
            pass
        for piece in (b"first", b"second"):
            served.call(exchange.write, piece)
            assert sock.recv(1000) == chunk(piece)
        served.call(exchange.end)
        assert sock.recv(1000) == b"0\r\n\r\n"
        sock.sendall(request("/stream", b"ab", Connection="close"))
        assert read_all(sock).endswith(b"0\r\n\r\n")


def test_tls_lingers_without_a_half_close(tls_contexts):
    limits = {"body_bytes": 1000, "linger_timeout": 0.3, "write_timeout": 0.3}
    with serving_tls(tls_contexts, **limits) as (served, connect):
        with connect() as sock:  # refused early: readable in full, then closed
            sock.sendall(request("/echo", method="POST", Content_Length="100000"))
            sock.sendall(b"x" * 50_000)
            assert read_all(sock).startswith(b"HTTP/1.1 413")
        with connect() as sock:  # says neither goodbye nor anything else
            sock.sendall(request("/echo", b"1", Connection="close"))
            assert read_answer(sock)[2] == b"1"
            eventually(lambda: not served.server.connections)
        with connect() as sock:  # goodbye to an idle connection
            sock.sendall(request("/echo", b"1"))
            assert read_answer(sock)[2] == b"1"
            with contextlib.suppress(OSError):
                sock.unwrap()
            eventually(lambda: not served.server.connections)


def test_a_slow_tls_reader_gets_all_of_a_last_answer(tls_contexts):
    limits = {"idle_timeout": 0.1, "linger_timeout": 0.1}
    with serving_tls(tls_contexts, **limits) as (_, connect), connect(200_000) as sock:
        sock.sendall(request("/big?n=30000000", Connection="close"))
        assert read_slowly(sock) > 30_000_000


@pytest.mark.parametrize("path", ["/hold", "/start"])
@pytest.mark.parametrize("how", ["FIN", "RST", "half-close", "goodbye"])
def test_a_tls_client_that_leaves_is_noticed_once(how, path, tls_contexts):
    with serving_tls(tls_contexts) as (served, connect):
        sock = connect()
        sock.sendall(request(path, b"body"))
        exchange = served.held()
        if how == "goodbye":
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.unwrap()
        else:
            leave(sock, how)
        eventually(lambda: exchange.gone)
        served.call(exchange.write, b"x")
        eventually(lambda: not served.server.connections)
        assert served.app.gone == [exchange]
        sock.close()


def test_a_stalled_tls_reader_is_cut(tls_contexts):
    with serving_tls(tls_contexts, write_timeout=0.2) as (served, connect):
        with connect(receive_buffer=4096) as sock:
            sock.sendall(request("/start"))
            exchange = served.held()
            served.call(exchange.write, b"x" * 20_000_000)
            eventually(lambda: exchange.gone or served.call(exchange.write, b"x"))
            assert served.app.gone == [exchange]


def test_who_does_not_finish_the_handshake_is_cut_and_speaks_to_no_app(tls_contexts):
    with serving_tls(tls_contexts, header_timeout=0.1) as (served, _):
        assert served.exchange(b"") == b""
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in served.exchange(request("/echo"))
        assert served.app.heads == []
    with serving_tls(tls_contexts) as (served, _):
        with pytest.raises(ssl.SSLCertVerificationError), served.connect() as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
        assert served.app.heads == []


def test_a_tls_client_that_says_no_goodbye_is_dropped_at_the_end(tls_contexts):
    with serving_tls(tls_contexts) as (served, connect), connect() as idle:
        idle.sendall(request("/echo"))
        assert read_answer(idle)[0] == 200
        for _ in range(2):  # nothing is closed twice
            served.call(served.server.stop_accepting)
        served.call(served.server.close)
        eventually(lambda: not served.server.connections)


def test_a_stop_over_tls_closes_idle_and_finishes_what_runs(tls_contexts):
    with serving_tls(tls_contexts) as (served, connect), connect() as idle, connect() as busy:
        idle.sendall(request("/echo"))
        assert read_answer(idle)[0] == 200
        busy.sendall(request("/hold"))
        exchange = served.held()
        served.call(served.server.stop_accepting)
        assert read_all(idle) == b""
        served.call(exchange.respond, http11.Response(200, b"done"))
        status, headers, body = read_answer(busy)
        assert (status, headers["connection"], body) == (200, "close", b"done")
        assert served.wait_idle(5)


# ---- Listening (case 75) -----------------------------------------------------------------------


def closing(sockets: list[socket.socket]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for sock in sockets:
        stack.enter_context(sock)
    return stack


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no ::1 on this machine")


def test_a_bound_port_accepts_before_anything_is_served_and_only_one_server():
    sockets = http11.bind("127.0.0.1", 0)
    with closing(sockets):
        port = sockets[0].getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError, match=rf"127\.0\.0\.1 port {port}: .*Address already in use"):
            http11.bind("127.0.0.1", port)
        with pytest.raises(OSError, match="Address already in use"):
            http11.bind("localhost", port)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6_hosts(host):
    sockets = http11.bind(host, 0)
    with closing(sockets):
        port = sockets[0].getsockname()[1]
        socket.create_connection(("::1", port), 5).close()
        if host == "::":
            socket.create_connection(("127.0.0.1", port), 5).close()


@needs_ipv6
def test_localhost_is_both_loopbacks_on_one_port_or_an_error():
    sockets = http11.bind("localhost", 0)
    with closing(sockets):
        addresses = [sock.getsockname()[:2] for sock in sockets]
        port = addresses[0][1]
        assert addresses == [("127.0.0.1", port), ("::1", port)]
    taken = socket.create_server(("::1", port), family=socket.AF_INET6)
    with taken, pytest.raises(OSError, match="Address already in use"):
        http11.bind("localhost", port)
    with closing(http11.bind("localhost", port)):  # the failed attempt left nothing bound
        pass


@pytest.mark.parametrize("missing", ["127.0.0.1", "::1"])
def test_localhost_needs_no_ipv6(missing, monkeypatch):
    real = socket.create_server

    def create_server(address, **options):
        if address[0] == missing:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(("127.0.0.1", address[1]), **{**options, "family": socket.AF_INET})

    monkeypatch.setattr(socket, "create_server", create_server)
    if missing == "127.0.0.1":
        with pytest.raises(OSError, match="Cannot assign"):
            http11.bind("localhost", 0)
    else:
        sockets = http11.bind("localhost", 0)
        with closing(sockets):
            assert len(sockets) == 1


@pytest.mark.parametrize(
    ("host", "port"), [("no-such-host.invalid", 80), ("127.0.0.1", 70000), ("a" * 70 + ".b", 80)]
)
def test_an_impossible_address_is_one_oserror_that_names_it(host, port):
    with pytest.raises(OSError, match=f"cannot listen on {host} port {port}: ."):
        http11.bind(host, port)


def test_a_dead_socket_file_is_replaced_a_live_one_and_other_files_never(tmp_path):
    path = tmp_path / "s.sock"
    first = http11.bind(str(path), 0)
    with closing(first), pytest.raises(OSError, match=r"s\.sock.*in use"):
        http11.bind(str(path), 0)
    assert path.is_socket()  # as after kill -9
    with closing(http11.bind(str(path), 0)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    path.unlink()
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        http11.bind(str(path), 0)
    assert path.read_text() == "precious"
    with pytest.raises(OSError, match="too long"):
        http11.bind("/tmp/" + "x" * 200 + ".sock", 0)


def test_without_unix_sockets_a_path_is_an_oserror(monkeypatch):
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(OSError, match=r"x\.sock"):
        http11.bind("x.sock", 0)


def test_a_unix_socket_is_served_and_its_file_removed(tmp_path):
    path = tmp_path / "s.sock"
    with serving(host=str(path)) as served:
        with served.connect() as sock:
            sock.sendall(request("/echo", b"x"))
            assert read_answer(sock)[2] == b"x"
        served.call(served.server.stop_accepting)
        assert not path.exists()


# ---- Other people's clients --------------------------------------------------------------------


def test_httpx_and_http_client_agree_with_us():
    with serving() as served:
        host, port = served.address
        with httpx.Client(base_url=f"http://{host}:{port}") as client:
            for n in (0, 1, 1000, 1_000_000):
                body = os.urandom(n)
                assert client.post("/echo", content=body).content == body
                assert client.post("/echo", content=iter([body, b"!"])).content == body + b"!"
            assert client.post("/stream?dot", content=b"abc" * 100).content == b"abc" * 100 + b"."
            assert client.head("/big?n=5").headers["content-length"] == "5"
            assert client.get("/big?n=5", headers={"x-refuse": "404"}).status_code == 404
            assert len(served.server.connections) == 1
        connection = http.client.HTTPConnection(host, port, timeout=10)
        for body in (b"", b"x" * 100_000):
            connection.request("POST", "/stream", body)
            assert connection.getresponse().read() == body
        connection.close()

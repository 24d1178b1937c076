"""A real Server on a random port in a thread of its own, with an app that does what its path says.

Tests talk to it with blocking sockets. Whatever reaches the loop's exception handler is kept in
`loop_errors`; leaving the `serving` block asserts that there was none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import http11

PATIENCE_S = 10.0  # how long a test polls before it fails


def eventually(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Polls until the condition is true and returns its value."""
    give_up = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not in {PATIENCE_S} s: {what}"
        time.sleep(0.002)
    return value


class ScriptedApp:
    """Answers by path; `x-refuse: 401` refuses in on_head. Notes all it is asked."""

    def __init__(self) -> None:
        self.heads: list[http11.Request] = []
        self.requests: list[http11.Request] = []
        self.held: list[http11.Exchange] = []
        self.gone: list[http11.Exchange] = []
        self.done: list[tuple[str | None, int]] = []

    def on_head(self, request: http11.Request) -> http11.Response | None:
        self.heads.append(request)
        if request.path == "/raise-head":
            raise RuntimeError("planted in on_head")
        if request.path == "/bad-refusal":
            return http11.Response(403, b"", [("X-Bad", "a\r\nSet-Cookie: b")])
        if "x-refuse" in request.headers:
            return self.error(int(request.headers["x-refuse"]), "refused", request)
        if request.method == "CONNECT":
            return self.error(405, "no proxy", request)
        return None

    def on_request(self, exchange: http11.Exchange) -> None:
        request = exchange.request
        self.requests.append(request)
        exchange.on_gone = lambda: self.gone.append(exchange)
        handler = getattr(self, "do_" + request.path.strip("/").replace("-", "_"), self.do_echo)
        handler(exchange)

    def do_echo(self, exchange: http11.Exchange) -> None:
        exchange.respond(http11.Response(200, exchange.request.body))

    def do_big(self, exchange: http11.Exchange) -> None:
        exchange.respond(http11.Response(200, b"x" * int(exchange.request.query["n"])))

    def do_status(self, exchange: http11.Exchange) -> None:
        exchange.respond(http11.Response(int(exchange.request.query["code"])))

    def do_bad_header(self, exchange: http11.Exchange) -> None:
        exchange.respond(http11.Response(200, b"", [("X-Bad", "a\r\nSet-Cookie: b")]))

    def do_hold(self, exchange: http11.Exchange) -> None:
        self.held.append(exchange)

    def do_start(self, exchange: http11.Exchange) -> None:
        exchange.start(int(exchange.request.query.get("code", 200)), http11.SSE_HEADERS)
        self.held.append(exchange)

    def do_stream(self, exchange: http11.Exchange) -> None:
        exchange.start(200, http11.SSE_HEADERS)
        for byte in exchange.request.body:
            exchange.write(b"%c" % byte)
        exchange.write(b"")
        exchange.end(b"." if "dot" in exchange.request.query else b"")

    def do_raise(self, exchange: http11.Exchange) -> None:
        raise RuntimeError("planted before the answer")

    def do_raise_within(self, exchange: http11.Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"part")
        raise RuntimeError("planted within the answer")

    def error(self, status: int, message: str, request: http11.Request | None) -> http11.Response:
        return http11.Response(status, message.encode(), [("X-Error", "yes")])

    def common_headers(self, request: http11.Request | None) -> list[tuple[str, str]]:
        return [("Server", "scripted")]

    def on_done(self, request: http11.Request | None, status: int) -> None:
        self.done.append((request and request.path, status))


class Served:
    """Handle of a running server for the thread of the test."""

    def __init__(self, app: Any, limits: http11.Limits, host: str, tls: ssl.SSLContext | None):
        self.app = app
        self.loop_errors: list[dict[str, Any]] = []
        self.sockets = http11.bind(host, 0)
        self.address = self.sockets[0].getsockname()
        self.family = self.sockets[0].family
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.loop_errors.append(context))
        self.server = http11.Server(app, limits)
        self.loop.run_until_complete(self.server.serve(self.sockets, tls))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args) on the loop's thread; returns its result or raises what it raises."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def wait_idle(self, timeout: float) -> bool:
        future = asyncio.run_coroutine_threadsafe(self.server.wait_idle(timeout), self.loop)
        return future.result(PATIENCE_S)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket(self.family)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.address)
        return sock

    def exchange(self, data: bytes) -> bytes:
        """Sends data on a new connection and returns all that comes until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def connection(self) -> http11.Connection:
        """The server's side of the only connection."""
        eventually(lambda: len(self.server.connections) == 1, "one connection")
        return next(iter(self.server.connections))

    def held(self) -> http11.Exchange:
        eventually(lambda: self.app.held, "a held exchange")
        return self.app.held.pop(0)

    def stop(self) -> None:
        self.call(self.server.stop_accepting)
        self.call(self.server.close)
        eventually(lambda: not self.server.connections, "all connections lost")
        self.call(lambda: None)  # one more turn of the loop
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@contextlib.contextmanager
def serving(
    app: Any = None, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, **limits: Any
) -> Iterator[Served]:
    limits = {"tick": 0.02, **limits}
    served = Served(app or ScriptedApp(), http11.Limits(**limits), host, tls)
    try:
        yield served
    finally:
        served.stop()
    assert served.loop_errors == []


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer with a Content-Length, read byte-exactly so that the connection can go on."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = sock.recv(1)
        assert piece, f"closed within the head: {head!r}"
        head += piece
    status, headers = parse_head(head)
    body = b""
    while len(body) < int(headers.get("content-length", 0)):
        body += sock.recv(int(headers["content-length"]) - len(body))
    return status, headers, body


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    fields = [line.split(": ", 1) for line in lines]
    assert len({name for name, _ in fields}) == len(fields), f"a header twice: {fields}"
    return int(first.split(" ")[1]), {name.lower(): value for name, value in fields}


def chunk(data: bytes) -> bytes:
    """RFC 9112 7.1"""
    return b"%x\r\n%b\r\n" % (len(data), data)


def request(path: str, body: bytes = b"", method: str = "", **headers: str) -> bytes:
    """A whole request; underscores of header names are dashes."""
    lines = [f"{method or ('POST' if body else 'GET')} {path} HTTP/1.1", "Host: localhost"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

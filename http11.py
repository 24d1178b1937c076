"""HTTP/1.1 and Server-Sent Events on asyncio: bytes in, Request; Response or stream, bytes out.

What it does
    h11 judges every byte that comes in and frames every answer. This module adds what h11 leaves to
    its caller: sockets, limits, deadlines, keep-alive and pipelining, 100-continue, early refusals,
    back-pressure, the notice that a client has left, and an orderly stop.

What it deliberately does not do
    No routes, JSON or authentication: those are the App. No HTTP/2, upgrades, compression, ranges
    or trailers. No timeout on the app: a generation may take an hour. No certificates: Server.serve
    takes a ready ssl.SSLContext.

Life of a connection: State x what happens -> what is done, next state

                bytes                     answer complete        client's FIN     deadline passed
    IDLE        -> HEAD                   -                      close            close
    HEAD        head complete: on_head    (refused at once)      answer what is   408
                -> BODY, or refuse        -> LINGERING           whole; or 400
    BODY        collect; whole: answer    (400, 408, 413)        400              408
                the refusal, or           -> LINGERING
                on_request -> ANSWERING
    ANSWERING   read ahead, bounded       -> IDLE; goes on with  gone: drop       (has none)
                                          what was read ahead;
                                          -> LINGERING if it
                                          said close
    LINGERING   discard                   -                      close            close
    CLOSED      -                         -                      -                (has none)

    In every state a lost connection leads to CLOSED, and so does a client that takes none of its
    unsent bytes for write_timeout; while there are any, no other deadline applies. What is not HTTP
    gets 400, 431 or 501 as h11 says. Every error found here says `Connection: close` and leads to
    LINGERING.

A refusal and its body
    A request line must never be looked for inside a body. on_head refuses before the body is read:
    a body of at most DRAIN_BYTES is then read and thrown away, the refusal sent after it, and the
    connection stays usable. If the body is announced as larger, turns out to be larger, comes too
    late or is not HTTP, the refusal is sent at once, says close and leads to LINGERING; so also if
    the client waits for 100 Continue: it gets the refusal instead.

Who closes, and how
    To close a TCP socket with unread input sends RST, and RST may destroy an answer that the client
    has not read yet. So after an answer that says close the server shuts down its sending side only
    and discards input until the client closes, for linger_timeout at most (RFC 9112 9.6).

TLS
    is asyncio's. Its handshake has header_timeout, and until it is done a connection counts nowhere
    here. It has no half-close: the server lingers without, so a client that takes the close for the
    end of the answer (HTTP/1.0) sees it linger_timeout late; and to close it waits for the client's
    goodbye, for write_timeout at most. What asyncio has encrypted but not sent is not seen here: of
    a large answer that is written at once and read slowly, all that is left when the deadline
    passes has write_timeout; nor does wait_idle wait for it.

A vanished client
    While an answer is due the socket is still read, so FIN and RST are seen in the next turn of the
    loop, streaming or not. FIN counts as leaving: a client that shuts down its sending side loses
    an answer that is not complete yet, as with llama-server (cpp-httplib); what is answered at once
    still reaches it. Only a client that has sent READ_AHEAD_BYTES beyond its request is no longer
    read, and not missed before the next write to it.

A slow reader
    Tokens are pushed, never awaited. Of a stream write_bytes may be unsent; who has more at a tick,
    or takes nothing for write_timeout, is dropped. Nobody else waits. Pipelined requests wait
    while answers are unsent.

A slow sender
    header_timeout is absolute; body_timeout grows by what has arrived / body_rate (as Apache's
    mod_reqtimeout: "body=20,MinRate=500"). One tick a second looks at all connections; there is no
    timer per request.

Threads: all of this, the app's methods and the methods it calls, run on the event loop's thread.
Nothing blocks.

Reading order: Limits, Request, Response and App; the pure functions; Exchange, which the app holds;
Connection, which is the table above; Server.

Sources: RFC 9110, RFC 9112, WHATWG HTML 9.2 (Server-Sent Events), h11 0.16.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import enum
import errno
import logging
import pathlib
import re
import socket
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Protocol, cast

import h11

logger = logging.getLogger("exl3_serve.http")

# ---- Limits ------------------------------------------------------------------------------------

READ_BYTES = 32 * 1024  # one read, so also the most that is parsed in one turn of the loop
READ_AHEAD_BYTES = 64 * 1024  # pipelined bytes kept while an answer is due; then reading pauses
CLIENT_GONE = 499  # nginx's
DRAIN_BYTES = 1024 * 1024  # body of a refused request that is read so as to keep the connection


@dataclass(frozen=True)
class Limits:
    """What a peer may use up; times in seconds. Tests shrink these."""

    header_bytes: int = 64 * 1024  # give or take one read; node.js 16 KiB, nginx 32 KiB in all
    header_timeout: float = 30.0  # from the first byte of a head; for the very first; for TLS's own
    body_bytes: int = 64 * 1024 * 1024  # announced or summed; several images as base64
    body_timeout: float = 30.0  # from the end of the head; what arrives lengthens it by
    body_rate: float = 16 * 1024  # bytes a second, so whoever is slower on the average is cut
    idle_timeout: float = 75.0  # between requests; nginx's keepalive_timeout
    write_timeout: float = 30.0  # without one byte taken by the kernel; nginx's is 60 s
    write_bytes: int = 2 * 1024 * 1024  # unsent; a client this far behind will not catch up
    linger_timeout: float = 2.0  # for the client to read a last answer; Apache 2 s, nginx 5 s
    connections: int = 4096  # open at once, idle ones too; each takes a file descriptor
    tick: float = 1.0  # how often deadlines are looked at, and so how late one may be noticed


# ---- Data --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    method: str  # as sent, "GET"; HEAD stays "HEAD"
    path: str  # percent-decoded, without query; "*" for OPTIONS *
    query: dict[str, str]  # decoded; the last of several wins
    headers: dict[str, str]  # lower-case names, latin-1 values, duplicates joined with ", "
    body: bytes | bytearray = b""  # empty in on_head, grows, complete in on_request
    context: Any = None  # the app's; not touched here
    key: Any = None  # likewise
    peer: str = ""  # the client's address; none over a Unix socket


@dataclass(slots=True)
class Response:
    status: int
    body: bytes = b""
    # Content-Type and whatever the app wants; Content-Length, Date and Connection are added here.
    headers: list[tuple[str, str]] = field(default_factory=list)


class App(Protocol):
    """What answers. All are called on the loop and must not block.

    An exception out of on_head or on_request is logged and becomes a 500, or a dropped connection
    when part of an answer was sent. The others must not raise.
    """

    def on_head(self, request: Request) -> Response | None:
        """The head is complete, the body not read: a Response refuses, None reads the body."""

    def on_request(self, exchange: Exchange) -> None:
        """The request is complete. Answer at once, or keep the exchange and answer later."""

    def error(self, status: int, message: str, request: Request | None) -> Response:
        """An error found here: 400 408 413 431 500 501 503. request is None before its head."""

    def common_headers(self, request: Request | None) -> list[tuple[str, str]]:
        """Added to every answer, errors and streams too."""

    def on_done(self, request: Request | None, status: int) -> None:
        """An answer with this status is sent; CLIENT_GONE: the client left before that. Once for
        each request, and for each error that came before its head."""


# The table at the top of this file says what each is and what it does. CLOSED is not among them:
# it is whenever transport.is_closing(), which also knows before us that a write has failed.
State = enum.Enum("State", "IDLE HEAD BODY ANSWERING LINGERING")

# ---- Pure functions ----------------------------------------------------------------------------

SSE_PING = b": ping\n\n"  # a comment; decoders ignore it (WHATWG HTML 9.2.6)
SSE_HEADERS = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")]
SSE_HEADERS += [("X-Accel-Buffering", "no")]  # nginx: pass on every event at once


def sse_event(data: bytes, event: bytes | None = None) -> bytes:
    """One event. Every line of data becomes a data line. event must hold no line end."""
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return (b"event: %b\n" % event if event else b"") + b"data: %b\n\n" % data


def make_request(event: h11.Request) -> Request:
    """For the absolute form a server "MUST ignore the received Host header field (if any) and
    instead replace it with the host information of the request-target" (RFC 9112 3.2.2)."""
    target, headers = event.target.decode("ascii"), dict[str, str]()
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        # Stripped, because it may be sent back: "a, " with nothing behind it could not be
        headers[name] = f"{headers[name]}, {value}".strip() if name in headers else value
    if absolute := re.fullmatch(r"(?i)https?://([^/?#]*)(.*)", target):
        headers["host"], target = absolute.groups()
    path, _, fields = target.partition("?")  # urlsplit would take //a/b for a host
    query = dict(urllib.parse.parse_qsl(fields, keep_blank_values=True))
    path = urllib.parse.unquote(path) or "/"
    return Request(event.method.decode("ascii"), path, query, headers, bytearray())


# ---- Listening ---------------------------------------------------------------------------------


def bind(host: str, port: int) -> list[socket.socket]:
    """Binds and listens; connections queue in the kernel until `Server.serve`.

    host: an address, [address], a name with an IPv4 address, or a path ending in ".sock" (port
    unused). "localhost" is 127.0.0.1 and, where the machine has it, ::1, on one port, also for
    port 0. "::" takes IPv4 too. Raises OSError, its text whole: the host, the port and why.
    """
    bound: list[socket.socket] = []
    try:
        if host.endswith(".sock"):
            return [_bind_unix(host)]
        for name in ("127.0.0.1", "::1") if host == "localhost" else (host.strip("[]"),):
            bound.append(_bind_tcp(name, bound[0].getsockname()[1] if bound else port))
    except (OSError, AttributeError, OverflowError, UnicodeError, TypeError) as exc:
        # All but the first: no AF_UNIX here, no such port, no possible name.
        if bound and getattr(exc, "errno", None) in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return bound  # this machine has no ::1
        for sock in bound:
            sock.close()
        raise OSError(f"cannot listen on {host} port {port}: {exc}") from exc
    return bound


def _bind_tcp(host: str, port: int) -> socket.socket:
    """With SO_REUSEADDR, except on Windows, where that would let two servers share a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    sock = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return sock


def _bind_unix(path: str) -> socket.socket:
    """A dead socket file is replaced; a live one, or a file of any other kind, never."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a live server with a full queue would block us
        if probe.connect_ex(path) == errno.ECONNREFUSED and pathlib.Path(path).is_socket():
            pathlib.Path(path).unlink()
    return socket.create_server(path, family=socket.AF_UNIX)


# ---- Exchange ----------------------------------------------------------------------------------


class Exchange:
    """One request and its answer: `respond` once; or `start`, `write` any number of times, `end`.

    The client may vanish at any moment, and Server.close drops it. Then `gone` becomes True and
    on_gone is called, once, by the loop: never from inside a method of this class. Not so when the
    answer was complete, or when on_request raised before it answered. Whoever sets on_gone later
    than in on_request must read `gone`. With the answer complete or the client gone every method
    does nothing. h11.LocalProtocolError (a header that cannot be sent, a call out of order) is the
    app's fault.
    """

    __slots__ = ("_connection", "_raw", "gone", "last_write", "on_gone", "request")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection, self.request = connection, request
        self.on_gone: Callable[[], object] = lambda: None
        # last_write before the first one: when the request was complete
        self.gone, self.last_write = False, time.perf_counter()
        self._raw = connection.h11.their_http_version == b"1.0" or request.method == "HEAD"

    def _is_due(self) -> bool:
        return self._connection.exchange is self and not self._connection.transport.is_closing()

    def respond(self, response: Response) -> None:
        """The whole answer, in one transport.write."""
        if self._is_due():
            self._connection.answer(response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Begins a streamed answer: sends its head."""
        if self._is_due():
            self._connection.send(self._connection.head(status, headers))

    def write(self, data: bytes) -> None:
        """One chunk in one transport.write; nothing if data is empty. See "A slow reader"."""
        connection, transport = self._connection, self._connection.transport
        if not data or connection.exchange is not self or transport.is_closing():
            return
        # Chunks are what h11 would write (a test compares them), at a fifth of the time
        connection.send(connection.part(data) if self._raw else b"%x\r\n%b\r\n" % (len(data), data))
        self.last_write = time.perf_counter()

    def end(self, data: bytes = b"") -> None:
        """The last data and the end of the body in one transport.write."""
        if self._is_due():
            self._connection.finish(data)


# ---- Connection --------------------------------------------------------------------------------


class Connection(asyncio.BufferedProtocol):
    """One socket. `exchange` is set in ANSWERING only, `request` from its head to its answer's end;
    both stay when the connection is aborted, until connection_lost tells the exchange.

    Methods in order of life: made, bytes, events, answer, next request or linger, end.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.app, self.limits = server, server.app, server.limits
        self.h11 = h11.Connection(h11.SERVER, server.limits.header_bytes)
        self.request: Request | None = None
        self.exchange: Exchange | None = None
        self.refusal: Response | None = None  # what on_head answered; sent when the body is drained
        # Bytes given to the transport; of them taken by the kernel, when last looked at
        self.n_written = self.n_accepted = 0
        self.progressed = 0.0  # when that last grew

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)
        self.enter(State.IDLE, self.limits.header_timeout)
        if len(self.server.connections) > self.limits.connections:
            self.refuse(503, "too many connections")
            transport.close()  # no lingering: that would hold the descriptor that is short

    def enter(self, state: State, timeout: float = float("inf")) -> None:
        self.state, self.deadline = state, time.perf_counter() + timeout

    # From here to advance: what the transport calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.read_buffer  # one for all: emptied before the loop reads again

    def buffer_updated(self, nbytes: int) -> None:
        if self.state is not State.LINGERING:
            self.h11.receive_data(bytes(self.server.read_buffer[:nbytes]))
            self.advance()

    def eof_received(self) -> bool:
        """True: what was pipelined before is still answered, as far as that takes no wait. False:
        asyncio closes, once all that was written is sent. With TLS it always does."""
        self.h11.receive_data(b"")
        self.advance()
        return self.state is not State.LINGERING and self.transport.can_write_eof()

    def advance(self) -> None:
        """Takes events from h11 until it wants more bytes or a request is complete: one a turn of
        the loop, so that a client that pipelines hundreds keeps nobody waiting."""
        if self.state is State.IDLE and any(self.h11.trailing_data):
            self.enter(State.HEAD, self.limits.header_timeout)
        while self.state in (State.HEAD, State.BODY) and not self.transport.is_closing():
            if self.transport.get_write_buffer_size() > self.transport.get_write_buffer_limits()[1]:
                return self.transport.pause_reading()  # resume_writing goes on
            try:
                event = self.h11.next_event()
                if event is h11.NEED_DATA:
                    return self.transport.resume_reading()
                self.take(event)
            except h11.RemoteProtocolError as exc:
                self.refuse(exc.error_status_hint, str(exc)[:200])  # h11 quotes the bytes
            except Exception:
                # The one broad catch: a fault of the app, or ours, ends this exchange. It must not
                # leave the client waiting for ever, nor reach the loop.
                logger.exception("failed: %r", self.request and self.request.path)
                self.refusal = None  # it may be what failed
                if self.h11.our_state is h11.SEND_RESPONSE:
                    self.refuse(500, "internal server error")
                else:
                    self.transport.abort()
        if self.state is State.ANSWERING:  # see "A vanished client"
            ahead, has_left = self.h11.trailing_data
            if has_left:
                self.transport.abort()
            elif len(ahead) > READ_AHEAD_BYTES:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    resume_writing = advance

    def take(self, event: object) -> None:
        """Handles one event of h11. PAUSED comes only while answering."""
        if isinstance(event, h11.Request):
            self.take_head(make_request(event))
        elif self.request is None:
            self.transport.close()  # ConnectionClosed, between requests
        elif isinstance(event, h11.Data):
            self.deadline += len(event.data) / self.limits.body_rate
            self.request.body += event.data
            if len(self.request.body) > self.body_limit:
                self.refuse(413, self.server.too_large)
        elif self.refusal is not None:
            self.answer(self.refusal)  # EndOfMessage: the body is drained
        else:
            self.enter(State.ANSWERING)
            self.exchange = Exchange(self, self.request)
            self.app.on_request(self.exchange)

    def take_head(self, request: Request) -> None:
        address = self.transport.get_extra_info("peername")
        request.peer = address[0] if isinstance(address, tuple) else ""
        self.request = request
        self.refusal = self.app.on_head(request)
        self.body_limit = self.limits.body_bytes if self.refusal is None else DRAIN_BYTES
        if {"content-length", "transfer-encoding"} <= request.headers.keys():
            return self.refuse(400, "both Content-Length and Transfer-Encoding")  # RFC 9112 6.1
        announced = int(request.headers.get("content-length", 0))
        expecting = self.h11.they_are_waiting_for_100_continue
        if announced > self.body_limit or (expecting and self.refusal is not None):
            return self.refuse(413, self.server.too_large)
        if expecting:
            self.send(self.h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        self.enter(State.BODY, self.limits.body_timeout)

    # The answer.

    def refuse(self, status: int, message: str) -> None:
        """Answers and closes: with what on_head said, if it refused, else with an error found here.
        Nothing has been sent for this request."""
        self.answer(self.refusal or self.app.error(status, message, self.request), close=True)

    def answer(self, response: Response, close: bool = False) -> None:
        headers = response.headers
        if response.status not in (204, 304):  # they have no body (RFC 9110 8.6)
            headers = [*headers, ("Content-Length", str(len(response.body)))]
        self.finish(response.body, self.head(response.status, headers, close))

    # Every answer, whole or streamed, begins with head and is done with finish.

    def head(self, status: int, headers: list[tuple[str, str]], close: bool = False) -> bytes:
        fields = [("Date", self.server.date), *headers, *self.app.common_headers(self.request)]
        self.status = status
        if close or not self.server.accepting:
            fields.append(("Connection", "close"))
        raw = [(name.encode("latin-1"), text.encode("latin-1", "replace")) for name, text in fields]
        return self.h11.send(h11.Response(status_code=status, headers=raw))

    def part(self, data: bytes) -> bytes:
        """A part of the body, framed. To HEAD there is none, only GET's head (RFC 9110 9.3.2)."""
        if not data or (self.request is not None and self.request.method == "HEAD"):
            return b""
        return self.h11.send(h11.Data(data=data))

    def send(self, data: bytes) -> None:
        self.transport.write(data)
        self.n_written += len(data)

    def finish(self, data: bytes, head: bytes = b"") -> None:
        """Sends the end of an answer; data is the last part of its body. Then what comes next."""
        self.send(head + self.part(data) + self.h11.send(h11.EndOfMessage()))
        self.app.on_done(self.request, self.status)
        self.exchange = self.request = self.refusal = None
        if self.h11.our_state is h11.DONE and self.server.accepting:
            self.h11.start_next_cycle()
            self.enter(State.IDLE, self.limits.idle_timeout)
            self.server.loop.call_soon(self.advance)  # for what was read ahead
        else:  # see "Who closes, and how"
            self.enter(State.LINGERING, self.limits.linger_timeout)
            self.transport.resume_reading()
            # Reset since the last write (connection_lost follows); or TLS.
            with contextlib.suppress(OSError, NotImplementedError):
                self.transport.write_eof()

    # The end.

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.gone = True
            exchange.on_gone()
        if self.request is not None:
            self.app.on_done(self.request, CLIENT_GONE)

    def check(self, now: float) -> None:
        """Called at each tick: is the client taking its bytes, and is it in time with its own?"""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or self.n_written - unsent > self.n_accepted:
            self.n_accepted, self.progressed = self.n_written - unsent, now
        too_far_behind = self.exchange is not None and unsent > self.limits.write_bytes
        if too_far_behind or now - self.progressed > self.limits.write_timeout:
            self.transport.abort()
        elif now > self.deadline and not unsent and not self.transport.is_closing():
            if self.state in (State.HEAD, State.BODY):
                self.refuse(408, "request not received in time")
            else:
                self.transport.close()


# ---- Server ------------------------------------------------------------------------------------


class Server:
    """The connections and the tick. All methods are for the loop's thread."""

    def __init__(self, app: App, limits: Limits = Limits()) -> None:
        self.app, self.limits = app, limits
        self.connections: set[Connection] = set()
        self.accepting = True
        self.too_large = f"request body exceeds the limit of {limits.body_bytes} bytes"
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._listeners: list[asyncio.Server] = []

    async def serve(self, sockets: list[socket.socket], ssl: SSLContext | None = None) -> None:
        """Starts accepting on sockets from `bind`, owned from now on. Returns when listening."""
        self.loop = asyncio.get_running_loop()
        self._tick()
        handshake, shutdown = self.limits.header_timeout, self.limits.write_timeout
        timeouts = {"ssl_handshake_timeout": handshake, "ssl_shutdown_timeout": shutdown}
        tls: dict[str, Any] = {"ssl": ssl, **timeouts} if ssl else {}
        for sock in sockets:
            listener = await self.loop.create_server(lambda: Connection(self), sock=sock, **tls)
            self._listeners.append(listener)

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(self.limits.tick, self._tick)
        self.date = email.utils.formatdate(usegmt=True)
        for connection in list(self.connections):
            connection.check(time.perf_counter())

    def stop_accepting(self) -> None:
        """Closes the listeners and the connections without a request, or with one that was read
        ahead. What runs goes on; its answers say close."""
        self.accepting = False
        for listener in self._listeners:
            for sock in listener.sockets:
                if isinstance(path := sock.getsockname(), str):
                    pathlib.Path(path).unlink(missing_ok=True)
            listener.close()  # and never wait_closed: since 3.12 it waits for every connection
        for connection in list(self.connections):
            # Once: after a second close asyncio's TLS transport cannot be aborted any more
            if connection.state is State.IDLE and not connection.transport.is_closing():
                connection.transport.close()

    async def wait_idle(self, timeout: float) -> bool:
        """True when no exchange is left and all answers are sent; False after timeout seconds."""
        give_up = time.perf_counter() + timeout
        while any(c.exchange or c.transport.get_write_buffer_size() for c in self.connections):
            if time.perf_counter() > give_up:
                return False
            await asyncio.sleep(0.01)
        return True

    def close(self) -> None:
        """Drops every connection; what listens is stop_accepting's matter. on_gone of what ran is
        called in the next turn of the loop."""
        for connection in list(self.connections):
            connection.transport.abort()
        self._ticker.cancel()

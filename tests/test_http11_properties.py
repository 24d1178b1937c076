"""http11.py for any input: SSE framing, chunk framing, cuts of the byte stream, arbitrary bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import anthropic._streaming
import h11
import openai._streaming
import pytest
from http_harness import ScriptedApp, request
from hypothesis import example, given, settings
from hypothesis import strategies as st

import http11

# ---- A server without sockets ------------------------------------------------------------------


class FakeTransport(asyncio.Transport):
    """Takes every byte at once; a loop would do the same with a fast reader."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closing = False  # nothing more may be written
        self.closed = False
        self.paused = False

    def write(self, data: Any) -> None:
        assert not self.closing, "written after close"
        self.sent += data

    def write_eof(self) -> None:
        self.closing = True

    def close(self) -> None:
        self.closing = self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 65536

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class FakeLoop:
    """Only call_soon, run by hand."""

    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)

    def run(self) -> None:
        while self.soon:
            self.soon.pop(0)()


def converse(
    pieces: list[bytes], eof: bool = False, app: Any = None, **limits: int
) -> tuple[bytes, FakeTransport]:
    """What a server answers to these reads, then perhaps to the end of file."""
    server = http11.Server(app or ScriptedApp(), http11.Limits(**limits))
    server.loop, server.date = FakeLoop(), "now"  # type: ignore[assignment]
    connection, transport = http11.Connection(server), FakeTransport()
    connection.connection_made(transport)
    for piece in pieces:
        for i in range(0, len(piece), http11.READ_BYTES):
            part = piece[i : i + http11.READ_BYTES]
            if not transport.is_closing():
                connection.get_buffer(-1)[: len(part)] = part
                connection.buffer_updated(len(part))
            server.loop.run()  # type: ignore[attr-defined]
    if eof and not transport.is_closing():
        keep_open = connection.eof_received()
        server.loop.run()  # type: ignore[attr-defined]
        transport.closing |= not keep_open
    connection.connection_lost(None)
    return bytes(transport.sent), transport


# ---- Server-Sent Events ------------------------------------------------------------------------

LINES = st.text(alphabet='a"\\ \n\r\0:\x85\u2028🦜', max_size=12)


def whatwg_events(stream: str) -> list[tuple[str, str]]:
    """WHATWG HTML 9.2.6, "Interpreting an event stream", step by step."""
    events, data, event = [], "", ""
    for line in stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        if line == "":
            if data:
                events.append((event, data.removesuffix("\n")))
            data, event = "", ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data += value + "\n"
        elif name == "event":
            event = value
    return events


def as_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


EVENTS = st.lists(
    st.tuples(st.sampled_from([None, "ping", "content_block_delta"]), LINES), max_size=4
)


@given(EVENTS)
@example([(None, "")])
@settings(deadline=None)
def test_any_text_survives_sse_for_a_decoder_made_from_the_standard(events):
    stream = b""
    for event, data in events:
        stream += http11.sse_event(data.encode(), event and event.encode()) + http11.SSE_PING
    expected = [(event or "", as_lines(data)) for event, data in events]
    assert whatwg_events(stream.decode()) == expected


@pytest.mark.parametrize("module", [openai._streaming, anthropic._streaming])
def test_any_text_survives_sse_for_the_shipped_decoders_at_every_cut(module):
    # They drop an event of one empty data line and no name: such an event is never sent.
    @given(EVENTS.filter(lambda events: all(data for _, data in events)))
    @settings(deadline=None)
    def check(events):
        stream = b""
        for event, data in events:
            stream += http11.sse_event(data.encode(), event and event.encode()) + http11.SSE_PING
        expected = [(event or "", as_lines(data)) for event, data in events]
        for cut in range(len(stream) + 1):
            pieces = [piece for piece in (stream[:cut], stream[cut:]) if piece]
            decoded = module.SSEDecoder().iter_bytes(iter(pieces))
            assert [(sse.event or "", sse.data) for sse in decoded] == expected

    check()


# ---- Streams -----------------------------------------------------------------------------------


class Streamer(ScriptedApp):
    def __init__(self, pieces: list[bytes], last: bytes) -> None:
        super().__init__()
        self.pieces, self.last = pieces, last

    def do_echo(self, exchange: http11.Exchange) -> None:
        exchange.start(200, [])
        for piece in self.pieces:
            exchange.write(piece)
        exchange.end(self.last)


@given(st.lists(st.binary(max_size=40), max_size=6), st.binary(max_size=40))
@settings(deadline=None)
def test_a_stream_is_byte_for_byte_what_h11_makes_of_it(pieces, last):
    reference = h11.Connection(h11.SERVER)
    reference.receive_data(request("/"))
    reference.next_event()
    headers = [("Date", "now"), ("Server", "scripted")]
    expected = reference.send(h11.Response(status_code=200, headers=headers))
    for piece in [*pieces, last]:
        expected += reference.send(h11.Data(data=piece))
    expected += reference.send(h11.EndOfMessage())
    assert converse([request("/")], app=Streamer(pieces, last))[0] == expected


# ---- Cuts --------------------------------------------------------------------------------------

PIPELINED = (
    request("/echo", b"hello")
    + request("/echo", method="POST", Transfer_Encoding="chunked")
    + b"3\r\nabc\r\n1;x\r\n!\r\n0\r\nT: 1\r\n\r\n"
    + request("/stream", b"xyz")
    + request("/echo", b"ignored body", x_refuse="401")
    + request("/echo", method="HEAD")
    + request("http://other/echo?q=1", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    + request("/echo", b"last", Connection="close")
)


def test_every_cut_of_a_pipelined_stream_gives_the_same_answers():
    whole, _ = converse([PIPELINED])
    assert whole.count(b"HTTP/1.1 200") == 6 and whole.count(b"HTTP/1.1 401") == 1
    for cut in range(1, len(PIPELINED)):
        assert converse([PIPELINED[:cut], PIPELINED[cut:]])[0] == whole


def test_byte_by_byte_gives_the_same_answers():
    assert converse([b"%c" % byte for byte in PIPELINED])[0] == converse([PIPELINED])[0]


@given(st.lists(st.integers(1, len(PIPELINED) - 1), max_size=8), st.booleans())
@settings(deadline=None)
def test_many_cuts_give_the_same_answers(cuts, eof):
    places = [0, *sorted(cuts), len(PIPELINED)]
    pieces = [PIPELINED[a:b] for a, b in itertools.pairwise(places) if a < b]
    assert converse(pieces, eof)[0] == converse([PIPELINED])[0]


# ---- Anything at all ---------------------------------------------------------------------------

FRAGMENTS = [
    *(
        b"GET / HTTP/1.1\r\n",
        b"POST /echo HTTP/1.0\r\n",
        b"POST /stream HTTP/1.1\r\n",
        b"Host: h\r\n",
    ),
    *(
        b"HEAD /start HTTP/1.1\r\n",
        b"CONNECT h:1 HTTP/1.1\r\n",
        b"PUT * HTTP/2.0\r\n",
        b"\r\n",
        b"\n",
    ),
    *(
        b"GET http://[x HTTP/1.1\r\n",
        b"POST /hold HTTP/1.1\r\n",
        b"Content-Length: 5\r\n",
        b"hello",
    ),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n", b"5\r\nhello\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"0\r\n\r\n", b"5;x\r\n"),
    *(
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"Upgrade: h2c\r\n",
        b"X-Refuse: 404\r\n",
    ),
    *(b"X: \xff\xfe\r\n", b" folded\r\n", b"X-Big: " + b"x" * 2500 + b"\r\n", b"%", b"\0", b"\x80"),
]
WIRE = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=5)), max_size=12)


@given(WIRE, st.booleans(), st.booleans())
@example([b"GET / HTTP/1.1\r\n", b"Host: h\r\n", b"\r\n"], True, True)
@settings(deadline=None)
def test_any_bytes_get_a_reply_below_500_or_a_close_and_never_an_exception(pieces, whole, eof):
    reads = [b"".join(pieces)] if whole else pieces
    sent, transport = converse([read for read in reads if read], eof, header_bytes=2000)
    for line in sent.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            status = int(line.split()[1])
            # 501: RFC 9112 6.1 wants it for a transfer coding that is not understood.
            assert status < 500 or status == 501, sent
    if eof:
        assert transport.closing


class Terse(ScriptedApp):
    """h11's words may depend on the cut (an empty line, or a CR first), its judgement may not."""

    def error(self, status: int, message: str, request: http11.Request | None) -> http11.Response:
        return http11.Response(status)


@given(WIRE, st.integers(0, 400))
@example([b"\r\n"], 1)
@settings(deadline=None)
def test_any_bytes_cut_anywhere_are_judged_alike(pieces, cut):
    wire = b"".join(pieces)
    pieces = [piece for piece in (wire[:cut], wire[cut:]) if piece]
    whole = [wire] if wire else []
    assert converse(whole, app=Terse())[0] == converse(pieces, app=Terse())[0]


# ---- Every state meets every input -------------------------------------------------------------

STEPS = {
    "head": request("/hold", b"body")[:-4],
    "body": b"body",
    "close": request("/hold", Connection="close"),
    "refused": request("/echo", b"x", x_refuse="401"),
    "nonsense": b"\0\r\n\r\n",
}
ACTIONS = [*STEPS, "eof", "lost", "respond", "start", "write", "end", "tick", "late", "stop"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=12))
@settings(deadline=None)
def test_whatever_happens_in_any_order_an_exchange_ends_once(actions):
    app = ScriptedApp()
    server = http11.Server(app, http11.Limits())
    server.loop, server.date = FakeLoop(), "now"  # type: ignore[assignment]
    connection, transport = http11.Connection(server), FakeTransport()
    connection.connection_made(transport)
    lost = False
    for action in actions:
        if action in STEPS:
            if not transport.is_closing():
                part = STEPS[action]
                connection.get_buffer(-1)[: len(part)] = part
                connection.buffer_updated(len(part))
        elif action == "eof":
            if not transport.is_closing():
                if not connection.eof_received():
                    transport.close()
        elif action == "lost":
            if not lost:
                lost = transport.closed = True
                connection.connection_lost(None)
        elif action == "tick":
            connection.check(0.0)
        elif action == "late":
            connection.check(float(10**9))
        elif action == "stop":
            server.accepting = False
        elif app.held:
            # Out of order is the app's fault and raises; the next call must still be safe.
            exchange, arguments = (
                app.held[-1],
                {"respond": [http11.Response(200)], "start": [200, []]},
            )
            with contextlib.suppress(h11.LocalProtocolError):
                getattr(exchange, action)(*arguments.get(action, [b"x"]))
        server.loop.run()  # type: ignore[attr-defined]
        assert (connection.exchange is not None) <= (connection.state is http11.State.ANSWERING)
    if not lost:
        connection.connection_lost(None)
    assert connection.exchange is None and not server.connections
    assert len(app.gone) == len(set(map(id, app.gone))) <= len(app.held)
    assert [path for path, _ in app.done if path] == [head.path for head in app.heads]

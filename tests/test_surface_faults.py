"""Faults at every place of a run, one after the other: the surface, the engine and HTTP together.

The first call of something fails, in the next run the second, and so on until a run meets no fault
any more. After each run nothing is left over and the next request is answered right. All of it
runs in this process, so that the tests can look: App, Engine with the fake backend, http11.Server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading

import pytest
from server_process import HI, Reader, eventually, http_request, in_threads, sse_data

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import engine
import exl3_serve
import http11

CHAT = "/v1/chat/completions"
SAID = "abcdef"
MANY = 200  # runs; fewer must do
REQUESTS = [
    (CHAT, {"messages": HI, "stream": True, "stop": ["zz"], "reasoning_control": True}),
    ("/completion", {"prompt": ["x", "y"], "stream": True, "n_probs": 1}),
    (CHAT, {"messages": HI, "n": 2}),
    ("/v1/completions", {"prompt": "x" * 600, "stream": True, "grammar": 'root ::= "a"'}),
]


# ---- The surface in this process -----------------------------------------------------------------


class Surface:
    """A whole server of two slots on a loop in a thread of its own."""

    def __init__(self):
        self.sockets = http11.bind("127.0.0.1", 0)
        self.port = self.sockets[0].getsockname()[1]
        self.loop = asyncio.new_event_loop()
        self.loop_errors = []
        self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        self.loop.run_until_complete(self.start())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def start(self):
        args = exl3_serve.make_parser().parse_args(["--fake"])
        self.app = exl3_serve.App(args, [], True)
        self.backend = engine.FakeBackend(args, "fake")
        self.backend.script = list(SAID)
        model = exl3_serve.Model(self.backend, args)
        model.template = exl3_serve.compile_template("{{ messages[0].content }}")
        self.app.loaded(self.backend, model)
        self.engine = self.app.engine
        self.engine.max_recoveries = 10**9
        self.server = http11.Server(self.app, http11.Limits(tick=0.02))
        await self.server.serve(self.sockets)

    def stop(self):
        self.engine.close()
        self.loop.call_soon_threadsafe(self.server.close)
        eventually(lambda: not self.server.connections, "the connections are closed")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        self.app.pool.shutdown()

    def ask(self, path, body):
        """What came: the texts of the choices, "error", or "cut" when the answer has no end."""
        with contextlib.closing(socket.create_connection(("127.0.0.1", self.port), 20)) as sock:
            try:
                sock.sendall(http_request(path, body))
                status, headers, raw = Reader(sock).answer()
            except (OSError, AssertionError):
                return "cut"
        if status != 200:
            assert json.loads(raw)["error"]["code"] == status
            return "error"
        if not body.get("stream"):
            return [choice["message"]["content"] for choice in json.loads(raw)["choices"]]
        events = [json.loads(data) for data in sse_data(raw) if data != "[DONE]"]
        if "error" in events[-1]:
            return "error"
        texts = {}
        for row in (row for event in events for row in event.get("choices", [event])):
            new = row.get("text", row.get("content")) or row.get("delta", {}).get("content") or ""
            texts[row["index"]] = texts.get(row["index"], "") + new
        return [texts[index] for index in sorted(texts)]

    def is_clean(self):
        return (
            self.engine.slots == [None, None]
            and not self.engine.waiting
            and not self.app.answers
            and not self.backend.runs
            and not self.app.n_slow
            and not any(connection.exchange for connection in self.server.connections)
        )

    def assert_nothing_is_left(self):
        eventually(self.is_clean, "slots, queue and answers are empty")
        assert not asyncio.all_tasks(self.loop)
        assert not self.engine.fatal and self.engine.thread.is_alive()


@pytest.fixture
def surface(monkeypatch):
    for log in (engine.log, exl3_serve.log, http11.logger):
        monkeypatch.setattr(log, "disabled", True)  # planted failures, with tracebacks
    surface = Surface()
    n_threads = threading.active_count()
    yield surface
    assert threading.active_count() <= n_threads + exl3_serve.N_WORKERS
    surface.stop()


class Fault:
    """Takes the place of a function; its n-th call does `instead`, which may raise."""

    def __init__(self, real, n, instead):
        self.real, self.n, self.instead = real, n, instead
        self.n_calls = 0
        self.lock = threading.Lock()

    def __call__(self, *args, **kwargs):
        with self.lock:
            self.n_calls += 1
            mine = self.n_calls == self.n
        if mine:
            self.instead(*args)
        return self.real(*args, **kwargs)


def planted(kind):
    def instead(*args):
        raise kind("planted")

    return instead


def reset_instead(connection, *args):
    """What a peer's RST does to the transport."""
    getattr(connection, "_connection", connection).transport.abort()  # an Exchange has it


# What fails: where it is looked up, what happens instead, what may be told of it
PLACES = {
    "submit refuses": (lambda s: (s.backend, "submit"), planted(ValueError), {"error"}),
    "submit breaks": (lambda s: (s.backend, "submit"), planted(RuntimeError), {"error"}),
    "iterate": (lambda s: (s.backend, "iterate"), planted(RuntimeError), {"error"}),
    "iterate panics": (lambda s: (s.backend, "iterate"), planted(BaseException), {"error"}),
    "render": (lambda s: (s.app.model, "template"), planted(ValueError), {"error"}),
    "tokenize": (lambda s: (s.backend, "encode"), planted(RuntimeError), {"error"}),
    "grammar": (lambda s: (s.backend, "compile_grammar"), planted(MemoryError), {"error"}),
    "watch": (lambda s: (exl3_serve.ThoughtWatch, "__call__"), planted(RuntimeError), {"error"}),
    "text": (lambda s: (exl3_serve.Pipeline, "feed"), planted(RuntimeError), {"error"}),
    "step": (lambda s: (exl3_serve.Answer, "step"), planted(RuntimeError), {"error"}),
    "last piece": (lambda s: (exl3_serve.Answer, "end"), planted(RuntimeError), {"error"}),
    "piece": (lambda s: (exl3_serve.Answer, "feed"), planted(RuntimeError), {"error"}),
    "end": (lambda s: (exl3_serve.Answer, "finish"), planted(RuntimeError), {"error"}),
    "write": (lambda s: (http11.Exchange, "write"), reset_instead, {"cut"}),
    "last write": (lambda s: (http11.Connection, "finish"), reset_instead, {"cut"}),
    "head": (lambda s: (http11.Connection, "head"), reset_instead, {"cut"}),
    "write raises": (lambda s: (http11.Exchange, "write"), planted(OSError), {"error", "cut"}),
}


@contextlib.contextmanager
def patched(target, name, n, instead):
    """Gives the Fault. A bound one for objects, for classes a function, which binds."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "template":
            fault = Fault(target.template.render, n, instead)
            patch.setattr(target, name, type("T", (), {"render": staticmethod(fault)}))
        else:
            fault = Fault(getattr(target, name), n, instead)
            function = (lambda *a, **k: fault(*a, **k)) if isinstance(target, type) else fault
            patch.setattr(target, name, function)
        yield fault


def right(body):
    n = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    return [SAID] * n


@pytest.mark.parametrize("n_streams", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_call_fails_nothing_is_left_and_the_next_request_is_right(
    surface, place, n_streams
):
    where, instead, told = PLACES[place]
    target, name = where(surface)
    for n in range(1, MANY):
        with patched(target, name, n, instead) as fault:
            requests = REQUESTS[:n_streams]
            answers = in_threads(*[lambda r=r: surface.ask(*r) for r in requests])
            surface.assert_nothing_is_left()
        for (_, body), answer in zip(requests, answers, strict=True):
            assert answer == right(body) or answer in [*told], (n, body, answer)
        if fault.n_calls < n:
            assert all(answer not in ("error", "cut") for answer in answers)
            break
        assert surface.ask(*REQUESTS[0]) == [SAID], n
    assert n < MANY - 1, "no run without a fault"
    assert surface.loop_errors == []


def test_a_fault_of_ours_after_a_worker_thread_is_a_500(surface, monkeypatch):
    """On the loop http11's broad catch makes it one; the callback of a worker thread has none."""

    def answer_to(path, body):
        with contextlib.closing(socket.create_connection(("127.0.0.1", surface.port), 1)) as sock:
            sock.sendall(http_request(path, body))
            return Reader(sock).answer()[0]

    with monkeypatch.context() as patch:
        patch.setattr(exl3_serve.Choice, "__init__", planted(RuntimeError))
        assert answer_to(CHAT, {"messages": HI}) == 500
        assert answer_to(CHAT, {"messages": HI, "grammar": 'root ::= "a"'}) == 500


def test_an_answer_that_cannot_be_failed_does_not_cost_others_their_text(surface, monkeypatch):
    """The whole answer's last write raises, and then its error cannot be sent either."""
    surface.backend.delay_s = 0.02
    finish = http11.Connection.finish

    def fails_when_whole(connection, data, head=b""):
        if head and connection.request.path == CHAT:
            raise OSError("planted")
        finish(connection, data, head)

    monkeypatch.setattr(http11.Connection, "finish", fails_when_whole)
    whole = threading.Thread(target=surface.ask, args=(CHAT, {"messages": HI}), daemon=True)
    whole.start()
    eventually(lambda: surface.engine.slots[0], "it has a slot")
    stream = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 12}
    assert surface.ask("/v1/completions", stream) == [SAID * 2]


@pytest.mark.parametrize("n_streams", [1, 4])
def test_whoever_leaves_at_whatever_step_leaves_nothing_and_disturbs_nobody(surface, n_streams):
    def drop_one():
        def drop():
            busy = [c for c in surface.server.connections if c.exchange]
            if busy:
                busy[0].transport.abort()

        surface.loop.call_soon_threadsafe(drop)

    for n in range(1, MANY):
        with patched(surface.backend, "iterate", n, drop_one) as fault:
            requests = REQUESTS[:n_streams]
            answers = in_threads(*[lambda r=r: surface.ask(*r) for r in requests])
            surface.assert_nothing_is_left()
        assert sum(answer == "cut" for answer in answers) <= 1
        for (_, body), answer in zip(requests, answers, strict=True):
            assert answer == right(body) or answer == "cut", (n, answer)
        assert surface.ask(*REQUESTS[0]) == [SAID], n
        if fault.n_calls < n:
            break
    assert 1 < n < MANY - 1
    assert surface.loop_errors == []

"""The engine: job grammar and slots as a state machine, faults one after another, two backends.

Most tests step the engine by hand: the thread is not started, `Engine._pass` is called in its
place, and a loop that only keeps its callbacks lets the test decide when a batch arrives. Nothing
here sleeps for luck. The contract tests at the end run against the fake and the real exllamav3.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import threading
from collections import deque
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tiny_model

import engine as eng
import exl3_serve
from engine import EndKind, GenerationParams, Job, Piece, Update

PATIENCE_S = 10.0
DONE = (EndKind.STOP, EndKind.LIMIT, EndKind.GRAMMAR)


# ==== Helpers =====================================================================================


class Loop:
    """An event loop that keeps what it is given until the test asks for it."""

    def __init__(self):
        self.calls = deque()

    def call_soon_threadsafe(self, function, *args):
        self.calls.append((function, args))

    def deliver(self):
        function, args = self.calls.popleft()
        function(*args)

    def deliver_all(self):
        while self.calls:
            self.deliver()


class NoWaiting(threading.Semaphore):
    def acquire(self, *args, **kwargs):
        assert super().acquire(blocking=False), "a test must deliver before it makes another pass"
        return True


def by_hand(backend, n_slots, on_fatal=lambda reason: None, max_recoveries=3):
    """An engine whose thread is not started: the test calls `_pass`."""
    with mock.patch.object(threading.Thread, "start"):
        engine = eng.Engine(backend, n_slots, Loop(), on_fatal=on_fatal)
    engine.max_recoveries = max_recoveries
    engine._room = NoWaiting(eng.MAX_UNDELIVERED)
    return engine


def run_dry(engine, max_passes=10_000):
    """Passes and deliveries until there is nothing to do."""
    engine._loop.deliver_all()
    for _ in range(max_passes):
        busy = engine._pass()
        engine._loop.deliver_all()
        if not busy:
            return
    raise AssertionError(f"still busy after {max_passes} passes")


def letters(update):
    """An update in the letters of the grammar: started, progress, token, done/cancelled/failed."""
    end = {None: "", EndKind.CANCELLED: "c", EndKind.FAILED: "f"}.get(update.end, "d")
    return (
        "s" * update.started + "p" * (update.progress is not None) + "t" * len(update.pieces) + end
    )


GRAMMAR = re.compile("s?p*t*[dcf]")
PREFIXES = re.compile("s?p*t*[dcf]?")


class Listener:
    """A job and all that is heard of it."""

    def __init__(self, prompt="ab", n=100, **params):
        self.heard = []
        self.job = Job(GenerationParams(list(prompt.encode()), n, **params), self.heard.append)

    @property
    def word(self):
        return "".join(map(letters, self.heard))

    @property
    def text(self):
        return "".join(piece.text for update in self.heard for piece in update.pieces)

    @property
    def end(self):
        return self.heard[-1].end if self.heard else None


def info(n_ctx=1000):
    nothing = frozenset()
    return eng.ModelInfo("m", n_ctx, 1000, nothing, None, None, nothing, False, {"name": "x"})


def fake_args(**changes):
    return argparse.Namespace(
        **{"fake_delay": 0.0, "fake_script": None, "cache_size": 4096} | changes
    )


def fake(script=None, **changes):
    backend = eng.FakeBackend(fake_args(**changes), "fake")
    backend.script = script
    return backend


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Planted failures are logged with tracebacks by the thousand; nobody reads them."""
    monkeypatch.setattr(eng.log, "disabled", True)


# ==== The job grammar as a state machine ==========================================================


class ScriptedBackend:
    """Does in each step what `actions` says for the slot; raises once what `faults` says.

    It checks what the engine owes a backend: no job twice, none that was cancelled, never idle
    slots while jobs wait, nothing at all after the engine has died. What is wrong is kept in
    `complaints`, because the engine takes an exception here for a broken generator.
    """

    def __init__(self):
        self.info = info()
        self.engine = None
        self.running = {}  # job -> the letters it has said
        self.actions = ["token", "token"]
        self.faults = {}  # method -> exception
        self.submitted = []  # id_task in the order of submit
        self.complaints = []

    def _owes(self, condition, what):
        if not condition:
            self.complaints.append(what)

    def _maybe_fail(self, method):
        self._owes(not self.engine.fatal, f"{method} of a dead engine's backend")
        if method in self.faults:
            raise self.faults.pop(method)

    def submit(self, job):
        self._maybe_fail("submit")
        self._owes(job not in self.running and not job.ended, "a fresh job")
        self.running[job] = ""
        self.submitted.append(job.id_task)

    def cancel(self, job):
        self._maybe_fail("cancel")
        self._owes(job in self.running, "a job to cancel")
        self.running.pop(job, None)

    def inject(self, job, text):
        self._maybe_fail("inject")
        self._owes(job in self.running, "a job to inject into")

    def rebuild(self):
        self._maybe_fail("rebuild")
        self.running.clear()

    def remaining(self):
        return len(self.running)

    def close(self):
        self.running.clear()

    def iterate(self):
        self._owes(not self.engine.waiting or None not in self.engine.slots, "no idle slots")
        self._owes(not any(j.cancelled or j.ended for j in self.running), "no step for the gone")
        self._maybe_fail("iterate")
        updates = [u for job in list(self.running) if (u := self._act(job)) is not None]
        for update in updates:
            if update.end is not None:
                del self.running[update.job]
        return updates

    def _act(self, job):
        said, action = self.running[job], self.actions[job.id_slot]
        update = Update(job, started=said == "", n_decoded=said.count("t"))
        match action:
            case "silent":
                return None
            case "progress" if "t" not in said:
                update.progress = said.count("p") + 1
            case "token" | "progress":
                update.pieces = [Piece("x", [1], update.n_decoded + 1)]
            case "tokens":
                n = update.n_decoded
                update.pieces = [Piece("x", [1], n + 1), Piece("y", [2], n + 2)]
            case kind:
                update.end = EndKind[kind]
        update.n_decoded += len(update.pieces)
        self.running[job] += letters(update)
        return update


ACTIONS = st.sampled_from(["silent", "progress", "token", "tokens", "STOP", "LIMIT", "FAILED"])
ERRORS = st.sampled_from([RuntimeError, ValueError, AssertionError, MemoryError])
METHODS = st.sampled_from(["submit", "iterate", "cancel", "inject", "rebuild"])
FAULTS = st.one_of(*[st.just({})] * 4, st.dictionaries(METHODS, ERRORS, max_size=2))
N_SLOTS = 2


class JobGrammar(RuleBasedStateMachine):
    """Every job says `started? progress* token* (done | cancelled | failed)`, exactly one end."""

    jobs = Bundle("jobs")

    def __init__(self):
        super().__init__()
        self.backend = ScriptedBackend()
        self.deaths = []
        self.engine = by_hand(self.backend, N_SLOTS, self.deaths.append, max_recoveries=2)
        self.backend.engine = self.engine
        self.loop = self.engine._loop
        self.listeners = []

    # -- what the event loop may do, at any time --

    @rule(target=jobs)
    def submit(self):
        listener = Listener()
        self.engine.submit(listener.job)
        self.listeners.append(listener)
        return listener

    @rule(listener=jobs, once_more=st.booleans())
    def cancel(self, listener, once_more):
        self.engine.cancel(listener.job)
        if once_more:
            self.engine.cancel(listener.job)

    @rule(listener=jobs)
    def inject(self, listener):
        listener.job.watch = lambda pieces: "text"

    @precondition(lambda self: self.loop.calls)
    @rule()
    def deliver(self):
        self.loop.deliver()

    # -- what the engine thread does --

    @rule(passes=st.lists(st.tuples(ACTIONS, ACTIONS), min_size=1, max_size=3), fault=FAULTS)
    def step(self, passes, fault):
        """A few passes, the event loop as far behind as it may be; something may go wrong."""
        for method in fault:
            self.backend.faults[method] = fault[method](f"planted in {method}")
        for self.backend.actions in passes:
            while self.n_undelivered() == eng.MAX_UNDELIVERED:
                self.loop.deliver()
            self.engine._pass()

    # -- what is always true --

    @invariant()
    def all_is_in_order(self):
        self.check_grammar()
        self.check_slots()
        self.check_queue()
        assert self.backend.complaints == []
        assert len(self.deaths) <= bool(self.engine.fatal)

    def check_grammar(self):
        """What was heard so far is the beginning of a word of the grammar."""
        for listener in self.listeners:
            assert PREFIXES.fullmatch(listener.word), listener.word

    def check_slots(self):
        """A slot is held exactly by a job that the backend has and that has not ended."""
        held = [job for job in self.engine.slots if job is not None]
        assert all(not job.ended and self.engine.slots[job.id_slot] is job for job in held)
        assert set(held) == (set() if self.engine.fatal else set(self.backend.running))

    def check_queue(self):
        """First in, first out; who waits has no slot; the event loop is never far behind."""
        assert self.backend.submitted == sorted(set(self.backend.submitted))
        for job in self.engine.waiting:
            assert job not in self.engine.slots and not job.ended
        assert self.n_undelivered() <= eng.MAX_UNDELIVERED

    def n_undelivered(self):
        return sum(function == self.engine._on_batch for function, _ in self.loop.calls)

    def teardown(self):
        """Whatever happened: all ends are told, all slots are free and the next job is right."""
        self.loop.deliver_all()
        self.backend.actions = ["STOP", "STOP"]
        self.backend.faults.clear()
        run_dry(self.engine, 1000)
        for listener in self.listeners:
            assert GRAMMAR.fullmatch(listener.word), listener.word
            assert listener.job.ended
        assert self.engine.slots == [None] * N_SLOTS and not self.engine.waiting
        last = Listener()
        self.engine.submit(last.job)
        run_dry(self.engine, 10)
        if self.engine.fatal:
            assert (last.word, self.deaths) == ("f", [self.engine.fatal])
        else:
            assert (last.word, self.backend.remaining()) == ("sd", 0)


def test_every_job_has_one_end_and_slots_are_never_lost():
    steps = settings(max_examples=150, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(JobGrammar, settings=steps)


# ==== Single situations ===========================================================================


def test_a_job_cancelled_twice_and_after_its_end_has_one_end():
    engine, listener = by_hand(fake(), 1), Listener()
    engine.submit(listener.job)
    engine._pass()
    engine.cancel(listener.job)
    engine.cancel(listener.job)
    run_dry(engine)
    engine.cancel(listener.job)
    run_dry(engine)
    assert listener.end is EndKind.CANCELLED
    assert GRAMMAR.fullmatch(listener.word)


def test_a_job_cancelled_before_the_engine_saw_it_never_starts():
    engine, listener = by_hand(fake(), 1), Listener()
    engine.submit(listener.job)
    engine.cancel(listener.job)
    run_dry(engine)
    assert listener.word == "c"
    assert engine.totals["n_steps"] == 0


def test_a_waiting_job_that_is_cancelled_does_not_disturb_the_others():
    engine, listeners = by_hand(fake(["a", "b"]), 1), [Listener() for _ in range(4)]
    for listener in listeners:
        engine.submit(listener.job)
    engine._pass()
    engine.cancel(listeners[1].job)
    engine.cancel(listeners[2].job)
    run_dry(engine)
    assert [listener.end for listener in listeners] == [
        EndKind.STOP,
        EndKind.CANCELLED,
        EndKind.CANCELLED,
        EndKind.STOP,
    ]
    assert [listener.text for listener in listeners] == ["ab", "", "", "ab"]


def test_the_slot_of_a_cancelled_job_is_taken_in_the_same_pass():
    engine, first, second = by_hand(fake(), 1), Listener(), Listener()
    engine.submit(first.job)
    engine._pass()
    engine.submit(second.job)
    engine.cancel(first.job)
    engine._pass()
    assert engine.slots == [second.job]
    assert second.job.last.progress == 2


def test_only_the_end_is_heard_of_a_cancelled_job():
    engine, listener = by_hand(fake(), 1), Listener()
    engine.submit(listener.job)
    engine._pass()
    engine._pass()
    engine.cancel(listener.job)
    engine._loop.deliver_all()
    assert listener.word == ""
    run_dry(engine)
    assert listener.word == "c"


def test_a_job_that_fails_alone_leaves_the_others_alone():
    backend = ScriptedBackend()
    engine, one, two = by_hand(backend, 2), Listener(), Listener()
    backend.engine = engine
    engine.submit(one.job)
    engine.submit(two.job)
    for backend.actions in (["token", "token"], ["FAILED", "token"], ["token", "STOP"]):
        engine._pass()
        engine._loop.deliver_all()
    assert (one.word, two.word) == ("stf", "sttd")
    assert len(engine.recoveries) == 0


def test_a_refused_job_fails_alone_with_the_reason():
    backend = ScriptedBackend()
    engine, one, two = by_hand(backend, 1), Listener(), Listener()
    backend.engine, backend.faults["submit"] = engine, ValueError("too long")
    engine.submit(one.job)
    engine.submit(two.job)
    engine._pass()
    engine._loop.deliver_all()
    assert one.word == "f" and "too long" in one.heard[0].error
    assert two.word == "st"


def test_a_failed_step_fails_running_jobs_with_retry_and_not_the_waiting_ones():
    backend = ScriptedBackend()
    engine, one, two = by_hand(backend, 1), Listener(), Listener()
    backend.engine, backend.faults["iterate"] = engine, RuntimeError("device lost")
    backend.actions = ["STOP"]
    engine.submit(one.job)
    engine.submit(two.job)
    run_dry(engine, 10)
    assert one.word == "f" and one.heard[0].retry and "device lost" in one.heard[0].error
    assert two.word == "sd"
    assert len(engine.recoveries) == 1 and not engine.fatal


def test_a_job_cancelled_in_the_step_that_fails_has_one_end():
    backend = ScriptedBackend()
    engine, one, two = by_hand(backend, 2), Listener(), Listener()
    backend.engine = engine
    engine.submit(one.job)
    engine.submit(two.job)
    engine._pass()
    engine._loop.deliver_all()
    engine.cancel(one.job)
    backend.faults["iterate"] = RuntimeError("device lost")
    run_dry(engine, 10)
    assert (one.word, two.word) == ("stc", "stf")


def test_a_failed_rebuild_is_the_end_of_everything_and_no_busy_loop():
    deaths, backend = [], ScriptedBackend()
    engine, listeners = by_hand(backend, 1, deaths.append), [Listener() for _ in range(3)]
    backend.engine = engine
    backend.faults |= {"iterate": RuntimeError("x"), "rebuild": RuntimeError("no memory")}
    for listener in listeners:
        engine.submit(listener.job)
    run_dry(engine, 5)
    assert [listener.word for listener in listeners] == ["f", "f", "f"]
    assert "no memory" in engine.fatal and deaths == [engine.fatal]
    late = Listener()
    engine.submit(late.job)
    run_dry(engine, 5)
    assert late.word == "f" and late.heard[0].error == engine.fatal
    assert engine._pass() is False


def test_a_job_on_its_way_when_the_engine_dies_is_failed():
    backend = ScriptedBackend()
    engine, one, late = by_hand(backend, 1, max_recoveries=0), Listener(), Listener()
    backend.engine, backend.faults["iterate"] = engine, RuntimeError("x")
    engine.submit(one.job)
    real_iterate = backend.iterate

    def iterate():
        engine.submit(late.job)  # as the event loop does, while the step runs
        return real_iterate()

    backend.iterate = iterate
    run_dry(engine, 5)
    assert (one.word, late.word) == ("f", "f")
    assert late.heard[0].error == engine.fatal


def test_recoveries_are_limited_within_the_window_only():
    backend = ScriptedBackend()
    engine = by_hand(backend, 1, max_recoveries=2)
    backend.engine = engine
    with mock.patch.object(eng.time, "perf_counter") as clock:
        for now in (0.0, 10.0, 61.0, 75.0):  # never three within a minute
            clock.return_value = now
            engine.submit(Listener().job)
            backend.faults["iterate"] = RuntimeError("x")
            run_dry(engine, 5)
        assert not engine.fatal and len(engine.recoveries) == 4
        clock.return_value = 76.0
        engine.submit(Listener().job)
        backend.faults["iterate"] = RuntimeError("x")
        run_dry(engine, 5)
        assert engine.fatal and len(engine.recoveries) == 4


def test_injected_text_comes_next():
    engine, listener = by_hand(fake(["a", "b"]), 1), Listener()
    engine.submit(listener.job)
    said = []

    def watch(pieces):
        said.extend(piece.text for piece in pieces)
        return "!" if said == ["a"] else ""

    listener.job.watch = watch
    run_dry(engine)
    assert listener.text == "a!b"
    assert said == ["a", "!", "b"]  # the step that ends the job says no more


def test_what_a_watch_wants_before_the_first_step_is_said_first():
    engine, listener = by_hand(fake(["a"]), 1), Listener()
    texts = iter(["?"])
    listener.job.watch = lambda pieces: next(texts, "")
    engine.submit(listener.job)
    run_dry(engine)
    assert listener.text == "?a"


def test_all_jobs_of_a_batch_have_heard_theirs_before_one_is_told_so():
    engine, order = by_hand(fake(["a"]), 2), []
    for name in "12":
        listener = Listener()
        listener.job.on_update = lambda update, name=name: order.append(f"heard {name}")
        listener.job.on_told = lambda name=name: order.append(f"told {name}")
        engine.submit(listener.job)
    engine._pass()
    engine._loop.deliver_all()
    assert order == ["heard 1", "heard 2", "told 1", "told 2"]


def test_totals_are_the_final_figures_of_every_job_that_ended_however_it_did():
    engine = by_hand(fake(["a", "b", "c"]), 2)
    whole, waiting, cancelled = Listener("12345"), Listener("123"), Listener("x" * 2000)
    for listener in (whole, cancelled, waiting):
        engine.submit(listener.job)
    engine._pass()
    assert engine.totals["n_evaluated"] == 0  # nothing has ended
    progress = cancelled.job.last.progress
    engine.cancel(cancelled.job)
    run_dry(engine)
    taken = 5 + 3 + progress
    assert engine.totals["n_evaluated"] == taken < 2000
    assert engine.totals["n_decoded"] == 8  # three pieces and the end, twice
    assert engine.totals["n_tokens_max"] == max(9, progress)
    assert engine.totals["predicted_s"] > 0 and engine.totals["n_cached"] == 0
    assert engine.totals["n_steps"] < engine.totals["n_busy"] < 2 * engine.totals["n_steps"]


def test_more_jobs_than_slots_run_in_order_and_all_are_answered():
    engine, listeners = by_hand(fake(["x"]), 2), [Listener() for _ in range(20)]
    for listener in listeners:
        engine.submit(listener.job)
    run_dry(engine)
    assert [listener.text for listener in listeners] == ["x"] * 20
    started = [listener.job.started for listener in listeners]
    assert started == sorted(started)


# ==== The thread ==================================================================================


class Probe(threading.Semaphore):
    """The engine's semaphore, telling when the thread has to wait for the event loop."""

    def __init__(self, value):
        super().__init__(value)
        self.full = threading.Semaphore(0)

    def acquire(self, *args, **kwargs):
        if super().acquire(blocking=False):
            return True
        self.full.release()
        return super().acquire(*args, **kwargs)


def test_the_thread_waits_when_the_event_loop_is_behind():
    """Batch 3 is made but kept until one of the two undelivered ones is taken."""
    engine, listener = by_hand(fake(), 1), Listener(n=1000, ignore_eos=True)
    engine._room = Probe(eng.MAX_UNDELIVERED)
    engine.thread.start()
    engine.submit(listener.job)
    for n_taken in range(5):
        assert engine._room.full.acquire(timeout=PATIENCE_S)
        assert len(engine._loop.calls) == eng.MAX_UNDELIVERED
        assert engine.totals["n_steps"] == n_taken + eng.MAX_UNDELIVERED + 1
        engine._loop.deliver()
    engine.close()
    assert not engine.thread.is_alive()


def test_a_real_loop_hears_of_all_jobs_and_the_thread_ends_when_asked():
    async def run():
        loop, listeners = asyncio.get_running_loop(), [Listener() for _ in range(8)]
        engine, left, over = (
            eng.Engine(fake(["a", "b"]), 2, loop, print),
            len(listeners),
            loop.create_future(),
        )

        def hears(listener, update):
            nonlocal left
            assert threading.current_thread() is threading.main_thread()
            listener.heard.append(update)
            left -= update.end is not None
            if not left:
                over.set_result(None)

        for listener in listeners:
            listener.job.on_update = lambda update, listener=listener: hears(listener, update)
            engine.submit(listener.job)
        await asyncio.wait_for(over, PATIENCE_S)
        engine.close()
        assert not engine.thread.is_alive()
        return listeners

    for listener in asyncio.run(run()):
        assert listener.text == "ab"
        assert GRAMMAR.fullmatch(listener.word)


def test_close_does_not_wait_for_undelivered_batches():
    engine = by_hand(fake(), 1)
    engine._room = Probe(eng.MAX_UNDELIVERED)
    engine.thread.start()
    engine.submit(Listener(n=1000, ignore_eos=True).job)
    assert engine._room.full.acquire(timeout=PATIENCE_S)
    engine.close(PATIENCE_S)
    assert not engine.thread.is_alive()
    assert len(engine._loop.calls) == eng.MAX_UNDELIVERED


# ==== Fault loops =================================================================================


class Faulty(eng.FakeBackend):
    """A fake whose n-th call of one method raises, or every call from the n-th on."""

    def __init__(self, method, n, for_ever):
        super().__init__(fake_args(), "fake")
        self.script = ["a", "b", "c"]
        self.n_calls = 0
        real = getattr(self, method)

        def wrapper(*args):
            self.n_calls += 1
            if self.n_calls == n or for_ever and self.n_calls > n:
                raise RuntimeError(f"planted in {method}, call {self.n_calls}")
            return real(*args)

        setattr(self, method, wrapper)


def eventful_run(engine):
    """Five jobs over two slots: one runs through, others are cancelled in each state, one gets an
    injection."""
    listeners = [Listener() for _ in range(5)]

    def submit(listener):
        engine.submit(listener.job)

    def inject(listener):
        texts = iter(["!"])
        listener.job.watch = lambda pieces: next(texts, "")

    def turn(n=1):
        for _ in range(n):
            engine._pass()
            engine._loop.deliver_all()

    submit(listeners[0])
    submit(listeners[1])
    submit(listeners[2])
    turn(2)
    inject(listeners[0])
    engine.cancel(listeners[1].job)
    turn(2)
    submit(listeners[3])
    submit(listeners[4])
    engine.cancel(listeners[4].job)
    turn(1)
    engine.cancel(listeners[3].job)
    run_dry(engine, 100)
    return listeners


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("method", ["submit", "iterate", "cancel", "inject"])
def test_after_any_fault_slots_are_free_and_the_next_job_is_right(method, for_ever):
    """Fail the first call, then the second, ... until a whole run meets no fault."""
    for n in range(1, 100):
        deaths = []
        backend = Faulty(method, n, for_ever)
        engine = by_hand(backend, 2, deaths.append)
        for listener in eventful_run(engine):
            assert GRAMMAR.fullmatch(listener.word), (n, listener.word)
        assert engine.slots == [None, None] and not engine.waiting
        assert deaths == ([engine.fatal] if engine.fatal else [])
        if backend.n_calls < n:
            break
        if engine.fatal:
            assert for_ever
            continue
        if not for_ever:
            last = Listener()
            engine.submit(last.job)
            run_dry(engine, 100)
            assert (last.text, last.end) == ("abc", EndKind.STOP)
            assert backend.remaining() == 0
    assert 1 < n < 99


# ==== The contract, against both backends =========================================================

N_BACKEND_SLOTS = 2


@pytest.fixture(scope="module")
def exl3_backend():
    """The real exllamav3 on the CPU, 4 pages of cache for each of two slots."""
    import cpu_exllamav3

    cpu_exllamav3.torch.set_num_threads(1)
    cpu_exllamav3.install()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    eng.add_model_args(parser)
    model = str(tiny_model.cached("fp16"))
    args = parser.parse_args(["-m", model, "-cs", "2048", "-chunk_size", "256"])
    return eng.Exl3Backend(args, N_BACKEND_SLOTS, [], lambda n, of: None)


class Driver:
    """Runs jobs on a backend with no engine around it, checking the contract at every step."""

    def __init__(self, backend):
        self.backend = backend
        self.ids = 0
        self.listeners = {}
        self.pages = getattr(getattr(backend, "generator", None), "pagetable", None)
        self.n_free = self.pages and self.pages.num_unreferenced_pages()

    def submit(self, prompt="Hello, world!", n=8, **params):
        listener = Listener("", n, **{"sampling": {"temperature": 0}, "ignore_eos": True} | params)
        listener.job.params.prompt_ids = self.backend.encode(prompt, False)
        listener.job.id_task = self.ids = self.ids + 1
        self.backend.submit(listener.job)
        self.listeners[listener.job.id_task] = listener
        return listener

    def cancel(self, listener):
        self.backend.cancel(listener.job)
        del self.listeners[listener.job.id_task]

    def step(self):
        updates = self.backend.iterate()
        assert len({u.job.id_task for u in updates}) == len(updates)
        for update in updates:
            listener = self.listeners[update.job.id_task]
            self.check(listener, update)
            listener.heard.append(update)
            if update.end is not None:
                del self.listeners[update.job.id_task]
        assert self.backend.remaining() == len(self.listeners)
        if self.pages:
            self.pages.validate_pagetable(self.backend.generator.active_jobs)
        return updates

    def check(self, listener, update):
        """Grammar and figures of one update against those before it."""
        last = listener.heard[-1] if listener.heard else Update(update.job)
        assert PREFIXES.fullmatch(listener.word + letters(update)), listener.word + letters(update)
        n_prompt = len(update.job.params.prompt_ids)
        if update.progress is not None:
            assert 0 < update.progress <= n_prompt
        counts = [piece.n_decoded for u in (*listener.heard, update) for piece in u.pieces]
        assert counts == sorted(counts)
        if update.end is not EndKind.FAILED:
            for name in ("n_decoded", "prompt_s", "predicted_s", "n_draft", "n_draft_accepted"):
                assert getattr(update, name) >= getattr(last, name), name
        n_ids = sum(len(piece.ids) for u in (*listener.heard, update) for piece in u.pieces)
        if update.end in DONE:
            assert n_ids == update.n_decoded <= max(0, update.job.params.max_tokens)
        if counts:
            assert counts[-1] == n_ids
        assert 0 <= update.n_cached < max(n_prompt, 1)

    def finish(self, max_steps=5000):
        while self.backend.remaining():
            self.step()
            max_steps -= 1
            assert max_steps
        if self.pages:
            assert self.pages.num_unreferenced_pages() == self.n_free
            assert not self.backend.generator.num_remaining_jobs()


@pytest.fixture(params=["fake", "exllamav3"])
def driver(request):
    backend = fake() if request.param == "fake" else request.getfixturevalue("exl3_backend")
    driver = Driver(backend)
    yield driver
    driver.finish()


def test_contract_a_job_runs_from_started_to_its_limit(driver):
    listener = driver.submit(n=8)
    driver.finish()
    assert listener.heard[0].started
    assert listener.end is EndKind.LIMIT
    assert listener.heard[-1].n_decoded == 8
    assert listener.text
    assert listener.heard[-1].predicted_s > 0


def test_contract_a_long_prompt_makes_progress_to_its_end(driver):
    listener = driver.submit("".join(f"{i}: a line of text\n" for i in range(60)), n=2)
    driver.finish()
    progress = [u.progress for u in listener.heard if u.progress is not None]
    assert len(progress) > 1
    assert progress == sorted(set(progress))
    assert len(listener.job.params.prompt_ids) - progress[-1] <= 1
    assert listener.heard[-1].prompt_s > 0


@pytest.mark.parametrize("prompt", ["x", "Hello, world! " * 40])
def test_contract_no_tokens_are_generated_when_none_are_wanted(driver, prompt):
    listener = driver.submit(prompt, n=0)
    driver.finish()
    assert listener.end is EndKind.LIMIT
    assert listener.heard[-1].n_decoded == 0
    assert not any(update.pieces for update in listener.heard)
    assert listener.heard[-1].predicted_s == 0


@pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 5])
def test_contract_nothing_is_heard_of_a_cancelled_job(driver, n_steps):
    """In every state: before its first step, in prefill, in decode."""
    other = driver.submit("The user asked", n=12)
    listener = driver.submit("Hello, world! " * 100, n=50)
    for _ in range(n_steps):
        driver.step()
    driver.cancel(listener)
    assert driver.backend.remaining() == 1
    driver.finish()
    assert other.end is EndKind.LIMIT


def test_contract_two_jobs_at_once_say_what_each_says_alone(driver):
    prompts = ["The user asked about", "def fibonacci(n):\n"]
    alone = []
    for prompt in prompts:
        alone.append(driver.submit(prompt, n=12))
        driver.finish()
    together = [driver.submit(prompt, n=12) for prompt in prompts]
    driver.finish()
    assert [job.text for job in together] == [job.text for job in alone]


def test_contract_a_rebuilt_backend_goes_on_as_before(driver):
    before = driver.submit(n=8)
    driver.finish()
    driver.submit(n=50)
    driver.step()
    driver.step()
    driver.backend.rebuild()
    assert driver.backend.remaining() == 0
    driver.__init__(driver.backend)
    after = driver.submit(n=8)
    driver.finish()
    assert after.text == before.text


def test_a_rebuilt_generator_that_makes_no_token_is_no_remedy(exl3_backend, monkeypatch):
    def every_end_is_a_failure(backend):
        updates = iterate(backend)
        for update in updates:
            update.end = update.end and EndKind.FAILED
        return updates

    iterate = eng.Exl3Backend.iterate
    monkeypatch.setattr(eng.Exl3Backend, "iterate", every_end_is_a_failure)
    with pytest.raises(RuntimeError, match="makes no token"):
        exl3_backend.rebuild()
    monkeypatch.undo()
    exl3_backend.rebuild()
    assert exl3_backend.generator.num_remaining_jobs() == 0


def test_contract_an_injection_is_said_next(driver):
    listener = driver.submit(n=40)
    while not listener.text:
        driver.step()
    n_chars = len(listener.text)
    driver.backend.inject(listener.job, " [injected] ")
    driver.finish()
    assert listener.text[n_chars - 1 : n_chars + 24].find("[injected]") >= 0
    assert listener.heard[-1].n_decoded == 40


def test_contract_probabilities_come_for_every_token_when_asked_for(driver):
    for n_probs in (0, 3):
        listener = driver.submit(n=5, n_probs=n_probs)
        driver.finish()
        for piece in (p for u in listener.heard for p in u.pieces):
            assert len(piece.probs) == len(piece.ids)
            for own, top in piece.probs:
                assert 0 <= own <= 1
                assert len(top) <= n_probs
                assert top == sorted(top, key=lambda pair: -pair[1])


TEXTS = st.text(st.sampled_from("ab \n<|>é東🦜0\x00\u2028"), max_size=12)


def check_text_round_trip(backend, text):
    ids = backend.encode(text, False)
    assert all(type(i) is int and 0 <= i < backend.info.n_vocab for i in ids)
    assert b"".join(map(backend.token_bytes, ids)) == text.encode()
    assert backend.decode(ids) == text


@given(text=TEXTS)
@settings(deadline=None)
def test_contract_a_text_is_the_bytes_of_its_tokens_in_the_fake(text):
    check_text_round_trip(fake(), text)


def test_contract_a_text_is_the_bytes_of_its_tokens_in_exllamav3(exl3_backend):
    @given(text=TEXTS)
    @settings(deadline=None)
    def check(text):
        check_text_round_trip(exl3_backend, text)

    check()


@pytest.mark.parametrize(
    ("kind", "source"),
    [("gbnf", "root ::= ("), ("json_schema", '{"type": 5}'), ("lark", "start: ("), ("gbnf", "")],
)
def test_contract_a_grammar_that_does_not_compile_is_told(driver, kind, source):
    with pytest.raises(eng.BadGrammar) as caught:
        driver.backend.compile_grammar(kind, source, None)
    assert str(caught.value)


def test_contract_single_id_names_exactly_the_token_of_that_text(exl3_backend):
    for tag in ("<think>", "</think>"):
        token = exl3_backend.single_id(tag)
        assert exl3_backend.decode([token]) == tag
    assert exl3_backend.single_id("<nothing>") is None
    assert fake().single_id("<think>") is None


# ==== exllamav3 only ==============================================================================


def test_a_job_taken_in_rounds_still_starts_once(exl3_backend):
    """exllamav3 queues it again after each round; nothing of that may be seen."""
    driver = Driver(exl3_backend)
    small_share = mock.patch.object(exl3_backend, "n_slots", 32)
    with small_share, mock.patch.object(eng, "REQUEUE_TOKENS", 256):
        long, other = driver.submit(n=520), driver.submit("x", n=20)
    driver.finish()
    assert long.job.handle.is_requeued
    assert long.heard[-1].n_decoded == 520 and long.end is EndKind.LIMIT
    assert other.heard[-1].n_decoded == 20
    assert long.word.count("s") == 1


def test_housekeeping_goes_on_in_steps_while_there_is_no_job(exl3_backend):
    left = ["some", "more", "the last"]
    has_work = mock.patch.object(exl3_backend.generator, "has_idle_work", lambda: bool(left))
    with has_work, mock.patch.object(exl3_backend.generator, "idle_work", left.pop):
        engine = by_hand(exl3_backend, 1)
        run_dry(engine)
        assert engine.totals["n_steps"] == 3 and not left
        engine.submit(Listener(n=2, sampling={"temperature": 0}).job)
        run_dry(engine)
    assert engine.totals["n_steps"] > 3 and not engine.recoveries


def edge_values(field_rule):
    """The lowest, the highest and the smallest steps from there that a row allows."""
    low, high, kind = field_rule.low, field_rule.high, field_rule.kind
    ends = [value for value in (low, high) if abs(value) != float("inf")]
    steps = [0, 1, low + 1, high - 1] if kind is int else [0.0, 1e-300, 1e-3, 1.0, 1e300]
    return sorted({kind(v) for v in [*ends, *steps] if low <= v <= high and abs(v) <= 1e300})


EDGES = [
    (name, value)
    for name in eng.NEUTRAL_SAMPLING
    if exl3_serve.FIELDS[name].kind in (int, float)
    for value in edge_values(exl3_serve.FIELDS[name])
]


@pytest.mark.parametrize(("name", "value"), EDGES, ids=str)
def test_no_sampling_value_that_is_accepted_raises_later(exl3_backend, name, value):
    """GenerationParams promises it: an exception in a step would fail all running jobs."""
    on = {"dry_multiplier": 0.5, "xtc_probability": 0.5, "repeat_penalty": 1.1}
    sampling = {"temperature": 0.8} | on | {"presence_penalty": 0.1} | {name: value}
    driver = Driver(exl3_backend)
    listener = driver.submit(n=3, sampling=sampling, seed=1)
    driver.finish()
    assert listener.end is EndKind.LIMIT


SEED = exl3_serve.FIELDS["seed"]


@pytest.mark.parametrize("seed", [SEED.low, -1, 0, 2**32, 2**63, SEED.high, SEED.high + 63])
def test_any_seed_that_is_accepted_repeats_its_text(exl3_backend, seed):
    driver = Driver(exl3_backend)
    texts = []
    for _ in range(2):
        listener = driver.submit(n=12, sampling={"temperature": 1.0}, seed=int(seed))
        driver.finish()
        texts.append(listener.text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bias", [1e30, -1e30, float("-inf"), 0.0])
def test_any_logit_bias_that_is_accepted_is_harmless(exl3_backend, bias):
    driver = Driver(exl3_backend)
    ids = {0, 65, exl3_backend.info.n_vocab - 1}
    listener = driver.submit(n=6, logit_bias=dict.fromkeys(ids, bias))
    driver.finish()
    said = {i for update in listener.heard for piece in update.pieces for i in piece.ids}
    if bias > 0:
        assert said <= ids
    elif bias < 0:
        assert not said & ids


def test_a_job_that_bans_every_token_does_not_break_the_generator(exl3_backend):
    driver = Driver(exl3_backend)
    everything = dict.fromkeys(range(exl3_backend.info.n_vocab), float("-inf"))
    for sampling in ({"temperature": 0}, {"temperature": 1.0}):
        driver.submit(n=2, logit_bias=everything, sampling=sampling)
        other = driver.submit(n=2)
        driver.finish()
        assert other.end is EndKind.LIMIT


def test_dry_breakers_of_a_request_reach_the_sampler(exl3_backend):
    tokenizer = exl3_backend.tokenizer
    pieces = tokenizer.get_id_to_piece_list(True)
    for breakers in (["\n"], ["a", "!"], []):
        wanted = {"dry_multiplier": 1.0, "dry_sequence_breakers": breakers}
        params = eng.GenerationParams(prompt_ids=[1], max_tokens=1, sampling=wanted)
        (dry,) = [s for s in eng.make_sampler(params, tokenizer).steps if "DRY" in type(s).__name__]
        expected = [i for i, piece in enumerate(pieces) if any(b in piece for b in breakers)]
        assert (dry.breakers.token_ids if dry.breakers else []) == expected

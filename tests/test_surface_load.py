"""Many connections and a long queue, and a server that is killed under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import selectors
import signal
import threading
import time
from pathlib import Path

import pytest
from server_process import (
    HI,
    PATIENCE_S,
    Reader,
    eventually,
    http_request,
    in_threads,
    reset,
    sse_data,
)

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
N_CONNECTIONS, N_WAITING, N_SLOTS = 1000, 300, 4


# ---- Load ----------------------------------------------------------------------------------------


@pytest.fixture
def many_files():
    """Lets this process have a descriptor for every connection."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = N_CONNECTIONS + 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(server):
    status = Path(f"/proc/{server.process.pid}/status")
    if not status.exists():
        pytest.skip("no /proc here")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1]) * 1024


def arrivals(readers):
    """The order in which the readers got their first event, and all that each got."""
    order, heard = [], {}
    with selectors.DefaultSelector() as selector:
        for number, reader in readers.items():
            selector.register(reader.sock, selectors.EVENT_READ, number)
            heard[number] = reader.buffer
        give_up = time.monotonic() + 2 * PATIENCE_S
        while selector.get_map():
            assert time.monotonic() < give_up, f"{len(selector.get_map())} are not answered"
            for key, _ in selector.select(1.0):
                if not heard[key.data]:
                    order.append(key.data)
                data = key.fileobj.recv(65536)
                assert data, "closed within an answer"
                heard[key.data] += data
                if heard[key.data].endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
    return order, heard


def test_300_requests_wait_on_1000_connections_and_are_answered_in_order(own_server, many_files):
    server = own_server("--fake", "--fake-delay", "0.005", "-np", N_SLOTS).wait_ready()
    server.assert_alive()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(N_CONNECTIONS)]
        for sock in socks:
            sock.sendall(http_request("/health"))
        for sock in socks:
            assert Reader(sock).answer()[0] == 200
        connected = resident_bytes(server)
        endless = {"messages": HI, "stream": True, "ignore_eos": True}
        blockers = [stack.enter_context(server.connect()) for _ in range(N_SLOTS)]
        for sock in blockers:
            sock.sendall(http_request(CHAT, endless))
        server.wait_busy(N_SLOTS)
        before, readers = resident_bytes(server), {}
        for number, sock in enumerate(socks[:N_WAITING]):
            body = {"prompt": "x" * (number + 1), "stream": True, "max_tokens": 3}
            sock.sendall(http_request(COMPLETION, body))
            readers[number] = Reader(sock)
            assert readers[number].head()[0] == 200  # it has arrived: the next one is later
        each = (resident_bytes(server) - before) / N_WAITING
        for sock in blockers:
            sock.close()
        order, heard = arrivals(readers)
        for number, raw in heard.items():
            assert re.findall(rb'"content":"([^"]*)"', raw) == [b"This", b" is", b" the", b""]
            assert set(re.findall(rb'"tokens_evaluated":(\d+)', raw)) == {b"%d" % (number + 1)}
        # Those that start in one step may be seen in any order
        assert all(abs(place - number) < 2 * N_SLOTS for place, number in enumerate(order))
        assert server.get("/health")[0] == 200
    print(f"resident: {before / 2**20:.1f} MiB with {N_CONNECTIONS} connections,")
    print(f"{each / 1024:.1f} KiB for each waiting request")
    assert each < 128 * 1024 and connected < 128 * 2**20
    server.assert_alive()


def test_many_who_ask_while_the_model_loads_are_told_so_and_then_answered(own_server):
    server = own_server("--fake", program="serve_faulty.py", FAULTY_LOAD_S="2").wait_listening()
    paths = ["/health", "/v1/models", COMPLETION]

    def client(number):
        path, body, statuses, waits = paths[number % 3], {"prompt": "a", "n_predict": 1}, [], []
        give_up = time.monotonic() + PATIENCE_S
        while statuses[-1:] != [200] and time.monotonic() < give_up:
            began = time.monotonic()
            method, sent = ("POST", body) if path == COMPLETION else ("GET", None)
            statuses.append(server.request(method, path, sent)[0])
            waits.append(time.monotonic() - began)
            time.sleep(0.1)
        return statuses, max(waits)

    found = in_threads(*[lambda n=n: client(n) for n in range(48)])
    for statuses, worst in found:
        assert statuses[0] == 503 and statuses[-1] == 200 and set(statuses) == {503, 200}
        assert worst < 2  # it waits for nothing but its turn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_ends_all_in_time_and_each_with_its_line(own_server, tmp_path, number):
    path = tmp_path / "audit"
    args = ("--fake-delay", "0.01", "-np", N_SLOTS, "--drain-seconds", "1", "--audit-log", path)
    server = own_server("--fake", *args).wait_ready()
    endless = {"prompt": "a", "ignore_eos": True, "n_predict": 4000}
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(100)]
        for sock in idle:
            sock.sendall(http_request("/health"))
            assert Reader(sock).answer()[0] == 200
        asking = [stack.enter_context(server.connect()) for _ in range(120)]
        for i, sock in enumerate(asking):
            sock.sendall(http_request(COMPLETION, endless | {"stream": i % 2 == 0}))
        eventually(lambda: server.n_busy() == N_SLOTS, "the slots are busy")
        for sock in asking[:10]:
            reset(sock)
        began = time.monotonic()
        server.send_signal(number)
        for i, sock in enumerate(asking[10:]):
            raw = Reader(sock).rest()
            assert b'"error":{"code":503' in raw and b'"stop":true' not in raw
            assert raw.startswith(b"HTTP/1.1 200 " if i % 2 == 0 else b"HTTP/1.1 503 ")
        assert server.wait_end(10) == 0
        assert time.monotonic() - began < 5
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    statuses = [row["status"] for row in rows if row["route"] == COMPLETION]
    assert sorted(statuses) == [200] * 55 + [499] * 10 + [503] * 55


# ---- Killed --------------------------------------------------------------------------------------


def test_who_asks_again_loses_nothing_but_open_streams_when_the_server_is_killed(own_server):
    server = own_server("--fake", "--fake-delay", "0.01", "-np", 3).wait_ready()
    asked_again = []

    def ask_until_answered(prompt):
        give_up = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < give_up, "not answered"
            try:
                status, answer = server.post(COMPLETION, {"prompt": prompt, "n_predict": 20})
                if status == 200:
                    return answer["content"]
            except (OSError, http.client.HTTPException):
                asked_again.append(prompt)
            time.sleep(0.02)

    def client(name):
        assert streaming.wait(PATIENCE_S)
        texts = []
        for i in range(6):
            texts.append(ask_until_answered(name * (i + 1)))
            some_answered.set()
        return texts

    def stream():
        with server.open_stream({"ignore_eos": True, "max_tokens": 4000}) as (reader, status, _):
            assert status == 200
            raw = b""
            with pytest.raises((AssertionError, ConnectionError)):  # closed within the answer
                while True:
                    raw += reader.chunk()
                    streaming.set()
        assert b"[DONE]" not in raw and b'"finish_reason":"' not in raw
        return len(sse_data(raw))

    def kill_and_start():
        assert some_answered.wait(PATIENCE_S)
        eventually(lambda: server.n_busy() == 3, "the slots are busy")
        server.process.send_signal(signal.SIGKILL)
        assert server.wait_end() == -signal.SIGKILL
        again = own_server("--fake", "-np", 3, "--port", server.port)
        again.wait_ready().assert_alive()

    streaming, some_answered = threading.Event(), threading.Event()
    clients = [lambda name=name: client(name) for name in "abcdefgh"]
    *texts, n_events, _ = in_threads(*clients, stream, kill_and_start)
    assert [text for client_texts in texts for text in client_texts] == [
        f"This is the fake engine of exl3-serve: no model is loaded. Your prompt has {i + 1}"
        " tokens and the sum of"
        for _ in texts
        for i in range(6)
    ]
    assert n_events > 0 and len(asked_again) > 0

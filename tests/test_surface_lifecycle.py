"""Clients that leave, engines that fail, start and stop: cases 68 to 72 and 74 to 76.

Cases 70 and 72 with the real engine are in test_real_engine.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
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

CHAT = "/v1/chat/completions"
COMPLETION = "/completion"
ENDLESS = {"messages": HI, "stream": True, "ignore_eos": True}
LONG_PROMPT = "a" * 500_000  # 977 steps of the fake


def send(server, path, body):
    sock = server.connect()
    sock.sendall(http_request(path, body))
    return sock


def busy(server):
    """The busy slots' rows."""
    return [slot for slot in server.slots() if slot["is_processing"]]


# ---- Case 68: clients that leave in prefill or while queued --------------------------------------


def test_who_leaves_the_queue_never_starts_and_disturbs_nobody(fake_server):
    server = fake_server(["x"], "--parallel", 1, delay=0.02)
    running = Reader(send(server, CHAT, ENDLESS | {"max_tokens": 100}))
    assert running.head()[0] == 200
    server.wait_busy(1)
    prompts = {name: name * (200 + 10 * i) for i, name in enumerate("bcd")}
    queued = {}
    for name, prompt in prompts.items():
        body = {"prompt": prompt, "stream": True, "ignore_eos": True, "n_predict": 30}
        queued[name] = send(server, COMPLETION, body)
        assert Reader(queued[name]).head()[0] == 200
    queued["b"].close()
    reset(queued["c"])
    started = set()
    text = b""
    while piece := running.chunk():
        text += piece
        started |= {slot["n_prompt_tokens"] for slot in busy(server)}
    assert text.count(b'"content":"x"') == 100 and b'"finish_reason":"length"' in text
    d = Reader(queued["d"])
    text = b""
    while piece := d.chunk():
        text += piece
        started |= {slot["n_prompt_tokens"] for slot in busy(server)}
    assert text.count(b'"content":"x"') == 30
    lengths = {name: len(prompt) for name, prompt in prompts.items()}
    assert lengths["d"] in started
    assert not {lengths["b"], lengths["c"]} & started
    server.assert_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])
def test_who_leaves_in_prefill_frees_the_slot(fake_server, leave, stream):
    server = fake_server(["x"], "--parallel", 1, "-cs", 1_000_000, delay=0.02)
    sock = send(server, COMPLETION, {"prompt": LONG_PROMPT, "stream": stream})
    server.wait_busy(1)
    assert busy(server)[0]["n_decoded"] == 0
    leave(sock)
    eventually(lambda: server.n_busy() == 0, "the slot is free", 5)
    server.assert_alive()


# ---- Case 69: clients that leave while no answer is streamed -------------------------------------


def test_who_leaves_a_request_without_stream_frees_the_slot(fake_server):
    server = fake_server(["x"], delay=0.02, think=True)
    body = ENDLESS | {"stream": False, "max_tokens": 4000}
    socks = [send(server, CHAT, body) for _ in range(4)]  # two slots
    server.wait_busy(2)
    eventually(lambda: all(slot["n_decoded"] > 2 for slot in busy(server)), "tokens")
    for i, sock in enumerate(socks):
        sock.close() if i % 2 else reset(sock)
    eventually(lambda: server.n_busy() == 0, "the slots are free", 5)
    server.assert_alive()


def test_a_half_closed_client_counts_as_gone(fake_server):
    """The policy of http11.py ("A vanished client"): FIN is leaving, as with llama-server."""
    server = fake_server(["x"], delay=0.02)
    with send(server, CHAT, ENDLESS | {"stream": False, "max_tokens": 4000}) as sock:
        server.wait_busy(1)
        sock.shutdown(socket.SHUT_WR)
        eventually(lambda: server.n_busy() == 0, "the slot is free", 5)
    server.assert_alive()


# ---- Case 70: many cancels (test_real_engine.py has the same with the real engine) ---------------


def test_after_many_rounds_of_leaving_anywhere_everything_still_works(fake_server):
    server = fake_server(list("abcdefgh"), "--parallel", 3, delay=0.002)
    rng = random.Random(1)
    for _ in range(12):
        socks = [send(server, CHAT, {"messages": HI, "stream": True}) for _ in range(4)]
        for sock in socks[:2]:
            reader = Reader(sock)
            n_tokens = rng.randrange(-1, 9)  # -1: before the head, 8: all of them
            if n_tokens >= 0:
                reader.head()
            for _ in range(n_tokens):
                reader.chunk()
            sock.close() if rng.random() < 0.5 else reset(sock)
        for sock in socks[2:]:
            reader = Reader(sock)
            status, headers = reader.head()
            raw = reader.body(headers)
            assert status == 200 and raw.endswith(b"data: [DONE]\n\n")
            assert "".join(re.findall(r'"content":"(\w)"', raw.decode())) == "abcdefgh"
            sock.close()
    server.assert_alive()


# ---- Case 71: one bad job ------------------------------------------------------------------------

GOOD = ENDLESS | {"max_tokens": 60}


def with_word(word):
    return {"messages": [{"role": "user", "content": word}], "ignore_eos": True, "max_tokens": 9}


@pytest.fixture
def faulty(own_server):
    server = own_server("--fake", "--fake-delay", "0.01", "-np", "3", program="serve_faulty.py")
    return server.wait_ready()


@pytest.mark.parametrize("word", ["FAIL-ON-SUBMIT", "FAIL-ALONE"])
def test_a_job_that_fails_alone_ends_alone(faulty, word):
    others = [Reader(send(faulty, CHAT, GOOD)) for _ in range(2)]
    faulty.wait_busy(2)
    status, answer = faulty.post(CHAT, with_word(word))
    assert status == 500 and answer["error"]["type"] == "server_error"
    error = json.loads(faulty.stream(CHAT, with_word(word))[-1])["error"]
    assert error["code"] == 500
    for reader in others:
        raw = reader.body(reader.head()[1])
        assert raw.count(b'"content":"') == 61 and b'"finish_reason":"length"' in raw
    faulty.assert_alive()


@pytest.mark.parametrize("word", ["FAIL-IN-PREFILL", "FAIL-IN-DECODE"])
def test_when_the_generator_fails_no_answer_looks_finished_and_it_is_rebuilt(faulty, word):
    others = [Reader(send(faulty, CHAT, GOOD)) for _ in range(2)]
    faulty.wait_busy(2)
    status, answer = faulty.post(CHAT, with_word(word))
    assert status in (500, 503) and answer["error"]["code"] == status
    for reader in others:
        raw = reader.body(reader.head()[1])
        last = json.loads(sse_data(raw)[-1])
        assert last["error"]["code"] in (500, 503)
        assert b'"finish_reason":"' not in raw and b"[DONE]" not in raw
    faulty.expect_traceback("planted in")
    for _ in range(10):
        assert faulty.post(CHAT, {"messages": HI})[0] == 200
    faulty.assert_alive()


def test_jobs_that_wait_survive_a_failure_of_the_generator(faulty):
    """Three slots; the failure hits who runs, not who waits."""
    running = [send(faulty, CHAT, GOOD | {"max_tokens": 4000}) for _ in range(2)]
    faulty.wait_busy(2)
    failing = send(faulty, CHAT, with_word("FAIL-IN-DECODE"))
    faulty.wait_busy(3)
    assert faulty.post(CHAT, {"messages": HI})[0] == 200
    faulty.expect_traceback("planted in")
    for sock in (*running, failing):
        sock.close()


def test_an_engine_that_cannot_be_rebuilt_says_so_and_ends_the_process(own_server):
    server = own_server("--fake", program="serve_faulty.py", FAULTY_REBUILD="planted: no memory")
    server.wait_ready()
    status, answer = server.post(CHAT, with_word("FAIL-IN-DECODE"))
    assert status in (500, 503), answer

    def is_gone():
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert server.get("/health")[0] == 503
        return server.process.poll() is not None

    eventually(is_gone, "the process ended")
    assert server.process.returncode != 0
    server.expect_traceback("planted")


# ---- Case 72: what may block the event loop ------------------------------------------------------


def test_big_requests_block_neither_streams_nor_health(fake_server):
    """Largest gap of a stream of 50 tokens a second, and longest /health. Bounds are generous."""
    server = fake_server(["x"], delay=0.02)
    sizes = [{"messages": [{"role": "user", "content": "a" * 5_000_000}]}]
    sizes += [{"messages": [{"role": "user", "content": "a"}] * 3000}]
    sizes += [{"messages": HI, "zzz": [{"a": [1, 2, 3]}] * 200_000}]
    gaps, healths = [], []
    done = threading.Event()

    def stream():
        with server.open_stream(ENDLESS | {"max_tokens": 4000}) as (reader, _, _):
            before = None
            while not done.is_set():
                reader.chunk()
                now = time.monotonic()
                gaps.append(now - (before or now))
                before = now

    def poll():
        while not done.is_set():
            began = time.monotonic()
            assert server.get("/health")[0] == 200
            healths.append(time.monotonic() - began)
            time.sleep(0.02)

    def ask():
        try:
            for body in sizes * 2:
                assert server.request("POST", CHAT, body | {"max_tokens": 1})[0] in (200, 400)
        finally:
            done.set()

    in_threads(stream, poll, ask)
    assert len(gaps) > 10 and len(healths) > 5
    assert max(gaps) < 1.0
    assert max(healths) < 1.0


# ---- Case 74: loading ----------------------------------------------------------------------------

LOADING = {"code": 503, "message": "Loading model", "type": "unavailable_error"}


def test_while_loading_every_route_is_a_503_and_then_all_work(own_server):
    server = own_server("--fake", program="serve_faulty.py", FAULTY_LOAD_S="1.5")
    began = time.monotonic()
    server.wait_listening()
    assert time.monotonic() - began < 10
    seen = set()
    while server.get("/health")[0] == 503:
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("GET", "/props", None),
            ("POST", CHAT, {"messages": HI}),
        ):
            status, headers, data = server.request(method, path, body)
            if status == 503:
                error = json.loads(data)["error"]
                assert LOADING.items() <= error.items()
                assert 0 <= error.get("progress", 0) <= 1
                assert headers["content-type"].startswith("application/json")
                seen.add(path)
    assert seen == {"/health", "/v1/models", "/props", CHAT}
    assert server.get("/health") == (200, {"status": "ok"})
    server.assert_alive()


def test_a_failed_load_is_one_clear_line_and_exit_code_1(own_server):
    words = "planted: not enough memory"
    server = own_server("--fake", program="serve_faulty.py", FAULTY_LOAD=words)
    assert server.wait_end() == 1
    lines = [line for line in server.log().splitlines() if words in line]
    assert len(lines) == 1 and "cannot load" in lines[0]


def test_a_template_that_does_not_parse_is_one_clear_line(own_server, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% if %}")
    for file in (path, tmp_path / "missing.jinja"):
        server = own_server("--fake", "--chat-template-file", file)
        assert server.wait_end() == 1
        assert "cannot load" in server.log()


@pytest.mark.parametrize("args", [["--nonsense"], [], ["--fake", "-cs"], ["--fake", "--port", "x"]])
def test_wrong_options_are_refused_with_usage(own_server, args):
    server = own_server(*args, "--port", "0") if "--port" not in args else own_server(*args)
    assert server.wait_end() == 2
    assert "usage:" in server.log()


# ---- Case 75: addresses --------------------------------------------------------------------------


def test_a_port_in_use_ends_the_second_server_before_it_loads(own_server, fake_server):
    port = fake_server(["x"]).port
    second = own_server("--fake", "--port", port, program="serve_faulty.py", FAULTY_LOAD_S="30")
    assert second.wait_end(10) == 1
    assert str(port) in second.log() and "in use" in second.log()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "x" * 120 + ".sock"])
def test_an_impossible_address_is_one_line_and_exit_code_1(own_server, host):
    server = own_server("--fake", "--host", host)
    assert server.wait_end(15) == 1
    assert host in server.log()


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["localhost", "::1", "[::1]", "::", "0.0.0.0"])
def test_every_form_of_host_is_served_and_its_port_printed(own_server, host):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    server = own_server("--fake", "--host", host)
    line = eventually(
        lambda: re.search(r"listening on (http://\S+):(\d+)", server.log()), "printed"
    )
    address = "::1" if "::1" in host else "127.0.0.1"
    connection = http.client.HTTPConnection(address, int(line[2]), timeout=PATIENCE_S)
    with contextlib.closing(connection):

        def ready():
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200

        eventually(ready, "ready")
    warned = "no --api-key" in server.log()
    assert warned == (host in ("::", "0.0.0.0"))


def unix_get(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        sock.sendall(http_request("/health"))
        return Reader(sock).answer()[0]


def test_a_dead_socket_file_is_replaced_and_a_live_one_or_a_file_is_not(own_server, tmp_path):
    path = tmp_path / "s.sock"
    first = own_server("--fake", "--host", path)
    eventually(lambda: f"listening on unix:{path}" in first.log(), "listening")
    eventually(lambda: unix_get(path) == 200, "ready")
    second = own_server("--fake", "--host", path)
    assert second.wait_end() == 1 and unix_get(path) == 200
    first.process.kill()
    first.wait_end()
    assert path.exists()
    third = own_server("--fake", "--host", path)
    eventually(lambda: f"listening on unix:{path}" in third.log(), "listening")
    eventually(lambda: unix_get(path) == 200, "ready")
    third.send_signal(signal.SIGTERM)
    assert third.wait_end() == 0 and not path.exists()
    path.write_text("precious")
    fourth = own_server("--fake", "--host", path)
    assert fourth.wait_end() == 1 and path.read_text() == "precious"


# ---- Case 76: signals ----------------------------------------------------------------------------


def refuses(server):
    try:
        server.connect().close()
        return False
    except ConnectionRefusedError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_honestly_and_the_process_soon(own_server, number):
    server = own_server("--fake", "--fake-delay", "0.05", "-cs", 1_000_000, "--drain-seconds", 1)
    server.wait_ready()
    with contextlib.ExitStack() as stack:
        active = stack.enter_context(send(server, CHAT, ENDLESS | {"max_tokens": 4000}))
        stack.enter_context(send(server, COMPLETION, {"prompt": LONG_PROMPT}))
        server.wait_busy(2)
        queued = stack.enter_context(send(server, CHAT, ENDLESS))
        idle = stack.enter_context(server.connect())
        idle.sendall(http_request("/health"))
        assert Reader(idle).answer()[0] == 200
        half = stack.enter_context(server.connect())
        half.sendall(b"POST /completion HTTP/1.1\r\nContent-Le")
        server.send_signal(number)
        eventually(lambda: refuses(server), "the listener closed", 5)
        assert Reader(idle).rest() == b""
        for sock in (active, queued):
            raw = Reader(sock).rest().partition(b"\r\n\r\n")[2]
            assert b'"finish_reason":"' not in raw and b"[DONE]" not in raw
            assert b'"error":{' in raw
    assert server.wait_end(10) == 0


def test_a_stalled_reader_does_not_delay_the_end(own_server):
    server = own_server("--fake", "--fake-delay", "0.001", "--drain-seconds", 1)
    server.wait_ready()
    with server.connect(receive_buffer=4096) as stalled:
        stalled.sendall(http_request(CHAT, ENDLESS | {"max_tokens": 4000}))
        server.wait_busy(1)
        server.send_signal(signal.SIGTERM)
        assert server.wait_end(10) == 0


def test_a_stream_that_ends_in_time_ends_normally(own_server):
    server = own_server("--fake", "--fake-delay", "0.05", "--drain-seconds", 10)
    server.wait_ready()
    with send(server, CHAT, ENDLESS | {"max_tokens": 20}) as sock:
        server.wait_busy(1)
        server.send_signal(signal.SIGTERM)
        raw = Reader(sock).rest()
    assert b'"finish_reason":"length"' in raw and b"[DONE]" in raw
    assert server.wait_end(10) == 0


def test_a_second_signal_ends_the_process_at_once(own_server):
    server = own_server("--fake", "--fake-delay", "0.05", "--drain-seconds", 60)
    server.wait_ready()
    with send(server, CHAT, ENDLESS | {"max_tokens": 4000}):
        server.wait_busy(1)
        server.send_signal(signal.SIGINT)
        eventually(lambda: refuses(server), "the listener closed")
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait_end(0.5)
        server.send_signal(signal.SIGINT)
        assert server.wait_end(5) in (0, 130)


def test_a_signal_while_loading_ends_the_process(own_server):
    server = own_server("--fake", program="serve_faulty.py", FAULTY_LOAD_S="60")
    server.wait_listening()
    server.send_signal(signal.SIGTERM)
    assert server.wait_end(10) == 0


def test_exit_functions_run_because_exllamav3_ends_its_worker_processes_in_them():
    program = (
        "import atexit, sys; atexit.register(print, 'the exit functions ran', flush=True);"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import exl3_serve;"
        "sys.exit(exl3_serve.main(['--fake', '--port', '0']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "listening" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "the exit functions ran" in out


def test_case_70_a_step_that_hangs_is_told_by_health_and_over_when_it_ends(own_server):
    server = own_server("--fake", "--fake-delay", "1.5", "--step-timeout", "0.3")
    server.wait_ready()

    def health():
        status, answer = server.request("GET", "/health")[::2]
        return status, answer

    with send(server, CHAT, ENDLESS | {"max_tokens": 1}):
        eventually(lambda: health()[0] == 503, "the hanging step was told")
        assert "in one step" in str(health()[1])
    eventually(lambda: health()[0] == 200, "health is back when the step is over")

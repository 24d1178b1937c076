"""What the operator is told, and faults that end the process or do not: request ids, steps that
hang, restarts."""

from __future__ import annotations

import signal

from server_process import Reader, eventually, http_request

# ---- Request ids ---------------------------------------------------------------------------------


def test_every_answer_has_a_request_id_the_clients_own_if_it_sent_one(fake_server):
    server = fake_server(["x"])
    assert server.request("GET", "/health", headers={"X-Request-Id": "a-1"})[1]["x-request-id"] == (
        "a-1"
    )
    ids = {server.request("GET", path)[1]["x-request-id"] for path in ("/health", "/nope", "/")}
    assert len(ids) == 3
    long = server.request("GET", "/health", headers={"X-Request-Id": "a" * 5000})[1]
    assert long["x-request-id"] == "a" * 100
    for path, body in (("/health", None), ("/completion", {"prompt": "a", "n_predict": 2})):
        odd = {"X-Request-Id": "a" * 99 + " b"}  # cut where a space is: h11 sends none at the end
        method = "GET" if body is None else "POST"
        assert server.request(method, path, body, odd)[1]["x-request-id"] == "a" * 99
    with server.connect() as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        assert Reader(sock).head()[1]["x-request-id"]


# ---- Fatal faults --------------------------------------------------------------------------------


def test_after_a_fatal_fault_the_process_starts_anew_and_clients_wait(own_server):
    args = ("--fake", "--on-fatal", "restart", "--recovery-attempts", 0)
    server = own_server(*args, program="serve_faulty.py", FAULTY_LOAD_S="0.5").wait_ready()
    pid = server.process.pid
    body = {"prompt": "FAIL-IN-DECODE", "n_predict": 9, "ignore_eos": True}
    status, answer = server.post("/completion", body)
    assert status in (500, 503) and "planted" in answer["error"]["message"]
    server.expect_traceback("planted in decode")

    def answered():
        return server.post("/completion", {"prompt": "a", "n_predict": 2})[0] == 200

    eventually(answered, "an answer of the process that started anew")
    assert server.process.poll() is None and server.process.pid == pid
    assert server.log().count("listening on") == 2
    server.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0


def test_a_step_that_hangs_is_in_the_log_once_with_its_stack(own_server):
    server = own_server("--fake", "--step-timeout", 0.3, "--fake-delay", 4).wait_ready()
    with server.connect() as sock:
        sock.sendall(http_request("/completion", {"prompt": "a", "n_predict": 1}))
        assert Reader(sock).head()[0] == 200
    assert server.log().count("the engine has been in one step for") == 2  # prompt, token
    assert server.log().count("time.sleep(self.delay_s)") == 2


def test_answers_go_on_after_as_many_restarts_as_are_allowed(own_server):
    args = ("--fake", "--recovery-attempts", 2)
    server = own_server(*args, program="serve_faulty.py").wait_ready()
    body = {"prompt": "FAIL-IN-PREFILL", "n_predict": 9}
    for _ in range(2):
        assert server.post("/completion", body)[0] == 503
        server.expect_traceback("planted in prefill")
        assert server.post("/completion", {"prompt": "a", "n_predict": 2})[0] == 200
    server.post("/completion", body)
    server.expect_traceback("planted in prefill")
    assert server.wait_end() == 70

"""Keys with limits, the audit log, request ids, and what the operator is told."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time

import pytest
from server_process import HI, Reader, eventually, http_request, in_threads

import exl3_serve as serve

CHAT = "/v1/chat/completions"
ASK = {"messages": HI, "max_tokens": 2}
ENDLESS = ASK | {"stream": True, "ignore_eos": True, "max_tokens": 100_000}


def with_key(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path):
    def write(*lines):
        path = tmp_path / "keys"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def ask(server, key, path=CHAT, body=ASK):
    """(status, headers, answer) of a request with this key."""
    status, headers, answer = server.request("POST", path, body, with_key(key))
    return status, headers, json.loads(answer)


# ---- Lines of the file ---------------------------------------------------------------------------


def test_a_line_is_a_key_and_what_it_may():
    key = serve.Key("s3cret  ci max_parallel=2 rpm=60 tpm=90000 admin")
    assert (key.secret, key.name, key.admin) == (b"s3cret", "ci", True)
    assert key.limits == {"max_parallel": 2, "rpm": 60, "tpm": 90000}
    key = serve.Key("alone")
    assert (key.secret, key.name, key.admin, key.limits) == (b"alone", "", False, {})


@pytest.mark.parametrize(
    "word", ["rpm=x", "rpm=-1", "rpm=", "speed=3", "rpm=1.5", "rpm=0", "max_parallel=0", "tpm=00"]
)
def test_a_word_that_is_not_understood_is_named_and_the_key_is_not(word):
    with pytest.raises(ValueError, match=re.escape(word)) as caught:
        serve.Key(f"s3cret name {word}")
    assert "s3cret" not in str(caught.value)


def test_a_mistake_in_the_file_ends_the_start_with_one_line(own_server, key_file):
    path = key_file("a one", "b two words")
    server = own_server("--fake", "--api-key-file", path)
    assert server.wait_end() == 1
    line = f"exl3-serve: --api-key-file {path}: 'words' is not understood"
    assert server.log().strip().splitlines() == [line]


def test_a_mark_of_the_encoding_is_no_part_of_a_key_and_a_comment_is_no_key(own_server, tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n# keys\r\n\t#second\r\nwith#sign\r\n")
    server = own_server("--fake", "--api-key-file", path).wait_ready()
    keys = ("first", "with#sign", "#", "#second", "second")
    assert [ask(server, key)[0] for key in keys] == [200, 200, 401, 401, 401]


# ---- Limits --------------------------------------------------------------------------------------


def test_no_more_answers_at_a_time_than_max_parallel(fake_server, key_file):
    path = key_file("", "one first max_parallel=1", "two")
    server = fake_server(["x"], "--api-key-file", path, delay=0.01)
    with server.connect() as sock:
        sock.sendall(http_request(CHAT, ENDLESS, headers=with_key("one")))
        assert Reader(sock).head()[0] == 200
        status, headers, answer = ask(server, "one")
        assert status == 429 and headers["retry-after"] == "1"
        assert answer["error"]["type"] == "rate_limit_error"
        assert "max_parallel=1" in answer["error"]["message"]
        assert ask(server, "two")[0] == 200
    eventually(lambda: ask(server, "one")[0] == 200, "the slot of the key is free again")


def test_each_choice_counts_for_max_parallel(fake_server, key_file):
    server = fake_server(["x"], "--api-key-file", key_file("k max_parallel=3"))
    several = {"prompt": ["a", "b"], "max_tokens": 1}
    asked = [ask(server, "k", CHAT, ASK | {"n": n})[0] for n in (3, 4, 1)]
    asked += [ask(server, "k", "/v1/completions", several | {"n": n})[0] for n in (1, 2, 1)]
    assert asked == [200, 429, 200] * 2


def test_no_more_requests_a_minute_than_rpm_and_refused_ones_do_not_count(fake_server, key_file):
    server = fake_server(["x"], "--api-key-file", key_file("rpm-key ci rpm=3"))
    assert [ask(server, "rpm-key")[0] for _ in range(5)] == [200, 200, 200, 429, 429]
    status, headers, answer = ask(server, "rpm-key")
    assert 50 <= int(headers["retry-after"]) <= 60 and "rpm=3" in answer["error"]["message"]
    assert server.request("GET", "/slots", headers=with_key("rpm-key"))[0] == 200


def test_tokens_of_prompt_and_answer_count_for_tpm(fake_server, key_file):
    server = fake_server(["x"], "--api-key-file", key_file("tpm-key tpm=30"))
    body = {"prompt": "a" * 20, "n_predict": 5, "ignore_eos": True}
    assert [ask(server, "tpm-key", "/completion", body)[0] for _ in range(3)] == [200, 200, 429]


def test_a_minute_later_the_counts_are_gone(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])

    key = serve.Key("k rpm=2")
    key.admit()
    key.release(5)
    now[0] += 20
    key.admit()
    key.release(7)
    with pytest.raises(serve.ApiError) as caught:
        key.admit()
    assert caught.value.headers == [("Retry-After", "40")]
    now[0] += 41
    key.admit()
    assert [n for _, n in key.recent] == [0, 7, 0] and key.n_running == 1


def test_retry_after_is_when_the_limit_that_is_reached_allows_one_more(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])

    key = serve.Key("k rpm=2 tpm=100")
    key.admit()
    now[0] += 30.25
    key.release(100)
    with pytest.raises(serve.ApiError) as caught:
        key.admit()
    assert "tpm=100" in caught.value.message
    assert caught.value.headers == [("Retry-After", "60")]
    now[0] += 59.9
    with pytest.raises(serve.ApiError) as caught:
        key.admit()
    assert caught.value.headers == [("Retry-After", "1")]  # never 0
    now[0] += 0.2
    key.admit()


# ---- Admin routes, reload ------------------------------------------------------------------------


def test_once_a_key_is_admin_the_others_cannot_reach_admin_routes(fake_server, key_file):
    server = fake_server(["x"], "--api-key-file", key_file("plain", "boss boss admin"))
    status, _, body = server.request("GET", "/slots", headers=with_key("plain"))
    assert status == 403 and json.loads(body)["error"]["type"] == "permission_error"
    assert server.request("GET", "/slots", headers=with_key("boss"))[0] == 200
    assert server.request("GET", "/props", headers=with_key("plain"))[0] == 200
    assert server.request("GET", "/slots", headers=with_key("wrong"))[0] == 401


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_sighup_reads_the_keys_again_and_a_mistake_changes_nothing(own_server, key_file):
    path = key_file("old")
    server = own_server("--fake", "--api-key-file", path).wait_ready()
    key_file("new")
    server.send_signal(signal.SIGHUP)
    eventually(lambda: ask(server, "new")[0] == 200, "the new key")
    assert ask(server, "old")[0] == 401
    key_file("broken one two")
    server.send_signal(signal.SIGHUP)
    eventually(lambda: "the keys stay as they were" in server.log(), "the complaint")
    assert ask(server, "new")[0] == 200
    assert "broken" not in server.log()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_what_a_key_began_has_its_name_in_the_audit_log_also_when_it_is_revoked(
    own_server, tmp_path, key_file
):
    path = tmp_path / "audit.jsonl"
    args = ("--fake-delay", 0.02, "--audit-log", path, "--api-key-file", key_file("old leaked"))
    server = own_server("--fake", *args).wait_ready()
    with server.connect() as sock:
        sock.sendall(http_request(CHAT, ENDLESS, headers=with_key("old")))
        assert Reader(sock).head()[0] == 200
        key_file("new")
        server.send_signal(signal.SIGHUP)
        eventually(lambda: ask(server, "new")[0] == 200, "the new key")
    eventually(lambda: any(row["status"] == 499 for row in rows_of(path)), "its line")
    assert {row["key"] for row in rows_of(path) if row["status"] == 499} == {"leaked"}


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_sighup_ends_a_server_that_has_nothing_to_read_again(own_server):
    """As it ends any program whose terminal is closed."""
    server = own_server("--fake", "--api-key", "k").wait_ready()
    server.send_signal(signal.SIGHUP)
    assert server.wait_end() == -signal.SIGHUP


# ---- Audit log -----------------------------------------------------------------------------------


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_audit_log_has_a_line_per_request_and_never_its_text(own_server, tmp_path, key_file):
    path = tmp_path / "audit.jsonl"
    args = ("--audit-log", path, "--api-key-file", key_file("s3cret ci"), "--alias", "tiny")
    server = own_server("--fake", *args).wait_ready()
    headers = with_key("s3cret") | {"x-request-id": "mine"}
    body = {"messages": [{"role": "user", "content": "PRIVATE words"}], "max_tokens": 3}
    assert server.request("POST", CHAT, body, headers)[0] == 200
    assert server.request("POST", CHAT, body | {"stream": True}, with_key("s3cret"))[0] == 200
    assert server.request("POST", CHAT, body | {"n": 0}, with_key("s3cret"))[0] == 400
    assert server.request("GET", "/slots", headers=with_key("bad"))[0] == 401
    assert server.request("GET", "/nope", headers=with_key("s3cret"))[0] == 404
    assert server.request("GET", "/health")[0] == 200

    def rows():
        return rows_of(path)[[row["id"] for row in rows_of(path)].index("mine") :]

    eventually(lambda: len(rows_of(path)) > 6 and len(rows()) == 6, "six lines")
    rows = rows()
    assert [row["status"] for row in rows] == [200, 200, 400, 401, 404, 200]
    assert [row["key"] for row in rows] == ["ci", "ci", "ci", "", "ci", ""]
    first = rows[0]
    assert first["id"] == "mine" and first["address"] == "127.0.0.1"
    assert (first["route"], first["method"], first["model"]) == (CHAT, "POST", "tiny")
    assert first["completion_tokens"] == 3 and first["finish_reason"] == "length"
    assert first["prompt_tokens"] > 0 and first["prompt_tokens_details"] == {"cached_tokens": 0}
    for name in ("queue_ms", "prefill_ms", "decode_ms"):
        assert first[name] >= 0
    text = path.read_text()
    assert "PRIVATE" not in text and "s3cret" not in text and "fake engine" not in text


def test_a_client_that_leaves_and_a_refused_one_are_in_the_audit_log(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    server = own_server("--fake", "--audit-log", path, "--fake-delay", 0.01).wait_ready()
    with server.connect() as sock:
        sock.sendall(http_request(CHAT, ENDLESS))
        reader = Reader(sock)
        assert reader.head()[0] == 200
        reader.chunk()
    eventually(lambda: rows_of(path)[-1]["status"] == 499, "the line of who left")
    assert rows_of(path)[-1]["finish_reason"] == ""
    with server.connect() as sock:
        sock.sendall(http_request(CHAT, ENDLESS)[:-9])
    eventually(lambda: rows_of(path)[-1]["status"] in (400, 499), "the line of half a request")


def test_the_audit_log_and_the_metrics_agree(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    server = own_server("--fake", "--metrics", "--audit-log", path).wait_ready()
    texts = [f"question {i}" for i in range(4)]
    bodies = [{"prompt": text, "n_predict": 2 + i} for i, text in enumerate(texts)]
    asked = in_threads(*[lambda b=b: server.request("POST", "/completion", b)[0] for b in bodies])
    several = {"prompt": texts, "n_predict": 3, "n": 2, "stream": True}
    assert [*asked, server.request("POST", "/v1/completions", several)[0]] == [200] * 5
    eventually(lambda: sum("model" in row for row in rows_of(path)) == 5, "five lines")
    rows = [row for row in rows_of(path) if "model" in row]
    lines = server.request("GET", "/metrics")[2].decode().splitlines()
    metrics = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert int(metrics["llamacpp:tokens_predicted_total"]) == sum(
        row["completion_tokens"] for row in rows
    )
    n_prompt = sum(row["prompt_tokens"] for row in rows[:4]) + 2 * rows[4]["prompt_tokens"]
    assert int(metrics["llamacpp:prompt_tokens_total"]) == n_prompt  # the fake has no cache
    decode_s = sum(row["decode_ms"] for row in rows[:4]) / 1e3
    assert 0 < decode_s <= float(metrics["llamacpp:tokens_predicted_seconds_total"]) + 1e-5


def test_the_audit_log_is_whole_after_kill_9_under_load(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    server = own_server("--fake", "--audit-log", path, "--parallel", 4).wait_ready()
    done = []

    def client(number):
        while time.monotonic() < end:
            try:
                headers = {"x-request-id": f"{number}-{len(done)}"}
                status, given, _ = server.request("POST", CHAT, ASK, headers)
            except OSError:
                return
            if status == 200:
                done.append((time.monotonic(), given["x-request-id"]))

    end = time.monotonic() + 3
    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    killed = time.monotonic()
    server.process.kill()
    for thread in threads:
        thread.join()
    written = {row["id"] for row in rows_of(path)}
    missing = {name for when, name in done if when < killed - 1 and name not in written}
    assert len(done) > 20 and not missing


def test_with_a_full_disk_the_lines_are_in_the_other_log_and_requests_go_on(own_server):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    server = own_server("--fake", "--audit-log", "/dev/full").wait_ready()
    assert server.request("GET", "/health", headers={"x-request-id": "kept"})[0] == 200
    eventually(lambda: '"id":"kept"' in server.log(), "the line")
    assert "the audit log cannot be written: [Errno 28]" in server.log()
    assert "Traceback" not in server.log()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
def test_an_audit_log_that_hangs_keeps_neither_requests_nor_the_end(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # and it never reads
    server = own_server("--fake", "--audit-log", path).wait_ready()
    full = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"a" * 100 + b"\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(full * 500)
        answers = Reader(sock)
        assert all(answers.answer()[0] == 200 for _ in range(500))
    server.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    os.close(reader)


def test_a_long_method_is_cut_in_the_audit_log(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    server = own_server("--fake", "--audit-log", path).wait_ready()
    assert server.request("M" * 50_000, "/health")[0] == 405
    eventually(lambda: rows_of(path)[-1]["status"] == 405, "its line")
    assert rows_of(path)[-1]["method"] == "M" * 20


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_after_sighup_a_moved_audit_log_is_begun_anew(own_server, tmp_path):
    path, moved = tmp_path / "audit", tmp_path / "moved"
    server = own_server("--fake", "--audit-log", path).wait_ready()
    path.rename(moved)
    n_before = len(rows_of(moved))
    server.send_signal(signal.SIGHUP)
    eventually(lambda: server.get("/health") and path.exists(), "the new file")
    eventually(lambda: rows_of(path)[-1]["route"] == "/health", "a line in it")
    n_moved = len(rows_of(moved))
    assert server.get("/health")[0] == 200 and n_moved >= n_before
    assert len(rows_of(moved)) == n_moved


def test_an_audit_log_that_cannot_be_opened_ends_the_start(own_server, tmp_path):
    server = own_server("--fake", "--audit-log", tmp_path / "no" / "such")
    assert server.wait_end() == 1 and len(server.log().strip().splitlines()) == 1


def test_the_audit_log_is_rotated_by_size(tmp_path):
    file = serve.AuditFile(tmp_path / "a", "a", 2000, serve.N_AUDIT_FILES)
    for i in range(1000):
        file.emit(logging.makeLogRecord({"msg": json.dumps({"n": i})}))
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a", *(f"a.{i}" for i in range(1, serve.N_AUDIT_FILES + 1))]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert rows_of(tmp_path / "a")[-1]["n"] == 999


# ---- The log ------------------------------------------------------------------------------------


def test_the_log_can_be_json_lines_tracebacks_too(own_server):
    server = own_server("--fake", "--log-format", "json", program="serve_faulty.py").wait_ready()
    body = {"prompt": "FAIL-IN-DECODE", "n_predict": 9, "ignore_eos": True}
    assert server.post("/completion", body)[0] == 503
    server.expect_traceback("planted in decode")
    rows = [json.loads(line) for line in server.log().splitlines()]
    assert {"time", "level", "logger", "message"} <= rows[0].keys()
    assert any("Traceback" in row["message"] for row in rows)


# ---- Fatal faults --------------------------------------------------------------------------------


def test_a_step_that_hangs_is_in_the_log_with_its_stack_and_fatal_if_told_so(own_server):
    args = ("--fake", "--step-timeout", 0.3, "--on-step-timeout", "fatal", "--fake-delay", 30)
    server = own_server(*args).wait_ready()
    with server.connect() as sock:
        sock.sendall(http_request("/completion", {"prompt": "a", "n_predict": 2}))
        assert server.wait_end() == 70
    assert "the engine has been in one step for" in server.log() and "time.sleep" in server.log()


def test_before_a_restart_all_are_answered_and_in_the_audit_log(own_server, tmp_path):
    path = tmp_path / "audit.jsonl"
    args = ("--step-timeout", 0.3, "--on-step-timeout", "fatal", "--on-fatal", "restart")
    args += ("--fake-delay", 5, "--audit-log", path)
    server = own_server("--fake", *args).wait_ready()
    bodies = [{"prompt": "a", "stream": bool(n % 2)} for n in range(6)]
    asked = in_threads(*[lambda b=b: server.request("POST", "/completion", b)[::2] for b in bodies])
    assert [status for status, _ in asked] == [503, 200] * 3
    assert all(b'"code":503' in answer for _, answer in asked)
    eventually(lambda: server.log().count("listening on") == 2, "the process that started anew")
    assert sum("model" in row for row in rows_of(path)) == 6


@pytest.mark.parametrize("attempt", range(2))
def test_the_lines_of_what_a_dead_engine_failed_are_written_before_a_restart(
    own_server, tmp_path, attempt
):
    path = tmp_path / "audit.jsonl"
    args = ("--fake", "--on-fatal", "restart", "--parallel", 8, "--audit-log", path)
    server = own_server(*args, program="serve_faulty.py", FAULTY_REBUILD="no").wait_ready()
    prompts = ["a"] * 24 + ["FAIL-IN-DECODE"]
    bodies = [{"prompt": prompt, "n_predict": 500, "ignore_eos": True} for prompt in prompts]
    asked = [lambda b=b: server.request("POST", "/completion", b)[0] for b in bodies]
    assert set(in_threads(*asked)) <= {200, 500, 503}
    server.expect_traceback("planted in decode")
    eventually(lambda: server.log().count("listening on") == 2, "the process that started anew")
    assert sum(row["route"] == "/completion" for row in rows_of(path)) == len(bodies)


def test_many_clients_with_keys_at_once_are_counted_right(fake_server, key_file):
    server = fake_server(["x"], "--api-key-file", key_file("many rpm=10"), "--parallel", 4)
    statuses = in_threads(*[lambda: ask(server, "many")[0]] * 20)
    assert sorted(statuses) == [200] * 10 + [429] * 10

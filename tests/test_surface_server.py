"""What makes it a drop-in for llama-server: budgets of thoughts, metrics, what is not there (501),
and the options: files, prefix, TLS, environment and configuration file.

Requests and answers that llama-server gives on the same weights are in golden/.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import subprocess
import time

import pytest
from server_process import HI, eventually, http_request, sse_data

CHAT = "/v1/chat/completions"
CONTROL = "/v1/chat/completions/control"

# ---- Budgets of thoughts -------------------------------------------------------------------------

THOUGHT = ["a ", "b ", "c ", "d ", "</think>", "answer"]


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_a_thought_is_closed_after_as_many_tokens_as_its_budget_has(fake_server, name):
    server = fake_server(THOUGHT, think=True)
    for budget, thought in ((1, "a"), (2, "a b"), (3, "a b c")):
        reply = server.chat(**{name: budget})
        assert reply.reasoning == thought
        assert reply.content.startswith("bcd"[budget - 1]) and reply.content.endswith("answer")


def test_a_thought_within_its_budget_is_left_alone(fake_server):
    server = fake_server(THOUGHT, think=True)
    for budget in (-1, 6, 10**9):
        assert server.chat(reasoning_budget=budget).said == ("answer", "a b c d", "stop")


def test_a_budget_of_0_closes_the_thought_before_its_first_token(fake_server):
    reply = fake_server(["a", "b"], think=True).chat(reasoning_budget=0)
    assert reply.said == ("ab", "", "stop")


def test_a_message_stands_in_front_of_the_closing_tag(fake_server):
    server = fake_server(
        THOUGHT, "--reasoning-budget", 1, "--reasoning-budget-message", "so.", think=True
    )
    assert server.chat().reasoning == "a so."
    assert server.chat(reasoning_budget_message="I see").reasoning == "a I see"
    assert server.chat(reasoning_budget=3).reasoning == "a b c so."
    assert server.chat(reasoning_budget=-1).reasoning == "a b c d"


def test_a_thought_that_the_model_opens_itself_has_the_budget_too(fake_server):
    server = fake_server(["<think>", "a ", "b ", "c"])
    assert server.chat(reasoning_budget=2).said == ("c", "a b", "stop")
    assert server.chat(reasoning_budget=0).said == ("a b c", "", "stop")


def test_every_thought_after_a_spent_budget_is_closed_at_once(fake_server):
    server = fake_server(["a", "<think>", "b", "c"], think=True)
    assert server.chat(reasoning_budget=1).said == ("bc", "a", "stop")


def test_an_answer_without_a_thought_has_no_budget(fake_server):
    server = fake_server(["a", "b", "c"])
    assert server.chat(reasoning_budget=1).said == ("abc", "", "stop")


def test_without_a_split_the_tag_is_in_the_content(fake_server):
    server = fake_server(["a", "b"], think=True)
    assert server.chat(reasoning_budget=1, reasoning_format="none").content == "<think>\na</think>b"


def test_every_choice_has_a_budget_of_its_own(fake_server):
    replies = fake_server(["a", "b", "c"], think=True).chats(n=3, reasoning_budget=2)
    assert [reply.said for reply in replies] == [("c", "ab", "stop")] * 3


def test_a_character_is_not_cut_by_the_end_of_the_budget(fake_server):
    server = fake_server(["a", b"\xc3", b"\xa9", "x"], think=True)
    assert server.chat(reasoning_budget=2).said == ("x", "aé", "stop")


@pytest.mark.parametrize("value", [-2, 1.5, "3", True])
def test_a_budget_that_is_none_is_a_400(fake_server, value):
    server = fake_server(["x"])
    server.refused(CHAT, {"messages": HI, "reasoning_budget": value}, "reasoning_budget")


def test_control_ends_the_thought_of_a_running_chat(fake_server):
    server = fake_server(["t"], think=True, delay=0.02)
    body = {"ignore_eos": True, "max_tokens": 5000, "reasoning_control": True}
    with server.open_stream(body) as (reader, _, _):
        first = json.loads(sse_data(reader.chunk())[0])
        asked = {"id": first["id"], "action": "reasoning_end"}
        assert server.ok(CONTROL, asked) == {"success": True}
        seen = ""
        while '"content":"t"' not in seen:
            seen += reader.chunk().decode()
    server.wait_idle()
    assert server.ok(CONTROL, asked)["message"] == "no active completion for this id"


def test_control_of_a_chat_that_waits_is_in_time(fake_server):
    server = fake_server(["t"], "--parallel", 1, think=True, delay=0.02)
    body = {"ignore_eos": True, "max_tokens": 30, "reasoning_control": True}
    with server.open_stream({"max_tokens": 5000, "ignore_eos": True}):
        server.wait_busy(1)
        with server.open_stream(body | {"return_progress": True}) as (reader, _, _):
            name = json.loads(sse_data(reader.chunk())[0])["id"]
            assert server.ok(CONTROL, {"id": name, "action": "reasoning_end"})["success"]
    server.wait_idle()


def test_control_of_a_chat_that_did_not_ask_for_it_is_refused(fake_server):
    server = fake_server(["t"], think=True, delay=0.02)
    with server.open_stream({"ignore_eos": True, "max_tokens": 5000}) as (reader, _, _):
        first = json.loads(sse_data(reader.chunk())[0])
        answer = server.ok(CONTROL, {"id": first["id"], "action": "reasoning_end"})
        assert answer["success"] is False and "not enabled" in answer["message"]


# ---- Fields --------------------------------------------------------------------------------------


def test_response_fields_choose_what_is_answered_streamed_too(fake_server):
    server = fake_server(["a", "b"])
    body = {"prompt": "x", "response_fields": ["content", "timings/predicted_n", "no/such", ""]}
    assert server.ok("/completion", body) == {"content": "ab", "timings/predicted_n": 3}
    last = json.loads(server.stream("/completion", body)[-1])
    assert last == {"content": "", "timings/predicted_n": 3}


def test_a_time_limit_ends_the_answer_with_the_line_as_a_limit(fake_server):
    server = fake_server(["a", "b\n"], delay=0.005)
    body = {"prompt": "x", "ignore_eos": True, "n_predict": 2000, "t_max_predict_ms": 100}
    whole = server.ok("/completion", body)
    assert whole["content"].endswith("b\n") and whole["stop_type"] == "limit"
    assert whole["tokens_predicted"] < 1000
    server.wait_idle()
    reply = server.ok(CHAT, body | {"messages": HI})["choices"][0]
    assert reply["finish_reason"] == "length"
    short = {"prompt": "x", "t_max_predict_ms": 100_000}
    assert server.completion(**short)["content"] == "ab\n"


def test_a_text_may_be_biased_in_every_spelling(fake_server):
    server = fake_server(["x"])
    for bias in ({"abc": 1.5}, [["abc", 1.5]]):
        settings = server.ok("/completion", {"prompt": "x", "logit_bias": bias})
        shown = settings["generation_settings"]["logit_bias"]
        assert shown == [{"token": i, "bias": 1.5} for i in b"abc"]


def test_no_lora_adapter_can_be_asked_for(fake_server):
    server = fake_server(["x"])
    assert server.get("/lora-adapters") == (200, [])
    assert server.ok("/lora-adapters", []) == {"success": True}
    server.refused("/lora-adapters", [{"id": 0, "scale": 1.0}], "lora")
    server.refused("/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 1.0}]}, "lora")
    assert server.completion(prompt="x", lora=[])["content"] == "x"


def test_two_assistant_messages_at_the_end_are_a_400(fake_server):
    server = fake_server(["x"])
    turns = [{"role": "assistant", "content": text} for text in "ab"]
    server.refused(CHAT, {"messages": HI + turns}, "assistant")
    assert server.chat(messages=HI + turns[:1]).content == "x"
    assert server.chat(messages=HI + turns + HI).content == "x"


def test_prompt_tokens_are_counted_without_generating(fake_server):
    server = fake_server(["x"])
    for path in (f"{CHAT}/input_tokens", "/chat/completions/input_tokens"):
        answer = server.ok(path, {"messages": HI})
        assert answer["input_tokens"] == server.chat().whole["usage"]["prompt_tokens"]
        assert answer["object"] == "response.input_tokens"


# ---- Slots and metrics ---------------------------------------------------------------------------


def metrics_of(server):
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4"
    return {k: float(v) for k, v in re.findall(r"^([a-z0-9_]+:\w+) (\S+)$", body.decode(), re.M)}


def test_metrics_are_a_501_unless_asked_for(fake_server):
    assert fake_server(["x"]).get("/metrics")[1]["error"]["type"] == "not_supported_error"
    props = fake_server(["x"], "--metrics").get("/props")[1]
    assert props["endpoint_metrics"] and props["endpoint_slots"]


def test_counters_are_the_sums_of_what_the_answers_said(own_server, tmp_path):
    script = tmp_path / "s.json"
    script.write_text('["a", "b", "c"]')
    server = own_server("--fake", "--fake-script", script, "--metrics").wait_ready()
    assert set(metrics_of(server).values()) == {0.0}
    timings = [server.ok("/completion", {"prompt": "x" * n})["timings"] for n in (5, 900, 33)]
    # The last answer leaves within a step's pass, which ends a moment later
    eventually(lambda: metrics_of(server)["exl3_serve:step_seconds"] == 0, "no step is under way")
    found = metrics_of(server)
    sums = {key: sum(each[key] for each in timings) for key in timings[0]}
    assert found["llamacpp:prompt_tokens_total"] == sums["prompt_n"] == 938
    assert found["llamacpp:tokens_predicted_total"] == sums["predicted_n"] == 12
    assert found["llamacpp:prompt_seconds_total"] == pytest.approx(
        sums["prompt_ms"] / 1e3, abs=1e-5
    )
    seconds = found["llamacpp:tokens_predicted_seconds_total"]
    assert seconds == pytest.approx(sums["predicted_ms"] / 1e3, abs=1e-5)
    assert found["llamacpp:predicted_tokens_seconds"] == pytest.approx(12 / seconds, rel=1e-6)
    assert found["llamacpp:n_tokens_max"] == 904
    assert found["llamacpp:n_busy_slots_per_decode"] == 1
    assert metrics_of(server) == found  # to look changes nothing


def test_gauges_tell_of_slots_queue_and_step(own_server):
    server = own_server("--fake", "--metrics", "-np", 1, "--fake-delay", 0.3).wait_ready()
    body = {"ignore_eos": True, "max_tokens": 5000}
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.open_stream(body))
        waiting = "llamacpp:requests_deferred"
        found = eventually(lambda: (m := metrics_of(server))[waiting] == 2 and m)
        assert found["llamacpp:requests_processing"] == 1
        eventually(lambda: 0.1 < metrics_of(server)["exl3_serve:step_seconds"] < 0.4)
    eventually(lambda: metrics_of(server)["llamacpp:requests_processing"] == 0)
    assert metrics_of(server)[waiting] == 0


def test_a_recovery_is_counted(own_server):
    server = own_server("--fake", "--metrics", program="serve_faulty.py").wait_ready()
    assert metrics_of(server)["exl3_serve:recoveries_total"] == 0
    server.post(CHAT, {"messages": [{"role": "user", "content": "FAIL-IN-DECODE"}]})
    server.expect_traceback("planted")
    eventually(lambda: metrics_of(server)["exl3_serve:recoveries_total"] == 1)


def test_slots_can_be_hidden_and_asked_whether_one_is_free(fake_server):
    hidden = fake_server(["x"], "--no-slots")
    assert hidden.get("/slots")[0] == 501
    assert hidden.get("/props")[1]["endpoint_slots"] is False
    server = fake_server(["x"], "--parallel", 1, delay=0.02)
    assert server.get("/slots?fail_on_no_slot=1")[0] == 200
    with server.open_stream({"ignore_eos": True, "max_tokens": 5000}):
        server.wait_busy(1)
        assert server.get("/slots?fail_on_no_slot=1")[0] == 503
        assert server.get("/slots?fail_on_no_slot=")[0] == 200
    server.wait_idle()


def test_a_busy_slot_shows_the_settings_in_effect_but_no_texts(fake_server):
    server = fake_server(["x"], delay=0.02)
    body = {"ignore_eos": True, "max_tokens": 5000, "top_k": 7, "stop": ["secret"], "seed": 3}
    with server.open_stream(body):
        server.wait_busy(1)
        (slot,) = (slot for slot in server.slots() if slot["is_processing"])
    assert slot["params"]["top_k"] == 7 and slot["params"]["seed"] == 3
    assert slot["params"]["n_predict"] == 5000 and slot["params"]["stream"] is True
    assert "secret" not in json.dumps(slot)
    total = slot["n_prompt_tokens_processed"] + slot["n_prompt_tokens_cache"]
    assert total <= slot["n_prompt_tokens"]
    server.wait_idle()


@pytest.mark.parametrize(
    "path",
    ["/embedding", "/v1/embeddings", "/rerank", "/v1/reranking", "/slots/0?action=save"]
    + ["/slots/x", "/v1/audio/transcriptions", "/audio/transcriptions"],
)
def test_what_is_not_there_is_a_501_whatever_is_sent(fake_server, path):
    server = fake_server(["x"])
    for body in (b'{"input": "a"}', b"--form\r\nno json", b""):
        status, _, answer = server.request("POST", path, body)
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["type"]) == (501, 501, "not_supported_error")
    assert server.get(path)[0] == 405


def test_infill_is_a_501_for_a_model_without_tokens_for_it(fake_server):
    body = {"input_prefix": "a", "input_suffix": "b"}
    error = fake_server(["x"]).refused("/infill", body, "infill", status=501)
    assert error["type"] == "not_supported_error"


# ---- Options -------------------------------------------------------------------------------------


def test_a_seed_for_requests_that_have_none(fake_server):
    server = fake_server(["x"], "--seed", 11)
    assert server.get("/props")[1]["default_generation_settings"]["params"]["seed"] == 11
    assert server.completion(prompt="x")["generation_settings"]["seed"] == 11
    assert server.completion(prompt="x", seed=5)["generation_settings"]["seed"] == 5


def test_under_a_prefix_every_route_is_and_nothing_is_elsewhere(own_server):
    for prefix in ("/llm/v2", "llm/v2/"):
        server = own_server("--fake", "--api-prefix", prefix, "--api-key", "k").wait_listening()
        eventually(lambda server=server: server.get("/llm/v2/health")[0] == 200)
        key = {"Authorization": "Bearer k"}
        body = json.dumps({"messages": HI}).encode()
        assert server.request("POST", f"/llm/v2{CHAT}", body, key)[0] == 200
        assert server.request("GET", "/llm/v2/slots")[0] == 401
        for path in ("/health", CHAT, "/", "/llm", "/llm/v2health", "/x/llm/v2/health"):
            assert server.request("GET", path, None, key)[0] == 404, path


@pytest.fixture
def site(tmp_path):
    """A directory as --path takes it, with what must not be served around it."""
    root = tmp_path / "site"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    for name in ("index.html", "app.js", "style.css", "logo.svg", "sub/index.html", "data.nothing"):
        (root / name).write_text(f"this is {name} é", encoding="utf-8")
    (root / "props").write_text("no route is hidden by a file")
    (root / ".env").write_text("secret")
    (root / ".git" / "config").write_text("secret")
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "site2").mkdir()
    (tmp_path / "site2" / "x.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "linked").symlink_to(tmp_path / "site2")
    (root / "inside.js").symlink_to(root / "app.js")
    (root / "round").symlink_to(root / "round")
    (root / "sub" / "deep" / "index.html").symlink_to(tmp_path / "outside.txt")
    return root


TYPES = {
    "/": ("index.html", "text/html"),
    "/index.html": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/inside.js": ("app.js", "text/javascript"),
    "/style.css?v=3": ("style.css", "text/css"),
    "/logo.svg": ("logo.svg", "image/svg+xml"),
    "/sub/": ("sub/index.html", "text/html"),
    "/sub": ("sub/index.html", "text/html"),
    "/data.nothing": ("data.nothing", "application/octet-stream"),
}


def test_files_of_path_are_served_with_their_types_and_without_a_key(fake_server, site):
    server = fake_server(["x"], "--path", site, "--api-key", "k")
    for path, (name, kind) in TYPES.items():
        for method in ("GET", "HEAD"):
            status, headers, body = server.request(method, path)
            assert (status, headers["content-type"]) == (200, kind), path
            assert body == (f"this is {name} é".encode() if method == "GET" else b"")
    assert server.request("GET", "/props")[0] == 401
    assert server.request("POST", "/app.js", b"x")[0] == 405
    assert server.request("GET", "/missing.js")[0] == 401  # who has no key learns nothing


ESCAPES = ["/../outside.txt", "/%2e%2e/outside.txt", "/..%2foutside.txt", "/sub/../../outside.txt"]
ESCAPES += ["/link.txt", "/linked/x.txt", "/linked", "/sub/deep/", "/../site2/x.txt", "/.env"]
ESCAPES += ["/.git/config", "/sub/%2e%2e/.env", "/%00", "/app.js%00", "/" + "x" * 5000, "/sub/deep"]
ESCAPES += [
    "/round",
    "/round/x",
    "/..\\outside.txt",
    "/app.js/",
    "/app.js/x",
    "//../outside.txt",
    "/./.env",
]


def test_no_path_leads_out_of_the_directory_or_to_what_is_hidden(fake_server, site):
    server = fake_server(["x"], "--path", site)
    for path in ESCAPES:
        with server.connect() as sock:  # by hand: a client would tidy the path up
            sock.sendall(http_request(path, headers={"Connection": "close"}))
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        if path != "/app.js/":  # a slash at the end is forgiven
            assert answer.startswith(b"HTTP/1.1 404"), path
        assert b"secret" not in answer, path
    assert server.request("GET", "/props")[1]["content-type"].startswith("application/json")


def test_files_are_under_the_prefix_too_and_the_directory_must_exist(own_server, site):
    server = own_server("--fake", "--path", site, "--api-prefix", "/llm").wait_listening()
    eventually(lambda: server.get("/llm/health")[0] == 200)
    for path in ("/llm", "/llm/", "/llm/index.html"):
        assert server.request("GET", path)[2] == "this is index.html é".encode()
    for path in (
        "/",
        "/index.html",
        "/sub",
        "/llmindex.html",
        "/llmenv",
        "/llm.env",
        "/llmgit/config",
    ):
        assert server.request("GET", path)[0] == 404, path
    assert server.request("GET", "/llm/props")[1]["content-type"].startswith("application/json")
    missing = own_server("--fake", "--path", site / "missing")
    assert missing.wait_end() == 2 and "missing" in missing.log().splitlines()[-1]


def test_the_web_page_is_there_while_the_model_loads(own_server, site):
    options = ("--fake", "--path", site)
    server = own_server(*options, program="serve_faulty.py", FAULTY_LOAD_S="20").wait_listening()
    assert server.request("GET", "/app.js")[0] == 200
    assert server.request("GET", "/props")[0] == 503


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    try:
        files = ["-keyout", "key.pem", "-out", "cert.pem"]
        subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl command")
    return folder


def test_with_a_certificate_https_is_served_and_nothing_else(own_server, certificate):
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    server = own_server("--fake", "--ssl-cert-file", cert, "--ssl-key-file", key)
    found = eventually(lambda: re.search(r"listening on https://127\.0\.0\.1:(\d+)", server.log()))
    port, context = int(found[1]), ssl.create_default_context(cafile=cert)

    def ask(request):
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                sock.sendall(request)
                return sock.recv(65536)

    eventually(lambda: ask(http_request("/health")).startswith(b"HTTP/1.1 200"))
    assert b'"content":' in ask(http_request(CHAT, {"messages": HI}))
    with socket.create_connection(("127.0.0.1", port), 10) as plain, contextlib.suppress(OSError):
        plain.sendall(http_request("/health"))
        assert b"200" not in plain.recv(1000)


def test_a_certificate_that_cannot_be_read_is_one_clear_line(own_server, tmp_path, certificate):
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for options in (("--ssl-cert-file", empty), ("--ssl-cert-file", tmp_path / "missing.pem")):
        server = own_server("--fake", *options)
        assert server.wait_end() == 1 and "--ssl-cert-file" in server.log()
        assert "Traceback" not in server.log()
    server = own_server("--fake", "--ssl-key-file", certificate / "key.pem")
    assert server.wait_end() == 2 and "--ssl-cert-file" in server.log()


def test_a_timeout_holds_for_a_head_that_does_not_come(own_server):
    server = own_server("--fake", "--timeout", "0.5").wait_ready()
    with server.connect() as sock:
        sock.sendall(b"GET /health HTT")
        start = time.monotonic()
        assert b" 408 " in sock.recv(1000)
        assert time.monotonic() - start < 10


def test_the_environment_gives_defaults_and_the_command_line_wins(own_server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    env = {
        "LLAMA_ARG_ALIAS": "from-env",
        "LLAMA_ARG_N_PARALLEL": "3",
        "LLAMA_ARG_THINK_BUDGET": "0",
    }
    env |= {"LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_ENDPOINT_SLOTS": "off"}
    env |= {"LLAMA_ARG_API_KEY_FILE": str(keys), "LLAMA_ARG_API_PREFIX": "v9"}
    server = own_server("--fake", "--parallel", "1", **env).wait_listening()
    eventually(lambda: server.get("/v9/health")[0] == 200)
    assert server.get("/v9/props")[0] == 401
    _, _, body = server.request("GET", "/v9/props", None, {"x-api-key": "k"})
    props = json.loads(body)
    assert props["model_alias"] == "from-env" and props["total_slots"] == 1
    assert props["endpoint_metrics"] is True and props["endpoint_slots"] is False


CONFIG = """
# what a service file would hold
fake: true
cache_size: 1000
parallel: 3
alias: from-config
metrics: true
slots: false
temp: 0.25
api-key: [one, two]
chat-template-kwargs: {enable_thinking: false}
chat-template-file:
"""


def started_with(own_server, tmp_path, text, *args, **env):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return own_server("--config", path, *args, **env)


def test_a_config_file_sets_any_option_and_loses_to_environment_and_command_line(
    own_server, tmp_path
):
    server = started_with(
        own_server, tmp_path, CONFIG, "--alias", "from-line", LLAMA_ARG_N_PARALLEL="4"
    ).wait_ready()
    _, _, body = server.request("GET", "/props", None, {"x-api-key": "two"})
    props = json.loads(body)
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 1000 and settings["params"]["temperature"] == 0.25
    assert (props["model_alias"], props["total_slots"]) == ("from-line", 4)
    assert props["endpoint_metrics"] is True and props["endpoint_slots"] is False
    assert "one" not in json.dumps(props["engine"])


def test_json_is_a_config_file_too(own_server, tmp_path):
    server = started_with(own_server, tmp_path, '{"fake": true, "top-k": 3}').wait_ready()
    assert server.get("/props")[1]["default_generation_settings"]["params"]["top_k"] == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fake: true\nnonsense: 1", "--nonsense"),
        ("fake: true\np: 1", "--p"),
        ("fake: true\nport: eighty", "--port"),
        ("fake: true\nport: [1, 2]", "--port"),
        ("fake: true\nmetrics: 3", "--metrics"),
        ("fake: true\nreasoning-format: x", "--reasoning-format"),
        ("fake: true\nchat-template-kwargs: [1]", "--chat-template-kwargs"),
    ],
)
def test_a_wrong_option_in_a_file_is_a_clear_line_and_exit_code_2(
    own_server, tmp_path, text, names
):
    server = started_with(own_server, tmp_path, text)
    assert server.wait_end() == 2
    last = server.log().strip().splitlines()[-1]
    assert "error:" in last and names in last, server.log()


@pytest.mark.parametrize(
    "text", [None, "fake: {", "just text", "!!python/object/apply:os.system ['true']"]
)
def test_a_broken_or_missing_config_file_is_one_clear_line(own_server, tmp_path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    server = own_server("--fake", "--config", path)
    assert server.wait_end() == 1
    (line,) = server.log().strip().splitlines()
    assert line.startswith(f"exl3-serve: --config {path}: ")


def test_a_date_in_a_file_is_its_text(own_server, tmp_path):
    text = "fake: true\nchat-template-kwargs: {date: 2026-01-02}"
    started_with(own_server, tmp_path, text).wait_ready()


@pytest.mark.parametrize(
    "env",
    [{"LLAMA_ARG_PORT": "x"}, {"LLAMA_ARG_THINK": "maybe"}, {"LLAMA_ARG_ENDPOINT_METRICS": "2"}],
    ids=str,
)
def test_a_wrong_value_in_the_environment_is_a_clear_line_too(own_server, env):
    server = own_server("--fake", **env)
    assert server.wait_end() == 2
    assert "error: argument --" in server.log().splitlines()[-1]


def test_what_came_from_environment_and_file_is_in_the_engine_block_but_no_key(
    own_server, tmp_path
):
    text = "fake: true\nmetrics: true\napi-key: sesame"
    server = started_with(own_server, tmp_path, text, LLAMA_ARG_TOP_K="9").wait_ready()
    assert server.request("GET", "/props")[0] == 401
    key = {"Authorization": "Bearer sesame"}
    assert b"sesame" not in server.request("GET", "/props", None, key)[2]

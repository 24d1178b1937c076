"""The real exllamav3 on the CPU behind the running server: loading, figures, cancels, and what a
recorder does.

Shared by most tests: one server with four slots. The others differ in a flag of exllamav3.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
from functools import partial
from itertools import pairwise

import pytest
import tiny_model
from golden.record import load
from golden.requests import BY_ID
from server_process import HI, Reader, eventually, http_request, in_threads, reset, sse_data

CHAT = "/v1/chat/completions"
N_CTX = 8192
SHARED = ("-cs", N_CTX, "--parallel", 4, "-chunk_size", 256)  # short steps: a CPU is slow
GREEDY = {"temperature": 0, "ignore_eos": True}
RECORDED = load()[1]["completion/greedy-64"]["body"]
GOLDEN = BY_ID["completion/greedy-64"].body


@pytest.fixture
def server(real_server):
    return real_server(*SHARED)


def words(n, seed):
    """Text of about n tokens that shares no beginning with another seed's."""
    rng = random.Random(seed)
    choices = ["rain ", "ferry ", "harbour ", "gulls ", "lamp ", "picture ", "island ", "book "]
    return f"{seed} " + "".join(rng.choice(choices) for _ in range(n // 2))


def prompt_of(server, n, seed):
    """A prompt of exactly n tokens, as ids."""
    ids = server.ok("/tokenize", {"content": words(4 * n, seed), "add_special": False})["tokens"]
    assert len(ids) >= n
    return ids[:n]


def token_events(events):
    return [event for event in events if event.get("tokens")]


# ---- Loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kind", "n_ctx"),
    [
        (("-cs", 1024, "-np", 3), "fp16", 1024),
        (("-cs", 1024, "-chunk_size", 512, "-ndt", 3, "-ngram", 2), "fp16", 1021),
        (("-cs", 2048), "exl3", 2048),
        (("-cs", 1024, "--parallel", 1), "exl3_moe", 1024),
    ],
    ids=["parallel", "chunks-and-draft", "exl3", "exl3-moe"],
)
def test_flags_of_exllamav3_reach_the_model_and_it_answers(own_server, args, kind, n_ctx):
    path = tiny_model.cached(kind)
    server = own_server("-m", path, *args, program="serve_cpu.py").wait_ready()
    props = server.get("/props")[1]
    assert props["default_generation_settings"]["n_ctx"] == n_ctx
    n_slots = dict(zip(args[::2], args[1::2], strict=True))
    assert props["total_slots"] == n_slots.get("-np", n_slots.get("--parallel", 2))
    assert props["model_path"] == str(path) and props["model_alias"] == kind
    assert props["engine"]["name"] == "exllamav3" and props["engine"]["version"] == "1.6.5"
    assert props["engine"]["server_pid"] == server.process.pid
    reply = server.chat(temperature=0, max_tokens=8)
    assert reply.finish == "length" and reply.content


def test_a_model_that_cannot_be_loaded_is_one_clear_line_and_exit_code_1(own_server, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_model.cached("fp16"), cut)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    starts = {
        path: own_server("-m", path, "-cs", 1024, program="serve_cpu.py")
        for path in (tmp_path / "missing", cut)
    }
    for path, server in starts.items():
        assert server.wait_end(60) == 1, path
        assert sum("cannot load the model" in line for line in server.log().splitlines()) == 1


def test_an_unknown_flag_is_refused_with_usage_before_weights_load(own_server):
    server = own_server("-m", "/nowhere", "--cache_sizes", "5", program="serve_cpu.py")
    assert server.wait_end(60) == 2
    assert "usage:" in server.log() and "--cache_sizes" in server.log()


# ---- Text ----------------------------------------------------------------------------------------


def test_64_greedy_tokens_are_those_of_llama_server_on_the_same_weights(server):
    assert GOLDEN["n_predict"] == 64 and RECORDED["tokens_predicted"] == 64
    result = server.completion(**GOLDEN)
    assert result["content"] == RECORDED["content"]
    assert result["tokens_predicted"] == 64 and result["stop_type"] == "limit"


def test_temperature_0_gives_ten_equal_answers_and_a_seed_repeats_itself(server):
    """Case 45."""
    asked = {"prompt": "Once upon", "n_predict": 12}
    assert len({server.ok("/completion", asked | GREEDY)["content"] for _ in range(10)}) == 1
    sampled = asked | {"temperature": 1.5, "top_k": 0, "min_p": 0, "top_p": 1}
    texts = [server.ok("/completion", sampled | {"seed": seed})["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 1}, {"min_p": 1}, {"temperature": 1e-7}]
    + [{"temperature": 100}, {"repeat_penalty": 1.3}, {"frequency_penalty": 2}]
    + [{"presence_penalty": -2}, {"logit_bias": {"65": 100}}, {"logit_bias": [[65, False]]}],
)
def test_extreme_sampling_settings_harm_nothing(server, sampling):
    result = server.ok("/completion", {"prompt": "Once upon", "n_predict": 8} | sampling)
    assert result["tokens_predicted"] == 8
    if {"top_p": 0}.items() <= sampling.items() or sampling.get("top_k") == 1:
        greedy = server.ok("/completion", {"prompt": "Once upon", "n_predict": 8} | GREEDY)
        assert result["content"] == greedy["content"]


def test_a_stop_string_and_an_eos_token_end_the_text(server):
    whole = server.completion(prompt="Once upon", n_predict=24, **GREEDY)["content"]
    stop = whole[len(whole) // 2 :][:4]
    result = server.completion(prompt="Once upon", n_predict=24, stop=[stop], **GREEDY)
    assert result["content"] == whole[: whole.find(stop)] and result["stopping_word"] == stop
    eos = {"logit_bias": [[tiny_model.TOKEN_ID["<|im_end|>"], 100]]}
    result = server.completion(prompt="Once upon", n_predict=24, temperature=0, **eos)
    assert (result["content"], result["stop_type"]) == ("", "eos")


def test_ids_outside_the_vocabulary_are_refused_and_the_next_answer_is_sane(server):
    """Case 46."""
    before = server.ok("/completion", {"prompt": "Once", "n_predict": 8} | GREEDY)["content"]
    for body in (
        {"prompt": [1, 99999999]},
        {"prompt": [-5]},
        {"prompt": [tiny_model.VOCAB]},
        {"prompt": "a", "logit_bias": {"99999999": 5}},
        {"prompt": "a", "logit_bias": [[tiny_model.VOCAB, 1]]},
    ):
        server.refused("/completion", body)
    server.refused("/detokenize", {"tokens": [99999999]})
    after = server.ok("/completion", {"prompt": "Once", "n_predict": 8} | GREEDY)["content"]
    assert after == before


# ---- Figures -------------------------------------------------------------------------------------


def test_a_repeated_prompt_comes_from_the_cache_and_the_figures_add_up(server):
    prompt = prompt_of(server, 1000, "repeat")
    first, again = (
        server.ok("/completion", {"prompt": prompt, "n_predict": 3} | GREEDY) for _ in range(2)
    )
    assert first["timings"]["cache_n"] == 0 and first["timings"]["prompt_n"] == 1000
    assert again["timings"]["cache_n"] >= 768  # whole pages at least
    assert again["timings"]["cache_n"] + again["timings"]["prompt_n"] == 1000
    assert again["tokens_evaluated"] == 1000 and again["content"] == first["content"]
    for timings in (first["timings"], again["timings"]):
        assert timings["predicted_n"] == 3 and timings["prompt_ms"] > 0
        rate = timings["predicted_n"] / timings["predicted_ms"] * 1000
        assert timings["predicted_per_second"] == pytest.approx(rate, rel=1e-3)
        rate = timings["prompt_n"] / timings["prompt_ms"] * 1000
        assert timings["prompt_per_second"] == pytest.approx(rate, rel=5e-3)  # rounded to 1 us


def test_a_repeated_chat_counts_its_cached_tokens_in_usage_too(server):
    messages = [{"role": "user", "content": words(900, "chat")}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    server.ok(CHAT, body)
    again = server.ok(CHAT, body)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["timings"]["cache_n"] > 256
    assert cached + again["timings"]["prompt_n"] == again["usage"]["prompt_tokens"]


def test_the_tokens_of_a_chat_are_those_of_its_rendered_text(server):
    prompt = server.rendered(messages=HI)
    tokens = server.ok("/tokenize", {"content": prompt, "add_special": False})["tokens"]
    assert server.chat(temperature=0, max_tokens=1).whole["usage"]["prompt_tokens"] == len(tokens)
    assert server.ok("/detokenize", {"tokens": tokens})["content"] == prompt


def test_two_streams_progress_together(server):
    body = {"ignore_eos": True, "temperature": 0, "max_tokens": 400}
    asked = ({"messages": [{"role": "user", "content": name}]} | body for name in "ab")
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(server.open_stream(fields))[0] for fields in asked]
        for _ in range(3):
            for reader in readers:
                for _ in range(5):
                    assert reader.chunk()
        eventually(lambda: server.n_busy() == 2, "two busy slots")
        before = {slot["id"]: slot.get("n_decoded") for slot in server.slots()}
        for reader in readers:
            for _ in range(20):
                assert reader.chunk()
        busy = [slot for slot in server.slots() if slot["is_processing"]]
        assert len(busy) == 2
        assert all(slot["n_decoded"] > before[slot["id"]] > 0 for slot in busy)
        assert all(slot["n_past"] > slot["n_decoded"] for slot in busy)
    server.wait_idle()


# ---- Cancels -------------------------------------------------------------------------------------


def start(server, **body):
    sock = server.connect()
    sock.sendall(http_request("/completion", {"stream": True} | GREEDY | body))
    return sock


def check_sane(server):
    """Slots are free and the text is right."""
    server.wait_idle()
    assert server.ok("/completion", GOLDEN)["content"] == RECORDED["content"]


@pytest.mark.parametrize("leave", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_in_prefill_or_decode_frees_the_slot(server, leave, stream):
    """Case 68, 69: the phases of one job and then of another."""
    for prompt, n_decoded in ((prompt_of(server, 8000, f"{leave}{stream}"), 0), ([65] * 9, 5)):
        sock = start(server, prompt=prompt, n_predict=-1, stream=stream)

        def in_phase(n=n_decoded):
            rows = [slot for slot in server.slots() if slot["is_processing"]]
            return rows and rows[0]["n_decoded"] >= n

        eventually(in_phase, f"{n_decoded} tokens")
        sock.close() if leave == "FIN" else reset(sock)
        eventually(lambda: server.n_busy() == 0, "the slot is free", 10)
    check_sane(server)


def test_who_leaves_the_queue_never_starts(server):
    running = [start(server, prompt=[65 + i] * 20, n_predict=1500) for i in range(4)]
    server.wait_busy(4)
    queued = [start(server, prompt=[70 + i] * (31 + i), n_predict=50) for i in range(3)]
    for sock in queued:
        assert Reader(sock).head()[0] == 200
    queued[0].close()
    reset(queued[1])
    for sock in running:
        sock.close()
    reader = Reader(queued[2])
    started, data = set(), b""
    while b'"stop":true' not in data:
        data = reader.chunk()
        started |= {s["n_prompt_tokens"] for s in server.slots() if s["is_processing"]}
    assert not {31, 32} & started
    queued[2].close()
    check_sane(server)


def test_many_rounds_of_leaving_anywhere_lose_neither_pages_nor_slots(real_server):
    """Case 70, on a cache so small that a lost page would show: at the end one request fills it."""
    server = real_server("-cs", 1024, "--parallel", 3)
    rng = random.Random(7)
    expected = server.ok("/completion", {"prompt": "Once", "n_predict": 24} | GREEDY)["content"]
    for _ in range(12):
        prompts = [prompt_of(server, rng.randrange(20, 300), rng.random()) for _ in range(4)]
        socks = [start(server, prompt=prompt, n_predict=24) for prompt in prompts]
        for sock in socks[:2]:
            reader = Reader(sock)
            n_events = rng.randrange(-1, 24)
            if n_events >= 0:
                reader.head()
            for _ in range(n_events):
                reader.chunk()
            sock.close() if rng.random() < 0.5 else reset(sock)
        for sock in socks[2:]:
            reader = Reader(sock)
            assert json.loads(sse_data(reader.body(reader.head()[1]))[-1])["stop_type"] == "limit"
            sock.close()
    server.wait_idle()
    again = server.ok("/completion", {"prompt": "Once", "n_predict": 24} | GREEDY)["content"]
    assert again == expected
    filling = {"prompt": prompt_of(server, 900, "fill"), "n_predict": -1} | GREEDY
    assert server.ok("/completion", filling)["tokens_predicted"] in (123, 124)
    server.assert_alive()


def test_a_request_waits_while_others_hold_the_pages_it_needs(real_server):
    """Case 43 (e): each fits the context, together they do not fit the cache."""
    server = real_server("-cs", 1024, "--parallel", 3)

    def ask(seed):
        body = {"prompt": prompt_of(server, 700, seed), "n_predict": 100} | GREEDY
        return server.ok("/completion", body)

    for result in in_threads(*(partial(ask, seed) for seed in "xyz")):
        assert result["tokens_predicted"] == 100 and result["stop_type"] == "limit"
    server.assert_alive()


def test_the_context_is_filled_to_its_last_token_and_never_beyond(real_server):
    """Case 43 (a) to (d). exllamav3 keeps the cache's last place free (job.py, `room`)."""
    server = real_server("-cs", 1024, "--parallel", 3)
    for n in (1023, 1014):
        result = server.completion(prompt=prompt_of(server, n, n), n_predict=1000, **GREEDY)
        assert result["tokens_predicted"] in (1024 - n, max(1, 1024 - n - 1))
        assert result["stop_type"] == "limit"
    for n in (1024, 1025):
        error = server.refused("/completion", {"prompt": prompt_of(server, n, n)})
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n, 1024)
    server.assert_alive()


# ---- Drafting ------------------------------------------------------------------------------------


def test_ngram_drafting_counts_in_every_timings_and_changes_no_text(real_server, server):
    drafting = real_server("-cs", 4096, "-ngram", 2)
    props = drafting.get("/props")[1]
    assert props["engine"]["draft"]["n_max"] > 0
    prompt = "the ferry left the harbour and " * 20
    body = {"prompt": prompt, "n_predict": 200} | GREEDY
    plain = server.ok("/completion", body)
    assert "draft_n" not in plain["timings"]
    events = [
        json.loads(data)
        for data in drafting.stream("/completion", body | {"timings_per_token": True})
    ]
    assert "".join(event["content"] for event in events) == plain["content"]
    drafts = [
        (event["timings"].get("draft_n", 0), event["timings"].get("draft_n_accepted", 0))
        for event in events
    ]
    assert 0 < drafts[-1][1] <= drafts[-1][0]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(drafts))
    assert drafts[len(drafts) // 2][0] > 0, "not only at the end"
    first = next(i for i, (n, _) in enumerate(drafts) if n)
    assert all("draft_n_accepted" in event["timings"] for event in events[first:])
    for event in token_events(events):
        assert event["timings"]["predicted_n"] == event["tokens_predicted"]
    assert events[-1]["timings"]["predicted_n"] == 200
    drafting.assert_alive()


# ---- Case 72: big requests -----------------------------------------------------------------------


def test_a_huge_prompt_blocks_neither_streams_nor_health(server):
    """Bounds are generous: two cores are shared with other tests."""
    huge = [
        {"messages": [{"role": "user", "content": "a" * 5_000_000}]},
        {"messages": [{"role": "user", "content": "rain"}] * 3000},
    ]
    done = threading.Event()
    gaps, waits = [], []

    def stream():
        fields = GREEDY | {"max_tokens": 4000}
        while not done.is_set():
            with server.open_stream(fields) as (reader, _, _):
                before = time.monotonic()
                while not done.is_set() and reader.chunk():
                    now = time.monotonic()
                    gaps.append(now - before)
                    before = now

    def poll():
        while not done.is_set():
            for method, path, body in (
                ("GET", "/health", None),
                ("POST", "/tokenize", {"content": "Say hi."}),
            ):
                began = time.monotonic()
                assert server.request(method, path, body)[0] == 200
                waits.append(time.monotonic() - began)
            time.sleep(0.05)

    def ask():
        try:
            for body in huge:
                status, answer = server.post(CHAT, body | {"max_tokens": 1})
                assert status == 400, answer
                assert answer["error"]["type"] == "exceed_context_size_error"
        finally:
            done.set()

    in_threads(stream, poll, ask)
    assert max(gaps) < 1.5
    assert max(waits) < 1.5
    server.wait_idle()


# ---- What a recorder does ------------------------------------------------------------------------


class Recording:
    """One chat as a recorder keeps it: arrival times of what it counts as tokens, and figures."""

    def __init__(self, server, seed, n_tokens, n_prompt=300, leave_after=None):
        self.progress, self.times, self.timings, self.usage = [], [], [], None
        self.finish = None
        content = words(n_prompt, seed)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": n_tokens}
        body |= GREEDY | {"timings_per_token": True, "return_progress": True}
        body["stream_options"] = {"include_usage": True}
        self.sent = time.monotonic()
        with server.open_stream(body) as (reader, status, _):
            assert status == 200
            while piece := reader.chunk():
                now = time.monotonic()
                for data in sse_data(piece):
                    if data != "[DONE]":
                        self.take(json.loads(data), now)
                if leave_after is not None and len(self.times) >= leave_after:
                    return

    def take(self, event, now):
        assert "error" not in event, event
        if "prompt_progress" in event:
            self.progress.append(event["prompt_progress"])
        if "timings" in event:
            self.timings.append(event["timings"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.finish = choice["finish_reason"] or self.finish
            delta = choice["delta"]
            if delta.get("content") or delta.get("reasoning_content"):
                self.times.append(now)
                assert event["timings"]["predicted_n"] == len(self.times), "not a token a delta"

    def check(self, n_tokens):
        """What the recorder complains about, except for the rate."""
        last = self.timings[-1]
        assert self.finish == "length"
        assert len(self.times) == last["predicted_n"] == n_tokens
        assert self.usage["completion_tokens"] == n_tokens
        assert last["prompt_n"] + last["cache_n"] == self.usage["prompt_tokens"]
        self.check_progress()
        for timings in self.timings:
            assert timings["prompt_n"] + timings["cache_n"] == self.usage["prompt_tokens"]
        assert 0 < last["prompt_ms"] <= (self.times[0] - self.sent) * 1000 + 1
        for before, after in pairwise(self.timings):
            assert before["predicted_n"] <= after["predicted_n"]
            assert before["predicted_ms"] <= after["predicted_ms"] + 0.002

    def check_progress(self):
        steps = [row["processed"] for row in self.progress]
        assert steps[0] == 0 and steps[-1] == self.progress[-1]["total"]
        assert steps == sorted(steps)
        assert len({row["total"] for row in self.progress}) == 1
        for before, after in pairwise(self.progress):
            assert before["time_ms"] <= after["time_ms"]
            assert before["cache"] <= after["cache"] <= after["processed"]

    def rate_error(self):
        """How far the rate that is told is from the one that is seen."""
        seen = (len(self.times) - 1) / (self.times[-1] - self.times[0])
        return abs(self.timings[-1]["predicted_per_second"] / seen - 1)


@contextlib.contextmanager
def polling_slots(server):
    """Polls /slots every 250 ms, as the recorder does, and yields what it saw."""
    rows, done, errors = [], threading.Event(), []

    def poll():
        try:
            while not done.wait(0.25):
                status, slots = server.get("/slots")
                assert status == 200
                rows.extend(slots)
        except Exception as exc:
            errors.append(exc)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield rows
    finally:
        done.set()
        thread.join()
    assert not errors
    for row in rows:
        assert {"id", "is_processing", "n_ctx", "n_past"} <= row.keys()
        if row["is_processing"]:
            assert row["n_decoded"] >= 0 and row["n_remain"] >= 0 and row["id_task"] >= 0


def test_a_recorder_waits_through_503_and_its_probes_grow_with_the_prompt(own_server):
    path = tiny_model.cached("fp16")
    server = own_server("-m", path, "-cs", N_CTX, program="serve_cpu.py").wait_listening()

    def props():
        status, answer = server.get("/props")
        assert status == 200 or answer["error"]["message"] == "Loading model"
        return status == 200 and answer

    assert eventually(props)["engine"]["server_pid"] == server.process.pid
    probes = []
    for n, seed in ((128, "p"), (2048, "q"), (2048, "r")):
        body = {"prompt": prompt_of(server, n, seed), "n_predict": 1, "temperature": 0}
        probes.append(server.ok("/completion", body)["timings"])
        assert probes[-1]["prompt_n"] + probes[-1]["cache_n"] == n
        assert probes[-1]["predicted_n"] == 1
    short, first, second = (probe["prompt_ms"] for probe in probes)
    assert 0 < short < first and short < second


@pytest.mark.parametrize("n_streams", [4, 7])
def test_a_recorder_finds_nothing_wrong_with_streams_of_the_real_engine(server, n_streams):
    """Also with more streams than slots: what waits is not prompt time."""
    with polling_slots(server) as rows:
        chats = in_threads(
            *(lambda i=i: Recording(server, f"{n_streams}-{i}", 60 + i) for i in range(n_streams))
        )
    for i, chat in enumerate(chats):
        chat.check(60 + i)
    if n_streams > 4:  # the last waited for others to end, and its prompt time does not show it
        waited = max(chats, key=lambda chat: chat.times[0] - chat.sent)
        assert waited.timings[-1]["prompt_ms"] < (waited.times[0] - waited.sent) * 1000 / 2
    assert {row["n_ctx"] for row in rows} <= {N_CTX}
    server.wait_idle()


def test_a_recorders_rate_is_the_servers_rate(fake_server):
    """Within 2% for each of four streams. The fake engine's steps are even; the machine's
    scheduling is not, so the best of a few rounds counts."""
    server = fake_server(["word "], "--parallel", 4, delay=0.02)
    errors = []
    for n_round in range(4):
        with polling_slots(server):
            chats = in_threads(
                *(partial(Recording, server, f"rate {n_round} {i}", 100, 100) for i in range(4))
            )
        for chat in chats:
            chat.check(100)
        errors.append(max(chat.rate_error() for chat in chats))
        if errors[-1] < 0.02:
            break
    assert min(errors) < 0.02


def test_a_recorder_that_hangs_up_keeps_true_figures(server):
    """The last per-token figures are already true, and the slot is free afterwards."""
    chat = Recording(server, "hang-up", 3000, leave_after=50)
    last = chat.timings[-1]
    assert last["predicted_n"] == len(chat.times) >= 50
    assert last["prompt_n"] + last["cache_n"] == chat.progress[-1]["total"]
    assert 0 < last["prompt_ms"] <= (chat.times[0] - chat.sent) * 1000 + 1
    rate = last["predicted_n"] / last["predicted_ms"] * 1000
    assert last["predicted_per_second"] == pytest.approx(rate, rel=1e-3)
    assert chat.rate_error() < 0.5  # a busy machine
    check_sane(server)


def test_progress_never_goes_back_when_the_first_token_is_half_a_character(server):
    body = {"prompt": "word " * 300, "n_predict": 3, "logit_bias": [[0xF0, 100]], "stream": True}
    events = map(json.loads, server.stream("/completion", body | {"return_progress": True}))
    steps = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    processed = [step["processed"] for step in steps]
    assert processed == sorted(processed) and processed[0] == 0
    assert processed[-1] == steps[-1]["total"]


def test_a_control_token_has_no_text_but_counts(real_server):
    server = real_server()
    control, plain = (tiny_model.TOKEN_ID[text] for text in ("<|im_start|>", "</think>"))
    for token, text in ((control, ""), (plain, "</think>" * 3)):
        body = {"prompt": "Hello", "n_predict": 3, "logit_bias": [[token, 1000]]}
        answer = server.ok("/completion", body | {"return_tokens": True})
        assert (answer["content"], answer["tokens"]) == (text, [token] * 3)


# ---- Budgets of thoughts, infill, metrics --------------------------------------------------------

THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
ANSWER = {
    "type": "json_schema",
    "json_schema": {"schema": SCHEMA | {"additionalProperties": False}},
}


def n_tokens(server, text):
    return len(server.ok("/tokenize", {"content": text})["tokens"])


@pytest.mark.parametrize("budget", [0, 1, 5, 17])
def test_a_thought_has_exactly_the_tokens_of_its_budget(server, budget):
    free = server.chat(**THINKS, max_tokens=40)
    assert free.content == "" and free.finish == "length"
    body = THINKS | {"messages": HI, "max_tokens": 40, "reasoning_budget": budget}
    body |= {"logprobs": True}
    choice = server.ok(CHAT, body)["choices"][0]
    spoken = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert spoken.index("</think>") == budget
    reply = server.chat(**THINKS, max_tokens=40, reasoning_budget=budget)
    assert free.reasoning.startswith(reply.reasoning) and reply.content
    assert reply.whole["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("budget", [0, 3])
def test_after_a_closed_thought_a_schema_binds_the_answer(server, budget):
    members = THINKS | {"response_format": ANSWER, "reasoning_budget": budget, "max_tokens": 200}
    reply = server.chat(**members, reasoning_budget_message=" That is enough.")
    assert reply.reasoning.endswith("That is enough.") and reply.finish == "stop"
    assert set(json.loads(reply.content)) == {"ok"}


def test_budgets_of_choices_side_by_side_do_not_disturb_each_other(server):
    alone = server.chat(**THINKS, max_tokens=30, reasoning_budget=4).said
    replies = server.chats(**THINKS, max_tokens=30, reasoning_budget=4, n=3)
    assert [reply.said for reply in replies] == [alone] * 3


def test_a_budget_holds_while_ngram_drafting_to_within_a_step(real_server):
    server = real_server("-cs", 2048, "-ndt", 3, "-ngram", 2)
    body = THINKS | {"messages": HI, "max_tokens": 80, "reasoning_budget": 30, "logprobs": True}
    choice = server.ok(CHAT, body)["choices"][0]
    spoken = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert 30 <= spoken.index("</think>") <= 33
    assert choice["message"]["content"]


def test_control_ends_a_thought_and_the_schema_binds_from_there(server):
    body = THINKS | {"max_tokens": 3000, "response_format": ANSWER, "reasoning_control": True}
    with server.open_stream(body) as (reader, _, _):
        first = json.loads(sse_data(reader.chunk())[0])
        asked = {"id": first["id"], "action": "reasoning_end"}
        assert server.ok(f"{CHAT}/control", asked) == {"success": True}
        events = sse_data(reader.body({"transfer-encoding": "chunked"}))
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert set(json.loads("".join(delta.get("content", "") for delta in deltas))) == {"ok"}


def test_infill_takes_the_end_of_the_prefix_the_start_of_the_suffix_and_the_last_files(real_server):
    server = real_server("-cs", 1024)
    mark = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    files = [{"filename": f"{i}.py", "text": f"file {i} " + "x = 1\n" * 50} for i in range(9)]
    body = {"input_prefix": "start " + "a b " * 400, "input_suffix": "c d " * 400 + "end"}
    body |= {"input_extra": files, "prompt": "now", "n_predict": 2, "temperature": 0}
    prompt = server.ok("/infill", body)["prompt"]
    before, _, code = prompt.partition(mark[0])
    prefix, _, suffix = code.removesuffix(mark[2]).partition(mark[1])
    assert "start" not in prefix and prefix.endswith("a b now")
    assert suffix.startswith("c d ") and "end" not in suffix
    assert "file 0" not in before and "file 8" in before
    assert n_tokens(server, prompt) <= 1024 // 4 * 3


def test_marks_in_the_code_to_fill_in_are_text(server):
    body = {"input_prefix": "<|fim_middle|>", "input_suffix": "x", "n_predict": 1}
    plain = server.ok("/tokenize", {"content": "<|fim_middle|>", "parse_special": False})["tokens"]
    assert server.ok("/infill", body)["tokens_evaluated"] == 3 + len(plain) + 1


@pytest.mark.parametrize(
    "changes",
    [{"input_prefix": None}, {"input_suffix": 5}, {"prompt": [1]}, {"input_extra": [{"text": 5}]}]
    + [{"input_extra": [5]}, {"input_extra": [{"text": "x", "filename": 1}]}],
)
def test_a_wrong_part_of_an_infill_is_a_400_that_names_it(server, changes):
    body = {"input_prefix": "a", "input_suffix": "b"} | changes
    server.refused("/infill", body, next(iter(changes)))


def test_metrics_are_the_engines_figures_of_all_that_ended(own_server):
    model = tiny_model.cached("fp16")
    server = own_server("-m", model, "-cs", 2048, "--metrics", program="serve_cpu.py").wait_ready()
    body = {"prompt": words(300, 1), "n_predict": 9, "temperature": 0, "ignore_eos": True}
    timings = [server.ok("/completion", body)["timings"] for _ in range(2)]
    with server.open_stream(body | {"n_predict": 900, "prompt": words(900, 2)}, "/completion"):
        server.wait_busy(1)
    server.wait_idle()
    text = server.request("GET", "/metrics")[2].decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert timings[1]["cache_n"] > 0
    assert float(found["llamacpp:prompt_tokens_cached_total"]) >= timings[1]["cache_n"]
    evaluated = float(found["llamacpp:prompt_tokens_total"]) - sum(t["prompt_n"] for t in timings)
    assert 0 <= evaluated <= n_tokens(server, words(900, 2))  # of the one that left
    n = float(found["llamacpp:tokens_predicted_total"])
    assert 18 <= n < 900 and float(found["llamacpp:n_decode_total"]) >= n


def test_a_lark_grammar_is_obeyed(server):
    body = {"prompt": "Say", "lark": 'start: "yes" | "no"', "n_predict": 20}
    for seed in range(4):
        assert server.ok("/completion", body | {"seed": seed})["content"] in ("yes", "no")
    server.refused("/completion", body | {"lark": "start: ("}, "grammar")
    server.refused("/completion", body | {"grammar": 'root ::= "a"'}, "only one of")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_spells_a_control_token_is_the_requests_fault(server, stream):
    """llguidance lets the token through where the grammar spells its text, and then refuses it."""
    body = {"prompt": "Say", "grammar": 'root ::= "<|im_start|>" "b"', "stream": stream}
    bias = {"logit_bias": [["<|im_start|>", 100]]}
    status, _, answer = server.request("POST", "/completion", body | bias | {"n_predict": 9})
    error = json.loads(sse_data(answer)[-1] if stream else answer)["error"]
    assert status == (200 if stream else 400) and error["code"] == 400
    assert error["message"].startswith("the grammar failed: ")
    server.assert_alive()


# ---- What once made the generator fail -----------------------------------------------------------

EDGES = [
    {"xtc_probability": 1, "xtc_threshold": 1e-320},
    {"xtc_probability": 1, "xtc_threshold": 0},
    {"temperature": 2**64, "samplers": ["temperature", "xtc"], "xtc_probability": 0.5},
    {"temperature": 1e30, "top_k": 5, "samplers": ["temperature", "top_k", "temperature"]},
    {"repeat_penalty": 10**29, "prompt": "abababab"},
    {"dry_multiplier": 10**29, "dry_base": 10**29, "prompt": "abababab"},
    {"presence_penalty": 100, "frequency_penalty": -100, "adaptive_target": 1, "min_p": 1},
    {"banned_strings": ["\ud800", "a"]},
]


@pytest.mark.parametrize("body", EDGES, ids=str)
def test_settings_at_the_edge_do_not_make_the_generator_fail(server, body):
    server.ok("/completion", {"prompt": "a", "n_predict": 4, "ignore_eos": True} | body)
    assert "the generator failed" not in server.log()


def test_a_budget_message_of_half_a_character_is_said_as_far_as_it_can_be(server):
    message = {"reasoning_budget": 0, "reasoning_budget_message": "so\ud800"}
    reply = server.chat(**THINKS, max_tokens=20, **message)
    assert reply.reasoning == "so?" and reply.content


@pytest.mark.parametrize("field", ["temperature", "repeat_penalty", "dry_base", "dry_multiplier"])
def test_a_setting_beyond_what_the_engine_can_hold_is_a_400(server, field):
    server.refused("/completion", {"prompt": "a", field: 1e31}, field)
    server.refused("/completion", {"prompt": "a", field: 10**400}, field)

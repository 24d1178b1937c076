"""Everything at once for ten minutes: `python tests/soak.py --fake` (or --real, --seconds N).

64 clients mix all routes, sizes and ways to leave, and make the engine fail (serve_faulty.py). An
answer is checked: the fake's follows from the prompt, and the real engine, at temperature 0, must
say what it said when it was asked alone. A request that was sent whole and not cancelled must get
exactly one answer, the right one, or the error that was planted. At the end no slot is held, nobody
waits, /metrics counts every restart of the engine and nothing that is left over, the audit log has
every request once, and neither memory nor descriptors have grown. Any violation is printed, and the
exit code is 1.

test_soak.py runs ten seconds of it.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import select
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from server_process import Reader, Server, chat_replies, eventually, http_request, reset, sse_data

CHAT, COMPLETION, TEXT = "/v1/chat/completions", "/completion", "/v1/completions"
INFILL = "/infill"  # answers as COMPLETION does
PATIENCE_S = 60.0  # an answer that takes longer is lost
RECOVERIES, WINDOW_S = 3, 62.0  # the engine gives up when it is restarted more often than that
MAX_GROWTH = 48 * 2**20  # bytes, from a tenth of the time to the end
MAX_GAP_S = 10.0


class Refused(Exception):
    """An answer that is an error, or ends in one."""

    def __init__(self, error):
        super().__init__(error["message"])
        self.code, self.message = error["code"], error["message"]


# ---- What an answer says -------------------------------------------------------------------------


def stream_choices(path, raw):
    """[(text, why it ended)] of a stream; Refused when it ends in an error."""
    events = sse_data(raw)
    if events and '"error":{' in events[-1]:
        raise Refused(json.loads(events[-1])["error"])
    if path == CHAT:
        return [(r.reasoning + "|" + r.content, r.finish) for r in chat_replies(events)]
    assert path != TEXT or events[-1] == "[DONE]", "no end mark"
    texts, ends = collections.defaultdict(str), {}
    for event in (json.loads(data) for data in events if data != "[DONE]"):
        for row in event.get("choices", [event]):
            assert row["index"] not in ends, f"after the end: {row}"
            texts[row["index"]] += row.get("text", row.get("content", ""))
            if end := row.get("finish_reason") or row.get("stop_type"):
                ends[row["index"]] = end
    assert texts.keys() == ends.keys(), "a choice has no end"
    return [(texts[i], ends[i]) for i in sorted(texts)]


def whole_choices(path, answer):
    """The same of an answer that was not streamed."""
    if path in (COMPLETION, INFILL):
        rows = answer if isinstance(answer, list) else [answer]
        return [(row["content"], row["stop_type"]) for row in rows]
    if path == TEXT:
        return [(row["text"], row["finish_reason"]) for row in answer["choices"]]
    messages = [(row["message"], row["finish_reason"]) for row in answer["choices"]]
    return [((m.get("reasoning_content") or "") + "|" + m["content"], f) for m, f in messages]


def choices_of(path, status, headers, raw):
    if status != 200:
        raise Refused(json.loads(raw)["error"])
    if headers["content-type"].startswith("text/event-stream"):
        return stream_choices(path, raw)
    return whole_choices(path, json.loads(raw))


# ---- Requests and what they must say -------------------------------------------------------------

PAGE = b"<p>a page of a web UI" * 20_000  # more than fits in one write
WORDS = "rain ferry harbour gulls lamp picture island book é 🦜 <|im_end|> \u2028".split(" ")


class FakeOracle:
    """The fake engine's answers, worked out here from the prompt."""

    args = ("--fake", "--fake-delay", "0.002", "--parallel", "8")
    paths = (CHAT, CHAT, COMPLETION, TEXT)

    def prepare(self, server):
        WRONG.append(("POST", INFILL, {"input_prefix": "a", "input_suffix": "b"}, NOT_SUPPORTED))

    def request(self, rng):
        path, body, prompts = random_request(rng, self.paths, [rng.randrange(3000)] * 2)
        answers = [self.answer(path, p.encode(), body) for p in prompts]
        return path, body, [a for a in answers for _ in range(body.get("n", 1))]

    def answer(self, path, ids, body):
        text = "This is the fake engine of exl3-serve: no model is loaded. Your prompt has "
        text += f"{len(ids)} tokens and the sum of their ids is {sum(ids)}."
        pieces = re.findall(r"^\S+|\s\S+", text)
        if body.get("ignore_eos"):
            pieces *= 100
        limit = body["max_tokens"]
        text, end = "".join(pieces[:limit]), "length" if limit <= len(pieces) else "stop"
        for stop in body.get("stop", []):
            if stop in text:
                text, end = text[: text.index(stop)], "word"
        if path == COMPLETION:
            return text, {"length": "limit", "stop": "eos"}.get(end, end)
        return ("|" if path == CHAT else "") + text, "stop" if end == "word" else end


class RealOracle:
    """What the real engine said when it was asked alone."""

    args = ("-m", str(tiny_model.cached("fp16")), "-cs", "8192", "-chunk_size", "256", "-np", "4")
    paths = (CHAT, CHAT, COMPLETION, TEXT, INFILL)

    def prepare(self, server):
        rng, self.known = random.Random(0), []
        for _ in range(60):
            path, body, _ = random_request(rng, self.paths, [20, 700])
            body |= {"temperature": 0, "max_tokens": min(body["max_tokens"], 40)}
            body.pop("ignore_eos", None)
            self.known.append((path, body, whole_choices(path, server.ok(path, body))))

    def request(self, rng):
        path, body, expected = rng.choice(self.known)
        return path, dict(body), expected


def random_request(rng, paths, sizes):
    """(path, body, the prompts as the engine sees them, which nobody asks for of INFILL)"""
    path = rng.choice(paths)
    size = rng.choice([5, rng.randrange(*sizes)] if sizes[0] < sizes[1] else [5, sizes[0]])
    texts = [" ".join(rng.choices(WORDS, k=1 + size // 6))[: size + 1] for _ in range(2)]
    body = {"max_tokens": rng.choice([1, 7, 20, 30, 40])}
    if rng.random() < 0.2:
        body["stop"] = [rng.choice(["sum of", " tokens", "fake engine", "a"]), "never said"]
    if rng.random() < 0.05:
        body |= {"ignore_eos": True, "max_tokens": 200}
    if rng.random() < 0.15:
        body["n"] = rng.randrange(2, 5)
    if rng.random() < 0.1:
        body["grammar"] = f"root ::= [a-z ]{{1,{rng.randrange(3, 9)}}}"
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": texts[0]}]
        prompts = [f"<|im_start|>user\n{texts[0]}<|im_end|>\n<|im_start|>assistant\n"]
        if rng.random() < 0.1:  # each step then asks whether a thought is to be ended
            body |= {"reasoning_budget_tokens": rng.randrange(9), "reasoning_control": True}
    elif path == INFILL:
        prompts = []
        body |= {"input_prefix": texts[0], "input_suffix": texts[1], "prompt": texts[1][:9]}
        body["input_extra"] = [{"filename": "f", "text": texts[1]}] * rng.choice([0, 2])
    else:
        prompts = texts[: rng.choice([1, 1, 2])]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    return path, body, prompts


NOT_FOUND, NOT_ALLOWED, BAD, NOT_SUPPORTED = 404, 405, 400, 501
WRONG = [
    ("GET", "/nowhere", None, NOT_FOUND),
    ("POST", "/v1/embeddings", {"input": "x"}, NOT_SUPPORTED),
    ("POST", "/v1/rerank", {"query": "x", "documents": ["a" * 20_000]}, NOT_SUPPORTED),
    ("POST", "/slots/0?action=save", {"filename": "x"}, NOT_SUPPORTED),
    ("POST", "/v1/audio/transcriptions", b"x", NOT_SUPPORTED),
    ("GET", "/..%2fsoak.py", None, NOT_FOUND),
    ("POST", "/metrics", {}, NOT_ALLOWED),
    ("POST", "/lora-adapters", [{"id": 0, "scale": 1}], BAD),
    ("POST", "/v1/chat/completions/control", {"id": "x", "action": "stop"}, BAD),
    ("GET", CHAT, None, NOT_ALLOWED),
    ("DELETE", "/props", None, NOT_ALLOWED),
    ("POST", CHAT, b"{", BAD),
    ("POST", CHAT, {}, BAD),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 0}, BAD),
    ("POST", COMPLETION, {"prompt": [-1]}, BAD),
    ("POST", COMPLETION, {"prompt": "x", "grammar": 'root ::= "'}, BAD),
    ("POST", COMPLETION, {"prompt": "a" * 40_000, "stream": True}, BAD),  # beyond the context
    ("POST", "/tokenize", {"content": 5}, BAD),
]


# ---- Clients -------------------------------------------------------------------------------------


class Client(threading.Thread):
    """Asks one thing after another until the time is over."""

    def __init__(self, soak, number):
        super().__init__(daemon=True)
        self.soak, self.rng = soak, random.Random(number)
        self.sock = None  # a connection kept from the last request

    def run(self):
        kinds = {self.ask: 50, self.leave: 25, self.look: 12, self.err: 10, self.break_engine: 3}
        while time.monotonic() < self.soak.give_up:
            kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
            try:
                kind()
            except Exception as exc:
                self.soak.violation(f"{kind.__name__}: {type(exc).__name__}: {str(exc)[:500]}")
                self.sock = None
        if self.sock is not None:
            self.sock.close()

    def connection(self, receive_buffer=None):
        """Often the last one, on which nothing may have come that nobody asked for."""
        sock, self.sock = self.sock, None
        if sock is not None and receive_buffer is None and self.rng.random() < 0.7:
            assert not select.select([sock], [], [], 0)[0], "bytes that nobody asked for"
            return sock
        if sock is not None:
            sock.close()
        sock = self.soak.server.connect(receive_buffer)
        sock.settimeout(PATIENCE_S)
        return sock

    def exchange(self, method, path, body, n_choices=1):
        """One request and its only answer, sent and read at one of several speeds."""
        stalls = self.rng.random() < 0.03
        sock = self.connection(4096 if stalls else None)
        last = self.rng.random() < 0.3
        data = http_request(path, body, method, {"Connection": "close"} if last else {})
        if self.rng.random() < 0.05:  # a slow sender
            for start in range(0, len(data), len(data) // 5 + 1):
                sock.sendall(data[start : start + len(data) // 5 + 1])
                time.sleep(0.05)
        else:
            sock.sendall(data)
        reader = Reader(sock)
        status, headers = reader.head()
        if stalls:
            time.sleep(self.rng.random() * 1.5)
        if "transfer-encoding" in headers:
            # Whose first event comes while it waits for a slot, as progress does, or who has
            # choices that wait while others have ended, is silent for a good reason
            raw = self.chunks(reader, n_choices == 1 and not body.get("return_progress"))
        else:
            raw = reader.body(headers)
        self.soak.count(f"answers {status}")
        if last:
            assert reader.rest() == b"", "more than one answer"
            sock.close()
        else:
            assert reader.buffer == b"", "more than one answer"
            self.sock = sock
        return status, headers, raw

    def chunks(self, reader, note):
        """A chunked body; notes how long it was silent in between."""
        raw, before, worst = b"", 0.0, 0.0
        while piece := reader.chunk():
            raw += piece
            now = time.monotonic()
            worst, before = max(worst, now - (before or now)), now
        if note:
            self.soak.gaps.append(worst)
        return raw

    def generation(self):
        path, body, expected = self.soak.oracle.request(self.rng)
        body["stream"] = self.rng.random() < 0.7
        if path == CHAT and body["stream"] and self.rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
        names = ["timings_per_token", "cache_prompt"]
        if path != CHAT:  # there progress repeats the role, which chat_replies takes for a fault
            names.append("return_progress")
        body |= {name: True for name in names if self.rng.random() < 0.2}
        return path, body, expected

    def ask(self):
        path, body, expected = self.generation()
        self.soak.count("requests")
        try:
            said = choices_of(path, *self.exchange("POST", path, body, len(expected)))
        except Refused as error:
            assert "planted" in error.message and self.soak.n_faults, f"{error} for {body}"
            self.soak.count("errors told, planted in another request")
            return
        assert said == expected, f"{path} {body}: {said} instead of {expected}"
        self.soak.count("right answers")

    def leave(self):
        """Leaves somewhere: within the request, before the answer, in its head, in its body."""
        path, body, expected = self.generation()
        data = http_request(path, body)
        how = self.rng.choice(["FIN", "RST", "half-close"])
        sock = self.connection()
        self.soak.count(f"cancelled by {how}")
        if self.rng.random() < 0.3:
            sock.sendall(data[: self.rng.randrange(len(data))])
        else:
            sock.sendall(data)
            if self.rng.random() < 0.7 and body["stream"]:
                self.read_a_part(path, sock, expected)
            elif self.rng.random() < 0.5:
                time.sleep(self.rng.random() * 0.1)
        if how == "RST":
            reset(sock)
            return
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
            try:
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
        sock.close()

    def read_a_part(self, path, sock, expected):
        """What came of a stream so far is how the right answer begins."""
        reader = Reader(sock)
        status, headers = reader.head()
        if status != 200 or "transfer-encoding" not in headers:
            return
        raw = b""
        for _ in range(self.rng.randrange(12)):
            if not (piece := reader.chunk()):
                break
            raw += piece
        texts = collections.defaultdict(str)
        for event in (json.loads(data) for data in sse_data(raw) if data != "[DONE]"):
            if "error" in event:
                assert "planted" in event["error"]["message"], event
                return
            for row in event.get("choices", [event]):
                text = row.get("text", row.get("content", "")) or row.get("delta", {}).get(
                    "content"
                )
                texts[row["index"]] += text or ""
        for index, text in texts.items():
            whole = expected[index][0].removeprefix("|")
            assert text in whole and whole.startswith(text[:1]), f"{text!r} of {whole!r}"

    def got(self, path, body=None):
        """The body of an answer that must be a good one."""
        status, _, raw = self.exchange("GET" if body is None else "POST", path, body)
        assert status == 200, (path, status, raw[:200])
        return raw

    def look(self):
        """The routes that do not generate."""
        looks = [self.look_at_state, self.look_at_state, self.look_at_chat, self.look_at_tokens]
        looks += [self.look_at_metrics, self.look_at_loras, self.look_at_file, self.look_at_control]
        self.soak.count("other routes")
        self.rng.choice(looks)()

    def look_at_state(self):
        path = self.rng.choice(["/health", "/v1/models", "/props", "/slots"])
        said = json.loads(self.got(path))
        assert path != "/slots" or len(said) == self.soak.n_slots

    def look_at_chat(self):
        text = " ".join(self.rng.choices(WORDS, k=self.rng.choice([3, 300])))
        body = {"messages": [{"role": "user", "content": text}]}
        prompt = json.loads(self.got("/apply-template", body))["prompt"]
        assert text in prompt
        n = json.loads(self.got(f"{CHAT}/input_tokens", body))["input_tokens"]
        assert n == len(json.loads(self.got("/tokenize", {"content": prompt}))["tokens"])

    def look_at_tokens(self):
        text = " ".join(self.rng.choices(WORDS, k=self.rng.choice([3, 3000])))
        tokens = json.loads(self.got("/tokenize", {"content": text}))
        assert json.loads(self.got("/detokenize", tokens))["content"] == text

    def look_at_metrics(self):
        """Counters never fall, and no more is processed than there are slots."""
        before, now = self.soak.totals, self.soak.metrics(self.got("/metrics"))
        assert now["llamacpp:requests_processing"] <= self.soak.n_slots
        for name, value in before.items():
            assert now[name] >= value or not name.endswith("_total"), (name, value, now[name])
        self.soak.totals = now

    def look_at_loras(self):
        assert json.loads(self.got("/lora-adapters")) == []
        assert json.loads(self.got("/lora-adapters", [])) == {"success": True}

    def look_at_file(self):
        assert self.got(self.rng.choice(["/", "/index.html"])) == PAGE

    def look_at_control(self):
        body = {"id": "chatcmpl-x", "action": "reasoning_end"}
        assert json.loads(self.got(f"{CHAT}/control", body))["success"] is False

    def err(self):
        method, path, body, status = self.rng.choice(WRONG)
        self.soak.count("wrong requests")
        got, _, raw = self.exchange(method, path, body)
        error = json.loads(raw)["error"]
        assert got == error["code"] == status, (path, got, raw)
        assert (error["type"] == "not_supported_error") == (status == NOT_SUPPORTED), raw

    def break_engine(self):
        word = self.rng.choice(["ON-SUBMIT", "ALONE", "IN-PREFILL", "IN-DECODE"])
        restarts = word.startswith("IN")
        if restarts and not self.soak.may_restart():
            return
        message = {"role": "user", "content": f"FAIL-{word} "}
        body = {"messages": [message], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        body["stream"] = self.rng.random() < 0.5
        self.soak.n_faults += 1
        try:
            choices_of(CHAT, *self.exchange("POST", CHAT, body))
            raise AssertionError(f"{word}: no error")
        except Refused as error:
            assert "planted" in error.message, error
            self.soak.count(f"engine faults {word}")
        finally:
            if restarts:
                self.soak.restarted()


# ---- The whole -----------------------------------------------------------------------------------


class Soak:
    def __init__(self, oracle, seconds, n_clients):
        self.oracle, self.seconds, self.n_clients = oracle, seconds, n_clients
        self.counts, self.lock = collections.Counter(), threading.Lock()
        self.violations, self.gaps = [], []
        self.n_faults, self.n_restarts = 0, 0
        self.totals = {}  # of /metrics, as last seen
        self.restarts, self.restarting = collections.deque(), False

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def violation(self, text):
        with self.lock:
            self.violations.append(text)

    def may_restart(self):
        """One at a time, and no more than the engine would survive."""
        with self.lock:
            while self.restarts and self.restarts[0] < time.monotonic() - WINDOW_S:
                self.restarts.popleft()
            if self.restarting or len(self.restarts) >= RECOVERIES:
                return False
            self.restarting = True
            return True

    def restarted(self):
        with self.lock:
            self.restarting = False
            self.n_restarts += 1
            self.restarts.append(time.monotonic())

    def used(self):
        """(resident bytes, descriptors, threads) of the server"""
        process = Path(f"/proc/{self.server.process.pid}")
        status = (process / "status").read_text()
        n_threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
        resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
        return resident, len(list((process / "fd").iterdir())), n_threads

    def metrics(self, raw):
        """{name: value} of what /metrics says."""
        lines = [line for line in raw.decode().splitlines() if not line.startswith("# TYPE ")]
        return {name: float(value) for name, value in (line.split(" ") for line in lines)}

    def run(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "index.html").write_bytes(PAGE)
            self.audit = Path(folder, ".audit")
            args = [*self.oracle.args, "--port", "0", "--metrics", "--path", folder]
            args += ["--audit-log", str(self.audit)]
            self.server = Server(args, "serve_faulty.py")
            try:
                self.server.wait_ready()
                return self.ask_and_judge()
            finally:
                if self.server.process.poll() is None:
                    self.server.process.kill()

    def ask_and_judge(self):
        self.n_slots = len(self.server.slots())
        self.oracle.prepare(self.server)
        before = self.used()
        began = time.monotonic()
        self.give_up = began + self.seconds
        clients = [Client(self, number) for number in range(self.n_clients)]
        for client in clients:
            client.start()
        time.sleep(self.seconds / 10)
        early = self.used()
        for client in clients:
            client.join(max(0.0, self.give_up - time.monotonic()) + 2 * PATIENCE_S)
            if client.is_alive():
                self.violation("a client hangs")
        late = self.used()
        took_s = time.monotonic() - began
        self.check_end(before, early)
        self.report(took_s, before, early, late)
        return 1 if self.violations else 0

    def check_end(self, before, early):
        """Everything is given back."""
        try:
            self.server.wait_idle()
            figures = self.metrics(self.server.request("GET", "/metrics")[2])
            for name in ("requests_processing", "requests_deferred"):
                assert figures[f"llamacpp:{name}"] == 0, name
            assert figures["exl3_serve:recoveries_total"] == self.n_restarts
            self.server.assert_alive()  # it does not wait behind anybody, so the queue is empty
            eventually(lambda: self.used()[1] <= before[1] + 1, "the descriptors are closed")
            if self.used()[0] > early[0] + MAX_GROWTH:
                self.violation("memory has grown")
            if max(self.gaps, default=0) > MAX_GAP_S:
                self.violation("a stream was silent for too long")
            ends = re.findall(r"^Traceback.*\n(?:[ \t].*\n|\n)*(.*)", self.server.log(), re.M)
            for line in ends:
                if "planted" not in line:
                    self.violation(f"in the log: {line}")
            self.server.n_checked = len(self.server.log())
            if self.server.stop() != 0:
                self.violation("the exit code is not 0")
            rows = [json.loads(line) for line in self.audit.read_text().splitlines()]
            assert len({row["id"] for row in rows}) == len(rows), "a request was audited twice"
            written = collections.Counter(f"answers {row['status']}" for row in rows)
            for what, n in self.counts.items():  # answers to those who left are written only
                assert not what.startswith("answers ") or written[what] >= n, f"lost: {what}"
        except AssertionError as exc:
            self.violation(f"at the end: {exc}")

    def report(self, took_s, before, early, late):
        mib = 2**20
        print(f"{took_s:.0f} s, {self.n_clients} clients, {self.n_slots} slots")
        for what, n in sorted(self.counts.items()):
            print(f"{n:8d} {what}")
        gaps = sorted(self.gaps) or [0.0]
        print(f"{len(self.violations):8d} lost, doubled or wrong answers, or other violations")
        print(
            f"resident MiB: {before[0] / mib:.1f} at start, {early[0] / mib:.1f} at a tenth,"
            f" {late[0] / mib:.1f} at the end; descriptors {before[1]}, {early[1]}, {late[1]};"
            f" threads {before[2]}, {early[2]}, {late[2]}"
        )
        print(
            f"longest silence within a stream: median {gaps[len(gaps) // 2] * 1e3:.0f} ms,"
            f" p99 {gaps[len(gaps) * 99 // 100] * 1e3:.0f} ms, worst {gaps[-1] * 1e3:.0f} ms"
        )
        for text in self.violations[:20]:
            print("VIOLATION", text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--fake", action="store_true", help="the fake engine (default)")
    engine.add_argument("--real", action="store_true", help="exllamav3 on the CPU")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args(argv)
    return Soak(RealOracle() if args.real else FakeOracle(), args.seconds, args.clients).run()


if __name__ == "__main__":
    sys.exit(main())

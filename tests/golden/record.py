"""Records a real llama-server's answers to the requests of `requests.py`.

    cd tests && LLAMA_SERVER=path/to/llama-server GGUF=tiny.gguf python -m golden.record [--margins]

GGUF holds the weights, tokenizer and chat template of `tests/tiny_model.py fp16`. The server is
started twice with `FLAGS` on a free loopback port and asked everything, one request at a time. The
two rounds must agree as `compare.py` demands it of ours; then the answers of the first one are
written to `llama-server-<build>/`, one file per group of requests, with `meta.json`. LLAMA_BUILD
names the build when the program does not know its own (a build from a source archive says b0).
`--margins` records nothing: it prints how far the best token of each greedy answer is from the
second one, worst first. Below about 0.05 two engines may round to different texts.

Nothing is normalised in a recording but the path of the GGUF. Settings of completions are stored
as what differs from `meta.json`'s, for length; `load` fills them in.

`send` and `replay` are also what the test uses against our server.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from golden.compare import compare
from golden.requests import BY_ID, N_CTX, REQUESTS, Request

BUILD = os.environ.get("LLAMA_BUILD", "b11434")
RECORDINGS = Path(__file__).resolve().parent / f"llama-server-{BUILD}"
MODEL_PATH = "/models/tiny.gguf"  # written in place of the real one

SLOTS = 2
FLAGS = (
    *("--alias", "tiny"),
    # The context is divided among the slots: each request may use N_CTX tokens, as with us.
    *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * N_CTX)),
    # One thread, plain attention and no second prompt cache: the same sums in the same order.
    *("--threads", "1", "--threads-batch", "1", "--flash-attn", "off", "--cache-ram", "0"),
    # Small batches: /infill takes its budgets from them, and a longer prompt shows its progress.
    *("--batch-size", "256", "--ubatch-size", "256"),
    *("--slots", "--metrics", "--jinja", "--no-ui", "--offline"),
)

TIMEOUT_S = 120.0  # for one answer; a full context takes a few seconds


# --- one request ---------------------------------------------------------------------------------


def refuse_constant(name):
    """Rejects NaN and Infinity, which Python would read but no other JSON parser does."""
    raise ValueError(f"{name} is not JSON")


def parse_json(text):
    """Strict json.loads."""
    return json.loads(text, parse_constant=refuse_constant)


def parse_events(raw: bytes) -> list[dict]:
    """Returns the SSE events of a body: `{"event": name or absent, "data": JSON or "[DONE]"}`.

    Comments (pings) are dropped. Anything else that is not an event raises ValueError.
    """
    events = []
    frames = raw.split(b"\n\n")
    if frames.pop() != b"":
        raise ValueError(f"the stream ends inside an event: {raw[-80:]!r}")
    for frame in frames:
        event = {}
        for line in frame.split(b"\n"):
            name, colon, value = line.decode().partition(":")
            if name == "" and colon:
                continue
            if name not in ("event", "data") or name in event:
                raise ValueError(f"unexpected line in the stream: {line!r}")
            event[name] = value.removeprefix(" ")
        if event and event.get("data") != "[DONE]":
            event["data"] = parse_json(event["data"])
        if event:
            events.append(event)
    return events


def open_request(port, request: Request):
    """Sends a request to 127.0.0.1:port. Returns its connection and its response, not yet read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    payload = request.payload()
    headers = {} if payload is None else {"Content-Type": "application/json"}
    headers |= dict(request.headers)
    headers = {name: value for name, value in headers.items() if value}
    connection.request(request.method, request.path, payload, {"Connection": "close", **headers})
    return connection, connection.getresponse()


def send(port, request: Request) -> dict:
    """Returns the answer: `status`, `content_type`, and one of `body` (JSON), `events`, `text`."""
    connection, response = open_request(port, request)
    with closing(connection):
        raw = response.read()
    content_type = response.getheader("Content-Type") or ""
    answer = {"status": response.status, "content_type": content_type}
    if content_type.startswith("text/event-stream"):
        return answer | {"events": parse_events(raw)}
    if content_type.startswith("application/json") and raw:
        return answer | {"body": parse_json(raw)}
    return answer | {"text": raw.decode()}


@contextmanager
def running(port, body):
    """A stream on POST /completion that has begun, and that is hung up on in the end."""
    connection, response = open_request(port, Request("", "POST", "/completion", body))
    with closing(connection):
        assert response.status == 200 and response.readline().startswith(b"data:")
        yield


def wait_until_idle(port):
    """Returns when no slot is busy any more."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(slot["is_processing"] for slot in send(port, BY_ID["slots/after-use"])["body"]):
        assert time.monotonic() < deadline, "a slot stays busy"
        time.sleep(0.02)


def replay(port, request: Request) -> dict:
    """Sends a request in the circumstances it asks for and returns its answer."""
    for id in request.after:
        send(port, BY_ID[id])
    if not request.during:
        return send(port, request)
    with ExitStack() as streams:
        for body in request.during:
            streams.enter_context(running(port, body))
        answer = send(port, request)
    wait_until_idle(port)
    return answer


# --- files ---------------------------------------------------------------------------------------


def settings_holders(answer: dict):
    """Yields every object of an answer that has generation_settings."""
    stack = [answer.get("body"), *[event["data"] for event in answer.get("events", [])]]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, dict):
            if "generation_settings" in value:
                yield value
            stack.extend(value[key] for key in ("__verbose", "choices") if key in value)


def line(value) -> str:
    """JSON on one line, readable; invisible line ends stay escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def dump(answers: dict[str, dict]) -> str:
    """The text of one file of recordings: an event, or a field of a body, per line."""
    blocks = []
    for id, answer in answers.items():
        head = line({"status": answer["status"], "content_type": answer["content_type"]})
        if "events" in answer:
            rest = '"events":[\n' + ",\n".join(line(event) for event in answer["events"]) + "\n]"
        elif isinstance(answer.get("body"), dict):
            fields = (f"{line(key)}:{line(value)}" for key, value in answer["body"].items())
            rest = '"body":{\n' + ",\n".join(fields) + "\n}"
        else:
            key = "body" if "body" in answer else "text"
            rest = f"{line(key)}:{line(answer[key])}"
        blocks.append(f"{line(id)}:{head[:-1]},{rest}}}")
    return "{\n" + ",\n\n".join(blocks) + "\n}\n"


def shorten(answer: dict, defaults: dict) -> dict:
    """Returns a copy of an answer with settings reduced to `{"changed": what defaults lack}`."""
    answer = json.loads(json.dumps(answer))
    for holder in settings_holders(answer):
        settings = holder["generation_settings"]
        if settings.keys() == defaults.keys():
            changed = {k: v for k, v in settings.items() if v != defaults[k]}
            holder["generation_settings"] = {"changed": changed}
    return answer


def load(directory: Path = RECORDINGS) -> tuple[dict, dict[str, dict]]:
    """Returns `meta.json` and all recorded answers by id, settings complete."""
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    answers = {}
    for path in sorted(directory.glob("*.json")):
        if path.name != "meta.json":
            answers |= json.loads(path.read_text(encoding="utf-8"))
    for answer in answers.values():
        for holder in settings_holders(answer):
            changed = holder["generation_settings"].get("changed")
            if changed is not None:
                holder["generation_settings"] = meta["generation_settings"] | changed
    return meta, answers


def save(answers: dict[str, dict], meta: dict):
    """Writes RECORDINGS anew."""
    RECORDINGS.mkdir(exist_ok=True)
    for path in RECORDINGS.glob("*.json"):
        path.unlink()
    for group in dict.fromkeys(request.group for request in REQUESTS):
        members = {r.id: answers[r.id] for r in REQUESTS if r.group == group}
        members = {id: shorten(a, meta["generation_settings"]) for id, a in members.items()}
        (RECORDINGS / f"{group}.json").write_text(dump(members), encoding="utf-8")
    text = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
    (RECORDINGS / "meta.json").write_text(text, encoding="utf-8")


def model_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of the files of the tiny model that a recording depends on."""
    names = ("model.safetensors", "tokenizer.json", "chat_template.jinja")
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


# --- a server ------------------------------------------------------------------------------------


@contextmanager
def llama_server(program: str, gguf: str):
    """Yields the port of a llama-server that is ready, and stops it in the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [program, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), *FLAGS]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
    log = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not is_ready(port):
            assert process.poll() is None, f"llama-server ended at once: {command}"
            assert time.monotonic() < deadline, "llama-server does not get ready"
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def is_ready(port) -> bool:
    """True when /health says 200."""
    try:
        return send(port, BY_ID["server/health"])["status"] == 200
    except OSError:
        return False


def replay_all(program: str, gguf: str) -> dict[str, dict]:
    """Returns a fresh llama-server's answers to all requests, in order."""
    with llama_server(program, gguf) as port:
        answers = {request.id: replay(port, request) for request in REQUESTS}
    text = json.dumps(answers).replace(json.dumps(gguf), json.dumps(MODEL_PATH))
    return json.loads(text)


# --- margins -------------------------------------------------------------------------------------


def margin(port, request: Request) -> float | None:
    """Least log-probability gap between the best and the second token; None if not measurable."""
    body = request.body
    if "free" in request.tags or not isinstance(body, dict) or request.method != "POST":
        return None
    if {"logit_bias", "grammar", "json_schema", "tools", "response_format"} & body.keys():
        return None
    body = {**body, "stream": False, "n_probs": 2, "post_sampling_probs": False, "stop": None}
    for field in ("response_fields", "logprobs", "top_logprobs", "stream_options"):
        body.pop(field, None)
    if "chat" in request.path:
        body |= {"logprobs": True, "top_logprobs": 2}
        body.pop("n_probs")
    answer = send(port, Request("", "POST", request.path, body)).get("body")
    gaps = [
        entry["top_logprobs"][0]["logprob"] - entry["top_logprobs"][1]["logprob"]
        for part in (answer if isinstance(answer, list) else [answer or {}])
        for entry in probabilities(part)
        if len(entry.get("top_logprobs", ())) > 1
    ]
    return min(gaps, default=None)


def probabilities(body: dict) -> list[dict]:
    """The per-token entries of a completion or of the choices of a chat."""
    entries = list(body.get("completion_probabilities", []))
    for choice in body.get("choices", []):
        entries += (choice.get("logprobs") or {}).get("content", [])
    return entries


def print_margins(program: str, gguf: str):
    """Prints the margin of every greedy request."""
    with llama_server(program, gguf) as port:
        margins = {request.id: margin(port, request) for request in REQUESTS}
    for value, id in sorted((value, id) for id, value in margins.items() if value is not None):
        print(f"{value:8.3f}  {id}")


def main():
    """Records, or prints margins."""
    program, gguf = os.environ["LLAMA_SERVER"], os.environ["GGUF"]
    if sys.argv[1:] == ["--margins"]:
        return print_margins(program, gguf)
    from tiny_model import cached  # only here: it needs numpy, the test's side does not

    answers, again = (replay_all(program, gguf) for _ in range(2))
    differences = [
        f"{request.id} {line}"
        for request in REQUESTS
        for line in compare(request, answers[request.id], again[request.id])
    ]
    if differences:
        sys.exit("two recordings differ:\n" + "\n".join(differences))
    first = answers["completion/greedy"]["body"]
    meta = {
        "build": BUILD,
        "build_info": answers["server/props"]["body"]["build_info"],
        "flags": FLAGS,
        "requests": len(answers),
        "model_sha256": model_hashes(cached("fp16")),
        "generation_settings": first["generation_settings"],
    }
    save(answers, meta)
    print(f"{len(answers)} answers in {RECORDINGS}")


if __name__ == "__main__":
    main()

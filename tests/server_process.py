"""A server of this project as a process of its own, and what tests ask it over HTTP.

`Server` starts `exl3_serve.py` (or `serve_cpu.py`, or `serve_faulty.py`), waits until it is ready,
and asks. `conftest.py` hands servers out and stops them. Every streamed chat answer that passes
through here is checked against what holds for all of them (`check_chat_chunks`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PATIENCE_S = 20.0  # how long a test polls before it fails
HI = [{"role": "user", "content": "Say hi."}]

# The generation prompt opens a thought unless the request turns thinking off.
THINK_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def eventually(condition: Callable[[], Any], what: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Polls until the condition is true and returns its value."""
    give_up = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not in {patience_s} s: {what or condition}"
        time.sleep(0.02)
    return value


# ---- Bytes ---------------------------------------------------------------------------------------


def http_request(
    path: str, body: Any = None, method: str = "", headers: dict[str, str] | None = None
) -> bytes:
    """A whole HTTP/1.1 request; a body that is no bytes becomes JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost"}
    if data:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (fields | (headers or {})).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


class Reader:
    """Reads answers from a socket byte-exactly, so that the connection can go on."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self.more()
        data, _, self.buffer = self.buffer.partition(mark)
        return data

    def exactly(self, n: int) -> bytes:
        while len(self.buffer) < n:
            self.more()
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def more(self) -> None:
        data = self.sock.recv(65536)
        assert data, f"closed within an answer, after {self.buffer!r}"
        self.buffer += data

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (names in lower case, none of them twice)."""
        first, *lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        fields = [line.split(": ", 1) for line in lines]
        assert len({name.lower() for name, _ in fields}) == len(fields), f"twice: {fields}"
        return int(first.split(" ")[1]), {name.lower(): value for name, value in fields}

    def chunk(self) -> bytes:
        """One chunk of a chunked body; empty is the end."""
        data = self.exactly(int(self.until(b"\r\n"), 16))
        assert self.exactly(2) == b"\r\n"
        return data

    def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.exactly(int(headers.get("content-length", 0)))
        data = b""
        while piece := self.chunk():
            data += piece
        return data

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = self.head()
        return status, headers, self.body(headers)

    def rest(self) -> bytes:
        """All that comes until the server closes; fails on a reset."""
        data, self.buffer = self.buffer, b""
        while piece := self.sock.recv(65536):
            data += piece
        return data


def reset(sock: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def sse_data(raw: bytes) -> list[str]:
    """The data of each event, by a decoder as small as the HTML standard allows for what we send:
    every line is UTF-8 by itself, comments and nothing else stand between events."""
    events, lines = [], []
    assert raw.endswith(b"\n\n") or not raw, f"an event is cut: {raw[-200:]!r}"
    for line in raw.split(b"\n"):
        if line.startswith(b"data: "):
            lines.append(line[6:].decode("utf-8"))
        elif not line:
            if lines:
                events.append("\n".join(lines))
            lines = []
        else:
            assert line.startswith((b": ", b":", b"event: ")), f"not an SSE line: {line!r}"
    return events


# ---- Answers -------------------------------------------------------------------------------------


@dataclass
class Reply:
    """One choice of an answer; `events` only of a stream, `whole` only of the other kind."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    deltas: list[tuple[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    @property
    def said(self) -> tuple[str, str, str | None]:
        """What must not depend on `stream`."""
        return self.content, self.reasoning, self.finish


def check_chat_chunks(chunks: list[dict[str, Any]]) -> None:
    """What holds for every chat stream that ends well."""
    for name in ("id", "created", "model", "object"):
        assert len({json.dumps(chunk[name]) for chunk in chunks}) == 1, name
    assert chunks[0]["object"] == "chat.completion.chunk"
    ended: set[int] = set()
    opened: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, delta, finish = choice["index"], choice["delta"], choice["finish_reason"]
            assert index not in ended, f"a chunk after the finish: {chunk}"
            if delta:
                first = index not in opened
                assert ("role" in delta) == first or "prompt_progress" in chunk, chunk
                opened.add(index)
                assert None not in delta.values() and finish is None, chunk
            if finish is not None:
                assert finish in ("stop", "length", "tool_calls") and delta == {}, chunk
                ended.add(index)
    assert ended == opened


def chat_replies(events: list[str]) -> list[Reply]:
    """The choices of a chat stream, checked."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    check_chat_chunks(chunks)
    replies: dict[int, Reply] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            reply = replies.setdefault(choice["index"], Reply(events=chunks))
            reply.finish = choice["finish_reason"] or reply.finish
            for name, text in choice["delta"].items():
                if name in ("content", "reasoning_content") and text:
                    reply.deltas.append((name, text))
    for reply in replies.values():
        reply.content = "".join(text for name, text in reply.deltas if name == "content")
        reply.reasoning = "".join(t for name, t in reply.deltas if name == "reasoning_content")
        reply.usage = usage
    return [replies[index] for index in sorted(replies)]


# ---- The process ---------------------------------------------------------------------------------


class Server:
    """A running server. `args` are its own, `program` is a file of tests/ or exl3_serve.py."""

    def __init__(
        self, args: list[str], program: str = "exl3_serve.py", env: dict[str, str] | None = None
    ) -> None:
        folder = TESTS if (TESTS / program).exists() else TESTS.parent
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
        handle, name = tempfile.mkstemp(prefix="exl3-serve-test-", suffix=".log")
        self.log_path = Path(name)
        self.n_checked = 0  # characters of the log that `check_log` has seen
        self.process = subprocess.Popen(
            [sys.executable, str(folder / program), *args],
            stdout=handle,
            stderr=handle,
            env=clean | (env or {}),
        )
        os.close(handle)

    # -- life --

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def check_log(self) -> None:
        """Fails on a traceback that was not seen before."""
        text = self.log()[self.n_checked :]
        self.n_checked += len(text)
        assert "Traceback" not in text, f"the server's log:\n{text[-6000:]}"

    def expect_traceback(self, words: str) -> None:
        """The log has a traceback that a test planted; it is no fault of the server."""
        eventually(lambda: words in self.log()[self.n_checked :], f"{words!r} in the log")
        time.sleep(0.05)  # the rest of the traceback
        self.n_checked = len(self.log())

    def wait_end(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code of a process that ends by itself."""
        return self.process.wait(patience_s)

    def wait_listening(self) -> Server:
        def printed() -> Any:
            assert self.process.poll() is None, f"ended at start:\n{self.log()[-3000:]}"
            return re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log())

        self.port = int(eventually(printed, "listening", 60.0)[1])
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def wait_ready(self) -> Server:
        self.wait_listening()
        eventually(self.is_ready, "the model loaded", 60.0)
        return self

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"ended while loading:\n{self.log()[-3000:]}"
        return self.get("/health")[0] == 200

    def stop(self) -> int:
        """Ends the process by its id, politely first; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end after SIGTERM:\n{self.log()[-3000:]}") from None
        finally:
            text = self.log()
            self.log_path.unlink(missing_ok=True)
        assert "Traceback" not in text[self.n_checked :], f"the server's log:\n{text[-6000:]}"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    # -- asking --

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE_S)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body bytes. A body that is no bytes becomes JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, answer.read()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, _, answer = self.request("POST", path, body)
        return status, json.loads(answer)

    def ok(self, path: str, body: Any) -> Any:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, body: Any, names: str = "", status: int = 400) -> dict[str, Any]:
        """Asks for a refusal, with and without stream; the error, whose message has `names`."""
        streamed = (
            body | {"stream": True} if isinstance(body, dict) and "stream" not in body else {}
        )
        errors = []
        for wanted in (body, streamed) if streamed else (body,):
            code, headers, answer = self.request("POST", path, wanted)
            assert code == status, (code, answer)
            assert headers["content-type"].startswith("application/json")
            error = json.loads(answer)["error"]
            assert error["code"] == status and isinstance(error["type"], str)
            assert isinstance(error["message"], str) and names in error["message"], error
            assert "Traceback" not in error["message"]
            errors.append(error)
        assert errors[0] == errors[-1]
        return errors[0]

    def rendered(self, **members: Any) -> str:
        return self.ok("/apply-template", {"messages": HI} | members)["prompt"]

    def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of the events of an answer that streams to its end."""
        status, headers, raw = self.request("POST", path, body | {"stream": True})
        assert status == 200, raw
        assert headers["content-type"].startswith("text/event-stream")
        return sse_data(raw)

    def chats(self, **members: Any) -> list[Reply]:
        """All choices of one chat, asked for with and without stream: both say the same."""
        body = {"messages": HI} | members
        whole = self.ok("/v1/chat/completions", body | {"stream": False})
        assert [c["index"] for c in whole["choices"]] == list(range(len(whole["choices"])))
        streamed = chat_replies(self.stream("/v1/chat/completions", body))
        assert len(streamed) == len(whole["choices"])
        for reply, choice in zip(streamed, whole["choices"], strict=True):
            message = choice["message"]
            plain = (
                message["content"] or "",
                message.get("reasoning_content") or "",
                choice["finish_reason"],
            )
            assert reply.said == plain
            reply.whole = whole
        return streamed

    def chat(self, **members: Any) -> Reply:
        (reply,) = self.chats(**members)
        return reply

    def completion(self, **body: Any) -> dict[str, Any]:
        """The result of /completion, asked for with and without stream: both say the same."""
        whole = self.ok("/completion", body)
        events = [json.loads(data) for data in self.stream("/completion", body)]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert "".join(event["content"] for event in events) == whole["content"]
        for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated"):
            assert events[-1][name] == whole[name], name
        return whole

    @contextlib.contextmanager
    def open_stream(
        self, body: dict[str, Any], path: str = "/v1/chat/completions"
    ) -> Iterator[Any]:
        """A stream that is read by hand: yields (reader, status, headers)."""
        with contextlib.closing(self.connect()) as sock:
            sock.sendall(http_request(path, {"messages": HI, "stream": True} | body))
            reader = Reader(sock)
            yield reader, *reader.head()

    # -- slots --

    def slots(self) -> list[dict[str, Any]]:
        return self.get("/slots")[1]

    def n_busy(self) -> int:
        return sum(slot["is_processing"] for slot in self.slots())

    def wait_busy(self, n: int) -> None:
        eventually(lambda: self.n_busy() == n, f"{n} busy slots")

    def wait_idle(self) -> None:
        self.wait_busy(0)

    def assert_alive(self) -> None:
        """Afterwards /health is 200, a request completes, and no slot is held."""
        assert self.get("/health") == (200, {"status": "ok"})
        status, answer = self.post("/v1/chat/completions", {"messages": HI, "max_tokens": 4})
        assert status == 200, answer
        self.wait_idle()


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Runs all at once and returns their results; the first exception is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
        assert not thread.is_alive(), "a request hangs"
    if errors:
        raise errors[0]
    return results

"""What stands between the engine and the socket, measured. Not run by CI.

    python tests/bench.py                 the whole table, about ten minutes
    python tests/bench.py --quick         fewer and shorter runs, under a minute
    python tests/bench.py --only cpu,gap  the groups named: steps cpu growth ttft gap memory long
                                          fake real
    python tests/bench.py --json          the same as JSON on the last line
    EXL3_BENCH_ROOT=DIR python tests/bench.py ...    the modules of another directory
    python tests/bench.py --url http://127.0.0.1:8080 [--pid N]     any other server; its CPU
                                          figures need its process id (Linux, same machine)

A *null generator* stands where the model would: exllamav3's results, no arithmetic. One step takes
`step_s`, of which `busy_s` is a Python loop that holds the GIL, as exllamav3's own loop does, and
the rest is sleep, as waiting for a GPU is. Three servers are driven with it, each a process of its
own, pinned to one core; the client, a C program compiled on the fly, is pinned to the other:

    bare   asyncio.Protocol, one hand-over per step, frames made beforehand: the bound
    ours   exl3_serve with the null generator as its backend
    exl3   likewise behind the real `Exl3Backend.iterate`, with exllamav3's result dicts,
           tensors and tokenizer (where exllamav3 is installed; with the CPU stand-ins of the tests)

What makes figures comparable on a busy machine: repetitions alternate between the servers, a ratio
is taken within one repetition, the table shows the median and the range of all repetitions, and CPU
time is read by the server itself at step boundaries while all streams run, so that requests
starting and ending do not count. Wall-clock figures (steps/s, gaps, time to first token) still
suffer from other load; "load" in the last line tells how much there was.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.parse
from collections import deque
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("EXL3_BENCH_ROOT") or HERE.parent)  # the three modules measured
SAMPLE_STEPS = 20  # steps between two readings of the clocks
STEP_S, BUSY_S = 0.005, 0.002
SLOTS = 272
ANY_CORE = -1
CONTEXT = 1 << 20
TEXT = (
    "The quick brown fox, having read the manual, declined to jump. It asked for the dog's "
    "opinion first; the dog had none.\nSo they sat down (it was a warm evening) and counted the "
    "sheep: one, two, three - and then a fourth, which was not a sheep at all.\n\n"
)
PIECES = [TEXT[i : i + 4] for i in range(0, len(TEXT), 4)]

# ==== The null generator: runs in the servers' processes ==========================================


class NullGenerator:
    """Jobs that say PIECES over and over; a job is [key, tokens left, next piece]."""

    def __init__(self):
        self.jobs = {}
        self.step_s, self.busy_s = STEP_S, 0.0
        self.samples = []  # [jobs running, CPU seconds, tokens, perf_counter, steps]
        self.n_tokens = self.n_steps = 0

    def add(self, key, n_tokens):
        self.jobs[key] = [key, max(1, n_tokens), 0]

    def iterate(self):
        """One step: [(key, piece number, whether it was the last)]."""
        if self.n_steps % SAMPLE_STEPS == 0:
            row = [len(self.jobs), time.process_time(), self.n_tokens, time.perf_counter()]
            self.samples.append([*row, self.n_steps])
        self.n_steps += 1
        if self.busy_s:
            burn(self.busy_s)
        if self.step_s > self.busy_s:
            time.sleep(self.step_s - self.busy_s)
        results = []
        for job in self.jobs.values():
            job[1] -= 1
            results.append((job[0], job[2], job[1] == 0))
            job[2] = (job[2] + 1) % len(PIECES)
        for key, _, last in results:
            if last:
                del self.jobs[key]
        self.n_tokens += len(results)
        return results


def burn(seconds):
    """A Python loop of so much CPU time of this thread, as other load does not shorten it."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for _ in range(100):
            pass


def control(generator, out):
    """Obeys the parent, in a thread: one JSON object a line in, one out. EOF ends the process."""
    for line in sys.stdin:
        command = json.loads(line)
        if "step_s" in command:
            generator.step_s, generator.busy_s = command["step_s"], command["busy_s"]
        samples, generator.samples = generator.samples, []
        answer = {"samples": samples, "cpu_s": time.process_time(), "steps": generator.n_steps}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


def start_control(generator):
    out, sys.stdout = sys.stdout, sys.stderr  # exllamav3 prints while it loads
    threading.Thread(target=control, args=(generator, out), daemon=True).start()


# ==== The bare bound ==============================================================================


BARE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
BARE_EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":%b}}],"created":'
    b'1700000000,"id":"chatcmpl-%032d","model":"m","system_fingerprint":"exl3-serve-0.1.0",'
    b'"object":"chat.completion.chunk"}\n\n'
)


def bare_frame(text):
    event = BARE_EVENT % (json.dumps(text).encode(), 0)
    return b"%x\r\n%b\r\n" % (len(event), event)


BARE_FRAMES = [bare_frame(text) for text in PIECES]


class Bare(asyncio.Protocol):
    """Reads one request per connection, answers with frames as large as a chat chunk's."""

    def __init__(self, commands, wake):
        self.commands, self.wake, self.data = commands, wake, b""

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data):
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            self.data = b""
            self.transport.write(BARE_HEAD)
            self.commands.append((self, json.loads(body)["max_tokens"]))
            self.wake.set()


def bare_engine(generator, commands, wake, loop):
    while True:
        while commands:
            generator.add(*commands.popleft())
        if not generator.jobs:
            wake.wait()
            wake.clear()
            continue
        loop.call_soon_threadsafe(bare_deliver, generator.iterate())


def bare_deliver(results):
    for connection, piece, last in results:
        connection.transport.write(BARE_FRAMES[piece])
        if last:
            connection.transport.write(b"0\r\n\r\n")
            connection.transport.close()


def serve_bare(port):
    generator, commands, wake = NullGenerator(), deque(), threading.Event()

    async def serve():
        loop = asyncio.get_running_loop()
        args = (generator, commands, wake, loop)
        threading.Thread(target=bare_engine, args=args, daemon=True).start()
        await loop.create_server(lambda: Bare(commands, wake), "127.0.0.1", port, backlog=1024)
        start_control(generator)
        await asyncio.Event().wait()

    asyncio.run(serve())


def run_alone(seconds, counts):
    """The generator without any server: {streams: steps/s}, on this process's core."""
    rates = {}
    for n in counts:
        generator = NullGenerator()
        generator.busy_s = BUSY_S
        for key in range(n):
            generator.add(key, CONTEXT)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            generator.iterate()
            steps += 1
        rates[n] = steps / (time.perf_counter() - start)
    print(json.dumps(rates), flush=True)


# ==== Our server with the null generator ==========================================================


def null_backend(eng, generator, model_dir):
    """A Backend of engine.py over the null generator; no torch."""

    class NullBackend(eng.FakeBackend):
        def __init__(self):
            options = types.SimpleNamespace(fake_delay=0, fake_script=None, cache_size=CONTEXT)
            super().__init__(options, model_dir)
            file = Path(model_dir) / "tokenizer.json"
            self.tokenizer = None
            if importlib.util.find_spec("tokenizers") and file.is_file():
                from tokenizers import Tokenizer

                self.tokenizer = Tokenizer.from_file(str(file))
            self.ids = [[257 + i] for i in range(len(PIECES))]

        def submit(self, job):
            job.handle = time.perf_counter()
            generator.add(job, job.params.max_tokens)

        def cancel(self, job):
            generator.jobs.pop(job, None)

        def remaining(self):
            return len(generator.jobs)

        def iterate(self):
            results, now, updates = generator.iterate(), time.perf_counter(), []
            for job, piece, last in results:
                n = job.n_decoded + 1
                spoken = eng.Piece(PIECES[piece], self.ids[piece], n)
                update = eng.Update(job, n == 1, None, [spoken])
                if last:
                    update.end = eng.EndKind.LIMIT
                update.n_decoded, update.prompt_s = n, 0.001
                update.predicted_s = now - job.handle
                job.n_decoded = n
                updates.append(update)
            return updates

        def encode(self, text, special):
            if self.tokenizer is None:
                return super().encode(text, special)
            return self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    return NullBackend()


def exl3_backend(eng, generator, model_dir):
    """The real Exl3Backend with its generator replaced: its own conversion, tokenizer, grammars."""
    import torch

    ids = [torch.tensor([[257 + i]], dtype=torch.long) for i in range(len(PIECES))]
    end = {"eos_reason": "max_new_tokens", "cached_tokens": 0, "time_prefill": 0.001}

    def results(self):
        rows = []
        for handle, piece, last in generator.iterate():
            common = {"job": handle, "identifier": handle.identifier, "serial_number": 0}
            if not handle.new_tokens:
                handle.time_first_prefill = handle.time_first_token = time.time()
                rows.append(common | {"stage": "started", "eos": False})
            handle.new_tokens += 1
            row = {**common, "stage": "streaming", "eos": last, "text": PIECES[piece]}
            row["token_ids"] = ids[piece]
            if last:
                row |= end | {"prompt_tokens": 1, "time_generate": 0.1}
                row["new_tokens"] = handle.new_tokens
            rows.append(row)
        return rows

    class NullExl3Backend(eng.Exl3Backend):
        def rebuild(self):
            super().rebuild()
            self.generator.iterate = types.MethodType(results, self.generator)
            self.generator.enqueue = lambda handle: generator.add(handle, handle.max_new_tokens)
            self.generator.num_remaining_jobs = lambda: len(generator.jobs)
            self.generator.cancel = lambda handle: generator.jobs.pop(handle, None)

    parser = argparse.ArgumentParser()
    eng.add_model_args(parser)
    parser.add_argument("--parallel", type=int)
    args = parser.parse_args(["-m", model_dir, "--parallel", "4", "-cs", "8192"])
    backend = NullExl3Backend(args, 4, [], lambda done, total: None)
    import dataclasses

    backend.info = dataclasses.replace(backend.info, n_ctx=CONTEXT)
    return backend


def serve_ours(kind, port, slots, model_dir):
    sys.path[:0] = [str(ROOT), str(HERE)]
    generator, make = NullGenerator(), null_backend
    start_control(generator)
    if kind == "exl3":
        import cpu_exllamav3

        cpu_exllamav3.torch.set_num_threads(1)
        cpu_exllamav3.install()
        make = exl3_backend
    import engine as eng
    import exl3_serve

    eng.load = lambda *args: make(eng, generator, model_dir)
    options = f"--fake --host 127.0.0.1 --port {port} -np {slots} --max-tokens-cap 0"
    return exl3_serve.main([*options.split(), *template_options(model_dir)])


def template_options(model_dir):
    """A chat template where the model directory brings none: the null backend's has no files."""
    if (Path(model_dir) / "tokenizer_config.json").is_file():
        return []
    file = Path(model_dir) / "chatml.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return ["--chat-template-file", str(file)]


def real_alone(model_dir, counts, n_tokens):
    """exllamav3's own generator on the CPU, no server: {streams: steps/s}."""
    sys.path[:0] = [str(ROOT), str(HERE)]
    import cpu_exllamav3

    cpu_exllamav3.torch.set_num_threads(1)
    cpu_exllamav3.install()
    out, sys.stdout = sys.stdout, sys.stderr
    import torch
    from exllamav3 import Cache, Config, Generator, Job, Model, Tokenizer
    from exllamav3.generator.sampler import CustomSampler, SS_Argmax

    config = Config.from_directory(model_dir)
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=16384)
    model.load(device="cpu")
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer, max_batch_size=16)
    for line in sys.stdin:
        n = int(line)
        for k in range(n):
            ids = torch.tensor([[65 + k, 66, 67]], dtype=torch.long)
            sampler = CustomSampler([SS_Argmax()])
            job = Job(input_ids=ids, max_new_tokens=n_tokens, sampler=sampler, stop_conditions=[])
            generator.enqueue(job)
        times = []
        while generator.num_remaining_jobs():
            generator.iterate()
            times.append(time.perf_counter())
        middle = times[n + 5 : -5]
        print((len(middle) - 1) / (middle[-1] - middle[0]), file=out, flush=True)


# ==== The client ==================================================================================

CLIENT_C = r"""
/* client MODE HOST PORT N REQUEST OUT: stream: N connections, REQUEST on each, read to the end.
   seq: N requests one after the other on one connection, answers with a Content-Length.
   OUT per stream: i64 status, i64 events, i64 bytes, f64 sent, first text, end, per event
   (of seq: the time each answer took). Times are CLOCK_MONOTONIC seconds. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  int fd; int64_t status, n, bytes, room; double sent, first, end, *t; char last;
} Stream;
static char buf[1 << 18];

static double now(void) {
  struct timespec s; clock_gettime(CLOCK_MONOTONIC, &s); return s.tv_sec + s.tv_nsec * 1e-9;
}
static void die(const char *what) { perror(what); exit(1); }
static int dial(const char *host, int port) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, host, &a.sin_addr);
  int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a)) die("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}
static void send_all(int fd, const char *p, size_t n) {
  while (n) { ssize_t k = write(fd, p, n); if (k <= 0) die("write"); p += k; n -= k; }
}
static void note(Stream *s, double t) {
  if (s->n == s->room) s->t = realloc(s->t, (s->room = s->room * 2 + 64) * sizeof *s->t);
  s->t[s->n++] = t;
}
static int has_text(const char *p, size_t n) {  /* a content or text member that is not empty */
  static const char *keys[] = {"content\":\"", "content\": \"", "text\":\"", "text\": \""};
  for (int k = 0; k < 4; k++) {
    const char *q = p, *key = keys[k]; size_t m = strlen(key);
    while ((q = memmem(q, n - (q - p), key, m))) { q += m; if (q < p + n && *q != '"') return 1; }
  }
  return 0;
}
static void take(Stream *s, ssize_t k) {
  double t = now();
  if (!s->bytes && k > 12) s->status = atoi(buf + 9);
  if (s->first == 0 && has_text(buf, k)) s->first = t;
  s->bytes += k;
  for (ssize_t i = 0; i < k; s->last = buf[i++]) if (buf[i] == '\n' && s->last == '\n') note(s, t);
}
static void streams(const char *host, int port, Stream *all, int n, const char *req, size_t len) {
  int ep = epoll_create1(0), open = n;
  for (int i = 0; i < n; i++) all[i].fd = dial(host, port);
  for (int i = 0; i < n; i++) {
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &all[i]};
    epoll_ctl(ep, EPOLL_CTL_ADD, all[i].fd, &e);
    all[i].sent = now();
    send_all(all[i].fd, req, len);
  }
  while (open) {
    struct epoll_event ready[512];
    int k = epoll_wait(ep, ready, 512, 60000);
    if (k <= 0) { fprintf(stderr, "client: nothing for 60 s\n"); exit(1); }
    for (int i = 0; i < k; i++) {
      Stream *s = ready[i].data.ptr;
      ssize_t got = read(s->fd, buf, sizeof buf);
      if (got > 0) { take(s, got); continue; }
      s->end = now(); close(s->fd); open--;
    }
  }
}
static void seq(const char *host, int port, Stream *s, int n, const char *req, size_t len) {
  int fd = dial(host, port);
  for (int i = 0; i < n; i++) {
    double t = now(); size_t have = 0, want = 0; char *end = NULL;
    send_all(fd, req, len);
    while (!want || have < want) {
      ssize_t got = read(fd, buf + have, sizeof buf - have - 1);
      if (got <= 0) { fprintf(stderr, "client: closed\n"); exit(1); }
      buf[have += got] = 0;
      if (!want && (end = strstr(buf, "\r\n\r\n"))) {
        char *l = strcasestr(buf, "content-length:");
        if (!l) { fprintf(stderr, "client: no length\n"); exit(1); }
        want = end + 4 - buf + atoi(l + 15);
      }
    }
    s->status = atoi(buf + 9); s->bytes += have; note(s, now() - t);
  }
  close(fd);
}
int main(int argc, char **argv) {
  (void)argc;
  int port = atoi(argv[3]), n = atoi(argv[4]), one = !strcmp(argv[1], "seq");
  FILE *f = fopen(argv[5], "rb"); fseek(f, 0, SEEK_END); size_t len = ftell(f); rewind(f);
  char *req = malloc(len); if (fread(req, 1, len, f) != len) die("request"); fclose(f);
  Stream *all = calloc(n, sizeof *all);
  if (one) seq(argv[2], port, all, n, req, len); else streams(argv[2], port, all, n, req, len);
  f = fopen(argv[6], "wb");
  for (int i = 0; i < (one ? 1 : n); i++) {
    fwrite(&all[i].status, 8, 3, f); fwrite(&all[i].sent, 8, 3, f);
    fwrite(all[i].t, 8, all[i].n, f);
  }
  return fclose(f);
}
"""


def client_py(mode, host, port, n, request, out):
    """The same in Python, where there is no C compiler: it may be what is measured."""
    import selectors

    request, rows = Path(request).read_bytes(), []
    if mode == "seq":
        sock, times, status = socket.create_connection((host, int(port))), [], 0
        for _ in range(int(n)):
            start, data, want = time.perf_counter(), b"", 0
            sock.sendall(request)
            while not want or len(data) < want:
                data += sock.recv(1 << 18)
                head, found, _ = data.partition(b"\r\n\r\n")
                if found:
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    want = len(head) + 4 + length
            times.append(time.perf_counter() - start)
            status = int(data[9:12])
        rows.append([status, 0, 0.0, 0.0, 0.0, times])
    else:
        selector = selectors.DefaultSelector()
        socks = [socket.create_connection((host, int(port))) for _ in range(int(n))]
        for sock in socks:
            rows.append([0, 0, time.perf_counter(), 0.0, 0.0, []])
            selector.register(sock, selectors.EVENT_READ, rows[-1])
            sock.sendall(request)
        while selector.get_map():
            for key, _ in selector.select():
                data, row = key.fileobj.recv(1 << 18), key.data
                t = time.perf_counter()
                if not data:
                    row[4] = t
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                row[0] = row[0] or int(data[9:12])
                row[1] += len(data)
                if not row[3] and any(
                    part[:1] not in (b"", b'"') for part in data.split(b'content":"')[1:]
                ):
                    row[3] = t
                row[5] += [t] * data.count(b"\n\n")
    with open(out, "wb") as file:
        for status, n_bytes, sent, first, end, times in rows:
            head = struct.pack("=qqqddd", status, len(times), n_bytes, sent, first, end)
            file.write(head + struct.pack(f"={len(times)}d", *times))


class Stream:
    """What the client saw of one stream; times in seconds of the monotonic clock."""

    def __init__(self, status, n_bytes, sent, first, end, times):
        self.status, self.n_bytes, self.sent = status, n_bytes, sent
        self.first, self.end, self.times = first, end, times


def read_streams(path):
    data, at, streams = Path(path).read_bytes(), 0, []
    while at < len(data):
        status, n, n_bytes, sent, first, end = struct.unpack_from("=qqqddd", data, at)
        times = list(struct.unpack_from(f"={n}d", data, at + 48))
        streams.append(Stream(status, n_bytes, sent, first, end, times))
        at += 48 + 8 * n
    return streams


# ==== The bench ===================================================================================


def request_bytes(path, body, close=True):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n" + "Connection: close\r\n" * close
    return head.encode() + b"\r\n" + data


PROMPT = (
    "Please tell me in about twenty words why a quick brown fox would not jump over a lazy dog."
)
TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "parameters": TOOL}


def chat(n_tokens, **more):
    """The full pipeline: stop strings and reasoning split, no tools."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    body |= {"max_tokens": n_tokens, "stop": ["\nUser:", "###", "<|im_end|>"], **more}
    return request_bytes("/v1/chat/completions", body)


def with_timings(n):
    return chat(n, timings_per_token=True)


def with_tools(n):
    return chat(n, tools=[{"type": "function", "function": TOOL}], tool_choice="auto")


def messages(n):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": n, "stream": True}
    return request_bytes("/v1/messages", body | {"stop_sequences": ["\nUser:", "###"]})


def completion(n):
    body = {"prompt": PROMPT, "n_predict": n, "max_tokens": n, "stream": True}
    return request_bytes("/completion", body | {"stop": ["\nUser:", "###"]})


VARIANTS = {
    "chat": chat,
    "timings_per_token": with_timings,
    "tools auto": with_tools,
    "/v1/messages": messages,
    "/completion": completion,
}


def pin(core):
    if core == ANY_CORE and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    elif hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # also one that the parent has pinned itself away from


def rss_bytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS")


def cpu_of(pid):
    """CPU seconds of another process: its POSIX clock, which Linux derives from the process id."""
    return time.clock_gettime((~pid << 3) | 2)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def until_open(port, patience_s, alive=lambda: True):
    give_up = time.perf_counter() + patience_s
    while time.perf_counter() < give_up and alive():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.001)
    raise RuntimeError("the server did not start")


def ask(port, data, host="127.0.0.1", timeout=120.0):
    """The whole answer to one request that closes; b"" when there is none."""
    with socket.create_connection((host, port), timeout) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(1 << 16):
            answer += piece
    return answer


def status_of(answer):
    return int(answer[9:12] or 0)


class Server:
    """A server process of this file, pinned, obeying `tell`."""

    def __init__(self, bench, kind, slots=SLOTS, core=None):
        self.kind, self.host, self.port = kind, "127.0.0.1", free_port()
        args = [sys.executable, __file__, "--child", kind, str(self.port), str(slots)]
        self.log = open(bench.tmp / f"{kind}.log", "ab")
        self.process = subprocess.Popen(
            [*args, bench.model_dir, str(bench.cores[0] if core is None else core)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        until_open(self.port, 60, lambda: self.process.poll() is None)
        give_up = time.perf_counter() + 120
        while status_of(ask(self.port, chat(3))) == 503 and time.perf_counter() < give_up:
            time.sleep(0.05)

    def tell(self, step_s=None, busy_s=0.0):
        """Sets the step, or only takes the samples since the last call."""
        command = {} if step_s is None else {"step_s": step_s, "busy_s": busy_s}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class Row:
    """A figure: the values of its repetitions and what they must reach."""

    def __init__(self, name, unit, values, target=None, at_least=False, note=""):
        self.name, self.unit, self.values = name, unit, [v for v in values if v is not None]
        self.target, self.at_least, self.note = target, at_least, note

    @property
    def median(self):
        return statistics.median(self.values) if self.values else None

    def verdict(self):
        if self.target is None or not self.values:
            return ""
        good = self.median >= self.target if self.at_least else self.median <= self.target
        return "ok" if good else "MISS"

    def line(self):
        if not self.values:
            return f"{self.name:<58} {'':>9} {'skipped':>10}  {self.note}"
        target = "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"
        spread = f"{min(self.values):.4g} .. {max(self.values):.4g}"
        shown = f"{self.name:<58} {target:>9} {self.median:>10.4g} {self.unit:<6} {spread:<20}"
        return f"{shown} {self.verdict():<4} {self.note}".rstrip()

    def as_json(self):
        return vars(self) | {"median": self.median, "verdict": self.verdict()}


class Bench:
    def __init__(self, options):
        self.options, self.rows = options, []
        self.quick, self.servers = options.quick, {}
        self.tmp = Path(tempfile.mkdtemp(prefix="exl3-bench-"))
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self.cores = (cores[0], cores[-1])
        pin(self.cores[1])
        self.client = self.build_client()
        self.model_dir = self.find_model()
        self.has_exl3 = self.model_dir != str(self.tmp) and bool(
            importlib.util.find_spec("exllamav3") and importlib.util.find_spec("torch")
        )

    def build_client(self):
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        source, binary = self.tmp / "client.c", self.tmp / "client"
        source.write_text(CLIENT_C)
        if compiler and sys.platform == "linux":
            built = subprocess.run([compiler, "-O2", "-o", binary, source], capture_output=True)
            if built.returncode == 0:
                return [str(binary)]
            print(built.stderr.decode(), file=sys.stderr)
        print("warning: no C compiler; the Python client may be what is measured", file=sys.stderr)
        return [sys.executable, __file__, "--child", "client"]

    def find_model(self):
        """The tiny model of the tests, for its tokenizer and template; else an empty directory."""
        sys.path.insert(0, str(HERE))
        try:
            import tiny_model

            return str(tiny_model.cached("fp16"))
        except ImportError:
            return str(self.tmp)

    def add(self, *args, **kwargs):
        row = Row(*args, **kwargs)
        self.rows.append(row)
        print(row.line(), flush=True)

    # -- driving --

    def start(self, server, request, n, mode="stream"):
        """Starts a client; `finish` waits for it."""
        fd, file = tempfile.mkstemp(dir=self.tmp)
        os.write(fd, request)
        os.close(fd)
        args = [*self.client, mode, server.host, str(server.port), str(n), file, file + ".out"]
        process = subprocess.Popen(args)
        process.files = file, file + ".out"
        return process

    def finish(self, process, check=True):
        assert process.wait() == 0, "the client failed"
        streams = read_streams(process.files[1])
        for file in process.files:
            os.unlink(file)
        statuses = {s.status for s in streams}
        assert not check or statuses == {200}, f"answered with {statuses}"
        return streams

    def drive(self, server, request, n, mode="stream", check=True):
        return self.finish(self.start(server, request, n, mode), check)

    def windows(self, server, n):
        """Of the samples taken since the last call, those between which just n streams ran:
        [(CPU seconds per token, steps/s)] per window."""
        samples, out = server.tell()["samples"], []
        for a, b in zip(samples, samples[1:], strict=False):
            # The first window has the requests' own cost in it
            if a[0] == b[0] == n and b[2] - a[2] == n * (b[4] - a[4]):
                steps = (b[4] - a[4]) / (b[3] - a[3])
                out.append(((b[1] - a[1]) / (b[2] - a[2]), steps, a[3], b[3]))
        return out[1:] or out

    def cpu_per_token(self, server, request, n):
        """Microseconds; the median window of one run, the generator asleep all the time."""
        server.tell(STEP_S)
        self.drive(server, request, n)
        return statistics.median(w[0] for w in self.windows(server, n)) * 1e6

    def server(self, kind, slots=SLOTS):
        """The server of that kind, started once and kept: an idle one costs nothing."""
        if (kind, slots) not in self.servers:
            self.servers[kind, slots] = Server(self, kind, slots)
        server = self.servers[kind, slots]
        server.tell(STEP_S)
        return server

    @contextlib.contextmanager
    def fresh(self, kind, slots, core=None):
        server = Server(self, kind, slots, core)
        try:
            yield server
        finally:
            server.close()

    def kinds(self):
        return ("ours", "exl3") if self.has_exl3 else ("ours",)

    # -- the groups --

    def steps(self):
        """Steps/s behind the servers over steps/s of the generator alone, 5 ms a step, 2 of them
        with the GIL."""
        n_steps, reps = (60, 2) if self.quick else (300, 5)
        servers = [self.server(kind) for kind in ("bare", *self.kinds())]
        for n, target in ((1, None), (64, 0.98), (256, 0.95))[self.quick :]:
            alone, rates = [], {server.kind: [] for server in servers}
            for _ in range(reps):
                before = self.alone(n_steps * STEP_S / 2, n)
                for server in servers:
                    server.tell(STEP_S, BUSY_S)
                    self.drive(server, chat(n_steps + n // 4), n)
                    rates[server.kind].append(self.windows(server, n))
                alone.append((before + self.alone(n_steps * STEP_S / 2, n)) / 2)
            self.add(f"steps/s, generator alone, {n} streams", "/s", alone)
            for kind, runs in rates.items():
                means = [len(run) / sum(1 / w[1] for w in run) for run in runs]
                best = max(w[1] for run in runs for w in run) / max(alone)
                ratio = [mean / a for mean, a in zip(means, alone, strict=True)]
                wanted, note = target if kind != "bare" else None, f"best {best:.3f}"
                title = f"steps/s {kind} / alone, {n} streams"
                self.add(title, "", ratio, wanted, True, note)

    def alone(self, seconds, n):
        args = [sys.executable, __file__, "--child", "alone", str(seconds), str(n)]
        args += ["-", str(self.cores[0])]
        done = subprocess.run(args, capture_output=True, check=True)
        return json.loads(done.stdout)[str(n)]

    def cpu(self):
        """CPU per token against the bare bound, and of a request with one token."""
        n_tokens, reps = (80, 2) if self.quick else (300, 5)
        bare, *ours = [self.server(kind) for kind in ("bare", *self.kinds())]
        names = [name for name in VARIANTS if self.supports(ours[0], name)]
        for n in (1, 16, 64)[self.quick :]:
            figures = {}
            for _ in range(reps):
                bound = self.cpu_per_token(bare, chat(n_tokens), n)
                figures.setdefault(("bare", ""), []).append((bound, bound))
                for server in ours:
                    for name in names if server is ours[0] else ["chat"]:
                        own = self.cpu_per_token(server, VARIANTS[name](n_tokens), n)
                        figures.setdefault((server.kind, name), []).append((own, bound))
            for (kind, name), pairs in figures.items():
                title = f"CPU per token {kind} {name}, {n} streams".replace(" ,", ",")
                self.add(title, "us", [own for own, _ in pairs])
                if kind != "bare":
                    target = (1.6 if name == "chat" else 2.5) if n > 1 and kind == "ours" else None
                    ratio = [own / bound for own, bound in pairs]
                    self.add(f"    / bare, {n} streams", "", ratio, target)
        for name in VARIANTS:
            if name not in names:
                self.add(f"CPU per token, {name}", "", [], note="not served")
        for server in ours:
            self.one_token(server, reps)

    def supports(self, server, name):
        """Whether the server has it; with tools it must also refuse a wrong `tool_choice`."""
        if status_of(ask(server.port, VARIANTS[name](1))) != 200:
            return False
        wrong = chat(1, tools=[{"type": "function", "function": TOOL}], tool_choice=5)
        return name != "tools auto" or status_of(ask(server.port, wrong)) == 400

    def one_token(self, server, reps):
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        request = request_bytes("/v1/chat/completions", body, close=False)
        count, values = 200 if self.quick else 400, []
        server.tell(0.0)
        self.drive(server, request, 50, "seq")
        for _ in range(reps):
            before = server.tell()["cpu_s"]
            self.drive(server, request, count, "seq")
            values.append((server.tell()["cpu_s"] - before) / count * 1e3)
        target = None if server.kind == "bare" else 0.30
        self.add(f"CPU of a one-token request, {server.kind}", "ms", values, target)

    def growth(self):
        """CPU per token at 256 streams over 16."""
        n_tokens, reps = (80, 2) if self.quick else (300, 5)
        for kind in ("bare", "ours"):
            server, ratios = self.server(kind), []
            for _ in range(reps):
                few = self.cpu_per_token(server, chat(n_tokens), 16)
                ratios.append(self.cpu_per_token(server, chat(n_tokens), 256) / few)
            target = 1.1 if kind == "ours" else None
            self.add(f"CPU per token at 256 / at 16 streams, {kind}", "", ratios, target)

    def ttft(self):
        """Time to the first text, less the one step that the null generator takes for it."""
        count = 20 if self.quick else 200
        for kind in ("bare", "ours"):
            server = self.server(kind)
            server.tell(STEP_S, BUSY_S)
            step_ms = 1e3 / self.alone(0.5, 1)
            for busy, target in ((0, 1.0), (64, 1.0 + STEP_S * 1e3)):
                added, back = [], self.start(server, chat(count * 4), busy) if busy else None
                time.sleep(0.3)
                for i in range(count):
                    (stream,) = self.drive(server, chat(1), 1)
                    if back is None or back.poll() is None:
                        added.append((stream.first - stream.sent) * 1e3 - step_ms)
                    time.sleep(0.001 * (i % 7))
                if back is not None:
                    self.finish(back)
                where = f"{busy} busy streams" if busy else "idle"
                title = f"added time to first token, {kind}, {where}"
                self.add(f"{title}, p50", "ms", [percentile(added, 50)])
                wanted = target if kind == "ours" else None
                self.add(f"{title}, p99 of {len(added)}", "ms", [percentile(added, 99)], wanted)

    def gap(self):
        """Gaps of a running stream while another request is made ready, in steps. On any core: on
        one core the operating system's time slices are seen, not what the server holds up."""
        reps, kind = 1 if self.quick else 5, self.kinds()[-1]
        with self.fresh(kind, 4, ANY_CORE) as server:
            self.gap_rows(server, kind, reps)

    def gap_rows(self, server, kind, reps):
        server.tell(STEP_S, BUSY_S)
        calm = self.gaps(server, None)[0]
        self.add(f"gap p99, {kind}, nothing else", "steps", [percentile(calm, 99)])
        text = (TEXT * (1_000_000 // len(TEXT) + 1))[:1_000_000]
        cases = {
            "1 MB prompt": self.big_chat(text),
            "500-definition grammar": self.big_grammar(),
            "1 MB prompt as 2,000 messages": self.big_chat(text, 2000),
            "1 MB prompt to /completion": self.big_completion(text),
        }
        for title, request in list(cases.items())[: 2 if self.quick else 4]:
            p99, worst, took = [], [], []
            for rep in range(reps):
                gaps, seconds, status = self.gaps(server, request(rep))
                if status != 200:
                    break
                p99.append(percentile(gaps, 99))
                worst.append(max(gaps))
                took.append(seconds)
            note = f"request took {statistics.median(took):.2f} s" if took else f"HTTP {status}"
            self.add(f"gap p99, {kind}, {title}", "steps", p99, 2.0, note=note)
            self.add(f"gap max, {kind}, {title}", "steps", worst)

    def gaps(self, server, request):
        """(gaps of a running stream in steps while `request` was answered, seconds, status)."""
        back = self.start(server, chat(4000 if request else 150), 1)
        time.sleep(0.2)
        start, status = time.perf_counter(), 200
        if request:
            status = status_of(ask(server.port, request))
        end = time.perf_counter()
        if request:  # what is left of the running stream is said quickly
            server.tell(0.0)
        (stream,) = self.finish(back)
        server.tell(STEP_S, BUSY_S)
        times = [t for t in stream.times if not request or start - 0.02 <= t <= end + 0.05]
        return (
            [(b - a) / STEP_S for a, b in zip(times, times[1:], strict=False)],
            end - start,
            status,
        )

    def big_chat(self, text, n_messages=1):
        size = len(text) // n_messages
        parts = [text[i * size : (i + 1) * size] for i in range(n_messages)]
        turns = [{"role": "user" if i % 2 == 0 else "assistant"} for i in range(n_messages - 1)]
        turns.append({"role": "user"})

        def make(rep):
            rows = [t | {"content": f"{rep} {part}"} for t, part in zip(turns, parts, strict=True)]
            return request_bytes("/v1/chat/completions", {"messages": rows, "max_tokens": 1})

        return make

    def big_completion(self, text):
        body = {"n_predict": 1, "max_tokens": 1}
        return lambda rep: request_bytes("/completion", body | {"prompt": f"{rep} {text}"})

    def big_grammar(self):
        def make(rep):
            names = [f"tool_{rep}_{i}" for i in range(500)]
            props = {f"field_{i}": {"type": "string", "minLength": i} for i in range(6)}
            one = {"type": "object", "properties": props, "required": list(props)[:3]}
            wanted = [{"$ref": f"#/$defs/{name}"} for name in names]
            schema = {"anyOf": wanted, "$defs": {name: one for name in names}}
            form = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            return request_bytes("/v1/chat/completions", body | {"response_format": form})

        return make

    def memory(self):
        """Resident bytes per connection and request: differences over many of them."""
        n, reps = (300, 1) if self.quick else (1000, 3)
        idle, waiting, running = [], [], []
        for _ in range(reps):
            with self.fresh("ours", 1) as server:
                pid = server.process.pid
                server.tell(0.05)
                with self.held(server, b"", 50):
                    pass
                time.sleep(0.3)
                base = rss_bytes(pid)
                with self.held(server, b"", n):
                    idle.append((rss_bytes(pid) - base) / n / 1024)
                base = max(base, rss_bytes(pid))
                with self.held(server, chat(100_000), n):
                    waiting.append((rss_bytes(pid) - base) / n / 1024)
            with self.fresh("ours", 256) as server:
                server.tell(0.05)
                base = rss_bytes(server.process.pid)
                with self.held(server, chat(100_000), 256):
                    time.sleep(1.0)
                    running.append((rss_bytes(server.process.pid) - base) / 256 / 1024)
        self.add("memory per idle connection", "KiB", idle, 8)
        self.add("memory per waiting request", "KiB", waiting, 64)
        self.add("memory per running stream", "KiB", running, 64)

    @contextlib.contextmanager
    def held(self, server, data, n):
        """n connections that sent data and read nothing."""
        socks = [socket.create_connection((server.host, server.port)) for _ in range(n)]
        try:
            for sock in socks:
                sock.sendall(data)
            time.sleep(0.5 + n * len(data) * 1e-6)
            yield
        finally:
            for sock in socks:
                sock.close()
            time.sleep(0.5)

    def long(self):
        """One long answer: CPU per token of its last 1,000 tokens over its first 1,000."""
        n_tokens, reps = (10_000, 2) if self.quick else (100_000, 3)
        server = self.server("ours")
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": n_tokens}
        body["stop"] = ["\nUser:", "###", "<|im_end|>"]
        if self.supports(server, "tools auto"):
            body["tools"] = [{"type": "function", "function": TOOL}]
        for stream in (True, False)[: 1 if self.quick else 2]:
            request = request_bytes("/v1/chat/completions", body | {"stream": stream})
            ratios, times, part = [], [], 1000 // SAMPLE_STEPS
            for _ in range(reps):
                server.tell(0.0002)
                self.drive(server, request, 1)
                costs = [w[0] for w in self.windows(server, 1)]
                first = statistics.median(costs[:part])
                ratios.append(statistics.median(costs[-part:]) / first)
                times.append(first * 1e6)
            title = f"{n_tokens:,} tokens, stream={stream}".replace("T", "t").replace("F", "f")
            self.add(f"{title}: CPU, last 1,000 / first 1,000", "", ratios, 1.1)
            self.add(f"{title}: CPU per token of the first", "us", times)

    def fake(self):
        """`--fake`: start to the end of the first answer; memory at rest."""
        reps, took, cpu, rss = 3 if self.quick else 9, [], [], []
        request = request_bytes(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
        )
        for _ in range(reps):
            port, start = free_port(), time.perf_counter()
            args = [sys.executable, str(ROOT / "exl3_serve.py"), "--fake", "--port", str(port)]
            process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
            try:
                until_open(port, 20, lambda p=process: p.poll() is None)
                while status_of(ask(port, request)) != 200:
                    time.sleep(0.002)
                took.append(time.perf_counter() - start)
                if sys.platform == "linux":
                    cpu.append(cpu_of(process.pid))
                    time.sleep(0.2)
                    rss.append(rss_bytes(process.pid) / 2**20)
            finally:
                process.kill()
                process.wait()
        self.add("--fake, start to first answer", "s", took, 0.3)
        self.add("--fake, start to first answer, CPU", "s", cpu)
        self.add("--fake, RSS idle", "MiB", rss, 40)

    def real(self):
        """The real exllamav3 on the CPU: steps/s alone and behind the server."""
        if not self.has_exl3:
            return self.add("real exllamav3 on the CPU", "", [], note="not installed")
        n_tokens, reps = (80, 2) if self.quick else (250, 5)
        counts = (1, 16) if self.quick else (1, 4, 16)
        port, where = free_port(), {"cwd": str(self.tmp), "stderr": subprocess.DEVNULL}
        args = [sys.executable, __file__, "--child", "real", str(n_tokens), "-", self.model_dir]
        alone = subprocess.Popen(
            [*args, str(self.cores[0])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            **where,
        )  # fmt: skip
        args = [sys.executable, __file__, "--child", "serve_cpu", str(port), "16"]
        args += [self.model_dir, str(self.cores[0])]
        served = subprocess.Popen(args, stdout=subprocess.DEVNULL, **where)
        server = types.SimpleNamespace(host="127.0.0.1", port=port)
        try:
            until_open(port, 60, lambda: served.poll() is None)
            body = {"prompt": "ABC", "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
            body = body | {"n_predict": n_tokens, "stream": True}
            request = request_bytes("/completion", body)
            while status_of(ask(port, request)) == 503:
                time.sleep(0.2)
            for n in counts:
                rates, bases = [], []
                for _ in range(reps):
                    bases.append(self.ask_alone(alone, n))
                    streams = self.drive(server, request, n)
                    start = max(s.times[2] for s in streams)
                    times = [t for t in streams[0].times[:-1] if t > start]
                    rates.append((len(times) - 1) / (times[-1] - times[0]))
                    bases[-1] = (bases[-1] + self.ask_alone(alone, n)) / 2
                ratio = [r / b for r, b in zip(rates, bases, strict=True)]
                self.add(f"exllamav3 on the CPU, alone, {n} streams", "/s", bases)
                self.add(f"exllamav3 on the CPU, behind the server, {n} streams", "/s", rates)
                self.add(f"    / alone, {n} streams", "", ratio)
        finally:
            for process in (alone, served):
                process.kill()
                process.wait()

    def ask_alone(self, process, n):
        process.stdin.write(f"{n}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    def foreign(self):
        """Another server: what can be seen from outside. Its step is its own."""
        url = urllib.parse.urlsplit(self.options.url)
        server = types.SimpleNamespace(host=socket.gethostbyname(url.hostname), port=url.port or 80)
        pid, n_tokens = self.options.pid, 100 if self.quick else 300
        for name, make in VARIANTS.items():
            status = status_of(ask(server.port, make(1), server.host))
            if status != 200:
                self.add(f"{name}", "", [], note=f"HTTP {status}")
                continue
            for n in (1, 16, 64):
                rates, cpu = [], []
                for _ in range(2 if self.quick else 5):
                    before = cpu_of(pid) if pid else 0.0
                    streams = self.drive(server, make(n_tokens), n)
                    n_events = sum(len(s.times) for s in streams)
                    span = max(s.end for s in streams) - min(s.first or s.sent for s in streams)
                    rates.append(n_events / n / span)
                    if pid:
                        cpu.append((cpu_of(pid) - before) / n_events * 1e6)
                self.add(f"{name}: events/s and stream, {n} streams", "/s", rates)
                if pid:
                    self.add(f"{name}: CPU per event, model included, {n} streams", "us", cpu)
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        request = request_bytes("/v1/chat/completions", body, close=False)
        before = cpu_of(pid) if pid else 0.0
        (stream,) = self.drive(server, request, 100, "seq")
        times = [t * 1e3 for t in stream.times]
        self.add("one-token request, time", "ms", [percentile(times, 50), percentile(times, 99)])
        if pid:
            self.add("one-token request, CPU", "ms", [(cpu_of(pid) - before) * 10])

    def run(self):
        groups = [self.foreign] if self.options.url else [getattr(self, g) for g in GROUPS]
        if self.options.only:
            groups = [g for g in groups if g.__name__ in self.options.only.split(",")]
        print(f"{'figure':<58} {'target':>9} {'median':>10} {'':<6} {'range':<20}")
        try:
            for group in groups:
                group()
        finally:
            for server in self.servers.values():
                server.close()
            if not self.options.keep:
                shutil.rmtree(self.tmp, ignore_errors=True)


GROUPS = ("steps", "cpu", "growth", "ttft", "gap", "memory", "long", "fake", "real")


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, round(p / 100 * (len(values) - 1)))] if values else None


def child(kind, *args):
    if kind == "client":
        return client_py(*args)
    port, slots, model_dir, core = args
    pin(int(core))
    if kind == "bare":
        serve_bare(int(port))
    elif kind == "alone":
        run_alone(float(port), [int(slots)])
    elif kind == "real":
        real_alone(model_dir, slots, int(port))
    elif kind == "serve_cpu":
        sys.path[:0] = [str(ROOT), str(HERE)]
        sys.argv[1:] = (
            f"-m {model_dir} -np {slots} -cs 16384 --host 127.0.0.1 --port {port}".split()
        )
        importlib.import_module("exl3_serve")  # ROOT's: serve_cpu puts its own directory first
        import serve_cpu

        serve_cpu.main()
    else:
        serve_ours(kind, int(port), int(slots), model_dir)
    return None


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    about, _, rest = __doc__.partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about + rest, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="also as JSON, on the last line")
    parser.add_argument("--only", default="", help="groups, with commas: " + " ".join(GROUPS))
    parser.add_argument("--url", default="", help="measure this server instead")
    parser.add_argument("--pid", type=int, default=0, help="process of --url, for its CPU time")
    parser.add_argument("--keep", action="store_true", help="keep logs and the client's binary")
    bench = Bench(parser.parse_args())
    bench.run()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {load:.1f}")
    if bench.options.keep:
        print(f"logs in {bench.tmp}")
    if bench.options.json:
        print(json.dumps({"load": load, "rows": [row.as_json() for row in bench.rows]}))
    return int(any(row.verdict() == "MISS" for row in bench.rows))


if __name__ == "__main__":
    sys.exit(main())

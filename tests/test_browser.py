"""What a web page can do, by a real browser: headless Chromium. Skipped where it is not installed.

Pages come from a small server here that plays `foreign.example`: the browser is told that names
under .example are 127.0.0.1, as an attacker's name server could say.
"""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import tempfile
import threading

import pytest
from server_process import HI, PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here")

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": HI, "max_tokens": 3})
JSON = {"Content-Type": "application/json"}

PAGE = """<!doctype html><script>
(async () => {
  const told = {};
  for (const [name, url, options] of %s) {
    try {
      const answer = await fetch(url, options);
      told[name] = answer.type + " " + answer.status + " " + await answer.text();
    } catch (error) {
      told[name] = "blocked";
    }
  }
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
})();
</script>"""


class Pages(http.server.ThreadingHTTPServer):
    """Serves one page to everybody and keeps what it tells."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.port = self.server_address[1]
        self.page, self.told, self.has_told = "", {}, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class PageHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(self.server.page.encode())

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.told = json.loads(self.rfile.read(length))
        self.answer(b"")
        self.server.has_told.set()

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def pages():
    pages = Pages()
    yield pages
    pages.shutdown()
    pages.server_close()


def chromium(*args):
    """A running browser with a profile of its own."""
    profile = tempfile.mkdtemp(prefix="exl3-serve-chromium-")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP *.example 127.0.0.1", *args]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, **pipe), profile


def end(process, profile):
    process.terminate()
    process.wait(PATIENCE_S)
    shutil.rmtree(profile, ignore_errors=True)


def what_a_page_gets(pages, host, requests):
    """Opens a page of this host that sends these requests; what became of each."""
    pages.page = PAGE % json.dumps(requests)
    browser = chromium("--remote-debugging-port=0", f"http://{host}:{pages.port}/")
    try:
        assert pages.has_told.wait(2 * PATIENCE_S), "the page did not run to its end"
    finally:
        end(*browser)
    return pages.told


def post(headers, **more):
    return {"method": "POST", "headers": headers, "body": BODY} | more


def n_jobs(server):
    """How many jobs there have been: the number that the next one gets."""
    with server.open_stream({"ignore_eos": True}):
        server.wait_busy(1)
        (task,) = [slot["id_task"] for slot in server.slots() if slot["is_processing"]]
    server.wait_idle()
    return task


def test_a_foreign_page_needs_a_key_and_a_rebinding_name_does_not_help_it(own_server, pages):
    free = own_server("--fake", "--fake-delay", "0.01").wait_ready()
    keyed = own_server("--fake", "--api-key", "k").wait_listening()
    key = {"Authorization": "Bearer k"}
    told = what_a_page_gets(
        pages,
        "foreign.example",
        [
            ("simple", free.url + CHAT, post({"Content-Type": "text/plain"})),
            ("opaque", free.url + CHAT, post({"Content-Type": "text/plain"}, mode="no-cors")),
            ("preflighted", free.url + CHAT, post(JSON)),
            ("read", free.url + "/v1/models", {}),
            ("rebinding", f"http://evil.example:{free.port}{CHAT}", post({}, mode="no-cors")),
            ("with key", keyed.url + CHAT, post(JSON | key)),
            ("wrong key", keyed.url + CHAT, post(JSON | {"X-Api-Key": "x"})),
        ],
    )
    assert told["with key"].startswith("cors 200 ") and '"choices":[' in told["with key"]
    assert told["wrong key"].startswith("cors 401 ") and "Invalid API Key" in told["wrong key"]
    assert told["opaque"] == told["rebinding"] == "opaque 0 "  # sent, and the answer kept away
    assert told["simple"] == told["preflighted"] == told["read"] == "blocked"
    assert n_jobs(free) == 0, "a foreign page made the model work"


def test_a_page_at_a_rebound_name_is_refused_though_it_is_the_same_origin(own_server):
    server = own_server("--fake").wait_ready()
    process, profile = chromium("--dump-dom", f"http://evil.example:{server.port}/v1/models")
    try:
        shown, _ = process.communicate(timeout=2 * PATIENCE_S)
    finally:
        end(process, profile)
    assert "needs a key" in shown and '"data"' not in shown


def test_a_page_of_this_machine_can_use_the_model(own_server, pages):
    server = own_server("--fake", "--fake-delay", "0.01").wait_ready()
    streamed = json.dumps({"messages": HI, "max_tokens": 3, "stream": True})
    told = what_a_page_gets(
        pages,
        "localhost",
        [
            ("whole", server.url + CHAT, post(JSON)),
            ("stream", server.url + CHAT, post(JSON) | {"body": streamed}),
            ("read", server.url + "/v1/models", {}),
        ],
    )
    assert told["whole"].startswith("cors 200 ") and '"choices":[' in told["whole"]
    assert told["stream"].startswith("cors 200 ") and told["stream"].endswith("data: [DONE]\n\n")
    assert told["read"].startswith("cors 200 ")
    assert n_jobs(server) == 2

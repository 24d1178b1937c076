"""nginx in front of the server with its own defaults: HTTP/1.0 to the server, and what it is not
told to pass on at once is buffered. Skipped where nginx is not installed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import time

import pytest
from server_process import HI, PATIENCE_S, Reader, eventually, http_request

CHAT = "/v1/chat/completions"
STEP_S = 0.1
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(not NGINX, reason="no nginx here")

CONFIG = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{tls} ssl;
        ssl_certificate cert.pem;
        ssl_certificate_key key.pem;
        location / {{ proxy_pass http://127.0.0.1:{upstream}; proxy_http_version {version}; }}
    }}
}}
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += " -keyout key.pem -out cert.pem -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost"
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except OSError:
        pytest.skip("no openssl command")
    return folder


class Proxy:
    """A running nginx; `connect` gives a connection to it."""

    def __init__(self, folder, upstream, version):
        self.folder, self.ports = folder, {"plain": free_port(), "tls": free_port()}
        config = CONFIG.format(upstream=upstream, version=version, **self.ports)
        (folder / "nginx.conf").write_text(config)
        command = [NGINX, "-p", folder, "-c", "nginx.conf", "-e", "stderr"]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        eventually(self.is_listening, "nginx listens")

    def is_listening(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError):
            self.connect("plain").close()
            return True

    def connect(self, kind):
        sock = socket.create_connection(("127.0.0.1", self.ports[kind]), PATIENCE_S)
        if kind == "plain":
            return sock
        context = ssl.create_default_context(cafile=self.folder / "cert.pem")
        return context.wrap_socket(sock, server_hostname="localhost")

    def stop(self):
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.log.close()


@pytest.fixture
def behind_nginx(fake_server, certificate):
    """Starts nginx in front of a fake server; gives both."""
    proxies = []

    def start(version):
        server = fake_server(list("abcdefgh"), delay=STEP_S)
        proxies.append(Proxy(certificate, server.port, version))
        return server, proxies[-1]

    yield start
    for proxy in proxies:
        proxy.stop()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_tokens_arrive_one_by_one_through_nginx(behind_nginx, kind, version):
    server, proxy = behind_nginx(version)
    body = {"messages": HI, "stream": True}
    with contextlib.closing(proxy.connect(kind)) as sock:
        sock.sendall(http_request(CHAT, body, headers={"Accept-Encoding": "gzip"}))
        reader = Reader(sock)
        status, headers = reader.head()
        assert status == 200 and headers["content-type"] == "text/event-stream"
        arrivals, raw = [], b""
        while piece := reader.chunk():
            arrivals += [time.monotonic()] * len(re.findall(rb'"content":"[a-h]"', piece))
            raw += piece
    assert "".join(re.findall(r'"content":"(\w)"', raw.decode())) == "abcdefgh"
    assert raw.endswith(b"data: [DONE]\n\n")
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    assert sum(gap > STEP_S / 2 for gap in gaps) >= 6, gaps  # of 7: some may be late together


def test_answers_errors_and_leaving_pass_through_nginx(behind_nginx):
    server, proxy = behind_nginx("1.0")
    with contextlib.closing(proxy.connect("tls")) as sock:
        reader = Reader(sock)
        for body, status in (({"messages": HI, "max_tokens": 2}, 200), ({"messages": 5}, 400)):
            sock.sendall(http_request(CHAT, body))
            got, _, raw = reader.answer()
            assert got == status
            assert ("error" in json.loads(raw)) == (status == 400)
    sock = proxy.connect("tls")
    sock.sendall(http_request(CHAT, {"messages": HI, "stream": True, "ignore_eos": True}))
    server.wait_busy(1)
    sock.close()
    eventually(lambda: server.n_busy() == 0, "the slot is free", 5)
    server.assert_alive()

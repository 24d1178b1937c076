"""What all tests share: hypothesis profiles and running servers.

Servers are processes, started when a test first asks for them and kept for later tests that ask
with the same arguments; the ones used longest ago are stopped when there are many. A traceback in
the log of a server fails the test that was running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from hypothesis import HealthCheck, settings
from server_process import THINK_TEMPLATE, Server

slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fast", derandomize=True, max_examples=100, deadline=None, suppress_health_check=slow_is_fine
)
settings.register_profile("nightly", settings.get_profile("fast"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

MAX_SERVERS = 6  # kept at once by one worker


# With -n, the tests of these files go to one worker each, and so share what is slow to make
TOGETHER = {
    "test_golden.py": "golden",
    "test_real_engine.py": "real",
    "test_openai_client.py": "real",
    "test_llama_clients.py": "clients",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replaces xdist's default distribution: by TOGETHER, any other test for itself."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(Path(nodeid.split("::")[0]).name, nodeid)

    return ByFile(config, log)


class Pool:
    """Running servers by their arguments, in the order of their last use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[tuple[str, ...], Server] = {}
        self.used: list[Server] = []  # by the test under way

    def get(self, program: str, args: list[str], env: dict[str, str] | None = None) -> Server:
        key = (program, *args, *map(str, (env or {}).items()))
        server = self.servers.pop(key, None)
        if server is None or server.process.poll() is not None:
            server = Server([*args, "--port", "0"], program, env)
            server.wait_ready()
        self.servers[key] = server
        self.used.append(server)
        while len(self.servers) > MAX_SERVERS:
            self.servers.pop(next(iter(self.servers))).stop()
        return server

    def file(self, name: str, text: str) -> str:
        """The path of a file with this text."""
        path = self.folder / f"{abs(hash(text)):x}-{name}"
        path.write_text(text, encoding="utf-8")
        return str(path)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("servers"))
    yield pool
    for server in pool.servers.values():
        server.stop()


@pytest.fixture
def servers(pool: Pool) -> Iterator[Pool]:
    """The pool for one test, which fails when a server that it used wrote a traceback."""
    pool.used.clear()
    yield pool
    for server in pool.used:
        server.check_log()


@pytest.fixture
def fake_server(servers: Pool) -> Callable[..., Server]:
    """Makes a server with the fake engine.

    `script`: the pieces it says (bytes become {"hex": ...}), None for its own words; `think`: its
    template opens a thought; `template`: a template's text; `delay`: seconds a step.
    """

    def start(
        script: list[Any] | None = None,
        *args: Any,
        think: bool = False,
        template: str = "",
        delay: float = 0.0,
    ) -> Server:
        options = ["--fake"]
        if script is not None:
            pieces = [{"hex": p.hex()} if isinstance(p, bytes) else p for p in script]
            options += ["--fake-script", servers.file("script.json", json.dumps(pieces))]
        if think or template:
            options += ["--chat-template-file", servers.file("t.jinja", template or THINK_TEMPLATE)]
        if delay:
            options += ["--fake-delay", str(delay)]
        return servers.get("exl3_serve.py", [*options, *map(str, args)])

    return start


@pytest.fixture
def real_server(servers: Pool) -> Callable[..., Server]:
    """Makes a server with the real exllamav3 on the CPU and a tiny model."""

    def start(*args: Any, kind: str = "fp16") -> Server:
        model = str(tiny_model.cached(kind))
        return servers.get("serve_cpu.py", ["-m", model, *map(str, args)])

    return start


@pytest.fixture
def own_server(servers: Pool) -> Iterator[Callable[..., Server]]:
    """Starts a server that this test alone uses, and may end. Not waited for."""
    started: list[Server] = []

    def start(*args: Any, program: str = "exl3_serve.py", **env: str) -> Server:
        options = list(map(str, args))
        if "--port" not in options:
            options += ["--port", "0"]
        started.append(Server(options, program, env))
        return started[-1]

    yield start
    for server in started:
        server.stop()

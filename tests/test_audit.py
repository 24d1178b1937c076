"""Two promises to the operator: no request reads a file or reaches another host, and what he got
wrong is told in one clear line, with the right exit code."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import HI, Server, eventually, http_request

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
SECRET = "the-secret-in-the-file"


# ---- No file of the host can be read -------------------------------------------------------------

# The server's own arguments follow. Prints every file opened, name looked up, address connected to
# and program run from the moment it listens.
AUDITED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
import exl3_serve
WATCHED = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo",
           "subprocess.Popen", "os.system", "os.exec", "ctypes.dlopen")
def hook(event, args):
    if event in WATCHED or event.startswith(("urllib", "http.client", "shutil", "glob")):
        print("EVENT", event, repr(args[0] if args else ""), file=sys.stderr)
sys.addaudithook(hook)
sys.exit(exl3_serve.main(sys.argv[1:]))
"""


def requests_that_name(path, url):
    """Every place of a request that might be taken for the name of something to be opened."""
    parts = [{"type": "text", "text": "x"}]
    for name in (str(path), path.as_uri(), url):
        image = {"type": "image_url", "image_url": {"url": name}}
        yield CHAT, {"messages": [{"role": "user", "content": [*parts, image]}]}
        image = {"type": "input_audio", "input_audio": {"data": name, "format": "wav"}}
        yield CHAT, {"messages": [{"role": "user", "content": [*parts, image]}]}
        for text in (f"{{% include {name!r} %}}", f"{{{{ open({name!r}).read() }}}}"):
            yield "/apply-template", {"messages": [{"role": "user", "content": text}]}
            yield CHAT, {"messages": HI, "chat_template": text, "max_tokens": 1}
            yield "/apply-template", {"messages": HI, "chat_template_kwargs": {"documents": [text]}}
        for member in ("model", "lora", "grammar_file", "filename", "media", "user", "id_slot"):
            yield COMPLETION, {"prompt": "x", "n_predict": 1, member: name}
        yield COMPLETION, {"prompt": {"prompt_string": "x", "multimodal_data": [name]}}
        yield COMPLETION, {"prompt": "x", "json_schema": {"$ref": name}, "n_predict": 1}
        schema = {"$schema": name, "$id": name, "allOf": [{"$ref": name + "#/a"}]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        yield CHAT, {"messages": HI, "response_format": form, "max_tokens": 1}
        for grammar in (f"%import {name}\nstart: x", f'%include "{name}"', f"root ::= <{name}>"):
            yield COMPLETION, {"prompt": "x", "grammar": grammar, "n_predict": 1}
        yield "/tokenize", {"content": name}
        yield "/slots/0?action=restore", {"filename": name}
        yield "/lora-adapters", [{"id": 0, "path": name}]
    for target in (
        f"/..{path}",
        f"/%2e%2e{path}",
        f"//{path}",
        path.as_uri(),
        f"/props?file={path}",
    ):
        yield target, None


def test_no_request_opens_a_file_or_reaches_another_host(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    command = [sys.executable, "-c", AUDITED, "--fake", "--port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/secret.txt"
        log = tmp_path / "log"
        process = subprocess.Popen(command, stderr=log.open("w"))
        try:
            port = int(
                eventually(lambda: re.search(r"http://[\d.]+:(\d+)", log.read_text()), "listens")[1]
            )
            eventually(lambda: b" 200 " in answer(port, "/health", None), "ready")
            for target, body in requests_that_name(secret, url):
                answer(port, target, body)  # once, because Python imports some modules late
            n_before = len(log.read_text())
            for target, body in requests_that_name(secret, url):
                said = answer(port, target, body)
                assert said.startswith(b"HTTP/1.1 ") and SECRET.encode() not in said, (target, body)
        finally:
            process.terminate()
            process.wait(10)
        with pytest.raises(BlockingIOError):
            bait.accept()
    text = log.read_text()[n_before:]
    assert re.findall("EVENT .*", text) == []
    assert "EVENT open" in log.read_text()[:n_before] and "Traceback" not in text


def answer(port, target, body):
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(http_request(target, body, headers={"Connection": "close"}))
        data = b""
        while piece := sock.recv(65536):
            data += piece
        return data


# ---- The operator's faults -----------------------------------------------------------------------


# id: (arguments, with {} for a file of this text; the text; environment; exit code; words)
FAULTS = {
    "no key file": (["--api-key-file", "/nowhere/k"], None, {}, 1, "/nowhere/k"),
    "key file is a folder": (["--api-key-file", "/"], None, {}, 1, "directory: '/'"),
    "empty key file": (["--api-key-file", "{}"], "\n", {}, 1, "--api-key-file"),
    "empty key": (["--api-key", " "], None, {}, 1, "--api-key"),
    "empty key in the environment": ([], None, {"LLAMA_API_KEY": ""}, 1, "--api-key"),
    "no script": (["--fake-script", "/nowhere/s"], None, {}, 1, "/nowhere/s"),
    "script is no JSON": (["--fake-script", "{}"], "[", {}, 1, "cannot load"),
    "script is no list": (["--fake-script", "{}"], "5", {}, 1, "wrong.file: it holds no JSON list"),
    "script is an object": (["--fake-script", "{}"], '{"a": 1}', {}, 1, "wrong.file"),
    "script of numbers": (["--fake-script", "{}"], "[5]", {}, 1, "wrong.file"),
    "script with wrong bytes": (["--fake-script", "{}"], '[{"hex": "zz"}]', {}, 1, "wrong.file"),
    "script file is named": (["--fake-script", "{}"], "[", {}, 1, "wrong.file"),
    "no template": (["--chat-template-file", "/nowhere/t"], None, {}, 1, "/nowhere/t"),
    "template is no text": (["--chat-template-file", "{}"], b"\xff\xfe", {}, 1, "cannot load"),
    "template is named": (["--chat-template-file", "{}"], "{% if %}", {}, 1, "wrong.file"),
    "kwargs are no JSON": (["--chat-template-kwargs", "{"], None, {}, 2, "--chat-template-kwargs"),
    "kwargs say what": (["--chat-template-kwargs", "{"], None, {}, 2, "json_object"),
    "temperature": (["--temp", "-1"], None, {}, 1, "'temperature': -1.0 is outside 0"),
    "effort": (["--reasoning-effort", "zz"], None, {}, 2, "--reasoning-effort"),
    "slots": (["-np", "0"], None, {}, 2, "--parallel"),
    "port in the environment": ([], None, {"LLAMA_ARG_PORT": "x"}, 2, "--port"),
    "format in the environment": ([], None, {"LLAMA_ARG_THINK": "zz"}, 2, "--reasoning-format"),
    "delay": (["--fake-delay", "-1"], None, {}, 2, "--fake-delay"),
    "host is no text": (["--host", "\udcff"], None, {}, 1, "cannot listen on"),
    "port is too large": (["--port", "80000"], None, {}, 1, "80000"),
}


def end_of(args, program="exl3_serve.py", env=None):
    """(exit code, the lines that tell of an error) of a server that should not come up."""
    server = Server(args, program, env)

    def is_up():
        if listening := re.search(r"http://[\d.]+:(\d+)", server.log()):
            server.port = int(listening[1])
            with contextlib.suppress(OSError, http.client.HTTPException):
                return server.get("/health")[0] == 200

    try:
        eventually(lambda: server.process.poll() is not None or is_up(), "it ended", 60)
        lines = server.log().splitlines()
        code = server.process.poll()
        return code, [x for x in lines if re.search("ERROR|^exl3-serve:|error:", x)]
    finally:
        server.stop()  # fails on a traceback


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_operator_got_wrong_is_one_clear_line(tmp_path, name):
    args, text, env, code, words = FAULTS[name]
    path = tmp_path / "wrong.file"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    args = [str(path) if arg == "{}" else arg for arg in args]
    if "LLAMA_ARG_PORT" not in env and "--port" not in args:
        args += ["--port", "0"]
    ended, lines = end_of(["--fake", *args], env=env)
    assert ended == code
    assert len(lines) == 1 and words in lines[0]


def test_a_broken_config_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text('{"a":')
    ended, lines = end_of(["-m", str(tmp_path), "--port", "0"], "serve_cpu.py")
    assert ended == 1 and len(lines) == 1 and "cannot load the model" in lines[0]

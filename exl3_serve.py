#!/usr/bin/env python3
"""exl3-serve: one EXL3 model behind llama-server's HTTP surface. `python exl3_serve.py -m MODEL`.

This module knows the surface: options, routes, validation, templates, the text pipeline and the
dialects. HTTP bytes are http11.py's matter, the model is engine.py's; the engine never sees JSON.

The life of a generating request:

    App.on_head      route, key, Host and Origin checks               before the body is read
    prepare (worker) JSON -> checks -> template -> tokens -> grammar  all that can refuse: 400
    Answer.begin     n jobs to the engine, SSE headers                the status line
    Answer.on_update piece -> Pipeline: thought or answer, stop strings -> deltas -> dialect frames;
                     when the step is told to all -> one Exchange.write per request and step

Text stages are plain objects with feed() and finish(); a request that does not stream collects
the very same deltas, so both modes cannot differ.

Everything here runs on the event loop except `prepare` of a large or slow request, which runs in
a worker thread and touches only the request and what is fixed once the model is loaded, and
`ThoughtWatch`, which the engine thread calls between its steps and which shares one flag with
/control. Files of --path are looked up and read on the loop: they are small and the operator's own.

Reading order: as it stands. Limits, errors and checks; templates and the text pipeline; requests,
choices, dialects and answers; routes; options and main.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import json
import logging
import logging.handlers
import math
import mimetypes
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from json.encoder import encode_basestring_ascii as json_string
from pathlib import Path
from secrets import compare_digest, token_hex
from typing import Any, ClassVar, NamedTuple

import engine as eng
import http11
from http11 import SSE_HEADERS, SSE_PING, Exchange, Limits, Request, Response, Server, bind

VERSION = "0.1.0"
log = logging.getLogger("exl3_serve")

# ==== Limits ======================================================================================

INLINE_BODY_BYTES = 16 * 1024  # smaller requests are prepared on the loop: cheaper than the hop
MAX_STOPS, MAX_STOP_CHARS = 64, 1024  # what a client may hold text back with
# More would take a worker thread for too long, or too much memory
MAX_GRAMMAR_CHARS, MAX_SCHEMA_CHARS, MAX_TEXT_CHARS = 2**16, 2**20, 2**23
MAX_MESSAGES, MAX_BIASES, MAX_PIECES = 10_000, 2000, 2**18
MAX_CHOICES = 64  # n * prompts of one request
MAX_GLUED_SPACE = 256  # white space next to a tag goes with the tag, up to so much
LONG_TOKEN_CHARS = 16  # few texts have that many characters a token, none in its whole length
WINDOW_S = 60.0  # over which rpm and tpm of a key are counted
AUDIT_BYTES, N_AUDIT_FILES = 64 * 2**20, 4  # of --audit-log: size of a file, older ones kept
SPARE_FILES = 600  # descriptors for the model's files, and for connections being refused
N_WORKERS = 4  # threads that render, tokenize and compile

# ==== Errors ======================================================================================

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
ERROR_TYPES |= {403: "permission_error", 413: "request_too_large", 501: "not_supported_error"}
ERROR_TYPES |= {429: "rate_limit_error", 500: "server_error", 503: "unavailable_error"}


class ApiError(Exception):
    """A request that is refused; becomes the envelope of its route's dialect."""

    def __init__(self, status: int, message: str, type: str = "", **extra: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.extra = status, message, extra
        self.headers = extra.pop("headers", [("Retry-After", "1")] if status == 503 else [])
        self.type = type or ERROR_TYPES.get(status, ERROR_TYPES[400 if status < 500 else 500])

    def body(self) -> dict[str, Any]:
        """llama-server's envelope (server-common.cpp, format_error_response)."""
        error = {"code": self.status, "message": self.message, "type": self.type}
        return {"error": error | self.extra}


bad = partial(ApiError, 400)
ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Strict JSON in ASCII: lone surrogates and U+2028/2029/0085 are escaped, NaN is a bug."""
    return ENCODE(value).encode()


def loads(body: bytes | bytearray, kind: type = dict) -> Any:
    """The JSON object of a request body; 400 for anything else, NaN, Infinity and deep nesting."""

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text} is not a number that JSON can hold")
        return number

    try:
        value = json.loads(body.decode(), parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise bad("the request body is nested too deeply") from None
    except ValueError as exc:
        raise bad(f"the request body is not valid JSON: {exc}") from None
    return check(value, "request body", Field(kind))


# ==== Checks: one field, one row ==================================================================

INF, MAX_NUMBER = math.inf, 1e30  # what a 32-bit float can hold, and products of it
TYPE_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
TYPE_NAMES |= {list: "an array", dict: "an object"}


class Field(NamedTuple):
    """What a request field may be: its type, the inclusive range of a number or length, items.

    In place of the type may stand a tuple of the only values that it may have.
    """

    kind: Any
    low: float = -INF
    high: float = INF
    item: type = object


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")
FIELD_ROWS = (
    (Field(EFFORTS), "reasoning_effort"),
    (Field(REASONING_FORMATS), "reasoning_format"),
    (Field(bool), "stream timings_per_token return_progress return_tokens ignore_eos"),
    (Field(bool), "cache_prompt add_generation_prompt reasoning_control echo"),
    (Field(dict), "stream_options chat_template_kwargs response_format json_schema"),
    (Field(list, 0, MAX_STOPS, str), "samplers banned_strings response_fields"),
    (Field(list, 0, 8, str), "dry_sequence_breakers"),  # each is looked for in the vocabulary
    (Field(list, item=dict), "tools input_extra"),
    (Field(list, 0, 0), "lora"),  # there are no adapters
    (Field(list, 1, MAX_MESSAGES), "messages"),
    (Field(str, 0, MAX_TEXT_CHARS), "input_prefix input_suffix"),
    (Field(str, 0, MAX_GRAMMAR_CHARS), "grammar lark"),
    (Field(str, 0, MAX_STOP_CHARS), "reasoning_budget_message"),
    (Field(int, 1, MAX_CHOICES), "n n_cmpl"),
    (Field(int, -1), "n_predict max_tokens max_completion_tokens t_max_predict_ms"),
    (Field(int, -1), "reasoning_budget_tokens thinking_budget_tokens reasoning_budget"),
    (Field(int, 0, 100), "n_probs top_logprobs"),
    (Field(int, -(2**63), 2**64), "seed"),
    (Field(int, -1, 2**31 - 1), "top_k"),
    (Field(int, -1, 10**9), "repeat_last_n dry_penalty_last_n"),
    (Field(int, 0, 10**9), "dry_allowed_length min_keep"),
    (Field(float, 0), "temperature dry_multiplier"),
    (Field(float, 1), "dry_base"),
    (Field(float, 0.01), "repeat_penalty"),
    (Field(float, 0, 1), "top_p min_p xtc_probability xtc_threshold adaptive_decay"),
    (Field(float, -1, 1), "adaptive_target"),
    (Field(float, -100, 100), "presence_penalty frequency_penalty"),
)
FIELDS = {name: rule for rule, names in FIELD_ROWS for name in names.split()}
# What is needed once a request runs; the rest may be large
FIELDS_KEPT = FIELDS.keys() - {"messages", "tools", "input_extra"} | {"stop"}

# Samplers that exllamav3 lacks: accepted at the value that turns them off, else 400
ABSENT_SAMPLERS = {"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1.0, "dynatemp_range": 0.0}
ABSENT_SAMPLERS |= {"post_sampling_probs": False}
FIELDS |= {name: Field((off,)) for name, off in ABSENT_SAMPLERS.items()}


def check(value: Any, name: str, rule: Field) -> Any:
    """The value as its type, or a 400 that names the field."""
    if isinstance(rule.kind, tuple):
        if value not in rule.kind:
            raise bad(f"'{name}' must be {' or '.join(map(str, rule.kind))}, not {value!r:.100}")
        return value
    if rule.kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e3 is how some clients write 1000
    wanted: Any = (int, float) if rule.kind is float else rule.kind
    if not isinstance(value, wanted) or isinstance(value, bool) and rule.kind is not bool:
        raise bad(f"'{name}' must be {TYPE_NAMES[rule.kind]}")
    size: Any = value if isinstance(value, (int, float)) else len(value)
    if not rule.low <= size <= rule.high or abs(size) > MAX_NUMBER:  # also NaN, Infinity, 1e999
        what = "" if size is value else "length of "
        raise bad(f"'{name}': {what}{size} is outside {rule.low} .. {rule.high}")
    if isinstance(value, list) and not all(isinstance(item, rule.item) for item in value):
        raise bad(f"'{name}' must hold nothing but {TYPE_NAMES[rule.item][2:].strip()}s")
    return float(value) if rule.kind is float else value  # exllamav3 takes no integer beyond 64 bit


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """The body without its nulls, every known field checked. Unknown fields pass unseen."""
    given = {key: value for key, value in body.items() if value is not None}
    return given | {key: check(given[key], key, FIELDS[key]) for key in given if key in FIELDS}


def parse_stops(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings: one or a list. Empty and null ones are no stops."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    stops = check(stops, name, Field(list, 0, MAX_STOPS))
    stops = [check(stop, name, Field(str, 0, MAX_STOP_CHARS)) for stop in stops if stop is not None]
    return tuple(dict.fromkeys(filter(None, stops)))


def check_ids(ids: list[Any], name: str, n_vocab: int) -> list[int]:
    """Token ids that are in the vocabulary, or 400: the GPU never sees another."""
    if ids and all(type(i) is int for i in ids) and min(ids) >= 0 and max(ids) < n_vocab:
        return ids  # ten times as fast as to check each
    return [check(i, name, Field(int, 0, n_vocab - 1)) for i in ids]


def parse_logit_bias(value: Any, model: Model) -> dict[int, float]:
    """All of llama-server's spellings: {id or text: bias}, [[id or text, bias or false], ...]."""
    biases: dict[int, float] = {}
    pairs = [[*pair] for pair in value.items()] if isinstance(value, dict) else value
    for pair in check(pairs, "logit_bias", Field(list, 0, MAX_BIASES)):
        token, bias = check(pair, "logit_bias", Field(list, 2, 2))
        if isinstance(token, str) and re.fullmatch("-?[0-9]+", token):
            token = int(token[:20])  # so long a number is no token's id, and more is slow to read
        ids = model.tokenize(token, False, "logit_bias") if isinstance(token, str) else [token]
        bias = -INF if bias is False else check(bias, "logit_bias", Field(float, -1e30, 1e30))
        biases |= dict.fromkeys(check_ids(ids, "logit_bias", model.info.n_vocab), bias)
    return biases


# ==== Templates ===================================================================================


class ThinkTags(NamedTuple):
    """What opens and closes a thought."""

    openings: tuple[str, ...]
    close: str


HARMONY = "<|channel|>analysis<|message|>"
# The first row of which the chat template's text mentions an opening is the model's
THINK_TAGS = (
    ThinkTags((HARMONY, "<|start|>assistant" + HARMONY), "<|end|>"),
    ThinkTags(("<|channel>thought",), "<channel|>"),
    ThinkTags(("[THINK]",), "[/THINK]"),
    ThinkTags(("<think>",), "</think>"),
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
THOUGHT_NAMES = ("reasoning_content", "thinking", "reasoning")
PROBE, PROBE_CALL = "exl3-serve-probe", '{"q": "exl3-serve-probe"}'


def templates_of(model_dir: Path, override: str | None, config: dict[str, Any]) -> tuple[str, str]:
    """The chat template's text, and that for requests with tools: flag, chat_template.jinja,
    tokenizer_config.json, or none ("")."""
    path = Path(override) if override else model_dir / "chat_template.jinja"
    value = config.get("chat_template") or ""
    if override or path.is_file():
        value = path.read_text(encoding="utf-8")
    rows = [{"template": value}] if isinstance(value, str) else value
    named: Any = {row.get("name"): row.get("template") for row in rows}  # as transformers does
    default = named.get("default") or next(iter(named.values()), "")
    return default, named.get("tool_use") or default


def compile_template(text: str) -> Any:
    """The template as transformers compiles it (utils/chat_template_utils.py): sandboxed."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            """Kimi K2's template keeps a queue; the lists it is given are made for one request."""
            is_queue = isinstance(obj, list) and attr in ("append", "pop")
            return is_queue or super().is_safe_attribute(obj, attr, value)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    env = Sandbox(trim_blocks=True, lstrip_blocks=True)
    env.add_extension("jinja2.ext.loopcontrols")
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = time.strftime
    # {% generation %}: transformers marks assistant tokens with it; here it is {% with %}, a scope
    return env.from_string(re.sub(r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with", text))


class Model:
    """What the surface needs of the loaded model; fixed after load, shared by all threads."""

    def __init__(self, backend: eng.Backend, args: argparse.Namespace) -> None:
        """Reads the model's template and configuration files. Errors are the operator's."""
        self.backend, self.info, self.args = backend, backend.info, args
        model_dir = Path(backend.info.model_dir)
        config = eng.read_config(model_dir / "tokenizer_config.json")
        texts = templates_of(model_dir, args.chat_template_file, config)
        self.template_text = texts[0]
        # bos_token, eos_token and the like, as transformers hands them to a template
        named = eng.read_config(model_dir / "special_tokens_map.json") | config
        named = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        self.specials = {k: v for k, v in named.items() if k[-6:] == "_token" and type(v) is str}
        with eng.naming(f"the chat template {args.chat_template_file or 'of the model'}"):
            compiled: Any = [text and compile_template(text) for text in texts]
        self.template, self.tools_template = compiled
        parts, call = [{"type": "text", "text": PROBE}], {"name": "f", "arguments": PROBE_CALL}
        self.wants_parts = PROBE not in self.shown(PROBE) and PROBE in self.shown(parts)
        # Arguments of a call: a mapping, if that is not shown as Python writes it, {'q': ...}
        mapping = self.shown("", call | {"arguments": json.loads(PROBE_CALL)}).replace("'", "")
        takes_mapping = PROBE in mapping and f"{{q: {PROBE}" not in mapping
        self.wants_text = not takes_mapping and PROBE_CALL in self.shown("", call)
        self.alias = args.alias or model_dir.name
        starts = [tags.openings[0].split("<|message|>")[0] in texts[0] for tags in THINK_TAGS]
        self.think = THINK_TAGS[starts.index(True) if True in starts else -1]
        ids = {tag: backend.single_id(tag) for tag in (*self.think.openings, self.think.close)}
        self.think_ids = {i: tag for tag, i in ids.items() if i is not None}
        self.visible_ids = frozenset(i for tag in ids for i in self.tokenize(tag))
        self.defaults = sampling_defaults(model_dir, args)
        wants_bos = backend.info.add_bos or config.get("add_bos_token") is True
        self.bos = [backend.info.bos_id] if wants_bos and backend.info.bos_id is not None else []

    def tokenize_prompt(self, text: str) -> list[int]:
        """Of a text that is far too long only the start: enough to refuse it by, and to say that it
        has at least so many tokens."""
        ids = self.tokenize(text[: LONG_TOKEN_CHARS * self.info.n_ctx])
        cut = len(text) > LONG_TOKEN_CHARS * self.info.n_ctx
        return self.tokenize(text) if cut and len(ids) < self.info.n_ctx + 100 else ids

    def shown(self, content: Any, call: Any = None) -> str:
        """How the template shows a user's content, or a call; llama.cpp finds out what forms of
        them it wants in the same way."""
        calls = [{"id": "123456789", "type": "function", "function": call}]
        messages = [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}] if call else []
        with contextlib.suppress(Exception):  # a template may raise anything, none has no render()
            return self.tools_template.render(self.specials, messages=messages)
        return ""

    def tokenize(self, text: str, special: bool = True, name: str = "prompt") -> list[int]:
        check(text, name, Field(str, 0, MAX_TEXT_CHARS))
        return self.backend.encode(eng.without_surrogates(text), special)

    def render(self, messages: list[Any], tools: Any, extra: dict[str, Any], opens=True) -> str:
        """The prompt's text; the template's own complaint is a 400 with its message."""
        if self.wants_parts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        given = {"messages": [*messages], "tools": tools or None, "add_generation_prompt": opens}
        names = {"documents": None} | self.specials | extra | given
        if not self.template:
            if tools:
                text = f"Tools: {json.dumps(tools, ensure_ascii=False)}"
                messages = [{"role": "system", "content": text}, *messages]
            head = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            return head + "<|im_start|>assistant\n"
        try:
            return (self.tools_template if tools else self.template).render(names)
        except Exception as exc:  # a template may raise anything; all of it is about this request
            raise bad(f"the chat template refused the request: {exc}") from None


# ==== Text pipeline ===============================================================================

Piece = tuple[str, Sequence[int]]  # text and the ids of its tokens
Delta = tuple[str, str]  # "content" or "reasoning", text


class Scanner:
    """Finds marks in text that comes in pieces, holding back as little as can be.

    Definition: read the text character by character; at the first character where one or more
    marks are a suffix of the text so far, the longest of them is found and the text is cut at its
    start. Whole pieces are held, and only while the held text, from some position on, is a proper
    prefix of some mark (with `glue`: white space and then such a prefix, also an empty one).
    A mark in `ids` is one token: it is recognised by that id alone, never by its text.
    With `leading` a mark counts only where nothing but white space is held before it.
    """

    def __init__(self, marks: Iterable[str], ids: Any = None, glue=False, leading=False) -> None:
        """`ids`: the text of marks by the token that they are."""
        marks = tuple(marks)
        self.ids = {i: mark for i, mark in (ids or {}).items() if mark in marks}
        self.marks = tuple(mark for mark in marks if mark not in self.ids.values())
        self.firsts = frozenset(mark[0] for mark in self.marks)
        self.glue, self.leading = glue, leading
        self.held: list[Piece] = []

    def feed(self, text: str, ids: Sequence[int] = ()) -> tuple[list[Piece], str, str]:
        """(pieces released, mark found or "", the text after the mark)."""
        named = self.ids and not self.ids.keys().isdisjoint(ids)
        glued = self.glue and text[-1:].isspace()
        if not (self.held or glued or named) and self.firsts.isdisjoint(text):
            return [(text, ids)], "", ""
        self.held.append((text, ids))
        whole = "".join(t for t, _ in self.held)
        marks = [(m, whole.find(m)) for m in self.marks]
        if named:  # a token without a text stands at the end of its piece
            mark = next(self.ids[i] for i in ids if i in self.ids)
            marks = [(mark, len(whole) - len(text) + (text + mark).find(mark))]
        ends = [(start + len(mark), start, mark) for mark, start in marks if start >= 0]
        end, start, mark = min(ends, default=(0, 0, ""))
        if mark and not (self.leading and whole[:start].strip()):
            keep = len(whole[:start].rstrip()) if self.glue else start
            return self._release(keep, cut=True), mark, whole[end:]
        return self._release(self._keep_from(whole)), "", ""

    def finish(self) -> list[Piece]:
        """What was held, when the text ends without a mark."""
        return self._release(INF)

    def _keep_from(self, whole: str) -> int:
        """The first position from which on the text may still become a mark."""
        if self.leading:
            start = whole.lstrip()
            may_be = not start or any(mark.startswith(start) for mark in self.marks)
            return 0 if may_be and len(whole) <= MAX_GLUED_SPACE else len(whole)
        longest = max(map(len, self.marks), default=1)
        starts = range(max(0, len(whole) - longest + 1), len(whole))
        likely = (i for i in starts if whole[i] in self.firsts)
        partial = (i for i in likely if any(m.startswith(whole[i:]) for m in self.marks))
        keep = next(partial, len(whole))
        return max(len(whole[:keep].rstrip()), keep - MAX_GLUED_SPACE) if self.glue else keep

    def _release(self, keep: float, cut: bool = False) -> list[Piece]:
        """The held pieces that end by there; with `cut` also the start of the next: nothing stays
        held then."""
        released, position = list[Piece](), 0
        while self.held and position + len(self.held[0][0]) <= keep:
            position += len(self.held[0][0])
            released.append(self.held.pop(0))
        if cut:
            starts = [(text[: int(keep) - position], ids) for text, ids in self.held[:1]]
            released, self.held = [piece for piece in released + starts if piece[0]], []
        return released


class Pipeline:
    """One choice's text: tells thought from answer, and ends at a stop string.

    In each phase other marks are looked for. "start": an opening tag, which counts only before the
    first character of the answer; "reasoning": the closing tag; "content": stop strings. White
    space next to a tag goes with the tag; a thought that is never closed stays one.
    """

    def __init__(self, tags: ThinkTags, ids: dict[int, str], in_thought: Any, stops: Any = ()):
        """`in_thought`: whether the prompt ends in a thought; None: none is told from the answer.
        `ids`: the tags that are one token, by that."""
        self.stop, self.stopped = Scanner(stops), ""  # the stop string that was found
        self.scanners = {"start": Scanner(tags.openings, ids, glue=True, leading=True)}
        self.scanners |= {"reasoning": Scanner([tags.close], ids, glue=True), "content": self.stop}
        self.phase = {None: "content", False: "start", True: "reasoning"}[in_thought]
        self.after_tag = in_thought is True  # white space that comes now goes with the tag

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        """The deltas of one piece; after `stopped` is set there are no more."""
        if self.phase == "content" and not self.stop.held and self.stop.firsts.isdisjoint(text):
            return [("content", text)] if text else []  # most tokens of most answers
        deltas: list[Delta] = []
        while text and not self.stopped:
            pieces, mark, text = self.scanners[self.phase].feed(text, ids)
            deltas += self._deltas(pieces)
            if mark and self.phase == "content":
                self.phase, self.stopped = "stopped", mark
            elif mark:
                self.phase = "start" if self.phase == "reasoning" else "reasoning"
                self.after_tag, ids = True, ()
        return deltas

    def _deltas(self, pieces: list[Piece]) -> list[Delta]:
        """What pieces say that were released in this phase. An answer that begins is scanned."""
        phase, deltas = self.phase, list[Delta]()
        for text, ids in pieces:
            if self.after_tag:
                text = text.lstrip()
                self.after_tag = not text
            if text and phase == "start":
                self.phase = "content" if self.phase == "start" else self.phase
                deltas += self.feed(text, ids)
            elif text:
                deltas.append((phase, text))
        return deltas

    def finish(self) -> list[Delta]:
        """What was still held when the text ended."""
        return [delta for s in self.scanners.values() for delta in self._deltas(s.finish())]


# ==== Requests: from a checked body to jobs =======================================================

LIMIT_FIELDS = ("n_predict", "max_completion_tokens", "max_tokens")  # the first that is there
BUDGET_FIELDS = ("reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget")
FORMATS = ("text", "json_object", "json_schema")
LLAMA_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def sampling_defaults(model_dir: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What a request that says nothing gets: flag > generation_config.json > llama-server's."""
    config = eng.read_config(model_dir / "generation_config.json")
    config["repeat_penalty"] = config.get("repetition_penalty")
    defaults = eng.NEUTRAL_SAMPLING | LLAMA_SAMPLING
    for layer in (config, vars(args)):
        defaults |= checked({name: layer.get(name) for name in eng.NEUTRAL_SAMPLING})
    return defaults


def generation_params(model: Model, fields: dict[str, Any]) -> dict[str, Any]:
    """Of eng.GenerationParams: sampling and limits, without the prompt and the grammar."""
    logprobs, n_probs = fields.get("logprobs"), fields.get("n_probs") or -1
    if logprobs is True:
        n_probs = fields.get("top_logprobs", 0)
    elif logprobs:
        n_probs = check(logprobs, "logprobs", Field(int, 0, 100))
    elif "top_logprobs" in fields:
        raise bad("'top_logprobs' needs 'logprobs' to be true")
    # -1 and none mean the cap
    limit = next((fields[name] for name in LIMIT_FIELDS if name in fields), -1)
    cap = model.args.max_tokens_cap or model.info.n_ctx
    seed = fields.get("seed", model.args.seed)
    sampling = model.defaults | {k: v for k, v in fields.items() if k in model.defaults}
    known = eng.NEUTRAL_SAMPLING["samplers"]  # others are left out, as llama-server does
    sampling["samplers"] = [name for name in sampling["samplers"] if name in known]
    params = {"max_tokens": cap if limit == -1 else min(limit, cap), "sampling": sampling}
    params |= {"seed": None if seed in (-1, 0xFFFFFFFF) else seed, "n_probs": n_probs}
    params["logit_bias"] = parse_logit_bias(fields.get("logit_bias", []), model)
    params["banned_strings"] = list(parse_stops(fields.get("banned_strings"), "banned_strings"))
    return params | {"ignore_eos": fields.get("ignore_eos", False)}


class Task:
    """A request that was found good: what every one of its choices needs.

    `fields`: the checked body. `prompts`: each as the client wrote it, and as token ids.
    `in_thought`: whether the prompt ends inside a thought; None: thoughts are not split off.
    """

    def __init__(self, dialect: Any, model: Model, fields: Any, prompts: list, in_thought=None):
        """Raises a 400 also when the context cannot hold a prompt."""
        self.dialect, self.prompts = dialect, prompts
        self.fields = {key: value for key, value in fields.items() if key in FIELDS_KEPT}
        self.n = fields.get("n_cmpl", fields.get("n", 1))  # choices per prompt
        n_choices = check(self.n * len(prompts), "n", Field(int, 1, MAX_CHOICES))
        n, n_ctx = max(len(ids) for _, ids in prompts), model.info.n_ctx
        if n >= n_ctx:
            text = f"request ({n} tokens) exceeds the available context size ({n_ctx} tokens)"
            raise ApiError(400, text, "exceed_context_size_error", n_prompt_tokens=n, n_ctx=n_ctx)
        self.params = generation_params(model, fields)
        self.stops = parse_stops(fields.get("stop"), "stop")
        self.grammars = compiled(model, fields, in_thought is True, n_choices)  # one per choice
        self.in_thought = in_thought
        self.watch: Any = None  # makes a ThoughtWatch, where one is needed
        self.lead = ""  # what an answer begins with, before anything was generated

    def flag(self, name: str) -> bool:
        return self.fields.get(name, False)


def compiled(model: Model, fields: dict[str, Any], in_thought: bool, n: int) -> list[Any]:
    """The request's grammar, if any, compiled n times; 400 with the compiler's reason."""
    source = parse_constraint(fields)
    if source is None:
        return []
    # It binds after the thought
    trigger = model.backend.single_id(model.think.close) if in_thought else None
    if in_thought and trigger is None:
        raise bad("a grammar needs thinking off: this model's thoughts end in no single token")
    try:
        return [model.backend.compile_grammar(*source, trigger) for _ in range(n)]
    except eng.BadGrammar as exc:
        raise bad(f"the grammar or schema does not compile: {exc}") from None


def parse_constraint(fields: dict[str, Any]) -> tuple[str, str] | None:
    """(kind, source) of a grammar or schema; 400 when it is not one."""
    given = ("gbnf", fields.get("grammar")), ("lark", fields.get("lark"))
    grammars, name = [(kind, text) for kind, text in given if text], "json_schema"
    schema = fields.get("json_schema")
    form = fields.get("response_format", {"type": "text"})
    kind = check(form.get("type"), "response_format.type", Field(FORMATS))
    if (kind != "text") + (schema is not None) + len(grammars) > 1:
        raise bad("only one of 'grammar', 'lark', 'json_schema', 'response_format' can be given")
    if kind != "text":
        name, schema = "response_format.schema", form.get("schema", {"type": "object"})
    elif schema is None:
        return grammars[0] if grammars else None
    if kind == "json_schema":
        schema = check(form.get("json_schema") or form, name, Field(dict)).get("schema")
    text = dumps(check(schema, name, Field(dict))).decode()
    return "json_schema", check(text, name, Field(str, 0, MAX_SCHEMA_CHARS))


def prepare_completion(dialect: type, model: Model, body: dict[str, Any]) -> Task:
    """/completion and /v1/completions. A prompt is a string, token ids or a mixed list; a list of
    these is several."""
    fields = checked(body)
    value = fields.get("prompt")
    several = isinstance(value, list) and all(isinstance(v, (str, list)) for v in value)
    prompts = check(value if several else [value], "prompt", Field(list, 1, MAX_CHOICES))
    return Task(dialect, model, fields, [(prompt, prompt_ids(model, prompt)) for prompt in prompts])


def parts_ids(model: Model, value: Any, name: str, encode: Callable[..., list[int]]) -> list[int]:
    """Token ids of a text, or of a list of texts and ids in which they follow each other."""
    parts = [value] if isinstance(value, str) else check(value, name, Field(list))
    check(sum(isinstance(p, str) for p in parts), f"{name} (texts)", Field(int, 0, MAX_MESSAGES))
    lists = (encode(part) if isinstance(part, str) else [part] for part in parts)
    return check_ids([i for ids in lists for i in ids], name, model.info.n_vocab)


def prompt_ids(model: Model, prompt: Any) -> list[int]:
    """Token ids of one prompt; BOS goes in front of text where the model wants it."""
    parts = prompt if isinstance(prompt, list) else [check(prompt, "prompt", Field(str))]
    check(parts, "prompt", Field(list, 1))
    bos = model.bos if isinstance(parts[0], str) else []
    ids = bos + parts_ids(model, parts, "prompt", model.tokenize_prompt)
    # An empty prompt gets what a model that was told nothing would say
    return ids or [model.info.bos_id or model.info.eos_id or 0]


# What marks the parts of code to fill in, model family by model family (llama.cpp, llama-vocab.cpp)
FIM_FAMILIES = "<|fim_{}|> <fim-{}> <fim_{}> <|code_{}|> <|{}|>"
FIM_MARKS = (
    FIM_FAMILIES.replace("{}", "prefix") + " <｜fim▁begin｜> <PRE> ▁<PRE>",
    FIM_FAMILIES.replace("{}", "suffix") + " <｜fim▁hole｜> <SUF> ▁<SUF>",
    FIM_FAMILIES.replace("{}", "middle") + " <｜fim▁end｜> <MID> ▁<MID>",
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "<|file_sep|>",
)


def prepare_infill(dialect: type, model: Model, body: dict[str, Any]) -> Task:
    """/infill: llama-server's prompt (server-common.cpp, format_prompt_infill)."""
    fields, plain = checked(body), partial(model.tokenize, special=False)
    found = [map(model.backend.single_id, names.split()) for names in FIM_MARKS]
    marks: list[Any] = [next((i for i in ids if i is not None), None) for ids in found]
    if None in marks[:3]:
        raise ApiError(501, "infill is not supported by this model: it has no marks for it")
    prefix, suffix = (check(fields.get(x), x, Field(str)) for x in ("input_prefix", "input_suffix"))
    repo, file = marks[3:]
    extra: list[Any] = [] if repo is None else [repo, "myproject\n"]
    for part in fields.get("input_extra", []):
        name = check(part.get("filename", "tmp"), "input_extra[].filename", Field(str))
        extra += ["\n\n--- snippet ---\n\n"] if file is None else [file, f"{name}\n"]
        extra.append(check(part.get("text"), "input_extra[].text", Field(str)))
    extra += [] if file is None else [file, "filename\n"]
    prompt = model.tokenize(check(fields.get("prompt", ""), "prompt", Field(str)))
    # llama-server's default n_batch: the prefix gets 3/4 of it and the suffix 1/4; the rest of the
    # context is for other files and the answer
    n_batch = min(2048, model.info.n_ctx // 4)
    n_extra, n_suffix = model.info.n_ctx - 2 * n_batch, max(0, n_batch // 4 - 2 - len(prompt))
    whole = parts_ids(model, extra, "input_extra", plain)
    whole = whole[max(0, len(whole) - n_extra) :] + model.bos
    whole += [marks[0], *plain(prefix)[-(n_batch // 4 * 3) :], *prompt]
    whole += [marks[1], *plain(suffix)[:n_suffix], marks[2]]
    return Task(dialect, model, fields, [(whole, whole)])


def check_text(content: Any, path: str) -> str:
    """A message's content as text: a string, null, or text parts, joined by newlines."""
    if not isinstance(content, list):
        return check("" if content is None else content, path, Field(str))
    texts = []
    for i, part in enumerate(content):
        kind = check(part, f"{path}[{i}]", Field(dict)).get("type")
        check(kind, f"{path}[{i}].type", Field(("text", "input_text", "output_text", "refusal")))
        text = part.get("refusal" if kind == "refusal" else "text")
        texts.append(check(text, f"{path}[{i}].text", Field(str)))
    return "\n".join(texts)


def history_call(call: Any, path: str, as_text: bool) -> dict[str, Any]:
    """A call with its arguments as the template wants them, a text or a mapping. What is no object
    is shown as it is, in one."""
    function = check(call, path, Field(dict)).get("function")
    check(function, f"{path}.function", Field(dict))
    given = value = function.get("arguments") or {}
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(given) if isinstance(given, str) else given
    value = {} if value is None else value if isinstance(value, dict) else {"arguments": given}
    shown = json.dumps(value, ensure_ascii=False) if as_text else value
    return call | {"function": function | {"arguments": shown}}


def check_messages(messages: list[Any], model: Model) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, known roles, no nulls; 400 with the path.

    Where the template does not know `developer`, such messages and the system's become one, in
    front.
    """
    sizes = [len(x) for m in messages if isinstance(m, dict) for x in m.values() if type(x) is list]
    check(sum(sizes), "messages (parts and calls)", Field(int, 0, MAX_MESSAGES))
    out = list[dict[str, Any]]()
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        check(check(message, path, Field(dict)).get("role"), f"{path}.role", Field(ROLES))
        if not {"content", "tool_calls", *THOUGHT_NAMES} & message.keys():
            raise bad(f"'{path}.content' is missing")
        kept = {k: v for k, v in message.items() if v is not None and v != []}
        kept["content"] = check_text(message.get("content"), f"{path}.content")
        if "tool_calls" in kept:
            calls = enumerate(check(kept["tool_calls"], f"{path}.tool_calls", Field(list)))
            rows = [history_call(c, f"{path}.tool_calls[{j}]", model.wants_text) for j, c in calls]
            kept["tool_calls"] = rows
        thoughts = [kept[name] for name in THOUGHT_NAMES if name in kept]
        if thoughts:  # gpt-oss templates say "thinking", the others "reasoning_content"
            thought = check(thoughts[0], f"{path}.reasoning_content", Field(str))
            kept = {"thinking": thought} | kept | {"reasoning_content": thought}
        out.append(kept)
    if "developer" in {m["role"] for m in out} and "developer" not in model.template_text:
        orders = [m["content"] for m in out if m["role"] in ("system", "developer")]
        rest = [m for m in out if m["role"] not in ("system", "developer")]
        out = [{"role": "system", "content": "\n\n".join(orders)}, *rest]
    return out


def template_kwargs(model: Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The template's own variables: flags < reasoning_effort < chat_template_kwargs."""
    effort = fields.get("reasoning_effort", model.args.reasoning_effort)
    thinks = dict.fromkeys(("enable_thinking", "thinking"), effort != "none") if effort else {}
    shown = {"reasoning_effort": effort} if effort not in (None, "none") else {}
    kwargs: dict[str, Any] = (model.args.chat_template_kwargs or {}) | thinks | shown
    kwargs |= fields.get("chat_template_kwargs", {})
    check(kwargs.get("enable_thinking", True), "enable_thinking", Field(bool))  # "no" would be true
    return kwargs


def render_chat(model: Model, fields: dict[str, Any]) -> tuple[str, bool]:
    """(prompt text, whether it ends inside a thought). A trailing assistant message is continued.

    With a template that opens a thought for the answer, a continued answer closes it first, or
    goes on in it where the message itself holds or opens a thought.
    """
    given = check(fields.get("messages"), "messages", FIELDS["messages"])
    messages, prefill = check_messages(given, model), dict[str, Any]()
    if [message["role"] for message in messages[-2:]] == ["assistant"] * 2:
        raise bad("'messages': there can be only one assistant message at the end")
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        prefill = messages.pop()
    for tool in fields.get("tools", []):
        function = check(tool.get("function"), "tools[].function", Field(dict))
        check(function.get("name"), "tools[].function.name", Field(str, 1))
    # llama-server's web UI sends false to have a message continued
    opens = fields.get("add_generation_prompt", True) or bool(prefill)
    prompt = model.render(messages, fields.get("tools"), template_kwargs(model, fields), opens)
    openings, close = model.think
    in_thought = prompt.rstrip().endswith(openings)
    text, thought = prefill.get("content", ""), prefill.get("reasoning_content", "")
    if not text and not thought:
        return prompt, in_thought
    closing = text  # what shows that the thought is over
    own = next((o for o in openings if text.lstrip().startswith(o)), "")
    if own:
        thought, closing, text = text.lstrip()[len(own) :].partition(close)
    if in_thought or own or thought:
        prompt = prompt.rstrip() if in_thought else prompt + (own or openings[0])
        prompt += "\n" + thought.lstrip("\n")
        if not closing:
            return prompt, True
        gap = "\n" if thought else "\n\n"  # as templates write an empty thought
        prompt, text = prompt.rstrip("\n") + f"{gap}{close}\n\n", text.lstrip("\n")
    return prompt + text, False


def prepare_chat(dialect: type, model: Model, body: dict[str, Any]) -> Task:
    """/v1/chat/completions and the dialects that translate to it."""
    fields = checked(body)
    check(fields.get("tool_choice", "auto"), "tool_choice", Field(("auto", "none")))  # none forced
    prompt, in_thought = render_chat(model, fields)
    task = Task(dialect, model, fields, [(prompt, model.tokenize_prompt(prompt))], in_thought)
    # With tools all control tokens are shown: which of them mark a call is the client's to find out
    tools = fields.get("tools")
    task.params["visible_ids"] = model.info.special_ids if tools else model.visible_ids
    budget = next((fields[k] for k in BUDGET_FIELDS if k in fields), model.args.reasoning_budget)
    if budget >= 0 or fields.get("reasoning_control"):
        message = fields.get("reasoning_budget_message", model.args.reasoning_budget_message) or ""
        task.watch = partial(ThoughtWatch, model, in_thought, budget, message + model.think.close)
    if fields.get("reasoning_format", model.args.reasoning_format) == "none":
        # The tag that the template has written is a part of the content, too
        tags = [tag for tag in model.think.openings if prompt.rstrip().endswith(tag)]
        task.in_thought, task.lead = None, prompt[prompt.rindex(tags[0]) :] if tags else ""
    return task


class ThoughtWatch:
    """Ends a thought that is over its budget, or when /control asks for it. The engine thread
    calls it after every step, and says next what it returns (Job.watch)."""

    def __init__(self, model: Model, in_thought: bool, budget: int, closing: str) -> None:
        self.pipeline = Pipeline(model.think, model.think_ids, in_thought)
        self.budget = budget if budget >= 0 else INF  # tokens that a thought may still have
        self.closing = closing
        self.ended = False  # set by /control, on another thread
        self.closes = False  # the closing text is on its way

    def __call__(self, pieces: list[eng.Piece]) -> str:
        for piece in pieces:
            self.budget -= len(piece.ids) if self.pipeline.phase == "reasoning" else 0
            self.pipeline.feed(piece.text, piece.ids)
        if self.pipeline.phase != "reasoning":
            self.closes = False
        elif not self.closes and (self.budget <= 0 or self.ended):
            self.closes = True
            return self.closing
        return ""


# ==== Choices =====================================================================================


def prob_entry(model: Model, token_id: int, p: float, top: Any = None) -> dict[str, Any]:
    """One token's log-probability: the same object in OpenAI's and llama-server's forms."""
    data = model.backend.token_bytes(token_id)
    entry = {"id": token_id, "token": data.decode("utf-8", "replace"), "bytes": list(data)}
    entry["logprob"] = math.log(p) if p > 0 else -1e9  # JSON has no -Infinity
    if top is not None:
        entry["top_logprobs"] = [prob_entry(model, i, q) for i, q in top]
    return entry


def rates(name: str, n: int, seconds: float) -> str:
    """Half of llama-server's `timings`: "prompt" or "predicted"."""
    ms = seconds * 1e3
    text = f'"{name}_n":{n},"{name}_ms":{ms:.3f},"{name}_per_token_ms":{ms / (n or 1):.6f},'
    return text + f'"{name}_per_second":{n / ms * 1e3 if ms > 0 else 0.0:.6f}'


prompt_rates = lru_cache(512)(partial(rates, "prompt"))  # sent with every token, but made once


class Choice:
    """One answer to one prompt: its job, its text pipeline and what came of it so far."""

    def __init__(self, index: int, task: Task, model: Model, answer: Answer) -> None:
        self.index, self.task, self.model = index, task, model
        self.prompt, ids = task.prompts[index // task.n]
        self.n_prompt = len(ids)
        params = eng.GenerationParams(prompt_ids=ids, **task.params)
        params.max_tokens = min(params.max_tokens, model.info.n_ctx - len(ids))
        if params.seed is not None:
            params.seed += index % task.n  # n equal answers would be of no use
        params.grammar = task.grammars[index] if task.grammars else None
        self.pipeline = Pipeline(model.think, model.think_ids, task.in_thought, task.stops)
        self.lead = task.lead  # goes in front of the first delta; no stop is looked for in it
        if task.flag("echo") and task.dialect is TextDialect:
            self.lead = self.prompt if isinstance(self.prompt, str) else model.backend.decode(ids)
        tell, watch = answer.on_update, task.watch and task.watch()
        self.job = eng.Job(params, tell, tell, self, watch)
        self.last = eng.Update(self.job, progress=0)  # the newest figures
        self.n_decoded = 0  # tokens in what was sent
        self.stop_type = ""  # eos, limit or word, once it has ended
        # What was said, where it is needed as a whole
        self.deltas, self.tokens = list[Delta](), list[int]()
        self.waiting: list[list[dict[str, Any]]] = []  # log-probabilities of text that is not out
        self.probs: list[dict[str, Any]] = []  # those of text that is out, until they are sent

    def text_of(self, kind: str) -> str:
        return "".join(text for k, text in self.deltas if k == kind)

    def take_probs(self, piece: eng.Piece, deltas: list[Delta]) -> None:
        """A piece's log-probabilities wait for its text; those of a stop string are dropped."""
        if piece.probs is not None and (piece.text or piece.ids[0] not in self.model.info.eos_ids):
            pairs = zip(piece.ids, piece.probs, strict=True)
            self.waiting.append([prob_entry(self.model, i, p, top) for i, (p, top) in pairs])
        n_held = sum(len(scanner.held) for scanner in self.pipeline.scanners.values())
        out = len(deltas) if self.pipeline.stopped else len(self.waiting) - n_held
        self.probs += [entry for entries in self.waiting[:out] for entry in entries]
        del self.waiting[:out]

    def timings(self) -> bytes:
        """llama-server's `timings`, true at each token."""
        last, n = self.last, self.n_decoded
        text = prompt_rates(self.n_prompt - last.n_cached, last.prompt_s) + ","
        text += rates("predicted", n, last.predicted_s if n else 0.0)
        if last.n_draft:
            text += f',"draft_n":{last.n_draft},"draft_n_accepted":{last.n_draft_accepted}'
        return f'{{"cache_n":{last.n_cached},{text}}}'.encode()

    def progress(self) -> bytes:
        """llama-server's `prompt_progress`; at the first token all is processed."""
        processed = self.n_prompt if self.last.n_decoded else self.last.progress or 0
        waited = self.job.started and time.perf_counter() - self.job.started
        progress = {"total": self.n_prompt, "cache": min(processed, self.last.n_cached)}
        return dumps(progress | {"processed": processed, "time_ms": int(waited * 1e3)})


# ==== Dialects ====================================================================================
#
# A dialect turns deltas into frames and, without streaming, the choices' deltas into a body. As a
# grammar its events are, for every choice: (progress | piece)* end         once: close | error
# Each is a method that returns bytes: they are joined and leave in one write per request and step.
# How a delta is written and what an end is called are tables: a token is a template filled in.


class Dialect:
    """What every dialect has; errors in a stream and its end may be told otherwise."""

    keeps_deltas = False  # needs them also when it streams
    FINISH: ClassVar = {"eos": "stop", "word": "stop", "limit": "length"}  # by stop_type

    def __init__(self, task: Task, model: Model, choices: list[Choice]) -> None:
        self.task, self.model, self.choices = task, model, choices
        self.stream, self.per_token = task.flag("stream"), task.flag("timings_per_token")

    def figures(self, choice: Choice) -> bytes:
        return b',"timings":' + choice.timings() if self.per_token else b""

    def usage(self) -> dict[str, Any]:
        """Prompt tokens count once per prompt, not per choice."""
        firsts = self.choices[:: self.task.n]
        n_prompt, n_new = sum(c.n_prompt for c in firsts), sum(c.n_decoded for c in self.choices)
        n_all, n_cached = n_prompt + n_new, sum(c.last.n_cached for c in firsts)
        usage = {"completion_tokens": n_new, "prompt_tokens": n_prompt, "total_tokens": n_all}
        return usage | {"prompt_tokens_details": {"cached_tokens": n_cached}}

    def error(self, error: ApiError) -> bytes:
        return http11.sse_event(dumps(error.body()))

    def close(self) -> bytes:
        return b""


class OpenAIDialect(Dialect):
    """What OpenAI's two completion forms share: everything but how a delta and a choice look."""

    object = stream_object = ""
    MEMBERS: ClassVar[dict[str, bytes]] = {}  # how a delta of each kind is written
    opening = b""  # sent before the first delta of a choice, if anything
    nothing = no_probs = b""  # instead of a delta, of log-probabilities
    usage_at_end = False  # on the finish chunk, unless it has a chunk of its own

    def __init__(self, task: Task, model: Model, choices: list[Choice]) -> None:
        super().__init__(task, model, choices)
        self.common = {"created": int(time.time()), "id": "chatcmpl-" + token_hex(16)}
        self.common |= {"model": model.alias, "system_fingerprint": f"exl3-serve-{VERSION}"}
        # A chunk, but for: finish_reason, index, what is new, members behind the common ones
        common = dumps(self.common | {"object": self.stream_object})[1:-1].replace(b"%", b"%%")
        self.frame = b'data: {"choices":[{"finish_reason":%b,"index":%d,%b}],' + common + b"%b}\n\n"
        # A choice's opening goes in front of its first delta, or of its end
        first = [self.frame % (b"null", c.index, self.opening, b"") for c in choices]
        self.openings = dict(enumerate(first)) if self.opening else {}
        options = task.fields.get("stream_options") or {}
        self.usage_chunk = self.stream and options.get("include_usage") is True

    def progress(self, choice: Choice) -> bytes:
        """Not yet the opening, but it looks the same."""
        more = self.figures(choice) + b',"prompt_progress":' + choice.progress()
        return self.frame % (b"null", choice.index, self.opening or self.nothing, more)

    def piece(self, choice: Choice, deltas: list[Delta], ids: list[int]) -> bytes:
        """One chunk per delta, the log-probabilities on the first."""
        if not deltas:
            return b""
        out, more, probs = self.openings.pop(choice.index, b""), self.figures(choice), self.no_probs
        if choice.probs:
            probs, choice.probs = b',"logprobs":{"content":%b}' % dumps(choice.probs), []
        for kind, text in deltas:
            member = self.MEMBERS[kind] % json_string(text).encode() + probs
            out, probs = out + self.frame % (b"null", choice.index, member, more), self.no_probs
        return out

    def end(self, choice: Choice) -> bytes:
        more = b',"timings":' + choice.timings()
        if self.usage_at_end and not self.usage_chunk and all(c.stop_type for c in self.choices):
            more += b',"usage":' + dumps(self.usage())
        said = dumps(self.FINISH[choice.stop_type]), choice.index, self.nothing, more
        return self.openings.pop(choice.index, b"") + self.frame % said

    def whole(self, choices: list[Any], kind: str) -> bytes:
        answer = {"choices": choices} | self.common | {"object": kind, "usage": self.usage()}
        return dumps(answer)[:-1] + b',"timings":%b}' % self.choices[0].timings()

    def close(self) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        usage = http11.sse_event(self.whole([], self.stream_object)) if self.usage_chunk else b""
        return usage + b"data: [DONE]\n\n"

    def body(self) -> bytes:
        return self.whole([self.row(c) for c in self.choices], self.object)

    def row(self, choice: Choice) -> dict[str, Any]:
        """A choice as a whole; the forms add what was said."""
        return {"finish_reason": self.FINISH[choice.stop_type], "index": choice.index}


class ChatDialect(OpenAIDialect):
    """/v1/chat/completions, as llama-server and OpenAI write it."""

    object, stream_object = "chat.completion", "chat.completion.chunk"
    opening = b'"delta":{"role":"assistant","content":""}'
    nothing = b'"delta":{}'
    MEMBERS: ClassVar = {"content": b'"delta":{"content":%b}'}
    MEMBERS["reasoning"] = b'"delta":{"reasoning_content":%b}'

    def row(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text_of("content")}
        if thought := choice.text_of("reasoning"):
            message["reasoning_content"] = thought
        probs = {"logprobs": {"content": choice.probs}} if choice.probs else {}
        return super().row(choice) | {"message": message} | probs


class TextDialect(OpenAIDialect):
    """/v1/completions, OpenAI's legacy form."""

    object = stream_object = "text_completion"
    MEMBERS: ClassVar = {"content": b'"text":%b'}
    nothing, no_probs = b'"text":"","logprobs":null', b',"logprobs":null'
    usage_at_end = True

    def row(self, choice: Choice) -> dict[str, Any]:
        probs = {"content": choice.probs} if choice.probs else None
        return super().row(choice) | {"text": choice.text_of("content"), "logprobs": probs}


class LlamaDialect(Dialect):
    """/completion, llama-server's own form (server-task.cpp, server_task_result_cmpl_*)."""

    keeps_deltas = True  # for has_new_line
    EVENT = b'data: {"index":%d,"content":%b,"tokens":%a,"stop":false,"id_slot":%d,'
    EVENT += b'"tokens_predicted":%d,"tokens_evaluated":%d%b}\n\n'

    def event(self, choice: Choice, text: str, tokens: list[int], more: bytes = b"") -> bytes:
        said = choice.index, json_string(text).encode(), tokens, choice.job.id_slot
        return self.EVENT % (*said, choice.n_decoded, choice.n_prompt, self.figures(choice) + more)

    def progress(self, choice: Choice) -> bytes:
        return self.event(choice, "", [], b',"prompt_progress":' + choice.progress())

    def piece(self, choice: Choice, deltas: list[Delta], ids: list[int]) -> bytes:
        """One event per delta, the token ids on the last; a token whose text waits has its own."""
        if not (deltas or ids):
            return b""
        *texts, last = [text for _, text in deltas] or [""]
        out, more = b"".join(self.event(choice, text, []) for text in texts), b""
        if choice.probs:
            more, choice.probs = b',"completion_probabilities":' + dumps(choice.probs), []
        return out + self.event(choice, last, ids, more)

    def end(self, choice: Choice) -> bytes:
        return http11.sse_event(dumps(self.result(choice)))

    def body(self) -> bytes:
        results = [self.result(choice) for choice in self.choices]
        return dumps(results[0] if len(results) == 1 else results)

    def result(self, choice: Choice) -> dict[str, Any]:
        """The last event of a choice; without streaming also what was said."""
        text, n = choice.text_of("content"), choice.n_prompt + choice.n_decoded
        tokens = choice.tokens if self.task.flag("return_tokens") and not self.stream else []
        prompt, ids = choice.prompt, choice.job.params.prompt_ids
        full = choice.stop_type == "limit" and n >= self.model.info.n_ctx - 1
        whole = {"index": choice.index, "content": "" if self.stream else text, "tokens": tokens}
        whole |= {"id_slot": choice.job.id_slot, "stop": True, "model": self.model.alias}
        whole |= {"tokens_predicted": choice.n_decoded, "tokens_evaluated": choice.n_prompt}
        whole |= {"generation_settings": generation_settings(self.task.fields, self.task.params)}
        whole |= {"prompt": prompt if isinstance(prompt, str) else self.model.backend.decode(ids)}
        whole |= {"has_new_line": "\n" in text, "truncated": full, "stop_type": choice.stop_type}
        whole |= {"stopping_word": choice.pipeline.stopped, "tokens_cached": max(0, n - 1)}
        whole |= {"timings": json.loads(choice.timings())}
        whole |= {"completion_probabilities": choice.probs} if choice.probs else {}
        wanted = {path: member(whole, path) for path in self.task.fields.get("response_fields", ())}
        return {k: v for k, v in wanted.items() if v is not None} if wanted else whole


def member(value: Any, path: str) -> Any:
    """The member that a path as "timings/predicted_n" names; None when there is none."""
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def generation_settings(fields: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """llama-server's `generation_settings` and `params`: the effective values."""
    seed = 0xFFFFFFFF if params["seed"] is None else params["seed"]
    limit = next((fields[name] for name in LIMIT_FIELDS if name in fields), -1)
    settings = {"seed": seed, "max_tokens": limit, "n_predict": limit} | params["sampling"]
    settings |= {"n_keep": 0, "n_discard": 0, "min_keep": 0, "lora": []} | ABSENT_SAMPLERS
    settings |= {"mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_exponent": 1.0}
    settings |= {k: fields.get(k, False) for k in ("ignore_eos", "stream", "timings_per_token")}
    settings |= {"n_probs": max(0, params["n_probs"]), "grammar": fields.get("grammar", "")}
    biases = [{"token": i, "bias": max(b, -MAX_NUMBER)} for i, b in params["logit_bias"].items()]
    return settings | {"stop": parse_stops(fields.get("stop"), "stop"), "logit_bias": biases}


# ==== Answers =====================================================================================


class Answer:
    """One exchange with its choices, from the first job to the last byte."""

    def __init__(self, app: App, exchange: Exchange, task: Task) -> None:
        self.app, self.exchange, self.unsent = app, exchange, b""
        self.choices = [Choice(i, task, app.model, self) for i in range(task.n * len(task.prompts))]
        self.dialect = task.dialect(task, app.model, self.choices)
        self.stream = task.flag("stream")
        self.shows_progress = self.stream and task.flag("return_progress")
        self.keeps = not self.stream or task.dialect.keeps_deltas
        # After that the answer ends with the next line
        self.max_predict_s = max(0, task.fields.get("t_max_predict_ms", 0)) / 1e3 or INF

    def begin(self) -> None:
        """Queues the jobs and sends the head of a stream; 429 when the key's limit is reached."""
        self.began, key = time.perf_counter(), self.exchange.request.key
        self.key = key if key and key.limits else None  # whose use is counted
        if self.key:
            self.key.admit(len(self.choices))
        self.exchange.request.context = self
        self.exchange.on_gone = self.cancel
        self.app.answers.add(self)
        for choice in self.choices:
            self.app.engine.submit(choice.job)
        if self.stream:
            self.exchange.start(200, SSE_HEADERS)
            # The first progress, if it is asked for: nothing is processed yet
            self.on_update(self.choices[0].last)
            self.on_update()

    def cancel(self) -> None:
        """Nothing more is to be sent: all is said, the client is gone, or one choice failed. What
        still runs is not wanted."""
        if self.key and self in self.app.answers:
            self.key.release(self.dialect.usage()["total_tokens"], len(self.choices))
        self.app.answers.discard(self)
        for choice in self.choices:
            self.app.engine.cancel(choice.job)

    def on_update(self, update: eng.Update | None = None) -> None:
        """What one step says of one choice. None: the step is told to all, what it said is sent. To
        make all before any is sent costs a tenth less: either stays in the CPU's caches.
        """
        try:
            if update is None:
                frames, self.unsent = self.unsent, b""
                self.exchange.write(frames)
            elif not update.job.cancelled:  # else nothing more is wanted of it
                self.step(update.job.owner, update)
        except Exception:  # ours, not the client's: end this answer, keep the delivery going
            log.exception("an answer failed")
            with contextlib.suppress(Exception):  # it may be the last write that failed
                self.finish(ApiError(500, "internal error"))

    def step(self, choice: Choice, update: eng.Update) -> None:
        """Takes what is new."""
        first, choice.last = not choice.last.n_decoded, update
        # Not every step says something of the prompt
        if first and self.shows_progress and (update.progress is not None or update.n_decoded):
            self.unsent += self.dialect.progress(choice)
        for piece in update.pieces:
            self.feed(choice, piece, choice.pipeline.feed(piece.text, piece.ids))
            late = update.predicted_s > self.max_predict_s and "\n" in piece.text
            if choice.pipeline.stopped or late:
                self.app.engine.cancel(choice.job)
                choice.stop_type = "limit"
                break
        if choice.stop_type or update.end is not None:
            self.end(choice, update)

    def end(self, choice: Choice, update: eng.Update) -> None:
        """The end is one more piece: the text that was held."""
        if not choice.stop_type:
            if update.end in (eng.EndKind.FAILED, eng.EndKind.REFUSED):
                blamed = 400 if update.end is eng.EndKind.REFUSED else 500
                return self.finish(ApiError(503 if update.retry else blamed, update.error))
            choice.n_decoded = max(choice.n_decoded, update.n_decoded)
            choice.stop_type = "limit" if update.end is eng.EndKind.LIMIT else "eos"
        self.feed(choice, eng.Piece("", [], choice.n_decoded), choice.pipeline.finish())
        if choice.pipeline.stopped:  # perhaps only now, in text that was held
            choice.stop_type = "word"
        self.unsent += self.dialect.end(choice) if self.stream else b""
        if all(c.stop_type for c in self.choices):
            self.finish()

    def feed(self, choice: Choice, piece: eng.Piece, deltas: list[Delta]) -> None:
        choice.n_decoded = piece.n_decoded
        if piece.probs or choice.waiting:
            choice.take_probs(piece, deltas)
        if choice.lead and deltas:
            deltas, choice.lead = [("content", choice.lead), *deltas], ""
        if self.keeps:
            choice.deltas += deltas
            choice.tokens += piece.ids
        self.unsent += self.dialect.piece(choice, deltas, piece.ids) if self.stream else b""

    def finish(self, error: ApiError | None = None) -> None:
        """The last bytes. An error has its route's own form and never looks like success."""
        self.cancel()
        if self.stream:
            end = self.dialect.close() if error is None else self.dialect.error(error)
            self.exchange.end(self.unsent + end)
        elif error:
            self.exchange.respond(error_response(error))
        else:
            self.exchange.respond(Response(200, self.dialect.body(), JSON_HEADERS))

    def figures(self) -> dict[str, Any]:
        """For the audit log. Times are those of the first choice."""
        job, last = self.choices[0].job, self.choices[0].last
        queue_s = (job.started or time.perf_counter()) - self.began
        times = {"queue": queue_s, "prefill": last.prompt_s, "decode": last.predicted_s}
        row: dict[str, Any] = {f"{k}_ms": round(s * 1e3, 3) for k, s in times.items()}
        row["finish_reason"] = ",".join(Dialect.FINISH.get(c.stop_type, "") for c in self.choices)
        return row | {"model": self.app.model.alias} | self.dialect.usage()


JSON_HEADERS = [("Content-Type", "application/json; charset=utf-8")]


def error_response(error: ApiError) -> Response:
    return Response(error.status, dumps(error.body()), JSON_HEADERS + error.headers)


# ==== Keys and logs ===============================================================================


class Key:
    """A line of --api-key-file: KEY [name] [max_parallel=N] [rpm=N] [tpm=N] [admin]."""

    def __init__(self, line: str) -> None:
        """ValueError names a word that is not understood, and never the key."""
        secret, *words = line.split()
        limits = [re.fullmatch(r"(max_parallel|rpm|tpm)=([1-9]\d{0,8})", word) for word in words]
        names = [word for word, m in zip(words, limits, strict=True) if not m and word != "admin"]
        if len(names) > 1 or "=" in "".join(names):
            raise ValueError(f"{names[-1]!r} is not understood")
        self.secret, self.name, self.admin = secret.encode(), "".join(names), "admin" in words
        self.limits = {m[1]: int(m[2]) for m in limits if m}
        # Choices under way. Of the last minute: when one began, 0; when it ended, its tokens
        self.n_running, self.recent = 0, list[tuple[float, int]]()

    def admit(self, n: int = 1) -> None:
        """Counts one more answer, of n choices, or 429 when a limit is reached."""
        now = time.perf_counter()
        self.recent = [row for row in self.recent if row[0] > now - WINDOW_S]
        tokens = [n_tokens for _, n_tokens in self.recent]
        used = {"max_parallel": self.n_running + n - 1, "rpm": tokens.count(0), "tpm": sum(tokens)}
        for name, limit in self.limits.items():
            if used[name] >= limit:
                counted = [when for when, spent in self.recent if bool(spent) is (name == "tpm")]
                wait_s = 1 if name == "max_parallel" else counted[0] + WINDOW_S - now
                headers = [("Retry-After", f"{math.ceil(wait_s)}")]
                raise ApiError(429, f"this key's limit {name}={limit} is reached", headers=headers)
        self.n_running += n
        self.recent.append((now, 0))

    def release(self, n_tokens: int, n: int = 1) -> None:
        """Its answer has ended, after so many tokens of prompt and answer."""
        self.n_running -= n
        self.recent.append((time.perf_counter(), n_tokens))


class JsonLines(logging.Formatter):
    """--log-format json: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        return ENCODE(head | {"message": super().format(record)})


class AuditFile(logging.handlers.RotatingFileHandler):
    """The file of --audit-log. Each line goes to the kernel by itself: a crash loses none."""

    def handleError(self, record: logging.LogRecord) -> None:
        """With a full disk requests go on, and the lines are in the other log."""
        log.error("the audit log cannot be written: %s: %s", sys.exc_info()[1], record.msg)


# ==== Routes ======================================================================================


class App:
    """The surface: checks a request's head, finds its handler, runs it, answers errors."""

    def __init__(self, args: argparse.Namespace, keys: list[Key], local: bool) -> None:
        """`local`: only this machine can connect. `keys`: none of them means no key is asked."""
        self.args, self.keys, self.local = args, keys, local
        self.ready = False  # from then on there are self.model and self.engine
        self.progress, self.answers = 0.0, set[Answer]()  # of loading; under way
        # Requests in worker threads; the step that the log was told to hang
        self.n_slow, self.told = 0, 0.0
        self.pool = ThreadPoolExecutor(N_WORKERS, "worker")
        self.audit = args.audit_log and AuditFile(args.audit_log, "a", AUDIT_BYTES, N_AUDIT_FILES)
        self.scribe = ThreadPoolExecutor(1, "audit")  # writes it
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[str] = self.loop.create_future()  # why to stop; "" on a signal
        self.server_header = f"exl3-serve/{VERSION} exllamav3/unknown"

    # -- http11's App --

    def on_head(self, request: Request) -> Response | None:
        """Refuses what needs no body to be refused."""
        return self.attempt(request, self.route, request)

    def attempt(self, request: Request, action: Callable[..., Any], *args: Any) -> Any:
        """What the action returns; an error in it becomes the response to the request."""
        try:
            return action(*args)
        except ApiError as exc:
            error = exc
        except RecursionError:
            error = bad("the request is nested too deeply")
        except BaseException:  # ours, or a panic in Rust: 500 for this request, nothing for others
            log.exception("%s %s failed, id %s", request.method, request.path, request_id(request))
            error = ApiError(500, "internal error")
        return error_response(error)

    def route(self, request: Request) -> Response | None:
        """Finds what answers the request, and puts it into its context."""
        path, prefix = re.sub("/{2,}", "/", request.path), self.args.api_prefix
        path = path[len(prefix) :].rstrip("/") or "/" if f"{path}/".startswith(f"{prefix}/") else ""
        path = re.sub("^/slots/[^/]+$", "/slots/{id}", path)
        self.check_host(request)
        if request.method == "OPTIONS":
            names = request.headers.get("access-control-request-headers", "*")
            allow = {"Methods": "GET, POST, DELETE, OPTIONS", "Headers": names}
            return Response(200, b"", [(f"Access-Control-Allow-{k}", v) for k, v in allow.items()])
        file = None if path in ROUTES else file_under(self.args.path, path)
        methods = ROUTES.get(path) if file is None else {"GET": partial(get_file, file)}
        method = "GET" if request.method == "HEAD" else request.method
        if path not in OPEN_ROUTES and file is None:
            self.check_key(request, path)
        if methods is None:
            raise ApiError(404, "File Not Found")
        if method not in methods:
            usable = ", ".join([*methods, "OPTIONS", *["HEAD"] * ("GET" in methods)])
            raise ApiError(405, f"use {usable}", headers=[("Allow", usable)])
        request.context = methods[method]
        if file is None and not self.ready:
            raise ApiError(503, "Loading model", progress=round(self.progress, 3))
        if file is None and self.engine.fatal:
            raise ApiError(503, f"the engine has failed: {self.engine.fatal}")
        if isinstance(request.context, str):
            raise ApiError(501, f"this server does not support {request.context}")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "compressed request bodies are not read")
        return None

    def check_host(self, request: Request) -> None:
        """Without a key a web page must not drive the model: neither by rebinding a name to the
        loopback address (Host) nor by a plain cross-site POST (Origin)."""
        host, origin = request.headers.get("host", "localhost"), request.headers.get("origin")
        known = is_loopback(host) or bare_host(host) in self.args.allowed_hosts
        if self.local and not self.keys and not known:
            raise ApiError(403, f"Host {host!r} needs a key; see --allowed-hosts")
        if origin is not None and not self.origin_allowed(origin):
            raise ApiError(403, f"Origin {origin!r} needs a key; see --cors-origins")

    def origin_allowed(self, origin: str) -> bool:
        scheme, _, rest = origin.partition("://")
        local = scheme in ("http", "https") and is_loopback(rest)
        return bool(self.keys) or local or not {origin, "*"}.isdisjoint(self.args.cors_origins)

    def check_key(self, request: Request, path: str) -> None:
        key = request.key = self.key_of(request)
        if self.keys and key is None:
            raise ApiError(401, "Invalid API Key")
        if path in ADMIN_ROUTES and key and not key.admin and any(k.admin for k in self.keys):
            raise ApiError(403, "this route needs a key with the word admin")

    def key_of(self, request: Request) -> Key | None:
        scheme, _, token = request.headers.get("authorization", "").strip().partition(" ")
        texts = (token if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
        given = [text.strip().encode("latin-1") for text in texts if text.strip()]
        return next((k for k in self.keys for x in given if compare_digest(x, k.secret)), None)

    def on_done(self, request: Request | None, status: int) -> None:
        """A line of the audit log says what came of it, and nothing of its text."""
        if request is None or not self.audit:
            return
        row: dict[str, Any] = {"time": time.strftime("%FT%T%z"), "id": request_id(request)}
        row |= {"address": request.peer, "key": request.key.name if request.key else ""}
        row |= {"method": request.method[:20], "route": request.path[:100], "status": status}
        row |= request.context.figures() if isinstance(request.context, Answer) else {}
        self.scribe.submit(self.audit.emit, logging.makeLogRecord({"msg": dumps(row).decode()}))

    def common_headers(self, request: Request | None) -> list[tuple[str, str]]:
        headers = [("Server", self.server_header), ("X-Request-Id", request_id(request))]
        origin = request.headers.get("origin") if request else None
        if origin is not None and self.origin_allowed(origin):
            headers += [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")]
        return headers

    def error(self, status: int, message: str, request: Request | None) -> Response:
        return error_response(ApiError(status, message))

    def on_request(self, exchange: Exchange) -> None:
        """Runs the handler: at once when that is cheap, else in a worker thread."""
        request = exchange.request
        call = partial(self.attempt, request, self.call, request)
        if len(request.body) <= INLINE_BODY_BYTES and not SLOW_WORDS.search(request.body):
            return self.finish(exchange, call())
        self.set_slow(+1)
        work = self.pool.submit(lambda: exchange.gone or call())
        asyncio.wrap_future(work).add_done_callback(lambda f: self.finish(exchange, f.result(), 1))

    def set_slow(self, change: int) -> None:
        """While a worker thread runs Python, threads give way to each other ten times as often:
        exllamav3 asks for the GIL at every torch call. Always so, it would cost steps."""
        self.n_slow += change
        sys.setswitchinterval(0.0005 if self.n_slow else 0.005)

    def call(self, request: Request) -> Task | Response:
        """What the handler makes of the request. In any thread."""
        handler, body = request.context, request.body
        request.body = b""  # it may be large, and the answer long
        kind = list if handler is post_lora_adapters else dict
        result = handler(self, loads(body, kind) if request.method == "POST" else request.query)
        done = isinstance(result, (Task, Response))
        return result if done else Response(200, dumps(result), JSON_HEADERS)

    def finish(self, exchange: Exchange, result: Any, slow: int = 0) -> None:
        """Sends a Response, or begins the answer to a Task."""
        self.set_slow(-slow)
        if isinstance(result, Task) and not exchange.gone:
            result = self.attempt(exchange.request, lambda: Answer(self, exchange, result).begin())
        if isinstance(result, Response):
            exchange.respond(result)

    # -- housekeeping --

    def tick(self) -> None:
        """Once a second: a comment on streams that were silent for long (proxies, SDK timeouts)."""
        silent = time.perf_counter() - self.args.sse_ping_interval
        for answer in list(self.answers):
            if answer.stream and answer.exchange.last_write < silent:
                answer.exchange.write(SSE_PING)
        self.loop.call_later(1.0, self.tick)
        if self.ready and self.stuck_s() and self.engine.step_started != self.told:
            self.told, frames = self.engine.step_started, sys._current_frames()
            stack = "".join(traceback.format_stack(frames.get(self.engine.thread.ident or 0)))
            log.error("the engine has been in one step for %.1f s:\n%s", self.stuck_s(), stack)
            if self.args.on_step_timeout == "fatal":
                self.engine.fatal = f"one step took more than {self.args.step_timeout:g} s"
                self.stop(self.engine.fatal)

    def stuck_s(self) -> float:
        """How long the engine has been in one step, if that is longer than --step-timeout."""
        took_s = self.engine.step_started and time.perf_counter() - self.engine.step_started
        return took_s if 0 < self.args.step_timeout < took_s else 0.0

    def reload_keys(self) -> None:
        """On SIGHUP. The keys' counts start anew; a file with a mistake changes nothing."""
        if self.audit:  # somebody may have moved its file: the next line opens it anew
            self.scribe.submit(self.audit.close)
        try:
            self.keys = read_keys(self.args)
        except eng.LoadError as exc:
            log.error("the keys stay as they were: %s", exc)

    def loaded(self, backend: eng.Backend, model: Model) -> None:
        version = backend.info.engine.get("version", "unknown")
        self.server_header = f"exl3-serve/{VERSION} exllamav3/{version}"
        self.engine = eng.Engine(backend, self.args.parallel, self.loop, on_fatal=self.stop)
        self.engine.max_recoveries = self.args.recovery_attempts
        self.model, self.ready = model, True
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
            # On a core that they share the engine goes on with its next step when it hands over a
            # batch, and the event loop sends it when the engine waits
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def stop(self, reason: str = "") -> None:
        """Begins the end: a signal, a failed load or a dead engine. A second signal is at once."""
        if not self.done.done():
            self.done.set_result(reason)
        elif not reason:
            os._exit(130)


def request_id(request: Request | None) -> str:
    """What the client calls its request, or a new name for it."""
    headers = request.headers if request else {}
    return headers.setdefault("x-request-id", token_hex(8))[:100].strip()


# Bodies that mention one of these, or spell a name with escapes, may take long to prepare
SLOW_WORDS = re.compile(rb'"(?:grammar|lark|json_schema|response_format|tools)"|\\u00')


def bare_host(host: str) -> str:
    """Without port and brackets: "[::1]:80" -> "::1"."""
    match = re.fullmatch(r"\[(.*)\](:\d+)?|([^:]*)(:\d+)?", host)
    return (match[1] or match[3] or "").lower() if match else host


def is_loopback(host: str) -> bool:
    return re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", bare_host(host)) is not None


def get_health(app: App, body: dict[str, Any]) -> Any:
    if stuck_s := app.stuck_s():
        raise ApiError(503, f"the engine has been in one step for {stuck_s:.0f} s")
    return {"status": "ok"}


def get_props(app: App, body: dict[str, Any]) -> Any:
    model = app.model
    params = generation_settings({}, generation_params(model, {}))
    settings = {"params": params, "n_ctx": model.info.n_ctx}
    props = {"default_generation_settings": settings, "total_slots": app.args.parallel}
    props |= {"model_alias": model.alias, "model_path": model.info.model_dir}
    props |= {"modalities": {"vision": False, "video": False, "audio": False}}
    endpoints = {"slots": app.args.slots, "props": False, "metrics": app.args.metrics}
    props |= {f"endpoint_{name}": served for name, served in endpoints.items()}
    props |= {name: model.specials.get(name, "") for name in ("bos_token", "eos_token")}
    return props | {"chat_template": model.template_text, "engine": model.info.engine}


def get_slots(app: App, query: dict[str, str]) -> Any:
    if not app.args.slots:
        raise ApiError(501, "this server does not show its slots: it was started with --no-slots")
    slots = list(app.engine.slots)
    if query.get("fail_on_no_slot") and None not in slots:
        raise ApiError(503, "no slot available")
    rows = []
    for i, job in enumerate(slots):
        row: dict[str, Any] = {"id": i, "n_ctx": app.model.info.n_ctx, "speculative": False}
        row |= {"is_processing": job is not None, "n_past": 0}
        if job is not None:
            last, choice = job.last or eng.Update(job), job.owner
            n, n_prompt = last.n_decoded, choice.n_prompt
            n_taken, n_left = n_prompt if n else last.progress or 0, job.params.max_tokens - n
            n_cached = min(n_taken, last.n_cached)
            row |= {"n_past": n_taken + n, "id_task": job.id_task, "n_prompt_tokens": n_prompt}
            row |= {"n_prompt_tokens_cache": n_cached, "n_decoded": n, "n_remain": n_left}
            row["n_prompt_tokens_processed"] = n_taken - n_cached
            row["next_token"] = [{"has_next_token": True, "n_remain": n_left, "n_decoded": n}]
            params = generation_settings(choice.task.fields, choice.task.params)
            row["params"] = {k: v for k, v in params.items() if k not in REQUEST_TEXTS}
        rows.append(row)
    return rows


# Of generation_settings what is not shown to others
REQUEST_TEXTS = ("dry_sequence_breakers", "stop", "grammar", "logit_bias")
# llama-server's names, and whose figure of eng.Engine.totals each is
COUNTERS = {"prompt_tokens_total": "n_evaluated", "prompt_tokens_cached_total": "n_cached"}
COUNTERS |= {"prompt_seconds_total": "prompt_s", "tokens_predicted_total": "n_decoded"}
COUNTERS |= {"tokens_predicted_seconds_total": "predicted_s", "n_tokens_max": "n_tokens_max"}
COUNTERS |= {"spec_decode_num_draft_tokens_total": "n_draft", "n_decode_total": "n_steps"}
COUNTERS |= {"spec_decode_num_accepted_tokens_total": "n_draft_accepted"}


def get_metrics(app: App, query: dict[str, str]) -> Response:
    """For Prometheus. A job counts when it has ended; exl3_serve: is what llama-server has not."""
    if not app.args.metrics:
        raise ApiError(501, "this server does not support metrics: start it with --metrics")
    engine, total, started = app.engine, app.engine.totals, app.engine.step_started
    rows = {f"llamacpp:{name}": total[key] for name, key in COUNTERS.items()}
    rows["llamacpp:prompt_tokens_seconds"] = total["n_evaluated"] / (total["prompt_s"] or 1)
    rows["llamacpp:predicted_tokens_seconds"] = total["n_decoded"] / (total["predicted_s"] or 1)
    rows["llamacpp:requests_processing"] = len(engine.slots) - engine.slots.count(None)
    rows["llamacpp:requests_deferred"] = len(engine.waiting)
    rows["llamacpp:n_busy_slots_per_decode"] = total["n_busy"] / (total["n_steps"] or 1)
    rows["exl3_serve:recoveries_total"] = len(engine.recoveries)
    rows["exl3_serve:step_seconds"] = time.perf_counter() - started if started else 0.0
    text = ""
    for name, value in rows.items():
        kind = "counter" if name.endswith(("_total", "_max")) else "gauge"
        text += f"# TYPE {name} {kind}\n{name} {value:.12g}\n"
    return Response(200, text.encode(), [("Content-Type", "text/plain; version=0.0.4")])


def post_lora_adapters(app: App, adapters: list[Any]) -> Any:
    check(adapters, "lora", FIELDS["lora"])
    return {"success": True}


def post_input_tokens(app: App, body: dict[str, Any]) -> Any:
    prompt = render_chat(app.model, checked(body))[0]
    return {"input_tokens": len(app.model.tokenize(prompt)), "object": "response.input_tokens"}


def post_control(app: App, body: dict[str, Any]) -> Any:
    """Ends the thought of a chat that is running and was sent with `reasoning_control`."""
    name = check(body.get("id"), "id", Field(str, 1))
    check(body.get("action"), "action", Field(("reasoning_end",)))
    found = [a for a in list(app.answers) if getattr(a.dialect, "common", {}).get("id") == name]
    watches: list[Any] = [choice.job.watch for answer in found for choice in answer.choices]
    if None in watches:
        return {"success": False, "message": "reasoning control not enabled for this completion"}
    for watch in watches:
        watch.ended = True
    message = {} if watches else {"message": "no active completion for this id"}
    return {"success": bool(watches)} | message


def file_under(folder: str | None, path: str) -> Path | None:
    """The file in the --path directory that a request names. Nothing hidden, no link that leads
    out of it; of a directory its index.html."""
    if not folder or not path or re.search(r"/\.|\0", path):
        return None
    root = Path(os.path.realpath(folder))  # resolve() raises where links go in a circle
    files = [Path(os.path.realpath(f"{root}{path}{index}")) for index in ("", "/index.html")]
    return next((f for f in files if f.is_relative_to(root) and os.path.isfile(f)), None)


def get_file(file: Path, app: App, query: dict[str, str]) -> Response:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return Response(200, file.read_bytes(), [("Content-Type", kind)])


def get_models(app: App, body: dict[str, Any]) -> Any:
    model = app.model
    facts = model.info.engine.get("model", {})
    meta = {"n_vocab": model.info.n_vocab, "n_ctx": model.info.n_ctx}
    names = {"n_ctx_train": "ctx_train", "n_params": "params", "size": "bytes"}
    meta |= {name: facts[fact] for name, fact in names.items() if fact in facts}
    row = {"id": model.alias, "object": "model", "created": int(time.time()), "meta": meta}
    return {"object": "list", "data": [row | {"owned_by": "exl3-serve"}]}


def post_tokenize(app: App, body: dict[str, Any]) -> Any:
    model = app.model
    encode = partial(model.tokenize, special=body.get("parse_special") is not False, name="content")
    bos = model.bos if body.get("add_special") is True else []
    ids = bos + parts_ids(model, body.get("content", ""), "content", encode)
    if body.get("with_pieces") is not True:
        return {"tokens": ids}
    check(len(ids), "content (tokens with pieces)", Field(int, 0, MAX_PIECES))
    return {"tokens": [{"id": i, "piece": piece_of(model.backend.token_bytes(i))} for i in ids]}


def piece_of(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no whole text."""
    text = data.decode(errors="replace")
    return text if text.encode() == data else list(data)


def post_detokenize(app: App, body: dict[str, Any]) -> Any:
    model, tokens = app.model, check(body.get("tokens", []), "tokens", Field(list))
    return {"content": model.backend.decode(check_ids(tokens, "tokens", model.info.n_vocab))}


def post_apply_template(app: App, body: dict[str, Any]) -> Any:
    return {"prompt": render_chat(app.model, checked(body))[0]}


def generating(prepare: Callable[..., Task], dialect: type) -> Callable[[App, Any], Task]:
    return lambda app, body: prepare(dialect, app.model, body)


# What answers: given the app and a POST's JSON or the query of a GET. A text is what is not
# supported here: 501
ROUTE_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/health /v1/health", get_health),
    ("GET", "/props", get_props),
    ("GET", "/slots", get_slots),
    ("POST", "/slots/{id}", "saving, restoring and erasing slots"),
    ("GET", "/metrics", get_metrics),
    ("GET", "/lora-adapters", lambda app, query: []),
    ("POST", "/lora-adapters", post_lora_adapters),
    ("GET", "/models /v1/models", get_models),
    ("POST", "/tokenize", post_tokenize),
    ("POST", "/detokenize", post_detokenize),
    ("POST", "/apply-template", post_apply_template),
    ("POST", "/completion /completions", generating(prepare_completion, LlamaDialect)),
    ("POST", "/v1/completions", generating(prepare_completion, TextDialect)),
    ("POST", "/chat/completions /v1/chat/completions", generating(prepare_chat, ChatDialect)),
    ("POST", "/chat/completions/input_tokens /v1/chat/completions/input_tokens", post_input_tokens),
    ("POST", "/v1/chat/completions/control", post_control),
    ("POST", "/infill", generating(prepare_infill, LlamaDialect)),
    ("POST", "/embedding /embeddings /v1/embeddings", "embeddings"),
    ("POST", "/rerank /reranking /v1/rerank /v1/reranking", "reranking"),
    ("POST", "/audio/transcriptions /v1/audio/transcriptions", "audio"),
)
ROUTES: dict[str, dict[str, Any]] = {}  # path -> method -> what answers
for method, paths, handler in ROUTE_ROWS:
    for path in paths.split():
        ROUTES.setdefault(path, {})[method] = handler
# Served without a key: probes must work, and llama-server leaves these open
ADMIN_ROUTES = ("/slots", "/slots/{id}", "/metrics")  # once there is a key with the word admin
OPEN_ROUTES = ("/health", "/v1/health", "/models", "/v1/models", "/")


# ==== Options and main ============================================================================


SOCKETS = "EXL3_SERVE_SOCKETS"  # environment: numbers of the listening sockets after a restart
# What llama-server takes for it in the environment
TRUE, FALSE = ("1", "on", "true", "enabled"), ("0", "off", "false", "disabled")
FLAG: dict[str, Any] = {"action": "store_true"}
ON_OFF = {"action": argparse.BooleanOptionalAction, "default": True}
EFFORT, DRAFT_N = {"choices": EFFORTS}, {"type": int, "dest": "num_draft_tokens"}
NO_SPLIT = {"action": "store_const", "const": "none", "dest": "reasoning_format"}


def json_object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


words = partial(re.findall, r"[^,\s]+")  # of a list with commas
WORDS = {"type": words, "default": []}
PREFIX = {"type": lambda text: ("/" + text.strip("/")).rstrip("/"), "default": ""}
ON_FATAL = ("exit", "restart") if hasattr(os, "fork") else ("exit",)
# flags, environment variable, a default or a type or choices or what argparse is told, help;
# llama-server's names where it has one
OPTIONS: tuple[tuple[str, str, Any, str], ...] = (
    ("--config", "", str, "YAML or JSON file: any option by its long name"),
    ("--host", "LLAMA_ARG_HOST", "127.0.0.1", "address, name or path ending in .sock"),
    ("--port", "LLAMA_ARG_PORT", 8080, "TCP port; 0 picks one and prints it"),
    ("-np --parallel", "LLAMA_ARG_N_PARALLEL", 2, "slots; more requests wait"),
    ("-a --alias", "LLAMA_ARG_ALIAS", str, "the model's name in answers"),
    ("--api-key", "LLAMA_API_KEY", words, "key that clients must send; several with commas"),
    (
        "--api-key-file",
        "LLAMA_ARG_API_KEY_FILE",
        str,
        "a line: KEY [name] [max_parallel=N] [rpm=N] [tpm=N] [admin]",
    ),
    ("--audit-log", "", str, "file that gets a JSON line per request, without its text"),
    ("--log-format", "", ("text", "json"), "of the log on stderr"),
    ("--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE", str, "certificates in PEM: serves HTTPS"),
    ("--ssl-key-file", "LLAMA_ARG_SSL_KEY_FILE", str, "its key, if that is in another file"),
    ("--allowed-hosts", "", WORDS, "Host names served without a key, besides loopback"),
    ("--cors-origins", "LLAMA_ARG_CORS_ORIGINS", WORDS, "likewise web origins; or *"),
    ("--path", "LLAMA_ARG_STATIC_PATH", str, "directory of a web UI, served at / without a key"),
    ("--api-prefix", "LLAMA_ARG_API_PREFIX", PREFIX, "what all paths begin with, as /llm"),
    ("--metrics", "LLAMA_ARG_ENDPOINT_METRICS", FLAG, "serve /metrics, for Prometheus"),
    ("--slots", "LLAMA_ARG_ENDPOINT_SLOTS", ON_OFF, "serve /slots; --no-slots: do not"),
    ("--jinja", "", FLAG, "has no effect: templates always are Jinja's"),
    ("-to --timeout", "LLAMA_ARG_TIMEOUT", 30.0, "seconds a peer may stall"),
    ("--max-tokens-cap", "", 4096, "most tokens of an answer; 0: the context"),
    ("--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE", str, "instead of the model's own"),
    ("--chat-template-kwargs", "LLAMA_ARG_CHAT_TEMPLATE_KWARGS", json_object, "JSON object"),
    ("--reasoning-format", "LLAMA_ARG_THINK", REASONING_FORMATS, "none: thoughts are content"),
    ("--no-think-split", "", NO_SPLIT, "the same as --reasoning-format none"),
    ("--reasoning-effort", "LLAMA_ARG_REASONING_EFFORT", EFFORT, "for templates that know efforts"),
    ("--reasoning-budget", "LLAMA_ARG_THINK_BUDGET", -1, "tokens of a thought; -1: no limit"),
    ("--reasoning-budget-message", "LLAMA_ARG_THINK_BUDGET_MESSAGE", str, "ends a thought cut so"),
    ("-s --seed", "", -1, "-1: another one for every request"),
    ("--temperature --temp", "LLAMA_ARG_TEMPERATURE", float, "default of requests; 0: greedy"),
    ("--draft-n", "", DRAFT_N, "draft tokens a step; 1 with -mtp alone"),
    ("--dyn-draft", "", FLAG | {"dest": "dynamic_draft"}, "adapt the draft length"),
    ("--sse-ping-interval", "LLAMA_ARG_SSE_PING_INTERVAL", 30.0, "seconds of silence in a stream"),
    ("--drain-seconds", "", 5.0, "time for running requests on a signal"),
    ("--step-timeout", "", 0.0, "seconds a step may take; 0: no limit"),
    ("--on-step-timeout", "", ("report", "fatal"), "report: in the log and /health"),
    ("--recovery-attempts", "", 3, "restarts of a failed generator in 60 s"),
    ("--on-fatal", "", ON_FATAL, "restart: the process anew, with the same listening sockets"),
    ("--fake", "", FLAG, "no model: a scripted engine for trying clients"),
    ("--fake-delay", "", 0.0, "seconds a step of the fake engine takes"),
    ("--fake-script", "", str, "file with a JSON list of pieces to say"),
)
for name in ("top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
    flag, env = f"--{name.replace('_', '-')}", f"LLAMA_ARG_{name.upper()}"
    OPTIONS += (
        (flag, env, FIELDS[name].kind, f"default of requests; {eng.NEUTRAL_SAMPLING[name]:g}: off"),
    )


def make_parser() -> argparse.ArgumentParser:
    about = "Serves one EXL3 model on llama-server's HTTP surface."
    parser = argparse.ArgumentParser("exl3_serve.py", description=about, allow_abbrev=False)
    eng.add_model_args(parser)
    title = "server (llama-server's names; where exllamav3 has the same, exllamav3's flag wins)"
    own = parser.add_argument_group(title)
    for flags, env, told, text in OPTIONS:
        if isinstance(told, tuple):
            told = {"choices": told, "default": told[0]}
        elif not isinstance(told, dict):
            told = {"type": told} if callable(told) else {"type": type(told), "default": told}
        own.add_argument(*flags.split(), help=f"{text} [{env}]" if env else text, **told)
    own.add_argument("--version", action="version", version=f"exl3-serve {VERSION}")
    return parser


def read_config(path: str) -> dict[str, Any]:
    with eng.naming(f"--config {path}"):
        import yaml

        settings = dict(yaml.safe_load(Path(path).read_text("utf-8")) or {})
    return settings


def as_argv(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> list[str]:
    """Settings by the long names of options, as they would stand on the command line."""
    argv, known = [], parser._option_string_actions
    for key, value in settings.items():
        flag, value = f"--{key}", ",".join(map(str, value)) if isinstance(value, list) else value
        if flag not in known:
            parser.error(f"--config: there is no option {flag}")
        text = json.dumps(value, default=str) if isinstance(value, dict) else str(value)
        if known[flag].nargs == 0 and text.lower() in TRUE + FALSE:
            flag = flag if text.lower() in TRUE else f"--no-{key}"
            argv += [flag] if flag in known else []
        elif value is not None:
            argv.append(f"{flag}={text}")
    return argv


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and all of them as a command line: of what is given twice the last wins, so
    the configuration file stands first, then the environment."""
    parser = make_parser()
    rows = [(flags.split()[-1][2:], env) for flags, env, *_ in OPTIONS]
    argv = as_argv(parser, {key: os.environ[env] for key, env in rows if env in os.environ}) + argv
    args = parser.parse_args(argv)
    if args.config:
        argv = as_argv(parser, read_config(args.config)) + argv
        args = parser.parse_args(argv)
    if min(args.parallel - 1, args.max_tokens_cap, args.fake_delay) < 0 or not args.timeout > 0:
        parser.error("one of --parallel --max-tokens-cap --fake-delay --timeout is too small")
    if args.path and not Path(args.path).is_dir():
        parser.error(f"--path {args.path} is no directory")
    if args.ssl_key_file and not args.ssl_cert_file:
        parser.error("--ssl-key-file needs --ssl-cert-file")
    if not args.fake and not args.model_dir:
        parser.error("-m/--model_dir is needed (or --fake)")
    return args, argv


def tls_context(args: argparse.Namespace) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with eng.naming("no certificate and key in --ssl-cert-file and --ssl-key-file"):
        context.load_cert_chain(args.ssl_cert_file, args.ssl_key_file)
    return context


def read_keys(args: argparse.Namespace) -> list[Key]:
    path = args.api_key_file
    with eng.naming(f"--api-key-file {path}"):
        lines = Path(path).read_text("utf-8-sig").splitlines() if path else []
        keys = [Key(line) for line in [*(args.api_key or []), *lines] if line.split("#")[0].strip()]
    if not keys and (path or args.api_key is not None):
        raise eng.LoadError("there is no key in --api-key or --api-key-file")
    return keys


def load_model(app: App, args: argparse.Namespace, argv: list[str]) -> None:
    """The loader thread: reports to the event loop what came of it."""

    def on_progress(n_loaded: int, n_modules: int) -> None:
        app.progress = n_loaded / max(1, n_modules)

    try:
        backend = eng.load(args, args.parallel, argv, on_progress)
        model = Model(backend, args)
        app.loop.call_soon_threadsafe(app.loaded, backend, model)
    except BaseException as exc:  # anything: the operator gets one line, the process ends
        line = f"{type(exc).__name__}: {' '.join(str(exc).split())[:500]}"
        app.loop.call_soon_threadsafe(app.stop, f"cannot load the model: {line}")


async def serve(args: argparse.Namespace, argv: list[str]) -> int:
    """Binds, answers 503 while the model loads, serves until a signal or a failed load."""
    if not args.fake and not Path(args.model_dir, "config.json").is_file():
        raise OSError(f"cannot load the model: there is no config.json in {args.model_dir}")
    tls, keys = tls_context(args) if args.ssl_cert_file else None, read_keys(args)
    sockets = [socket.socket(fileno=int(n)) for n in os.environ.pop(SOCKETS, "").split()]
    sockets = sockets or bind(args.host or "127.0.0.1", args.port)
    urls = [url_of(sock, "https" if tls else "http") for sock in sockets]
    local = all(url[:5] == "unix:" or is_loopback(url.partition("://")[2]) for url in urls)
    app = App(args, keys, local)
    n_files = 1024
    with contextlib.suppress(ImportError):  # Windows
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        n_files = min(Limits.connections + SPARE_FILES, hard if hard > 0 else 10**9)
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard))
    t, n = args.timeout, max(SPARE_FILES, n_files - SPARE_FILES)
    server = Server(app, Limits(header_timeout=t, body_timeout=t, write_timeout=t, connections=n))
    await server.serve(sockets, tls)
    hangup = "SIGHUP" if args.api_key_file or args.audit_log else ""  # else it ends the process
    for name, act in {"SIGINT": app.stop, "SIGTERM": app.stop, hangup: app.reload_keys}.items():
        if number := getattr(signal, name, None):  # Windows has no SIGHUP, nor add_signal_handler
            signal.signal(number, lambda *_, act=act: app.loop.call_soon_threadsafe(act))
    log.info("listening on %s", " and ".join(urls))
    if not app.keys and not app.local:
        log.warning("no --api-key: anyone who reaches this address can use the model")
    threading.Thread(target=load_model, args=(app, args, argv), daemon=True).start()
    app.tick()
    if failure := await app.done:
        log.error("%s", failure)
    restarts = app.ready and bool(app.engine.fatal) and args.on_fatal == "restart"
    if not restarts:
        server.stop_accepting()
        await server.wait_idle(0 if failure else args.drain_seconds)
    for answer in list(app.answers):
        answer.finish(ApiError(503, "the server is shutting down"))
    await server.wait_idle(0.5)
    server.close()
    await asyncio.sleep(0.1)  # the audit log hears of each in the next turns of the loop
    # All its lines are written; but a disk that hangs must not keep the process
    await asyncio.wait([asyncio.wrap_future(app.scribe.submit(int))], timeout=2)
    if restarts:
        restart(sockets)
    if app.ready:
        app.engine.close()
        return 70 if app.engine.fatal else 0  # sysexits.h EX_SOFTWARE
    return 1 if failure else 0


def restart(sockets: list[socket.socket]) -> None:
    """This process anew, with its listening sockets: clients wait in them while it loads."""
    for sock in sockets:
        sock.set_inheritable(True)
    os.environ[SOCKETS] = " ".join(str(sock.fileno()) for sock in sockets)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def url_of(sock: Any, scheme: str) -> str:
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        args, argv = parse_options(sys.argv[1:] if argv is None else argv)
        if args.log_format == "json":
            logging.getLogger().handlers[0].setFormatter(JsonLines())
        code = asyncio.run(serve(args, argv))
    except (OSError, eng.LoadError) as exc:
        print(f"exl3-serve: {exc}", file=sys.stderr)
        return 1
    # exllamav3 ends its worker processes when the interpreter exits: two seconds for that. Threads
    # may still be in native code, which an ordinary exit would wait for
    threading.Timer(2.0, os._exit, (code,)).start()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

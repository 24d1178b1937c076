"""The model: loading, jobs, steps and figures. Knows nothing of HTTP, JSON bodies or API dialects.

One thread, `Engine._run`, owns the backend: nothing else calls `submit`, `cancel`, `iterate`
or `inject` of it. The event loop talks to that thread through a deque of commands and hears back in
batches, one `loop.call_soon_threadsafe` per step, never one per token:

    event loop:     Engine.submit / cancel -> commands
    engine thread:  commands -> admit waiting jobs to free slots -> backend.iterate() -> batch
                    -> job.watch, which may have a text injected before the next step
    event loop:     Engine._on_batch -> job.on_update(update) for each job of the batch, and when
                    all have heard theirs job.on_told(): what is sent is made first, for all

The hand-over is bounded: with MAX_UNDELIVERED batches not yet taken the engine thread waits, so a
slow event loop slows the model instead of piling up tokens. The thread sleeps on an event when
there is neither a job nor a command.

What a job's listener sees, always, as a grammar (tests/test_engine.py holds it):

    waiting: started? progress* token* (done | cancelled | failed)          exactly one end

A *slot* is held exactly by a job that was handed to the backend and has not ended. More jobs than
slots wait first in, first out. A job that fails alone ends alone; when `iterate` raises, every job
in a slot fails, the backend is rebuilt over the loaded model and the waiting jobs go on
(`_recover`); when that fails too, the engine is dead and says why in `Engine.fatal`.

Two backends keep one contract, told at `FakeBackend` (no torch, deterministic, paced; for trying
clients and for tests); the other is `Exl3Backend` (the real exllamav3). torch and exllamav3 are
imported only inside functions that need a real model: importing exllamav3 can compile CUDA code
for minutes, and `--help` and `--fake` must start at once.

Units: tokens are counted in `n_*`, times are seconds as `*_s` (they become milliseconds where
they are written on the wire), sizes are `*_bytes`. Token ids are plain Python ints here.

Not here, on purpose: stop *strings*, reasoning tags and tool calls (text matters, exl3_serve.py),
sampling defaults (requests decide), HTTP.

Reading order: data, fake, exllamav3 backend, engine thread.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import copy
import importlib.util
import itertools
import json
import logging
import os
import re
import threading
import time
from argparse import ArgumentParser, Namespace
from asyncio import AbstractEventLoop
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from math import inf, prod
from pathlib import Path
from typing import Any

log = logging.getLogger("exl3_serve.engine")

# ==== Limits ======================================================================================

MAX_UNDELIVERED = 2  # batches the event loop may lag behind the engine thread (design, section 2)
REQUEUE_TOKENS = 2048  # a job too big for its share of the cache takes it in rounds of this many
FAKE_CHUNK = 512  # prompt tokens the fake engine takes per step, llama-server's n_ubatch
MAX_GRAMMARS = 64  # compiled ones kept for the next request with the same
RECOVERY_WINDOW_S = 60.0  # Engine.max_recoveries are counted within this time

# Sampling keys the engine understands: llama-server's names, each with the value that turns it off.
NEUTRAL_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEUTRAL_SAMPLING |= {"xtc_probability": 0.0, "xtc_threshold": 0.1, "repeat_penalty": 1.0}
NEUTRAL_SAMPLING |= {"repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL_SAMPLING |= {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2}
NEUTRAL_SAMPLING |= {"dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n", ":", '"', "*"]}
NEUTRAL_SAMPLING |= {"adaptive_target": -1.0, "adaptive_decay": 0.9}
NEUTRAL_SAMPLING["samplers"] = "penalties dry top_k top_p min_p xtc temperature".split()


# ==== Errors ======================================================================================


class LoadError(Exception):
    """The model cannot be loaded or served as asked; the text is one line for the operator."""


class BadGrammar(ValueError):
    """A grammar or schema that does not compile; the text is the compiler's reason."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Whatever fails in the block becomes a LoadError that names the file or option."""
    try:
        yield
    except Exception as exc:
        raise LoadError(f"{what}: {' '.join(str(exc).split())}") from exc


# ==== Data ========================================================================================


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is fixed once a model is loaded. Token ids are ints, pieces are text."""

    model_dir: str
    n_ctx: int  # tokens one request may use: prompt and answer together
    n_vocab: int
    engine: dict[str, Any]  # the `engine` block of /props
    # every token that ends an answer (config, tokenizer, generation config)
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None = None
    add_bos: bool = False  # the tokenizer puts BOS in front of a text
    special_ids: frozenset[int] = frozenset()  # control tokens: shown only where a request wants it


@dataclass(slots=True)
class GenerationParams:
    """One choice to generate. Validated before it gets here: nothing in it may raise later."""

    prompt_ids: list[int]
    max_tokens: int  # 0: the prompt is evaluated, nothing generated
    sampling: dict[str, Any] = field(default_factory=dict)  # see NEUTRAL_SAMPLING
    logit_bias: dict[int, float] = field(default_factory=dict)  # -inf bans a token
    seed: int | None = None
    ignore_eos: bool = False
    n_probs: int = -1  # -1: none; 0: the sampled token's; n: the n most likely tokens' as well
    visible_ids: frozenset[int] = frozenset()  # control tokens to show: markers of the tool format
    banned_strings: list[str] = field(default_factory=list)
    grammar: Any = None  # what compile_grammar returned, one per job


@dataclass(slots=True)
class Piece:
    """What one token, or a few that share a character, adds to the text."""

    text: str
    ids: list[int]
    n_decoded: int  # tokens generated so far, this piece included
    probs: list[tuple[float, list[tuple[int, float]]]] | None = None  # per id: own, top (id, p)


class EndKind(Enum):
    """How a job ended; the first three are `done` above and have exllamav3's `eos_reason`, the last
    two are `failed`."""

    STOP = "stop_token"
    LIMIT = "max_new_tokens"
    GRAMMAR = "end_filter"  # the grammar allows nothing more
    CANCELLED = "cancelled"
    REFUSED = "refused"  # as it turns out, its request cannot be served
    FAILED = "failed"


@dataclass(slots=True)
class Update:
    """What one step says about one job. `end` is set in the last one and never again."""

    job: Job
    started: bool = False
    progress: int | None = None  # prompt tokens evaluated or found in the cache so far
    pieces: list[Piece] = field(default_factory=list)
    end: EndKind | None = None
    error: str = ""  # with FAILED and REFUSED: what to tell the client
    retry: bool = False  # with FAILED: the same request may succeed when sent again
    n_cached: int = 0  # prompt tokens served from the prefix cache
    n_decoded: int = 0
    prompt_s: float = 0.0  # from the step the job started in to the first decode step
    predicted_s: float = 0.0  # from the step that produced the first token
    n_draft: int = 0
    n_draft_accepted: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One generation on its way through the engine.

    The event loop makes it and owns `on_update` and `cancelled`; the engine thread owns the rest
    once submitted. Reading single fields from the other thread is safe and may be a step old.
    """

    params: GenerationParams
    on_update: Callable[[Update], None]
    on_told: Callable[[], None] = lambda: None  # after on_update, when all jobs have heard theirs
    owner: Any = None  # the event loop's own
    # Called on the engine thread with what each step says, with nothing before the first one. The
    # text that it returns is what the job says next
    watch: Callable[[list[Piece]], str] | None = None
    id_task: int = -1
    id_slot: int = -1  # the slot held, -1 while waiting
    started: float = 0.0  # time.perf_counter(); 0 until a slot was free
    cancelled: bool = False  # no more updates are wanted but the end
    ended: bool = False
    last: Update | None = None  # the newest update with figures: for /slots and the totals
    n_decoded: int = 0  # the backend's own count
    handle: Any = None  # the backend's own object


# ==== The fake engine =============================================================================


def read_script(path: str) -> list[Any]:
    """What a fake is to say: texts, bytes, and dicts with "end" or "error"."""
    items = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(items, list):
        raise ValueError("it holds no JSON list of pieces")
    return [bytes.fromhex(x["hex"]) if type(x) is not str and "hex" in x else x for x in items]


class FakeBackend:
    """A backend without a model: one piece a step and job, on its own clock.

    What its methods say in their first line is the contract that both backends keep; those marked *
    are called from worker threads, the others from the engine thread only. `info` is fixed.

    Prompt tokens are the bytes of the prompt (ids 0-255), 256 ends an answer, ids above name the
    pieces that were said. Nothing is cached, so `n_cached` is always 0. A grammar is checked where
    llguidance is installed but constrains nothing: the script is the script.
    """

    EOS, N_VOCAB = 256, 65536

    def __init__(self, args: Namespace, model_dir: str) -> None:
        """`args`: `fake_delay` seconds a step, `fake_script` a path or None, `cache_size`."""
        self.delay_s = args.fake_delay
        with naming(f"--fake-script {args.fake_script}"):
            self.script = read_script(args.fake_script) if args.fake_script else None
        self.runs: dict[Job, Iterator[Update]] = {}
        self.said: dict[bytes, int] = {}  # the ids of pieces
        engine = {"name": "fake", "server_pid": os.getpid()}
        eos = frozenset([self.EOS])
        self.info = ModelInfo(model_dir, args.cache_size, self.N_VOCAB, engine, eos, self.EOS)

    def submit(self, job: Job) -> None:
        """Takes a job. ValueError or AssertionError fail this job alone."""
        job.handle = deque()  # texts to inject
        self.runs[job] = self._run(job)

    def _script_of(self, job: Job) -> Iterator[Any]:
        """What a job says, item by item: an injected text as soon as there is one."""
        items, ids = self.script, job.params.prompt_ids
        if items is None:
            text = "This is the fake engine of exl3-serve: no model is loaded. Your prompt has "
            text += f"{len(ids)} tokens and the sum of their ids is {sum(ids)}."
            items = re.findall(r"^\S+|\s\S+", text)
        script = itertools.cycle(items) if job.params.ignore_eos else iter(items)
        while job.params.max_tokens:
            yield job.handle.popleft() if job.handle else next(script, {"end": "stop"})
        yield {"end": "length"}

    def cancel(self, job: Job) -> None:
        """Forgets a job that was submitted and has not ended; nothing is heard of it again."""
        self.runs.pop(job, None)

    def iterate(self) -> list[Update]:
        """One step: at most one update per job. Any exception means the generator has failed."""
        self.step_started = time.perf_counter()
        time.sleep(self.delay_s)
        return [next(run) for run in list(self.runs.values())]

    def _run(self, job: Job) -> Iterator[Update]:
        """The life of a job, a step each time it is resumed; it ends by leaving `runs`.

        A chunk of the prompt or one piece, never both: the two clocks must not share a step.
        """
        params, n_prompt, started = job.params, len(job.params.prompt_ids), self.step_started
        for n in range(0, n_prompt, FAKE_CHUNK):
            prompt_s = time.perf_counter() - started
            yield Update(job, n == 0, min(n_prompt, n + FAKE_CHUNK), prompt_s=prompt_s)
        decode_started = self.step_started
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # tokens in pieces, and those since then that are no whole character
        n_said, ids = 0, list[int]()
        for item in self._script_of(job):
            update, data = Update(job, prompt_s=decode_started - started), b""
            match item:
                case {"error": text}:
                    update.end, update.error, ids = EndKind.FAILED, text, []
                case {"end": "length"}:
                    update.end = EndKind.LIMIT
                case {"end": _}:
                    update.end, ids = EndKind.STOP, [*ids, self.EOS]
                case _:
                    data = item.encode() if isinstance(item, str) else item
                    ids = [*ids, self._id_of(data)]
            update.n_decoded = n_said + len(ids)
            if update.end is None and update.n_decoded >= params.max_tokens:
                update.end = EndKind.LIMIT
            text = decoder.decode(data, final=update.end is not None)
            if ids and (text or update.end is not None):
                probs = [(1.0, [(i, 1.0)][: params.n_probs]) for i in ids]
                shown = probs if params.n_probs >= 0 else None
                update.pieces.append(Piece(text, ids, update.n_decoded, shown))
                n_said, ids = update.n_decoded, []
            if update.n_decoded:
                update.predicted_s = time.perf_counter() - decode_started
            if update.end is not None:
                self.cancel(job)
            yield update

    def remaining(self) -> int:
        """Jobs submitted and not ended; without any, 1 while steps of housekeeping are left."""
        return len(self.runs)

    def inject(self, job: Job, text: str) -> None:
        """Makes `text` the job's next tokens; a grammar starts anew after them."""
        job.handle.append(text)

    def rebuild(self) -> None:
        """Replaces a failed generator over the same model; raises when that is impossible."""
        self.runs.clear()

    close = rebuild  # gives up what a retired generator holds

    def encode(self, text: str, special: bool) -> list[int]:
        """* Token ids of a text; `special`: control tokens written in it count as such."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """* Text of token ids, control tokens included, broken characters as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """* The bytes one token stands for, also where they are no whole character."""
        if token_id < 256:
            return bytes([token_id])
        return next((data for data, i in self.said.items() if i == token_id), b"")

    def _id_of(self, data: bytes) -> int:
        if len(self.said) + 257 >= self.N_VOCAB:
            self.said.clear()
        return data[0] if len(data) == 1 else self.said.setdefault(data, 257 + len(self.said))

    def single_id(self, text: str) -> int | None:
        """* The id of the token whose text this is exactly, if there is one."""
        return None

    def compile_grammar(self, kind: str, source: str, trigger_id: int | None) -> Any:
        """* A fresh constraint for one job; BadGrammar with the reason.

        `kind` is "json_schema", "lark" or "gbnf". With `trigger_id` it binds from the token after
        that one, else from the first.
        """
        if importlib.util.find_spec("llguidance"):
            _check_grammar(kind, source)


# ==== exllamav3 ===================================================================================


def add_model_args(parser: ArgumentParser) -> None:
    """Adds exllamav3's own flags to `parser`, exactly as the installed version defines them.

    `model_init.add_args` is taken out of the installed source and run alone, because importing
    exllamav3 can compile CUDA code for minutes. Where exllamav3 is not installed there are only
    the two flags that the fake engine understands.
    """
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or spec.origin is None:
        parser.add_argument("-m", "--model_dir", help="Path to model directory")
        parser.add_argument("-cs", "--cache_size", type=int, default=32768, help="n_ctx in tokens")
        return
    tree = ast.parse(Path(spec.origin).with_name("model_init.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "add_args"]
    names: dict[str, Any] = {"ArgumentParser": ArgumentParser}
    exec(compile(tree, "model_init.py", "exec"), names)
    names["add_args"](parser, default_cache_size=32768, add_draft_model_args=True)
    parser._option_string_actions["-m"].required = False  # --fake needs none; main() asks otherwise


def _check_grammar(kind: str, source: str, tokenizer: Any = None) -> None:
    """BadGrammar with the reason when llguidance cannot use it."""
    from llguidance import LLMatcher, grammar_from

    try:
        reason = LLMatcher.validate_grammar(grammar_from(kind, source), tokenizer)
    except Exception as exc:  # the converters raise whatever their parser met
        reason = str(exc) or type(exc).__name__
    if reason:
        raise BadGrammar(reason)


def make_sampler(params: GenerationParams, tokenizer: Any) -> Any:
    """The exllamav3 sampler for these settings: llama-server's order and meanings.

    Temperature 0 (or below) is greedy. exllamav3 leaves out steps that do nothing, and inserts the
    sorting and normalising between the others. One sampler serves one job: some keep state.
    """
    from exllamav3.generator import sampler as s

    o = NEUTRAL_SAMPLING | params.sampling
    last_n = o["repeat_last_n"] if o["repeat_last_n"] >= 0 else int(10e7)
    # exllamav3 takes biases and penalties on untouched logits only, so they always come first
    stack = [s.SS_LogitBias(params.logit_bias)]
    if "penalties" in o["samplers"]:
        stack.append(s.SS_RepP(o["repeat_penalty"], last_n, 0))
        stack.append(s.SS_PresFreqP(o["presence_penalty"], o["frequency_penalty"], last_n, 0))
    if "dry" in o["samplers"] and o["dry_multiplier"] and o["dry_penalty_last_n"]:
        breakers = s.dry_sequence_breaker_tokens(tokenizer, tuple(o["dry_sequence_breakers"]))
        dry = (o["dry_multiplier"], o["dry_base"], o["dry_allowed_length"])
        stack.append(s.SS_DRY(*dry, max(o["dry_penalty_last_n"], 0), breakers))
    if o["temperature"] <= 0:
        return s.CustomSampler([*stack, s.SS_Argmax()])
    xtc = s.SS_XTC(o["xtc_probability"], max(o["xtc_threshold"], 1e-6), [])  # it divides by that
    others = {"top_k": s.SS_TopK(o["top_k"]), "top_p": s.SS_TopP(o["top_p"]), "xtc": xtc}
    others |= {"min_p": s.SS_MinP(o["min_p"]), "temperature": s.SS_Temperature(o["temperature"])}
    stack += [others[name] for name in o["samplers"] if name in others]
    adaptive = 0 <= o["adaptive_target"] < 1
    last = s.SS_AdaptiveP(o["adaptive_target"], o["adaptive_decay"]) if adaptive else s.SS_Sample()
    return s.CustomSampler([*stack, last])


# model_init's arguments that its init() leaves to the Generator, under the Generator's own names
GENERATOR_OPTIONS = "num_draft_tokens ngram_match_min ngram_corpus hybrid_draft_tokens".split()
GENERATOR_OPTIONS += "draft_confidence sparse_draft_head disk_cache_dir".split()
GENERATOR_GIB_OPTIONS = "cpu_cache_size disk_cache_size recurrent_cache_size".split()


# Of the tokens that mark parts of code those that end an answer (llama.cpp, llama-vocab.cpp)
ENDS_OF_CODE = ("<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>")


def without_surrogates(text: str) -> str:
    """JSON may hold halves of a pair, tokenizers take none."""
    return text.encode("utf-8", "replace").decode()


class Exl3Backend:
    """exllamav3's generator behind the contract. Figures are the generator's own.

    `time_first_token` of an exllamav3 job is the start of the step that samples the first token,
    so `time_generate` spans as many steps as there are tokens.
    """

    def __init__(self, args: Namespace, n_slots: int, argv: list[str], on_progress: Any):
        """Loads the model; minutes. LoadError, or whatever exllamav3 raises, when it cannot."""
        from exllamav3.model_init import init

        if args.mtp and args.num_draft_tokens is None:
            args.num_draft_tokens = 1
        args.autosplit_max_batch_size = max(args.autosplit_max_batch_size, n_slots)
        model, _, cache, self.tokenizer, draft, _, draft_cache = init(args, callback=on_progress)
        self.parts = {"model": model, "cache": cache}
        self.parts |= {"draft_model": draft, "draft_cache": draft_cache}
        self.args, self.n_slots = args, n_slots
        # encode() keeps its option on the object, so each value of it has one: no lock needed
        self.plain_tokenizer = type(self.tokenizer).from_config(self.tokenizer.config)
        self.rebuild()
        served = self.generator.max_batch_size
        if served < n_slots:
            raise LoadError(f"--parallel {n_slots}, but this model's cache has {served} slots")
        self.info = self._info(argv)

    def _info(self, argv: list[str]) -> ModelInfo:
        tok = self.tokenizer
        added = tok.tokenizer.get_added_tokens_decoder().items()
        eos_ids = {*(tok.config.eos_token_id_list or []), tok.eos_token_id}
        eos_ids |= set(map(self.single_id, ENDS_OF_CODE))
        named, n_draft = self.args.draft_model_dir, self.generator.max_draft_tokens
        drafter = "mtp" if self.args.mtp else Path(named).name if named else "n-gram"
        draft = {"model": drafter, "n_max": n_draft} if n_draft else None
        return ModelInfo(
            model_dir=os.path.abspath(self.args.model_dir),
            n_ctx=self.generator.max_total_tokens - n_draft,
            n_vocab=tok.actual_vocab_size,
            engine=engine_block(self.args.model_dir, argv, draft, *self.parts.values()),
            eos_ids=frozenset(eos_ids - {None}),
            eos_id=tok.eos_token_id,
            bos_id=tok.bos_token_id,
            add_bos=tok.bos_token_id in tok.tokenizer.encode("x").ids[:1],
            special_ids=frozenset(token_id for token_id, token in added if token.special),
        )

    def rebuild(self) -> None:
        """A new generator over the loaded model and cache, after `close` of the old one. Raises
        when that does not work either."""
        from exllamav3 import Generator

        old = getattr(self, "generator", None)
        if old is not None:
            if old.disk_page_cache is not None:
                old.disk_page_cache.abort()  # what a failed generator wrote is not to be trusted
            old.close()
        options = {name: getattr(self.args, name) for name in GENERATOR_OPTIONS}
        sizes = {name: int(getattr(self.args, name) * 1024**3) for name in GENERATOR_GIB_OPTIONS}
        options |= {"max_batch_size": self.n_slots, "max_chunk_size": self.args.chunk_size}
        options |= {"dynamic_draft_tokens": self.args.dynamic_draft, "tokenizer": self.tokenizer}
        self.generator = Generator(**self.parts | options | sizes)
        if old is not None:  # one token shows whether it works
            self.submit(Job(GenerationParams([self.info.eos_id or 0], max_tokens=1), print))
            while self.generator.num_remaining_jobs():
                if any(update.end is EndKind.FAILED for update in self.iterate()):
                    raise RuntimeError("the new one makes no token")

    def submit(self, job: Job) -> None:
        import torch
        from exllamav3 import Job as Exl3Job

        p = job.params
        n_new, share = max(1, p.max_tokens), self.generator.max_total_tokens // self.n_slots
        too_big = len(p.prompt_ids) + n_new + 1 + self.generator.max_draft_tokens > share
        options = {"sampler": make_sampler(p, self.tokenizer), "seed": p.seed, "identifier": job}
        # Taken in rounds, it reserves no more of the cache than it needs for now
        options["max_rq_tokens"] = min(n_new, REQUEUE_TOKENS) if too_big else None
        options["stop_conditions"] = [] if p.ignore_eos else list(self.info.eos_ids)
        options |= {"max_new_tokens": n_new, "decode_special_tokens": True}
        options |= {"return_top_tokens": max(0, p.n_probs), "return_probs": p.n_probs >= 0}
        options["filters"] = [p.grammar] if p.grammar else []
        options["banned_strings"] = list(map(without_surrogates, p.banned_strings))
        input_ids = torch.tensor([p.prompt_ids], dtype=torch.long)
        job.handle = Exl3Job(input_ids=input_ids, **options)
        self.generator.enqueue(job.handle)

    def cancel(self, job: Job) -> None:
        self.generator.cancel(job.handle)

    def iterate(self) -> list[Update]:
        if not self.generator.num_remaining_jobs():
            self.generator.idle_work()
            return []
        updates: dict[Job, Update] = {}
        for result in self.generator.iterate():
            job: Job = result["job"].identifier
            self._take(updates.setdefault(job, Update(job)), result)
        for update in updates.values():
            self._figures(update)
        return list(updates.values())

    def _take(self, update: Update, result: dict[str, Any]) -> None:
        job, h = update.job, update.job.handle
        match result["stage"]:
            case "streaming":
                self._add_piece(update, result, result.get("text", ""))
                if h.filters_suspended and h.forced_ids is None:
                    for grammar in h.filters:
                        grammar.trigger_token = None  # it was in the injected text
                    h.set_filters(h.filters)  # an injected text is through, the grammar starts anew
            case "started":
                update.started = not job.n_decoded  # later rounds of a job start again
            case "prefill" if not job.n_decoded:
                update.progress = result["curr_progress"]
            case "error":
                log.error("job %d failed", job.id_task, exc_info=result["error"])
                update.end, update.error = EndKind.FAILED, f"the engine failed: {result['error']}"
        if "eos_reason" in result:
            update.end = EndKind(result["eos_reason"])
        if update.end is EndKind.GRAMMAR and job.params.grammar._matcher.is_error():
            reason = job.params.grammar._matcher.get_error()[:200]
            update.end, update.error = EndKind.REFUSED, f"the grammar failed: {reason}"
        held = result.get("held", {})
        if "token_ids" in held:
            # The stop token, perhaps behind a character that stays incomplete
            self._add_piece(update, held, self.decode(held["token_ids"].tolist()[0][:-1]))

    def _add_piece(self, update: Update, result: dict[str, Any], text: str) -> None:
        job, params = update.job, update.job.params
        if "token_ids" not in result or params.max_tokens == 0:
            return
        ids = result["token_ids"].tolist()[0]
        job.n_decoded += len(ids)
        if len(ids) == 1 and ids[0] in self.info.special_ids and ids[0] not in params.visible_ids:
            text = ""
        probs = None
        if params.n_probs >= 0:
            names = ("top_k_tokens", "top_k_probs") if params.n_probs else ()
            rows = [result[name].tolist()[0] for name in names] or [[[]] * len(ids)] * 2
            tops = [list(zip(*pair, strict=True)) for pair in zip(*rows, strict=True)]
            probs = list(zip(result["token_probs"].tolist()[0], tops, strict=True))
        update.pieces.append(Piece(text, ids, job.n_decoded, probs))

    def _figures(self, update: Update) -> None:
        """What is true of a job now, at the end of a step. exllamav3's clock is time.time()."""
        h, first = update.job.handle, update.job.handle.time_first_token
        # Several rounds of a job: the cache counts in the first, the times add up
        update.n_cached = h.rq_cached[1] if h.rq_cached else h.cached_pages * 256 + h.cached_tokens
        update.prompt_s, update.predicted_s = h.time_prefill, h.time_generate
        if update.end is None and h.time_first_prefill is not None:
            update.prompt_s += (first or time.time()) - h.time_first_prefill
            update.predicted_s += time.time() - first if first else 0.0
        update.n_decoded = h.rq_new_tokens + h.new_tokens if update.end else update.job.n_decoded
        if update.job.params.max_tokens == 0:
            update.n_decoded, update.predicted_s = 0, 0.0
        update.n_draft_accepted = h.accepted_draft_tokens
        update.n_draft = h.accepted_draft_tokens + h.rejected_draft_tokens

    def remaining(self) -> int:
        return self.generator.num_remaining_jobs() or int(self.generator.has_idle_work())

    def inject(self, job: Job, text: str) -> None:
        job.handle.constrain_output_now(without_surrogates(text))

    def close(self) -> None:
        self.generator.close()

    def encode(self, text: str, special: bool) -> list[int]:
        tokenizer = self.tokenizer if special else self.plain_tokenizer
        return tokenizer.encode(text, encode_special_tokens=special)[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode_(ids, True)

    def token_bytes(self, token_id: int) -> bytes:
        if piece := self.tokenizer.extended_id_to_piece.get(token_id):
            return piece.encode()
        raw = self.tokenizer.tokenizer.id_to_token(token_id) or ""
        if len(raw) == 6 and raw.startswith("<0x"):
            return bytes([int(raw[3:5], 16)])
        if all(c in BYTE_OF_CHAR for c in raw) and self.tokenizer.space_char_ != "▁":
            return bytes(BYTE_OF_CHAR[c] for c in raw)
        return raw.replace("▁", " ").encode()

    def single_id(self, text: str) -> int | None:
        return self.tokenizer.single_id(text)

    def compile_grammar(self, kind: str, source: str, trigger_id: int | None) -> Any:
        fresh = copy.copy(compiled_grammar(self.tokenizer, kind, source, trigger_id))
        # The compiled grammar is shared, the state is not
        fresh._matcher = fresh._matcher.deep_copy()
        fresh._bitmask_torch = fresh._bitmask_torch.clone()
        fresh._bitmask = fresh._bitmask_torch.numpy()[0]
        fresh._journal = []
        return fresh


@lru_cache(MAX_GRAMMARS)
def compiled_grammar(tokenizer: Any, kind: str, source: str, trigger_id: int | None) -> Any:
    """A constraint to copy for each job; BadGrammar with the reason."""
    from exllamav3.generator.filter.llguidance import LLGuidanceFilter, create_ll_tokenizer

    class JobFilter(LLGuidanceFilter):
        """An error of the matcher ends its job alone, not the generator."""

        def _check_error(self) -> None:  # exllamav3 raises here, out of iterate()
            pass

        def is_completed(self) -> bool:
            return self._matcher.is_stopped() or self._matcher.is_error()

    _check_grammar(kind, source, create_ll_tokenizer(tokenizer))
    option = {kind if kind == "json_schema" else f"{kind}_grammar": source}
    return JobFilter(tokenizer, trigger_token=trigger_id, eos_after_completed=True, **option)


# GPT-2's printable stand-ins for bytes, which byte-level BPE vocabularies are written in
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF_CHAR = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(OTHERS)}


Backend = FakeBackend | Exl3Backend

# ==== The `engine` block of /props ================================================================
#
# Two sources, never mixed: `disk_facts` reads the model's files (headers only, no torch), and
# `placement` walks the modules that were loaded. What neither can tell is left out; a measured 0
# stays. Integers only, because a recorder that meets a float throws the whole answer away.

MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as the safetensors crate has it

# Options that say what is served and where, not how it behaves. Each takes a value.
ADDRESS = "-m|--model|--model[-_]dir|--host|--port|--path|--config|--api-(?:key|key-file|prefix)"
ADDRESS += "|--ssl-(?:key|cert)-file|--audit-log|--log-format"

# Tensors that are no part of the text model: towers for images and sound, what projects
# them into it, MTP heads. (MTP layers numbered on after the last layer are told by their number.)
NOT_TEXT = re.compile(
    r"(?:^|\.)(?:vision|visual|vit_|image|audio|sound|speech|embed_vision|embed_audio"
    r"|multi_modal|mm_proj|patch_merger|aligner\.|mlp1\.|mtp|nextn)"
)
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.\d+\.|\.(?:experts|moe)\.(?:gate_up|gate|up|down)_proj")  # routed
# A token reads one row of these. Group 1: those that a model without an output layer uses as one.
ROW_TABLE = re.compile(
    r"(?:^|\.)(?:(embed_tokens|word_embeddings|embeddings|tok_embeddings|embed|wte)"
    r"|embed_tokens_per_layer|ngram_embedding(?:\.shard_\d+)?)\.(?:weight|trellis)$|\.tid2eid$"
)
HEAD = re.compile(r"(?:^|\.)lm_head\.|^(?:head|output)\.")
# These come with the weights of a quantized layer and are no parameters.
AUX = re.compile(r"\.(?:suh|svh|su|sv|mcg|mul1|signs|weight_scale(?:_inv)?)$|_scales$")

# What the weights of a loaded module are for. The first row found in "ClassName key" decides, for
# the module and all below it; none is "other". Keys are for classes that 1.6.5 does not have.
CLASSES = ("attention", "experts", "ffn", "embeddings", "output", "other")
CLASS_OF_MODULE = (
    (r"^BlockSparseMLP |\.(?:block_sparse_moe|experts|share\w*_experts?)$", "experts"),
    (r"^(?:\w*Attention|GatedDeltaNet|Mamba2|ShortConv) ", "attention"),
    (r"^(?:Gated)?MLP |\.(?:mlp|ffn|feed_forward)$", "ffn"),
    (r"^(?:\w*Embedding|PLELayer) |\.embed_tokens$", "embeddings"),
    (r"[. ](?:lm_head|head)$", "output"),
    (r"\.(?:self_attn|linear_attn|attn|attention|mixer)$", "attention"),
)
# Objects beside the modules that hold weights of theirs: exllamav3's, and torch.nn.Embedding
HOLDER = re.compile(r"Linear\w+|DSV4Compressor|SparseHead|TableEmbedding|RowTable|Embedding")

DiskTensor = tuple[str, list[int], int, int]  # safetensors' dtype ("F16"), shape, data offsets


def _read_header(path: Path) -> dict[str, DiskTensor]:
    """The tensors of a safetensors file, by name. LoadError names the file when it is damaged."""
    with naming(f"{path} is damaged or no safetensors file"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        tensors = {k: (t["dtype"], t["shape"], *t["data_offsets"]) for k, t in header.items()}
        if 8 + length + max((t[3] for t in tensors.values()), default=0) > path.stat().st_size:
            raise ValueError("it is shorter than its header says")
    return tensors


def read_config(path: Path, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The JSON object in a model's file, {} when there is none."""
    try:
        value = json.loads(path.read_text("utf-8"), parse_float=parse_float)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _n_params(name: str, tensors: dict[str, DiskTensor]) -> int | None:
    """The parameters that a tensor stands for: len(suh) x len(svh) for a trellis. None: unknown."""
    shape, stem = tensors[name][1], name.removesuffix(".trellis")
    if stem == name:
        return 0 if AUX.search(name) else prod(shape)
    suh, svh = tensors.get(f"{stem}.suh"), tensors.get(f"{stem}.svh")
    return suh[1][0] * svh[1][0] if suh and svh else None


def _active_bytes(text: dict[str, DiskTensor], n_experts: int, n_used: int) -> int:
    """Bytes of a text model's tensors that one token needs.

    All of them but the routed experts, of which it needs `n_used` in each layer, and the embedding
    table, of which it needs a row. A model without an output layer uses that table as one: then
    all of it counts, the row being a part.
    """
    tied = not any(HEAD.search(name) for name in text)
    total = routed = 0
    for name, (_, shape, begin, end) in text.items():
        table = ROW_TABLE.search(name)
        if EXPERT.search(name):
            routed += end - begin
        else:
            total += (end - begin) // (max(1, shape[0]) if table and not (tied and table[1]) else 1)
    return total + routed * n_used // max(1, n_experts)


def disk_facts(model_dir: str) -> dict[str, Any]:
    """The `model` object: what the files of a model directory say, without loading anything.

    `bytes` and `files` are those of the directory itself, hidden ones left out. A key that the
    files do not tell is absent. LoadError for a damaged safetensors file. Reads headers only.
    """
    paths = sorted(path for path in Path(model_dir).glob("[!.]*") if path.is_file())
    tensors: dict[str, DiskTensor] = {}
    for path in paths:
        tensors |= _read_header(path) if path.suffix == ".safetensors" else {}
    config = read_config(Path(model_dir, "config.json"), str)  # 4.05 stays as it is written
    settings = config.get("quantization_config")
    settings = settings or read_config(Path(model_dir, "quantization_config.json"), str)
    sources = [s for s in (config.get("text_config"), config.get("llm_config"), config) if s]

    def number(*keys: str) -> Any:
        return next((s[k] for s in sources for k in keys if type(s.get(k)) is int), None)

    method = str(settings.get("quant_method") or "").upper()
    if tensors and not method:  # F16, the type of the largest tensor, is called FP16
        method = re.sub("^F", "FP", max(tensors.values(), key=lambda t: t[3] - t[2])[0])
    parts = {"bits": " {} bpw", "head_bits": " · head {}"} if method == "EXL3" else {}
    bits = [text.format(settings[key]) for key, text in parts.items() if key in settings]
    n_layers = number("num_hidden_layers")
    text = {k: t for k, t in tensors.items() if not NOT_TEXT.search(k)}
    text = {k: t for k, t in text.items() if int([*LAYER.findall(k), -1][0]) < (n_layers or inf)}
    dense = text and not any(EXPERT.search(name) for name in text)  # whatever the config says
    n_experts = number("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    used = "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k"
    experts = (0, 0) if dense else (n_experts, number(*used))
    counts: list[Any] = [_n_params(name, tensors) for name in tensors]
    facts: dict[str, Any] = {"format": method or None, "quant": "".join([method, *bits]) or None}
    facts["arch"] = next(iter(config.get("architectures") or ()), None)
    facts |= {"bytes": sum(path.stat().st_size for path in paths), "files": len(paths)}
    facts["params"] = sum(counts) if counts and None not in counts else None
    facts |= {"n_layers": n_layers, "n_experts": experts[0], "n_experts_used": experts[1]}
    facts["ctx_train"] = number(
        "max_position_embeddings", "max_sequence_length", "model_max_length"
    )
    if dense or all(experts):
        facts["active_bytes_per_token"] = _active_bytes(text, *experts)
    return {key: value for key, value in facts.items() if value is not None}


def _tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in an attribute of a module, also in lists, dicts and HOLDER objects."""
    if hasattr(value, "untyped_storage"):
        yield value
    holder = HOLDER.fullmatch(type(value).__name__) and not hasattr(value, "register_submodule")
    parts = vars(value) if holder else value
    if isinstance(parts, (dict, list, tuple)):
        for part in list(parts.values()) if isinstance(parts, dict) else parts:
            yield from _tensors_in(part)


def _classified(modules: Any, known: str | None = None) -> Iterator[tuple[Any, str]]:
    """These modules and all below them, each with the class of its weights."""
    for module in modules:
        label = f"{type(module).__name__} {module.key}"
        name = known or next((n for row, n in CLASS_OF_MODULE if re.search(row, label)), None)
        yield module, name or "other"
        yield from _classified(module.modules, name)


def placement(model: Any, cache: Any, draft: Any = None, draft_cache: Any = None) -> dict[str, Any]:
    """Where the loaded weights are: bytes by device and class. {} under tensor parallelism.

    (There they are in other processes.) A storage counts once, and only what weights use of it;
    `draft`, a draft model, is "other". `vram_kv_bytes` is what the caches hold on GPUs, pages as
    well as the states of recurrent and sliding-window layers; 0 when they are on the CPU.
    """
    if model.loaded_tp:
        return {}
    devices: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(CLASSES, 0))
    left: dict[int, int] = {}  # by address of a storage: its bytes that no tensor has taken yet
    held: dict[int, tuple[Any, str]] = {}  # by address: a tensor and its class
    drafted = _classified(draft.modules, "other") if draft else ()
    for module, name in itertools.chain(_classified(model.modules), drafted):
        # preallocated work buffers, shared by modules, are no weights
        own = [value for key, value in vars(module).items() if not key.startswith("prealloc")]
        for tensor in _tensors_in(own):
            held.setdefault(tensor.data_ptr(), (tensor, name))
    for tensor, name in held.values():
        storage = tensor.untyped_storage()
        free = left.setdefault(storage.data_ptr(), storage.nbytes())
        left[storage.data_ptr()] = max(0, free - tensor.nbytes)
        device = f"GPU{tensor.device.index}" if tensor.is_cuda else "CPU"
        devices[device][name] += min(free, tensor.nbytes)
    caches = [c for c in (cache, draft_cache) if c]
    layers = [vars(x) for c in caches for x in (*c.layers.values(), *c.recurrent_layers.values())]
    kept = {t.data_ptr(): t.nbytes for t in _tensors_in(layers) if t.is_cuda}
    order = sorted(devices, key=lambda device: (device == "CPU", len(device), device))
    rows = [{"device": d, "bytes": sum(devices[d].values()), "classes": devices[d]} for d in order]
    return {"devices": rows, "vram_kv_bytes": sum(kept.values())}


def behaviour_args(argv: Sequence[str]) -> list[str]:
    """The arguments that change what the server does: all but ADDRESS options and their values."""
    ended_by_nul = "".join(f"{arg}\0" for arg in argv)
    kept = re.sub(rf"(?<![^\0])(?:{ADDRESS})[=\0][^\0]*\0?", "", ended_by_nul)
    return kept.split("\0")[:-1]


def engine_block(model_dir: str, argv: Sequence[str], draft: Any, *loaded: Any) -> dict[str, Any]:
    """The `engine` block of /props. `loaded`: the arguments of `placement`.

    `name` is the engine's, as a recorder files its results under it; the server's own name is in
    the Server header. `draft` is {"model", "n_max"}, None when nothing is drafted. Called once,
    on the thread that loaded the model.
    """
    from exllamav3.version import __version__

    block: dict[str, Any] = {"name": "exllamav3", "version": __version__}
    block |= {"args": behaviour_args(argv), "server_pid": os.getpid()}
    extra = {"draft": draft, "placement": placement(*loaded)}
    return block | {"model": disk_facts(model_dir)} | {k: v for k, v in extra.items() if v}


# ==== The engine thread ===========================================================================


SUMMED = ("n_cached", "n_decoded", "n_draft", "n_draft_accepted", "prompt_s", "predicted_s")


class Engine:
    """Slots, the queue and the thread. Public methods are for the event loop unless they say more.

    Invariants (tests/test_engine.py): a job is in at most one of `waiting` and `slots`; every job
    submitted gets exactly one update with `end`; after the last end nothing is held.
    """

    max_recoveries = 3  # within RECOVERY_WINDOW_S

    def __init__(self, backend: Backend, n_slots: int, loop: AbstractEventLoop, on_fatal: Any):
        """`on_fatal(reason)` is called on the loop when the engine has died."""
        self.backend = backend
        self.slots: list[Job | None] = [None] * n_slots
        self.waiting: deque[Job] = deque()
        self.fatal = ""  # why the engine is dead; empty while it is not
        # Sums over the jobs that ended: SUMMED, and n_evaluated, prompt tokens not from the cache;
        # the longest of them, n_tokens_max; n_steps; and n_busy, the busy slots of every step
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.recoveries: list[float] = []  # when the generator was restarted; time.perf_counter()
        self.step_started = 0.0  # time.perf_counter() of the step under way; 0 between steps
        self._loop = loop
        self._on_fatal = on_fatal
        self._ids = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._updates: list[Update] = []  # of the pass under way
        self._wake = threading.Event()
        self._room = threading.Semaphore(MAX_UNDELIVERED)
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    # -- event loop side --

    def submit(self, job: Job) -> None:
        """Queues a job. A dead engine fails it like any other, with the reason."""
        job.id_task = next(self._ids)
        self._command(self.waiting.append, job)

    def cancel(self, job: Job) -> None:
        """Wants no more of this job; harmless when it has ended or was cancelled before."""
        job.cancelled = True
        self._command(self._drop, job)

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the thread after the step under way; jobs that are left get no more updates."""
        self._closing = True
        self._room.release()
        self._wake.set()
        self.thread.join(timeout_s)

    def _command(self, action: Callable[..., None], *args: Any) -> None:
        self._commands.append(partial(action, *args))
        self._wake.set()

    def _on_batch(self, updates: list[Update]) -> None:
        self._room.release()
        for update in updates:
            if not update.job.cancelled or update.end is not None:
                update.job.on_update(update)
        for update in updates:
            update.job.on_told()

    # -- engine thread --

    def _run(self) -> None:
        while not self._closing:
            if not self._pass():
                self._wake.wait()
                self._wake.clear()
        self.backend.close()

    def _pass(self) -> bool:
        """One turn of the thread; False when there is nothing to do until somebody asks."""
        self._updates, self.step_started, busy = [], 0.0, False
        try:
            # 1) what the event loop asked for; 2) free slots; 3) one step
            while self._commands:
                self._commands.popleft()()
            if not self.fatal:
                self._admit()
                busy = self.backend.remaining() > 0
                if busy:
                    self.step_started = time.perf_counter()
                    self.totals["n_steps"] += 1
                    self.totals["n_busy"] += len(self.slots) - self.slots.count(None)
                    for update in self.backend.iterate():
                        self._tell(update)
                        self._watch(update.job, update.pieces)
        except BaseException as exc:  # exllamav3's generator is broken; also a panic in Rust
            self._recover(exc)
        while self.fatal and self.waiting:
            self._tell(Update(self.waiting.popleft(), end=EndKind.FAILED, error=self.fatal))
        # 4) hand over, at most MAX_UNDELIVERED ahead of the event loop
        if self._updates:
            self._room.acquire()
            if not self._closing:
                self._loop.call_soon_threadsafe(self._on_batch, self._updates)
        return busy or bool(self._updates)

    def _tell(self, update: Update) -> None:
        """Puts an update into the batch. After the last one of a job its slot is free."""
        job = update.job
        if job.ended:
            return
        self._updates.append(update)
        if update.end is None or update.end not in (EndKind.CANCELLED, EndKind.FAILED):
            job.last = update  # those two have no figures of their own
        if update.end is not None:
            job.ended = True
            self._count(job, job.last or Update(job))
            if job.id_slot >= 0:
                self.slots[job.id_slot] = None

    def _drop(self, job: Job) -> None:
        if not job.ended and job in self.waiting:
            self.waiting.remove(job)
        elif not job.ended:
            self.backend.cancel(job)
        self._tell(Update(job, end=EndKind.CANCELLED))

    def _count(self, job: Job, last: Update) -> None:
        """Adds the job's final figures to the totals."""
        whole = last.n_decoded or last.end is EndKind.LIMIT
        n_taken = len(job.params.prompt_ids) if whole else last.progress or 0
        self.totals["n_evaluated"] += max(0, n_taken - last.n_cached)
        for name in SUMMED:
            self.totals[name] += getattr(last, name)
        self.totals["n_tokens_max"] = max(self.totals["n_tokens_max"], n_taken + last.n_decoded)

    def _watch(self, job: Job, pieces: list[Piece]) -> None:
        """Before the next step: the event loop hears of a token when later ones are made."""
        if job.watch is not None and not job.ended and (text := job.watch(pieces)):
            self.backend.inject(job, text)

    def _admit(self) -> None:
        while self.waiting and None in self.slots:
            job = self.waiting.popleft()
            job.id_slot = self.slots.index(None)
            self.slots[job.id_slot] = job
            job.started = time.perf_counter()
            try:
                self.backend.submit(job)
            except (ValueError, AssertionError) as exc:
                log.error("job %d was refused: %s", job.id_task, exc)
                error = f"the engine refused the request: {exc}"
                self._tell(Update(job, end=EndKind.FAILED, error=error))
            self._watch(job, [])

    def _recover(self, exc: BaseException) -> None:
        """Fails every job in a slot, rebuilds the generator; the waiting jobs go on after that."""
        log.error("the generator failed: %s", exc, exc_info=exc)
        text = f"the engine failed and is being restarted: {exc}"
        for job in filter(None, self.slots):
            self._tell(Update(job, end=EndKind.FAILED, error=text, retry=True))
        now = time.perf_counter()
        n_recent = sum(t >= now - RECOVERY_WINDOW_S for t in self.recoveries)
        try:
            if n_recent >= self.max_recoveries:
                raise RuntimeError(f"{n_recent} restarts did not help: {exc}")
            self.recoveries.append(now)
            self.backend.rebuild()
        except Exception as again:  # out of memory, a dead CUDA context: nothing is left to try
            self.fatal = f"the generator cannot be restarted: {again}"
            self._loop.call_soon_threadsafe(self._on_fatal, self.fatal)


def load(args: Namespace, n_slots: int, argv: list[str], on_progress: Any) -> Backend:
    """The backend that `args` ask for; blocks while it loads. Runs in the loader thread.

    `on_progress(n_loaded, n_modules)` is called from that thread. Raises LoadError or whatever
    exllamav3 raises for a model it cannot load.
    """
    if args.fake:
        return FakeBackend(args, os.path.abspath(args.model_dir) if args.model_dir else "fake")
    # GPU numbers as nvidia-smi shows them; only counts when set before torch
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return Exl3Backend(args, n_slots, argv, on_progress)

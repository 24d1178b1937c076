"""Compares an answer of ours with llama-server's recorded answer to the same request.

`compare(request, recorded, ours)` returns one line per difference, `path: what`. Compared are the
status, the content type, key sets and JSON types at every level, the order of events, error
bodies, counts, texts and tokens: everything by value, except

- what can only be random or measured (`ANY_VALUE`): ids, clocks, fingerprints; types only;
- how a prompt divides into cached and evaluated tokens (`SUMS`): the sum only;
- log-probabilities (`LOGPROB_TOLERANCE`), and the order of nearly equal candidates;
- `timings` on the delta that completes a stop string, see `without_late_timings`;
- how a streamed text is cut: neighbouring deltas of one kind are joined before the comparison, so
  that only their order among other events counts. A run of prompt_progress events is its last one;
- with `n` > 1, how the choices' events interleave: they are sorted by choice;
- texts and their counts in requests tagged `free`: types only;
- the contents of slots (`SLOT_VALUES` excepted), which depend on everything asked before.

A path begins with `$`: `$.status`, `$.content_type`, `$.body.error.message`,
`$.events[finish].timings`. Events go by a name for what they are, see `event_name`.

What may differ nevertheless stands in `differences.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import pairwise

from golden.requests import Request

LOGPROB_TOLERANCE = 0.05  # llama.cpp itself moves by 0.002 when the prompt is batched otherwise
FLOAT_TOLERANCE = 1e-5  # relative: llama-server prints a float32 0.8 as 0.800000011920929

ANY_VALUE = frozenset(
    (
        # random
        *("id_slot", "id_task", "item_id", "call_id", "media_marker", "system_fingerprint"),
        # clocks
        *("created", "created_at", "completed_at", "time_ms", "model_path"),
        *("prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
        *("predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
        # cache, and slots at some moment
        *("cache", "cached_tokens", "n_prompt_tokens_cache", "n_prompt_tokens_processed"),
    )
)
SUMS = (("prompt_n", "cache_n"), ("input_tokens", "cache_read_input_tokens"))
RANDOM_ID = re.compile(r"[A-Za-z]*[-_]?[A-Za-z0-9]{24,}")  # chatcmpl-..., 32 letters and digits

# Fields that hold generated text, and figures that follow from its length.
TEXT = frozenset(
    (
        *("content", "text", "reasoning_content", "arguments", "delta", "thinking"),
        *("partial_json", "generated"),
    )
)
COUNTS = frozenset(
    (
        *("tokens_predicted", "tokens_cached", "predicted_n", "has_new_line", "stopping_word"),
        *("completion_tokens", "total_tokens", "output_tokens", "n_decoded", "n_remain"),
    )
)
LISTS = frozenset(("tokens", "completion_probabilities"))  # one entry per generated token
CANDIDATES = frozenset(("top_logprobs", "top_probs"))
PROBABILITIES = frozenset(("logprob", "prob"))
SLOT_VALUES = frozenset(("n_ctx", "speculative", "is_processing"))


# --- values --------------------------------------------------------------------------------------


def type_of(value) -> str:
    """The JSON type of a value, with integers apart from other numbers."""
    for kind, name in (
        (type(None), "null"),
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def same_type(recorded, ours) -> bool:
    """True when the types agree; an integer may stand for a recorded fraction, not the reverse."""
    allowed = {type_of(recorded)} | ({"integer"} if isinstance(recorded, float) else set())
    return type_of(ours) in allowed


def short(value) -> str:
    """A value in a difference line."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:110]}...{text[-40:]}"


class Walk:
    """One comparison of two JSON values; `lines` collects the differences."""

    def __init__(self, free: bool, exact: frozenset[str] | None = None):
        self.free = free
        self.exact = exact  # when given, only the values of these fields are compared
        self.lines: list[str] = []

    def differ(self, path, recorded, ours):
        """Notes two values that differ."""
        self.lines.append(f"{path}: {short(recorded)} here {short(ours)}")

    def value(self, path, key, recorded, ours):
        """Compares two values found under `key`."""
        if not same_type(recorded, ours):
            self.lines.append(
                f"{path}: type {type_of(recorded)} here {type_of(ours)}, "
                f"{short(recorded)} here {short(ours)}"
            )
        elif isinstance(recorded, dict):
            self.object(path, recorded, ours)
        elif isinstance(recorded, list):
            self.array(path, key, recorded, ours)
        elif not self.same(key, recorded, ours):
            self.differ(path, recorded, ours)

    def same(self, key, recorded, ours) -> bool:
        """True when two values of one simple type agree."""
        if self.exact is not None and key not in self.exact:
            return True
        if key in ANY_VALUE or (self.free and key in TEXT | COUNTS | PROBABILITIES | {"token"}):
            return True
        if key in PROBABILITIES:
            return close_probability(key, recorded, ours)
        if key == "id" and isinstance(recorded, str) and RANDOM_ID.fullmatch(recorded):
            return True
        if isinstance(recorded, float):
            return abs(recorded - ours) <= FLOAT_TOLERANCE * max(abs(recorded), abs(ours))
        return recorded == ours

    def object(self, path, recorded, ours):
        """Compares key sets and members."""
        for key in ours.keys() - recorded.keys():
            self.lines.append(f"{path}.{key}: not in llama-server, here {short(ours[key])}")
        for key in recorded.keys() - ours.keys():
            self.lines.append(f"{path}.{key}: missing, llama-server {short(recorded[key])}")
        shared = [key for key in recorded if key in ours]
        for pair in SUMS:
            if set(pair) <= set(shared) and all(isinstance(ours[key], int) for key in pair):
                shared = [key for key in shared if key not in pair]
                sums = [sum(side[key] for key in pair) for side in (recorded, ours)]
                if sums[0] != sums[1]:
                    self.differ(f"{path}.{'+'.join(pair)}", *sums)
        for key in shared:
            self.value(f"{path}.{key}", key, recorded[key], ours[key])

    def array(self, path, key, recorded, ours):
        """Compares lists item by item."""
        if key in CANDIDATES and not self.free and are_candidates(recorded + ours):
            self.lines += candidate_differences(path, recorded, ours)
            return
        per_token = key in LISTS or (key == "content" and "logprobs" in path)
        any_length = self.free and (per_token or key in CANDIDATES)
        if len(recorded) != len(ours) and not any_length and self.exact is None:
            self.lines.append(f"{path}: {len(recorded)} items here {len(ours)}")
        if self.free and per_token and isinstance((recorded or [0])[0], int):
            return
        for i, (a, b) in enumerate(zip(recorded, ours, strict=False)):
            self.value(f"{path}[{i}]", key if not isinstance(a, dict) else "", a, b)


def close_probability(key, recorded, ours) -> bool:
    """Compares a logprob or a prob. llama-server's log of zero is the least float."""
    if key == "logprob" and recorded < -1e30:
        return ours < -30
    return abs(recorded - ours) <= LOGPROB_TOLERANCE


def are_candidates(entries: list) -> bool:
    """True when all entries can be compared by id."""
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("id"), int)
        and isinstance(entry.get("logprob", entry.get("prob")), (int, float))
        for entry in entries
    )


def candidate_differences(path, recorded, ours) -> Iterator[str]:
    """Compares candidates by token id; near the end of the list close ones may change places."""
    if len(recorded) != len(ours):
        yield f"{path}: {len(recorded)} items here {len(ours)}"
    sides = [{entry["id"]: entry for entry in side} for side in (recorded, ours)]
    for mine, other, where in ((*sides, "here"), (*sides[::-1], "in llama-server")):
        for id, entry in mine.items():
            key = "logprob" if "logprob" in entry else "prob"
            least = min((e[key] for e in other.values()), default=-1e9)
            if id not in other and entry[key] > least + LOGPROB_TOLERANCE:
                yield f"{path}[id {id}]: not {where}, {short(entry)}"
    for id in [id for id in sides[0] if id in sides[1]]:
        walk = Walk(free=False)
        walk.value(f"{path}[id {id}]", "", sides[0][id], sides[1][id])
        yield from walk.lines


# --- events --------------------------------------------------------------------------------------


def choice_of(data) -> tuple[int, dict]:
    """Index and contents of the choice an event is about; `(0, {})` when it has none."""
    if not isinstance(data, dict):
        return 0, {}
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    choice = choice if isinstance(choice, dict) else {}
    index = choice.get("index", 0 if "type" in data else data.get("index", 0))
    return (index if isinstance(index, int) else 0), choice


def event_name(event: dict) -> str:
    """What an event is: `role`, `content`, `finish`, `usage`, `final`, an Anthropic type, ...

    Choices after the first one have a `#index` behind the name.
    """
    data = event.get("data")
    index, choice = choice_of(data)
    suffix = f"#{index}" if index else ""
    if not isinstance(data, dict):
        return str(data)
    if "event" in event or "type" in data:
        kind = data["delta"].get("type") if isinstance(data.get("delta"), dict) else None
        return ":".join(str(part) for part in (data.get("type", event.get("event")), kind) if part)
    if "error" in data:
        return "error"
    if "prompt_progress" in data:
        return f"progress{suffix}"
    if "stop" in data:
        return ("final" if data["stop"] else "content") + suffix
    if "choices" in data and not data["choices"]:
        return f"usage{suffix}"
    if choice.get("finish_reason") is not None:
        return f"finish{suffix}"
    if "text" in choice:
        return f"text{suffix}"
    return delta_name(choice.get("delta")) + suffix


def delta_name(delta) -> str:
    """What a chat delta is."""
    if not isinstance(delta, dict):
        return "nothing"
    calls = delta.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[0], dict):
        call = calls[0]
        return ("call" if "id" in call else "arguments") + f"[{call.get('index')}]"
    return "role" if "role" in delta else "+".join(delta) or "nothing"


JOINED = re.compile(
    r"(content|text|reasoning_content|arguments\[\d+\]|progress)(#\d+)?"
    r"|content_block_delta:.*|response\..*\.delta"
)


def joined(first: dict, second: dict) -> dict:
    """Returns two neighbouring deltas as one: texts and lists added, the rest of the second."""
    result = dict(second)
    for key, value in first.items():
        other = second.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            result[key] = joined(value, other)
        elif key in TEXT | LISTS and type(value) is type(other) and isinstance(value, str | list):
            result[key] = value + other
        elif key in ("choices", "tool_calls") and value and other:
            result[key] = [joined(value[0], other[0])]
    return result


def shape(value, key=""):
    """What two deltas must share to be joined, besides their name: keys and types at all levels.

    Lists with an entry per token are joined and compared later.
    """
    if isinstance(value, dict):
        return tuple(sorted((key, shape(item, key)) for key, item in value.items()))
    if key in ("choices", "tool_calls") and isinstance(value, list):
        return tuple(map(shape, value))
    return "number" if isinstance(value, float) else type_of(value)


def without_late_timings(events: list[dict]) -> list[dict]:
    """Drops `timings` from the last delta of every run.

    llama-server sets them, unasked, on the delta of the token that completed a stop string.
    """
    result = list(events)
    for i, (event, following) in enumerate(pairwise(events)):
        name = event_name(event)
        if JOINED.fullmatch(name) and event_name(following) != name:
            data = {key: value for key, value in event["data"].items() if key != "timings"}
            result[i] = {**event, "data": data}
    return result


def folded(events: list[dict]) -> list[tuple[str, dict]]:
    """Returns (name, event) with the choices in order and neighbouring deltas joined."""
    events = sorted(events, key=lambda e: choice_of(e["data"])[0] if "data" in e else 0)
    result: list[tuple[str, dict]] = []
    for event in events:
        name = event_name(event)
        if result and result[-1][0] == name and JOINED.fullmatch(name):
            last = result[-1][1]
            if shape(last) == shape(event):
                progress = name.startswith("progress")
                data = event["data"] if progress else joined(last["data"], event["data"])
                result[-1] = (name, {**event, "data": data})
                continue
        result.append((name, event))
    return sorted(result, key=lambda item: item[0] == "[DONE]")


def event_differences(free: bool, recorded: list[dict], ours: list[dict]) -> Iterator[str]:
    """Compares two streams: the order of what they are made of, then the events that match."""
    a, b = folded(recorded), folded(ours)
    names = [name for name, _ in a], [name for name, _ in b]
    matcher = SequenceMatcher(None, *names, autojunk=False)
    for what, a0, a1, b0, b1 in matcher.get_opcodes():
        if what == "equal":
            for (name, left), (_, right) in zip(a[a0:a1], b[b0:b1], strict=True):
                walk = Walk(free)
                walk.value(f"$.events[{name}]", "", left, right)
                yield from (line.replace("].data", "]", 1) for line in walk.lines)
            continue
        for name in names[0][a0:a1]:
            yield f"$.events[{name}]: no such event here, llama-server sends {' '.join(names[0])}"
        for name in names[1][b0:b1]:
            yield f"$.events[{name}]: not in llama-server, here {' '.join(names[1])}"


# --- answers -------------------------------------------------------------------------------------


def metrics_of(text: str) -> dict:
    """The names and kinds of a Prometheus page."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def normal_media_type(value: str) -> list[str]:
    """A content type without differences of spelling."""
    return [part.strip().lower() for part in value.split(";")]


def compare(request: Request, recorded: dict, ours: dict) -> list[str]:
    """Returns the differences between two answers to `request`, none when they agree."""
    walk = Walk("free" in request.tags)
    walk.value("$.status", "status", recorded["status"], ours["status"])
    if normal_media_type(recorded["content_type"]) != normal_media_type(ours["content_type"]):
        walk.differ("$.content_type", recorded["content_type"], ours["content_type"])
    kinds = [next(k for k in ("body", "events", "text") if k in a) for a in (recorded, ours)]
    if kinds[0] != kinds[1]:
        walk.differ("$.kind", *kinds)
        return walk.lines
    if (recorded["status"] < 400) != (ours["status"] < 400):
        return walk.lines  # a refusal and an answer have nothing else in common
    left, right = recorded[kinds[0]], ours[kinds[0]]
    if kinds[0] == "events":
        if not (isinstance(request.body, dict) and request.body.get("timings_per_token")):
            left, right = without_late_timings(left), without_late_timings(right)
        walk.lines += event_differences(walk.free, left, right)
    elif kinds[0] == "text" and recorded["content_type"].startswith("text/plain; version"):
        walk.value("$.metrics", "", metrics_of(left), metrics_of(right))
    elif request.group == "slots" and isinstance(left, list) and isinstance(right, list):
        slots = Walk(free=False, exact=SLOT_VALUES)
        slots.array("$.slots", "", *(sorted(side, key=is_busy) for side in (left, right)))
        walk.lines += slots.lines
    else:
        walk.value(f"$.{kinds[0]}", "", left, right)
    if "cached" in request.tags and cached_tokens(left) > 0 >= cached_tokens(right):
        walk.lines.append("$.body.timings.cache_n: nothing came from the cache here")
    return walk.lines


def is_busy(slot: dict) -> bool:
    """Sort key that makes it immaterial which slot works."""
    return slot["is_processing"]


def cached_tokens(body: dict) -> int:
    """cache_n of a completion."""
    return body["timings"]["cache_n"]


# --- what text an answer holds -------------------------------------------------------------------


def texts_of(answer: dict) -> dict:
    """Returns what was generated, by choice and field, whether it was streamed or not.

    Keys are (index of the choice or block, field name); a tool call's field is `call 0 name` or
    `call 0 arguments`. Finish reasons are among them, token counts are not.
    """
    result: dict = {}
    if "events" in answer:
        parts = [event["data"] for event in answer["events"] if isinstance(event["data"], dict)]
    else:
        parts = answer["body"] if isinstance(answer["body"], list) else [answer["body"]]

    def note(index, field, value):
        if isinstance(value, str) and value:
            result[index, field] = result.get((index, field), "") + value

    def note_tokens(index, value):
        if isinstance(value, list) and value:
            result[index, "tokens"] = result.get((index, "tokens"), []) + value

    for part in parts:
        note_part(part, note, note_tokens)
    return result


def note_part(part, note, note_tokens):
    """Takes the texts of one body or event, llama-server's, OpenAI's or Anthropic's form."""
    if "choices" in part:
        for choice in part["choices"]:
            index = choice["index"]
            message = choice.get("message") or choice.get("delta") or choice
            for field in ("content", "text", "reasoning_content"):
                note(index, field, message.get(field))
            for i, call in enumerate(message.get("tool_calls") or []):
                number = call.get("index", i)
                for field in ("name", "arguments"):
                    note(index, f"call {number} {field}", call.get("function", {}).get(field))
            note(index, "finish_reason", choice.get("finish_reason"))
    elif "stop_type" in part or "stop" in part or isinstance(part.get("content"), str):
        index = part.get("index", 0)
        note(index, "content", part.get("content"))
        note(index, "stop_type", part.get("stop_type"))
        if "prompt_progress" not in part:
            note_tokens(index, part.get("tokens"))
    elif part.get("type") == "message":
        for i, block in enumerate(part["content"]):
            for field in ("text", "thinking", "name"):
                note(i, field, block.get(field))
        note(-1, "stop_reason", part.get("stop_reason"))
    elif part.get("type") == "content_block_start":
        note(part["index"], "name", part["content_block"].get("name"))
    elif part.get("type") == "content_block_delta":
        for field in ("text", "thinking"):
            note(part["index"], field, part["delta"].get(field))
    elif part.get("type") == "message_delta":
        note(-1, "stop_reason", part["delta"].get("stop_reason"))
    elif "output" in part.get("response", part):
        for i, item in enumerate(part.get("response", part)["output"]):
            for block in item.get("content", []):
                note(i, "text", block.get("text"))
            note(i, "name", item.get("name"))
            note(i, "arguments", item.get("arguments"))

"""The requests whose answers llama-server and this server must agree on.

`REQUESTS` is the table. `record.py` sends it to a real llama-server, `test_golden.py` to ours, both
in this order and one at a time. An id reads `group/name`; a group is one file of recordings.

All texts are chosen for the model of `tests/tiny_model.py fp16`: its greedy answers are nonsense,
but the same nonsense in every engine, because the best token is clear of the second one.
`python -m golden.record --margins` prints by how much. The texts below are copied from recordings,
so that stop strings and biased tokens meet them; `test_golden.py` checks that they are right.

Tags:
- `free`: the text and its token counts depend on details that are not compared (random sampling,
  whitespace that a grammar leaves open), so only their types are.
- `json`: the answer must parse as JSON when it was not cut.
- `cached`: some of the prompt must be served from the cache here when it is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One request. `body` is a JSON value, or bytes sent as they are, or None for no body."""

    id: str
    method: str
    path: str
    body: object = None
    tags: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    # Ids sent just before this one, their answers ignored: for state the answer shows.
    after: tuple[str, ...] = ()
    # Bodies of streams on POST /completion that are running while this request is answered.
    during: tuple[object, ...] = ()

    @property
    def group(self) -> str:
        """The file this request's recording stands in."""
        return self.id.partition("/")[0]

    def payload(self) -> bytes | None:
        """The bytes of the body."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


N_CTX = 1024  # of both servers, see record.py

# What is greedily said, in pieces: GREEDY after the prompt RAW, TALK in answer to SAID without a
# thought, THOUGHT in answer to ASKED.
RAW = "Berlin day time world name"
RAW_TOKENS = [66, 668, 283, 308, 288, 694, 267, 747, 995]
GREEDY = ["bliothè", " every", ",", '{"', "ater", "ere", "noth", "tem", " m", " führt", "@", "rst"]
GREEDY_TOKENS = [631, 892, 44, 303, 614, 327, 735, 315, 388, 972, 64, 456]
SAID = "Ways The places of laughed"
TALK = ["M", "noth", "s", "ystem", "Plea", "@", '":', "|", "brella", " star", "ature", "egrees"]
ASKED = "File rain"
THOUGHT = ["ction", "\\", "ger", '("', "ger", '("', "ger", '("', "ger", '("', "ger", '("']
CALLS = "How is the weather"  # answered with a tool call, given CALL_BIAS
LOOPS = "Tool red we"  # continued with "ol", over and over
SYSTEM_TEXT = "Be kind."
TOOL_SAID = "Numbers"  # with tools
LONG = "Gulls weather sunny"  # clear of the second token for 64 tokens

NEWLINE = 10  # token id b < 256 is the byte b
EOS, THINK, END_THINK, TOOL_CALL = 1016, 1020, 1021, 1022

SILENT = {"enable_thinking": False}
USER = [{"role": "user", "content": SAID}]
ASK = [{"role": "user", "content": ASKED}]
TOOL_USER = [{"role": "user", "content": TOOL_SAID}]
SYSTEM = {"role": "system", "content": SYSTEM_TEXT}

CITY = {"type": "string", "enum": ["Paris", "Rome"]}
CITY_SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": CITY_SCHEMA,
}
TOOLS = [{"type": "function", "function": WEATHER}]
TOOL_TIME = {"name": "get_time", "description": "The time.", "parameters": {"type": "object"}}
TWO_TOOLS = [*TOOLS, {"type": "function", "function": TOOL_TIME}]
# Lifts `<tool_call>`, a newline behind it, and the end of the answer above all other tokens, so
# that a grammar which demands a call gets one and the answer ends behind it. At the start of the
# answer the model prefers the newline by 9, behind `<tool_call>` by 13.
OPEN_CALL_BIAS = [[TOOL_CALL, 111], [NEWLINE, 100]]
CALL_BIAS = [*OPEN_CALL_BIAS, [EOS, 200]]
CALL_MESSAGES = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]

FLAG_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "side": {"enum": ["left", "right"]}},
    "required": ["ok", "side"],
    "additionalProperties": False,
}

REQUESTS: list[Request] = []


def add(id, path, body=None, *tags, method="POST", headers=(), after=(), during=()):
    """Appends one request."""
    headers = tuple(headers)
    REQUESTS.append(Request(id, method, path, body, frozenset(tags), headers, after, during))


def get(id, path, **options):
    """Appends one GET."""
    add(id, path, method="GET", **options)


def both(id, path, body, *tags, **stream_only):
    """Appends a request twice: as it is, and as `<id>+stream`. Their texts must agree here."""
    add(id, path, body, *tags)
    add(f"{id}+stream", path, {**body, "stream": True, **stream_only}, *tags)


def completion(id, *tags, path="/completion", twice=False, **fields):
    """Appends a greedy completion of RAW, seven tokens unless told otherwise."""
    body = {"prompt": RAW, "n_predict": 7, "temperature": 0, **fields}
    (both if twice else add)(id, path, body, *tags)


def text_completion(id, *tags, twice=False, **fields):
    """Appends a greedy /v1/completions of RAW."""
    body = {"prompt": RAW, "max_tokens": 7, "temperature": 0, **fields}
    (both if twice else add)(id, "/v1/completions", body, *tags)


def chat(id, *tags, path="/v1/chat/completions", twice=False, **fields):
    """Appends a greedy chat without a thought, seven tokens."""
    body = {"messages": USER, "max_tokens": 7, "temperature": 0, "chat_template_kwargs": SILENT}
    (both if twice else add)(id, path, {**body, **fields}, *tags)


def think(id, *tags, twice=True, **fields):
    """Appends a greedy chat whose template opens a thought."""
    body = {"messages": ASK, "max_tokens": 12, "temperature": 0, **fields}
    (both if twice else add)(id, "/v1/chat/completions", body, *tags)


# --- what the server says of itself (first, while no slot has been used) -------------------------

get("server/slots-unused", "/slots")
get("server/health", "/health")
get("server/v1-health", "/v1/health")
get("server/health-query", "/health?x=1&y")
get("server/props", "/props")
get("server/v1-models", "/v1/models")
get("server/models", "/models")
get("server/lora-adapters", "/lora-adapters")
get("server/metrics", "/metrics")
get("server/slots-fail-on-no-slot-idle", "/slots?fail_on_no_slot=1")

# --- tokenizer -----------------------------------------------------------------------------------

for name, body in {
    "plain": {"content": "Hello, world!"},
    "empty": {"content": ""},
    "no-content": {},
    "null-content": {"content": None},
    "number-content": {"content": 5},
    "object-content": {"content": {"a": 1}},
    "boolean-content": {"content": True},
    "unicode": {"content": "Привет, wörld 🙂 日本語\u2028\u0000end"},
    "newlines": {"content": "a\n\n\nb\r\n\tc    d"},
    "special": {"content": "<|im_start|>user\nHi<|im_end|><think>x</think>"},
    "special-as-text": {"content": "<|im_start|>user<think>", "parse_special": False},
    "special-parsed": {"content": "<|im_start|>user<think>", "parse_special": True},
    "add-special": {"content": "Hello", "add_special": True},
    "add-special-null": {"content": "Hello", "add_special": None, "with_pieces": None},
    "with-pieces": {"content": "Hello, world!", "with_pieces": True},
    "with-pieces-bytes": {"content": "é🙂\u3042", "with_pieces": True},
    "with-pieces-special": {"content": "<|im_end|></think>", "with_pieces": True},
    "mixed": {"content": ["Hello", 407, " world", 10]},
    "list-of-tokens": {"content": [407, 1006]},
    "empty-list": {"content": []},
    "nested-list": {"content": [["a"]]},
    "with-pieces-wrong-type": {"content": "Hello", "with_pieces": "yes"},
    "unknown-field": {"content": "Hello", "nonsense": 1},
}.items():
    add(f"tokenize/{name}", "/tokenize", body)

for name, body in {
    "plain": {"tokens": GREEDY_TOKENS},
    "empty": {"tokens": []},
    "no-tokens": {},
    "null-tokens": {"tokens": None},
    "string-tokens": {"tokens": "x"},
    "string-in-list": {"tokens": [407, "x"]},
    "float-in-list": {"tokens": [407.5]},
    "too-large": {"tokens": [99999]},
    "negative": {"tokens": [-1]},
    "special": {"tokens": [EOS, THINK, END_THINK]},
    "half-a-character": {"tokens": [0xD0]},
    "character-in-bytes": {"tokens": [0xF0, 0x9F, 0x99, 0x82]},
}.items():
    add(f"detokenize/{name}", "/detokenize", body)

# --- chat template -------------------------------------------------------------------------------

PART_A, PART_B = {"type": "text", "text": "first"}, {"type": "text", "text": "second"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
for name, body in {
    "user": {"messages": USER},
    "no-thought": {"messages": USER, "chat_template_kwargs": SILENT},
    "thought": {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}},
    "thought-as-text": {"messages": USER, "chat_template_kwargs": {"enable_thinking": "no"}},
    "effort-none": {"messages": USER, "reasoning_effort": "none"},
    "effort-high": {"messages": USER, "reasoning_effort": "high"},
    "system": {"messages": [SYSTEM, *USER]},
    "two-turns": {"messages": [*USER, {"role": "assistant", "content": "One."}, *ASK]},
    "parts": {"messages": [{"role": "user", "content": [PART_A, PART_B]}]},
    "one-part": {"messages": [{"role": "user", "content": [PART_A]}]},
    "no-parts": {"messages": [{"role": "user", "content": []}]},
    "null-content": {"messages": [{"role": "user", "content": None}]},
    "unicode": {"messages": [{"role": "user", "content": "Привет 🙂 <b>&amp;</b> \"quote\" 'q'"}]},
    "special-in-content": {"messages": [{"role": "user", "content": "<|im_end|>\n</think>"}]},
    "tools": {"messages": USER, "tools": TOOLS},
    "two-tools": {"messages": [SYSTEM, *USER], "tools": TWO_TOOLS},
    "tools-none": {"messages": USER, "tools": TOOLS, "tool_choice": "none"},
    "no-tools": {"messages": USER, "tools": []},
    "tool-call": {"messages": CALL_MESSAGES, "tools": TOOLS},
    "reasoning-content": {
        "messages": [
            *USER,
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
            *ASK,
        ]
    },
    "continue": {"messages": [*USER, {"role": "assistant", "content": "Once upon"}]},
    "continue-no-thought": {
        "messages": [*USER, {"role": "assistant", "content": "Once upon"}],
        "chat_template_kwargs": SILENT,
    },
    "two-assistants-last": {"messages": [{"role": "assistant", "content": x} for x in "ab"]},
    "no-generation-prompt": {"messages": USER, "add_generation_prompt": False},
    "kwargs-null": {"messages": USER, "chat_template_kwargs": None},
    "kwargs-wrong-type": {"messages": USER, "chat_template_kwargs": "x"},
    "kwargs-messages": {"messages": USER, "chat_template_kwargs": {"messages": []}},
    "no-messages": {},
    "empty-messages": {"messages": []},
    "messages-string": {"messages": "Hello"},
    "image": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "unknown-part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
}.items():
    add(f"template/{name}", "/apply-template", body)

# --- /completion ---------------------------------------------------------------------------------

completion("completion/greedy", twice=True)
completion("completion/greedy-24", twice=True, prompt=LONG, n_predict=24, return_tokens=True)
completion("completion/greedy-64", twice=True, prompt=LONG, n_predict=64)
completion("completion/plural-route", path="/completions", twice=True)
completion("completion/top-k-1", temperature=1, top_k=1)
completion("completion/cached-again", "cached", n_predict=1)
completion("completion/cache-prompt-false", cache_prompt=False)
completion("completion/tokens", prompt=RAW_TOKENS)
completion(
    "completion/tokens-and-text", prompt=[RAW_TOKENS[0], " places", RAW_TOKENS[2], "!"], n_predict=1
)
completion("completion/special-tokens-in-text", prompt=f"<|im_start|>user\n{SAID}", n_predict=1)
completion("completion/prompt-object", prompt={"prompt_string": RAW})
completion("completion/several-prompts", twice=True, prompt=[RAW, RAW_TOKENS], n_predict=3)
completion("completion/one-prompt-in-a-list", prompt=[RAW])
completion("completion/unicode-prompt", prompt="日本語 🙂 Привет", n_predict=1)
completion("completion/n-cmpl-2", n_cmpl=2, n_predict=3)
completion("completion/n-2", n=2, n_predict=3)
completion("completion/ignore-eos", ignore_eos=True)
completion("completion/eos", twice=True, logit_bias=[[EOS, 100]])
completion("completion/return-tokens", twice=True, return_tokens=True)
completion("completion/timings-per-token", twice=True, timings_per_token=True)
completion("completion/return-progress", twice=True, return_progress=True)
completion(
    "completion/progress-and-timings",
    twice=True,
    prompt="rain " * 300 + RAW,
    n_predict=2,
    return_progress=True,
    timings_per_token=True,
)
completion("completion/response-fields", response_fields=["content", "generation_settings/top_k"])
completion(
    "completion/response-fields-stream", twice=True, response_fields=["content", "stop", "missing"]
)
completion("completion/response-fields-empty", response_fields=[])
completion("completion/response-fields-slash", response_fields=["timings/predicted_n", "a/b/c", ""])
completion("completion/t-max-predict-ms", t_max_predict_ms=100000)
completion("completion/id-slot", id_slot=1)
completion("completion/byte-by-byte", twice=True, logit_bias=[[0xF0, 100]], n_predict=3)
completion("completion/unknown-fields", nonsense=1, another={"deep": [1]}, model="who")
completion("completion/empty-prompt", prompt="")
completion("completion/sampled", "free", temperature=1.5, seed=7, n_predict=12)
completion("completion/default-sampling", "free", temperature=None, top_k=None, n_predict=4)
completion("completion/stream-false", stream=False, stream_options=None)

# --- limits --------------------------------------------------------------------------------------

completion("limits/n-predict-0", twice=True, n_predict=0)
completion("limits/n-predict-1", twice=True, n_predict=1)
completion("limits/n-predict-null", n_predict=None, max_tokens=3)
completion("limits/n-predict-wins", n_predict=2, max_tokens=5, max_completion_tokens=4)
completion("limits/max-tokens", n_predict=None, max_tokens=3)
completion("limits/max-completion-tokens", n_predict=None, max_completion_tokens=3, max_tokens=5)
completion("limits/n-predict-minus-2", n_predict=-2)
ENDS = {"logit_bias": [[EOS, 100]]}  # at once, where the limit is accepted
completion("limits/n-predict-huge", n_predict=10**12, **ENDS)
completion("limits/n-predict-int-max-plus-1", n_predict=2**31, **ENDS)
completion("limits/n-predict-float", n_predict=2.0)
completion("limits/n-predict-fraction", n_predict=2.7)
completion("limits/n-predict-string", n_predict="7")
completion("limits/n-predict-boolean", n_predict=True)
completion("limits/n-predict-list", n_predict=[7])
FILL = {"response_fields": ["tokens_predicted", "tokens_evaluated", "stop_type", "truncated"]}
completion("limits/until-context-is-full", prompt="rain " * 500, n_predict=-1, **FILL)
completion("limits/beyond-context", prompt="rain " * 500, n_predict=900, **FILL)
completion("limits/prompt-too-long", twice=True, prompt="rain " * 600)
completion("limits/prompt-fills-context", prompt=[RAW_TOKENS[0]] * N_CTX)
completion("limits/prompt-leaves-one", prompt=[RAW_TOKENS[0]] * (N_CTX - 1), **FILL)
chat("limits/chat-0", twice=True, max_tokens=0)
chat("limits/chat-1", twice=True, max_tokens=1)
chat("limits/chat-n-predict-wins", n_predict=2, max_tokens=5)
chat("limits/chat-max-completion-tokens", max_tokens=None, max_completion_tokens=2)
chat("limits/chat-too-long", twice=True, messages=[{"role": "user", "content": "rain " * 600}])
text_completion("limits/text-too-long", prompt="rain " * 600)
text_completion("limits/text-0", max_tokens=0)

# --- stop strings --------------------------------------------------------------------------------

WORD = GREEDY[4]  # the fifth token; the sixth goes on with NEXT
NEXT = GREEDY[5]
completion("stop/whole-token", twice=True, n_predict=12, stop=[WORD])
completion("stop/inside-a-token", twice=True, n_predict=12, stop=[WORD[1:-1]])
OVER_THREE = GREEDY[3][1:] + WORD + NEXT[:2]
completion("stop/over-three-tokens", twice=True, n_predict=12, stop=[OVER_THREE])
completion("stop/string-not-list", twice=True, n_predict=12, stop=NEXT)
completion("stop/first-character", twice=True, n_predict=12, stop=[GREEDY[0][0]])
completion("stop/two", twice=True, n_predict=12, stop=[NEXT, WORD])
completion("stop/longer-and-shorter", n_predict=12, stop=[WORD + NEXT, WORD])
completion("stop/shorter-inside-longer", n_predict=12, stop=[WORD + NEXT, WORD[1:] + NEXT[0]])
completion("stop/never", twice=True, n_predict=12, stop=["absent", WORD + "?"])
completion("stop/held-back-at-limit", twice=True, n_predict=5, stop=[WORD + "?"])
completion("stop/at-limit", twice=True, n_predict=5, stop=[WORD])
completion("stop/on-token-1", n_predict=1, stop=[GREEDY[0][0]])
completion("stop/empty-list", stop=[])
completion("stop/empty-string", stop="")
completion("stop/empty-string-in-list", stop=[""])
completion("stop/null", stop=None)
completion("stop/null-in-list", stop=[None, WORD])
completion("stop/number", stop=5)
completion("stop/number-in-list", stop=[5])
completion("stop/object", stop={"a": 1})
completion("stop/special-token-text", stop=["<|im_end|>"])
text_completion("stop/text-completion", twice=True, max_tokens=12, stop=[WORD])
chat("stop/chat", twice=True, max_tokens=12, stop=[TALK[1][1:] + TALK[2][:1]])
chat("stop/chat-string", max_tokens=12, stop=TALK[3])
chat("stop/chat-null", stop=None)
chat("stop/chat-number", stop=5)

# --- nulls and wrong types ------------------------------------------------------------------------

NULLABLE = (
    *("stream", "cache_prompt", "return_tokens", "return_progress", "timings_per_token", "n_keep"),
    *("n_cmpl", "n", "id_slot", "t_max_predict_ms", "response_fields", "stream_options", "lora"),
    *("top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p"),
    *("dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty", "min_keep"),
    *("frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("adaptive_target", "adaptive_decay", "seed", "n_probs", "post_sampling_probs", "samplers"),
    *("json_schema", "grammar", "ignore_eos", "logit_bias", "stop", "reasoning_format"),
)
completion("null/all", **dict.fromkeys(NULLABLE))
for field in ("stop", "seed", "grammar", "json_schema", "logit_bias", "samplers", "n_probs", "n"):
    completion(f"null/{field}", **{field: None})
for field in ("max_tokens", "temperature", "prompt"):
    completion(f"null/{field}", **{"n_predict": 4, "top_k": 1, field: None})
CHAT_NULLABLE = (
    *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "n", "stop", "seed"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "stream", "stream_options", "user"),
    *("parallel_tool_calls", "reasoning_effort", "metadata", "store", "service_tier", "top_p"),
    *("chat_template_kwargs", "max_completion_tokens"),
)
chat("null/chat-all", messages=ASK, **dict.fromkeys(CHAT_NULLABLE))
for field in ("tools", "tool_choice", "response_format", "logprobs", "stream_options", "grammar"):
    chat(f"null/chat-{field}", **{field: None})
chat("null/chat-reasoning_format", reasoning_format=None)

WRONG = {
    "stream": "yes",
    "temperature": "hot",
    "top_p": {},
    "top_k": "forty",
    "seed": "lucky",
    "cache_prompt": 1,
    "ignore_eos": "no",
    "n_probs": "3",
    "repeat_penalty": [1.1],
    "samplers": 5,
    "logit_bias": "x",
    "dry_sequence_breakers": "x",
    "response_fields": "content",
    "grammar": 5,
    "json_schema": "x",
    "n": 0,
    "n_cmpl": 3,
    "lora": 5,
    "id_slot": "0",
    "repeat_last_n": -2,
    "dry_penalty_last_n": -1,
    "min_keep": -1,
    "adaptive_decay": 2,
    "stream_options": 5,
    "stop": {"x": 1},
}
for field, value in WRONG.items():
    completion(f"wrong/{field}", **{field: value})
for name, prompt in {
    "missing": ...,
    "number": 5,
    "boolean": True,
    "object": {"a": 1},
    "empty-list": [],
    "list-with-object": ["a", {"a": 1}],
    "list-with-null": [None],
    "negative-token": [-1, 5],
    "token-too-large": [407, 99999],
    "token-huge": [2**40],
    "float-token": [1.5],
}.items():
    body = {"n_predict": 2, "temperature": 0}
    add(f"wrong/prompt-{name}", "/completion", body if prompt is ... else body | {"prompt": prompt})
for name, messages in {
    "missing": ...,
    "null": None,
    "string": "Hello",
    "object": {"role": "user"},
    "number-inside": [5],
    "no-content": [{"role": "user"}],
    "no-role": [{"content": "x"}],
    "number-content": [{"role": "user", "content": 5}],
    "object-content": [{"role": "user", "content": {"a": 1}}],
    "number-role": [{"role": 5, "content": "x"}],
    "string-part": [{"role": "user", "content": ["x"]}],
    "part-without-type": [{"role": "user", "content": [{"text": "x"}]}],
    "empty-assistant": [*USER, {"role": "assistant"}],
    "image": [{"role": "user", "content": [IMAGE]}],
}.items():
    body = {"max_tokens": 2, "temperature": 0, "chat_template_kwargs": SILENT}
    body |= {} if messages is ... else {"messages": messages}
    add(f"wrong/messages-{name}", "/v1/chat/completions", body)
chat("wrong/chat-temperature", temperature="hot")
chat("wrong/chat-stream", stream="yes")
chat("wrong/chat-tools-string", tools="x")
chat("wrong/chat-tools-object", tools={})
chat("wrong/chat-tool-of-unknown-type", tools=[{"type": "x"}])
chat("wrong/chat-tool-without-name", tools=[{"type": "function", "function": {}}])
chat("wrong/chat-tool-choice", tools=TOOLS, tool_choice="perhaps")
chat("wrong/chat-top-logprobs-alone", top_logprobs=2)
chat("wrong/chat-logprobs-number", logprobs=3)
chat("wrong/chat-response-format-type", response_format={"type": "yaml"})
chat("wrong/chat-response-format-string", response_format="json")
chat("wrong/chat-reasoning-format", reasoning_format="x")
chat("wrong/chat-n-0", n=0)
chat("wrong/chat-n-3", n=3)
chat("wrong/chat-max-tokens-string", max_tokens="7")
text_completion("wrong/text-prompt-null", prompt=None)
text_completion("wrong/text-max-tokens", max_tokens=-7)
text_completion("wrong/text-temperature", temperature=[0])
for name, body in {
    "empty": b"",
    "open-brace": b"{",
    "trailing-comma": b'{"prompt": "a",}',
    "two-values": b'{"prompt": "a"} {}',
    "list": b"[]",
    "string": b'"prompt"',
    "null": b"null",
    "not-utf-8": b'{"prompt": "\xff"}',
    "lone-surrogate": b'{"prompt": "\\ud800", "n_predict": 1}',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "single-quotes": b"{'prompt': 'a'}",
    "comment": b'{"prompt": "a" /* comment */}',
    "control-character": b'{"prompt": "a\nb"}',
}.items():
    add(f"json/{name}", "/completion", body)
add("json/chat-open-brace", "/v1/chat/completions", b"{")
add("json/tokenize-open-brace", "/tokenize", b"{")
add("json/messages-open-brace", "/v1/messages", b"{")
SAME = b'{"prompt":"a","prompt":"%s","n_predict":2,"temperature":0}' % RAW.encode()
add("json/duplicate-key-last-wins", "/completion", SAME)
add("json/other-content-type", "/completion", SAME, headers=(("Content-Type", "text/plain"),))
add("json/no-content-type", "/completion", SAME, headers=(("Content-Type", ""),))

# --- sampling ------------------------------------------------------------------------------------

# Names and effective values: everything that changes nothing, so that the text stays greedy.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "seed": 42,
}
completion("sampling/neutral", **NEUTRAL)
for field, value in {
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.2,
    "adaptive_target": 0.4,
    "seed": 123,
}.items():
    completion(f"sampling/{field}", **{field: value})  # under temperature 0: only shown
for field, value in {"mirostat": 1, "typical_p": 0.5, "top_n_sigma": 2}.items():
    completion(f"sampling/{field}", **{field: value})
# Random, also under temperature 0: the best token may be removed, or the temperature rise again.
completion("sampling/xtc_probability", "free", xtc_probability=0.5)
completion("sampling/dynatemp_range", "free", dynatemp_range=1)
completion("sampling/repeat-penalty", prompt=LOOPS, repeat_penalty=1.5)
completion("sampling/repeat-last-n-0", prompt=LOOPS, repeat_penalty=1.5, repeat_last_n=0)
completion("sampling/presence-penalty", prompt=LOOPS, presence_penalty=2.0, n_predict=9)
completion("sampling/frequency-penalty", prompt=LOOPS, frequency_penalty=2.0)
completion("sampling/negative-presence-penalty", prompt=LOOPS, presence_penalty=-1.0)
completion("sampling/dry", prompt=LOOPS, dry_multiplier=2.0, n_predict=9)
completion("sampling/dry-base-too-small", dry_base=0.5)
completion("sampling/seed-minus-1", seed=-1)
completion("sampling/seed-large", seed=2**32 - 1)
completion("sampling/seed-huge", seed=2**40)
completion("sampling/seed-same-sampled", "free", seed=1, temperature=1, n_predict=3)
completion("sampling/temperature-negative", temperature=-1)
completion("sampling/temperature-integer", "free", temperature=1, n_predict=1)
completion("sampling/temperature-huge", "free", temperature=1e30, n_predict=1)
completion("sampling/top-k-negative", top_k=-5)
completion("sampling/top-p-above-1", top_p=1.5)
completion("sampling/min-p-below-0", min_p=-0.5)
completion("sampling/samplers-names", samplers=["top_k", "temperature"])
completion("sampling/samplers-string", samplers="kpmt")
completion("sampling/samplers-empty", "free", samplers=[])
completion("sampling/samplers-unknown", "free", samplers=["top_k", "magic"])
BAN = GREEDY_TOKENS[0]
for name, bias in {
    "pairs": [[BAN, -100]],
    "ban": [[BAN, False]],
    "object": {str(BAN): -100},
    "object-text": {"!": 50.5},
    "text-in-pair": [["!", 50]],
    "text-of-two-tokens": [["!?", 50]],
    "true-is-ignored": [[BAN, True]],
    "null-is-ignored": [[BAN, None]],
    "out-of-range": [[99999, 100], [-1, 100]],
    "huge": [[33, 1e10]],
    "three-in-a-pair": [[33, 100, 1]],
    "numbers": [33, 100],
    "empty": [],
    "empty-object": {},
}.items():
    completion(f"sampling/logit-bias-{name}", logit_bias=bias, n_predict=3)
chat("sampling/chat-logit-bias", logit_bias={"33": 100}, max_tokens=3)
chat("sampling/chat-logit-bias-string-value", logit_bias={"33": "100"}, max_tokens=3)
chat("sampling/chat-penalties-zero", frequency_penalty=0, presence_penalty=0, top_p=1)

# --- probabilities -------------------------------------------------------------------------------

completion("probs/n-probs-3", twice=True, n_probs=3)
completion("probs/n-probs-1", n_probs=1, n_predict=1)
completion("probs/n-probs-0", n_probs=0)
completion("probs/n-probs-huge", n_probs=2000, n_predict=1, response_fields=["content"])
completion("probs/n-probs-negative", n_probs=-1)
completion("probs/logprobs-as-n-probs", logprobs=2)
completion("probs/post-sampling", n_probs=2, post_sampling_probs=True, top_k=0)
completion(
    "probs/post-sampling-warm",
    n_probs=3,
    n_predict=1,
    post_sampling_probs=True,
    temperature=1,
    samplers=["top_k", "temperature"],
    top_k=4,
    logit_bias=[[BAN, 30]],
)
completion("probs/with-stop", twice=True, n_predict=12, n_probs=1, stop=[WORD])
completion("probs/bytes", twice=True, n_probs=1, n_predict=2, logit_bias=[[0xF0, 100]])
text_completion("probs/text", twice=True, logprobs=2, max_tokens=3)
text_completion("probs/text-0", logprobs=0, max_tokens=2)
chat("probs/chat", twice=True, logprobs=True, top_logprobs=2, max_tokens=3)
chat("probs/chat-default-top", logprobs=True, max_tokens=1)
chat("probs/chat-top-0", logprobs=True, top_logprobs=0, max_tokens=2)
chat("probs/chat-false", logprobs=False, max_tokens=2)
chat("probs/chat-n-2", logprobs=True, top_logprobs=1, n=2, max_tokens=2)
think("probs/thought", logprobs=True, top_logprobs=1, max_tokens=3)
chat("probs/tools-and-stream", logprobs=True, tools=TOOLS, stream=True)

# --- /v1/completions -----------------------------------------------------------------------------

text_completion("text/greedy", twice=True)
text_completion("text/usage", twice=True, stream_options={"include_usage": True})
text_completion("text/usage-false", twice=True, stream_options={"include_usage": False})
text_completion("text/n-2", twice=True, n=2, max_tokens=3)
text_completion("text/several-prompts", prompt=[RAW, RAW_TOKENS], max_tokens=3)
text_completion("text/several-prompts-of-tokens", prompt=[RAW_TOKENS, RAW_TOKENS], max_tokens=3)
text_completion("text/tokens", prompt=RAW_TOKENS)
text_completion("text/echo", echo=True)
text_completion("text/best-of", best_of=1, suffix=None)
text_completion("text/suffix", suffix="end")
text_completion("text/model", model="another-model")
text_completion("text/empty-prompt", prompt="")
text_completion("text/timings", twice=True, timings_per_token=True, max_tokens=3)
text_completion("text/progress", twice=True, return_progress=True, max_tokens=3)
text_completion("text/eos", twice=True, logit_bias=[[EOS, 100]])
text_completion("text/return-tokens", return_tokens=True, response_fields=["content"])
add("text/no-prompt", "/v1/completions", {"max_tokens": 3})

# --- chat ----------------------------------------------------------------------------------------

chat("chat/greedy", twice=True)
chat("chat/greedy-12", twice=True, max_tokens=12)
chat("chat/short-route", path="/chat/completions", twice=True)
chat("chat/usage", twice=True, stream_options={"include_usage": True})
chat("chat/usage-false", twice=True, stream_options={"include_usage": False})
chat("chat/timings", twice=True, timings_per_token=True)
chat("chat/progress", twice=True, return_progress=True)
chat(
    "chat/recorder",
    twice=True,
    timings_per_token=True,
    return_progress=True,
    stream_options={"include_usage": True},
)
chat("chat/cached-again", "cached", max_tokens=1)
chat("chat/n-2", twice=True, n=2, max_tokens=3)
chat("chat/n-2-usage", twice=True, n=2, max_tokens=2, stream_options={"include_usage": True})
chat("chat/n-1", n=1)
chat("chat/model", model="another-model")
chat("chat/user-and-metadata", user="u", metadata={"a": "b"}, store=False, service_tier="auto")
chat("chat/system", messages=[SYSTEM, *USER])
chat("chat/parts", messages=[{"role": "user", "content": [PART_A, PART_B]}], max_tokens=1)
chat("chat/null-content", messages=[{"role": "user", "content": None}], max_tokens=1)
chat("chat/continue", twice=True, messages=[*USER, {"role": "assistant", "content": "Once"}])
chat("chat/two-assistants-last", messages=[{"role": "assistant", "content": x} for x in "ab"])
chat("chat/empty-messages", messages=[], max_tokens=1)
chat("chat/eos", twice=True, logit_bias={str(EOS): 100})
chat("chat/return-tokens", return_tokens=True)
chat("chat/response-fields", response_fields=["choices"])
chat("chat/verbose", verbose=True, max_tokens=1)
chat("chat/sampled", "free", temperature=1.2, seed=3, max_tokens=5)
chat("chat/huge-numbers", seed=2**31, top_k=2**31 - 1, max_tokens=3)
chat("chat/byte-by-byte", twice=True, logit_bias=[[0xF0, 100]], max_tokens=2)
COUNT = "/v1/chat/completions/input_tokens"
add("chat/input-tokens", COUNT, {"messages": USER})
add("chat/input-tokens-tools", COUNT, {"messages": USER, "tools": TOOLS})
add("chat/input-tokens-short-route", "/chat/completions/input_tokens", {"messages": USER})
add("chat/input-tokens-no-messages", COUNT, {})
CONTROL = "/v1/chat/completions/control"
add("chat/control-no-id", CONTROL, {})
add("chat/control-no-action", CONTROL, {"id": "chatcmpl-x"})
add("chat/control-unknown-action", CONTROL, {"id": "chatcmpl-x", "action": "dance"})
add("chat/control-unknown-id", CONTROL, {"id": "chatcmpl-x", "action": "reasoning_end"})

# --- reasoning -----------------------------------------------------------------------------------

think("reasoning/unclosed")
think("reasoning/deepseek", reasoning_format="deepseek")
think("reasoning/none", reasoning_format="none")
think("reasoning/auto", reasoning_format="auto")
think("reasoning/deepseek-legacy", reasoning_format="deepseek-legacy")
think("reasoning/enable-thinking", chat_template_kwargs={"enable_thinking": True})
think("reasoning/effort-high", reasoning_effort="high")
think("reasoning/effort-none", twice=False, messages=USER, max_tokens=7, reasoning_effort="none")
think("reasoning/effort-number", twice=False, reasoning_effort=5)
think("reasoning/stop-in-thought", max_tokens=8, stop=[THOUGHT[2]])
think("reasoning/usage", stream_options={"include_usage": True}, timings_per_token=True)
think("reasoning/budget-3", "free", thinking_budget_tokens=3, max_tokens=8)
think("reasoning/budget-tokens-3", "free", reasoning_budget_tokens=3, max_tokens=8)
think("reasoning/budget-0", "free", thinking_budget_tokens=0, max_tokens=8)
think("reasoning/budget-minus-1", thinking_budget_tokens=-1)
think(
    "reasoning/budget-message",
    "free",
    thinking_budget_tokens=2,
    reasoning_budget_message=" enough",
    max_tokens=12,
)
CLOSED = 'root ::= "ab" "</think>" "\\n\\n" "cd"'
think("reasoning/closed-by-grammar", "free", grammar=CLOSED)
think("reasoning/closed-by-grammar-none", "free", grammar=CLOSED, reasoning_format="none")
think("reasoning/budget-and-schema", "free", "json", thinking_budget_tokens=3, max_tokens=120)
THOUGHT_THEN = [*ASK, {"role": "assistant", "content": "<think>\nhm"}]
think("reasoning/continue-thought", "free", messages=THOUGHT_THEN)
completion("reasoning/completion-none", reasoning_format="none")

# --- tools ---------------------------------------------------------------------------------------


def tool_chat(id, *tags, twice=True, **fields):
    """Appends a chat with a tool that the biased model calls."""
    fields = {"logit_bias": CALL_BIAS, "tools": TOOLS, **fields}
    message = [{"role": "user", "content": CALLS}]
    chat(id, "free", *tags, twice=twice, messages=message, max_tokens=120, **fields)


THINKING = {"chat_template_kwargs": {}}
tool_chat("tools/required", tool_choice="required")
tool_chat("tools/required-usage", tool_choice="required", stream_options={"include_usage": True})
tool_chat("tools/one-call-only", tool_choice="required", parallel_tool_calls=False)
tool_chat("tools/parallel", tool_choice="required", parallel_tool_calls=True)
tool_chat("tools/thought-then-call", tool_choice="required", thinking_budget_tokens=3, **THINKING)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
tool_chat("tools/named", tool_choice=NAMED)
tool_chat("tools/auto", twice=True, tool_choice="auto", logit_bias=OPEN_CALL_BIAS)
chat("tools/auto-no-call", messages=TOOL_USER, twice=True, tools=TOOLS)
chat("tools/none", messages=TOOL_USER, twice=True, tools=TOOLS, tool_choice="none")
chat("tools/empty", tools=[])
chat("tools/two", messages=TOOL_USER, tools=TWO_TOOLS, tool_choice="auto")
chat("tools/call-and-result", messages=CALL_MESSAGES, tools=TOOLS, max_tokens=1)
chat("tools/with-grammar", tools=TOOLS, grammar='root ::= "x"')
chat("tools/with-grammar-none", tools=TOOLS, tool_choice="none", grammar='root ::= "x"')
chat("tools/continue-a-call", tools=TOOLS, messages=CALL_MESSAGES[:2])

# --- constrained output --------------------------------------------------------------------------

YES = 'root ::= "yes" | "no"'
completion("grammar/gbnf", twice=True, grammar=YES)
completion("grammar/gbnf-letters", twice=True, grammar="root ::= [a-c]{4}")
completion("grammar/gbnf-rules", grammar='root ::= a b\na ::= "x"+\nb ::= "y"', n_predict=4)
completion("grammar/cut", grammar='root ::= "abcdefgh" "ijklmnopq"', n_predict=2)
completion("grammar/bad-syntax", grammar="root := x")
completion("grammar/undefined-rule", grammar="root ::= missing")
completion("grammar/no-root", grammar='start ::= "a"')
completion("grammar/empty-string", grammar="")
completion("grammar/bad-syntax-stream", grammar="root := x", stream=True)
completion("grammar/schema", "free", "json", twice=True, json_schema=FLAG_SCHEMA, n_predict=100)
completion("grammar/schema-cut", "free", json_schema=FLAG_SCHEMA, n_predict=2)
completion("grammar/schema-enum", twice=True, json_schema={"enum": ["left"]}, n_predict=8)
completion("grammar/schema-unknown-type", json_schema={"type": "nope"})
completion("grammar/schema-bad-ref", json_schema={"$ref": "#/missing"})
completion("grammar/schema-and-grammar", json_schema=FLAG_SCHEMA, grammar=YES)
chat("grammar/chat-grammar", twice=True, grammar=YES)
chat("grammar/chat-bad-grammar", grammar="root := x")
chat("grammar/chat-bad-grammar-stream", grammar="root := x", stream=True)
CHAT_JSON = {"max_tokens": 100}
chat("grammar/chat-schema", "free", "json", twice=True, json_schema=FLAG_SCHEMA, **CHAT_JSON)
FORMAT = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG_SCHEMA}}
STRICT = {"type": "json_schema", "json_schema": {"schema": FLAG_SCHEMA, "strict": True}}
OBJECT = {"type": "json_object", "schema": FLAG_SCHEMA}
chat("grammar/format-schema", "free", "json", twice=True, response_format=FORMAT, **CHAT_JSON)
chat("grammar/format-strict", "free", "json", response_format=STRICT, **CHAT_JSON)
chat("grammar/format-object-schema", "free", "json", response_format=OBJECT, **CHAT_JSON)
chat("grammar/format-object", "free", "json", response_format={"type": "json_object"})
chat("grammar/format-text", response_format={"type": "text"})
chat("grammar/format-empty", response_format={})
BAD_FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}
chat("grammar/format-bad-schema", response_format=BAD_FORMAT)
chat("grammar/format-no-schema", "free", response_format={"type": "json_schema"})
chat("grammar/grammar-and-schema", grammar=YES, json_schema=FLAG_SCHEMA)

# --- Anthropic -----------------------------------------------------------------------------------


def anthropic(id, *tags, twice=False, **fields):
    """Appends a greedy /v1/messages without a thought."""
    body = {"messages": USER, "max_tokens": 7, "temperature": 0, "chat_template_kwargs": SILENT}
    (both if twice else add)(id, "/v1/messages", {**body, **fields}, *tags)


ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": CITY_SCHEMA}]
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
USED = [
    *USER,
    {"role": "assistant", "content": [TOOL_USE]},
    {"role": "user", "content": [RESULT, PART_A]},
]
anthropic("anthropic/greedy", twice=True)
anthropic("anthropic/system", system=SYSTEM_TEXT)
KIND_PARTS = [{"type": "text", "text": text} for text in ("Be ", "kind.")]
anthropic("anthropic/system-parts", system=KIND_PARTS)
anthropic("anthropic/parts", messages=[{"role": "user", "content": [PART_A]}])
anthropic("anthropic/thought", twice=True, messages=ASK, chat_template_kwargs={})
anthropic("anthropic/thinking-enabled", twice=True, thinking={"type": "enabled"}, max_tokens=12)
anthropic("anthropic/stop-sequence", twice=True, max_tokens=12, stop_sequences=[TALK[3]])
anthropic("anthropic/max-tokens-1", twice=True, max_tokens=1)
anthropic("anthropic/tools", messages=TOOL_USER, tools=ANTHROPIC_TOOLS)
anthropic("anthropic/tool-result", messages=USED, tools=ANTHROPIC_TOOLS, max_tokens=1)
anthropic("anthropic/metadata", metadata={"user_id": "u"}, model="claude")
add("anthropic/no-messages", "/v1/messages", {"max_tokens": 3})
anthropic("anthropic/messages-string", messages="Hello")
anthropic("anthropic/temperature-string", temperature="hot")
anthropic("anthropic/too-long", twice=True, messages=[{"role": "user", "content": "rain " * 600}])
TALLY = "/v1/messages/count_tokens"
add("anthropic/count-tokens", TALLY, {"messages": USER})
add("anthropic/count-tokens-system", TALLY, {"messages": USER, "system": SYSTEM_TEXT})
add("anthropic/count-tokens-tools", TALLY, {"messages": USER, "tools": ANTHROPIC_TOOLS})
add("anthropic/count-tokens-no-messages", TALLY, {})

# --- OpenAI responses ----------------------------------------------------------------------------


def responses(id, *tags, twice=False, **fields):
    """Appends a greedy /v1/responses without a thought."""
    body = {"input": SAID, "max_output_tokens": 7, "temperature": 0}
    body = {**body, "chat_template_kwargs": SILENT, **fields}
    (both if twice else add)(id, "/v1/responses", body, *tags)


RESPONSE_TOOLS = [{"type": "function", **WEATHER}]
responses("responses/greedy", twice=True)
responses("responses/short-output", twice=True, max_output_tokens=1)
responses("responses/messages", input=USER)
INPUT_TEXT = {"type": "input_text", "text": SAID}
responses("responses/parts", input=[{"role": "user", "content": [INPUT_TEXT]}])
responses("responses/instructions", instructions=SYSTEM_TEXT)
responses("responses/thought", twice=True, input=ASKED, chat_template_kwargs={})
responses(
    "responses/tool-call",
    "free",
    twice=True,
    input=CALLS,
    tools=RESPONSE_TOOLS,
    tool_choice="required",
    logit_bias=CALL_BIAS,
    max_output_tokens=120,
)
responses(
    "responses/tool-output",
    max_output_tokens=1,
    tools=RESPONSE_TOOLS,
    input=[
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ],
)
responses("responses/other-tools-skipped", tools=[{"type": "web_search"}])
responses("responses/previous-response-id", previous_response_id="resp_1")
responses("responses/input-number", input=5)
responses("responses/item-unknown", input=[{"type": "smell"}])
add("responses/no-input", "/v1/responses", {"max_output_tokens": 3})
add("responses/input-tokens", "/v1/responses/input_tokens", {"input": SAID})

# --- infill, and what is not there ---------------------------------------------------------------

INFILL = {"input_prefix": "def f(", "input_suffix": "return", "n_predict": 4, "temperature": 0}
both("infill/plain", "/infill", INFILL)
add("infill/prompt", "/infill", {**INFILL, "prompt": "a, b"})
EXTRA = [{"filename": "a.py", "text": "x = 1\n"}]
add("infill/extra", "/infill", {**INFILL, "input_extra": EXTRA})
add("infill/extra-string", "/infill", {**INFILL, "input_extra": "x"})
add("infill/extra-without-text", "/infill", {**INFILL, "input_extra": [{"filename": "a"}]})
add("infill/no-prefix", "/infill", {"input_suffix": "b", "n_predict": 1})
add("infill/no-suffix", "/infill", {"input_prefix": "a", "n_predict": 1})

for path in ("/embedding", "/embeddings", "/v1/embeddings"):
    add(f"absent/{path[1:].replace('/', '-')}", path, {"input": "a"})
for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
    add(f"absent/{path[1:].replace('/', '-')}", path, {"query": "a", "documents": ["b"]})
for action in ("erase", "save", "restore", "dance"):
    add(f"absent/slots-{action}", f"/slots/0?action={action}", {"filename": "x.bin"})
add("absent/slots-not-a-number", "/slots/x?action=erase", {})
add("absent/props-post", "/props", {})
add("absent/lora-adapters-empty", "/lora-adapters", [])
add("absent/lora-adapters-object", "/lora-adapters", {})
add("absent/audio", "/v1/audio/transcriptions", {"file": "x"})
get("absent/tools", "/tools")

# --- HTTP ----------------------------------------------------------------------------------------

get("http/unknown-route", "/nope")
add("http/unknown-route-post", "/v1/nope", {})
get("http/get-on-post-route", "/completion")
add("http/post-on-get-route", "/health", {})
add("http/put", "/completion", {}, method="PUT")
add("http/delete", "/props", method="DELETE")
get("http/double-slash", "//health")
get("http/trailing-slash", "/health/")
get("http/upper-case", "/Health")
add("http/options", "/completion", method="OPTIONS", headers=(("Origin", "http://localhost:1"),))
add("http/head", "/health", method="HEAD")

# --- slots while and after work (last: they show what happened before) ---------------------------

# Two of them fit into N_CTX together: here all slots draw on one cache of that size.
WORK = {"prompt": RAW, "n_predict": 400, "temperature": 0, "ignore_eos": True, "stream": True}
get("slots/after-use", "/slots", after=("completion/greedy", "chat/greedy"))
get("slots/busy", "/slots", during=(WORK,))
get("slots/all-busy", "/slots", during=(WORK, WORK))
get("slots/fail-on-no-slot", "/slots?fail_on_no_slot=1", during=(WORK, WORK))
get("slots/metrics-after-use", "/metrics")

BY_ID = {request.id: request for request in REQUESTS}
assert len(BY_ID) == len(REQUESTS), "two requests share an id"
PAIRS = [(id, f"{id}+stream") for id in BY_ID if f"{id}+stream" in BY_ID]

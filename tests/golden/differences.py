"""What may differ from llama-server, and why: the README's section of that name is made from here.

The comparison of a request gives lines `path: what` (see `compare.py`). An entry of `DIFFERENCES`
names the requests and the paths it excuses. An entry that excuses nothing fails the test, so the
list cannot outlive its reasons. `cd tests && python -m golden.differences` prints the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from golden.requests import Request

REFUSED = "$.status: 200 here 400"
# Members that llama-server has and this server has not
LLAMA_SLOT_SETTINGS = (
    *("speculative.types", "chat_format", "reasoning_format", "reasoning_in_content"),
    *("generation_prompt", "backend_sampling"),
)
LLAMA_SETTINGS = (*("grammar_lazy", "grammar_triggers", "preserved_tokens"), *LLAMA_SLOT_SETTINGS)
LLAMA_PROPS = (
    *("model_ftype", "is_sleeping", "media_marker", "chat_template_caps"),
    *("ui", "ui_settings", "cors_proxy_enabled"),
)
LLAMA_MODEL = (
    *("architecture", "tags", "aliases", "owned_by"),
    *("meta.vocab_type", "meta.n_embd", "meta.ftype", "meta.size"),
)
LLAMA_SLOT = (
    *("id_task", "params", "next_token", "n_prompt_tokens"),
    *("n_prompt_tokens_processed", "n_prompt_tokens_cache"),
)


@dataclass(frozen=True)
class Difference:
    """An allowed difference.

    `ids` and `paths` are globs: `*` is any text, everything else is itself. A path with ": " in it
    is matched against the whole line, so that both values can be pinned; otherwise any difference
    at that path is allowed. `what`, `here` and `reason` are the cells of a row of the README.
    """

    ids: str
    paths: str
    what: str
    here: str
    reason: str

    def allows(self, id: str, line: str) -> bool:
        """True when it covers this line of the comparison of request `id`."""
        text = line if ": " in self.paths else line.partition(": ")[0]
        return glob(self.ids, id) and glob(self.paths, text)


def glob(pattern: str, text: str) -> bool:
    """True when `pattern`, in which `*` is any text, describes `text`."""
    return regular_expression(pattern).fullmatch(text) is not None


@cache
def regular_expression(pattern: str) -> re.Pattern[str]:
    """A glob as a compiled regular expression."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def unexplained(
    request: Request, lines: Iterable[str], allowed: list[Difference], used: set[Difference]
) -> list[str]:
    """Returns the lines that no entry allows; adds the entries that allow one to `used`."""
    left = []
    for line in lines:
        matching = [difference for difference in allowed if difference.allows(request.id, line)]
        used.update(matching)
        if not matching:
            left.append(line)
    return left


def differences_to_markdown(differences: list[Difference] | None = None) -> str:
    """Returns the README's table; entries with the same texts are one row."""
    entries = DIFFERENCES if differences is None else differences
    rows = dict.fromkeys((d.what, d.here, d.reason) for d in entries)
    lines = [("what", "here", "why"), ("---", "---", "---"), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |\n" for row in lines)


def allow(what: str, here: str, reason: str, *places: tuple[str, str]) -> list[Difference]:
    """Returns one row's entries, one for each (ids, path) and each of the space-separated ids."""
    return [
        Difference(glob_of_ids, path, what, here, reason)
        for ids, path in places
        for glob_of_ids in ids.split()
    ]


DIFFERENCES: list[Difference] = [
    # --- refusals ---
    *allow(
        "the `message` of an error",
        "our own words; `code` and `type` are the same",
        "it names the field and what it may be, not a C++ exception",
        ("*", "$.body.error.message"),
    ),
    *allow(
        "requests that llama-server fails with 500",
        "400 `invalid_request_error`",
        "the request is at fault, and clients send a 5xx again",
        ("*", "$.status: 500 here 400"),
        ("*", "$.body.error.code: 500 here 400"),
        ("*", "$.body.error.type: 'server_error' here 'invalid_request_error'"),
    ),
    *allow(
        "wrong types and values that llama-server ignores, clamps or truncates",
        "400 naming the field: fractions and booleans for integers, numbers and token ids out of "
        "range, text where a list or an object belongs, no messages at all, a `response_format` "
        "without `type` or schema",
        "a setting that is not honoured must not be accepted",
        ("template/kwargs-wrong-type template/empty-messages chat/empty-messages", REFUSED),
        ("detokenize/float-in-list limits/n-predict-fraction limits/n-predict-boolean", REFUSED),
        ("stop/number stop/object stop/chat-number wrong/stop wrong/stream_options", REFUSED),
        ("wrong/samplers wrong/logit_bias wrong/grammar wrong/prompt-token-huge", REFUSED),
        ("wrong/response_fields", REFUSED),
        ("sampling/dry-base-too-small sampling/top-k-negative", REFUSED),
        ("wrong/chat-response-format-string grammar/format-empty", REFUSED),
        ("grammar/format-no-schema reasoning/effort-number sampling/samplers-string", REFUSED),
        ("sampling/temperature-negative sampling/top-p-above-1 sampling/min-p-below-0", REFUSED),
        ("sampling/logit-bias-true-is-ignored sampling/logit-bias-null-is-ignored", REFUSED),
        ("sampling/logit-bias-out-of-range sampling/logit-bias-three-in-a-pair", REFUSED),
        ("sampling/logit-bias-numbers sampling/chat-logit-bias-string-value", REFUSED),
        ("probs/n-probs-huge probs/n-probs-negative", REFUSED),
    ),
    *allow(
        "a `grammar` and a schema in one request",
        "400; there the schema wins",
        "which of the two is meant cannot be known",
        ("grammar/schema-and-grammar", REFUSED),
    ),
    *allow(
        "samplers that exllamav3 lacks (mirostat, typical_p, top_n_sigma, dynatemp) and "
        "`post_sampling_probs`",
        "400 that names the field, neutral values accepted; there they are applied",
        "a setting that is not honoured must not be accepted",
        ("sampling/mirostat sampling/typical_p sampling/top_n_sigma", REFUSED),
        ("sampling/dynatemp_range probs/post-sampling probs/post-sampling-warm", REFUSED),
    ),
    *allow(
        "a prompt as an object with media",
        "400",
        "images are not served",
        ("completion/prompt-object", REFUSED),
    ),
    *allow(
        "wrong method on a known route",
        "405 with `Allow`, there 404 or 501",
        "it says what is wrong",
        ("http/get-on-post-route http/post-on-get-route http/put http/delete", "$.status"),
        ("http/get-on-post-route http/post-on-get-route http/put http/delete", "$.body.error.*"),
        ("absent/props-post", "$.status: 501 here 405"),
        ("absent/props-post", "$.body.error.*"),
    ),
    *allow(
        "`/tools`, `/cors-proxy`, `/v1/stream` and `/v1/streams/lookup` (for its web UI)",
        "404 as any unknown route; there 403 unless they are enabled, and streams can be resumed",
        "there is none of it here; the web UI works without, but a reload ends a running answer",
        ("absent/tools", "$.status: 403 here 404"),
        ("absent/tools", "$.body.error.*"),
    ),
    # --- accepted here ---
    *allow(
        "`n_predict` beyond 2147483647",
        "no limit but the cap and the context; there 400",
        "every number beyond what the context leaves means the same",
        ("limits/n-predict-huge limits/n-predict-int-max-plus-1", "$.status: 400 here 200"),
    ),
    *allow(
        "more choices (`n`, `n_cmpl`) than slots",
        "up to 64, those without a slot wait for one; there 400",
        "they share one prefill and need no slot each at the same time",
        ("wrong/n_cmpl wrong/chat-n-3", "$.status: 400 here 200"),
    ),
    *allow(
        "`dry_penalty_last_n` of -1",
        "all tokens, as llama-server had it before; there 400",
        "clients written for older versions send it",
        ("wrong/dry_penalty_last_n", "$.status: 400 here 200"),
    ),
    *allow(
        "`reasoning_format: null`",
        "as if absent, there 400",
        "null is as if absent for every field",
        ("null/chat-reasoning_format", "$.status: 400 here 200"),
    ),
    *allow(
        "`logprobs` with `tools` and `stream`",
        "answered, there 400",
        "nothing stands against it",
        ("probs/tools-and-stream", "$.status: 400 here 200"),
        ("probs/tools-and-stream", "$.content_type"),
        ("probs/tools-and-stream", "$.kind"),
    ),
    *allow(
        "lone surrogates in JSON strings",
        "accepted, there 400",
        "JSON allows them, and JavaScript cuts strings so",
        ("json/lone-surrogate", "$.status: 400 here 200"),
    ),
    *allow(
        "paths with a double slash or a slash at the end",
        "find their route, there 404",
        "base URLs are written with a slash at the end and without one",
        ("http/double-slash http/trailing-slash", "$.status: 404 here 200"),
    ),
    *allow(
        "`OPTIONS`",
        "has no body and so no content type, there `text/html`",
        "there is nothing in it",
        ("http/options", "$.content_type"),
    ),
    # --- prompts ---
    *allow(
        "thinking, when neither flag nor request says anything of it",
        "is left to the chat template's own default; there `enable_thinking: true` is passed",
        "the template is rendered as its authors and transformers render it; "
        "`--chat-template-kwargs '{\"enable_thinking\": true}'` for the other",
        ("default/*", "$.body.prompt: '*<think>\\n' here '*assistant\\n'"),
    ),
    *allow(
        "`messages` and the like in `chat_template_kwargs`",
        "have no effect, there they replace the request's own",
        "the rendered messages must be the checked ones",
        ("template/kwargs-messages", "$.body.prompt"),
    ),
    *allow(
        "a trailing assistant message",
        "is continued, and not repeated in the answer; there the answer begins with it, and it "
        "stands behind an empty thought also where the template opens none",
        "the answer is what was generated, and the prompt what the template says",
        ("template/continue-no-thought", "$.body.prompt"),
        ("chat/continue chat/continue+stream", "*.content"),
        ("chat/continue", "$.body.usage.*_tokens"),
        ("chat/continue chat/continue+stream", "*.timings.prompt_n+cache_n"),
    ),
    *allow(
        "a trailing assistant message that ends in a thought",
        "is continued as a thought; there the thought is taken for content",
        "that is how it was begun",
        ("reasoning/continue-thought reasoning/continue-thought+stream", "$.*"),
    ),
    *allow(
        "a last message of the assistant that has tool calls",
        "is a turn like any other, and the next one is generated; there 400",
        "that is what the template says of it",
        ("tools/continue-a-call", "$.*"),
    ),
    *allow(
        "`echo` on `/v1/completions`",
        "puts the prompt in front of the text; there it has no effect",
        "OpenAI's API",
        ("text/echo", "$.body.choices[0].text"),
    ),
    *allow(
        "an empty prompt",
        "begins with BOS or else the end-of-text token, and is answered; there nothing is done",
        "it is what the model says unasked",
        ("completion/empty-prompt text/empty-prompt", "$.body.*"),
    ),
    *allow(
        "a reasoning budget",
        "counts what is generated of the thought, so that 0 closes it at once; there the newline "
        "behind the tag counts too, and 0 has no effect with this template",
        "it is what the number says",
        ("reasoning/budget-0", "$.body.choices[0].message.reasoning_content: missing*"),
        ("reasoning/budget-0+stream", "$.events[reasoning_content]: no such event here*"),
        ("reasoning/budget-0+stream", "$.events[content]: not in llama-server*"),
    ),
    # --- limits ---
    *allow(
        "`n_predict` or `max_tokens` of 0",
        "evaluates the prompt and generates nothing; there one token comes out",
        "0 means none",
        ("limits/n-predict-0 limits/chat-0 limits/text-0", "$.body.*"),
        ("limits/n-predict-0+stream limits/chat-0+stream", "$.events*"),
    ),
    *allow(
        "the last place of the context",
        "is not filled",
        "exllamav3 keeps it free",
        ("limits/until-context-is-full", "$.body.tokens_predicted: 23 here 22"),
        ("limits/beyond-context", "$.body.tokens_predicted: 23 here 22"),
    ),
    # --- stop strings ---
    *allow(
        "empty stop strings",
        'are no stops; there `""` and `[""]` end the answer at once',
        "an empty answer is never what was meant",
        ("stop/empty-string stop/empty-string-in-list", "$.body.*"),
    ),
    *allow(
        "text held back for a stop string when the token limit is reached",
        "is sent, there it is lost in a stream (not without `stream`)",
        "streamed or not, the answer is the same",
        ("stop/held-back-at-limit+stream", "$.events[content].content"),
    ),
    *allow(
        "a token that completes a stop string and, later, a longer one",
        "the answer ends where the first one is complete, there the one that begins first wins",
        "the result does not depend on how the text is cut into tokens",
        ("stop/shorter-inside-longer", "$.body.content"),
        ("stop/shorter-inside-longer", "$.body.stopping_word"),
    ),
    *allow(
        "stop strings in a thought",
        "do not end it, there they do",
        "they are about the answer; the caller does not know what the thought will say",
        ("reasoning/stop-in-thought", "$.body.*"),
        ("reasoning/stop-in-thought+stream", "$.events*"),
    ),
    # --- grammars ---
    *allow(
        "tokens under a grammar or schema",
        "text that the grammar leaves no choice about comes in the tokenizer's own tokens, and "
        "when the grammar is complete the answer ends without a stop token; the text is the same",
        "llguidance, exllamav3's grammar engine, works so",
        ("grammar/gbnf* grammar/schema-enum*", "$.body.tokens_*"),
        ("grammar/gbnf* grammar/schema-enum*", "$.events[*].tokens*"),
        ("grammar/* tools/with-grammar-none", "$.*.timings.predicted_n"),
        ("grammar/chat-grammar tools/with-grammar-none", "$.body.usage.*_tokens"),
    ),
    *allow(
        "a grammar or schema with a model that thinks",
        "holds from the end of the thought on, there from its beginning",
        "it describes the answer; a thought cannot be JSON",
        ("reasoning/closed-by-grammar*", "*.finish_reason: 'stop' here 'length'"),
        ("reasoning/closed-by-grammar+stream", "$.events[content]: no such event here*"),
    ),
    # --- log-probabilities and partial characters ---
    *allow(
        "`logprobs: true` in a chat without `top_logprobs`, or with 0",
        "log-probabilities of the tokens without alternatives; there 20 of them, or nothing",
        "OpenAI's API",
        ("probs/chat-default-top", "$.body.choices[0].logprobs.content[0].top_logprobs*"),
        ("probs/chat-top-0", "$.body.choices[0].logprobs: not in llama-server*"),
    ),
    *allow(
        "bytes of a character that the end cuts off",
        "are sent as U+FFFD, one for each, with their log-probabilities; there they are lost in "
        "streams, in part in chats, and have no log-probabilities",
        "streamed or not, the answer is the same, with an entry for every token",
        ("probs/bytes", "$.body.completion_probabilities: not in llama-server*"),
        ("probs/bytes+stream completion/byte-by-byte+stream", "$.events[content]: not in*"),
        ("chat/byte-by-byte", "$.body.choices[0].message.content"),
        ("chat/byte-by-byte+stream", "$.events[role]: not in llama-server*"),
        ("chat/byte-by-byte+stream", "$.events[content]: not in llama-server*"),
    ),
    *allow(
        "log-probabilities of the token that completes a stop string",
        "are not sent; there they are in a stream, and else not",
        "streamed or not, the answer is the same; its text is not sent either",
        ("probs/with-stop+stream", "$.events[content]*"),
    ),
    # --- chunks ---
    *allow(
        "`content` of the first chat chunk",
        '`""`, llama-server sends `null`',
        "OpenAI's own form; clients that add deltas up need no special case",
        ("*", "$.events[role*].choices[0].delta.content: type null here string, None here ''"),
        ("*", "$.events[progress*].choices[0].delta.content: type null here string*"),
    ),
    *allow(
        "`timings` in a chat stream with `include_usage`",
        "on the finish chunk and on the usage chunk, there only on the latter",
        "a client that stops at finish_reason keeps its figures",
        ("*usage+stream chat/recorder+stream", "$.events[finish*].timings"),
    ),
    *allow(
        "`include_usage` in a `/v1/completions` stream",
        "usage comes in a chunk of its own, there on the finish chunk as without it",
        "OpenAI's API",
        ("text/usage+stream", "$.events[finish].usage: missing*"),
        ("text/usage+stream", "$.events[usage]: not in llama-server*"),
    ),
    *allow(
        "`usage` with several choices or prompts",
        "counts them all, in a stream once at its end; there one of them, and once for each",
        "OpenAI's API; it is what the request cost",
        ("chat/n-2 chat/n-2-usage text/n-2 probs/chat-n-2", "$.body.usage.*_tokens"),
        ("text/several-prompts text/several-prompts-of-tokens", "$.body.usage.*_tokens"),
        ("text/n-2+stream", "$.events[finish*].usage*"),
        ("chat/n-2-usage+stream", "$.events[content]: no such event here*"),
        ("chat/n-2-usage+stream", "$.events[usage]: no such event here*"),
        ("chat/n-2-usage+stream", "$.events[content].choices[0].delta.content: 'noth' *"),
        ("chat/n-2-usage+stream", "$.events[usage].usage.*_tokens"),
    ),
    *allow(
        "chunks without contents",
        "are not sent: no `data: null` before a stream of several prompts, no empty text for a "
        "stop token, no token 0 in progress events",
        "every chunk says something",
        ("completion/several-prompts+stream", "$.events[None]: no such event here*"),
        ("text/eos+stream", "$.events[text]: no such event here*"),
        ("completion/*progress*+stream", "$.events[progress].tokens: 1 items here 0"),
    ),
    *allow(
        "`verbose`",
        "has no effect, there a chat answer then has `__verbose`",
        "the same request at `/apply-template` and `/completion` shows it all",
        ("chat/verbose", "$.body.__verbose: missing*"),
    ),
    # --- what the server says of itself ---
    *allow(
        "`generation_settings`, and `params` in `/props`",
        "hold the settings that there are here; not llama.cpp's chat parser, grammar triggers, "
        "backend and speculation; a seed and limits are shown as sent, a schema not as a grammar, "
        "a banned token with the least number, and `ignore_eos` not as a bias",
        "the effective values, nothing that is not so",
        *(("*", f"*settings*.{name}: missing*") for name in LLAMA_SETTINGS),
        ("server/props", "$.body.default_generation_settings.params.*: not in llama-server*"),
        ("sampling/seed-huge", "*.generation_settings.seed"),
        ("grammar/schema*", "*.generation_settings.grammar: '*' here ''"),
        ("sampling/logit-bias-ban", "*.bias: type null here number*"),
        ("completion/ignore-eos", "*.generation_settings.logit_bias: 1 items here 0"),
    ),
    *allow(
        "`samplers`",
        "lists exllamav3's, without `top_n_sigma` and `typ_p`",
        "it has no others",
        ("*", "*settings*.samplers: 9 items here 7"),
        ("*", "*settings*.samplers[*]"),
    ),
    *allow(
        "`build_info` in `/props`",
        "absent; the engine's name and version are in the `engine` block",
        "it is not a build of llama.cpp, and recorders tell servers apart by it",
        ("server/props", "$.body.build_info: missing*"),
        ("server/props", "$.body.engine: not in llama-server*"),
    ),
    *allow(
        "members of `/props` about GGUF files, sleeping, media and the web UI",
        "absent: `model_ftype is_sleeping media_marker chat_template_caps ui ui_settings "
        "cors_proxy_enabled`; `chat_template` keeps the newline at its end",
        "there is none of it here",
        *(("server/props", f"$.body.{name}: missing*") for name in LLAMA_PROPS),
        ("server/props", "$.body.chat_template"),
    ),
    *allow(
        "`/v1/models`",
        "OpenAI's list with the facts that are known: no `models` in Ollama's form, `architecture` "
        "`tags` `aliases`, nor `meta`'s `vocab_type n_embd ftype`; `owned_by` is `exl3-serve`, "
        "`size` that of the weights' files",
        "the rest describes GGUF files or other servers",
        ("server/v1-models server/models", "$.body.models: missing*"),
        *(("server/v1-models server/models", f"$.body.data[0].{name}") for name in LLAMA_MODEL),
    ),
    *allow(
        "`/metrics`",
        "counts a job's tokens when it has ended; the two averages are over all jobs, there since "
        "the last look; `spec_decode_num_drafts_total` is absent, and there are "
        "`exl3_serve:recoveries_total` and `exl3_serve:step_seconds`, the time of the present step",
        "the engine's final figures; it does not count drafts; a look must change nothing",
        ("server/metrics slots/metrics-after-use", "$.metrics.exl3_serve:*: not in llama-server*"),
        ("server/metrics slots/metrics-after-use", "$.metrics.llamacpp:spec_*_drafts_total: miss*"),
    ),
    *allow(
        "`/slots`",
        "an idle slot tells nothing of its last request; every slot has `n_past`, the tokens in "
        "the context, and a busy one `n_decoded` and `n_remain` also at the top, but not "
        "`has_new_line`; `params` are those of `generation_settings` here without texts and biases",
        "requests are not shown to others once they are over; progress can be read off",
        ("server/slots-* slots/*", "$.*[*].n_past: not in llama-server*"),
        ("slots/busy slots/all-busy", "$.slots[*].n_decoded: not in llama-server*"),
        ("slots/busy slots/all-busy", "$.slots[*].n_remain: not in llama-server*"),
        ("slots/busy slots/all-busy", "$.slots[*].next_token[0].has_new_line: missing*"),
        *(("slots/*busy", f"$.slots[*].params.{name}: missing*") for name in LLAMA_SLOT_SETTINGS),
        *(("slots/after-use", f"$.slots[*].{name}: missing*") for name in LLAMA_SLOT),
        *(("slots/busy", f"$.slots[0].{name}: missing*") for name in LLAMA_SLOT),
    ),
]


if __name__ == "__main__":
    print(differences_to_markdown(), end="")

"""What llama-server answers and this server does not yet: the list that has to shrink.

An entry of `OPEN` names requests (a glob) and, where only a part of their answer is open, the paths
(a glob, see `differences.py`). The test of such a request is an expected failure as long as it
differs there, fails when it differs elsewhere, and fails when nothing is open any more: then the
entry must go. Nothing here is a decision; those are in `differences.py`.
"""

from __future__ import annotations

from golden.differences import Difference

EVERYTHING = "*"


def missing(reason: str, ids: str, *paths: str) -> list[Difference]:
    """Returns an entry for each of the space-separated ids and each of the paths (default: all)."""
    return [
        Difference(id, path, "", "", reason) for id in ids.split() for path in paths or [EVERYTHING]
    ]


OPEN: list[Difference] = [
    # --- routes ---
    # Its errors are to be in Anthropic's envelope (`type: error`), which makes a row of differences
    *missing("no /v1/messages", "anthropic/* json/messages-open-brace"),
    *missing("no /v1/responses", "responses/*"),
    *missing("no /v1/chat/completions/input_tokens", "chat/input-tokens*"),
    *missing("no /v1/chat/completions/control", "chat/control-*"),
    *missing("no /infill", "infill/*"),
    *missing("no /metrics", "server/metrics slots/metrics-after-use"),
    *missing("no /metrics", "server/props", "$.body.endpoint_metrics"),
    *missing("no /lora-adapters", "server/lora-adapters absent/lora-adapters-*"),
    *missing("no 501 for slot actions", "absent/slots-*"),
    *missing("no 501 for embeddings, reranking, audio", "absent/*embedding* absent/*rerank*"),
    *missing("no 501 for embeddings, reranking, audio", "absent/audio"),
    *missing("no fail_on_no_slot", "slots/fail-on-no-slot"),
    # --- fields ---
    *missing("no tools", "tools/required* tools/one-call-only* tools/parallel* tools/auto"),
    *missing("no tools", "tools/thought-then-call* tools/auto+stream tools/named*"),
    *missing("a grammar together with tools is taken", "tools/with-grammar"),
    *missing("no reasoning budget", "reasoning/budget-3+stream reasoning/budget-tokens-3+stream"),
    *missing("no reasoning budget", "reasoning/budget-message+stream"),
    *missing("no reasoning budget", "reasoning/budget-and-schema+stream"),
    *missing(
        "no response_fields",
        "completion/response-fields completion/response-fields-slash"
        " completion/response-fields-stream limits/until-context-is-full limits/beyond-context"
        " limits/prompt-leaves-one",
        "$.body.*: not in llama-server*",
    ),
    *missing(
        "no response_fields",
        "completion/response-fields completion/response-fields-slash",
        "$.body.*/*: missing*",
    ),
    *missing(
        "no response_fields",
        "completion/response-fields-stream+stream",
        "$.events[final].*: not in llama-server*",
    ),
    # --- faults, small ones ---
    *missing("a bias for a text in an object is refused", "sampling/logit-bias-object-text"),
    *missing("lora is not checked", "wrong/lora"),
    *missing("two assistant messages may end the list", "*/two-assistants-last"),
    *missing("a last message with tool calls is answered", "tools/continue-a-call"),
    *missing(
        "reasoning_format none leaves out the tag that the prompt ends in",
        "reasoning/none reasoning/none+stream",
        "*.content",
    ),
    *missing(
        "a busy slot's params are its sampling alone, prompt figures are missing",
        "slots/busy slots/all-busy",
        "$.slots[*].params.*",
        "$.slots[*].n_prompt_tokens_*: missing*",
        "$.slots[*].next_token[0].has_new_line: missing*",
    ),
]

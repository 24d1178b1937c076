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
    # --- fields ---
    *missing("no tools", "tools/required* tools/one-call-only* tools/parallel* tools/auto"),
    *missing("no tools", "tools/thought-then-call* tools/auto+stream tools/named*"),
    *missing("a grammar together with tools is taken", "tools/with-grammar"),
]

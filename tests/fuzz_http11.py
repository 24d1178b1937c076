"""http11.py under atheris, which looks for new paths through code: `python tests/fuzz_http11.py`.

Needs atheris (`pip install atheris`) beside the test packages. The arguments are libFuzzer's:
-max_total_time=3600, -runs=100000, a folder to keep the corpus in. Whatever comes, cut wherever,
nothing raises, no answer is a 500, and the connection ends when the client leaves.
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

try:
    import atheris
except ImportError:
    sys.exit("skipped: atheris is not installed")

with atheris.instrument_imports(include=["http11", "h11"]):
    import http11  # noqa: F401

from test_fuzz import FRAGMENTS, SEEDS
from test_http11_properties import converse


def one_input(data):
    provider = atheris.FuzzedDataProvider(data)
    eof = provider.ConsumeBool()
    n_cuts = provider.ConsumeIntInRange(0, 3)
    cuts = [provider.ConsumeIntInRange(0, 2000) for _ in range(n_cuts)]
    wire = provider.ConsumeBytes(100_000)
    places = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    pieces = [wire[a:b] for a, b in zip(places, places[1:], strict=False) if a < b]
    sent, transport = converse(pieces, eof, header_bytes=2000)
    for line in sent.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            assert int(line.split()[1]) < 500 or line.startswith(b"HTTP/1.1 501"), sent
    assert transport.closing or not eof


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="exl3-serve-fuzz-")
    for i, seed in enumerate([*SEEDS, *FRAGMENTS]):
        Path(folder, f"seed-{i}").write_bytes(seed + b"\0\0")  # its end is the provider's
    atheris.Setup([*sys.argv, folder], one_input)
    atheris.Fuzz()

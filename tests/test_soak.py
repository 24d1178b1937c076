"""Ten seconds of soak.py, which runs for as long as one likes by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_ten_seconds_of_everything_at_once_lose_nothing(capsys):
    code = soak.main(["--fake", "--seconds", "9", "--clients", "32"])
    assert code == 0, capsys.readouterr().out

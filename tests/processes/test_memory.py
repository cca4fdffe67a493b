"""Memory that does not grow with what is appended and read, and little of it for journals that nobody uses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BYTES = 4 << 30
LIMIT_MB = 150
COUNT = 10_000


def run(script: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert isinstance(figures, dict)
    return figures


@pytest.mark.parametrize("store", ["none", "file"])
def test_memory_is_constant_while_4_gb_are_appended_and_read(store: str, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    try:
        figures = run("big_writer.py", str(folder), str(BYTES), store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"store {store}: {figures}")
    assert figures["bytes"] == BYTES
    assert figures["same"]
    assert figures["fragments"] >= BYTES >> 28
    if store == "file":
        assert figures["persisted"] > 0
    assert figures["peak_mb"] < LIMIT_MB


def test_ten_thousand_journals_open_in_a_second(tmp_path: Path) -> None:
    folder = str(tmp_path / "engine")
    created = run("many_journals.py", "create", folder, str(COUNT))
    assert created["status"] == 0
    first = run("many_journals.py", "open", folder, str(COUNT))
    second = run("many_journals.py", "open", folder, str(COUNT))
    print(f"{COUNT} journals: {created}, then {first}, then, a tenth of them used, {second}")
    for figures in (first, second):
        assert figures["listed"] == COUNT
        assert figures["open_s"] < 1.0
        assert figures["idle_kb_each"] < 10

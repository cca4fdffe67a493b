"""Fixtures shared by all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VECTORS = Path(__file__).resolve().parents[2] / "shared" / "vectors"


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], Any]:
    """`vectors(name)`: the golden data `name` (a JSON file) that lies beside the repository, else a skip."""

    def load(name: str) -> Any:
        if not VECTORS.is_dir():
            pytest.skip("no folder ../shared/vectors: golden vectors are not tested")
        return json.loads((VECTORS / name).read_text(encoding="utf-8"))

    return load

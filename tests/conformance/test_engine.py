"""The engine is a `JournalService`, in memory and on a folder in either durability."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broadsheet.engine.engine import Engine
from broadsheet.engine.service import JournalService
from broadsheet.testing.conformance.journal_service import JournalServiceSuite


class TestInMemory(JournalServiceSuite):
    store_url = "file:///"

    @pytest.fixture
    async def service(self) -> AsyncIterator[JournalService]:
        async with Engine.in_memory() as engine:
            yield engine


class TestOnAFolder(JournalServiceSuite):
    store_url = "file:///"

    @pytest.fixture(params=["fsync", "os"])
    async def service(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JournalService]:
        async with Engine.open(tmp_path / "engine", durability=request.param) as engine:
            yield engine

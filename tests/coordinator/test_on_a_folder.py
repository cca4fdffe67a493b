"""The coordinator of an engine on a folder: durable with the engine's own commit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from broadsheet.engine import Durability, Engine
from broadsheet.engine.coordinator import Compare, CompareTarget, Put
from broadsheet.engine.local_coordinator import LocalCoordinator
from broadsheet.testing.conformance.coordinator import CoordinatorSuite
from broadsheet.testing.simulation import SimulatedRuntime

CREATED = Compare(b"app/key", CompareTarget.VERSION, 0)


@pytest.mark.parametrize("durability", ["fsync", "os"])
class TestOnAFolder(CoordinatorSuite):
    @pytest.fixture
    def clock(self, autojump_clock: trio.testing.MockClock) -> trio.abc.Clock:
        return autojump_clock

    @pytest.fixture
    async def coordinator(self, durability: str) -> AsyncIterator[LocalCoordinator]:
        async with Engine.open("/disk/engine", durability=durability, runtime=SimulatedRuntime(1)) as engine:
            yield engine.coordinator


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS])
async def test_keys_revisions_and_leases_survive_a_restart(tmp_path: Path, durability: Durability) -> None:
    async with Engine.open(tmp_path / "data", durability=durability) as engine:
        identity = engine.coordinator.identity
        lease = await engine.coordinator.grant_lease(0.3)
        puts = (Put(b"app/key", b"\xff value"), Put(b"app/leased", b"", lease))
        put = await engine.coordinator.transact((CREATED,), puts)
        assert put.succeeded
        await engine.create_journal("examples/journal")
        revision = engine.coordinator.revision

    async with Engine.open(tmp_path / "data", durability=durability) as engine:
        coordinator = engine.coordinator
        assert coordinator.identity == identity
        assert coordinator.revision >= revision
        found = coordinator.get(b"app/key")
        assert found is not None
        assert (found.value, found.mod_revision) == (b"\xff value", put.revision)
        assert not (await coordinator.transact((CREATED,), (Put(b"app/key", b""),))).succeeded
        if coordinator.get(b"app/leased") is not None:  # its time began anew, and ends without anyone's doing
            async with coordinator.watch(b"app/leased", coordinator.revision) as events:
                with trio.fail_after(5):
                    assert (await anext(aiter(events))).deleted == (b"app/leased",)

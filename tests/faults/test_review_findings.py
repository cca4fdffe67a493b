"""Races and leaks that a reading of the code found, and no search had met."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from broadsheet.engine import Durability, Engine, EngineClosed, JournalChange
from broadsheet.engine.errors import AppendFailed, BroadsheetError
from broadsheet.engine.handles import DEFAULT_SPEC
from broadsheet.engine.journal.spec import Suspend, SuspendLevel
from broadsheet.engine.runtime import MemoryFiles, RealRuntime
from broadsheet.engine.service import MAX_OFFSET, ApplyRequest, Status
from broadsheet.testing.simulation import SimulatedDisk, SimulatedRuntime, run_simulated

MODES = [Durability.FSYNC, Durability.OS]


class Stop(Exception):
    """The machine is to be stopped here."""


@pytest.mark.parametrize("durability", MODES)
def test_a_journal_deleted_under_load_and_then_a_crash(durability: Durability) -> None:
    """Appends that were committed while the deletion was on its way must not make the log unreadable."""
    disk = SimulatedDisk()
    boots: list[SimulatedDisk] = []

    async def live() -> None:
        async with Engine.open("/disk/engine", durability=durability, runtime=SimulatedRuntime(1, disk)) as engine:
            kept = await engine.create_journal("examples/kept")
            await kept.append(b"kept")
            doomed = await engine.create_journal("examples/doomed")

            async def append() -> None:
                try:
                    while True:
                        await doomed.append(b"x" * 100)
                except BroadsheetError:
                    return

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(append)
                for _ in range(50):
                    await trio.lowlevel.checkpoint()
                change = JournalChange(-1, None, "examples/doomed")
                assert (await engine.apply(ApplyRequest((change,)))).status == Status.OK
            boots.append(disk.clone())

    async def reopen(boot: SimulatedDisk) -> None:
        async with Engine.open("/disk/engine", durability=durability, runtime=SimulatedRuntime(2, boot)) as engine:
            assert await engine.journal("examples/kept").read() == b"kept"
            with pytest.raises(BroadsheetError, match="JOURNAL_NOT_FOUND"):
                await engine.journal("examples/doomed").read()

    for seed in range(10):
        disk = SimulatedDisk()
        run_simulated(live, seed=seed)
    for boot in boots:
        run_simulated(reopen, boot.crash(random.Random(1), "process"))


@pytest.mark.parametrize("mode", ["memory", "os", "fsync"])
async def test_changes_that_come_while_the_engine_closes_are_answered(tmp_path: Path, mode: str) -> None:
    engine = Engine.in_memory() if mode == "memory" else Engine.open(tmp_path, durability=mode)
    outcomes: list[str] = []

    async def create(number: int) -> None:
        try:
            await engine.create_journal(f"examples/journal-{number}")
        except EngineClosed:
            outcomes.append("closed")
        else:
            outcomes.append("created")

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, engine:
            for number in range(100):
                nursery.start_soon(create, number)
            await trio.lowlevel.checkpoint()
    assert len(outcomes) == 100
    if mode == "memory":
        return
    async with Engine.open(tmp_path, durability=mode) as again:
        for number in range(100):
            await again.create_journal(f"examples/journal-{number}")


async def test_an_error_that_nobody_foresaw_ends_the_engine_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        async with Engine.open(tmp_path) as engine:
            journal = await engine.create_journal("examples/journal")
            assert engine._log is not None

            def write(records: object) -> None:
                raise MemoryError("no memory")

            monkeypatch.setattr(engine._log, "write", write)
            with pytest.raises(BroadsheetError):
                await journal.append(b"x")
            await trio.sleep_forever()

    with trio.fail_after(10), pytest.raises(BaseExceptionGroup) as caught:
        await use()
    assert caught.group_contains(MemoryError)
    monkeypatch.undo()
    async with Engine.open(tmp_path) as engine:
        await engine.journal("examples/journal").append(b"y")


async def test_no_append_ends_beyond_the_greatest_offset() -> None:
    from dataclasses import replace

    async with Engine.in_memory() as engine:
        spec = replace(DEFAULT_SPEC, suspend=Suspend(SuspendLevel.NONE, MAX_OFFSET - 50))
        journal = await engine.create_journal("examples/far", spec)

        async def streamed() -> object:
            async def body():  # type: ignore[no-untyped-def]
                for _ in range(3):
                    yield bytes(1 << 20)

            return await journal.append(body())

        with pytest.raises(AppendFailed, match="greatest offset"):
            await journal.append(bytes(100))
        with pytest.raises(AppendFailed, match="greatest offset"):
            await streamed()
        assert (await journal.append(bytes(50))).end == MAX_OFFSET
        with pytest.raises(AppendFailed, match="greatest offset"):
            await journal.append(b"x")


async def test_an_engine_in_memory_gives_spools_back() -> None:
    files = MemoryFiles()
    async with Engine.in_memory(runtime=RealRuntime(files)) as engine:
        for _ in range(3):
            journal = await engine.create_journal("examples/journal")
            await journal.append(bytes(3 << 20))
            await engine.apply(ApplyRequest((JournalChange(-1, None, "examples/journal"),)))
        assert not [path for path in files.walk() if path.startswith("/spools/")]


def test_room_of_deleted_journals_is_given_back() -> None:
    disk = SimulatedDisk()

    async def main() -> None:
        async with Engine.open("/disk/engine", runtime=SimulatedRuntime(1, disk)) as engine:
            for number in range(8):
                journal = await engine.create_journal(f"examples/journal-{number}")
                await journal.append(bytes(1000))
            for number in range(8):
                await engine.apply(ApplyRequest((JournalChange(-1, None, f"examples/journal-{number}"),)))
            await trio.sleep(10)
            spools = [path for path in disk.walk() if path.endswith(".spool")]
            assert len(spools) <= 4  # a few are kept to be used again

    run_simulated(main)


def test_unfinished_snapshots_do_not_pile_up() -> None:
    disk = SimulatedDisk()

    async def main() -> None:
        async with Engine.open("/disk/engine", runtime=SimulatedRuntime(1, disk)) as engine:
            journal = await engine.create_journal("examples/journal")
            for _ in range(3):
                await journal.append(b"x")
                disk.fail_matching(
                    lambda call: call.operation == "pwrite" and "snapshot" in call.path, OSError(28, "full")
                )
                with pytest.raises(OSError):
                    await engine._committer.checkpoint()
            assert not [path for path in disk.walk() if path.endswith(".tmp")]

    run_simulated(main)


async def test_readiness_forgets_a_store_that_nobody_needs_any_more(tmp_path: Path) -> None:
    from dataclasses import replace

    async with Engine.open(tmp_path / "data") as engine:
        fragment = replace(DEFAULT_SPEC.fragment, stores=("file:///missing/",))
        (tmp_path / "data/fragments/missing").mkdir()
        journal = await engine.create_journal("examples/journal", replace(DEFAULT_SPEC, fragment=fragment))
        await journal.append(b"first")
        (tmp_path / "data/fragments/missing").rmdir()
        await journal.append(b"second")
        with trio.fail_after(5):
            await engine._persister.settle()
        assert "failed to persist examples/journal" in (engine.ready_problem() or "")
        await engine.apply(ApplyRequest((JournalChange(-1, None, "examples/journal"),)))
        assert engine.ready_problem() is None


async def test_a_store_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    import shutil
    from dataclasses import replace

    async with Engine.open(tmp_path / "data") as engine:
        fragment = replace(DEFAULT_SPEC.fragment, stores=("file:///",))
        journal = await engine.create_journal("examples/journal", replace(DEFAULT_SPEC, fragment=fragment))

        async def persisted(count: int) -> None:
            with trio.fail_after(5):
                await engine._persister.settle()
            assert sum(bool(it.backing_store) for it in await journal.fragments()) == count

        await journal.append(b"first")
        await journal.append(b"second")
        await persisted(1)
        folder = tmp_path / "data/fragments/examples"
        shutil.rmtree(folder)
        await engine.apply(ApplyRequest((JournalChange(-1, None, "examples/journal"),)))
        journal = await engine.create_journal("examples/journal", replace(DEFAULT_SPEC, fragment=fragment))
        await journal.append(b"third")
        await journal.append(b"fourth")
        await persisted(1)
        assert list(folder.rglob("*.sz"))


@pytest.mark.parametrize("durability", MODES)
def test_a_close_that_fails_after_all_was_written_refuses_nothing(durability: Durability) -> None:
    """What a round wrote and synced stands: answering that it was rolled back would give its offsets away twice."""
    disk = SimulatedDisk()

    async def live() -> None:
        async with Engine.open("/disk/engine", durability=durability, runtime=SimulatedRuntime(1, disk)) as engine:
            journal = await engine.create_journal("examples/journal")
            await journal.append(b"one ")
            disk.fail_matching(
                lambda call: call.operation == "close" and call.path.endswith((".log", ".spool")),
                OSError(5, "broken"),
                times=4,
            )
            await engine._committer.checkpoint()  # goes on in a new log file, and the old one is closed
            await journal.append(b"two ")
            await journal.append(bytes(200_000))  # its spool is synced on a handle of its own
            assert (await journal.append(b"three")).begin == 200_008

    async def reopen(boot: SimulatedDisk) -> None:
        async with Engine.open("/disk/engine", durability=durability, runtime=SimulatedRuntime(2, boot)) as engine:
            assert await engine.journal("examples/journal").read() == b"one two " + bytes(200_000) + b"three"

    run_simulated(live)
    run_simulated(reopen, disk.crash(random.Random(1), "process"))

"""A disk that fails in one way, and what the user then meets: a sync that fails once, a full disk, a read-only one."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from trio._core._run import GLOBAL_RUN_CONTEXT

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.errors import (
    AppendAborted,
    BroadsheetError,
    EngineClosed,
    EngineLocked,
    EngineWritesFailed,
    OutcomeUnknown,
    StorageError,
)
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.runtime import RealRuntime
from broadsheet.engine.service import ApplyRequest
from broadsheet.testing.simulation import Call, SimulatedDisk, SimulatedRuntime, run_simulated

FOLDER = "/disk/engine"
SPEC = JournalSpec("plain", 1, fragment=FragmentSpec(1 << 20, CompressionCodec.NONE, (), 10**9))
LARGE = 2 << 20  # streams into the spool
EIO = OSError(errno.EIO, os.strerror(errno.EIO))
MODES = [Durability.FSYNC, Durability.OS]


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A hang where nothing can cancel fails the test."""

    rung = []

    def ring(*_: object) -> None:
        rung.append(True)
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    if rung:
        GLOBAL_RUN_CONTEXT.__dict__.clear()  # the run that was shot must not keep other tests from running


def new_disk() -> SimulatedDisk:
    return SimulatedDisk(random.Random(3))


def open_engine(disk: SimulatedDisk, durability: Durability = Durability.FSYNC) -> Engine:
    options = EngineOptions(inline_bytes=300, log_file_bytes=4096, checkpoint_log_bytes=3000)
    return Engine.open(FOLDER, durability=durability, options=options, runtime=SimulatedRuntime(1, disk))


def syncs_of(part: str) -> object:
    return lambda call: call.operation == "fdatasync" and part in call.path


def read_again(disk: SimulatedDisk, kind: str) -> bytes:
    async def main(disk: SimulatedDisk) -> bytes:
        async with open_engine(disk) as engine:
            return await engine.journal("plain").read()

    return run_simulated(main, disk.crash(random.Random(9), kind))  # type: ignore[arg-type]


# --- Syncs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [".log", ".spool"])
@pytest.mark.parametrize("length", [50, 500])
def test_a_sync_that_fails_once_ends_all_writing(part: str, length: int) -> None:
    """The next sync would succeed, and prove nothing: it is not asked for again."""
    disk = new_disk()
    if part == ".spool" and length < 300:
        length = 400  # smaller ones are in the log

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", SPEC)
            await journal.append(b"before")
            disk.fail_matching(syncs_of(part), EIO)  # type: ignore[arg-type]
            with pytest.raises(OutcomeUnknown) as unknown:
                await journal.append(b"x" * length)
            assert unknown.value.journal == "plain"
            assert unknown.value.offset == len(b"before")
            calls = disk.calls
            for content in (b"more", b"", b"m" * LARGE):
                with pytest.raises(EngineWritesFailed), trio.fail_after(100):
                    await journal.append(content) if content else await engine.apply(
                        ApplyRequest((JournalChange(-1, None, "plain"),))
                    )
            syncs = [line for line in disk.trace[calls:] if "sync" in line]
            assert syncs == []
            assert await journal.read() == b"before"
            assert "an earlier write failed" in (engine.ready_problem() or "")

    run_simulated(main)
    for kind in ("process", "power"):
        for _ in range(5):
            assert read_again(disk, kind) in (b"before", b"before" + b"x" * length)


def test_a_spool_sync_that_fails_during_a_checkpoint_is_not_tried_again() -> None:
    """Small appends are in the log, and the log is reused after a checkpoint: it must not count on a second sync."""
    disk = new_disk()
    acknowledged = b""

    async def main() -> None:
        nonlocal acknowledged
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", SPEC)
            disk.fail_matching(syncs_of(".spool"), EIO)  # type: ignore[arg-type]
            for number in range(100):
                content = b"%04d" % number * 50
                try:
                    await journal.append(content)
                except (OutcomeUnknown, EngineWritesFailed):
                    break
                acknowledged += content
                await trio.sleep(10)
            assert engine.ready_problem() is not None

    run_simulated(main)
    assert len(acknowledged) >= 1000
    for kind in ("process", "power"):
        for _ in range(10):
            found = read_again(disk, kind)
            assert found[: len(acknowledged)] == acknowledged


def test_a_spec_change_that_waits_while_a_round_fails_is_told() -> None:
    disk = new_disk()
    seen: list[str] = []

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", SPEC)
            disk.fail_matching(syncs_of(".log"), EIO)  # type: ignore[arg-type]

            async def append() -> None:
                with pytest.raises(OutcomeUnknown):
                    await journal.append(b"x")
                seen.append("append")

            async def change() -> None:
                with pytest.raises(BroadsheetError):
                    await engine.create_journal("other", SPEC)
                seen.append("change")

            with trio.fail_after(1000):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(append)
                    await trio.lowlevel.checkpoint()
                    nursery.start_soon(change)

    for seed in range(8):  # in some of them the change comes while the round is under way
        disk = new_disk()
        seen.clear()
        run_simulated(main, seed=seed)
        assert sorted(seen) == ["append", "change"]


# --- Space ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_a_disk_that_is_full_and_then_has_room(durability: Durability) -> None:
    """Appends fail and say so until there is room; then the journal goes on, where the last one ended."""
    disk = new_disk()
    written: list[bytes] = []

    async def main() -> None:
        async with open_engine(disk, durability) as engine:
            journal = await engine.create_journal("plain", SPEC)
            for length in (200, 900, LARGE):
                first = random.Random(length).randbytes(length)
                used = sum(len(disk.content(path)) for path in disk.walk())
                for room in (0, 10, length // 2, length + 5):
                    disk.capacity_bytes = used + room
                    try:
                        with trio.fail_after(1000):
                            commit = await journal.append(first)
                    except StorageError as error:
                        assert "No space left" in str(error)
                        assert "room" in error.hint
                        assert await journal.read() == b"".join(written)
                    else:
                        assert commit.begin == sum(map(len, written))
                        written.append(first)
                        break
                disk.capacity_bytes = None
                commit = await journal.append(first)
                assert commit.begin == sum(map(len, written))
                written.append(first)
                assert await journal.read() == b"".join(written)
                await trio.sleep(100)  # checkpoints that met the full disk are made up for
                assert engine.ready_problem() is None

    run_simulated(main)

    async def again(disk: SimulatedDisk) -> None:
        async with open_engine(disk, durability) as engine:
            assert await engine.journal("plain").read() == b"".join(written)

    run_simulated(again, disk.crash(random.Random(1), "process"))


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_a_full_disk_at_open_is_said_and_changes_nothing(durability: Durability) -> None:
    disk = new_disk()

    async def write() -> SimulatedDisk:
        async with open_engine(disk, durability) as engine:
            await (await engine.create_journal("plain", SPEC)).append(b"kept" * 100)
            return disk.clone()  # without the checkpoint of a close

    stopped = run_simulated(write)
    used = sum(len(stopped.content(path)) for path in stopped.walk())
    refused = 0

    async def main(disk: SimulatedDisk) -> bool:
        try:
            async with open_engine(disk, durability) as engine:
                assert await engine.journal("plain").read() == b"kept" * 100
        except StorageError as error:
            assert FOLDER in str(error)
            assert "room" in error.hint or "disk" in error.hint
            return True
        return False

    for room in range(0, 400, 20):
        full = stopped.clone()
        full.capacity_bytes = used + room
        refused += run_simulated(main, full)
        full.capacity_bytes = None
        assert not run_simulated(main, full.clone())
    assert refused > 3

    async def fresh(disk: SimulatedDisk) -> None:
        with pytest.raises(StorageError):
            async with open_engine(disk, durability):
                pass

    empty = new_disk()
    empty.capacity_bytes = 20
    run_simulated(fresh, empty)


def test_a_full_fragment_store_is_tried_again() -> None:
    disk = new_disk()
    stored = JournalSpec("plain", 1, fragment=FragmentSpec(1024, CompressionCodec.NONE, ("file:///",), 10**9))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", stored)
            disk.fail_matching(lambda call: call.operation == "pwrite" and ".partial-" in call.path, full, times=None)
            await journal.append(b"a" * 2000)
            await journal.append(b"b" * 10)
            await trio.sleep(5)
            assert "No space left" in (engine.ready_problem() or "")
            assert not [path for path in disk.walk() if ".partial-" in path]
            assert await journal.read() == b"a" * 2000 + b"b" * 10
            disk.clear_faults()
            await trio.sleep(100)
            assert engine.ready_problem() is None
            assert [bool(it.backing_store) for it in await journal.fragments()] == [True, False]
            assert await journal.read() == b"a" * 2000 + b"b" * 10

    run_simulated(main)


# --- Folders that cannot be written -----------------------------------------------------------------------


async def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as raised:
        async with Engine.open(tmp_path / "file" / "engine"):
            pass
    assert str(tmp_path / "file") in str(raised.value)
    assert raised.value.hint
    assert (tmp_path / "file").read_bytes() == b""


async def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spools").write_bytes(b"")
    with pytest.raises(StorageError):
        async with Engine.open(tmp_path):
            pass
    (tmp_path / "spools").unlink()
    async with Engine.open(tmp_path) as engine:
        assert engine.ready_problem() is None


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_a_file_system_that_becomes_read_only(durability: Durability) -> None:
    disk = new_disk()
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))

    def changes(call: Call) -> bool:
        return call.operation in ("create", "pwrite", "rename", "unlink", "make_dirs", "truncate", "lock", "fdatasync")

    async def main() -> None:
        async with open_engine(disk, durability) as engine:
            journal = await engine.create_journal("plain", SPEC)
            await journal.append(b"before")
            disk.fail_matching(changes, read_only, times=None)
            for content in (b"x", b"x" * 500, b"x" * LARGE):
                with pytest.raises((StorageError, OutcomeUnknown, EngineWritesFailed)), trio.fail_after(1000):
                    await journal.append(content)
            with pytest.raises(BroadsheetError), trio.fail_after(1000):
                await engine.create_journal("other", SPEC)
            assert await journal.read() == b"before"

    run_simulated(main)

    async def again(disk: SimulatedDisk, broken: bool) -> None:
        if broken:
            disk.fail_matching(changes, read_only, times=None)
            with pytest.raises(StorageError):
                async with open_engine(disk, durability):
                    pass
        else:
            async with open_engine(disk, durability) as engine:
                assert await engine.journal("plain").read() == b"before"

    run_simulated(again, disk.clone(), True)
    run_simulated(again, disk.clone(), False)


async def test_a_failed_open_gives_the_lock_back(tmp_path: Path) -> None:
    class Failing(type(RealRuntime().files)):  # type: ignore[misc]
        def list_dir(self, path: str) -> object:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with pytest.raises(StorageError):
        async with Engine.open(tmp_path, runtime=RealRuntime(Failing())):
            pass
    async with Engine.open(tmp_path):
        with pytest.raises(EngineLocked):
            async with Engine.open(tmp_path):
                pass


# --- The user's own failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, LARGE])
@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EPIPE, "the source broke"), AppendAborted("no"), KeyError("mine")],
    ids=lambda it: type(it).__name__,
)
def test_what_the_source_raises_comes_out_as_it_is(durability: Durability, length: int, error: Exception) -> None:
    """It is not the disk's failure, be it an OSError: the append is rolled back, and the caller gets it back."""
    disk = new_disk()

    async def body() -> AsyncIterator[bytes]:
        for _ in range(0, length, 1 << 19):
            yield b"x" * min(length, 1 << 19)
        raise error

    async def main() -> None:
        async with open_engine(disk, durability) as engine:
            journal = await engine.create_journal("plain", SPEC)
            await journal.append(b"before")
            with pytest.raises(type(error)) as raised:
                await journal.append(body())
            assert raised.value is error
            assert await journal.read() == b"before"
            assert (await journal.append(b"after")).begin == len(b"before")
            assert engine.ready_problem() is None

    run_simulated(main)


@pytest.mark.parametrize("durability", [*MODES, Durability.MEMORY], ids=lambda it: it.value)
@pytest.mark.parametrize("length", [10, LARGE])
def test_an_append_that_is_still_receiving_when_the_engine_closes_ends(durability: Durability, length: int) -> None:
    disk = new_disk()
    outcomes: list[str] = []

    async def main() -> None:
        closed = trio.Event()
        started = trio.Event()

        async def body() -> AsyncIterator[bytes]:
            for _ in range(0, length, 1 << 19):
                yield b"x" * min(length, 1 << 19)
            started.set()
            await closed.wait()
            yield b"the end"

        async def append(engine: Engine) -> None:
            try:
                with trio.fail_after(1000):
                    await engine.journal("plain").append(body())
            except BroadsheetError as error:
                assert isinstance(error, EngineClosed)
                outcomes.append("closed")
            else:
                outcomes.append("appended")

        if durability is Durability.MEMORY:
            engine = Engine.in_memory(min_append_rate=1)
        else:
            options = EngineOptions(min_append_rate=1)
            engine = Engine.open(FOLDER, durability=durability, options=options, runtime=SimulatedRuntime(1, disk))
        async with trio.open_nursery() as nursery:
            async with engine:
                await engine.create_journal("plain", SPEC)
                nursery.start_soon(append, engine)
                await started.wait()
            closed.set()

    run_simulated(main)
    assert outcomes == ["closed"]


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
@pytest.mark.parametrize("length", [10, LARGE])
@pytest.mark.parametrize("chunk", [b"", b"the end"], ids=["ends", "goes on"])
def test_an_append_that_is_still_receiving_when_its_journal_is_made_anew(
    durability: Durability, length: int, chunk: bytes
) -> None:
    """It must not get into the journal that now has the name, nor put the old one in its place at the next open."""
    disk = new_disk()

    async def main() -> SimulatedDisk:
        made_anew = trio.Event()
        started = trio.Event()

        async def body() -> AsyncIterator[bytes]:
            for _ in range(0, length, 1 << 19):
                yield b"x" * min(length, 1 << 19)
            started.set()
            await made_anew.wait()
            if chunk:
                yield chunk

        async def append(engine: Engine) -> None:
            with pytest.raises(BroadsheetError), trio.fail_after(1000):
                await engine.journal("plain").append(body())

        async with open_engine(disk, durability) as engine:
            await (await engine.create_journal("plain", SPEC)).append(b"the old one")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(append, engine)
                await started.wait()
                await engine.apply(ApplyRequest((JournalChange(-1, None, "plain"),)))
                journal = await engine.create_journal("plain", SPEC)
                await journal.append(b"the new one")
                made_anew.set()
            assert await journal.read() == b"the new one"
            return disk.clone()  # the log tells of all this, and no snapshot does

    async def again(disk: SimulatedDisk) -> None:
        async with open_engine(disk, durability) as engine:
            assert await engine.journal("plain").read() == b"the new one"

    stopped = run_simulated(main)
    run_simulated(again, stopped)

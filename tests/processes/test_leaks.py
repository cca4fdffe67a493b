"""Nothing stays behind: no task, no file, no lock, no object, after many engines, appends, reads and cancellations."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.errors import AppendAborted, BroadsheetError, CorruptData, EngineLocked, StorageError
from broadsheet.engine.handles import Reader
from broadsheet.engine.journal.index import IndexEntry
from broadsheet.engine.journal.reading import EngineReadStream
from broadsheet.engine.journal.replica import AppendItem, Replica, SealedGroup
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.runtime import OsFile, OsFiles, RealRuntime
from broadsheet.engine.service import ApplyRequest, ListRequest
from broadsheet.testing.simulation import cancel_at_step

OURS = (AppendItem, Engine, EngineReadStream, IndexEntry, OsFile, Reader, Replica, SealedGroup)
MODES = [Durability.FSYNC, Durability.OS, Durability.MEMORY]
SPEC = JournalSpec("", 1, fragment=FragmentSpec(4096, CompressionCodec.SNAPPY, ("file:///",), 10**9))
STREAMED = 2 << 20


def open_files(folder: Path) -> list[str]:
    """Descriptors of this process that lead into the folder, files that were unlinked included."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the one that listed them
        if path.startswith(str(folder)):
            found.append(path)
    return found


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(it).__name__ for it in gc.get_objects() if isinstance(it, OURS))


def our_threads() -> list[str]:
    """All but trio's idle ones, which it keeps for a while."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread")]


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def engine_of(durability: Durability, folder: Path) -> Engine:
    options = EngineOptions(inline_bytes=300, log_file_bytes=8192, checkpoint_log_bytes=6000)
    if durability is Durability.MEMORY:
        return Engine.in_memory(options=options)
    return Engine.open(folder / "engine", durability=durability, options=options)


async def use(engine: Engine) -> None:
    """A bit of everything, with ends of all kinds."""
    name = "leaks/one"
    journal = await engine.create_journal(name, SPEC)

    async def body(ends: str) -> AsyncIterator[bytes]:
        yield b"s" * 5000
        yield b"t" * STREAMED
        if ends == "abort":
            raise AppendAborted("no more")

    for number in range(12):
        await journal.append(b"a" * (100 + 100 * number))
    await journal.append(body("well"))
    with pytest.raises(AppendAborted):
        await journal.append(body("abort"))
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(journal.append, b"b" * number or b"-")
    async with engine.appender(name) as appender:
        for number in range(100):
            appender.write(b"%d\n" % number)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            head = await journal.head()
            for _ in range(3):
                nursery.start_soon(tail, engine, name, head)
            nursery.start_soon(watch, engine)
            await trio.testing.wait_all_tasks_blocked()
            await journal.append(b"for the readers")
            scope.cancel()
    async with journal.reader(block=False) as reader:  # left in the midst of it
        await anext(reader)
    assert len(await journal.read()) == await journal.head()
    await engine.create_journal("leaks/two", SPEC)
    await engine.journal("leaks/two").append(b"x" * 5000)
    await engine.apply(ApplyRequest((JournalChange(-1, None, "leaks/two"),)))


async def tail(engine: Engine, name: str, offset: int) -> None:
    async with engine.reader(name, offset) as reader:
        async for _ in reader:
            pass


async def watch(engine: Engine) -> None:
    async with engine.watch(ListRequest()) as changes:
        async for _ in changes:
            pass


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
async def test_nothing_is_left_of_an_engine(durability: Durability, tmp_path: Path) -> None:
    before = tasks()
    threads = our_threads()
    kept = objects()
    for _ in range(6):
        async with engine_of(durability, tmp_path) as engine:
            await use(engine)
            del engine
        assert tasks() == before
        assert open_files(tmp_path) == []
        assert objects() == kept
    assert our_threads() == threads


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
async def test_nothing_grows_in_an_engine_that_goes_on(durability: Durability, tmp_path: Path) -> None:
    async with engine_of(durability, tmp_path) as engine:
        seen = []
        for _ in range(6):
            await use(engine)
            with trio.fail_after(10):
                await engine._persister.settle()
            fragments = len(await engine.journal("leaks/one").fragments())
            counts = objects()
            # An entry for each fragment is what an index is.
            counts["IndexEntry"] -= fragments
            # A handle for each spool in use, and the log's: a checkpoint may be under way.
            assert counts.pop("OsFile", 0) <= 10
            assert len(open_files(tmp_path)) <= 10
            seen.append((dict(+counts), tasks()))
            del counts
        assert seen[-1] == seen[1], "it grows"


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
@pytest.mark.parametrize("length", [10, STREAMED])
async def test_a_cancellation_at_any_await_leaves_nothing(durability: Durability, length: int, tmp_path: Path) -> None:
    content = b"c" * length

    async def body() -> AsyncIterator[bytes]:
        for at in range(0, length, 1 << 19):
            yield content[at : at + (1 << 19)]

    async with engine_of(durability, tmp_path) as engine:
        spec = JournalSpec("", 1, fragment=FragmentSpec(1 << 30, CompressionCodec.NONE, (), 10**9))
        journal = await engine.create_journal("leaks/one", spec)
        await journal.append(b"first")
        await journal.append(b"second")
        before, kept, living = await journal.head(), objects(), tasks()
        cancelled = 0
        for source in (lambda: content, body):
            for step in itertools.count(1):
                outcome = await cancel_at_step(step, lambda source=source: journal.append(source()))
                cancelled += outcome.cancelled
                # The barrier is behind it: what became of it is settled.
                head = (await journal.append(b"")).end
                assert (head - before) % length == 0, "half of it is there"
                if not outcome.cancelled:
                    assert head > before
                before = head
                if not outcome.reached:
                    break
        if durability is Durability.FSYNC or length == STREAMED:  # a small append in mode `os` has no await to wait at
            assert cancelled > 0
        assert tasks() == living
        assert objects() == kept


class FailingFiles(OsFiles):
    """The `at`-th call that opens a file fails."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def open(self, path: str, *, create: bool = False) -> OsFile:
        self._count(path)
        return super().open(path, create=create)

    def open_read(self, path: str) -> OsFile:
        self._count(path)
        return super().open_read(path)

    def sync_dir(self, path: str) -> None:
        self._count(path)
        super().sync_dir(path)


async def test_an_open_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    async with Engine.open(folder) as engine:
        await (await engine.create_journal("leaks/one")).append(b"here")
        del engine
    # Locked, damaged, and each of its files in turn.
    before, kept = tasks(), objects()
    async with Engine.open(folder):
        held = len(open_files(tmp_path))
        for _ in range(5):
            with pytest.raises(EngineLocked):
                async with Engine.open(folder):
                    pass
        assert len(open_files(tmp_path)) == held
    failed = 0
    for at in itertools.count(1):
        try:
            async with Engine.open(folder, runtime=RealRuntime(FailingFiles(at))):
                break
        except StorageError:
            failed += 1
        assert open_files(tmp_path) == []
        assert tasks() == before
    assert failed >= 3
    identity = folder / "identity.json"
    identity.write_bytes(b"{}")
    for _ in range(5):
        with pytest.raises(CorruptData):
            async with Engine.open(folder):
                pass
    assert open_files(tmp_path) == []
    assert tasks() == before
    assert objects() == kept


async def test_an_error_of_the_body_leaves_nothing(tmp_path: Path) -> None:
    before, kept = tasks(), objects()
    for error in (KeyError("mine"), BroadsheetError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            async with Engine.open(tmp_path / "engine") as engine:
                await (await engine.create_journal("leaks/one", SPEC)).append(b"x" * 5000)
                raise error
        del engine
        error.__traceback__ = None
        assert tasks() == before
        assert open_files(tmp_path) == []
    assert objects() == kept

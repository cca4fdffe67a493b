"""An engine's life: opening, locking, closing under load, restarting, and what is left behind (nothing)."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import warnings
import weakref
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from broadsheet.engine.engine import Engine, EngineOptions
from broadsheet.engine.errors import (
    AppendFailed,
    BroadsheetError,
    CorruptData,
    EngineClosed,
    EngineLocked,
    OutcomeUnknown,
    Status,
    StorageError,
    ValidationError,
)
from broadsheet.engine.handles import DEFAULT_SPEC
from broadsheet.engine.journal.spec import JournalChange, JournalSpec
from broadsheet.engine.labels import LabelSet, parse_selector
from broadsheet.engine.runtime import MemoryFiles, RealRuntime
from broadsheet.engine.service import (
    AppendRequest,
    ApplyRequest,
    Buffer,
    FragmentsRequest,
    FragmentStoreHealthRequest,
    ListRequest,
    ProcessId,
    ReadRequest,
    Scope,
    SuspendControl,
    WatchChange,
)
from broadsheet.testing.simulation import SimulatedDisk, SimulatedRuntime

NAME = "a/journal"
MIB = 1 << 20
MODES = ["fsync", "os"]


class Body:
    """Yields, tells that it has, waits to be let on, yields again."""

    def __init__(self, first: bytes, last: bytes = b"") -> None:
        self.first, self.last = first, last
        self.begun, self.go_on = trio.Event(), trio.Event()

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        yield self.first
        self.begun.set()
        await self.go_on.wait()
        if self.last:
            yield self.last


def open_files() -> set[str]:
    """What this process has open, by path."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return found


def calls(engine: Engine) -> list[Callable[[], Awaitable[object]]]:
    """One of each call of a service."""

    async def read() -> None:
        async with engine.read(ReadRequest(NAME, block=True)) as stream:
            await anext(stream)

    async def watch() -> None:
        async with engine.watch(ListRequest()) as stream:
            await anext(stream)

    async def body() -> AsyncIterator[Buffer]:
        yield b"x"

    async def large() -> AsyncIterator[Buffer]:
        yield bytes(2 * MIB)

    return [
        read,
        watch,
        lambda: engine.append(AppendRequest(NAME), b"x"),
        lambda: engine.append(AppendRequest(NAME)),
        lambda: engine.append(AppendRequest(NAME), body()),
        lambda: engine.append(AppendRequest(NAME), large()),
        lambda: engine.append(AppendRequest(NAME), bytes(2 * MIB)),
        lambda: engine.list(ListRequest()),
        lambda: engine.apply(ApplyRequest((JournalChange(-1, delete=NAME),))),
        lambda: engine.fragments(FragmentsRequest(NAME)),
        lambda: engine.store_health(FragmentStoreHealthRequest("file:///")),
        lambda: engine.journal(NAME).head(),
        lambda: engine.create_journal("an/other"),
    ]


# --- Opening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(13))
async def test_an_engine_that_is_not_entered(number: int) -> None:
    with pytest.raises(EngineClosed):
        await calls(Engine.in_memory())[number]()


@pytest.mark.parametrize("number", range(13))
async def test_an_engine_that_is_closed(number: int, tmp_path: Path) -> None:
    for engine in (Engine.in_memory(), Engine.open(tmp_path), Engine.open(tmp_path, durability="os")):
        async with engine:
            await engine.create_journal(NAME)
            await engine.journal(NAME).append(b"hello")
        with trio.fail_after(5), pytest.raises(EngineClosed):
            await calls(engine)[number]()
    assert not [path for path in open_files() if path.startswith(str(tmp_path))]


async def test_an_engine_is_entered_once(tmp_path: Path) -> None:
    for engine in (Engine.in_memory(), Engine.open(tmp_path)):
        async with engine:
            with pytest.raises(EngineClosed, match="entered once"):
                await engine.__aenter__()
        with pytest.raises(EngineClosed, match="entered once"):
            await engine.__aenter__()


async def test_second_opener_is_told_that_the_folder_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with Engine.open(folder) as engine:
        journal = await engine.create_journal(NAME)
        for _ in range(2):
            with pytest.raises(EngineLocked) as caught:
                async with Engine.open(folder):
                    pytest.fail("two writers")
            assert str(caught.value) == (
                f"another process has {folder} open for writing (close it first, or use another folder)"
            )
        await journal.append(b"undisturbed")
    async with Engine.open(folder) as engine:
        assert await engine.journal(NAME).read() == b"undisturbed"


async def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot use"):
        async with Engine.open(tmp_path / "file" / "data"):
            pass
    with pytest.raises(ValidationError, match="durability"):
        Engine.open(tmp_path, durability="memory")
    with pytest.raises(ValidationError, match="durability"):
        Engine.open(tmp_path, durability="bogus")


@pytest.mark.parametrize("mode", MODES)
async def test_opening_makes_the_folder_and_keeps_its_identity(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "some" / "where"
    identities = []
    for _ in range(3):
        async with Engine.open(folder, durability=mode) as engine:
            header = (await engine.list(ListRequest())).header
            identities.append((header.process_id, header.etcd.cluster_id, header.etcd.member_id))
    assert len(set(identities)) == 1
    async with Engine.open(tmp_path / "other") as engine:
        assert engine.identity.cluster_id != identities[0][1]


async def test_an_opening_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    async with Engine.open(tmp_path) as engine:
        await engine.create_journal(NAME)
    identity = tmp_path / "identity.json"
    good = identity.read_bytes()
    identity.write_text("{}")
    before = open_files()
    for _ in range(2):
        with pytest.raises(CorruptData, match="not an engine's identity"):
            async with Engine.open(tmp_path):
                pass
    assert open_files() == before
    identity.write_bytes(good)
    async with Engine.open(tmp_path) as engine:  # nor is it locked
        assert await engine.journal(NAME).head() == 0


# --- The body's errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["memory", *MODES])
async def test_errors_of_the_body_come_out_as_they_are(tmp_path: Path, mode: str) -> None:
    def engine() -> Engine:
        return Engine.in_memory() if mode == "memory" else Engine.open(tmp_path, durability=mode)

    for error in (KeyError("mine"), OSError(5, "mine"), BroadsheetError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            async with engine() as opened:
                await opened.create_journal(NAME)
                await opened.journal(NAME).append(b"x")
                raise error
        assert caught.value is error
    group = ExceptionGroup("mine", [ValueError("one"), KeyError("two")])
    with pytest.raises(ExceptionGroup) as caught_group:
        async with engine():
            raise group
    assert caught_group.value.exceptions == group.exceptions
    assert str(caught_group.value) == str(group)
    if mode != "memory":
        async with engine() as opened:
            assert await opened.journal(NAME).read() == b"xxxx"


async def test_cancelled_body(tmp_path: Path) -> None:
    for engine in (Engine.in_memory(), Engine.open(tmp_path), Engine.open(tmp_path, durability="os")):
        with trio.CancelScope() as scope:
            async with engine:
                await engine.create_journal(NAME)
                await engine.journal(NAME).append(b"acknowledged")
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
    async with Engine.open(tmp_path) as engine:
        assert await engine.journal(NAME).read() == b"acknowledged" * 2


# --- Closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["memory", *MODES])
async def test_closing_ends_what_waits(tmp_path: Path, mode: str) -> None:
    """Blocked reads and watches end cleanly; an append that waits is told so, and did not happen."""
    ended: list[str] = []
    engine = Engine.in_memory() if mode == "memory" else Engine.open(tmp_path, durability=mode)
    large, small, last = Body(bytes(2 * MIB)), Body(b"small"), Body(bytes(2 * MIB), b"more")

    async def read(offset: int) -> None:
        async with engine.read(ReadRequest(NAME, offset, block=True)) as stream:
            found = [response async for response in stream]
        assert all(response.status == Status.OK for response in found)
        ended.append(f"read {offset}")

    async def watch() -> None:
        changes: list[WatchChange] = []
        async with engine.watch(ListRequest()) as stream:
            changes = [change async for change in stream]
        assert len(changes) == 1
        ended.append("watch")

    async def wait_for_revision() -> None:
        with pytest.raises(EngineClosed):
            await engine.list(ListRequest(), Scope(min_revision=1 << 40))
        ended.append("revision")

    async def append(what: str, name: str, content: Body | bytes) -> None:
        with pytest.raises((EngineClosed, AppendFailed)):
            await engine.append(AppendRequest(name), content)
        ended.append(what)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            async with engine:
                for name in (NAME, "an/other"):
                    await engine.create_journal(name)
                    await engine.journal(name).append(b"hello")
                for offset in (0, 5, -1, 100):
                    nursery.start_soon(read, offset)
                nursery.start_soon(watch)
                nursery.start_soon(wait_for_revision)
                nursery.start_soon(append, "large", NAME, large)
                nursery.start_soon(append, "small", NAME, small)
                nursery.start_soon(append, "last", "an/other", last)
                for body in (large, small, last):
                    await body.begun.wait()
                nursery.start_soon(append, "waiting", NAME, b"waiting")
                await trio.testing.wait_all_tasks_blocked()
                assert ended == []
            for body in (large, small, last):
                body.go_on.set()
    assert sorted(ended) == [
        "large",
        "last",
        "read -1",
        "read 0",
        "read 100",
        "read 5",
        "revision",
        "small",
        "waiting",
        "watch",
    ]
    if mode != "memory":
        assert not [path for path in open_files() if path.startswith(str(tmp_path))], "opened after the end"
        async with Engine.open(tmp_path, durability=mode) as engine:
            for name in (NAME, "an/other"):
                assert await engine.journal(name).read() == b"hello"


@pytest.mark.parametrize("mode", MODES)
async def test_appends_under_way_at_the_end_are_answered_truly(tmp_path: Path, mode: str) -> None:
    acknowledged: list[bytes] = []
    refused: list[bytes] = []
    engine = Engine.open(tmp_path, durability=mode)

    async def append(content: bytes) -> None:
        try:
            await engine.journal(NAME).append(content)
        except EngineClosed:
            refused.append(content)
        else:
            acknowledged.append(content)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, engine:
            await engine.create_journal(NAME)
            for number in range(100):
                nursery.start_soon(append, b"<%d>" % number)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
    assert len(acknowledged) + len(refused) == 100
    async with Engine.open(tmp_path, durability=mode) as engine:
        content = await engine.journal(NAME).read()
    assert sorted(content.replace(b">", b"> ").split()) == sorted(acknowledged)


async def test_draining_before_the_end() -> None:
    async with Engine.in_memory() as engine:
        await engine.create_journal(NAME)
        await engine.journal(NAME).append(b"hello")
        assert engine.ready_problem() is None
        async with engine.read(ReadRequest(NAME, block=True)) as stream:
            await anext(stream)
            await engine.drain()
            assert [response async for response in stream] == []
        assert engine.ready_problem() == "the engine is closing"
        with pytest.raises(EngineClosed):
            await engine.append(AppendRequest(NAME), b"x")


# --- Restarting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_restart_finds_everything(tmp_path: Path, mode: str) -> None:
    async with Engine.open(tmp_path, durability=mode) as engine:
        for number in range(5):
            spec = JournalSpec(replication=1, labels=LabelSet.of(number=str(number)), fragment=DEFAULT_SPEC.fragment)
            await engine.create_journal(f"many/{number}", spec)
        journal = await engine.create_journal(NAME)
        for content in (b"first", b"second", bytes(2 * MIB), b"fourth"):
            await journal.append(content, union_registers=LabelSet.of(author="me"))
        await journal.append(b"fifth", union_registers=LabelSet.of(epoch="7"))
        await engine.apply(ApplyRequest((JournalChange(-1, delete="many/3"),)))
        suspended = await engine.append(AppendRequest("many/4", suspend=SuspendControl.NOW))
        assert suspended.status == Status.SUSPENDED
        await engine.create_journal("never/used")
        before = await engine.list(ListRequest())
        fragments = await journal.fragments()
        content = await journal.read()
    for _ in range(3):
        async with Engine.open(tmp_path, durability=mode) as engine:
            after = await engine.list(ListRequest())
            assert after.journals == before.journals
            assert after.header.etcd == before.header.etcd
            journal = engine.journal(NAME)
            assert await journal.read() == content
            assert await journal.fragments() == fragments
            assert await journal.registers() == LabelSet.of(author="me", epoch="7")
    async with Engine.open(tmp_path, durability=mode) as engine:
        journal = engine.journal(NAME)
        assert (await journal.append(b"more", check_registers=parse_selector("author=me"))).begin == len(content)
        found = await journal.fragments()
        assert (found[-1].begin, found[-1].end) == (fragments[-1].begin, len(content) + 4)
        assert await journal.read() == content + b"more"
        spec = JournalSpec("new/one", 1, fragment=DEFAULT_SPEC.fragment)
        created = await engine.apply(ApplyRequest((JournalChange(0, spec),)))
        assert created.header.etcd.revision > before.header.etcd.revision


@pytest.mark.parametrize("mode", MODES)
async def test_a_copy_of_the_folder_is_what_a_kill_leaves(tmp_path: Path, mode: str) -> None:
    """Everything acknowledged is in the files, without the checkpoint of an orderly end."""
    folder, copy = tmp_path / "data", tmp_path / "copy"
    async with Engine.open(folder, durability=mode) as engine:
        journal = await engine.create_journal(NAME)
        for content in (b"first", b"second", bytes(2 * MIB), b"fourth"):
            await journal.append(content, union_registers=LabelSet.of(author="me"))
        header = (await engine.list(ListRequest())).header
        shutil.copytree(folder, copy)
    async with Engine.open(copy, durability=mode) as engine:
        assert engine.quarantined == ()
        assert (await engine.list(ListRequest())).header.etcd == header.etcd
        assert await engine.journal(NAME).read() == b"firstsecond" + bytes(2 * MIB) + b"fourth"
        assert await engine.journal(NAME).registers() == LabelSet.of(author="me")


@pytest.mark.parametrize("mode", MODES)
async def test_a_late_append_to_a_deleted_journal_harms_no_new_one(tmp_path: Path, mode: str) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    late = Body(b"late")
    async with Engine.open(folder, durability=mode) as engine:
        journal = await engine.create_journal(NAME)
        await journal.append(b"old")
        outcomes: list[object] = []

        async def append() -> None:
            try:
                outcomes.append(await engine.append(AppendRequest(NAME), late))
            except BroadsheetError as error:
                outcomes.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await late.begun.wait()
            await engine.apply(ApplyRequest((JournalChange(-1, delete=NAME),)))
            await engine.create_journal(NAME)
            await journal.append(b"new")
            late.go_on.set()
        shutil.copytree(folder, copy)
        expected = await journal.read()
        assert expected in (b"new", b"newlate")
    async with Engine.open(copy, durability=mode) as engine:
        assert await engine.journal(NAME).read() == expected


# --- Calls ------------------------------------------------------------------------------------------------


async def test_deadline_of_an_append_that_is_being_synced(autojump_clock: trio.testing.MockClock) -> None:
    """Past its deadline an append may be unknown, or done; not refused, and then there all the same."""
    slow = 0.0
    runtime = SimulatedRuntime(1, delay_s=lambda: slow)
    async with Engine.open("/engine", runtime=runtime) as engine:
        journal = await engine.create_journal(NAME)
        await journal.append(b"before")
        for content in (b"small", bytes(2 * MIB)):
            head = await journal.head()
            slow = 5.0
            try:
                response = await engine.append(
                    AppendRequest(NAME), content, Scope(deadline=trio.current_time() + 1)
                )
                assert response.status == Status.OK
                stands: set[bool] = {True}
            except OutcomeUnknown:
                stands = {True, False}
            except BroadsheetError:
                stands = {False}
            slow = 0.0
            await journal.append(b"")
            await trio.sleep(10)
            assert (await journal.head() > head) in stands


async def test_a_deadline_at_the_beginning_of_time(autojump_clock: trio.testing.MockClock) -> None:
    async with Engine.in_memory(runtime=SimulatedRuntime(1)) as engine:
        await engine.create_journal(NAME)
        assert trio.current_time() == 0.0
        scope = Scope(deadline=trio.current_time())
        with trio.fail_after(5):
            async with engine.watch(ListRequest(), scope) as watch:
                assert len([change async for change in watch]) <= 1
            async with engine.read(ReadRequest(NAME, block=True), scope) as stream:
                assert [response async for response in stream] == []


async def test_a_listing_is_whole_whatever_happens_meanwhile() -> None:
    """Long listings let others run in between; they must not show it."""
    async with Engine.in_memory() as engine:
        fragment = DEFAULT_SPEC.fragment
        names = [f"many/{number:05}" for number in range(9000)]
        for at in range(0, len(names), 3000):
            changes = tuple(JournalChange(0, JournalSpec(name, 1, fragment=fragment)) for name in names[at : at + 3000])
            await engine.apply(ApplyRequest(changes))
        kept, churned = set(names[:-20]), names[-20:]
        listings = 0

        async def churn() -> None:
            while listings < 8:
                for name in churned:
                    await engine.apply(ApplyRequest((JournalChange(-1, delete=name),)))
                for name in churned:
                    await engine.create_journal(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(churn)
            for _ in range(8):
                response = await engine.list(ListRequest())
                found = [listed.spec.name for listed in response.journals]
                assert kept <= set(found)
                assert found == sorted(found)
                assert max(listed.mod_revision for listed in response.journals) <= response.header.etcd.revision
                listings += 1


async def test_buffers_of_items_larger_than_bytes(tmp_path: Path) -> None:
    """A memoryview may hold numbers; its length is in bytes all the same."""
    numbers = memoryview(array("I", range(1000)))
    many = memoryview(array("Q", range(300_000)))
    assert len(many) < MIB < many.nbytes

    async def small() -> AsyncIterator[Buffer]:
        yield numbers

    async def large() -> AsyncIterator[Buffer]:
        yield many

    async def streamed() -> AsyncIterator[Buffer]:
        yield bytes(2 * MIB)
        yield numbers

    async with Engine.open(tmp_path) as engine:
        journal = await engine.create_journal(NAME)
        expected = b""
        for content, body in [
            (numbers, bytes(numbers)),
            (many, bytes(many)),
            (small(), bytes(numbers)),
            (large(), bytes(many)),
            (streamed(), bytes(2 * MIB) + bytes(numbers)),
        ]:
            commit = await journal.append(content)
            assert (commit.begin, commit.length) == (len(expected), len(body))
            assert commit.sum == hashlib.sha1(body).digest()
            expected += body
        assert await journal.read() == expected


async def test_a_forwarded_request_is_for_this_engine() -> None:
    """spec/broker-protocol.md §6, step 1."""
    async with Engine.in_memory() as engine:
        await engine.create_journal(NAME)
        own = (await engine.append(AppendRequest(NAME), b"x")).header
        other = replace(own, process_id=replace(own.process_id, suffix="someone-else"))
        cluster = replace(own, etcd=replace(own.etcd, cluster_id=7))
        for header, text in [
            (cluster, f"request Etcd ClusterId doesn't match our own (7 vs {own.etcd.cluster_id})"),
            (other, "request ProcessId doesn't match our own ("),
        ]:
            with pytest.raises(ValidationError) as caught:
                await engine.append(AppendRequest(NAME), b"x", Scope(proxied_header=header))
            assert str(caught.value).startswith(text)
        for header in (own, replace(own, process_id=ProcessId())):
            await engine.append(AppendRequest(NAME), b"x", Scope(proxied_header=header))
        assert await engine.journal(NAME).head() == 3


# --- Nothing left behind ----------------------------------------------------------------------------------


async def exercise(engine: Engine) -> None:
    spec = JournalSpec(replication=1, fragment=DEFAULT_SPEC.fragment)
    for number in range(5):
        journal = await engine.create_journal(f"{NAME}/{number}", spec)
        for content in (b"one", b"two", bytes(2 * MIB)):
            await journal.append(content)
        await journal.read()
    async with engine.appender(f"{NAME}/0") as appender:
        appender.write(b"record")
    async with engine.journal(f"{NAME}/1").reader() as reader:
        await anext(reader)
    async with engine.watch(ListRequest()) as watch:
        await anext(watch)
    with trio.move_on_after(0.01):
        async with engine.read(ReadRequest(f"{NAME}/2", -1, block=True)) as stream:
            await anext(stream)
    await engine.apply(ApplyRequest((JournalChange(-1, delete=f"{NAME}/4"),)))


@pytest.mark.parametrize("mode", ["memory", *MODES])
async def test_nothing_is_left_behind(tmp_path: Path, mode: str) -> None:
    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    await trio.to_thread.run_sync(lambda: None)  # trio's own files
    before, living = open_files(), tasks()
    engines: list[weakref.ref[Engine]] = []

    async def life() -> None:
        engine = Engine.in_memory() if mode == "memory" else Engine.open(tmp_path, durability=mode)
        engines.append(weakref.ref(engine))
        async with engine:
            await exercise(engine)
        assert tasks() == living

    await life()
    assert open_files() == before
    gc.collect()
    assert [reference() for reference in engines] == [None]


async def test_no_generator_is_left_to_the_collector() -> None:
    """A body that is not wanted to its end is closed there and then, and so is what reads it."""
    closed: list[str] = []

    async def body(length: int) -> AsyncIterator[Buffer]:
        try:
            for _ in range(3):
                yield bytes(length)
        finally:
            await trio.lowlevel.cancel_shielded_checkpoint()
            closed.append("body")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with Engine.in_memory() as engine:
            await engine.create_journal(NAME)
            for length in (100, 2 * MIB):
                for fields in ({"suspend": SuspendControl.KEEP}, {"offset": 77}, {}):
                    await engine.append(AppendRequest(NAME, **fields), body(length))
            assert len(closed) == 6
            stopped = Body(bytes(2 * MIB), b"more")

            async def append() -> None:
                with pytest.raises(AppendFailed):
                    await engine.append(AppendRequest(NAME), stopped)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(append)
                await stopped.begun.wait()
                await engine.apply(ApplyRequest((JournalChange(-1, delete=NAME),)))
                stopped.go_on.set()
            gc.collect()
            await trio.testing.wait_all_tasks_blocked()
    assert [str(it.message) for it in caught if issubclass(it.category, ResourceWarning)] == []


async def test_in_memory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one file is opened, not even for a moment: no call of the system that could."""
    opened: list[object] = []
    real = os.open

    def watched(path: object, *args: object, **kwargs: object) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.chdir(tmp_path)
    files = MemoryFiles()
    async with Engine.in_memory(runtime=RealRuntime(files)) as engine:
        await exercise(engine)
        assert list(files.walk())
    assert opened == []
    assert os.listdir(tmp_path) == []


async def test_readers_keep_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broadsheet.engine.journal.spool_files.OPEN_FILES", 8)
    async with Engine.open(tmp_path, durability="os") as engine:
        for number in range(30):
            await (await engine.create_journal(f"many/{number}")).append(b"%d" % number)
        for _ in range(2):
            for number in range(30):
                assert await engine.journal(f"many/{number}").read() == b"%d" % number
                await engine.journal(f"many/{number}").append(b"")
        assert len([path for path in open_files() if path.startswith(f"{tmp_path}/spools/")]) <= 8




async def test_a_full_disk_shows_in_readiness_until_it_has_room() -> None:
    disk = SimulatedDisk(capacity_bytes=100_000)
    options = EngineOptions(log_file_bytes=8192)
    async with Engine.open("/disk/engine", options=options, runtime=SimulatedRuntime(1, disk)) as engine:
        journal = await engine.create_journal("examples/full")
        assert engine.ready_problem() is None
        with pytest.raises(StorageError):
            await journal.append(bytes(200_000))
        assert "No space left" in (engine.ready_problem() or "")
        disk.capacity_bytes = None
        await journal.append(b"room")
        assert engine.ready_problem() is None
        assert await journal.read() == b"room"

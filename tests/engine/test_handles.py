"""`Journal`, `Reader` and `Appender` over an engine, and over a service that remembers what it was asked."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from broadsheet.engine import handles
from broadsheet.engine.engine import Engine
from broadsheet.engine.errors import (
    AppendFailed,
    BroadsheetError,
    EngineClosed,
    OutcomeUnknown,
    Status,
    StatusError,
    ValidationError,
)
from broadsheet.engine.fragments.fragment import EMPTY_SHA1, Fragment
from broadsheet.engine.handles import Appender, AppenderFull, Journal, Reader
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalFlags,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from broadsheet.engine.labels import LabelSet, parse_selector
from broadsheet.engine.runtime import MemoryFiles, RealRuntime
from broadsheet.engine.service import UNSCOPED, AppendRequest, AppendResponse, Content, ListRequest, Scope
from broadsheet.testing.simulation import SimulatedRuntime

NAME = "a/journal"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine.in_memory() as engine:
        await engine.create_journal(NAME)
        yield engine


class Recording:
    """The engine's `append`, with what it was given, and when; it may be made to wait, or to fail."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches: list[bytes] = []
        self.times: list[float] = []
        self.gate: trio.Event | None = None
        self.failure: BaseException | None = None

    async def append(self, request: AppendRequest, content: Content = b"", scope: Scope = UNSCOPED) -> AppendResponse:
        assert isinstance(content, bytes)
        self.batches.append(content)
        self.times.append(trio.current_time())
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return await self.engine.append(request, content, scope)

    def appender(self, **options: float) -> Appender:
        return Appender(self, NAME, **options)  # type: ignore[arg-type]


@pytest.fixture
async def recording(engine: Engine) -> Recording:
    return Recording(engine)


# --- Journal ----------------------------------------------------------------------------------------------


async def test_create_is_for_whom_comes_first(engine: Engine) -> None:
    spec = JournalSpec(replication=2, fragment=FragmentSpec(2048, CompressionCodec.NONE, refresh_interval_ns=10**9))
    one = await engine.create_journal("an/other", spec)
    await one.append(b"hello")
    other = await Journal.create(engine, "an/other")
    assert await other.read() == b"hello"
    listed = await engine.list(ListRequest(parse_selector("name=an/other")))
    assert [it.spec.replication for it in listed.journals] == [2]
    with pytest.raises(ValidationError):
        await engine.create_journal("no")


async def test_journal(engine: Engine) -> None:
    journal = engine.journal(NAME)
    assert await journal.head() == 0
    assert await journal.read() == b""
    assert await journal.registers() == LabelSet()
    commit = await journal.append(b"hello", union_registers=LabelSet.of(author="me"))
    assert (commit.begin, commit.end, commit.sum) == (0, 5, hashlib.sha1(b"hello").digest())
    commit = await journal.append(b"", check_registers=parse_selector("author=me"))
    assert (commit.begin, commit.end, commit.sum) == (5, 5, EMPTY_SHA1)
    await journal.append(b" world", offset=5, subtract_registers=LabelSet.of(author="me"))
    assert await journal.registers() == LabelSet()
    assert await journal.head() == 11
    assert await journal.read() == b"hello world"
    assert await journal.read(6) == b"world"
    assert await journal.read(3, 7) == b"lo w"
    assert await journal.read(11) == b""
    assert [(it.begin, it.end) for it in await journal.fragments()] == [(0, 5), (5, 11)]


async def test_statuses_are_raised(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"hello", union_registers=LabelSet.of(author="me"))
    with pytest.raises(StatusError) as caught:
        await journal.append(b"x", offset=3)
    error = caught.value
    assert (error.journal, error.offset, error.status) == (NAME, 3, Status.WRONG_APPEND_OFFSET)
    assert str(error).startswith(f"{NAME}: WRONG_APPEND_OFFSET at offset 3 (")
    assert error.hint
    with pytest.raises(StatusError) as caught:
        await journal.append(b"x", check_registers=parse_selector("author=you"))
    assert caught.value.status == Status.REGISTER_MISMATCH
    missing = engine.journal("no/such")
    for call in (missing.head, missing.read, missing.registers, missing.fragments, lambda: missing.append(b"x")):
        with pytest.raises(StatusError) as caught:
            await call()
        assert (caught.value.status, caught.value.journal) == (Status.JOURNAL_NOT_FOUND, "no/such")
    async with missing.reader() as reader:
        with pytest.raises(StatusError, match="JOURNAL_NOT_FOUND"):
            await anext(reader)


async def test_fragments_of_more_than_a_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fragment = FragmentSpec(1024, CompressionCodec.NONE, refresh_interval_ns=10**9)
    journal = await engine.create_journal("an/other", JournalSpec(replication=1, fragment=fragment))
    for _ in range(7):
        await journal.append(bytes(1025))
    monkeypatch.setattr("broadsheet.engine.engine.DEFAULT_PAGE_LIMIT", 3)
    assert [it.begin for it in await journal.fragments()] == [1025 * number for number in range(7)]


async def test_head_of_a_suspended_journal(engine: Engine) -> None:
    spec = JournalSpec(
        replication=1, fragment=handles.DEFAULT_SPEC.fragment, suspend=Suspend(SuspendLevel.FULL, 7)
    )
    journal = await engine.create_journal("an/other", spec)
    with pytest.raises(StatusError, match="SUSPENDED"):
        await journal.head()
    assert (await journal.append(b"x")).begin == 7
    assert await journal.head() == 8


# --- Reader -----------------------------------------------------------------------------------------------


async def test_reader_of_bytes(engine: Engine) -> None:
    journal = engine.journal(NAME)
    for part in (b"one", b"two", b"three"):
        await journal.append(part)
    async with journal.reader(block=False) as reader:
        got = b""
        async for buffer in reader:
            got += buffer
            assert reader.offset == len(got)
    assert got == b"onetwothree"
    async with journal.reader(reader.offset, block=False) as reader:
        assert [bytes(buffer) async for buffer in reader] == []
        assert reader.offset == 11
    await journal.append(b"four")
    async with journal.reader(reader.offset, block=False) as reader:
        assert b"".join([bytes(buffer) async for buffer in reader]) == b"four"


async def test_reader_tails(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"old")
    got: list[bytes] = []

    async def tail(offset: int) -> None:
        async with journal.reader(offset) as reader:
            got.append(bytes(await anext(reader)))
            assert reader.offset == 6

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tail, -1)
        nursery.start_soon(tail, 3)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
        await journal.append(b"new")
    assert got == [b"new", b"new"]


async def test_reader_at_the_end_knows_its_offset(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"old")
    async with journal.reader(-1, block=False) as reader:
        assert [buffer async for buffer in reader] == []
        assert reader.offset == 3


async def test_reader_that_stops_at_an_end(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"hello")
    await journal.append(b" world")
    for block in (False, True):
        for end in (3, 5, 7, 11):
            with trio.fail_after(2):
                async with Reader(engine, NAME, 1, block=block, end=end) as reader:
                    assert b"".join([bytes(it) async for it in reader]) == b"hello world"[1:end]
                    assert reader.offset == end


async def test_reader_outside_of_its_block(engine: Engine) -> None:
    reader = engine.reader(NAME)
    with pytest.raises(EngineClosed):
        await anext(reader)
    async with reader:
        pass
    with pytest.raises(EngineClosed):
        await anext(reader)


async def lines_of(reader: Reader) -> list[tuple[bytes, int]]:
    async with reader, reader.lines() as lines:
        return [(line, reader.offset) async for line in lines]


async def test_lines_across_buffers(engine: Engine) -> None:
    """Each append is a buffer of its own here: lines begin and end where they like."""
    journal = engine.journal(NAME)
    parts = [b"a", b"b\n", b"\n", b"cde", b"fgh", b"ij\nk\nl", b"\n\n", b"rest"]
    for part in parts:
        await journal.append(part)
        await journal.append(b"", offset=await journal.head())
    content = b"".join(parts)
    reader = journal.reader(block=False)
    found = await lines_of(reader)
    assert [line for line, _ in found] == [line + b"\n" for line in content.split(b"\n")[:-1]]
    at = 0
    for line, offset in found:
        at += len(line)
        assert offset == at
    assert reader.offset == len(content) - len(b"rest"), "what follows the last newline is not counted"
    # From each line on: the rest of them.
    for number, (_, offset) in enumerate(found):
        assert await lines_of(journal.reader(offset, block=False)) == found[number + 1 :]
    await journal.append(b" of it\n")
    assert await lines_of(journal.reader(reader.offset, block=False)) == [(b"rest of it\n", len(content) + 7)]


async def test_lines_across_large_buffers(engine: Engine) -> None:
    journal = engine.journal(NAME)
    expected = [b"%d" % number * (number % 300) + b"\n" for number in range(5000)]
    await journal.append(b"".join(expected))
    assert len(b"".join(expected)) > 1 << 21
    assert [line for line, _ in await lines_of(journal.reader(block=False))] == expected


async def test_lines_left_and_taken_up_again(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"one\ntwo\nthree\n")
    async with journal.reader() as reader, reader.lines() as lines:
        assert await anext(lines) == b"one\n"
        assert await anext(lines) == b"two\n"
    assert reader.offset == 8
    async with journal.reader(reader.offset) as reader, reader.lines() as lines:
        assert await anext(lines) == b"three\n"
        await journal.append(b"fo")
        await journal.append(b"ur\n")
        assert await anext(lines) == b"four\n"
        assert reader.offset == 19


async def test_lines_from_the_end(engine: Engine) -> None:
    journal = engine.journal(NAME)
    await journal.append(b"old\n")
    got: list[tuple[bytes, int]] = []

    async def tail() -> None:
        async with journal.reader(-1) as reader, reader.lines() as lines:
            async for line in lines:
                got.append((line, reader.offset))
                if len(got) == 2:
                    return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tail)
        await trio.testing.wait_all_tasks_blocked()
        for part in (b"n", b"ew\nne", b"wer\n"):
            await journal.append(part)
            await trio.testing.wait_all_tasks_blocked()
    assert got == [(b"new\n", 8), (b"newer\n", 14)]


async def test_lines_after_what_was_pruned() -> None:
    """A journal whose first fragments are gone: the offset to resume at is the real one."""
    files = MemoryFiles()
    async with Engine.in_memory(runtime=RealRuntime(files)) as engine:
        content = b"one\ntwo\n"
        fragment = Fragment(NAME, 100, 108, hashlib.sha1(content).digest(), CompressionCodec.NONE)
        files.make_dirs(f"/fragments/{NAME}")
        files.open(f"/fragments/{fragment.content_path}", create=True).pwrite([content], 0)
        spec = JournalSpec(
            replication=1,
            fragment=FragmentSpec(1 << 20, CompressionCodec.NONE, ("file:///",), refresh_interval_ns=10**9),
        )
        journal = await engine.create_journal(NAME, spec)
        assert await lines_of(journal.reader(0, block=False)) == [(b"one\n", 104), (b"two\n", 108)]
        assert await lines_of(journal.reader(104, block=False)) == [(b"two\n", 108)]


async def test_a_line_too_long(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_LINE_BYTES", 10)
    journal = engine.journal(NAME)
    await journal.append(b"short\n" + b"x" * 20)
    with pytest.raises(ValidationError, match="longer than 10 bytes"):
        await lines_of(journal.reader(block=False))


# --- Appender ---------------------------------------------------------------------------------------------


async def test_records_in_order_in_batches(recording: Recording) -> None:
    records = [b"%d\n" % number for number in range(20_000)]
    async with recording.appender(batch_bytes=5000) as appender:
        for record in records:
            if not appender.write(record):
                await appender.drain()
    assert await recording.engine.journal(NAME).read() == b"".join(records)
    assert 10 < len(recording.batches) < 50
    for batch in recording.batches:
        assert batch.endswith(b"\n"), "a record was split"
    assert appender.offset == len(b"".join(records))


async def test_write_tells_when_to_drain(recording: Recording) -> None:
    async with recording.appender(batch_bytes=10, linger_s=60) as appender:
        assert appender.write(b"12345")
        assert appender.write(b"1234")
        assert not appender.write(b"1")
        assert recording.batches == []
        await appender.drain()
        assert recording.batches == [b"1234512341"]
        assert appender.write(b"x")
        await appender.drain()  # there is room
        assert len(recording.batches) == 1
        assert await appender.flush() == 11
    assert await recording.engine.journal(NAME).read() == b"1234512341x"


async def test_drain_that_is_not_heeded(recording: Recording) -> None:
    recording.gate = trio.Event()
    async with recording.appender(batch_bytes=10, max_buffered_bytes=30, linger_s=0) as appender:
        assert not appender.write(b"a" * 10)
        await trio.testing.wait_all_tasks_blocked()  # these are on their way, and count
        assert not appender.write(b"b" * 10)
        assert not appender.write(b"c" * 10)
        for _ in range(3):
            with pytest.raises(AppenderFull, match="30 bytes are waiting"):
                appender.write(b"d" * 10)
        recording.gate.set()
        await appender.drain()
        assert appender.write(b"e")
    assert await recording.engine.journal(NAME).read() == b"a" * 10 + b"b" * 10 + b"c" * 10 + b"e"


async def test_linger(autojump_clock: trio.testing.MockClock) -> None:
    async with Engine.in_memory(runtime=SimulatedRuntime(1)) as engine:
        await engine.create_journal(NAME)
        recording = Recording(engine)
        start = trio.current_time()
        async with recording.appender(linger_s=0.5) as appender:
            appender.write(b"one")
            await trio.sleep(0.3)
            appender.write(b"two")
            assert recording.batches == []
            await trio.sleep(0.3)
            assert recording.batches == [b"onetwo"]
            assert recording.times[0] - start == pytest.approx(0.5)
            await trio.sleep(10)
            assert len(recording.batches) == 1, "nothing to send"
            appender.write(b"three")
            await trio.sleep(0.6)
            assert recording.batches == [b"onetwo", b"three"]
            assert recording.times[1] - start == pytest.approx(11.1)
            assert appender.offset == 11


async def test_a_full_batch_does_not_linger(autojump_clock: trio.testing.MockClock) -> None:
    async with Engine.in_memory(runtime=SimulatedRuntime(1)) as engine:
        await engine.create_journal(NAME)
        recording = Recording(engine)
        async with recording.appender(linger_s=100, batch_bytes=4) as appender:
            start = trio.current_time()
            appender.write(b"1234")
            await trio.testing.wait_all_tasks_blocked()
            assert recording.batches == [b"1234"]
            assert trio.current_time() == start


async def test_flush(recording: Recording) -> None:
    async with recording.appender(linger_s=60) as appender:
        assert await appender.flush() == 0
        appender.write(b"one")
        assert await appender.flush() == 3
        assert await appender.flush() == 3
        await recording.engine.journal(NAME).append(b"between")
        appender.write(b"two")
        assert await appender.flush() == 13
        assert recording.batches == [b"one", b"two"]


async def test_flush_waits_for_what_is_on_its_way(recording: Recording) -> None:
    recording.gate = trio.Event()
    ends: list[int] = []
    async with recording.appender(linger_s=0) as appender:

        async def flush() -> None:
            ends.append(await appender.flush())

        async with trio.open_nursery() as nursery:
            appender.write(b"one")
            await trio.testing.wait_all_tasks_blocked()
            appender.write(b"two")
            for _ in range(3):
                nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            assert ends == []
            assert recording.batches == [b"one"]
            recording.gate.set()
    assert ends == [6, 6, 6]
    assert recording.batches == [b"one", b"two"]


async def test_leaving_the_block_flushes(recording: Recording) -> None:
    async with recording.appender(linger_s=60) as appender:
        appender.write(b"one")
    assert recording.batches == [b"one"]
    assert appender.offset == 3


async def test_error_reaches_flush_and_the_exit(engine: Engine) -> None:
    with pytest.raises(StatusError) as caught:
        async with engine.appender("no/such") as appender:
            appender.write(b"one")
            with pytest.raises(StatusError) as flushed:
                await appender.flush()
            with pytest.raises(StatusError):
                await appender.drain()
            with pytest.raises(StatusError):
                appender.write(b"two")
    assert caught.value is flushed.value
    assert caught.value.status == Status.JOURNAL_NOT_FOUND


async def test_error_at_the_exit_alone(engine: Engine) -> None:
    with pytest.raises(StatusError, match="JOURNAL_NOT_FOUND"):
        async with engine.appender("no/such") as appender:
            appender.write(b"one")


@pytest.mark.parametrize("meanwhile", [0, 1, 2])
async def test_error_in_the_background_reaches_the_next_write(recording: Recording, meanwhile: int) -> None:
    """Whatever was written while the batch that failed was on its way."""
    recording.gate = trio.Event()
    recording.failure = AppendFailed("disk full", journal=NAME)
    with pytest.raises(AppendFailed) as caught:
        async with recording.appender(linger_s=0) as appender:
            appender.write(b"one")
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(meanwhile):
                appender.write(b"two")
            recording.gate.set()
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                with pytest.raises(AppendFailed):
                    appender.write(b"three")
    assert caught.value is recording.failure
    assert recording.batches == [b"one"], "nothing is sent after the first error"


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), EngineClosed("closed")])
async def test_errors_keep_their_type(recording: Recording, error: BroadsheetError) -> None:
    recording.failure = error
    with pytest.raises(type(error)) as caught:
        async with recording.appender() as appender:
            appender.write(b"one")
            await appender.flush()
    assert caught.value is error


async def test_errors_of_the_body_come_out_as_they_are(recording: Recording) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with recording.appender(linger_s=60) as appender:
            appender.write(b"one")
            raise error
    assert caught.value is error
    assert recording.batches == []
    group = ExceptionGroup("mine", [ValueError("a")])
    with pytest.raises(ExceptionGroup) as caught_group:
        async with recording.appender():
            raise group
    assert str(caught_group.value) == str(group)
    assert caught_group.value.exceptions == group.exceptions


async def test_cancelled_body(recording: Recording) -> None:
    recording.gate = trio.Event()
    with trio.CancelScope() as scope:
        async with recording.appender(linger_s=0) as appender:
            appender.write(b"one")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_write_outside_of_the_block(recording: Recording) -> None:
    appender = recording.appender()
    for _ in range(3):
        with pytest.raises(EngineClosed):
            appender.write(b"before")
    async with appender:
        appender.write(b"within")
    for _ in range(3):
        with pytest.raises(EngineClosed):
            appender.write(b"after")
    assert recording.batches == [b"within"]


async def test_appender_of_a_journal_not_written_to(engine: Engine) -> None:
    spec = JournalSpec(replication=1, fragment=handles.DEFAULT_SPEC.fragment, flags=JournalFlags.O_RDONLY)
    await engine.create_journal("an/other", spec)
    with pytest.raises(StatusError, match="NOT_ALLOWED"):
        async with engine.appender("an/other") as appender:
            appender.write(b"x")


async def test_appenders_side_by_side(engine: Engine) -> None:
    async def write(number: int) -> None:
        async with Appender(engine, NAME, batch_bytes=200) as appender:
            for count in range(300):
                if not appender.write(b"%d:%d\n" % (number, count)):
                    await appender.drain()

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(write, number)
    lines = (await engine.journal(NAME).read()).splitlines()
    assert len(lines) == 1200
    for number in range(4):
        own = [line for line in lines if line.startswith(b"%d:" % number)]
        assert own == [b"%d:%d" % (number, count) for count in range(300)]

"""Append rates in the engine, on simulated time (spec/replication.md §5.7); and large bodies beside small ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from broadsheet.engine.engine import Engine
from broadsheet.engine.errors import SlowAppend, Status
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.handles import DEFAULT_SPEC
from broadsheet.engine.journal.spec import JournalSpec
from broadsheet.engine.service import AppendRequest, Buffer
from broadsheet.testing.simulation import SimulatedRuntime

MIB = 1 << 20
ONE, TWO = "a/journal", "an/other"


# pytest-trio takes the clock from a test's own arguments, so each test here asks for it.


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine.in_memory(runtime=SimulatedRuntime(1), min_append_rate=1000) as engine:
        await engine.create_journal(ONE)
        await engine.create_journal(TWO)
        yield engine


async def pieces(length: int, count: int, pause_s: float, first: int = 0) -> AsyncIterator[Buffer]:
    if first:
        yield bytes(first)
    for _ in range(count):
        await trio.sleep(pause_s)
        yield b"x" * length


async def stalling(length: int) -> AsyncIterator[Buffer]:
    yield bytes(length)
    await trio.sleep_forever()


@pytest.mark.parametrize("length", [0, 100, 2 * MIB])
async def test_stalled_body_is_aborted_when_its_credit_is_used(
    autojump_clock: MockClock, engine: Engine, length: int
) -> None:
    journal = engine.journal(ONE)
    await journal.append(b"before")
    start = trio.current_time()
    with pytest.raises(SlowAppend) as caught:
        await journal.append(stalling(length))
    assert str(caught.value).startswith("append stream: client stream didn't sustain the minimum append data rate")
    assert 1.0 <= trio.current_time() - start <= 1.15
    assert await journal.read() == b"before"
    assert (await journal.append(b"after")).begin == 6


@pytest.mark.parametrize("first", [0, 2 * MIB])
async def test_body_at_the_minimum_rate_is_taken(autojump_clock: MockClock, engine: Engine, first: int) -> None:
    commit = await engine.journal(ONE).append(pieces(110, 100, 0.1, first))
    assert commit.length == first + 11_000
    with pytest.raises(SlowAppend):
        await engine.journal(ONE).append(pieces(50, 100, 0.1, first))


async def test_a_pause_within_the_credit_is_forgiven(autojump_clock: MockClock, engine: Engine) -> None:
    commit = await engine.journal(ONE).append(pieces(1000, 5, 0.85))
    assert commit.length == 5000


async def test_time_in_the_queue_is_not_the_clients(autojump_clock: MockClock, engine: Engine) -> None:
    """A body that is complete may wait for the journal as long as it takes."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.journal(ONE).append, pieces(2000, 20, 0.5, 2 * MIB))
        await trio.sleep(0.1)
        start = trio.current_time()
        assert (await engine.journal(ONE).append(pieces(10, 2, 0.01))).begin == 2 * MIB + 40_000
        assert trio.current_time() - start > 9
        start = trio.current_time()
        assert (await engine.journal(ONE).append(pieces(10, 2, 0.01, 2 * MIB))).length == 2 * MIB + 20


async def test_throttled_to_its_rate(autojump_clock: MockClock, engine: Engine) -> None:
    spec = JournalSpec(replication=1, fragment=DEFAULT_SPEC.fragment, max_append_rate=10_000)
    await engine.create_journal("slow/journal", spec)
    start = trio.current_time()
    for number in range(1, 9):
        response = await engine.append(AppendRequest("slow/journal"), bytes(5000))
        assert response.status == Status.OK
        elapsed = trio.current_time() - start
        # A second's worth is there from the start.
        assert elapsed == pytest.approx(max(0.0, number * 0.5 - 1), abs=0.1)
        assert response.total_chunks == 2
        assert response.delayed_chunks == (1 if number > 2 else 0)
    await trio.sleep(1000)
    start = trio.current_time()
    await engine.append(AppendRequest("slow/journal"), bytes(100_000))  # the bank holds ten seconds' worth
    assert trio.current_time() - start < 0.1
    response = await engine.append(AppendRequest("slow/journal"), pieces(1000, 30, 0.0))
    assert trio.current_time() - start == pytest.approx(3, abs=0.3)
    assert response.delayed_chunks > 20
    assert response.total_chunks == 31


async def test_neighbours_of_a_throttled_journal_proceed(autojump_clock: MockClock, engine: Engine) -> None:
    spec = JournalSpec(replication=1, fragment=DEFAULT_SPEC.fragment, max_append_rate=2000)
    slow = await engine.create_journal("slow/journal", spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow.append, bytes(20_000))
        await wait_all_tasks_blocked()
        start = trio.current_time()
        for number in range(100):
            assert (await engine.journal(ONE).append(b"x")).begin == number
        assert trio.current_time() == start
        # A barrier of the throttled one waits behind what holds it.
        assert (await slow.append(b"")).end == 20_000
        assert trio.current_time() - start == pytest.approx(9, abs=0.2)


async def test_the_process_bounds_a_journals_rate(autojump_clock: MockClock) -> None:
    options = {"min_append_rate": 100, "max_append_rate": 1000}
    async with Engine.in_memory(runtime=SimulatedRuntime(1), **options) as engine:
        spec = JournalSpec(replication=1, fragment=DEFAULT_SPEC.fragment, max_append_rate=10_000)
        slow = await engine.create_journal("slow/journal", spec)
        start = trio.current_time()
        await slow.append(bytes(3000))
        assert trio.current_time() - start == pytest.approx(2, abs=0.1)
        free = await engine.create_journal(ONE)  # has no rate, and so is not throttled
        start = trio.current_time()
        await free.append(bytes(3000))
        assert trio.current_time() == start


async def test_a_cancelled_throttled_append_is_rolled_back(autojump_clock: MockClock, engine: Engine) -> None:
    spec = JournalSpec(replication=1, fragment=DEFAULT_SPEC.fragment, max_append_rate=2000)
    slow = await engine.create_journal("slow/journal", spec)
    with trio.move_on_after(3):
        await slow.append(bytes(20_000))
    assert await slow.head() == 0
    assert (await slow.append(b"x")).begin == 0


async def test_small_appends_wait_for_a_large_body_that_streams(autojump_clock: MockClock, engine: Engine) -> None:
    journal = engine.journal(ONE)
    commits: dict[str, Fragment] = {}

    async def append(what: str, content: bytes | AsyncIterator[Buffer]) -> None:
        commits[what] = await journal.append(content)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append, "large", pieces(50_000, 20, 0.2, 2 * MIB))
        await trio.sleep(1)
        assert engine.spool_files.unsynced_bytes > 2 * MIB, "it streams into the spool"
        nursery.start_soon(append, "small", b"small")
        await trio.sleep(1)
        assert commits == {}
        assert await journal.head() == 0
    assert commits["large"].begin == 0
    assert commits["small"].begin == commits["large"].end == 2 * MIB + 1_000_000
    assert (await journal.read())[-5:] == b"small"


async def test_budget_of_bodies_comes_back(autojump_clock: MockClock, engine: Engine) -> None:
    before = engine._appending._budget
    journal = engine.journal(ONE)
    await journal.append(pieces(1000, 10, 0.01))
    await journal.append(pieces(100_000, 10, 0.01, 2 * MIB))
    for length in (100, 2 * MIB):
        with pytest.raises(SlowAppend):
            await journal.append(stalling(length))
    with trio.move_on_after(0.5):
        await journal.append(stalling(100))
    assert engine._appending._budget == before


async def test_small_bodies_beyond_the_budget_stream(autojump_clock: MockClock, engine: Engine) -> None:
    engine._appending._budget = 1000
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(engine.journal(ONE).append, pieces(300 + number, 3, 0.01))
    assert engine._appending._budget == 1000
    assert await engine.journal(ONE).head() == 3 * (300 * 5 + 10)


async def test_wall_clock_that_jumps_does_not_abort(autojump_clock: MockClock) -> None:
    """Rates are of elapsed time, whatever the wall clock is set to."""
    runtime = SimulatedRuntime(1)
    async with Engine.in_memory(runtime=runtime, min_append_rate=1000) as engine:
        journal = await engine.create_journal(ONE)

        async def jumping(seconds: float) -> AsyncIterator[Buffer]:
            for _ in range(5):
                yield b"x" * 200
                await trio.sleep(0.1)
                runtime.simulated_clock.jump(seconds)

        assert (await journal.append(jumping(3600))).length == 1000
        assert (await journal.append(jumping(-3600))).length == 1000
        start = trio.current_time()
        runtime.simulated_clock.jump(-3600)
        with pytest.raises(SlowAppend):
            await journal.append(stalling(10))
        assert trio.current_time() - start < 1.2


@pytest.mark.parametrize("mode", ["memory", "os"])
async def test_a_loop_of_appends_can_be_cancelled_and_lets_others_run(tmp_path: Path, mode: str) -> None:
    """In these modes an append is done at once, and never waits."""
    engine = Engine.in_memory() if mode == "memory" else Engine.open(tmp_path, durability=mode)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with engine, trio.open_nursery() as nursery:
        journal = await engine.create_journal("examples/loop")
        nursery.start_soon(other)
        appended = 0
        with trio.move_on_after(0.2) as scope:
            while appended < 1_000_000:
                await journal.append(b"x")
                appended += 1
        assert scope.cancelled_caught
        assert turns >= appended // 20
        assert await journal.head() == appended
        nursery.cancel_scope.cancel()

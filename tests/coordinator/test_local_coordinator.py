"""`LocalCoordinator`: the conformance suite in memory and on a log, and what happens when the log fails."""

from __future__ import annotations

import errno
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from broadsheet.engine.coordinator import (
    Compare,
    CompareTarget,
    Coordinator,
    CoordinatorIdentity,
    KeyEvents,
    LeaseNotFound,
    Put,
)
from broadsheet.engine.errors import StorageError, ValidationError
from broadsheet.engine.key_value import Change, KeyValueStore, encode_snapshot
from broadsheet.engine.local_coordinator import LocalCoordinator
from broadsheet.engine.runtime import RealClock
from broadsheet.testing.conformance.coordinator import CoordinatorSuite
from broadsheet.testing.simulation import cancel_at_step

IDENTITY = CoordinatorIdentity(cluster_id=7, member_id=9)


class Log:
    """A `persist` hook: takes a few scheduling points, may fail, remembers."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.failure: Exception | None = None
        self.gate: trio.Event | None = None
        self.running = 0

    async def persist(self, record: bytes) -> None:
        self.running += 1
        assert self.running == 1, "two transactions at once"
        try:
            await trio.lowlevel.checkpoint()
            if self.gate is not None:
                await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            self.records.append(record)
            await trio.lowlevel.checkpoint()
        finally:
            self.running -= 1

    def replay(self, store: KeyValueStore | None = None) -> KeyValueStore:
        store = store if store is not None else KeyValueStore()
        for record in self.records:
            store.apply(Change.decode(record))
        return store

    def coordinator(self) -> LocalCoordinator:
        return LocalCoordinator(self.replay(), IDENTITY, RealClock(), self.persist)


def same(one: KeyValueStore, other: KeyValueStore) -> bool:
    return one.range() == other.range() and dict(one.leases) == dict(other.leases)


@asynccontextmanager
async def running(coordinator: LocalCoordinator) -> AsyncIterator[LocalCoordinator]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.run)
        yield coordinator
        nursery.cancel_scope.cancel()


class TestInMemory(CoordinatorSuite):
    @pytest.fixture
    def clock(self, autojump_clock: trio.testing.MockClock) -> trio.abc.Clock:
        return autojump_clock

    @pytest.fixture
    async def coordinator(self, nursery: trio.Nursery) -> LocalCoordinator:
        coordinator = LocalCoordinator.in_memory()
        nursery.start_soon(coordinator.run)
        return coordinator


class TestOnALog(CoordinatorSuite):
    """The same with a log that awaits; after each test, the log gives back the same store."""

    @pytest.fixture
    def clock(self, autojump_clock: trio.testing.MockClock) -> trio.abc.Clock:
        return autojump_clock

    @pytest.fixture
    async def coordinator(self) -> AsyncIterator[LocalCoordinator]:
        log = Log()
        coordinator = log.coordinator()
        async with running(coordinator):
            yield coordinator
        assert same(log.replay(), coordinator.store)


async def test_it_is_a_coordinator() -> None:
    coordinator: Coordinator = LocalCoordinator.in_memory()
    assert coordinator.identity == CoordinatorIdentity(1, 1)
    assert LocalCoordinator.in_memory(IDENTITY).identity == IDENTITY


async def test_reading_without_awaits() -> None:
    coordinator = LocalCoordinator.in_memory()
    assert coordinator.revision == 1
    await coordinator.transact((), (Put(b"a", b"1"), Put(b"b", b"2")))
    assert coordinator.revision == 2
    item = coordinator.get(b"a")
    assert item is not None
    assert item.value == b"1"
    assert coordinator.get(b"c") is None
    assert coordinator.range_now(b"") == await coordinator.range(b"")


async def test_revisions_and_keys_survive_a_restart() -> None:
    log = Log()
    first = log.coordinator()
    for number in range(5):
        await first.transact((), (Put(b"%d" % number, b"\xff\x00"),))
    second = log.coordinator()
    assert second.identity == first.identity
    assert same(first.store, second.store)
    result = await second.transact((), (Put(b"more", b""),))
    assert result.revision == 7

    snapshot = list(encode_snapshot(second.store.snapshot()))
    await second.transact((), (Put(b"later", b""),))
    third = log.replay(KeyValueStore.restore(snapshot))  # a log that overlaps with the snapshot
    assert same(third, second.store)


async def test_watch_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    first = log.coordinator()
    for number in range(3):
        await first.transact((), (Put(b"%d" % number, b""),))
    second = log.coordinator()
    async with second.watch(b"", 2) as watch:
        events = await anext(watch)
        assert [item.key for item in events.put] == [b"1", b"2"]


async def test_persist_fails_and_nothing_happened() -> None:
    log = Log()
    coordinator = log.coordinator()
    await coordinator.transact((), (Put(b"a", b"1"),))
    lease = await coordinator.grant_lease(10)
    before = coordinator.range_now(b"")
    async with coordinator.watch(b"", before.revision) as watch:
        log.failure = StorageError("disk full")
        with pytest.raises(StorageError):
            await coordinator.transact((), (Put(b"a", b"2"),))
        with pytest.raises(StorageError):
            await coordinator.grant_lease(10)
        with pytest.raises(StorageError):
            await coordinator.revoke_lease(lease)
        assert coordinator.range_now(b"") == before
        assert same(log.replay(), coordinator.store)
        assert not (await coordinator.transact((Compare(b"a", CompareTarget.VALUE, b"?"),), ())).succeeded
        log.failure = None
        result = await coordinator.transact((), (Put(b"a", b"3"),))
        assert result.revision == before.revision + 1
        assert (await anext(watch)).revision == result.revision
    assert same(log.replay(), coordinator.store)


async def test_cancelled_while_persisting_it_stands() -> None:
    log = Log()
    coordinator = log.coordinator()
    log.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.transact, (), (Put(b"a", b"1"),))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        assert coordinator.revision == 1  # not before it is durable
        log.gate.set()
    assert coordinator.revision == 2
    assert same(log.replay(), coordinator.store)


async def test_cancelled_while_waiting_for_its_turn_it_did_not_happen() -> None:
    log = Log()
    coordinator = log.coordinator()
    log.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.transact, (), (Put(b"a", b"1"),))
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await coordinator.transact((), (Put(b"b", b"2"),))
        assert scope.cancelled_caught
        log.gate.set()
    assert [item.key for item in coordinator.range_now(b"").items] == [b"a"]


async def test_log_and_state_agree_wherever_it_is_cancelled() -> None:
    log = Log()
    coordinator = log.coordinator()
    for step in itertools.count(1):
        put = Put(b"%d" % step, b"")
        outcome = await cancel_at_step(step, lambda put=put: coordinator.transact((), (put,)))  # type: ignore[misc]
        assert same(log.replay(), coordinator.store)
        if not outcome.reached:
            break
    assert step > 3


async def test_lease_has_its_full_time_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    first = log.coordinator()
    lease = await first.grant_lease(10)
    await first.transact((), (Put(b"a", b"", lease),))
    await trio.sleep(60)  # nobody runs: it does not end
    second = log.coordinator()
    async with running(second):
        async with second.watch(b"", second.revision) as watch:
            await trio.sleep(9)
            assert second.get(b"a") is not None
            started = trio.current_time()
            assert await anext(watch) == KeyEvents(3, (), (b"a",))
            assert trio.current_time() - started == pytest.approx(1)
        assert await second.grant_lease(10) > lease  # ids are not used twice
    assert same(log.replay(), second.store)


async def test_lease_whose_end_cannot_be_persisted(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    coordinator = log.coordinator()
    async with running(coordinator):
        lease = await coordinator.grant_lease(10)
        await coordinator.transact((), (Put(b"a", b"", lease),))
        log.failure = OSError(errno.ENOSPC, "disk full")
        async with coordinator.watch(b"", coordinator.revision) as watch:
            await trio.sleep(12)
            assert "could not be ended" in caplog.text
            assert coordinator.get(b"a") is not None
            with pytest.raises(LeaseNotFound):
                await coordinator.keep_alive(lease)
            log.failure = None
            assert (await anext(watch)).deleted == (b"a",)
    assert same(log.replay(), coordinator.store)


async def test_run_sleeps_until_the_next_lease_ends(autojump_clock: trio.testing.MockClock) -> None:
    """No polling: a long lease takes few steps, and a shorter one granted later is not missed."""
    coordinator = LocalCoordinator.in_memory()
    steps = 0

    class Steps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal steps
            steps += "LocalCoordinator.run" in task.name

    trio.lowlevel.add_instrument(Steps())
    async with running(coordinator):
        await trio.testing.wait_all_tasks_blocked()
        await coordinator.grant_lease(50_000)
        short = await coordinator.grant_lease(10)
        await trio.sleep(11)
        assert list(coordinator.store.leases) != []
        with pytest.raises(LeaseNotFound):
            await coordinator.keep_alive(short)
        await trio.sleep(50_000)
        assert not coordinator.store.leases
    assert 0 < steps < 20


async def test_ttl_must_be_positive() -> None:
    coordinator = LocalCoordinator.in_memory()
    for ttl_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            await coordinator.grant_lease(ttl_s)


async def test_slow_watch_is_bounded() -> None:
    coordinator = LocalCoordinator.in_memory()
    async with coordinator.watch(b"", 1) as watch:
        for number in range(10_000):
            await coordinator.transact((), (Put(b"%d" % (number % 10), b"%d" % number),))
        assert len(watch._changed) == 10
        events = await anext(watch)
        assert events.revision == 10_001
        assert [item.value for item in events.put] == [b"%d" % number for number in range(9_990, 10_000)]
    assert not coordinator._watches


async def test_compares_are_checked_in_turn(autojump_clock: trio.testing.MockClock) -> None:
    """What is planned is planned on what was applied, not on what is still being persisted."""
    log = Log()
    coordinator = log.coordinator()
    results = []

    async def create(value: bytes) -> None:
        absent = Compare(b"a", CompareTarget.VERSION, 0)
        results.append((await coordinator.transact((absent,), (Put(b"a", value),))).succeeded)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(create, b"%d" % number)
    assert sorted(results) == [False] * 9 + [True]
    item = coordinator.get(b"a")
    assert item is not None
    assert replace(item, value=b"").version == 1

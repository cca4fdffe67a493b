"""What every `Coordinator` does: subclass `CoordinatorSuite` in a pytest module and give it one.

    class TestMine(CoordinatorSuite):
        @pytest.fixture
        def clock(self, autojump_clock):     # leave it out for real time
            return autojump_clock

        @pytest.fixture
        async def coordinator(self, nursery):
            coordinator = LocalCoordinator.in_memory()
            nursery.start_soon(coordinator.run)
            return coordinator

Needs pytest-trio. The store is empty or shared with others: tests use keys under a prefix of their own, and
say nothing about revisions but that they grow, unless `exclusive` is True (the default: nobody else writes
meanwhile, so each transaction has the next revision). Leases take `lease_ttl_s` seconds by trio's clock; with
an autojumping clock that is no time at all.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from broadsheet.engine.coordinator import (
    Compacted,
    Compare,
    CompareTarget,
    Coordinator,
    Delete,
    DuplicateKey,
    KeyEvents,
    KeyValue,
    KeyWatch,
    LeaseNotFound,
    Operation,
    Put,
)
from broadsheet.testing.simulation.cancellation import cancel_at_step

__all__ = ["CoordinatorSuite"]

_Clock = trio.abc.Clock | None
_PREFIX = b"/conformance/"
_A, _B, _C = _PREFIX + b"a", _PREFIX + b"b", _PREFIX + b"c"


async def _put(coordinator: Coordinator, key: bytes, value: bytes = b"", lease: int = 0) -> int:
    result = await coordinator.transact((), (Put(key, value, lease),))
    assert result.succeeded
    return result.revision


async def _get(coordinator: Coordinator, key: bytes) -> KeyValue | None:
    for item in (await coordinator.range(key)).items:
        if item.key == key:
            return item
    return None


async def _keys(coordinator: Coordinator, prefix: bytes = _PREFIX) -> list[bytes]:
    return [item.key for item in (await coordinator.range(prefix)).items]


class _Mirror:
    """What a watch has told so far."""

    def __init__(self) -> None:
        self.items: dict[bytes, KeyValue] = {}
        self.revision = 0

    def take(self, events: KeyEvents) -> None:
        assert events.put or events.deleted, "events of nothing"
        assert events.revision > self.revision, "events went back"
        changed = [item.key for item in events.put] + list(events.deleted)
        assert len(set(changed)) == len(changed), "a key twice in one batch of events"
        for item in events.put:
            assert self.revision < item.mod_revision <= events.revision
            self.items[item.key] = item
        for key in events.deleted:
            self.items.pop(key, None)
        self.revision = events.revision

    async def follow(self, watch: KeyWatch, revision: int) -> None:
        while self.revision < revision:
            with trio.fail_after(30):
                self.take(await anext(watch))


class CoordinatorSuite:
    """See the module."""

    exclusive = True
    lease_ttl_s = 5.0
    compaction_changes = 5_000
    """So many changes, or `compact`, make the first revision be forgotten."""

    @pytest.fixture
    def clock(self) -> trio.abc.Clock | None:
        """trio's clock of each test; None is the real one."""
        return None

    @pytest.fixture
    async def coordinator(self) -> Coordinator:
        raise NotImplementedError("override the `coordinator` fixture")

    async def compact(self, coordinator: Coordinator) -> None:
        """Make the coordinator forget its past. Override where there is a call for it."""
        for number in range(self.compaction_changes):
            await _put(coordinator, _C, b"%d" % number)

    @asynccontextmanager
    async def silent(self, watch: KeyWatch, seconds: float = 0.1) -> AsyncIterator[None]:
        """Nothing arrives at a watch."""
        yield
        with trio.move_on_after(seconds):
            pytest.fail(f"unexpected {await anext(watch)}")

    # --- Keys and revisions ---------------------------------------------------------------------------------

    async def test_identity_is_not_zero(self, clock: _Clock, coordinator: Coordinator) -> None:
        identity = coordinator.identity
        assert identity.cluster_id > 0
        assert identity.member_id > 0
        assert identity.raft_term > 0

    async def test_put_and_range(self, clock: _Clock, coordinator: Coordinator) -> None:
        before = (await coordinator.range(_PREFIX)).revision
        assert before >= 1
        first = await _put(coordinator, _A, b"one")
        assert first > before
        assert await _get(coordinator, _A) == KeyValue(_A, b"one", first, first, 1, 0)
        second = await _put(coordinator, _A, b"\x00\xff not text")
        assert second > first
        assert await _get(coordinator, _A) == KeyValue(_A, b"\x00\xff not text", first, second, 2, 0)
        if self.exclusive:
            assert (first, second) == (before + 1, before + 2)

    async def test_delete_and_put_again_is_a_new_key(self, clock: _Clock, coordinator: Coordinator) -> None:
        first = await _put(coordinator, _A)
        result = await coordinator.transact((), (Delete(_A),))
        assert result.succeeded
        assert result.revision > first
        assert await _get(coordinator, _A) is None
        again = await _put(coordinator, _A)
        assert await _get(coordinator, _A) == KeyValue(_A, b"", again, again, 1, 0)

    async def test_delete_of_a_missing_key_writes_nothing(self, clock: _Clock, coordinator: Coordinator) -> None:
        before = (await coordinator.range(_PREFIX)).revision
        result = await coordinator.transact((), (Delete(_A),))
        assert result.succeeded
        if self.exclusive:
            assert result.revision == before

    async def test_empty_transaction(self, clock: _Clock, coordinator: Coordinator) -> None:
        before = (await coordinator.range(_PREFIX)).revision
        result = await coordinator.transact((), ())
        assert result.succeeded
        if self.exclusive:
            assert result.revision == before
        failed = await coordinator.transact((Compare(_A, CompareTarget.VERSION, 7),), ())
        assert not failed.succeeded

    async def test_operations_of_a_transaction_share_one_revision(
        self, clock: _Clock, coordinator: Coordinator
    ) -> None:
        await _put(coordinator, _C)
        result = await coordinator.transact((), (Put(_B, b"b"), Put(_A, b"a"), Delete(_C)))
        found = await coordinator.range(_PREFIX)
        assert [item.key for item in found.items] == [_A, _B]
        assert {item.mod_revision for item in found.items} == {result.revision}
        assert found.revision >= result.revision

    async def test_range_is_ordered_and_bounded_by_its_prefix(self, clock: _Clock, coordinator: Coordinator) -> None:
        inside = [_PREFIX + b"p" + tail for tail in (b"", b"\x00", b"/1", b"/10", b"/2", b"\xff", b"\xff\xff")]
        outside = [_PREFIX + b"o\xff", _PREFIX + b"q", _PREFIX[:-1], _PREFIX[:-1] + b"0p"]
        for key in [*reversed(inside), *outside]:
            await _put(coordinator, key)
        assert await _keys(coordinator, _PREFIX + b"p") == sorted(inside)
        assert await _keys(coordinator, _PREFIX + b"p\xff") == sorted(inside)[-2:]
        assert await _keys(coordinator, _PREFIX + b"none") == []
        everything = await _keys(coordinator, b"")
        assert everything == sorted(everything)
        assert {*inside, *outside} <= set(everything)

    async def test_prefix_of_the_highest_bytes(self, clock: _Clock, coordinator: Coordinator) -> None:
        keys = [b"\xff", b"\xff\x00", b"\xff\xff", b"\xff\xffz"]
        for key in keys:
            await _put(coordinator, key)
        assert await _keys(coordinator, b"\xff\xff") == keys[2:]
        assert await _keys(coordinator, b"\xff") == keys

    # --- Compares -------------------------------------------------------------------------------------------

    async def test_each_compare_holds_or_nothing_happens(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
        created = await _put(coordinator, _A, b"0")
        modified = await _put(coordinator, _A, b"value", lease)
        truth: dict[CompareTarget, int | bytes] = {
            CompareTarget.CREATE_REVISION: created,
            CompareTarget.MOD_REVISION: modified,
            CompareTarget.VERSION: 2,
            CompareTarget.VALUE: b"value",
            CompareTarget.LEASE: lease,
        }
        holding = tuple(Compare(_A, target, value) for target, value in truth.items())
        for target, value in truth.items():
            wrong = value + b"!" if isinstance(value, bytes) else value + 1
            before = (await coordinator.range(_PREFIX)).revision
            result = await coordinator.transact((*holding, Compare(_A, target, wrong)), (Put(_B, b""), Delete(_A)))
            assert not result.succeeded, target
            if self.exclusive:
                assert result.revision == before
            assert await _keys(coordinator) == [_A], target
        assert (await coordinator.transact(holding, (Put(_B, b""), Delete(_A)))).succeeded
        assert await _keys(coordinator) == [_B]

    async def test_compares_of_a_missing_key(self, clock: _Clock, coordinator: Coordinator) -> None:
        for target in CompareTarget:
            is_value = target is CompareTarget.VALUE
            held = await coordinator.transact((Compare(_A, target, b"" if is_value else 0),), ())
            assert held.succeeded is not is_value, target
            other = await coordinator.transact((Compare(_A, target, b"x" if is_value else 1),), ())
            assert not other.succeeded, target

    async def test_empty_value_is_a_value(self, clock: _Clock, coordinator: Coordinator) -> None:
        await _put(coordinator, _A, b"")
        assert (await coordinator.transact((Compare(_A, CompareTarget.VALUE, b""),), ())).succeeded

    async def test_duplicate_keys_are_refused(self, clock: _Clock, coordinator: Coordinator) -> None:
        twice: list[tuple[Operation, ...]] = [
            (Put(_A, b"1"), Put(_A, b"2")),
            (Put(_A, b"1"), Put(_B, b""), Delete(_A)),
            (Delete(_A), Delete(_A)),
        ]
        for operations in twice:
            with pytest.raises(DuplicateKey):
                await coordinator.transact((), operations)
        assert await _keys(coordinator) == []

    async def test_concurrent_counter(self, clock: _Clock, coordinator: Coordinator) -> None:
        """20 tasks increment one key by compare-and-set: nothing is lost."""
        tasks, rounds = 20, 5
        await _put(coordinator, _A, b"0")
        conflicts = 0

        async def increment() -> None:
            nonlocal conflicts
            for _ in range(rounds):
                while True:
                    item = await _get(coordinator, _A)
                    assert item is not None
                    unchanged = Compare(_A, CompareTarget.MOD_REVISION, item.mod_revision)
                    put = Put(_A, b"%d" % (int(item.value) + 1))
                    if (await coordinator.transact((unchanged,), (put,))).succeeded:
                        break
                    conflicts += 1

        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(increment)
        item = await _get(coordinator, _A)
        assert item is not None
        assert int(item.value) == tasks * rounds
        assert item.version == tasks * rounds + 1
        assert conflicts > 0

    # --- Watches --------------------------------------------------------------------------------------------

    async def test_watch_sees_each_change(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            first = await _put(coordinator, _A, b"1")
            assert await anext(watch) == KeyEvents(first, (KeyValue(_A, b"1", first, first),))
            second = (await coordinator.transact((), (Delete(_A), Put(_B, b"2")))).revision
            assert await anext(watch) == KeyEvents(second, (KeyValue(_B, b"2", second, second),), (_A,))
            async with self.silent(watch):
                await coordinator.transact((), ())
                await coordinator.transact((), (Delete(_A),))

    async def test_watch_waits(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        seen: list[KeyEvents] = []
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                async with coordinator.watch(_PREFIX, start) as watch:
                    seen.append(await anext(watch))

            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            revision = await _put(coordinator, _A)
        assert [events.revision for events in seen] == [revision]

    async def test_watch_from_a_revision_has_no_gap_and_no_duplicate(
        self, clock: _Clock, coordinator: Coordinator
    ) -> None:
        revisions = [await _put(coordinator, _PREFIX + b"%d" % number) for number in range(10)]
        for start in revisions:
            async with coordinator.watch(_PREFIX, start) as watch:
                last = await _put(coordinator, _A, b"%d" % start)
                mirror = _Mirror()
                mirror.revision = start
                await mirror.follow(watch, last)
                assert sorted(mirror.items) == [
                    *(_PREFIX + b"%d" % number for number in range(10) if revisions[number] > start),
                    _A,
                ]

    async def test_watch_sees_nothing_outside_its_prefix(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX + b"p", start) as watch:
            async with self.silent(watch):
                for key in (_PREFIX + b"o\xff", _PREFIX + b"q", _PREFIX, _PREFIX[:-1]):
                    await _put(coordinator, key)
                await coordinator.transact((), (Delete(_PREFIX + b"q"),))
            last = await _put(coordinator, _PREFIX + b"p")
            events = await anext(watch)
            assert (events.revision, [item.key for item in events.put]) == (last, [_PREFIX + b"p"])

    async def test_watch_of_a_future_revision(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = await _put(coordinator, _A)
        if not self.exclusive:
            pytest.skip("needs a store of its own")
        async with coordinator.watch(_PREFIX, start + 2) as watch:
            async with self.silent(watch):
                await _put(coordinator, _A)
                await _put(coordinator, _B)
            last = await _put(coordinator, _C)
            events = await anext(watch)
            assert (events.revision, [item.key for item in events.put]) == (last, [_C])

    async def test_slow_watch_ends_in_the_right_state(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            last = start
            for number in range(300):
                key = _PREFIX + b"%d" % (number % 7)
                operation = Delete(key) if number % 11 == 0 else Put(key, b"%d" % number)
                last = (await coordinator.transact((), (operation,))).revision
            last = await _put(coordinator, _A)
            mirror = _Mirror()
            mirror.revision = start
            await mirror.follow(watch, last)
        found = await coordinator.range(_PREFIX)
        assert tuple(sorted(mirror.items.values(), key=lambda item: item.key)) == found.items

    async def test_watches_follow_concurrent_writers(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        mirrors = [_Mirror() for _ in range(3)]

        async def follow(mirror: _Mirror, task_status: trio.TaskStatus[None]) -> None:
            mirror.revision = start
            async with coordinator.watch(_PREFIX, start) as watch:
                task_status.started()
                while _C not in mirror.items:
                    mirror.take(await anext(watch))

        async def write(writer: int) -> None:
            for number in range(20):
                key = _PREFIX + b"%d" % (number * writer % 5)
                await coordinator.transact((), (Put(key, b"%d" % number),))

        async with trio.open_nursery() as followers:
            for mirror in mirrors:
                await followers.start(follow, mirror)
            async with trio.open_nursery() as writers:
                for writer in range(1, 5):
                    writers.start_soon(write, writer)
            await _put(coordinator, _C)
        found = (await coordinator.range(_PREFIX)).items
        for mirror in mirrors:
            assert tuple(sorted(mirror.items.values(), key=lambda item: item.key)) == found

    async def test_cancelled_watch_takes_nothing(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(watch)
            assert scope.cancelled_caught
            last = await _put(coordinator, _A)
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(watch)
            assert scope.cancelled_caught
            assert (await anext(watch)).revision == last

    async def test_compacted(self, clock: _Clock, coordinator: Coordinator) -> None:
        start = await _put(coordinator, _A)
        await _put(coordinator, _B)
        await self.compact(coordinator)
        async with coordinator.watch(_PREFIX, start) as watch:
            with pytest.raises(Compacted):
                await anext(watch)
        now = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX, now) as watch:
            last = await _put(coordinator, _A)
            assert (await anext(watch)).revision == last

    # --- Leases ---------------------------------------------------------------------------------------------

    async def test_lease_expires_with_its_keys_at_one_revision(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s)
        assert lease > 0
        await coordinator.transact((), (Put(_A, b"", lease), Put(_B, b"", lease), Put(_C, b"")))
        start = (await coordinator.range(_PREFIX)).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            with trio.fail_after(self.lease_ttl_s * 4):
                events = await anext(watch)
            assert sorted(events.deleted) == [_A, _B]
            assert events.put == ()
            if self.exclusive:
                assert events.revision == start + 1
        assert await _keys(coordinator) == [_C]
        with pytest.raises(LeaseNotFound):
            await coordinator.keep_alive(lease)
        with pytest.raises(LeaseNotFound):
            await coordinator.revoke_lease(lease)

    async def test_lease_does_not_expire_early(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s)
        await _put(coordinator, _A, b"", lease)
        await trio.sleep(self.lease_ttl_s * 0.9)
        assert await _keys(coordinator) == [_A]

    async def test_keep_alive_renews(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s)
        start = await _put(coordinator, _A, b"", lease)
        for _ in range(5):
            await trio.sleep(self.lease_ttl_s * 0.6)
            assert await coordinator.keep_alive(lease) == pytest.approx(self.lease_ttl_s, abs=1)
        assert await _keys(coordinator) == [_A]
        async with coordinator.watch(_PREFIX, start) as watch:
            with trio.fail_after(self.lease_ttl_s * 4):
                assert (await anext(watch)).deleted == (_A,)

    async def test_leases_expire_in_order(self, clock: _Clock, coordinator: Coordinator) -> None:
        long = await coordinator.grant_lease(self.lease_ttl_s * 2)
        short = await coordinator.grant_lease(self.lease_ttl_s)
        assert long != short
        start = (await coordinator.transact((), (Put(_A, b"", long), Put(_B, b"", short)))).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            with trio.fail_after(self.lease_ttl_s * 8):
                assert (await anext(watch)).deleted == (_B,)
                assert await _keys(coordinator) == [_A]
                assert (await anext(watch)).deleted == (_A,)

    async def test_revoke_deletes_keys_at_one_revision(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
        start = (await coordinator.transact((), (Put(_A, b"", lease), Put(_B, b"", lease)))).revision
        async with coordinator.watch(_PREFIX, start) as watch:
            await coordinator.revoke_lease(lease)
            events = await anext(watch)
            assert sorted(events.deleted) == [_A, _B]
        assert await _keys(coordinator) == []
        for call in (coordinator.revoke_lease, coordinator.keep_alive):
            with pytest.raises(LeaseNotFound):
                await call(lease)

    async def test_put_under_a_lease_that_is_gone(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
        await coordinator.revoke_lease(lease)
        before = (await coordinator.range(_PREFIX)).revision
        with pytest.raises(LeaseNotFound):
            await coordinator.transact((), (Put(_B, b""), Put(_A, b"", lease)))
        after = await coordinator.range(_PREFIX)
        assert after.items == ()
        if self.exclusive:
            assert after.revision == before

    async def test_put_replaces_the_lease(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
        other = await coordinator.grant_lease(self.lease_ttl_s * 10)
        await coordinator.transact((), (Put(_A, b"", lease), Put(_B, b"", lease), Put(_C, b"", lease)))
        await coordinator.transact((), (Put(_A, b""), Put(_B, b"", other)))
        await coordinator.revoke_lease(lease)
        assert await _keys(coordinator) == [_A, _B]
        await coordinator.revoke_lease(other)
        assert await _keys(coordinator) == [_A]

    async def test_lease_of_a_deleted_key(self, clock: _Clock, coordinator: Coordinator) -> None:
        lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
        await _put(coordinator, _A, b"", lease)
        await coordinator.transact((), (Delete(_A),))
        await _put(coordinator, _A)
        await coordinator.revoke_lease(lease)
        assert await _keys(coordinator) == [_A]

    async def test_revoke_of_a_lease_without_keys(self, clock: _Clock, coordinator: Coordinator) -> None:
        before = (await coordinator.range(_PREFIX)).revision
        await coordinator.revoke_lease(await coordinator.grant_lease(self.lease_ttl_s))
        if self.exclusive:
            assert (await coordinator.range(_PREFIX)).revision == before

    # --- Cancellation ---------------------------------------------------------------------------------------

    async def test_transaction_cancelled_at_each_await(self, clock: _Clock, coordinator: Coordinator) -> None:
        """It happened or it did not, whole; what is seen, watched and next agree."""
        start = (await coordinator.range(_PREFIX)).revision
        mirror = _Mirror()
        mirror.revision = start
        async with coordinator.watch(_PREFIX, start) as watch:
            for step in itertools.count(1):
                value = b"%d" % step
                operations = (Put(_A, value), Put(_B, value))
                outcome = await cancel_at_step(step, lambda ops=operations: coordinator.transact((), ops))  # type: ignore[misc]
                found = {item.key: item.value for item in (await coordinator.range(_PREFIX)).items}
                assert found.get(_A) == found.get(_B), f"half of the transaction cancelled at step {step}"
                if not outcome.cancelled:
                    assert found[_A] == value
                last = await _put(coordinator, _C, value)
                await mirror.follow(watch, last)
                assert {key: item.value for key, item in mirror.items.items()} == {**found, _C: value}
                if not outcome.reached:
                    break

    async def test_lease_calls_cancelled_at_each_await(self, clock: _Clock, coordinator: Coordinator) -> None:
        for step in itertools.count(1):
            lease = await coordinator.grant_lease(self.lease_ttl_s * 10)
            await coordinator.transact((), (Put(_A, b"", lease), Put(_B, b"", lease)))
            outcomes = [
                await cancel_at_step(step, lambda: coordinator.grant_lease(self.lease_ttl_s)),
                await cancel_at_step(step, lambda id=lease: coordinator.keep_alive(id)),  # type: ignore[misc]
                await cancel_at_step(step, lambda id=lease: coordinator.revoke_lease(id)),  # type: ignore[misc]
            ]
            keys = await _keys(coordinator)
            assert keys in ([], [_A, _B])
            if keys:
                await coordinator.revoke_lease(lease)
                assert await _keys(coordinator) == []
            if not any(outcome.reached for outcome in outcomes):
                break

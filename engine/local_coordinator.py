"""`LocalCoordinator`: the coordinator of one process, in memory or durable through a hook (design.md §2).

A thin shell around `KeyValueStore`. One transaction at a time:

    plan -> await persist(change.encode()) -> apply -> tell the watches -> return

`persist` returns once the bytes are as durable as the store is to be. If it raises, nothing is applied, and
the error goes to the caller. It must then hold that a restart will not find those bytes, or that `persist`
never succeeds again: else the log would have two changes of one revision.

**Cancellation.** Before `persist` has begun, a cancelled transaction did not happen. From then on it is
shielded until it is applied, so that state and log never differ: it may take as long as `persist` takes. To
the caller, whose call may be cancelled at either moment, the outcome of a cancelled transaction is unknown.

**Watches** hold the last state of each changed key until it is taken: a slow one costs one entry per key,
whatever happens, and never falls behind what the store remembers.

**Leases** end in `run()`, which the owner starts in its nursery. It sleeps until the next one is due.
Renewals are not persisted: after a restart each lease has its full time again, from when `run()` starts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from broadsheet.engine.coordinator import (
    Compacted,
    Compare,
    CoordinatorIdentity,
    KeyEvents,
    KeyValue,
    LeaseNotFound,
    Operation,
    RangeResult,
    TransactionResult,
)
from broadsheet.engine.errors import BroadsheetError, ValidationError
from broadsheet.engine.key_value import Change, KeyValueStore
from broadsheet.engine.runtime import Clock, RealClock

__all__ = ["LocalCoordinator", "LocalKeyWatch"]

_log = logging.getLogger(__name__)

_RETRY_S = 5.0  # between attempts to persist the end of a lease


async def _no_persist(change: bytes) -> None:
    pass


class LocalKeyWatch:
    """A `KeyWatch`: the changes that were not taken yet, at most one per key."""

    def __init__(self, prefix: bytes, after_revision: int) -> None:
        self.prefix = prefix
        self._after_revision = after_revision
        self._revision = 0
        self._changed: dict[bytes, KeyValue | None] = {}
        self._failure: Compacted | None = None
        self._ready = trio.Event()

    def __aiter__(self) -> LocalKeyWatch:
        return self

    async def __anext__(self) -> KeyEvents:
        await trio.lowlevel.checkpoint()
        while not self._changed:
            if self._failure is not None:
                raise self._failure
            await self._ready.wait()
        # No await from here on: a cancelled call takes nothing.
        changed, self._changed = self._changed, {}
        self._ready = trio.Event()
        return KeyEvents(
            self._revision,
            tuple([item for item in changed.values() if item is not None]),
            tuple([key for key, item in changed.items() if item is None]),
        )

    def add(self, change: Change) -> None:
        """Note what a change did under the prefix. Later changes of a key take the place of earlier ones."""
        if change.revision <= self._after_revision:
            return
        prefix, changed = self.prefix, self._changed
        touched = False
        for key in change.deletes:
            if key.startswith(prefix):
                changed.pop(key, None)
                changed[key] = None
                touched = True
        for item in change.puts:
            if item.key.startswith(prefix):
                changed.pop(item.key, None)  # to the end: events are in order of revisions
                changed[item.key] = item
                touched = True
        if touched:
            self._revision = change.revision
            self._ready.set()

    def fail(self, failure: Compacted) -> None:
        self._failure = failure
        self._ready.set()


class LocalCoordinator:
    """A `Coordinator` on a `KeyValueStore`. See the module for `persist`, and `run` for leases.

    The store is the coordinator's from now on: change it through the coordinator only.
    `runtime_clock.monotonic()` is the clock of leases.
    """

    def __init__(
        self,
        store: KeyValueStore,
        identity: CoordinatorIdentity,
        runtime_clock: Clock,
        persist: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self.identity = identity
        self.store = store
        self._clock = runtime_clock
        self._persist = persist
        self.on_change: Callable[[Change], None] | None = None  # told of each change, before any watch is
        self._lock = trio.Lock()
        self._watches: dict[LocalKeyWatch, None] = {}
        self._deadlines: dict[int, float] = {}  # trio time; a lease without one waits for `run` to start
        self._next_deadline = math.inf  # when `run` wakes
        self._ending: set[int] = set()  # expired, though its end could not be persisted yet
        self._wake = trio.Event()

    @classmethod
    def in_memory(cls, identity: CoordinatorIdentity | None = None) -> LocalCoordinator:
        """An empty one that forgets all with the process. Its ids are 1 and 1 unless given."""
        if identity is None:
            identity = CoordinatorIdentity(cluster_id=1, member_id=1)
        return cls(KeyValueStore(), identity, RealClock(), _no_persist)

    # --- Reading, without awaits ----------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The store's revision."""
        return self.store.revision

    def get(self, key: bytes) -> KeyValue | None:
        """A key as it is now."""
        return self.store.get(key)

    def range_now(self, prefix: bytes) -> RangeResult:
        """`range` as of now."""
        return self.store.range(prefix)

    # --- Coordinator ----------------------------------------------------------------------------------------

    async def range(self, prefix: bytes) -> RangeResult:
        await trio.lowlevel.checkpoint()
        return self.store.range(prefix)

    async def transact(self, compares: tuple[Compare, ...], operations: tuple[Operation, ...]) -> TransactionResult:
        async with self._lock:
            plan = self.store.plan(compares, operations)
            if plan.change is not None:
                await self._commit(plan.change)
            return TransactionResult(plan.succeeded, self.store.revision)

    @asynccontextmanager
    async def watch(self, prefix: bytes, after_revision: int) -> AsyncIterator[LocalKeyWatch]:
        await trio.lowlevel.checkpoint()
        watch = LocalKeyWatch(prefix, after_revision)
        try:
            for change in self.store.changes_after(after_revision):
                watch.add(change)
        except Compacted as error:
            watch.fail(error)
        else:
            self._watches[watch] = None
        try:
            yield watch
        finally:
            self._watches.pop(watch, None)

    async def grant_lease(self, ttl_s: float) -> int:
        """Raises `ValidationError` unless `ttl_s` is positive and finite."""
        if not 0 < ttl_s < math.inf:
            raise ValidationError(f"invalid lease TTL ({ttl_s} seconds; expected > 0)")
        async with self._lock:
            change = self.store.plan_grant(ttl_s)
            await self._commit(change)
            lease = change.leases_granted[0].id
            self._renew(lease, ttl_s)
            return lease

    async def keep_alive(self, lease: int) -> float:
        await trio.lowlevel.checkpoint()
        known = self.store.leases.get(lease)
        if known is None or lease in self._ending or self._deadlines.get(lease, math.inf) <= self._clock.monotonic():
            raise LeaseNotFound(f"lease {lease} not found", hint="it expired or was revoked: grant a new one")
        self._renew(lease, known.ttl_s)
        return known.ttl_s

    async def revoke_lease(self, lease: int) -> None:
        async with self._lock:
            await self._commit(self.store.plan_end(lease))

    # --- Leases ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """End leases when they are due, until cancelled.

        If the end of one cannot be persisted, it counts as expired, its keys stay, and it is tried again.
        """
        now = self._clock.monotonic()
        for lease in self.store.leases.values():
            self._deadlines.setdefault(lease.id, now + lease.ttl_s)
        while True:
            self._wake = trio.Event()
            self._next_deadline = min(self._deadlines.values(), default=math.inf)
            with trio.move_on_at(self._next_deadline):
                await self._wake.wait()
            now = self._clock.monotonic()
            for lease_id in [id for id, deadline in self._deadlines.items() if deadline <= now]:
                await self._expire(lease_id, now)

    async def _expire(self, lease: int, now: float) -> None:
        async with self._lock:
            if self._deadlines.get(lease, math.inf) > now:
                return  # revoked while this waited
            self._ending.add(lease)
            try:
                await self._commit(self.store.plan_end(lease))
            except (BroadsheetError, OSError) as error:
                self._deadlines[lease] = self._clock.monotonic() + _RETRY_S
                _log.warning("lease %d expired but could not be ended: %s", lease, error)

    def _renew(self, lease: int, ttl_s: float) -> None:
        deadline = self._clock.monotonic() + ttl_s
        self._deadlines[lease] = deadline
        if deadline < self._next_deadline:
            self._wake.set()

    # --- The one place where state changes ------------------------------------------------------------------

    async def _commit(self, change: Change) -> None:
        with trio.CancelScope(shield=True):
            await self._persist(change.encode())
        self.store.apply(change)
        if self.on_change is not None:
            self.on_change(change)
        for lease in change.leases_ended:
            self._deadlines.pop(lease, None)
            self._ending.discard(lease)
        if change.writes():
            for watch in self._watches:
                watch.add(change)

"""The committer: the one writer of an engine's commit log, and what makes appends durable (design.md §6).

* Mode `fsync`: rounds. Each takes a group of every journal that has one and all waiting coordinator changes, writes
  them as one, and syncs once. What arrives meanwhile forms the next round.
* Mode `os`: each group is written to the log as soon as it is sealed, in the caller's turn: that is all that
  surviving kill -9 takes.
* Mode `memory`: no log.

**Checkpoints** bound the log. Between two groups the state of every journal and of the coordinator is captured (a
few references) and the log goes on in a new file; then, in a thread, the spools written since are synced and the
state is written to a snapshot. Only when that is durable are older log files and retired spools free for reuse.

A log write or sync that fails other than for lack of space ends all writing: what is durable is no longer known, and
is found out at the next open. A full disk fails the appends of that round, and no more.
"""

from __future__ import annotations

import enum
import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from broadsheet.engine.errors import (
    BroadsheetError,
    EngineClosed,
    EngineWritesFailed,
    OutcomeUnknown,
    StorageError,
)
from broadsheet.engine.journal.commit_log import CommitLog
from broadsheet.engine.journal.durable import WritesBroken
from broadsheet.engine.journal.folder import Folder
from broadsheet.engine.journal.log_format import Buffer, CoordinatorRecord, JournalState, encode_snapshot
from broadsheet.engine.journal.recovery import snapshot_name
from broadsheet.engine.journal.replica import Replica, SealedGroup
from broadsheet.engine.journal.spool_files import SpoolCheckpoint, SpoolFiles
from broadsheet.engine.runtime import Runtime, Worker

__all__ = ["Captured", "Committer", "Durability"]

logger = logging.getLogger("broadsheet.engine")

CHECKPOINT_LOG_BYTES = 48 << 20
CHECKPOINT_SPOOL_BYTES = 512 << 20
CHECKPOINT_RETRY_S = 5.0
CHECKPOINT_PAUSE_S = 0.05  # many deletions share one
GROUPS_PER_ROUND = 256
NOTES_BEFORE_ROUND = 64


class Durability(enum.Enum):
    """What an acknowledged append survives."""

    MEMORY = "memory"
    OS = "os"
    FSYNC = "fsync"


@dataclass(frozen=True, slots=True)
class Captured:
    """The engine's state at one log position. `coordinator` yields its chunks when it is encoded, in a thread."""

    coordinator: Callable[[], Iterable[bytes]]
    journals: Sequence[JournalState]


class _Change:
    """A coordinator change that waits for its round."""

    __slots__ = ("error", "event", "record")

    def __init__(self, record: CoordinatorRecord) -> None:
        self.record = record
        self.event = trio.Event()
        self.error: BroadsheetError | None = None


class Committer:
    def __init__(
        self,
        runtime: Runtime,
        durability: Durability,
        folder: Folder | None,
        log: CommitLog | None,
        spools: SpoolFiles,
        engine_id: int,
        capture: Callable[[], Captured],
        *,
        checkpoint_log_bytes: int = CHECKPOINT_LOG_BYTES,
        checkpoint_spool_bytes: int = CHECKPOINT_SPOOL_BYTES,
    ) -> None:
        self._runtime = runtime
        self._durability = durability
        self._folder = folder
        self._log = log
        self._spools = spools
        self._engine_id = engine_id
        self._capture = capture
        self._checkpoint_log_bytes = checkpoint_log_bytes
        self._checkpoint_spool_bytes = checkpoint_spool_bytes
        self._ready: dict[Replica, None] = {}
        self._changes: list[_Change] = []
        self._notes: list[Sequence[Buffer]] = []
        self._in_round = False
        self._worker: Worker | None = None
        if durability is Durability.FSYNC:
            self._worker = runtime.threads.worker()
        self._ended = trio.Event()
        self._crash: BaseException | None = None
        self._idle = trio.lowlevel.ParkingLot()
        self._checkpoint_lock = trio.Lock()
        self._capture_wanted = False
        self._capture_chance = trio.lowlevel.ParkingLot()
        self._unapplied = 0  # changes that are in the log, or on their way, and not yet in the coordinator
        self._checkpoint_wanted = trio.Event()
        self._checkpoint_running = False
        self._captured_position = 0
        self._old_snapshots: list[str] = []
        self._committing: Replica | None = None
        self.failure: BroadsheetError | None = None
        self.checkpoints = 0
        self.checkpoint_error = ""
        self.storage_error = ""
        """The last refusal of the disk, until something is written again."""

    # --- Requests ----------------------------------------------------------------------------------------

    def wake(self, replica: Replica) -> None:
        """The replica has appends to seal."""
        if self.failure is not None:
            replica.close_writes(self.failure)
        elif self._durability is Durability.FSYNC:
            self._ready[replica] = None
            self._start_round()
        elif self._committing is not replica:
            self._commit_at_once(replica)

    def note(self, payload: Sequence[Buffer]) -> None:
        """Log a record that nobody waits for; it goes with the next one."""
        if self._log is None or self.failure is not None:
            return
        self._notes.append(payload)
        if self._durability is Durability.FSYNC:
            self._start_round()
        else:
            self._write_changes([])

    async def persist(self, change: bytes) -> None:
        """Make a coordinator change durable. Raises `StorageError` (it is not), `OutcomeUnknown`,
        `EngineWritesFailed`."""
        if self._log is None:
            await trio.lowlevel.checkpoint()
            return
        while self._capture_wanted:  # let a checkpoint find a moment without one under way
            await self._capture_chance.park()
        if self._ended.is_set() or self.failure is not None:
            raise self._refusal()
        waiting = _Change(CoordinatorRecord(change))
        self._unapplied += 1
        try:
            if self._durability is Durability.FSYNC:
                self._changes.append(waiting)
                self._start_round()
                await waiting.event.wait()
            else:
                self._write_changes([waiting])
                await trio.lowlevel.checkpoint()
        finally:
            # The coordinator applies the change in this very turn, before anyone can capture its state.
            self._unapplied -= 1
            self._offer_capture()
        if waiting.error is not None:
            raise waiting.error

    # --- Modes os and memory -----------------------------------------------------------------------------

    def _commit_at_once(self, replica: Replica) -> None:
        self._committing = replica
        try:
            while (sealed := replica.take()) is not None:
                if self._log is not None:
                    try:
                        for record in sealed.records:
                            self._log.write_one(record)
                    except OSError as error:
                        replica.fail(sealed, self._refused(error, replica.name))
                        continue
                    except WritesBroken as error:
                        self._break(error, [(replica, sealed)])
                        return
                replica.commit(sealed)
                if self.storage_error:
                    self.storage_error = ""
        finally:
            self._committing = None
        if self._log is not None:
            self._want_checkpoint()

    def _write_changes(self, changes: list[_Change]) -> None:
        assert self._log is not None
        notes, self._notes = self._notes, []
        try:
            self._log.write([*notes, *(change.record.encode() for change in changes)])
        except OSError as error:
            self._notes = notes
            for change in changes:
                change.error = self._refused(error, "the coordinator's keys")
        except WritesBroken as error:
            self._break(error, [])
            for change in changes:
                change.error = OutcomeUnknown(str(error))
        self._want_checkpoint()

    # --- Mode fsync --------------------------------------------------------------------------------------
    #
    # A round is begun by whoever brings the first work for it, and ended by a call from the worker's thread: no task
    # stands between an append and its sync, because each wake-up costs as much as a good part of the sync itself.

    def _start_round(self) -> None:
        """Begin a round unless one is under way, or there is nothing to do."""
        if self._in_round:
            return
        if self._ended.is_set() or self.failure is not None:
            for change in self._changes:
                change.error = self._refusal()
                change.event.set()
            self._changes.clear()
            self._idle.unpark_all()
            return
        if self._capture_wanted and not self._unapplied:
            self._capture_chance.unpark_all()  # the checkpoint comes first; it starts the next round itself
            return
        if not (self._ready or self._changes or len(self._notes) >= NOTES_BEFORE_ROUND):
            self._idle.unpark_all()
            return
        notes, self._notes = self._notes, []
        groups: list[tuple[Replica, SealedGroup]] = []
        records: list[Sequence[Buffer]] = list(notes)
        sync_spools: list[int] = []
        while self._ready and len(groups) < GROUPS_PER_ROUND:
            replica = next(iter(self._ready))
            del self._ready[replica]
            sealed = replica.take()
            if sealed is None:
                continue
            groups.append((replica, sealed))
            records += sealed.records
            if sealed.sync_spool:
                sync_spools.append(sealed.sync_spool)
        # Changes come last: a group that was sealed saw the specs as they were before.
        changes, self._changes = self._changes, []
        records += [change.record.encode() for change in changes]
        if not records:
            self._idle.unpark_all()
            return
        self._in_round = True
        assert self._worker is not None
        self._worker.submit(
            partial(self._write_and_sync, records, sync_spools),
            partial(self._round_done, groups, changes, notes),
        )

    def _round_done(
        self,
        groups: list[tuple[Replica, SealedGroup]],
        changes: list[_Change],
        notes: list[Sequence[Buffer]],
        error: BaseException | None,
    ) -> None:
        try:
            self._finish_round(groups, changes, notes, error)
        except BaseException as crash:  # nothing can be raised to a thread: `run` raises it instead
            self._crash = crash
            self._ended.set()
            self._idle.unpark_all()
            self._capture_chance.unpark_all()

    def _finish_round(
        self,
        groups: list[tuple[Replica, SealedGroup]],
        changes: list[_Change],
        notes: list[Sequence[Buffer]],
        error: BaseException | None,
    ) -> None:
        self._in_round = False
        if error is None:
            self.storage_error = ""
            for replica, sealed in groups:
                replica.commit(sealed)
                if not replica.is_idle:
                    self._ready[replica] = None
        elif isinstance(error, OSError):
            self._notes = [*notes, *self._notes]
            for replica, sealed in groups:
                replica.fail(sealed, self._refused(error, replica.name))
            for change in changes:
                change.error = self._refused(error, "the coordinator's keys")
        elif isinstance(error, WritesBroken):
            self._break(error, groups)
            for change in changes:
                change.error = OutcomeUnknown(str(error))
        else:
            self._break(WritesBroken(repr(error)), groups)
            for change in changes:
                change.error = OutcomeUnknown(str(error))
                change.event.set()
            raise error
        for change in changes:
            change.event.set()
        self._want_checkpoint()
        self._start_round()

    async def run(self) -> None:
        """Checkpoints, until `close`. Raises what a round met that nobody could be told of."""
        async with trio.open_nursery() as nursery:
            if self._log is not None:
                nursery.start_soon(self._checkpoints)
            await self._ended.wait()
            nursery.cancel_scope.cancel()
        if self._crash is not None:
            raise self._crash

    def _write_and_sync(self, records: list[Sequence[Buffer]], sync_spools: list[int]) -> None:
        """In a thread. The order is the promise: spools, then the records that speak of them, then the log."""
        assert self._log is not None
        if sync_spools:
            self._spools.sync(sync_spools)
        self._log.write(records)
        self._log.sync()
        if sync_spools:
            # A checkpoint's sync may have failed meanwhile: a handle opened after that was reported does not see it.
            self._spools.refuse_if_broken()

    def _refusal(self) -> BroadsheetError:
        return _copy(self.failure) if self.failure is not None else EngineClosed("the engine is closed")

    def _refused(self, error: OSError, what: str) -> StorageError:
        """The log took nothing of what was to be written."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = StorageError(
            f"cannot write to the commit log for {what}: {error.strerror or error}",
            hint="nothing was written; make room and try again" if full else "nothing was written",
        )
        self.storage_error = str(failure)
        return failure

    def _break(self, error: WritesBroken, groups: Sequence[tuple[Replica, SealedGroup]]) -> None:
        logger.error("writing has failed for good: %s", error)
        self.failure = EngineWritesFailed(
            f"an earlier write failed: {error}",
            hint="close the engine, see to the disk, and open it again: nothing acknowledged is lost",
        )
        for replica, sealed in groups:
            replica.fail(
                sealed,
                OutcomeUnknown(
                    f"append to {replica.name}: {error}",
                    journal=replica.name,
                    offset=replica.spool.end,
                    hint="it may have happened: open the engine again and read from this offset",
                ),
            )
            replica.close_writes(self.failure)
        for replica in self._ready:
            replica.close_writes(self.failure)
        self._ready.clear()
        for change in self._changes:
            change.error = _copy(self.failure)
            change.event.set()
        self._changes.clear()
        self._idle.unpark_all()
        self._capture_chance.unpark_all()

    # --- Checkpoints -------------------------------------------------------------------------------------

    def _want_checkpoint(self) -> None:
        if self._log is None or self._checkpoint_running or self._checkpoint_wanted.is_set():
            return
        if (
            self._log.position - self._captured_position >= self._checkpoint_log_bytes
            or self._spools.unsynced_bytes >= self._checkpoint_spool_bytes
        ):
            self._checkpoint_wanted.set()

    def spools_retired(self) -> None:
        """Journals were deleted: give their room back soon, also if nothing else is written."""
        if self._log is not None and self._spools.retired and not self._checkpoint_running:
            self._checkpoint_wanted.set()

    async def _checkpoints(self) -> None:
        while True:
            await self._checkpoint_wanted.wait()
            await trio.sleep(CHECKPOINT_PAUSE_S)
            try:
                await self.checkpoint()
                self.checkpoint_error = ""
            except EngineWritesFailed:
                return  # it was logged, and there is nothing left to bound
            except (OSError, BroadsheetError) as error:
                # The log keeps what a checkpoint would have; it grows until one succeeds.
                self.checkpoint_error = f"checkpoint failed: {error}"
                logger.warning("%s (will retry in %g s)", self.checkpoint_error, CHECKPOINT_RETRY_S)
                await trio.sleep(CHECKPOINT_RETRY_S)
                continue
            self._checkpoint_wanted = trio.Event()
            self._want_checkpoint()

    def _offer_capture(self) -> None:
        if self._capture_wanted and not self._in_round and not self._unapplied:
            self._capture_chance.unpark_all()

    async def checkpoint(self) -> None:
        """Write a snapshot and free what it replaces. Raises OSError, and then nothing is freed."""
        if self._log is None or self._folder is None:
            return
        async with self._checkpoint_lock:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        assert self._log is not None
        if self.failure is not None:
            raise _copy(self.failure)
        self._checkpoint_running = True
        try:
            self._capture_wanted = True
            try:
                while (self._in_round or self._unapplied) and self.failure is None:
                    await self._capture_chance.park()
            finally:
                self._capture_wanted = False
                self._capture_chance.unpark_all()
            if self.failure is not None:
                raise _copy(self.failure)
            try:
                self._log.rotate()
                position = self._log.position
                captured = self._capture()
                spools = self._spools.begin_checkpoint()
                self._captured_position = position
            finally:
                self._start_round()
            try:
                await self._runtime.threads.run(partial(self._write_snapshot, position, captured, spools))
            except WritesBroken as error:
                self._break(error, [])
                assert self.failure is not None
                raise _copy(self.failure) from error
            except BaseException:
                self._spools.abandon(spools)
                raise
            self._log.recycle_before(position)
            self._spools.finish(spools)
            self.checkpoints += 1
        finally:
            self._checkpoint_running = False

    def _write_snapshot(self, position: int, captured: Captured, spools: SpoolCheckpoint) -> None:
        assert self._folder is not None
        spools.sync()
        self._spools.refuse_if_broken()
        path = f"{self._folder.log}/{snapshot_name(position)}"
        self._folder.write_synced(
            path,
            encode_snapshot(
                position, self._spools.next_id, self._engine_id, captured.coordinator(), captured.journals
            ),
        )
        kept = [path]
        for old in self._old_snapshots:
            try:
                if old != path:
                    self._runtime.files.unlink(old)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("an old snapshot stays for now: %s", error)
                kept.append(old)
        self._old_snapshots = kept

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the log holds anything that no snapshot does."""
        return self._log is not None and self._log.position != self._captured_position

    def adopt_snapshots(self, paths: list[str], position: int) -> None:
        """Snapshots found at open: superseded by the next one. The newest holds everything before `position`."""
        self._old_snapshots = paths
        self._captured_position = position

    # --- The end -----------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing waits for the log."""
        while self._in_round or ((self._ready or self._changes) and self.failure is None and self._crash is None):
            await self._idle.park()

    def close(self) -> None:
        """End `run`, and the worker's thread when it has nothing left to do."""
        self._ended.set()
        if self._worker is not None:
            self._worker.close()


def _copy(error: BroadsheetError) -> BroadsheetError:
    return type(error)(error.text, hint=error.hint)



"""`Replica`: the core of one journal in this process (design.md §3).

It holds the spool, the index and the queue of appends, and turns the decisions of `append_fsm` into file writes and
log records. The committer says when: `seal` forms the next group and writes its content, `commit` makes it visible
once it is as durable as the mode asks, `fail` takes it back. At most one group of a journal is under way.

While an append streams a large body, or changes the journal's suspension, it *holds* the journal: nothing is sealed
until it lets go.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from broadsheet.engine.errors import (
    AppendFailed,
    BroadsheetError,
    CorruptData,
    Status,
    StorageError,
)
from broadsheet.engine.fragments.fragment import EMPTY_SHA1, Fragment
from broadsheet.engine.journal.append_fsm import (
    BEYOND_MAX_OFFSET,
    Group,
    JournalView,
    JumpTo,
    Member,
    Proceed,
    Refuse,
    Rejected,
    SetSuspend,
    apply_register_changes,
    decide,
    decide_content,
    roll_proposal,
    seal_group,
)
from broadsheet.engine.journal.flow_control import FlowControl
from broadsheet.engine.journal.index import FragmentIndex, IndexEntry
from broadsheet.engine.journal.log_format import (
    Buffer,
    GroupRecord,
    JournalState,
    ReleaseRecord,
    RollRecord,
    SpoolState,
    registers_to_bytes,
)
from broadsheet.engine.journal.receiving import chained, receive
from broadsheet.engine.journal.spec import JournalSpec
from broadsheet.engine.journal.spool import CompletedSpool, Spool
from broadsheet.engine.journal.spool_files import SpoolFiles
from broadsheet.engine.labels import LabelSet
from broadsheet.engine.runtime import Runtime
from broadsheet.engine.service import MAX_OFFSET, AppendRequest, AppendResponse, Header

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["AppendItem", "Replica", "ReplicaHost", "SealedGroup"]

REBUILD_BYTES = 1 << 20


class ReplicaHost(Protocol):
    """What a replica needs of its engine."""

    runtime: Runtime
    spool_files: SpoolFiles
    inline_limit: int
    min_append_rate: int
    max_append_rate: int

    def header(self, replica: Replica) -> Header: ...

    def wake(self, replica: Replica) -> None:
        """The replica may have a group to seal."""
        ...

    def storage_failed(self, error: StorageError) -> None:
        """An append was refused by the disk."""
        ...

    def note(self, payload: Sequence[Buffer]) -> None:
        """Log a record that nobody waits for."""
        ...

    def completed(self, replica: Replica, entry: IndexEntry, spool: CompletedSpool) -> None:
        """A spool was rolled: persist it."""
        ...


class _YourTurn:
    """Outcome for an append that waited to hold the journal."""


YOUR_TURN = _YourTurn()
Outcome = AppendResponse | BroadsheetError | _YourTurn | SetSuspend


class AppendItem:
    """An append in the queue, and the task that waits for it."""

    __slots__ = ("chunks", "content", "held", "length", "outcome", "request", "sealed", "sum", "task")

    def __init__(self, request: AppendRequest, content: bytes, *, held: bool = False) -> None:
        self.request = request
        self.content = content
        self.length = len(content)
        self.held = held
        self.chunks = (1, 0) if content else (0, 0)  # received, delayed
        self.sum = b""
        self.sealed = False
        self.outcome: Outcome | None = None
        self.task: trio.lowlevel.Task | None = None

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)

    async def wait(self, abandon: Callable[[AppendItem], None]) -> Outcome:
        """Until there is an outcome. Cancelled before it was sealed, `abandon` takes it out of the queue."""
        if self.outcome is None:
            self.task = trio.lowlevel.current_task()

            def abort(_: object) -> trio.lowlevel.Abort:
                self.task = None
                if not self.sealed:
                    abandon(self)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            # It is done, and the caller is to learn so: no cancellation here.
            await trio.lowlevel.cancel_shielded_checkpoint()
        assert self.outcome is not None
        return self.outcome


@dataclass(slots=True)
class SealedGroup:
    """A group whose content is written to the spool's file. records: for the log, in order. sync_spool: id of a spool
    to be synced before the records are written, 0 for none."""

    members: Sequence[Member]
    records: list[list[Buffer]]
    length: int
    registers: LabelSet
    spool_sum: bytes
    sync_spool: int
    now_ns: int


class Replica:
    __slots__ = (
        "_completed",
        "_holder",
        "_host",
        "_open_entry",
        "_registers_logged",
        "_state",
        "_waiting",
        "changed",
        "close_error",
        "create_revision",
        "flow",
        "header_cache",
        "index",
        "name",
        "refreshing",
        "sealed",
        "spec",
        "spool",
        "spool_id",
        "store_error",
        "streamed",
    )

    def __init__(
        self,
        host: ReplicaHost,
        spec: JournalSpec,
        create_revision: int,
        state: JournalState | None = None,
    ) -> None:
        self._host = host
        self.spec = spec
        self.name = spec.name
        self.create_revision = create_revision
        self.index = FragmentIndex(self._dropped)
        self.changed = trio.lowlevel.ParkingLot()
        self.close_error: BroadsheetError | None = None
        self.flow: FlowControl | None = None
        self.header_cache: Header | None = None
        self.refreshing: trio.Event | None = None
        self.store_error = ""
        self.sealed: SealedGroup | None = None
        self.streamed: SealedGroup | None = None
        self._holder: AppendItem | None = None
        self._waiting: deque[AppendItem] = deque()
        self._open_entry: IndexEntry | None = None
        self._completed: dict[int, tuple[IndexEntry, SpoolState]] = {}
        self._state: JournalState | None = state
        self.spool_id = 0
        self.spool = Spool(spec.name)
        if state is not None:
            self._restore(state)
        self._registers_logged = self.spool.registers

    def _restore(self, state: JournalState) -> None:
        for completed in state.completed:
            entry = IndexEntry(completed.fragment, completed.spool_id)
            self.index.add(entry)
            self._completed[completed.spool_id] = (entry, completed)
        open_ = state.open
        self.spool = Spool.restored(open_.fragment, open_.registers, open_.first_append_time_ns)
        if open_.fragment.length:
            self.spool_id = open_.spool_id
            self._open_entry = IndexEntry(open_.fragment, open_.spool_id, self.spool)
            self.index.add(self._open_entry)

    def resume_persisting(self) -> None:
        """Hand spools that were completed before a restart to the persister."""
        for entry, state in list(self._completed.values()):
            self._host.completed(
                self, entry, CompletedSpool(state.fragment, state.registers, state.first_append_time_ns)
            )

    # --- The state a restart finds -----------------------------------------------------------------------

    def state(self) -> JournalState:
        """What is committed, for a snapshot."""
        if self._state is None:
            spool = self.spool
            has_content = spool.end > spool.begin
            open_ = SpoolState(
                self.spool_id if has_content else 0,
                spool.fragment,
                spool.first_append_time_ns,
                spool.registers,
            )
            completed = tuple(state for _, state in self._completed.values())
            self._state = JournalState(self.name, self.create_revision, open_, completed)
        return self._state

    # --- Appending ---------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """The journal was deleted, or the engine closed."""
        return self.close_error is not None

    @property
    def is_idle(self) -> bool:
        return self.sealed is None and self._holder is None and not self._waiting

    def enqueue(self, item: AppendItem) -> None:
        if self.close_error is not None:
            item.finish(_copy_error(self.close_error))
            return
        self._waiting.append(item)
        if self.sealed is None and self._holder is None:
            self._host.wake(self)

    def abandon(self, item: AppendItem) -> None:
        """A waiting append was cancelled."""
        if self._holder is item:
            self.let_go(item)
        else:
            self._waiting.remove(item)

    def let_go(self, item: AppendItem, *, again: bool = False) -> None:
        """The holder is done; `again` puts it back to the front of the queue."""
        assert self._holder is item
        self._holder = None
        if again:
            item.outcome = None
            self._waiting.appendleft(item)
        if self._waiting and self.sealed is None:
            self._host.wake(self)

    def view(self, now_ns: int) -> JournalView:
        spool, index = self.spool, self.index
        return JournalView(
            spool.begin,
            spool.end,
            spool.codec,
            spool.registers,
            spool.first_append_time_ns,
            index.begin,
            index.end,
            index.last_mod_time,
            now_ns,
        )

    def take(self) -> SealedGroup | None:
        """The next group to commit: a streamed append that is complete, or the next of the queue."""
        ready, self.streamed = self.streamed, None
        return ready if ready is not None else self.seal()

    def seal(self) -> SealedGroup | None:
        """Form the next group and write its content. None if there is none to commit now."""
        while self._waiting and self.sealed is None and self._holder is None:
            now_ns = self._host.runtime.clock.now_ns()
            group = seal_group(self._waiting, self.spec, self.view(now_ns))
            if group.held is not None or group.suspend is not None:
                item = self._waiting.popleft()
                self._holder = item
                item.finish(group.suspend[1] if group.suspend is not None else YOUR_TURN)
                return None
            for _ in group.members:
                self._waiting.popleft().sealed = True
            try:
                sealed = self._write_group(group, now_ns)
            except OSError as error:
                self.spool.roll_back()
                self._finish_failed(group.members, self._storage_error(error))
                continue
            except CorruptData as error:
                self._finish_failed(group.members, error)
                continue
            if not sealed.records and not group.length:
                # Barriers and refusals: everything before them is committed, so they are answered at once.
                self._answer(sealed)
                continue
            self.sealed = sealed
            return sealed
        return None

    def _write_group(self, group: Group, now_ns: int) -> SealedGroup:
        records: list[list[Buffer]] = []
        for roll in group.rolls:
            self._roll(roll)
        if not group.length:
            if group.rolls:  # with content, the content's own record tells of the roll
                records.append(self._roll_record())
            return SealedGroup(group.members, records, 0, group.registers, b"", 0, now_ns)

        contents: list[Buffer] = []
        sha1 = hashlib.sha1
        for member in group.members:
            item = member.append
            assert isinstance(item, AppendItem)
            if item.length and member.outcome is Status.OK:
                item.sum = sha1(item.content, usedforsecurity=False).digest()
                contents.append(item.content)
        content = contents[0] if len(contents) == 1 else b"".join(contents)
        self._write(content)
        inline = group.length <= self._host.inline_limit
        crc = 0 if inline or self.spool.end == self.spool.begin else zlib.crc32(content)
        record, spool_sum = self._group_record(
            group.length, group.registers, now_ns, crc, (content,) if inline else ()
        )
        records.append(record)
        return SealedGroup(
            group.members,
            records,
            group.length,
            group.registers,
            spool_sum,
            0 if inline else self.spool_id,
            now_ns,
        )

    def _write(self, content: Buffer) -> None:
        """Add content to the spool, in its file. Raises OSError, and `CorruptData` if what a restart found in the
        spool is not what was committed."""
        spool = self.spool
        if spool.needs_rebuild:
            self._rebuild()
        files = self._host.spool_files
        if not self.spool_id:
            self.spool_id = files.create()
        at = spool.write(content, spool.delta)
        files.write(self.spool_id, content, at)

    def _rebuild(self) -> None:
        spool = self.spool
        file = self._host.spool_files.file(self.spool_id)
        length = spool.end - spool.begin

        def content() -> Iterator[bytes]:
            offset = 0
            while offset < length:
                piece = file.pread(min(REBUILD_BYTES, length - offset), offset)
                if not piece:
                    return
                yield piece
                offset += len(piece)

        if not spool.rebuild(content()):
            raise CorruptData(
                f"the spool of {self.name} does not hold the bytes [{spool.begin}, {spool.end}) it was committed with",
                path=file.path,
                journal=self.name,
                offset=spool.begin,
                hint="the file was kept; roll the journal past it, or restore the file",
            )

    def _group_record(
        self, length: int, registers: LabelSet, now_ns: int, crc: int, content: Sequence[Buffer]
    ) -> tuple[list[Buffer], bytes]:
        spool = self.spool
        spool_sum = spool.next_sum()
        record = GroupRecord(
            self.name,
            self.create_revision,
            self.spool_id,
            spool.begin,
            spool.end,
            spool.end + length,
            spool.first_append_time_ns or now_ns,
            spool.codec,
            spool_sum,
            None if registers == self._registers_logged else registers_to_bytes(registers),
            crc,
            None,
        )
        return record.encode(content), spool_sum

    def _roll_record(self) -> list[Buffer]:
        spool = self.spool
        return RollRecord(self.name, self.create_revision, spool.begin, spool.codec, None).encode()

    def _roll(self, proposal: Fragment) -> None:
        completed = self.spool.roll(proposal.begin, proposal.compression_codec)
        self._state = None
        spool_id, entry = self.spool_id, self._open_entry
        self.spool_id, self._open_entry = 0, None
        if completed is not None:
            assert entry is not None
            entry.complete(completed.fragment)
            self._completed[spool_id] = (
                entry,
                SpoolState(spool_id, completed.fragment, completed.first_append_time_ns, completed.registers),
            )
            self._host.completed(self, entry, completed)
        elif spool_id:  # it was made for content that was rolled back
            self._host.spool_files.retire(spool_id)

    def commit(self, sealed: SealedGroup) -> None:
        """The group is as durable as the mode asks: make it visible, and tell."""
        spool = self.spool
        if sealed.length:
            spool.commit(sealed.spool_sum, sealed.registers, sealed.now_ns)
            self._registers_logged = sealed.registers
            entry = self._open_entry
            if entry is None:
                entry = self._open_entry = IndexEntry(spool.fragment, self.spool_id, spool)
                self.index.add(entry)
            else:
                entry.end = spool.end
                self.index.grown(entry)
            if self.changed:
                self.changed.unpark_all()
        self._state = None
        self.sealed = None
        self._answer(sealed)

    def _answer(self, sealed: SealedGroup) -> None:
        header = self._host.header(self)
        for member in sealed.members:
            item = member.append
            assert isinstance(item, AppendItem)
            outcome = member.outcome
            if type(outcome) is Rejected:
                item.finish(AppendFailed(f"append stream: {outcome.text}", journal=self.name))
                continue
            assert not isinstance(outcome, Rejected)
            item.finish(self._response(outcome, header, member, item))

    def _response(self, status: Status, header: Header, member: Member, item: AppendItem) -> AppendResponse:
        if status == Status.OK:
            length = item.length
            begin = member.begin
            commit = Fragment(
                self.name, begin, begin + length, item.sum or EMPTY_SHA1, self.spool.codec
            )
            total, delayed = item.chunks
            return AppendResponse(Status.OK, header, commit, member.registers, total + 1, delayed)
        if status == Status.REGISTER_MISMATCH:
            return AppendResponse(status, header, registers=member.registers)
        return AppendResponse(status, header)

    def fail(self, sealed: SealedGroup, error: BroadsheetError) -> None:
        """The group did not reach the log, or nobody knows whether it did (`OutcomeUnknown`)."""
        self.sealed = None
        self.spool.roll_back()
        self._finish_failed(sealed.members, error)
        if self._waiting:
            self._host.wake(self)

    def _finish_failed(self, members: Sequence[Member], error: BroadsheetError) -> None:
        for member in members:
            item = member.append
            assert isinstance(item, AppendItem)
            item.finish(_copy_error(error))

    def _storage_error(self, error: OSError) -> StorageError:
        failure = StorageError(
            f"cannot write to {self.name}: {error.strerror or error}",
            journal=self.name,
            offset=self.spool.end,
            hint="nothing of the append was written; make room or mend the disk, then append again",
        )
        self._host.storage_failed(failure)
        return failure

    # --- A streamed append -------------------------------------------------------------------------------

    async def stream(
        self, item: AppendItem, first: Sequence[Buffer], rest: AsyncIterator[Buffer] | None
    ) -> AppendResponse | BroadsheetError | SetSuspend:
        """Take a large or throttled body in while holding the journal. Lets go of it in every case but a
        `SetSuspend`."""
        assert self._holder is item
        clock = self._host.runtime.clock
        now_ns = clock.now_ns()
        view = self.view(now_ns)
        request = item.request
        spec = self.spec
        try:
            decision = decide(request, spec, view)
            rolled = False
            while isinstance(decision, JumpTo):
                self._roll(_empty_at(spec, decision.offset))
                rolled = True
                view = self.view(now_ns)
                decision = decide(request, spec, view)
            if isinstance(decision, SetSuspend):
                return decision
            if isinstance(decision, Refuse):
                self.let_go(item)
                return self._refusal(decision.status)
            assert isinstance(decision, Proceed)
            proposal = roll_proposal(view, spec, decision.roll_to)
            if proposal is not None and (
                proposal.begin != view.spool_begin or proposal.compression_codec != view.codec
            ):
                self._roll(proposal)
                rolled = True
        except BaseException:
            self.let_go(item)
            raise
        try:
            sealed = await self._stream_content(item, first, rest, rolled, decision.answer)
        except BaseException as error:
            self.spool.roll_back()
            self.let_go(item)
            if isinstance(error, _ContentRefused):
                return self._refusal(error.status)
            raise
        # From here on the append stands, cancelled or not.
        item.outcome = None
        item.sealed = True
        self._holder = None
        if not sealed.records and not sealed.length:
            self._answer(sealed)
            self._host.wake(self)
        else:
            self.sealed = self.streamed = sealed
            self._host.wake(self)
        outcome = await item.wait(self.abandon)
        assert isinstance(outcome, AppendResponse | BroadsheetError)
        return outcome

    async def _stream_content(
        self,
        item: AppendItem,
        first: Sequence[Buffer],
        rest: AsyncIterator[Buffer] | None,
        rolled: bool,
        answer: Status,
    ) -> SealedGroup:
        flow = self._flow()
        # In an empty spool the append's own sum is the spool's, which also vouches for the bytes: that saves most of
        # the hashing of a large body.
        own_sum: _Hash | None = None
        if self.spool.end > self.spool.begin:
            own_sum = hashlib.sha1(usedforsecurity=False)
        length = crc = 0
        runtime = self._host.runtime
        async with aclosing(chained(first, rest)) as source, aclosing(receive(source, flow, runtime)) as chunks:
            async for chunk in chunks:
                if not len(chunk):
                    continue
                if own_sum is not None:
                    own_sum.update(chunk)
                    crc = zlib.crc32(chunk, crc)
                self._refuse_if_closed()
                refused = decide_content(item.request, self.spec, len(chunk))
                if isinstance(refused, Refuse):
                    raise _ContentRefused(refused.status)
                if self.spool.end + length + len(chunk) > MAX_OFFSET:
                    raise AppendFailed(f"append stream: {BEYOND_MAX_OFFSET}", journal=self.name)
                try:
                    self._write(chunk)
                except OSError as error:
                    raise self._storage_error(error) from error
                length += len(chunk)
        self._refuse_if_closed()
        refused = decide_content(item.request, self.spec, length)
        if isinstance(refused, Rejected):
            raise AppendFailed(f"append stream: {refused.text}", journal=self.name)
        item.length = length
        item.chunks = (flow.total_chunks, flow.delayed_chunks)
        if length:
            item.sum = self.spool.next_sum() if own_sum is None else own_sum.digest()
        registers = self.spool.registers
        if length and (item.request.union_registers or item.request.subtract_registers):
            registers = apply_register_changes(item.request, registers)
        member = Member(item, self.spool.end, registers, answer)
        now_ns = self._host.runtime.clock.now_ns()
        if not length:
            records = [self._roll_record()] if rolled else []
            return SealedGroup([member], records, 0, registers, b"", 0, now_ns)
        record, spool_sum = self._group_record(length, registers, now_ns, crc, ())
        return SealedGroup([member], [record], length, registers, spool_sum, self.spool_id, now_ns)

    def _refuse_if_closed(self) -> None:
        if self.close_error is not None:  # its files may be another spool's by now, or another engine's
            raise _copy_error(self.close_error)

    def _flow(self) -> FlowControl:
        if self.flow is None:
            self.flow = FlowControl(self._host.min_append_rate, self._host.max_append_rate)
        self.flow.start(self.spec.max_append_rate, round(self._host.runtime.clock.monotonic() * 1000))
        return self.flow

    def _refusal(self, status: Status) -> AppendResponse:
        registers = self.spool.registers if status == Status.REGISTER_MISMATCH else None
        return AppendResponse(status, self._host.header(self), registers=registers)

    # --- Local files -------------------------------------------------------------------------------------

    def persisted(self, entry: IndexEntry, fragment: Fragment) -> None:
        """A store holds the completed spool `entry` now: `fragment` is how it lists it."""
        self.index.persisted(fragment, entry)
        if self.changed:
            self.changed.unpark_all()

    def _dropped(self, entry: IndexEntry) -> None:
        """A local entry left the index: give up its file when nobody reads it any more."""
        entry.released = True
        if not entry.readers:
            self._release(entry)

    def acquire(self, entry: IndexEntry) -> None:
        entry.readers += 1

    def unacquire(self, entry: IndexEntry) -> None:
        entry.readers -= 1
        if entry.released and not entry.readers:
            self._release(entry)

    def _release(self, entry: IndexEntry) -> None:
        if self._completed.pop(entry.spool_id, None) is None:
            return
        self._state = None
        if not self.closed:  # a deleted journal's records mean nothing any more
            self._host.note(ReleaseRecord(self.name, self.create_revision, entry.spool_id).encode())
        self._host.spool_files.retire(entry.spool_id)

    def refreshed(self, listed: Sequence[Fragment]) -> None:
        self.index.refresh(listed)
        if self.changed:
            self.changed.unpark_all()

    # --- The end -----------------------------------------------------------------------------------------

    def close_writes(self, error: BroadsheetError) -> None:
        """The engine takes no more writes: fail what waits, and what was received but not written to the log."""
        streamed, self.streamed = self.streamed, None
        if streamed is not None:
            self.sealed = None
            self.spool.roll_back()
            self._finish_failed(streamed.members, error)
        while self._waiting:
            self._waiting.popleft().finish(_copy_error(error))

    def close(self, error: BroadsheetError, *, deleted: bool = False) -> None:
        """End every waiting append with `error`, and every blocked read. `deleted` gives up the local files."""
        self.close_error = error
        self.close_writes(error)
        self.changed.unpark_all()
        if deleted:
            files = self._host.spool_files
            for spool_id in [*self._completed, *([self.spool_id] if self.spool_id else [])]:
                files.retire(spool_id)
            self._completed.clear()


class _ContentRefused(Exception):
    """Content came for an append that may have none."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


def _empty_at(spec: JournalSpec, offset: int) -> Fragment:
    return Fragment(spec.name, offset, offset, compression_codec=spec.fragment.compression_codec)


def _copy_error(error: BroadsheetError) -> BroadsheetError:
    """One exception object per waiter: a shared one would collect all their tracebacks."""
    if isinstance(error, CorruptData):
        return CorruptData(
            error.text, path=error.path, journal=error.journal, offset=error.offset, hint=error.hint
        )
    copy = type(error)(
        error.text, journal=error.journal, offset=error.offset, status=error.status, hint=error.hint
    )
    copy.__cause__ = error.__cause__
    return copy

"""The append decisions: offsets, registers, rolls, groups (spec/replication.md §4.2, §5, §7). Sans-I/O.

One machine for both pipelines, the engine's local one and the cluster's. It never does anything: it is shown the
journal as it stands (`JournalView`) and says what an append leads to (`Decision`), or what a queue of them does
(`seal_group`).

**Groups** (design.md §3). Appends that are fully received wait in a queue. `seal_group` takes from its front as many
as fit together and decides each of them against the state that those before it in the group will leave. The group
is one proposal, one write, one sync. It ends early where the fragment must roll (rolls happen only before a group's
first content), at a byte limit, and before an append that needs the journal for itself: one that streams its
content (`Held`), or one that changes the journal's suspension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broadsheet.engine.errors import Status
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec, JournalSpec, SuspendLevel
from broadsheet.engine.labels import LabelSet, subtract, union
from broadsheet.engine.service import MAX_OFFSET, AppendRequest, SuspendControl

__all__ = [
    "BEYOND_MAX_OFFSET",
    "GROUP_BYTES_LIMIT",
    "REGISTERS_NEED_CONTENT",
    "Decision",
    "Group",
    "JournalView",
    "JumpTo",
    "Proceed",
    "QueuedAppend",
    "Refuse",
    "Rejected",
    "SetSuspend",
    "apply_register_changes",
    "decide",
    "decide_content",
    "roll_proposal",
    "seal_group",
]

GROUP_BYTES_LIMIT = 4 << 20
GROUP_COUNT_LIMIT = 8192
NANOS = 1_000_000_000
DAY_NS = 24 * 3600 * NANOS
BEYOND_MAX_OFFSET = "the append would end beyond the greatest offset there is"
REGISTERS_NEED_CONTENT = "register modification requires non-empty Append"

_NO_CONTENT_CONTROLS = (SuspendControl.IF_FLUSHED, SuspendControl.NOW, SuspendControl.KEEP)


@dataclass(slots=True)
class JournalView:
    """The journal as an append would find it. Mutable: a group's appends move it on.

    index_begin, index_end: of all known fragments, spool included; both 0 when there are none.
    last_mod_time: unix seconds, of the last fragment; 0 if it is local.
    """

    spool_begin: int
    spool_end: int
    codec: CompressionCodec
    registers: LabelSet
    first_append_time_ns: int
    index_begin: int
    index_end: int
    last_mod_time: int
    now_ns: int

    def roll(self, offset: int, codec: CompressionCodec) -> None:
        self.spool_begin = self.spool_end = offset
        self.codec = codec
        self.first_append_time_ns = 0

    def extend(self, length: int, registers: LabelSet) -> None:
        if self.index_begin == self.index_end:
            self.index_begin = self.spool_begin
        self.spool_end += length
        self.index_end = max(self.index_end, self.spool_end)
        self.last_mod_time = 0
        self.registers = registers
        if not self.first_append_time_ns:
            self.first_append_time_ns = self.now_ns


# --- One append -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proceed:
    """Go on. `roll_to`: 0, or the offset at which the fragment is to be rolled first. `answer` is the status to
    give when it has gone through (SUSPENDED for a repeated suspension)."""

    roll_to: int = 0
    answer: Status = Status.OK


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing happens; this is the answer."""

    status: Status


@dataclass(frozen=True, slots=True)
class JumpTo:
    """Roll the (empty or completed) spool forward to this offset, then decide again."""

    offset: int


@dataclass(frozen=True, slots=True)
class SetSuspend:
    """Store this in the spec, then decide again."""

    level: SuspendLevel
    offset: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Rolled back with this error text (the wire's `append stream: …`)."""

    text: str


Decision = Proceed | Refuse | JumpTo | SetSuspend


def decide(request: AppendRequest, spec: JournalSpec, view: JournalView) -> Decision:
    """VALIDATE of spec/replication.md §5.3, from rule 3 on, and the suspension table of §7."""
    max_offset = max(view.spool_end, view.index_end)
    offset = request.offset
    suspend = spec.suspend
    level = suspend.level if suspend is not None else SuspendLevel.NONE
    control = request.suspend

    if level == SuspendLevel.FULL and control != SuspendControl.RESUME:
        return Refuse(Status.SUSPENDED)  # suspended since the append was resolved
    if (
        request.check_registers is not None
        and view.registers  # an empty set matches anything: registers are lost with their replicas
        and not request.check_registers.matches(view.registers)
    ):
        return Refuse(Status.REGISTER_MISMATCH)
    if suspend is not None and view.spool_end < suspend.offset:
        return JumpTo(suspend.offset)
    if view.spool_end != max_offset and offset is None and spec.may_write:
        return Refuse(Status.INDEX_HAS_GREATER_OFFSET)
    if offset is not None and offset != max_offset:
        return Refuse(Status.WRONG_APPEND_OFFSET)
    if offset is not None and view.spool_end != max_offset:
        return JumpTo(max_offset)

    roll_to = 0
    answer = Status.OK
    if control == SuspendControl.RESUME:
        if level != SuspendLevel.NONE:
            return SetSuspend(SuspendLevel.NONE, view.spool_end)
    elif control == SuspendControl.NO_RESUME:
        if level != SuspendLevel.NONE:
            return Refuse(Status.SUSPENDED)
    elif control in (SuspendControl.IF_FLUSHED, SuspendControl.NOW):
        if view.index_begin == view.index_end:
            return SetSuspend(SuspendLevel.FULL, view.spool_end)
        if level == SuspendLevel.NONE and (control == SuspendControl.NOW or not _is_dirty(spec, view)):
            return SetSuspend(SuspendLevel.PARTIAL, view.spool_end)
        if level == SuspendLevel.PARTIAL:
            answer = Status.SUSPENDED
            roll_to = view.spool_end

    if view.spool_begin == view.index_begin:
        # The spool holds the first known write: complete it now, so that the store soon tells of the journal.
        roll_to = view.spool_end
    return Proceed(roll_to, answer)


def decide_content(request: AppendRequest, spec: JournalSpec, length: int) -> Refuse | Rejected | None:
    """Whether content of this length may be committed (§5.4); None if so."""
    if length:
        if not spec.may_write or request.suspend in _NO_CONTENT_CONTROLS:
            return Refuse(Status.NOT_ALLOWED)
    elif request.union_registers or request.subtract_registers:
        return Rejected(REGISTERS_NEED_CONTENT)
    return None


def apply_register_changes(request: AppendRequest, registers: LabelSet) -> LabelSet:
    if request.subtract_registers:
        registers = subtract(registers, request.subtract_registers)
    if request.union_registers:
        registers = union(request.union_registers, registers)
    return registers


def roll_proposal(view: JournalView, spec: JournalSpec, roll_to: int = 0) -> Fragment | None:
    """The empty fragment to roll to before the next content, None to go on with the current one (§4.2)."""
    fragment_spec = spec.fragment
    length = view.spool_end - view.spool_begin
    flush_ns = fragment_spec.flush_interval_ns // NANOS * NANOS
    if (
        length == 0
        or length > fragment_spec.length
        or (roll_to and roll_to != view.spool_begin)
        or (
            flush_ns > 0
            and view.first_append_time_ns
            and view.first_append_time_ns // flush_ns != view.now_ns // flush_ns
        )
    ):
        at = roll_to or view.spool_end
        return Fragment(spec.name, at, at, compression_codec=fragment_spec.compression_codec)
    return None


def _is_dirty(spec: JournalSpec, view: JournalView) -> bool:
    """Whether something of the journal is not yet in the store, or has not been there for long."""
    if view.last_mod_time == 0:
        return True
    return view.last_mod_time * NANOS > view.now_ns - (spec.fragment.flush_interval_ns or DAY_NS)


# --- A queue of appends -----------------------------------------------------------------------------------


class QueuedAppend(Protocol):
    """A fully received append (`held` False), or one that waits to stream its content (`held` True)."""

    @property
    def request(self) -> AppendRequest: ...

    @property
    def length(self) -> int: ...

    @property
    def held(self) -> bool: ...


@dataclass(slots=True)
class Member:
    """One append of a group. `begin` is where its bytes start; `registers` those after it."""

    append: QueuedAppend
    begin: int
    registers: LabelSet
    outcome: Status | Rejected = Status.OK


@dataclass(slots=True)
class Group:
    """What to do next for a journal: roll (if set), write the members' content, commit it with `registers`; or, if
    `suspend` or `held` is set, that alone, for the one append named."""

    members: list[Member] = field(default_factory=list)
    rolls: list[Fragment] = field(default_factory=list)
    length: int = 0
    registers: LabelSet = field(default_factory=LabelSet)
    suspend: tuple[QueuedAppend, SetSuspend] | None = None
    held: QueuedAppend | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.members or self.rolls or self.suspend or self.held)


def seal_group(queue: deque[QueuedAppend] | Sequence[QueuedAppend], spec: JournalSpec, view: JournalView) -> Group:
    """Form the next group from the front of the queue. Takes nothing from it: the first `len(group.members)` (or
    the one in `suspend` or `held`) are the ones meant. `view` is moved on."""
    group = Group(registers=view.registers)
    for append in queue:
        if append.held:
            if not group.members:
                group.held = append
            break
        if group.length and group.length + append.length > GROUP_BYTES_LIMIT:
            break
        if len(group.members) >= GROUP_COUNT_LIMIT:
            break
        request = append.request
        decision = decide(request, spec, view)
        while type(decision) is JumpTo and not group.length:
            jump = Fragment(
                spec.name, decision.offset, decision.offset, compression_codec=spec.fragment.compression_codec
            )
            view.roll(decision.offset, jump.compression_codec)
            group.rolls.append(jump)
            decision = decide(request, spec, view)
        if type(decision) is JumpTo:
            break  # it rolls, so it begins the next group
        if type(decision) is Refuse:
            group.members.append(Member(append, view.spool_end, view.registers, decision.status))
            continue
        if type(decision) is SetSuspend:
            if not group.members:
                group.suspend = (append, decision)
            break
        assert type(decision) is Proceed
        roll = roll_proposal(view, spec, decision.roll_to)
        if roll is not None and (roll.begin != view.spool_begin or roll.compression_codec != view.codec):
            if group.length:
                break
            view.roll(roll.begin, roll.compression_codec)
            group.rolls.append(roll)
        refused = decide_content(request, spec, append.length)
        if refused is None and view.spool_end + append.length > MAX_OFFSET:
            refused = Rejected(BEYOND_MAX_OFFSET)
        if refused is not None:
            outcome = refused.status if type(refused) is Refuse else refused
            assert not isinstance(outcome, Refuse)
            group.members.append(Member(append, view.spool_end, view.registers, outcome))
            continue
        begin = view.spool_end
        if append.length:
            registers = view.registers
            if request.union_registers or request.subtract_registers:
                registers = apply_register_changes(request, registers)
            view.extend(append.length, registers)
            group.length += append.length
        group.members.append(Member(append, begin, view.registers, decision.answer))
    group.registers = view.registers
    return group

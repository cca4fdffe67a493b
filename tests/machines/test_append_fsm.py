"""`append_fsm`: every state × every input against the tables of spec/replication.md, and groups against one by one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.errors import Status
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal import append_fsm
from broadsheet.engine.journal.append_fsm import (
    NANOS,
    REGISTERS_NEED_CONTENT,
    Decision,
    JournalView,
    JumpTo,
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
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalFlags,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from broadsheet.engine.labels import LabelSelector, LabelSet, parse_selector
from broadsheet.engine.service import AppendRequest, SuspendControl

NAME = "a/journal"
NOW_S = 1_000_000_000
HOUR_S, DAY_S = 3600, 86_400
NONE, SNAPPY = CompressionCodec.NONE, CompressionCodec.SNAPPY
AUTHOR = LabelSet.of(author="me")
LEVEL_NONE, PARTIAL, FULL = SuspendLevel.NONE, SuspendLevel.PARTIAL, SuspendLevel.FULL


def spec_of(suspend: Suspend | None = None, flags: int = 0, flush_s: int = 0, length: int = 1000) -> JournalSpec:
    fragment = FragmentSpec(length, SNAPPY, flush_interval_ns=flush_s * NANOS)
    return JournalSpec(NAME, 1, fragment=fragment, flags=flags, suspend=suspend)


def view_of(spool: tuple[int, int] = (0, 0), index: tuple[int, int] = (0, 0), **fields: Any) -> JournalView:
    defaults: dict[str, Any] = {
        "codec": SNAPPY,
        "registers": LabelSet(),
        "first_append_time_ns": 0,
        "last_mod_time": 0,
        "now_ns": NOW_S * NANOS,
    }
    return JournalView(*spool, index_begin=index[0], index_end=index[1], **{**defaults, **fields})


# --- decide -----------------------------------------------------------------------------------------------

SPOOLS = [(0, 0), (0, 5), (5, 5), (5, 9), (9, 9)]
INDEXES = [(0, 0), (0, 5), (0, 9), (5, 9), (0, 20), (20, 30)]
OFFSETS = [None, 0, 5, 9, 20, 30]
REGISTERS = [
    (LabelSet(), None),
    (LabelSet(), parse_selector("author=you")),
    (AUTHOR, parse_selector("author=me")),
    (AUTHOR, parse_selector("author=you")),
]
SUSPENDS = [None, *(Suspend(level, offset) for level in (LEVEL_NONE, PARTIAL, FULL) for offset in (0, 7, 9, 25))]
AGES = [(0, 0), (DAY_S + 1, 0), (DAY_S - 1, 0), (HOUR_S + 1, HOUR_S), (HOUR_S - 1, HOUR_S)]  # (age, flush interval)


def states() -> Iterator[tuple[Any, ...]]:
    return itertools.product(SPOOLS, INDEXES, SUSPENDS, (JournalFlags.O_RDWR, JournalFlags.O_RDONLY), AGES)


def validate(
    *,
    spool: tuple[int, int],
    index: tuple[int, int],
    suspend: Suspend | None,
    writable: bool,
    age: tuple[int, int],
    offset: int | None,
    mismatch: bool,
    control: SuspendControl,
) -> Decision:
    """spec/replication.md §5.3 and §7, rule by rule, in its order."""
    head, furthest = spool[1], max(spool[1], index[1])
    level = suspend.level if suspend else LEVEL_NONE
    rules: list[tuple[bool, Decision]] = [
        (mismatch, Refuse(Status.REGISTER_MISMATCH)),  # 3
        (suspend is not None and head < suspend.offset, JumpTo(suspend.offset if suspend else 0)),  # 4
        (head != furthest and offset is None and writable, Refuse(Status.INDEX_HAS_GREATER_OFFSET)),  # 5
        (offset is not None and offset != furthest, Refuse(Status.WRONG_APPEND_OFFSET)),  # 6
        (offset is not None and head != furthest, JumpTo(furthest)),  # 7
    ]
    for applies, result in rules:
        if applies:
            return result
    # 8, the table of §7
    index_is_empty = index[0] == index[1]
    dirty = age[0] == 0 or age[0] < (age[1] or DAY_S)
    roll_to, answer = 0, Status.OK
    if control == SuspendControl.RESUME and level != LEVEL_NONE:
        return SetSuspend(LEVEL_NONE, head)
    if control == SuspendControl.NO_RESUME and level != LEVEL_NONE:
        return Refuse(Status.SUSPENDED)
    if control in (SuspendControl.IF_FLUSHED, SuspendControl.NOW):
        if level != FULL and index_is_empty:  # (i)
            return SetSuspend(FULL, head)
        if level == LEVEL_NONE and (not dirty or control == SuspendControl.NOW):  # (ii)
            return SetSuspend(PARTIAL, head)
        if level == PARTIAL:  # (iii)
            roll_to, answer = head, Status.SUSPENDED
    if spool[0] == index[0]:  # 9
        roll_to = head
    return Proceed(roll_to, answer)


def test_every_state_and_every_request() -> None:
    requests = [
        (offset, registers, check, control)
        for offset, (registers, check), control in itertools.product(OFFSETS, REGISTERS, SuspendControl)
    ]
    seen: set[type] = set()
    count = 0
    for spool, index, suspend, flags, age in states():
        spec = spec_of(suspend, flags, age[1])
        view = view_of(spool, index, last_mod_time=NOW_S - age[0] if age[0] else 0)
        for offset, registers, check, control in requests:
            if suspend is not None and suspend.level == FULL and control != SuspendControl.RESUME:
                continue  # never gets here by the specification: see below
            view.registers = registers
            request = AppendRequest(NAME, offset, check, suspend=control)
            mismatch = check is not None and registers == AUTHOR and check == REGISTERS[3][1]
            found = decide(request, spec, view)
            expected = validate(
                spool=spool,
                index=index,
                suspend=suspend,
                writable=flags != JournalFlags.O_RDONLY,
                age=age,
                offset=offset,
                mismatch=mismatch,
                control=control,
            )
            assert found == expected, (spool, index, suspend, flags, age, offset, registers, check, control)
            seen.add(type(found))
            count += 1
    assert seen == {Proceed, Refuse, JumpTo, SetSuspend}
    assert count > 100_000


def test_a_fully_suspended_journal_refuses_whatever_the_state() -> None:
    """spec/broker-protocol.md §7.4, column FULL. An append that was resolved before comes here after the suspension."""
    for spool, index, suspend, flags, age in states():
        if suspend is None or suspend.level != FULL:
            continue
        for control in SuspendControl:
            if control != SuspendControl.RESUME:
                spec = spec_of(suspend, flags, age[1])
                found = decide(AppendRequest(NAME, suspend=control), spec, view_of(spool, index))
                assert found == Refuse(Status.SUSPENDED), (spool, index, suspend, control)


@pytest.mark.parametrize("flags", list(JournalFlags))
def test_which_flags_may_be_written(flags: JournalFlags) -> None:
    """A journal that is not written to mirrors a store: barriers pass, whatever the store holds."""
    found = decide(AppendRequest(NAME), spec_of(flags=flags), view_of((0, 0), (0, 20)))
    writable = flags != JournalFlags.O_RDONLY
    assert found == (Refuse(Status.INDEX_HAS_GREATER_OFFSET) if writable else Proceed())


def test_content() -> None:
    changes = [None, LabelSet(), AUTHOR]
    for flags, control, length, union, subtract in itertools.product(
        JournalFlags, SuspendControl, (0, 1, 10**9), changes, changes
    ):
        request = AppendRequest(NAME, union_registers=union, subtract_registers=subtract, suspend=control)
        found = decide_content(request, spec_of(flags=flags), length)
        if length and (flags == JournalFlags.O_RDONLY or control in (2, 3, 4)):
            assert found == Refuse(Status.NOT_ALLOWED)
        elif not length and (union or subtract):
            assert found == Rejected(REGISTERS_NEED_CONTENT)
        else:
            assert found is None


sets = st.dictionaries(
    st.sampled_from(["aa", "bb", "cc"]), st.sets(st.sampled_from(["1", "2"]), min_size=1), max_size=3
)


@given(sets, sets, sets)
def test_register_changes(have: dict[str, set[str]], union: dict[str, set[str]], subtract: dict[str, set[str]]) -> None:
    def labels(values: dict[str, set[str]]) -> LabelSet:
        return LabelSet.of(*((name, value) for name in values for value in values[name]))

    expected = {name: values for name, values in have.items() if subtract.get(name) != values} | union
    request = AppendRequest(NAME, union_registers=labels(union), subtract_registers=labels(subtract))
    assert apply_register_changes(request, labels(have)) == labels(expected)
    nothing = AppendRequest(NAME)
    assert apply_register_changes(nothing, labels(have)) == labels(have)


# --- roll_proposal ----------------------------------------------------------------------------------------


def test_every_roll() -> None:
    """spec/replication.md §4.2."""
    begins_of_interval = NOW_S - NOW_S % 60
    rolled = 0
    for length, limit, jump, flush_ns, first_s in itertools.product(
        (0, 999, 1000, 1001),
        (1000, 1 << 20),
        (None, 0, 1, 50),
        (0, 60 * NANOS, 60 * NANOS + 7),
        (None, begins_of_interval - 1, begins_of_interval, NOW_S),
    ):
        spec = spec_of(length=limit)
        spec = replace(spec, fragment=replace(spec.fragment, flush_interval_ns=flush_ns))
        begin, end = 100, 100 + length
        view = view_of((begin, end), first_append_time_ns=(first_s or 0) * NANOS)
        roll_to = 0 if jump is None else end + jump
        due = [
            length == 0,
            length > limit,
            roll_to not in (0, begin),
            flush_ns > 0 and first_s is not None and first_s // 60 != NOW_S // 60,
        ]
        at = roll_to or end
        expected = Fragment(NAME, at, at, compression_codec=SNAPPY) if any(due) else None
        assert roll_proposal(view, spec, roll_to) == expected, (length, limit, jump, flush_ns, first_s)
        rolled += expected is not None
    assert 0 < rolled < 384


# --- seal_group -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Queued:
    request: AppendRequest
    length: int
    held: bool = False
    number: int = 0


def queue_of(*appends: Queued) -> deque[Queued]:
    for number, append in enumerate(appends):
        append.number = number
    return deque(appends)


def plain(length: int, **fields: Any) -> Queued:
    return Queued(AppendRequest(NAME, **fields), length)


@dataclass
class Trace:
    """What happened to each append, which rolls there were, and where it ended."""

    outcomes: list[tuple[Any, ...]]
    rolls: list[tuple[int, CompressionCodec]]
    view: JournalView
    groups: int = 0


def run(appends: deque[Queued], spec: JournalSpec, view: JournalView, *, together: bool) -> Trace:
    """Take the queue group by group, or one append at a time."""
    trace = Trace([], [], view)
    changes = 0
    while appends:
        before = (view.spool_begin, view.spool_end)
        group = seal_group(appends if together else deque([appends[0]]), spec, view)
        assert not group.is_empty
        trace.groups += 1
        trace.rolls += [(roll.begin, roll.compression_codec) for roll in group.rolls]
        assert all(roll.begin == roll.end for roll in group.rolls)
        at = group.rolls[-1].begin if group.rolls else before[1]
        assert group.length == view.spool_end - at
        for member, append in zip(group.members, list(appends), strict=False):
            assert member.append is append, "not the front of the queue"
            appends.popleft()
            assert isinstance(append, Queued)
            trace.outcomes.append((append.number, member.outcome, member.begin, member.registers))
            took_content = member.outcome is Status.OK and append.length
            if took_content:
                assert member.begin == at
                at += append.length
        assert at == view.spool_end
        assert group.registers == view.registers
        if group.held is not None:
            assert not group.members
            assert group.held is appends.popleft()
            trace.outcomes.append(("held", view.spool_end, view.registers))
        if group.suspend is not None:
            assert not group.members
            append, decision = group.suspend
            assert append is appends[0]
            spec = replace(spec, suspend=Suspend(decision.level, decision.offset))
            trace.outcomes.append(("suspend", append.number, decision))
            changes += 1
            assert changes < 50, "for ever"
            if decision.level == FULL:  # what resolving says next
                appends.popleft()
    return trace


controls = st.sampled_from([SuspendControl.RESUME] * 6 + list(SuspendControl))
label_sets = st.sampled_from(
    [None, None, None, LabelSet(), AUTHOR, LabelSet.of(author="you"), LabelSet.of(("bb", "1"))]
)
checks = st.sampled_from([None, None, None, parse_selector("author=me"), parse_selector("author!=me"), LabelSelector()])
queued = st.builds(
    Queued,
    st.builds(
        AppendRequest,
        st.just(NAME),
        st.sampled_from([None, None, None, None, 0, 5, 10, 20, 30]),
        checks,
        label_sets,
        label_sets,
        controls,
    ),
    st.sampled_from([0, 0, 1, 5, 5, 9, 40]),
    st.sampled_from([False, False, False, False, True]),
)


@settings(max_examples=400, deadline=None)
@given(
    appends=st.lists(queued, max_size=12),
    length=st.sampled_from([0, 3, 10, 1000]),
    spool=st.sampled_from(SPOOLS),
    index=st.sampled_from(INDEXES),
    suspend=st.sampled_from(SUSPENDS),
    flags=st.sampled_from(list(JournalFlags)),
    registers=st.sampled_from([LabelSet(), AUTHOR]),
    codec=st.sampled_from([NONE, SNAPPY]),
    first_s=st.sampled_from([0, NOW_S - 61, NOW_S]),
)
def test_a_group_is_as_one_by_one(
    *,
    appends: list[Queued],
    length: int,
    spool: tuple[int, int],
    index: tuple[int, int],
    suspend: Suspend | None,
    flags: int,
    registers: LabelSet,
    codec: CompressionCodec,
    first_s: int,
) -> None:
    spec = spec_of(suspend, flags, 60, length)
    traces = []
    for together in (True, False):
        view = view_of(spool, index, registers=registers, codec=codec, first_append_time_ns=first_s * NANOS)
        traces.append(run(queue_of(*appends), spec, view, together=together))
    one, other = traces
    assert one.outcomes == other.outcomes
    assert one.rolls == other.rolls
    assert one.view == other.view
    assert one.groups <= other.groups


def test_many_appends_are_one_group() -> None:
    view = view_of((5, 9), (0, 9))
    appends = queue_of(*(plain(number) for number in (1, 2, 0, 3, 4)))
    group = seal_group(appends, spec_of(), view)
    assert [(member.begin, member.outcome) for member in group.members] == [
        (9, Status.OK),
        (10, Status.OK),
        (12, Status.OK),
        (12, Status.OK),
        (15, Status.OK),
    ]
    assert (group.length, group.rolls) == (10, [])
    assert len(appends) == 5, "nothing is taken from the queue"


def test_registers_and_offsets_are_checked_serially() -> None:
    view = view_of((5, 9), (0, 9))
    me, you = parse_selector("author=me"), parse_selector("author=you")
    group = seal_group(
        queue_of(
            plain(1, union_registers=AUTHOR),
            plain(1, check_registers=me),
            plain(1, check_registers=you),
            plain(1, offset=11),
            plain(1, offset=11),
            plain(0, union_registers=LabelSet.of(author="you")),
            plain(1, union_registers=LabelSet.of(author="you"), subtract_registers=AUTHOR),
            plain(1, check_registers=you, offset=13),
        ),
        spec_of(),
        view,
    )
    assert [(member.outcome, member.begin) for member in group.members] == [
        (Status.OK, 9),
        (Status.OK, 10),
        (Status.REGISTER_MISMATCH, 11),
        (Status.OK, 11),
        (Status.WRONG_APPEND_OFFSET, 12),
        (Rejected(REGISTERS_NEED_CONTENT), 12),
        (Status.OK, 12),
        (Status.OK, 13),
    ]
    assert group.members[2].registers == AUTHOR
    assert group.registers == LabelSet.of(author="you")
    assert group.length == 5


def test_a_roll_inside_a_group_ends_it() -> None:
    spec, view = spec_of(length=10), view_of((100, 105), (0, 105))
    appends = queue_of(*(plain(4) for _ in range(6)))
    group = seal_group(appends, spec, view)
    assert (len(group.members), group.rolls) == (2, [])  # 5 + 4 + 4 > 10
    for _ in group.members:
        appends.popleft()
    group = seal_group(appends, spec, view)
    assert [roll.begin for roll in group.rolls] == [113]
    assert [member.begin for member in group.members] == [113, 117, 121]


def test_the_first_fragment_ends_with_its_first_append() -> None:
    view = view_of()
    appends = queue_of(plain(3), plain(4), plain(5))
    group = seal_group(appends, spec_of(), view)
    assert len(group.members) == 1
    appends.popleft()
    group = seal_group(appends, spec_of(), view)
    assert ([roll.begin for roll in group.rolls], len(group.members)) == ([3], 2)


def test_who_needs_the_journal_for_itself_ends_a_group() -> None:
    held = Queued(AppendRequest(NAME), 0, held=True)
    suspending = plain(0, suspend=SuspendControl.NOW)
    for special in (held, suspending):
        view = view_of((5, 9), (0, 9))
        appends = queue_of(plain(1), special, plain(1))
        group = seal_group(appends, spec_of(), view)
        assert len(group.members) == 1
        assert (group.held, group.suspend) == (None, None)
        appends.popleft()
        group = seal_group(appends, spec_of(), view)
        assert group.members == []
        if special is held:
            assert group.held is held
        else:
            assert group.suspend == (suspending, SetSuspend(PARTIAL, 10))


def test_limits_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_fsm, "GROUP_BYTES_LIMIT", 10)
    spec = spec_of(length=1 << 20)
    assert len(seal_group(queue_of(plain(4), plain(6), plain(1)), spec, view_of((5, 9), (0, 9))).members) == 2
    # One that is larger than the limit goes alone.
    assert len(seal_group(queue_of(plain(11), plain(1)), spec, view_of((5, 9), (0, 9))).members) == 1
    assert len(seal_group(queue_of(plain(0), plain(11), plain(1)), spec, view_of((5, 9), (0, 9))).members) == 2
    monkeypatch.setattr(append_fsm, "GROUP_COUNT_LIMIT", 3)
    assert len(seal_group(queue_of(*(plain(0) for _ in range(5))), spec, view_of((5, 9), (0, 9))).members) == 3


def test_two_jumps_in_a_row() -> None:
    """To the suspend offset (rule 4), and from there to the head of the store (rule 7)."""
    view = view_of((0, 0), (0, 20))
    group = seal_group(queue_of(plain(5, offset=20)), spec_of(Suspend(LEVEL_NONE, 7)), view)
    assert [(member.begin, member.outcome) for member in group.members] == [(20, Status.OK)]
    assert (view.spool_begin, view.spool_end) == (20, 25)


def test_an_empty_queue_makes_an_empty_group() -> None:
    assert seal_group(deque(), spec_of(), view_of()).is_empty

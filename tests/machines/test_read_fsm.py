"""`read_fsm`: the query against a brute-force model, and where a stream ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.errors import Status
from broadsheet.engine.fragments.cover_set import CoverSet
from broadsheet.engine.journal.read_fsm import IndexResult, content_end, ends_after_metadata, query
from broadsheet.engine.service import ReadRequest

NOW_S = 1_000_000
SIX_HOURS_S = 6 * 3600


@dataclass(frozen=True)
class Member:
    begin: int
    end: int
    mod_time: int = 0

    @property
    def is_local(self) -> bool:
        return self.mod_time == 0


def index_of(*members: Member) -> CoverSet[Member]:
    index: CoverSet[Member] = CoverSet()
    for member in members:
        index.add(member)
    return index


def brute(members: list[Member], offset: int, begin_mod_time: int) -> tuple[Status, int, Member | None]:
    """spec/replication.md §9, by looking at every fragment."""
    if offset == -1:
        offset = max((it.end for it in members), default=0)
    while True:
        holding = [it for it in members if it.begin <= offset < it.end]
        if not holding:
            after = min((it for it in members if it.begin > offset), key=lambda it: it.begin, default=None)
            if after is None or not after.mod_time:
                return Status.OFFSET_NOT_YET_AVAILABLE, offset, None
            is_first = all(it.begin >= after.begin for it in members)
            if not is_first and after.mod_time >= NOW_S - SIX_HOURS_S:
                return Status.OFFSET_NOT_YET_AVAILABLE, offset, None
            offset = after.begin
            continue
        member = max(holding, key=lambda it: it.end)
        if member.mod_time and member.mod_time < begin_mod_time:
            offset = member.end
            continue
        return Status.OK, offset, member


times = st.sampled_from([0, 0, 1, NOW_S - SIX_HOURS_S - 1, NOW_S - SIX_HOURS_S, NOW_S - 10, NOW_S])
members_strategy = st.builds(
    lambda begin, length, time: Member(begin, begin + length, time), st.integers(0, 20), st.integers(1, 8), times
)


@settings(max_examples=400, deadline=None)
@given(st.lists(members_strategy, max_size=10), st.sampled_from([0, 1, 2, NOW_S - 10, NOW_S + 1]))
def test_query_against_brute_force(members: list[Member], begin_mod_time: int) -> None:
    index = index_of(*members)
    for offset in range(-1, 31):
        found = query(index, offset, begin_mod_time, NOW_S)
        assert (found.status, found.offset, found.member) == brute(list(index), offset, begin_mod_time)


def test_gap_observed() -> None:
    """spec/fragments.md §7: [0,2000) and [4000,6000) were deleted from a store."""
    for age_s, jumps in [(0, False), (SIX_HOURS_S, False), (SIX_HOURS_S + 1, True)]:
        one, other = Member(2000, 4000, NOW_S - age_s), Member(6000, 8000, NOW_S - age_s)
        index = index_of(one, other)
        assert query(index, 0, 0, NOW_S) == IndexResult(Status.OK, 2000, one)
        found = query(index, 4000, 0, NOW_S)
        assert found == (
            IndexResult(Status.OK, 6000, other) if jumps else IndexResult(Status.OFFSET_NOT_YET_AVAILABLE, 4000)
        )


def test_the_one_that_reaches_furthest() -> None:
    index = index_of(Member(0, 10, 5), Member(4, 12), Member(8, 11, 5), Member(8, 20, 6))
    assert query(index, 3, 0, NOW_S).member == Member(0, 10, 5)
    assert query(index, 4, 0, NOW_S).member == Member(4, 12)
    assert query(index, 8, 0, NOW_S).member == Member(8, 20, 6)


def test_where_a_stream_ends() -> None:
    """After metadata: spec/broker-protocol.md §7.1."""
    count = 0
    for status, metadata_only, do_not_proxy, mod_time, end_offset in itertools.product(
        (Status.OK, Status.OFFSET_NOT_YET_AVAILABLE), (False, True), (False, True), (0, 5), (None, 3, 7, 8, 10)
    ):
        request = ReadRequest(
            "a/journal", 3, do_not_proxy=do_not_proxy, metadata_only=metadata_only, end_offset=end_offset
        )
        member = Member(0, 20, mod_time) if status == Status.OK else None
        expected = (
            status != Status.OK
            or metadata_only
            or (do_not_proxy and mod_time != 0)
            or (end_offset is not None and end_offset <= 7)
        )
        assert ends_after_metadata(request, IndexResult(status, 7, member)) == expected
        count += expected
    assert 0 < count < 80
    assert content_end(ReadRequest("a/journal"), 20) == 20
    assert content_end(ReadRequest("a/journal", end_offset=12), 20) == 12
    assert content_end(ReadRequest("a/journal", end_offset=32), 20) == 20

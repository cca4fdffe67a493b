"""`CoverSet`: the golden vectors, the examples of spec/fragments.md §7, and Hypothesis against a naive model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.fragments.cover_set import CoverSet


class Member(NamedTuple):
    id: int
    begin: int
    end: int


def cover_set(members: Iterable[Any]) -> CoverSet[Member]:
    made: CoverSet[Member] = CoverSet()
    for member in members:
        made.add(Member(*member))
    return made


def test_golden_vectors(vectors: Callable[[str], Any]) -> None:
    entries = [entry for entry in vectors("cover_set.json") if not entry["quirk"]]
    assert len(entries) > 5
    for entry in entries:
        made: CoverSet[Member] = CoverSet()
        for add in entry["adds"] or ():
            updated = made.add(Member(add["id"], add["begin"], add["end"]))
            assert updated == add["updated"], entry["name"]
            assert [list(member) for member in made] == add["set"], entry["name"]
        assert (made.begin, made.end) == (entry["begin_offset"], entry["end_offset"])
        for lookup in entry["lookups"]:
            index, found = made.lookup(lookup["offset"])
            assert (index, found) == (lookup["index"], lookup["found"]), (entry["name"], lookup)
            assert (made[index].id if index < len(made) else None) == lookup.get("id")
        if "other" in entry:
            other = cover_set(entry["other"] or ())
            assert [list(member) for member in made.difference(other)] == entry["difference"]
            assert [list(member) for member in other.difference(made)] == entry["difference_reverse"]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([(0, 100), (0, 150)], [(0, 150)]),
        ([(0, 100), (50, 150)], [(0, 100), (50, 150)]),
        ([(0, 100), (50, 150), (20, 90)], [(0, 100), (50, 150)]),
        ([(0, 100), (100, 200), (50, 250)], [(0, 100), (50, 250)]),
        ([(0, 100), (100, 200), (50, 150)], [(0, 100), (50, 150), (100, 200)]),
        ([(100, 200), (0, 300)], [(0, 300)]),
        ([(0, 10), (10, 20), (20, 30), (0, 20)], [(0, 20), (20, 30)]),
        ([(10, 20), (20, 30), (30, 40), (5, 45)], [(5, 45)]),  # the reference has an accident here (§7)
    ],
)
def test_examples(added: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    made = cover_set((0, *span) for span in added)
    assert [(member.begin, member.end) for member in made] == expected


class Naive:
    def __init__(self) -> None:
        self.members: list[Member] = []

    def add(self, member: Member) -> bool:
        span = (member.begin, member.end)
        if member.begin >= member.end:
            return False
        if any(it.begin <= member.begin and it.end >= member.end and (it.begin, it.end) != span for it in self.members):
            return False
        self.members = [it for it in self.members if not (member.begin <= it.begin and it.end <= member.end)]
        self.members = sorted([*self.members, member], key=lambda it: it.begin)
        return True

    def lookup(self, offset: int) -> tuple[int, bool]:
        holding = [index for index, it in enumerate(self.members) if it.begin <= offset < it.end]
        if holding:
            return max(holding, key=lambda index: self.members[index].end), True
        return sum(it.end <= offset for it in self.members), False

    def covers(self, begin: int, end: int) -> bool:
        return all(any(it.begin <= at < it.end for it in self.members) for at in range(begin, end))


spans = st.tuples(st.integers(0, 15), st.integers(0, 6)).map(lambda span: (span[0], span[0] + span[1]))


@settings(max_examples=300, deadline=None)
@given(st.lists(spans, max_size=15), st.lists(spans, max_size=6))
def test_against_a_naive_model(added: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    made: CoverSet[Member] = CoverSet()
    naive = Naive()
    for number, (begin, end) in enumerate(added):
        member = Member(number, begin, end)
        assert made.add(member) == naive.add(member)
        assert list(made) == naive.members
        assert made.holds(member) == (member in naive.members)
    for offset in range(23):
        assert made.lookup(offset) == naive.lookup(offset)
        assert made.from_begin(offset) == sum(it.begin < offset for it in naive.members)
        for end in range(offset, 23, 3):
            assert made.covers(offset, end) == naive.covers(offset, end)
    assert made.begin == min((it.begin for it in naive.members), default=0)
    assert made.end == max((it.end for it in naive.members), default=0)
    other = cover_set((0, *span) for span in others)
    naive_other = Naive()
    naive_other.members = list(other)
    assert made.difference(other) == [it for it in naive.members if not naive_other.covers(it.begin, it.end)]


def test_an_equal_member_takes_the_place() -> None:
    made: CoverSet[Member] = CoverSet()
    one, other = Member(1, 0, 5), Member(2, 0, 5)
    assert made.add(one)
    assert made.add(other)
    assert not made.holds(one)
    assert made.holds(other)

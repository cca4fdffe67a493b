"""The cover set: the known ranges of a journal, none fully covered by another (spec/fragments.md §7).

Members are ordered by begin; begins and ends both strictly increase, so that every question is a bisection.
Sans-I/O; what a member is besides its range is the caller's business.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["CoverSet", "Ranged"]


class Ranged(Protocol):
    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


M = TypeVar("M", bound=Ranged)


class CoverSet(Generic[M]):
    __slots__ = ("_begins", "_ends", "_members")

    def __init__(self) -> None:
        self._members: list[M] = []
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[M]:
        return iter(self._members)

    def __getitem__(self, index: int) -> M:
        return self._members[index]

    @property
    def begin(self) -> int:
        """Smallest begin, 0 when empty."""
        return self._begins[0] if self._begins else 0

    @property
    def end(self) -> int:
        """Largest end, 0 when empty."""
        return self._ends[-1] if self._ends else 0

    def add(self, member: M) -> bool:
        """Insert, replacing every member it fully covers (an equal one too). False if it is empty, or already
        covered by a larger member."""
        begin, end = member.begin, member.end
        if begin >= end:
            return False
        before = bisect_right(self._begins, begin) - 1  # of those that start no later, the one that reaches furthest
        if before >= 0 and self._ends[before] >= end and (self._begins[before], self._ends[before]) != (begin, end):
            return False
        first = bisect_left(self._begins, begin)
        last = max(first, bisect_right(self._ends, end))
        self._members[first:last] = [member]
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        return True

    def holds(self, member: M) -> bool:
        """Whether this very member is in the set, and not another one in its place."""
        index = bisect_left(self._begins, member.begin)
        return index < len(self._members) and self._members[index] is member

    def lookup(self, offset: int) -> tuple[int, bool]:
        """(index, found): of the members that hold `offset` the one reaching furthest; or, not found, the index
        of the first member after it (`len` if there is none)."""
        index = bisect_right(self._ends, offset)
        if index == len(self._members) or self._begins[index] > offset:
            return index, False
        return bisect_right(self._begins, offset) - 1, True

    def from_begin(self, begin: int) -> int:
        """Index of the first member whose begin is at least `begin`."""
        return bisect_left(self._begins, begin)

    def covers(self, begin: int, end: int) -> bool:
        """Whether [begin, end) lies in an unbroken run of members."""
        while begin < end:
            index, found = self.lookup(begin)
            if not found:
                return False
            begin = self._ends[index]
        return True

    def difference(self, other: CoverSet[M]) -> list[M]:
        """Members that no unbroken run of `other` covers."""
        return [member for member in self._members if not other.covers(member.begin, member.end)]

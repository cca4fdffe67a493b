"""The read decisions (spec/replication.md §9, spec/broker-protocol.md §7.1). Sans-I/O.

A read is a loop: ask the index what holds the offset (`query`), say so (metadata), and unless that ends the read
(`ends_after_metadata`) send the fragment's content through `content_end`, move the offset there, ask again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from broadsheet.engine.errors import Status
from broadsheet.engine.fragments.cover_set import CoverSet
from broadsheet.engine.service import ReadRequest

__all__ = ["IndexMember", "IndexResult", "content_end", "ends_after_metadata", "query"]

GAP_AGE_S = 6 * 3600


class IndexMember(Protocol):
    """`mod_time` is unix seconds, 0 while the fragment is local only."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def mod_time(self) -> int: ...

    @property
    def is_local(self) -> bool: ...


M = TypeVar("M", bound=IndexMember)


@dataclass(frozen=True, slots=True)
class IndexResult(Generic[M]):
    """OK with the member that holds `offset` and reaches furthest, or OFFSET_NOT_YET_AVAILABLE."""

    status: Status
    offset: int
    member: M | None = None


def query(index: CoverSet[M], offset: int, begin_mod_time: int, now_s: int) -> IndexResult[M]:
    """What holds `offset` (-1: the end of the index)."""
    if offset == -1:
        offset = index.end
    while True:
        position, found = index.lookup(offset)
        if not found and position < len(index):
            after = index[position]
            # A gap. The first fragment's begin is where the journal begins now (pruned); elsewhere a fragment may
            # yet be listed, and only after six hours is it taken for lost.
            if after.mod_time and (position == 0 or after.mod_time < now_s - GAP_AGE_S):
                offset = after.begin
                position, found = index.lookup(offset)
        if not found:
            return IndexResult(Status.OFFSET_NOT_YET_AVAILABLE, offset)
        member = index[position]
        if member.mod_time and member.mod_time < begin_mod_time:
            offset = member.end
            continue
        return IndexResult(Status.OK, offset, member)


def ends_after_metadata(request: ReadRequest, result: IndexResult[M]) -> bool:
    """Whether the stream ends after the metadata message for this result."""
    if result.status != Status.OK or request.metadata_only:
        return True
    assert result.member is not None
    if request.do_not_proxy and not result.member.is_local:
        return True  # the client fetches the fragment itself
    return request.end_offset is not None and result.offset >= request.end_offset


def content_end(request: ReadRequest, fragment_end: int) -> int:
    """Through which offset this fragment's content is sent. The extent is the one at query time."""
    if request.end_offset is not None:
        return min(fragment_end, request.end_offset)
    return fragment_end

"""The index of a replica: its local spools and what its stores list, in one cover set (spec/fragments.md §7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from broadsheet.engine.fragments.cover_set import CoverSet
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spool import Spool

__all__ = ["FragmentIndex", "IndexEntry"]


class IndexEntry:
    """A known range. Local (`spool_id` is set) or in a store; or the open spool, whose end grows with it.

    `readers` counts streams that are in the middle of it: a local file is given up only when there are none.
    """

    __slots__ = ("_fragment", "_spool", "begin", "end", "mod_time", "readers", "released", "spool_id")

    def __init__(self, fragment: Fragment, spool_id: int = 0, spool: Spool | None = None) -> None:
        self._fragment = fragment
        self._spool = spool
        self.begin = fragment.begin
        self.end = fragment.end
        self.mod_time = fragment.mod_time
        self.spool_id = spool_id
        self.readers = 0
        self.released = False

    @property
    def is_local(self) -> bool:
        return self.spool_id != 0

    @property
    def fragment(self) -> Fragment:
        """The fragment as it is known now."""
        return self._spool.fragment if self._spool is not None else self._fragment

    def complete(self, fragment: Fragment) -> None:
        """The open spool was rolled: this is what it holds, for good."""
        self._fragment = fragment
        self._spool = None


class FragmentIndex(CoverSet[IndexEntry]):
    """A cover set that also tells when local entries drop out of it (`dropped` is called for each)."""

    __slots__ = ("_dropped", "_put_since", "refreshed")

    def __init__(self, dropped: Callable[[IndexEntry], None]) -> None:
        super().__init__()
        self._dropped = dropped
        self._put_since: list[Fragment] | None = None  # while the stores are being listed
        self.refreshed = False

    @property
    def last_mod_time(self) -> int:
        """Unix seconds, of the last fragment; 0 if it is local or there is none."""
        return self[len(self) - 1].mod_time if len(self) else 0

    def local_entries(self) -> list[IndexEntry]:
        return [entry for entry in self if entry.is_local]

    def grown(self, entry: IndexEntry) -> None:
        """The open spool's entry has a new end: nearly always the last one, and then there is nothing to move."""
        if self._members and self._members[-1] is entry:
            self._ends[-1] = entry.end
        else:
            self.add(entry)

    def persisted(self, fragment: Fragment, entry: IndexEntry) -> None:
        """A store holds what `entry` held locally."""
        if self._put_since is not None:
            self._put_since.append(fragment)
        self.add(IndexEntry(fragment))
        if not self.holds(entry):
            self._dropped(entry)

    def begin_refresh(self) -> None:
        """The stores are about to be listed: what is put from now on may or may not be in the listing."""
        self._put_since = []

    def abandon_refresh(self) -> None:
        """The listing failed: what was known stays."""
        self._put_since = None

    def refresh(self, listed: Iterable[Fragment]) -> None:
        """Replace what is known of the stores, but for what was put since `begin_refresh`. Local fragments that an
        unbroken run of listed ones covers drop out, except the open spool."""
        remote: CoverSet[IndexEntry] = CoverSet()
        for fragment in (*listed, *(self._put_since or ())):
            remote.add(IndexEntry(fragment))
        local = self.local_entries()
        self._members, self._begins, self._ends = list(remote._members), list(remote._begins), list(remote._ends)
        for entry in local:
            if entry._spool is None and remote.covers(entry.begin, entry.end):
                self._dropped(entry)
            else:
                self.add(entry)
        self._put_since = None
        self.refreshed = True

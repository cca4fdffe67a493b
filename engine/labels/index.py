"""An index that selects journals by labels without looking at each (spec/journals.md §5, List specifics).

Each (label, value) and each label name has a *posting*: the journals that have it. A query is answered by
its cheapest include name, whose journals are then filtered by the postings of the others. Names of journals
(the implicit label `name`) need no postings: they are kept sorted, and so are the values of those labels that
have been asked for by prefix. Sorted lists are brought up to date when next read, so that adding is cheap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from broadsheet.engine.labels.label_set import NAME_LABEL, Label, LabelSet
from broadsheet.engine.labels.selector import LabelSelector

__all__ = ["SelectorIndex"]

# A posting of one journal is the bare name: a set of one would take 216 bytes, and unique values are common.
_Posting = set[str] | str
_Terms = list[tuple[str, list[Label]]]

_FEW = 32
"""Up to this many pending changes are put into a sorted list one by one; more are sorted in together."""


class _SortedStrings:
    """A sorted list of distinct strings that takes changes lazily."""

    __slots__ = ("_added", "_removed", "_sorted")

    def __init__(self, items: Iterable[str] = ()) -> None:
        self._sorted: list[str] = sorted(items)
        self._added: set[str] = set()
        self._removed: set[str] = set()

    def add(self, item: str) -> None:
        """Add a string that is not there."""
        if item in self._removed:
            self._removed.discard(item)
        else:
            self._added.add(item)

    def discard(self, item: str) -> None:
        """Remove a string that is there."""
        if item in self._added:
            self._added.discard(item)
        else:
            self._removed.add(item)

    def items(self) -> list[str]:
        """All strings, in order; not to be changed by the caller."""
        if self._removed:
            if len(self._removed) <= _FEW:
                for item in self._removed:
                    del self._sorted[bisect_left(self._sorted, item)]
            else:
                self._sorted = [item for item in self._sorted if item not in self._removed]
            self._removed = set()
        if self._added:
            if len(self._added) <= _FEW:
                for item in self._added:
                    insort(self._sorted, item)
            else:
                self._sorted.extend(self._added)
                self._sorted.sort()
            self._added = set()
        return self._sorted

    def prefixed(self, prefix: str) -> tuple[int, int]:
        """The range of indices in `items()` of the strings that begin with `prefix`."""
        items = self.items()
        if not prefix:
            return 0, len(items)
        low = bisect_left(items, prefix)
        size = len(prefix)
        # Strings from `low` on begin with the prefix or come after all that do.
        return low, bisect_left(items, True, lo=low, key=lambda item: item[:size] != prefix)


class SelectorIndex:
    """Journal names by their labels. Not for use from several threads at once.

    `select` agrees with `LabelSelector.matches` on the journal's labels with the implicit `name`, after
    `with_prefix_rewritten`. Memory is about 0.5 KB per journal of five labels beyond the labels themselves.
    """

    __slots__ = ("_labels", "_names", "_postings", "_present", "_values")

    def __init__(self) -> None:
        self._labels: dict[str, LabelSet] = {}
        self._names = _SortedStrings()
        self._postings: dict[str, dict[str, _Posting]] = {}  # label name -> value -> journals
        self._present: dict[str, set[str]] = {}  # label name -> journals that have it
        self._values: dict[str, _SortedStrings] = {}  # label name -> values; made by the first prefix query

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, name: object) -> bool:
        return name in self._labels

    def add(self, name: str, labels: LabelSet) -> None:
        """Add a journal, or replace its labels. Neither the name nor the labels are validated."""
        former = self._labels.get(name)
        if former is not None:
            if former == labels:
                return
            self._remove_postings(name, former)
        else:
            self._names.add(name)
        self._labels[name] = labels
        for label in labels.labels:
            self._add_posting(name, label)

    def add_many(self, items: Iterable[tuple[str, LabelSet]]) -> None:
        """`add` each of many journals."""
        for name, labels in items:
            self.add(name, labels)

    def discard(self, name: str) -> None:
        """Remove a journal, if it is there."""
        labels = self._labels.pop(name, None)
        if labels is not None:
            self._names.discard(name)
            self._remove_postings(name, labels)

    def select(self, selector: LabelSelector) -> list[str]:
        """The names of the selected journals, in byte order.

        Takes time in proportion to the journals of the most selective name in `include`.
        """
        selector = selector.with_prefix_rewritten()
        terms = _by_name(selector.include)
        if terms:
            driver = min(terms, key=self._size)
            terms.remove(driver)
            found = self._candidates(*driver)
            in_order = driver[0] == NAME_LABEL
        else:
            found = self._names.items().copy()
            in_order = True
        # The larger a posting, the less it is likely to remove: small ones first.
        for name, entries in sorted(terms, key=self._size) if len(terms) > 1 else terms:
            hits = self._hits(name, entries, found)
            found = [journal for journal in found if journal in hits]
        for name, entries in _by_name(selector.exclude):
            hits = self._hits(name, entries, found)
            if hits:
                found = [journal for journal in found if journal not in hits]
        return found if in_order else self._in_order(found)

    # Postings.

    def _add_posting(self, journal: str, label: Label) -> None:
        name, value = label.name, label.value
        if name == NAME_LABEL:
            return  # the implicit label replaces it
        by_value = self._postings.get(name)
        if by_value is None:
            by_value = self._postings[name] = {}
            self._present[name] = set()
        posting = by_value.get(value)
        if posting is None:
            by_value[value] = journal
            if name in self._values:
                self._values[name].add(value)
        elif type(posting) is set:
            posting.add(journal)
        elif posting != journal:
            by_value[value] = {str(posting), journal}
        self._present[name].add(journal)

    def _remove_postings(self, journal: str, labels: LabelSet) -> None:
        for label in labels.labels:
            name, value = label.name, label.value
            by_value = self._postings.get(name)
            if by_value is None:
                continue  # `name`, or a label given twice
            posting = by_value.get(value)
            if type(posting) is set:
                posting.discard(journal)
            if posting == journal or not posting:
                del by_value[value]
                if name in self._values:
                    self._values[name].discard(value)
            self._present[name].discard(journal)
            if not by_value:
                del self._postings[name], self._present[name]
                self._values.pop(name, None)

    def _posting(self, name: str, value: str) -> Collection[str]:
        posting = self._postings.get(name, {}).get(value, set())
        return posting if type(posting) is set else (str(posting),)

    def _prefixed_values(self, name: str, prefix: str) -> Iterator[str]:
        values = self._sorted_values(name)
        low, high = values.prefixed(prefix)
        items = values.items()
        return (items[index] for index in range(low, high))

    def _sorted_values(self, name: str) -> _SortedStrings:
        values = self._values.get(name)
        if values is None:
            values = _SortedStrings(self._postings.get(name, ()))
            if name in self._postings:
                self._values[name] = values
        return values

    # One name of a selector with its entries, of which any may match.

    def _size(self, term: tuple[str, list[Label]]) -> int:
        """About how many journals a term matches."""
        name, entries = term
        return sum(self._entry_size(name, entry) for entry in entries)

    def _entry_size(self, name: str, entry: Label) -> int:
        if name == NAME_LABEL:
            if entry.value and not entry.prefix:
                return 1
            low, high = self._names.prefixed(entry.value)
            return high - low
        if name not in self._postings:
            return 0
        if not entry.value:
            return len(self._present[name])
        if entry.prefix:
            # Counting would touch every value of the range: assume that journals are spread evenly.
            low, high = self._sorted_values(name).prefixed(entry.value)
            return (high - low) * len(self._present[name]) // len(self._postings[name])
        return len(self._posting(name, entry.value))

    def _candidates(self, name: str, entries: list[Label]) -> list[str]:
        """All journals that the term matches; in order if it is `name`."""
        if name == NAME_LABEL:
            return self._candidates_by_name(entries)
        if len(entries) == 1:
            return list(self._entry_posting(name, entries[0]))
        found: set[str] = set()
        for entry in entries:
            found.update(self._entry_posting(name, entry))
        return list(found)

    def _candidates_by_name(self, entries: list[Label]) -> list[str]:
        ranges = []
        items = self._names.items()
        for entry in entries:
            if entry.prefix or not entry.value:
                ranges.append(self._names.prefixed(entry.value))
            elif entry.value in self._labels:
                at = bisect_left(items, entry.value)
                ranges.append((at, at + 1))
        found: list[str] = []
        end = 0
        for low, high in sorted(ranges):
            found.extend(items[max(low, end) : high])
            end = max(end, high)
        return found

    def _entry_posting(self, name: str, entry: Label) -> Collection[str]:
        if not entry.value:
            return self._present.get(name, ())
        if not entry.prefix:
            return self._posting(name, entry.value)
        found: set[str] = set()
        for value in self._prefixed_values(name, entry.value):
            found.update(self._posting(name, value))
        return found

    def _hits(self, name: str, entries: list[Label], among: list[str]) -> Collection[str]:
        """Those of `among` that the term matches, and maybe others that it matches."""
        if name == NAME_LABEL:
            test = _name_test(entries)
            return {journal for journal in among if test(journal)}
        if len(entries) == 1 and not (entries[0].prefix and entries[0].value):
            return self._entry_posting(name, entries[0])
        # Postings may be far larger than `among`, as may be their number.
        hits: set[str] = set()
        wanted = set(among)
        for entry in entries:
            if not entry.prefix or not entry.value:
                hits.update(wanted.intersection(self._entry_posting(name, entry)))
            elif self._entry_size(name, entry) <= len(among):
                hits.update(self._entry_posting(name, entry))
            else:
                hits.update(journal for journal in among if self._has_prefix(journal, name, entry.value))
        return hits

    def _has_prefix(self, journal: str, name: str, prefix: str) -> bool:
        labels = self._labels[journal].labels
        return any(label.name == name and label.value.startswith(prefix) for label in labels)

    def _in_order(self, found: list[str]) -> list[str]:
        if len(found) * 8 < len(self._labels):
            found.sort()
            return found
        chosen = set(found)  # for many, walking the sorted names is quicker than sorting
        return [journal for journal in self._names.items() if journal in chosen]


def _by_name(labels: LabelSet) -> _Terms:
    if len(labels.labels) < 2:
        return [(label.name, [label]) for label in labels.labels]
    by_name = attrgetter("name")
    return [
        (name, list(entries)) for name, entries in groupby(sorted(labels.labels, key=by_name), key=by_name)
    ]


def _name_test(entries: list[Label]) -> Callable[[str], bool]:
    exact = {entry.value for entry in entries if entry.value and not entry.prefix}
    prefixes = tuple(entry.value for entry in entries if entry.prefix or not entry.value)
    return lambda journal: journal in exact or journal.startswith(prefixes)

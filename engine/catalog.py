"""The catalog: which journals exist, and how they are found. It follows the coordinator's keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from broadsheet.engine.coordinator import KeyValue
from broadsheet.engine.errors import CorruptData, ValidationError
from broadsheet.engine.journal.log_format import JournalState
from broadsheet.engine.journal.replica import Replica
from broadsheet.engine.journal.spec import JournalSpec, SuspendLevel
from broadsheet.engine.key_value import Change
from broadsheet.engine.labels import LabelSelector, SelectorIndex
from broadsheet.engine.service import Claims, ListedJournal, Route

__all__ = ["ITEMS", "Catalog", "CatalogChange", "JournalEntry", "decode_item", "encode_spec", "item_key", "item_name"]

ITEMS = b"/broadsheet/items/"
"""Prefix of the keys of journal specs; their values are the specs' JSON."""


class JournalEntry:
    """A journal that exists. Its replica is made at its first use; until then `state` is what a restart found."""

    __slots__ = ("create_revision", "mod_revision", "replica", "spec", "state")

    def __init__(self, spec: JournalSpec, mod_revision: int, create_revision: int) -> None:
        self.spec = spec
        self.mod_revision = mod_revision
        self.create_revision = create_revision
        self.state: JournalState | None = None
        self.replica: Replica | None = None

    @property
    def is_fully_suspended(self) -> bool:
        suspend = self.spec.suspend
        return suspend is not None and suspend.level == SuspendLevel.FULL

    def listed(self, route: Route) -> ListedJournal:
        """As `list` and `watch` show it: a suspended journal has no route."""
        shown = Route() if self.is_fully_suspended else route
        return ListedJournal(self.spec, self.mod_revision, shown, self.create_revision)


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """What a change of the coordinator's keys meant: entries that are gone, and those whose spec is another one
    (with the spec that they had)."""

    removed: tuple[JournalEntry, ...]
    updated: tuple[tuple[JournalEntry, JournalSpec], ...]


class Catalog:
    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}
        self._index = SelectorIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> JournalEntry | None:
        return self._entries.get(name)

    def entries(self) -> Iterable[JournalEntry]:
        return self._entries.values()

    def load(self, items: Iterable[KeyValue]) -> None:
        """Take in all that a restart found."""
        for item in items:
            entry = decode_item(item)
            self._entries[entry.spec.name] = entry
        self._index.add_many((name, entry.spec.labels) for name, entry in self._entries.items())

    def select(self, selector: LabelSelector, claims: Claims | None) -> Sequence[str]:
        """Names of the selected journals that the claims show, in byte order."""
        names = self._index.select(selector)
        if claims is None:
            return names
        allowed = claims.selector.with_prefix_rewritten()
        return [
            name for name in names if allowed.matches(self._entries[name].spec.labels.with_name_label(name))
        ]

    def follow(self, change: Change) -> CatalogChange:
        removed: list[JournalEntry] = []
        updated: list[tuple[JournalEntry, JournalSpec]] = []
        for key in change.deletes:
            if key.startswith(ITEMS):
                self._remove(item_name(key), removed)
        for item in change.puts:
            if not item.key.startswith(ITEMS):
                continue
            new = decode_item(item)
            name = new.spec.name
            old = self._entries.get(name)
            if old is not None and old.create_revision != new.create_revision:
                self._remove(name, removed)
                old = None
            if old is None:
                self._entries[name] = new
                self._index.add(name, new.spec.labels)
                continue
            before = old.spec
            if before.labels != new.spec.labels:
                self._index.add(name, new.spec.labels)
            old.spec, old.mod_revision = new.spec, new.mod_revision
            updated.append((old, before))
        return CatalogChange(tuple(removed), tuple(updated))

    def _remove(self, name: str, removed: list[JournalEntry]) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._index.discard(name)
            removed.append(entry)


def item_key(name: str) -> bytes:
    return ITEMS + name.encode()


def item_name(key: bytes) -> str:
    return key[len(ITEMS) :].decode()


def encode_spec(spec: JournalSpec) -> bytes:
    return json.dumps(spec.to_json(), separators=(",", ":"), ensure_ascii=False).encode()


def decode_item(item: KeyValue) -> JournalEntry:
    """Raises `CorruptData`: nothing but an engine writes under `ITEMS`."""
    try:
        spec = JournalSpec.from_json(json.loads(item.value))
    except (ValueError, ValidationError) as error:
        raise CorruptData(
            f"the spec under {item.key!r} cannot be read: {error}", path="the coordinator's keys"
        ) from error
    return JournalEntry(spec, item.mod_revision, item.create_revision)

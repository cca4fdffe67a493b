"""The state behind a coordinator: revisioned keys, transactions, leases. Sans-I/O (design.md §5).

etcd's model and no more. Nothing changes but through `apply(change)`, and a `Change` says all that one
transaction did, so that the changes are the log of the store:

    plan(...)            what a transaction would do: a `Change`, or None if that is nothing
      -> encode()        bytes for a log; the owner makes them durable
      -> apply(change)   now, or at the next start with `Change.decode`

Rules. The revision of an empty store is 1. A change that puts or deletes keys has the next revision, all its
keys the same; one that only grants or ends leases has the store's. Deleting a key that is not there is no
change. A put's lease replaces the one that the key had. Ending a lease deletes its keys, at one revision.
Lease ids are never used twice. `apply` ignores a change that the store has already, so a log may overlap with
the snapshot it follows, and refuses one that comes too early.

The last changes are kept (`changes_after`) so that a watch can resume; older ones are `Compacted`. A snapshot
is a copy of the mapping of immutable values: cheap to take in the loop, to be encoded in a thread.
"""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from broadsheet.engine.coordinator import (
    Compacted,
    Compare,
    CompareTarget,
    Delete,
    DuplicateKey,
    KeyValue,
    LeaseNotFound,
    Operation,
    Put,
    RangeResult,
)

__all__ = [
    "Change",
    "KeyValueStore",
    "Lease",
    "Plan",
    "Snapshot",
    "encode_snapshot",
]

_FORMAT = 1
_CHUNK_BYTES = 1 << 20
_HISTORY_CHANGES = 1_000
_HISTORY_KEYS = 20_000
_FEW = 64

_Json = str | dict[str, str]
_Row = tuple[_Json, _Json, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Lease:
    """`ttl_s` in seconds. When it ends is not part of the state: after a restart it has its full TTL
    again."""

    id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """What one transaction did. `revision` is the store's after it."""

    revision: int
    puts: tuple[KeyValue, ...] = ()
    deletes: tuple[bytes, ...] = ()
    leases_granted: tuple[Lease, ...] = ()
    leases_ended: tuple[int, ...] = ()

    def writes(self) -> bool:
        """Whether it changes keys, and so has a revision of its own."""
        return bool(self.puts or self.deletes)

    def encode(self) -> bytes:
        """As JSON (docs/format.md): keys and values as text where they are UTF-8, else `{"base64": ...}`."""
        document: dict[str, object] = {"format": _FORMAT, "revision": self.revision}
        if self.puts:
            document["puts"] = [_row(item) for item in self.puts]
        if self.deletes:
            document["deletes"] = [_to_json(key) for key in self.deletes]
        if self.leases_granted:
            document["granted"] = [[lease.id, lease.ttl_s] for lease in self.leases_granted]
        if self.leases_ended:
            document["ended"] = list(self.leases_ended)
        return _dumps(document).encode()

    @staticmethod
    def decode(data: bytes) -> Change:
        """The inverse of `encode`. Raises ValueError for anything else."""
        try:
            document = _loads(data)
            return Change(
                revision=document["revision"],
                puts=_items(document.get("puts", ())),
                deletes=tuple(map(_from_json, document.get("deletes", ()))),
                leases_granted=tuple(Lease(id, ttl_s) for id, ttl_s in document.get("granted", ())),
                leases_ended=tuple(document.get("ended", ())),
            )
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ValueError(f"not a change of a key-value store: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """Whether the compares hold, and what the transaction does. `change` is None if that is nothing."""

    succeeded: bool
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A store's state as of one moment. Immutable: may be read in another thread."""

    revision: int
    items: Mapping[bytes, KeyValue]
    leases: tuple[Lease, ...]
    last_lease: int


class KeyValueStore:
    """See the module. `history_changes` and `history_keys` bound the changes kept for watches, by their
    number and by the sum of their keys."""

    def __init__(self, *, history_changes: int = _HISTORY_CHANGES, history_keys: int = _HISTORY_KEYS) -> None:
        self._revision = 1
        self._items: dict[bytes, KeyValue] = {}
        self._order: list[bytes] | None = []  # sorted keys; None after a bulk change, until they are asked for
        self._leases: dict[int, Lease] = {}
        self._lease_keys: dict[int, dict[bytes, None]] = {}
        self._last_lease = 0
        self._history: deque[Change] = deque()
        self._history_size = 0
        self._history_changes = history_changes
        self._history_keys = history_keys

    # --- Reading --------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def leases(self) -> Mapping[int, Lease]:
        """Live leases by id: a view."""
        return MappingProxyType(self._leases)

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: bytes) -> KeyValue | None:
        return self._items.get(key)

    def range(self, prefix: bytes = b"") -> RangeResult:
        """All keys that start with `prefix`, in order."""
        order = self._order
        if order is None:
            order = self._order = sorted(self._items)
        if prefix:
            start = bisect_left(order, prefix)
            end = _prefix_end(prefix)
            order = order[start : bisect_left(order, end, start) if end else len(order)]
        items = self._items
        return RangeResult(tuple([items[key] for key in order]), self._revision)

    def lease_keys(self, lease: int) -> tuple[bytes, ...]:
        """Keys put under a lease."""
        return tuple(self._lease_keys.get(lease, ()))

    def changes_after(self, revision: int) -> list[Change]:
        """The changes of keys with greater revisions, in order. Raises `Compacted` if not all of them are
        kept."""
        missing = self._revision - revision
        if missing <= 0:
            return []
        if missing > len(self._history):
            kept = self._revision - len(self._history)
            raise Compacted(
                f"changes after revision {revision} are no longer kept (the oldest is {kept + 1})",
                hint="load the range again and watch from its revision",
            )
        return [self._history[index] for index in range(len(self._history) - missing, len(self._history))]

    # --- Planning -------------------------------------------------------------------------------------------

    def plan(self, compares: Iterable[Compare], operations: Iterable[Operation]) -> Plan:
        """What a transaction does, without doing it.

        Raises `DuplicateKey` (whatever the compares say) and `LeaseNotFound` (if they hold).
        """
        operations = tuple(operations)
        if len(operations) > 1 and len({operation.key for operation in operations}) < len(operations):
            raise DuplicateKey(f"duplicate key in a transaction: {_first_duplicate(operations)!r}")
        if not all(map(self._holds, compares)):
            return Plan(False)
        revision = self._revision + 1
        puts: list[KeyValue] = []
        deletes: list[bytes] = []
        for operation in operations:
            old = self._items.get(operation.key)
            if isinstance(operation, Put):
                if operation.lease and operation.lease not in self._leases:
                    raise _lease_not_found(operation.lease)
                puts.append(
                    KeyValue(
                        operation.key,
                        operation.value,
                        revision if old is None else old.create_revision,
                        revision,
                        1 if old is None else old.version + 1,
                        operation.lease,
                    )
                )
            elif old is not None:
                deletes.append(operation.key)
        if not puts and not deletes:
            return Plan(True)
        return Plan(True, Change(revision, tuple(puts), tuple(deletes)))

    def plan_grant(self, ttl_s: float) -> Change:
        """A new lease: `leases_granted[0]`."""
        return Change(self._revision, leases_granted=(Lease(self._last_lease + 1, ttl_s),))

    def plan_end(self, lease: int) -> Change:
        """The end of a lease, and of its keys. Raises `LeaseNotFound`."""
        if lease not in self._leases:
            raise _lease_not_found(lease)
        keys = tuple(self._lease_keys[lease])
        return Change(self._revision + 1 if keys else self._revision, deletes=keys, leases_ended=(lease,))

    # --- Changing -------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> bool:
        """Make a change, and keep it for watches. False if the store has it already.

        Raises ValueError if it is not the next one, or contradicts the one that had its revision.
        """
        writes = change.writes()
        if writes and change.revision <= self._revision:
            at = len(self._history) - 1 - (self._revision - change.revision)
            if at >= 0 and self._history[at] != change:
                raise ValueError(f"two changes claim revision {change.revision}")
            return False
        if change.revision > self._revision + writes:
            raise ValueError(f"a change of revision {change.revision} after revision {self._revision}")
        for lease in change.leases_granted:
            self._leases[lease.id] = lease
            self._lease_keys.setdefault(lease.id, {})
            self._last_lease = max(self._last_lease, lease.id)
        if writes:
            self._change_keys(change)
        for ended in change.leases_ended:
            self._leases.pop(ended, None)
            self._lease_keys.pop(ended, None)
        return True

    def _change_keys(self, change: Change) -> None:
        items = self._items
        if len(change.puts) + len(change.deletes) > _FEW:
            self._order = None  # one sort later is cheaper
        order = self._order
        for key in change.deletes:
            old = items.pop(key, None)
            if old is not None:
                self._detach(old)
                if order is not None:
                    del order[bisect_left(order, key)]
        for item in change.puts:
            old = items.get(item.key)
            if old is not None:
                self._detach(old)
            elif order is not None:
                insort(order, item.key)
            items[item.key] = item
            if item.lease:
                self._lease_keys.setdefault(item.lease, {})[item.key] = None
        self._revision = change.revision
        self._history.append(change)
        self._history_size += len(change.puts) + len(change.deletes)
        while len(self._history) > self._history_changes or (
            self._history_size > self._history_keys and len(self._history) > 1
        ):
            oldest = self._history.popleft()
            self._history_size -= len(oldest.puts) + len(oldest.deletes)

    def _detach(self, old: KeyValue) -> None:
        if old.lease:
            self._lease_keys.get(old.lease, {}).pop(old.key, None)

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        if item is None:  # a missing key has no value, not an empty one
            return compare.target is not CompareTarget.VALUE and compare.value == 0
        value: int | bytes = getattr(item, compare.target.value)
        return value == compare.value

    # --- Snapshots ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state now. Costs one copy of the mapping, not of keys and values."""
        return Snapshot(
            self._revision,
            MappingProxyType(self._items.copy()),
            tuple(self._leases.values()),
            self._last_lease,
        )

    @classmethod
    def restore(
        cls,
        chunks: Iterable[bytes],
        *,
        history_changes: int = _HISTORY_CHANGES,
        history_keys: int = _HISTORY_KEYS,
    ) -> KeyValueStore:
        """A store from the chunks of `encode_snapshot`, without history. Raises ValueError if they are not
        that, or not all."""
        store = cls(history_changes=history_changes, history_keys=history_keys)
        chunks = iter(chunks)
        try:
            header = _loads(next(chunks, b""))
            store._revision = header["revision"]
            store._last_lease = header["last_lease"]
            for id, ttl_s in header["leases"]:
                store._leases[id] = Lease(id, ttl_s)
                store._lease_keys[id] = {}
            for chunk in chunks:
                for item in _items(_loads(chunk)["items"]):
                    store._items[item.key] = item
                    if item.lease:
                        store._lease_keys[item.lease][item.key] = None
            if len(store._items) != header["keys"]:
                raise ValueError(f"a snapshot of {header['keys']} keys holds {len(store._items)}")
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ValueError(f"not a snapshot of a key-value store: {error!r}") from None
        store._order = None
        return store


def encode_snapshot(snapshot: Snapshot, *, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """JSON chunks of at most `chunk_bytes`, except for what is larger by itself: the header, or one key."""
    yield _dumps(
        {
            "format": _FORMAT,
            "revision": snapshot.revision,
            "keys": len(snapshot.items),
            "last_lease": snapshot.last_lease,
            "leases": [[lease.id, lease.ttl_s] for lease in snapshot.leases],
        }
    ).encode()
    head, tail = b'{"format":%d,"items":[' % _FORMAT, b"]}"
    room = chunk_bytes - len(head) - len(tail)
    rows: list[bytes] = []
    size = 0
    for item in snapshot.items.values():
        row = _dumps(_row(item)).encode()
        if rows and size + len(row) + 1 > room:
            yield head + b",".join(rows) + tail
            rows, size = [], 0
        rows.append(row)
        size += len(row) + 1
    if rows:
        yield head + b",".join(rows) + tail


_dumps = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def _loads(data: bytes) -> dict[str, Any]:
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError("not a document of a key-value store, or of a later format")
    return document


def _to_json(data: bytes) -> _Json:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _from_json(value: _Json) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"], validate=True)


def _row(item: KeyValue) -> _Row:
    return (
        _to_json(item.key),
        _to_json(item.value),
        item.create_revision,
        item.mod_revision,
        item.version,
        item.lease,
    )


def _items(rows: Iterable[_Row]) -> tuple[KeyValue, ...]:
    return tuple(
        [
            KeyValue(_from_json(key), _from_json(value), create, mod, version, lease)
            for key, value, create, mod, version, lease in rows
        ]
    )


def _prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`; empty if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b""


def _first_duplicate(operations: tuple[Put | Delete, ...]) -> bytes:
    seen: set[bytes] = set()
    for operation in operations:
        if operation.key in seen:
            return operation.key
        seen.add(operation.key)
    return b""


def _lease_not_found(lease: int) -> LeaseNotFound:
    return LeaseNotFound(f"lease {lease} not found", hint="it expired or was revoked: grant a new one")

"""`KeyValueStore` against a naive model, its log and its snapshots."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
)
from broadsheet.engine.key_value import Change, KeyValueStore, Lease, Snapshot, encode_snapshot

KEYS = [b"", b"\x00", b"a", b"a/", b"a/1", b"a/2", b"a0", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
keys = st.sampled_from(KEYS)
values = st.one_of(st.binary(max_size=6), st.sampled_from([b'{"json": "\\""}', "žluťoučký".encode(), b"\xed\xa0\x80"]))


@dataclass
class Model:
    """The rules, said as plainly as can be."""

    revision: int = 1
    items: dict[bytes, KeyValue] = field(default_factory=dict)
    leases: dict[int, float] = field(default_factory=dict)
    last_lease: int = 0

    def holds(self, compare: Compare) -> bool:
        item = self.items.get(compare.key)
        if item is None:
            return compare.value == 0
        return bool(getattr(item, compare.target.name.lower()) == compare.value)

    def transact(self, operations: list[Operation]) -> None:
        before = dict(self.items)
        for operation in operations:
            if isinstance(operation, Delete):
                self.items.pop(operation.key, None)
                continue
            old = self.items.get(operation.key)
            item = KeyValue(operation.key, operation.value, self.revision + 1, self.revision + 1, 1, operation.lease)
            if old is not None:
                item = replace(item, create_revision=old.create_revision, version=old.version + 1)
            self.items[operation.key] = item
        self.revision += self.items != before

    def end(self, lease: int) -> None:
        del self.leases[lease]
        self.transact([Delete(key) for key, item in self.items.items() if item.lease == lease])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.store = KeyValueStore(history_changes=5, history_keys=12)
        self.log: list[bytes] = []
        self.base: list[bytes] = []
        self.history: dict[int, dict[bytes, KeyValue]] = {1: {}}

    @initialize()
    def start(self) -> None:
        self.base = list(encode_snapshot(self.store.snapshot()))

    def commit(self, change: Change | None) -> None:
        if change is None:
            return
        before = self.store.snapshot()
        data = change.encode()
        assert Change.decode(data) == change
        assert self.store.range().revision == before.revision  # a plan changes nothing
        assert self.store.apply(Change.decode(data))
        assert not change.writes() or not self.store.apply(change)  # twice is once
        assert dict(before.items) == self.history[before.revision]  # a snapshot stays as it is
        self.log.append(data)

    @rule(data=st.data(), operations=st.lists(st.tuples(keys, st.one_of(st.none(), values)), max_size=4))
    def transact(self, data: st.DataObject, operations: list[tuple[bytes, bytes | None]]) -> None:
        leases = st.sampled_from([0, 0, *self.model.leases])
        chosen: list[Operation] = [
            Delete(key) if value is None else Put(key, value, data.draw(leases)) for key, value in operations
        ]
        named = [key for key, _ in operations]
        if len(set(named)) < len(named):
            with pytest.raises(DuplicateKey):
                self.store.plan((), chosen)
            return
        plan = self.store.plan((), chosen)
        assert plan.succeeded
        self.commit(plan.change)
        self.model.transact(chosen)

    @rule(data=st.data(), key=keys, aspect=st.sampled_from(CompareTarget))
    def compare(self, data: st.DataObject, key: bytes, aspect: CompareTarget) -> None:
        item = self.model.items.get(key)
        options: list[int | bytes] = [0, 1, b""]
        if item is not None:
            options.append(getattr(item, aspect.value))
        compare = Compare(key, aspect, data.draw(st.sampled_from(options)))
        expected = self.model.holds(compare) and not (item is None and aspect is CompareTarget.VALUE)
        plan = self.store.plan((compare,), (Put(key, b"compared"),))
        assert plan.succeeded is expected
        assert (plan.change is not None) is expected
        self.commit(plan.change)
        if expected:
            self.model.transact([Put(key, b"compared")])

    @rule(ttl_s=st.floats(min_value=0.5, max_value=1e6))
    def grant(self, ttl_s: float) -> None:
        change = self.store.plan_grant(ttl_s)
        self.commit(change)
        lease = change.leases_granted[0]
        assert lease.id == self.model.last_lease + 1
        self.model.last_lease = lease.id
        self.model.leases[lease.id] = ttl_s

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.model.leases)))
        self.commit(self.store.plan_end(lease))
        self.model.end(lease)

    @rule(key=keys)
    def unknown_lease(self, key: bytes) -> None:
        gone = self.model.last_lease + 1
        with pytest.raises(LeaseNotFound):
            self.store.plan((), (Put(key, b"", gone),))
        with pytest.raises(LeaseNotFound):
            self.store.plan_end(gone)
        assert not self.store.plan((Compare(key, CompareTarget.VERSION, -1),), (Put(key, b"", gone),)).succeeded

    @rule(chunk_bytes=st.sampled_from([1, 100, 1 << 20]))
    def snapshot(self, chunk_bytes: int) -> None:
        self.base = list(encode_snapshot(self.store.snapshot(), chunk_bytes=chunk_bytes))
        self.log = self.log[-1:]  # a log may overlap with its snapshot

    @rule()
    def restart(self) -> None:
        store = KeyValueStore.restore(self.base, history_changes=5, history_keys=12)
        for data in self.log:
            store.apply(Change.decode(data))
        assert _state(store.snapshot()) == _state(self.store.snapshot())
        self.store = store

    @invariant()
    def agrees(self) -> None:
        self.history[self.model.revision] = dict(self.model.items)
        everything = self.store.range()
        assert everything.revision == self.store.revision == self.model.revision
        assert len(self.store) == len(self.model.items)
        for prefix in KEYS:
            expected = [self.model.items[key] for key in sorted(self.model.items) if key.startswith(prefix)]
            assert list(self.store.range(prefix).items) == expected
            assert self.store.get(prefix) == self.model.items.get(prefix)
        assert {lease.id: lease.ttl_s for lease in self.store.leases.values()} == self.model.leases
        for lease in self.model.leases:
            under = [item.key for item in self.model.items.values() if item.lease == lease]
            assert sorted(self.store.lease_keys(lease)) == sorted(under)

    @invariant()
    def history_leads_to_now(self) -> None:
        kept = True
        for revision in range(self.model.revision + 1, 0, -1):
            try:
                changes = self.store.changes_after(revision)
            except Compacted:
                kept = False
                continue
            assert kept, "a hole in the history"
            if revision > self.model.revision:
                assert changes == []
                continue
            assert [change.revision for change in changes] == list(range(revision + 1, self.model.revision + 1))
            items = dict(self.history[revision])
            for change in changes:
                for key in change.deletes:
                    del items[key]
                items.update((item.key, item) for item in change.puts)
            assert items == self.model.items


def _state(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.revision, dict(snapshot.items), set(snapshot.leases), snapshot.last_lease


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_empty() -> None:
    store = KeyValueStore()
    assert store.revision == 1
    assert store.range().items == ()
    assert store.changes_after(1) == []
    with pytest.raises(Compacted):
        store.changes_after(0)


def test_changes_must_come_in_order() -> None:
    store = KeyValueStore()
    first = store.plan((), (Put(b"a", b"1"),)).change
    assert first is not None
    store.apply(first)
    second = store.plan((), (Put(b"a", b"2"),)).change
    assert second is not None
    behind = KeyValueStore()
    with pytest.raises(ValueError, match="revision 3 after revision 1"):
        behind.apply(second)
    other = replace(first, puts=(replace(first.puts[0], value=b"!"),))
    with pytest.raises(ValueError, match="two changes claim revision 2"):
        store.apply(other)
    with pytest.raises(ValueError, match="revision 3 after revision 2"):
        store.apply(Change(3, leases_granted=(Lease(1, 1.0),)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format":2,"revision":1}',
        b'{"format":1}',
        b"\xff",
        b'{"format":1,"revision":2,"puts":[1]}',
    ],
)
def test_not_a_change(data: bytes) -> None:
    with pytest.raises(ValueError):
        Change.decode(data)


def test_not_a_snapshot() -> None:
    store = KeyValueStore()
    for number in range(10):
        change = store.plan((), (Put(b"%d" % number, b"x" * 50),)).change
        assert change is not None
        store.apply(change)
    chunks = list(encode_snapshot(store.snapshot(), chunk_bytes=300))
    assert len(chunks) > 3
    assert all(len(chunk) <= 300 for chunk in chunks)
    assert KeyValueStore.restore(iter(chunks)).range() == store.range()
    for broken in ([], chunks[1:], chunks[:-1], [*chunks[:-1], chunks[-1][:-3]], [b"{}"]):
        with pytest.raises(ValueError):
            KeyValueStore.restore(broken)


def test_values_that_are_not_text() -> None:
    every_byte = bytes(range(256))
    for value in (
        every_byte,
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        "\u2028\x00\x7f".encode(),
        b'{"base64": "x"}',
        b"",
    ):
        change = Change(2, (KeyValue(value, value, 2, 2),), (value,))
        assert Change.decode(change.encode()) == change


def test_large_changes_are_fast() -> None:
    value = json.dumps({f"field{number}": f"value {number}" for number in range(22)}).encode()
    assert 450 < len(value) < 550
    store = KeyValueStore()
    plan = store.plan((), [Put(b"/items/%08d" % number, value) for number in range(10_000)])
    assert plan.change is not None
    data = plan.change.encode()
    best_s = min(_timed_s(data) for _ in range(5))
    assert best_s < 0.2
    store.apply(plan.change)
    assert len(store.range(b"/items/0000123").items) == 10


def _timed_s(data: bytes) -> float:
    started = time.perf_counter()
    Change.decode(data)
    return time.perf_counter() - started

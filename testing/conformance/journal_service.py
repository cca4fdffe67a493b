"""What every `JournalService` does: subclass `JournalServiceSuite` in a pytest module and give it one.

    class TestMine(JournalServiceSuite):
        store_url = "file:///"

        @pytest.fixture
        async def service(self):
            async with Engine.in_memory() as engine:
                yield engine

Needs pytest-trio. The service has no journals, and is the test's alone. Time is real: nothing here waits for long, and
each test is bounded by `limit_s`. A service on a network sets `cushion_s` to what a message takes to arrive.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from broadsheet.engine.coordinator import DuplicateKey
from broadsheet.engine.errors import (
    AppendAborted,
    AppendFailed,
    BroadsheetError,
    LocalError,
    NotAuthorized,
    Status,
    ValidationError,
)
from broadsheet.engine.fragments.fragment import EMPTY_SHA1, Fragment
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalChange,
    JournalFlags,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from broadsheet.engine.labels import Label, LabelSelector, LabelSet, parse_selector
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    AppendResponse,
    ApplyRequest,
    ApplyResponse,
    Buffer,
    Capability,
    Claims,
    Content,
    FragmentsRequest,
    FragmentStoreHealthRequest,
    Header,
    JournalService,
    ListedJournal,
    ListRequest,
    ReadRequest,
    ReadResponse,
    Scope,
    SuspendControl,
    WatchChange,
    WatchStream,
)
from broadsheet.testing.simulation.cancellation import cancel_at_step

__all__ = ["JournalServiceSuite", "read_all", "spec_of"]

_ONE, _TWO, _NONE = "conformance/one", "conformance/two", "conformance/none"
_MIB = 1 << 20
_T = TypeVar("_T")


# --- What the tests are written with ----------------------------------------------------------------------


def spec_of(name: str = _ONE, **fields: Any) -> JournalSpec:
    """A valid spec of one replica, without a store. `fragment_*` fields go into its FragmentSpec."""
    inner = {key.removeprefix("fragment_"): fields.pop(key) for key in [*fields] if key.startswith("fragment_")}
    fragment = FragmentSpec(1 << 24, CompressionCodec.NONE, refresh_interval_ns=300 * 10**9)
    return JournalSpec(name, 1, fragment=replace(fragment, **inner), **fields)


async def _apply(service: JournalService, *changes: JournalChange, scope: Scope = UNSCOPED) -> ApplyResponse:
    return await service.apply(ApplyRequest(changes), scope)


async def _create(service: JournalService, *specs: JournalSpec) -> int:
    """Create journals; returns the revision at which they were."""
    response = await _apply(service, *(JournalChange(0, spec) for spec in specs or (spec_of(),)))
    assert response.status == Status.OK
    return response.header.etcd.revision


async def _append(
    service: JournalService, content: Content = b"", journal: str = _ONE, scope: Scope = UNSCOPED, **fields: Any
) -> AppendResponse:
    return await service.append(AppendRequest(journal, **fields), content, scope)


async def _commit(service: JournalService, content: Content = b"", journal: str = _ONE, **fields: Any) -> Fragment:
    """Append, and be OK."""
    response = await _append(service, content, journal, **fields)
    assert response.status == Status.OK
    assert response.commit is not None
    assert response.registers is not None
    return response.commit


async def _registers(service: JournalService, journal: str = _ONE) -> LabelSet:
    response = await _append(service, b"", journal)
    assert response.status == Status.OK
    assert response.registers is not None
    return response.registers


async def _responses(service: JournalService, request: ReadRequest, scope: Scope = UNSCOPED) -> list[ReadResponse]:
    async with service.read(request, scope) as stream:
        return [response async for response in stream]


def _content(responses: Iterable[ReadResponse]) -> bytes:
    return b"".join([bytes(response.content) for response in responses if response.content is not None])


async def read_all(service: JournalService, journal: str = _ONE, offset: int = 0) -> bytes:
    """The journal's bytes from an offset to its end."""
    return _content(await _responses(service, ReadRequest(journal, offset)))


async def _read_one(service: JournalService, request: ReadRequest, scope: Scope = UNSCOPED) -> ReadResponse:
    async with service.read(request, scope) as stream:
        return await anext(aiter(stream))


async def _list(service: JournalService, selector: str = "", scope: Scope = UNSCOPED) -> list[str]:
    response = await service.list(ListRequest(parse_selector(selector)), scope)
    assert response.status == Status.OK
    return [listed.spec.name for listed in response.journals]


async def _find(service: JournalService, name: str = _ONE) -> ListedJournal:
    response = await service.list(ListRequest(LabelSelector(LabelSet.of(name=name))))
    assert len(response.journals) == 1
    return response.journals[0]


async def _suspended(service: JournalService, name: str = _ONE) -> tuple[SuspendLevel, int]:
    suspend = (await _find(service, name)).spec.suspend or Suspend()
    return suspend.level, suspend.offset


async def _fragments(service: JournalService, journal: str = _ONE, **fields: Any) -> list[Fragment]:
    response = await service.fragments(FragmentsRequest(journal, **fields))
    assert response.status == Status.OK
    return [listed.spec for listed in response.fragments]


def _labels(*pairs: tuple[str, str]) -> LabelSet:
    return LabelSet.of(*pairs)


def _may(capability: Capability = Capability.ALL, selector: str = "") -> Scope:
    return Scope(claims=Claims(capability, parse_selector(selector)))


async def _pieces(content: bytes, size: int) -> AsyncIterator[Buffer]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


def _noise(length: int, seed: int = 0) -> bytes:
    """Bytes in which no two places look alike."""
    block = b"".join(hashlib.sha256(b"%d/%d" % (seed, number)).digest() for number in range(2048))
    return (block * (length // len(block) + 1))[:length]


class _Slow:
    """A body that yields its buffers, tells that it has, and then waits to be let on (or fails)."""

    def __init__(self, *buffers: bytes, error: Exception | None = None) -> None:
        self.buffers = buffers
        self.error = error
        self.begun = trio.Event()
        self.go_on = trio.Event()
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        try:
            for buffer in self.buffers:
                yield buffer
            self.begun.set()
            await self.go_on.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


class _Mirror:
    """What a watch has told so far, checked as it comes."""

    def __init__(self) -> None:
        self.journals: dict[str, ListedJournal] = {}
        self.revision = 0
        self.changes = 0

    def take(self, change: WatchChange) -> None:
        names = [listed.spec.name for listed in change.upserted]
        assert names == sorted(names)
        assert list(change.deleted) == sorted(change.deleted)
        assert not set(names) & set(change.deleted), "a journal both here and gone"
        revision = change.header.etcd.revision
        if self.changes:
            assert names or change.deleted, "a change of nothing"
            assert revision > self.revision, "revisions went back"
        for listed in change.upserted:
            assert self.changes == 0 or listed.mod_revision > self.revision, f"{listed.spec.name} was told before"
            assert listed.mod_revision <= revision
            self.journals[listed.spec.name] = listed
        for name in change.deleted:
            assert self.journals.pop(name, None) is not None, f"{name} was never there"
        self.revision = revision
        self.changes += 1

    async def until(self, watch: WatchStream, holds: Callable[[], bool]) -> None:
        while not holds():
            self.take(await anext(watch))

    @property
    def names(self) -> list[str]:
        return sorted(self.journals)


def _check_header(header: Header | None) -> Header:
    assert header is not None
    assert header.etcd.cluster_id != 0
    assert header.etcd.member_id != 0
    assert header.etcd.revision > 0
    assert header.etcd.raft_term != 0
    assert header.process_id.suffix
    return header


def _check_routed(header: Header | None) -> Header:
    header = _check_header(header)
    assert header.process_id in header.route.members
    assert 0 <= header.route.primary < len(header.route.members)
    assert not header.route.endpoints or len(header.route.endpoints) == len(header.route.members)
    return header


def _check_unrouted(header: Header | None) -> Header:
    header = _check_header(header)
    assert header.route.members == ()
    assert header.route.primary == -1
    return header


def _check_stream(responses: Sequence[ReadResponse], journal: str = _ONE) -> None:
    """Whatever is read: header on the first only, content only after its metadata, adjacent, within the fragment."""
    assert responses[0].content is None
    _check_header(responses[0].header)
    fragment: Fragment | None = None
    position = 0
    for number, response in enumerate(responses):
        assert (response.header is None) == (number > 0)
        if response.content is None:
            fragment = response.fragment
            if response.status == Status.OK:
                assert fragment is not None
                assert fragment.journal == journal
                assert fragment.begin <= response.offset < fragment.end <= response.write_head
                if number:
                    assert response.offset >= position
            position = response.offset
            continue
        assert response.status == Status.OK
        assert fragment is not None, "content without metadata"
        assert response.write_head == 0
        assert response.fragment is None
        assert response.fragment_url == ""
        assert len(response.content) > 0
        assert response.offset == position, "not adjacent"
        position += len(response.content)
        assert position <= fragment.end


def _bounded(suite: type[_T]) -> type[_T]:
    """Bound each test by `limit_s`: a service that hangs fails one test and not the run."""

    def bound(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        async def run(self: Any, *args: Any, **fixtures: Any) -> None:
            with trio.fail_after(self.limit_s):
                await test(self, *args, **fixtures)

        return run

    for name, test in list(vars(suite).items()):
        if name.startswith("test_") and inspect.iscoroutinefunction(test):
            setattr(suite, name, bound(test))
    return suite


def _label(name: str, value: str = "v") -> LabelSet:
    return LabelSet((Label(name, value),))


_TOO_SHORT = "invalid length (1; expected 2 <= length <= 64)"
_OUT_OF_ORDER = LabelSet((Label("bbb", "1"), Label("aaa", "1")))
_ORDER_TEXT = "Labels not in unique, sorted order (index 1; label name aaa <= bbb)"

_BAD_NAMES = [
    ("abc", "invalid length (3; expected 4 <= length <= 512)"),
    ("a" * 513, "invalid length (513; expected 4 <= length <= 512)"),
    ("ö" * 257, "invalid length (514; expected 4 <= length <= 512)"),
    ("not a token", "not a valid token (not a token)"),
    ("a//b", "must be a clean path (a//b)"),
    ("a/b/../c", "must be a clean path (a/b/../c)"),
    ("abcd/", "must be a clean path (abcd/)"),
    ("/abcd", "cannot begin with '/' (/abcd)"),
]
_BAD_JOURNALS = [
    *((name, f"Journal: {text}") for name, text in _BAD_NAMES),
    ("abcd;", "Journal.metadata path segment: invalid length (0; expected 1 <= length <= 512)"),
    ("abcd;/x", "Journal.metadata path segment: cannot begin with '/' (/x)"),
    ("abcd;x y", "Journal.metadata path segment: not a valid token (x y)"),
]
_BAD_APPENDS: list[tuple[dict[str, Any], str]] = [
    ({"offset": -1}, "invalid Offset (-1; expected >= 0)"),
    ({"check_registers": LabelSelector(_label("a"))}, f"CheckRegisters.Include.Labels[0].Name: {_TOO_SHORT}"),
    ({"check_registers": LabelSelector(exclude=_label("a"))}, f"CheckRegisters.Exclude.Labels[0].Name: {_TOO_SHORT}"),
    ({"union_registers": _label("a")}, f"UnionRegisters.Labels[0].Name: {_TOO_SHORT}"),
    ({"union_registers": _label("aa", "a b")}, "UnionRegisters.Labels[0].Value: not a valid token (a b)"),
    ({"union_registers": _OUT_OF_ORDER}, f"UnionRegisters: {_ORDER_TEXT}"),
    ({"subtract_registers": _label("a")}, f"SubtractRegisters.Labels[0].Name: {_TOO_SHORT}"),
    ({"subtract_registers": _OUT_OF_ORDER}, f"SubtractRegisters: {_ORDER_TEXT}"),
]
_BAD_READS: list[tuple[dict[str, Any], str]] = [
    ({"offset": -2}, "invalid Offset (-2; expected -1 <= Offset <= MaxInt64)"),
    ({"offset": 5, "end_offset": 4}, "invalid EndOffset (4; expected 0 or Offset <= EndOffset)"),
]
_BAD_SELECTORS = [
    (LabelSelector(_label("prefix", "conf")), "Selector.Include.Labels[\"prefix\"]: expected trailing '/' (conf)"),
    (LabelSelector(exclude=_label("prefix", "a")), "Selector.Exclude.Labels[\"prefix\"]: expected trailing '/' (a)"),
    (LabelSelector(_label("a")), f"Selector.Include.Labels[0].Name: {_TOO_SHORT}"),
    (LabelSelector(exclude=_OUT_OF_ORDER), f"Selector.Exclude: {_ORDER_TEXT}"),
]
_BAD_FRAGMENT_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"begin_mod_time": 10, "end_mod_time": 9}, "invalid EndModTime (9 must be after 10)"),
    ({"next_page_token": -1}, "invalid NextPageToken (-1; must be >= 0)"),
    ({"page_limit": -1}, "invalid PageLimit (-1; must be >= 0 and <= 10000)"),
    ({"page_limit": 10_001}, "invalid PageLimit (10001; must be >= 0 and <= 10000)"),
    ({"signature_ttl_s": 0.0}, "invalid SignatureTTL (0s; must be > 0s)"),
    ({"signature_ttl_s": -90.0}, "invalid SignatureTTL (-1m30s; must be > 0s)"),
]
_BAD_CHANGES = [
    (JournalChange(0, spec_of(), _ONE), "both Upsert and Delete are set (expected exactly one)"),
    (JournalChange(-2, spec_of()), "invalid ExpectModRevision (-2; expected >= 0 or -1)"),
    (JournalChange(0, delete=_ONE), "invalid ExpectModRevision (0; expected > 0 or -1)"),
    (JournalChange(-2, delete=_ONE), "invalid ExpectModRevision (-2; expected > 0 or -1)"),
    (JournalChange(0), "neither Upsert nor Delete are set (expected exactly one)"),
]
_BAD_CHANGES_WITHIN = [
    (
        JournalChange(0, replace(spec_of(), replication=0)),
        "Upsert: invalid Replication (0; expected 1 <= Replication <= 5)",
    ),
    (JournalChange(0, spec_of("abc")), "Upsert.Name: invalid length (3; expected 4 <= length <= 512)"),
    (
        JournalChange(0, spec_of("abcd;m")),
        "Upsert: Name cannot have a metadata path segment (;m; expected no segment)",
    ),
    (
        JournalChange(0, spec_of(fragment_length=1)),
        "Upsert.Fragment: invalid Length (1; expected 1024 <= length <= 17179869184)",
    ),
    (
        JournalChange(0, spec_of(fragment_compression_codec=CompressionCodec.INVALID)),
        "Upsert.Fragment.CompressionCodec: invalid value (INVALID)",
    ),
    (JournalChange(0, spec_of(flags=3)), "Upsert.Flags: invalid combination (3)"),
    (JournalChange(0, spec_of(labels=_label("name", "x"))), 'Upsert: Labels cannot include label "name"'),
    (JournalChange(0, spec_of(labels=_label("a"))), f"Upsert.Labels.Labels[0].Name: {_TOO_SHORT}"),
    (JournalChange(-1, delete="abc"), "Delete: invalid length (3; expected 4 <= length <= 512)"),
]

_CHUNKINGS = [
    (0, 1),
    (1, 1),
    (1000, 1),
    (100_000, 333),
    (_MIB - 1, 32_736),
    (_MIB, _MIB),
    (_MIB, 65_536),
    (_MIB + 1, _MIB),
    (_MIB + 1, 65_537),
    (3 * _MIB + 7, 100_000),
    (5 * _MIB, 5 * _MIB),
]


@_bounded
class JournalServiceSuite:
    """See the module."""

    limit_s = 10.0
    cushion_s = 0.0
    store_url: str | None = None
    """A fragment store that journals of the service may use; None leaves out what needs one."""
    checks_offset_zero = True
    """False for a service whose wire cannot say an explicit append offset of 0: it refuses that with a `LocalError`."""
    takes_claims = True
    """False for a service that ignores `Scope.claims`, because its claims are those of its connection."""

    @pytest.fixture
    async def service(self) -> JournalService:
        raise NotImplementedError("override the `service` fixture")

    async def settle(self) -> None:
        """Until everything that was begun is waiting for something."""
        await trio.testing.wait_all_tasks_blocked(self.cushion_s)

    async def until_persisted(self, service: JournalService, count: int, journal: str = _ONE) -> list[Fragment]:
        """Until the store has the journal's first `count` fragments. The seam has no event for that."""
        while True:
            found = await _fragments(service, journal)
            if sum(bool(fragment.backing_store) for fragment in found) >= count:
                return found
            await trio.sleep(0.005)

    def _store(self) -> str:
        if self.store_url is None:
            pytest.skip("this service has no fragment store to test with")
        return self.store_url

    def _need_claims(self) -> None:
        if not self.takes_claims:
            pytest.skip("this service ignores the scope's claims")

    # --- Apply ----------------------------------------------------------------------------------------------

    async def test_create_then_expect_absent_conflicts(self, service: JournalService) -> None:
        revision = await _create(service)
        listed = await _find(service)
        assert listed.spec == spec_of()
        assert (listed.mod_revision, listed.create_revision) == (revision, revision)
        other = spec_of(labels=_label("aa"))
        response = await _apply(service, JournalChange(0, other))
        assert response.status == Status.ETCD_TRANSACTION_FAILED
        assert await _find(service) == listed

    async def test_change_at_its_exact_revision(self, service: JournalService) -> None:
        first = await _create(service)
        changed = spec_of(labels=_label("aa"), max_append_rate=7_000_000)
        for wrong in (0, first - 1, first + 1):
            response = await _apply(service, JournalChange(wrong, changed)) if wrong >= 0 else None
            assert response is None or response.status == Status.ETCD_TRANSACTION_FAILED
        response = await _apply(service, JournalChange(first, changed))
        assert response.status == Status.OK
        second = response.header.etcd.revision
        assert second > first
        listed = await _find(service)
        assert (listed.spec, listed.mod_revision, listed.create_revision) == (changed, second, first)
        assert (await _apply(service, JournalChange(first, spec_of()))).status == Status.ETCD_TRANSACTION_FAILED
        assert (await _find(service)).spec == changed

    async def test_minus_one_expects_nothing(self, service: JournalService) -> None:
        for spec in (spec_of(), spec_of(labels=_label("aa")), spec_of(labels=_label("bb"))):
            assert (await _apply(service, JournalChange(-1, spec))).status == Status.OK
            assert (await _find(service)).spec == spec
        assert (await _apply(service, JournalChange(-1, delete=_ONE))).status == Status.OK
        assert (await _apply(service, JournalChange(-1, delete=_ONE))).status == Status.OK
        assert await _list(service) == []

    async def test_all_of_the_changes_or_none(self, service: JournalService) -> None:
        revision = await _create(service, spec_of(_ONE), spec_of(_TWO))
        labelled = [spec_of(name, labels=_label("aa")) for name in (_ONE, _TWO)]
        failed = await _apply(
            service,
            JournalChange(revision, labelled[0]),
            JournalChange(revision + 1000, labelled[1]),
            JournalChange(0, spec_of(_NONE)),
        )
        assert failed.status == Status.ETCD_TRANSACTION_FAILED
        assert failed.conflicts in ((), (_TWO,))
        assert await _list(service) == [_ONE, _TWO]
        assert await _list(service, "aa") == []
        done = await _apply(
            service,
            JournalChange(revision, labelled[0]),
            JournalChange(revision, delete=_TWO),
            JournalChange(0, spec_of(_NONE)),
        )
        assert done.status == Status.OK
        assert await _list(service) == [_NONE, _ONE]
        assert {(await _find(service, name)).mod_revision for name in (_ONE, _NONE)} == {done.header.etcd.revision}

    async def test_delete_at_its_exact_revision(self, service: JournalService) -> None:
        revision = await _create(service)
        wrong = await _apply(service, JournalChange(revision + 1, delete=_ONE))
        assert wrong.status == Status.ETCD_TRANSACTION_FAILED
        absent = await _apply(service, JournalChange(revision, delete=_TWO))
        assert absent.status == Status.ETCD_TRANSACTION_FAILED
        assert await _list(service) == [_ONE]
        assert (await _apply(service, JournalChange(revision, delete=_ONE))).status == Status.OK
        assert await _list(service) == []
        assert (await _append(service, b"x")).status == Status.JOURNAL_NOT_FOUND

    async def test_a_journal_created_again_is_a_new_one(self, service: JournalService) -> None:
        first = await _create(service)
        await _commit(service, b"old", union_registers=_label("aa"))
        assert (await _apply(service, JournalChange(first, delete=_ONE))).status == Status.OK
        second = await _create(service)
        assert second > first
        assert (await _find(service)).create_revision == second
        assert await read_all(service) == b""
        assert await _registers(service) == LabelSet()
        assert (await _commit(service, b"new")).begin == 0
        assert await read_all(service) == b"new"

    async def test_empty_change_list(self, service: JournalService) -> None:
        assert (await _apply(service)).status == Status.OK

    async def test_one_journal_twice_in_one_request(self, service: JournalService) -> None:
        for second in (JournalChange(0, spec_of()), JournalChange(-1, delete=_ONE)):
            with pytest.raises((DuplicateKey, BroadsheetError), match="duplicate key"):
                await _apply(service, JournalChange(0, spec_of()), second)
        assert await _list(service) == []

    async def test_revisions_only_grow(self, service: JournalService) -> None:
        seen = [(await service.list(ListRequest())).header.etcd.revision]
        for number in range(10):
            revision = await _create(service, spec_of(f"{_ONE}/{number}"))
            assert revision > seen[-1]
            seen.append((await service.list(ListRequest())).header.etcd.revision)
            assert seen[-1] >= revision
        failed = await _apply(service, JournalChange(0, spec_of(f"{_ONE}/0")))
        assert failed.status == Status.ETCD_TRANSACTION_FAILED
        assert failed.header.etcd.revision >= seen[-1]
        assert seen == sorted(seen)

    async def test_racing_changes_lose_nothing(self, service: JournalService) -> None:
        """Ten tasks count in a label by compare-and-set."""
        await _create(service, spec_of(labels=_label("count", "0")))

        async def count() -> None:
            for _ in range(3):
                while True:
                    listed = await _find(service)
                    value = listed.spec.labels.value("count")
                    assert value is not None
                    changed = replace(listed.spec, labels=_label("count", str(int(value) + 1)))
                    if (await _apply(service, JournalChange(listed.mod_revision, changed))).status == Status.OK:
                        break

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(count)
        assert (await _find(service)).spec.labels.value("count") == "30"

    async def test_all_fields_of_a_spec_come_back(self, service: JournalService) -> None:
        spec = spec_of(
            labels=_labels(("aa", "1"), ("aa", "2"), ("bb", ""), ("content-type", "application/x-ndjson")),
            flags=JournalFlags.O_RDWR,
            max_append_rate=123_456,
            fragment_length=2048,
            fragment_compression_codec=CompressionCodec.GZIP,
            fragment_stores=("file:///a/", "s3://bucket/b/?profile=c"),
            fragment_refresh_interval_ns=1_500_000_000,
            fragment_retention_ns=3600 * 10**9,
            fragment_flush_interval_ns=60 * 10**9,
            fragment_path_postfix_template="date={{ .Spool.FirstAppendTime.Format \"2006-01-02\" }}",
        )
        await _create(service, spec)
        assert (await _find(service)).spec == spec

    # --- List -----------------------------------------------------------------------------------------------

    async def test_list_is_in_the_byte_order_of_names(self, service: JournalService) -> None:
        names = ["zz/a", "aaaa", "aaaa-b", "aaaa/b", "aaaa.b", "B/upper", "ä/umlaut", "1234"]
        names += ["z/\U00010400x", "z/\uffdcx"]  # the other way round in UTF-16
        await _create(service, *map(spec_of, names))
        assert await _list(service) == sorted(names, key=str.encode)

    async def test_list_with_selectors(self, service: JournalService) -> None:
        await _create(
            service,
            spec_of("s/a/1", labels=_labels(("env", "prod"), ("tag", "x"), ("tag", "y"))),
            spec_of("s/a/2", labels=_labels(("env", "test"))),
            spec_of("s/b/1", labels=_labels(("env", "prod"))),
            spec_of("s/b/2"),
        )
        every = ["s/a/1", "s/a/2", "s/b/1", "s/b/2"]
        for selector, expected in [
            ("", every),
            ("env", every[:3]),
            ("!env", every[3:]),
            ("env=prod", ["s/a/1", "s/b/1"]),
            ("env=prod,tag=y", ["s/a/1"]),
            ("env in (prod,test)", every[:3]),
            ("env!=prod", ["s/a/2", "s/b/2"]),
            ("env,tag!=x", ["s/a/2", "s/b/1"]),
            ("name=s/b/1", ["s/b/1"]),
            ("name in (s/b/1,s/a/2,s/none)", ["s/a/2", "s/b/1"]),
            ("name:prefix=s/b", ["s/b/1", "s/b/2"]),
            ("prefix=s/a/", ["s/a/1", "s/a/2"]),
            ("prefix!=s/a/", ["s/b/1", "s/b/2"]),
            ("env:prefix=t", ["s/a/2"]),
            ("env=none", []),
        ]:
            assert await _list(service, selector) == expected, selector

    async def test_list_follows_label_changes(self, service: JournalService) -> None:
        await _create(service, spec_of(labels=_label("env", "prod")))
        await _apply(service, JournalChange(-1, spec_of(labels=_label("env", "test"))))
        assert await _list(service, "env=prod") == []
        assert await _list(service, "env=test") == [_ONE]

    async def test_many_journals(self, service: JournalService) -> None:
        names = [f"many/{number:04}" for number in range(300)]
        for at in range(0, 300, 100):
            await _create(service, *map(spec_of, names[at : at + 100]))
        assert await _list(service, "prefix=many/") == names

    async def test_headers_and_routes(self, service: JournalService) -> None:
        before = _check_unrouted((await service.list(ListRequest())).header)
        assert (await service.list(ListRequest())).journals == ()
        applied = _check_unrouted((await _apply(service, JournalChange(0, spec_of()))).header)
        assert applied.etcd.revision > before.etcd.revision
        listed = await _find(service)
        assert listed.route.members
        appended = _check_routed((await _append(service, b"some")).header)
        assert appended.route.members == listed.route.members
        assert appended.etcd.revision >= applied.etcd.revision
        read = _check_routed((await _read_one(service, ReadRequest(_ONE))).header)
        fragments = _check_routed((await service.fragments(FragmentsRequest(_ONE))).header)
        for header in (applied, appended, read, fragments):
            assert header.etcd.cluster_id == before.etcd.cluster_id
        _check_header((await _append(service, b"", _NONE)).header)
        _check_header((await _read_one(service, ReadRequest(_NONE))).header)
        _check_header((await service.fragments(FragmentsRequest(_NONE))).header)

    async def test_min_revision_waits(self, service: JournalService) -> None:
        revision = await _create(service)
        scope = Scope(min_revision=revision + 1)
        done: list[str] = []

        async def wait_for(what: str, call: Callable[[], Any]) -> None:
            await call()
            done.append(what)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, "list", lambda: service.list(ListRequest(), scope))
            nursery.start_soon(wait_for, "append", lambda: _append(service, b"x", scope=scope))
            nursery.start_soon(wait_for, "read", lambda: _read_one(service, ReadRequest(_ONE, -1), scope))
            nursery.start_soon(wait_for, "fragments", lambda: service.fragments(FragmentsRequest(_ONE), scope))
            await self.settle()
            assert done == []
            assert (await service.list(ListRequest(), Scope(min_revision=revision))).status == Status.OK
            await _create(service, spec_of(_TWO))
        assert sorted(done) == ["append", "fragments", "list", "read"]

    async def test_waiting_for_a_revision_ends_at_the_deadline(self, service: JournalService) -> None:
        revision = await _create(service)

        def soon() -> Scope:
            return Scope(min_revision=revision + 1000, deadline=trio.current_time() + 0.02)

        with pytest.raises(BroadsheetError):
            await service.list(ListRequest(), soon())
        with pytest.raises(BroadsheetError):
            await _append(service, b"x", scope=soon())
        with pytest.raises(BroadsheetError):
            await service.fragments(FragmentsRequest(_ONE), soon())
        assert await _responses(service, ReadRequest(_ONE), soon()) == []
        assert await read_all(service) == b""

    # --- Watch ----------------------------------------------------------------------------------------------

    async def test_watch_begins_with_all_then_tells_changes(self, service: JournalService) -> None:
        first = await _create(service, spec_of(_TWO), spec_of(_ONE))
        async with service.watch(ListRequest()) as watch:
            change = await anext(watch)
            _check_unrouted(change.header)
            assert [listed.spec.name for listed in change.upserted] == [_ONE, _TWO]
            assert {(listed.mod_revision, listed.create_revision) for listed in change.upserted} == {(first, first)}
            assert change.deleted == ()
            assert change.header.etcd.revision >= first

            labelled = spec_of(labels=_label("aa"))
            second = (await _apply(service, JournalChange(first, labelled))).header.etcd.revision
            change = await anext(watch)
            assert [(it.spec, it.mod_revision, it.create_revision) for it in change.upserted] == [
                (labelled, second, first)
            ]
            assert change.header.etcd.revision >= second

            await _apply(service, JournalChange(second, delete=_ONE), JournalChange(0, spec_of(_NONE)))
            change = await anext(watch)
            assert [listed.spec.name for listed in change.upserted] == [_NONE]
            assert change.deleted == (_ONE,)

    async def test_watch_of_nothing_tells_so_then_waits(self, service: JournalService) -> None:
        told = trio.Event()
        changes: list[WatchChange] = []

        async def follow() -> None:
            async with service.watch(ListRequest(parse_selector("env=prod"))) as watch:
                async for change in watch:
                    changes.append(change)
                    if len(changes) == 2:
                        told.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await self.settle()
            assert [(change.upserted, change.deleted) for change in changes] == [((), ())]
            await _create(service, spec_of(_TWO))  # not selected
            await self.settle()
            assert len(changes) == 1
            await _create(service, spec_of(labels=_label("env", "prod")))
            await told.wait()
            assert [listed.spec.name for listed in changes[1].upserted] == [_ONE]
            nursery.cancel_scope.cancel()

    async def test_a_label_change_makes_a_journal_leave_and_enter(self, service: JournalService) -> None:
        await _create(service, spec_of(labels=_label("env", "prod")))
        async with service.watch(ListRequest(parse_selector("env=prod"))) as watch:
            assert [listed.spec.name for listed in (await anext(watch)).upserted] == [_ONE]
            await _apply(service, JournalChange(-1, spec_of(labels=_label("env", "test"))))
            change = await anext(watch)
            assert (change.upserted, change.deleted) == ((), (_ONE,))
            await _apply(service, JournalChange(-1, delete=_ONE))  # it was gone already
            await _create(service, spec_of(labels=_label("env", "prod")))
            change = await anext(watch)
            assert ([listed.spec.name for listed in change.upserted], change.deleted) == ([_ONE], ())

    async def test_a_change_before_the_first_is_told_once(self, service: JournalService) -> None:
        await _create(service)
        async with service.watch(ListRequest()) as watch:
            await _create(service, spec_of(_TWO))
            mirror = _Mirror()
            await mirror.until(watch, lambda: len(mirror.names) == 2)
            await _create(service, spec_of(_NONE))
            await mirror.until(watch, lambda: len(mirror.names) == 3)

    async def test_watch_resumes_after_a_revision(self, service: JournalService) -> None:
        revisions = [await _create(service, spec_of(f"{_ONE}/{number}")) for number in range(4)]
        last = await _create(service, spec_of(_TWO))
        for position, revision in enumerate(revisions):
            async with service.watch(ListRequest(), resume_revision=revision) as watch:
                change = await anext(watch)
                expected = [f"{_ONE}/{number}" for number in range(position + 1, 4)] + [_TWO]
                assert [listed.spec.name for listed in change.upserted] == expected
                assert change.header.etcd.revision >= last

    async def test_watch_resumed_at_the_end_waits(self, service: JournalService) -> None:
        revision = await _create(service)
        changes: list[WatchChange] = []

        async def follow() -> None:
            async with service.watch(ListRequest(), resume_revision=revision) as watch:
                changes.append(await anext(watch))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await self.settle()
            assert changes == []
            await _create(service, spec_of(_TWO))
        assert [listed.spec.name for listed in changes[0].upserted] == [_TWO]

    async def test_resumed_watch_tells_of_what_went_meanwhile(self, service: JournalService) -> None:
        await _create(service, spec_of(_ONE, labels=_label("env", "prod")), spec_of(_TWO, labels=_label("env", "prod")))
        revision = (await service.list(ListRequest())).header.etcd.revision
        await _apply(service, JournalChange(-1, delete=_ONE))
        await _apply(service, JournalChange(-1, spec_of(_TWO, labels=_label("env", "test"))))
        async with service.watch(ListRequest(parse_selector("env=prod")), resume_revision=revision) as watch:
            deleted: set[str] = set()
            while deleted != {_ONE, _TWO}:
                with trio.move_on_after(0.5 + self.cushion_s) as scope:
                    change = await anext(watch)
                assert not scope.cancelled_caught, f"told of {deleted} only"
                assert change.upserted == ()
                deleted |= set(change.deleted)

    async def test_watch_misses_nothing_whatever_is_going_on(self, service: JournalService) -> None:
        names = [f"busy/{number}" for number in range(6)]

        async def change(writer: int) -> None:
            for number in range(15):
                name = names[(number * writer + writer) % len(names)]
                env = "prod" if (number + writer) % 3 else "test"
                if (number + writer) % 5 == 0:
                    await _apply(service, JournalChange(-1, delete=name))
                else:
                    labels = _labels(("env", env), ("number", str(number)))
                    await _apply(service, JournalChange(-1, spec_of(name, labels=labels)))

        mirrors = [_Mirror() for _ in range(3)]

        async def follow(mirror: _Mirror, *, task_status: trio.TaskStatus[None]) -> None:
            async with service.watch(ListRequest(parse_selector("env=prod"))) as watch:
                task_status.started()
                await mirror.until(watch, lambda: "busy/end" in mirror.journals)

        async with trio.open_nursery() as nursery:
            for mirror in mirrors:
                await nursery.start(follow, mirror)
            async with trio.open_nursery() as writers:
                for writer in range(1, 4):
                    writers.start_soon(change, writer)
            await _create(service, spec_of("busy/end", labels=_label("env", "prod")))
        expected = (await service.list(ListRequest(parse_selector("env=prod")))).journals
        for mirror in mirrors:
            assert tuple(mirror.journals[name] for name in sorted(mirror.journals)) == expected

    async def test_watch_ends_at_the_deadline(self, service: JournalService) -> None:
        await _create(service)
        scope = Scope(deadline=trio.current_time() + 0.05 + self.cushion_s)
        async with service.watch(ListRequest(), scope) as watch:
            changes = [change async for change in watch]
        assert len(changes) == 1

    async def test_cancelled_watch_loses_nothing(self, service: JournalService) -> None:
        await _create(service)
        async with service.watch(ListRequest()) as watch:
            mirror = _Mirror()
            mirror.take(await anext(watch))
            await _create(service, spec_of(_TWO))
            with trio.CancelScope() as scope:
                scope.cancel()
                mirror.take(await anext(watch))
            await mirror.until(watch, lambda: mirror.names == [_ONE, _TWO])

    # --- Append ---------------------------------------------------------------------------------------------

    async def test_append_answers_with_its_range_and_sum(self, service: JournalService) -> None:
        await _create(service)
        at = 0
        for content in (b"hello", b"\x00", b"x" * 1000):
            response = await _append(service, content)
            assert response.status == Status.OK
            commit = response.commit
            assert commit is not None
            assert (commit.journal, commit.begin, commit.end) == (_ONE, at, at + len(content))
            assert commit.sum == hashlib.sha1(content).digest()
            assert commit.compression_codec == CompressionCodec.NONE
            assert (commit.backing_store, commit.mod_time, commit.path_postfix) == ("", 0, "")
            assert response.registers == LabelSet()
            assert response.total_chunks == 2
            assert response.delayed_chunks == 0
            at = commit.end
        assert await read_all(service) == b"hello\x00" + b"x" * 1000

    async def test_barrier(self, service: JournalService) -> None:
        await _create(service)
        for content in (b"", bytearray(), memoryview(b""), _pieces(b"", 1)):
            commit = await _commit(service, content)
            assert (commit.begin, commit.end, commit.sum) == (0, 0, EMPTY_SHA1)
        await _commit(service, b"hello")
        for _ in range(3):
            commit = await _commit(service)
            assert (commit.begin, commit.end, commit.sum) == (5, 5, EMPTY_SHA1)
        assert await read_all(service) == b"hello"

    async def test_no_such_journal(self, service: JournalService) -> None:
        for content in (b"x", b"", _pieces(b"xy", 1)):
            response = await _append(service, content, _NONE)
            assert (response.status, response.commit, response.registers) == (Status.JOURNAL_NOT_FOUND, None, None)

    async def test_kinds_of_buffers(self, service: JournalService) -> None:
        await _create(service)
        content = _noise(300)
        kinds: list[Buffer] = [content, bytearray(content), memoryview(content), memoryview(b"??" + content)[2:]]
        for kind in kinds:
            assert (await _commit(service, kind)).length == 300

        async def each() -> AsyncIterator[Buffer]:
            for kind in kinds:
                yield kind
                yield b""

        assert (await _commit(service, each())).length == 1200
        assert await read_all(service) == content * 8

    @pytest.mark.parametrize(("length", "chunk"), _CHUNKINGS)
    async def test_body_in_chunks(self, service: JournalService, length: int, chunk: int) -> None:
        await _create(service)
        await _commit(service, b"before")
        content = _noise(length)
        commit = await _commit(service, _pieces(content, chunk))
        assert (commit.begin, commit.end) == (6, 6 + length)
        assert commit.sum == hashlib.sha1(content).digest()
        assert (await _commit(service, b"after")).begin == 6 + length
        assert await read_all(service) == b"before" + content + b"after"

    @pytest.mark.parametrize("length", [_MIB - 1, _MIB, _MIB + 1, 3 * _MIB + 5])
    async def test_large_buffers(self, service: JournalService, length: int) -> None:
        await _create(service)
        content = _noise(length)
        for kind in (content, bytearray(content), memoryview(content)):
            commit = await _commit(service, kind)
            assert (commit.length, commit.sum) == (length, hashlib.sha1(content).digest())
        assert await read_all(service) == content * 3

    @pytest.mark.parametrize("count", [20, 60])
    async def test_body_that_reuses_its_buffer(self, service: JournalService, count: int) -> None:
        """A buffer stays unchanged only until the next one is asked for."""
        await _create(service)
        expected = b"".join(bytes([number]) * 40_000 for number in range(count))

        async def reusing() -> AsyncIterator[Buffer]:
            buffer = bytearray(40_000)
            for number in range(count):
                buffer[:] = bytes([number]) * 40_000
                yield buffer
                buffer[:] = b"\xff" * 40_000

        assert (await _commit(service, reusing())).sum == hashlib.sha1(expected).digest()
        assert await read_all(service) == expected

    @pytest.mark.parametrize("length", [0, 10, 100_000, 2 * _MIB])
    @pytest.mark.parametrize("error", [AppendAborted("changed my mind"), KeyError("a program's own")])
    async def test_body_that_raises_is_rolled_back(
        self, service: JournalService, length: int, error: Exception
    ) -> None:
        await _create(service)
        await _commit(service, b"before")

        async def failing() -> AsyncIterator[Buffer]:
            async with aclosing(_pieces(_noise(length), 60_000)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
            raise error

        with pytest.raises(type(error)) as caught:
            await _append(service, failing(), union_registers=_label("aa"))
        assert caught.value is error
        assert await read_all(service) == b"before"
        commit = await _commit(service, b"after")
        assert commit.begin == 6
        assert await _registers(service) == LabelSet()
        assert await read_all(service) == b"beforeafter"

    async def test_nothing_of_a_body_is_seen_before_it_is_complete(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"before")
        large, small = _Slow(_noise(2 * _MIB)), _Slow(b"small")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, large)
            nursery.start_soon(_commit, service, small)
            await large.begun.wait()
            await small.begun.wait()
            await self.settle()
            assert await read_all(service) == b"before"
            assert (await _read_one(service, ReadRequest(_ONE, -1))).write_head == 6
            assert sum(fragment.length for fragment in await _fragments(service)) == 6
            large.go_on.set()
            small.go_on.set()
        assert len(await read_all(service)) == 6 + 5 + 2 * _MIB

    async def test_a_slow_small_body_holds_nobody_up(self, service: JournalService) -> None:
        await _create(service)
        slow = _Slow(b"slow")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, slow)
            await slow.begun.wait()
            assert (await _commit(service, b"quick")).begin == 0
            slow.go_on.set()
        assert await read_all(service) == b"quickslow"

    async def test_explicit_offset(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        for wrong in (1, 4, 6, 2**63 - 1):
            response = await _append(service, b"no", offset=wrong)
            assert (response.status, response.commit) == (Status.WRONG_APPEND_OFFSET, None)
            response = await _append(service, _noise(2 * _MIB), offset=wrong)
            assert response.status == Status.WRONG_APPEND_OFFSET
            assert (await _append(service, b"", offset=wrong)).status == Status.WRONG_APPEND_OFFSET
        assert (await _commit(service, b"world", offset=5)).begin == 5
        assert (await _append(service, b"no", offset=5)).status == Status.WRONG_APPEND_OFFSET
        assert (await _commit(service, b"", offset=10)).end == 10
        assert (await _commit(service, _noise(2 * _MIB), offset=10)).begin == 10
        assert (await read_all(service))[:12] == b"helloworld" + _noise(2)

    async def test_explicit_offset_zero(self, service: JournalService) -> None:
        await _create(service)
        if not self.checks_offset_zero:
            with pytest.raises(LocalError):
                await _append(service, b"first", offset=0)
            return
        assert (await _commit(service, b"", offset=0)).end == 0
        assert (await _commit(service, b"first", offset=0)).begin == 0
        for content in (b"second", b"", _noise(2 * _MIB)):
            assert (await _append(service, content, offset=0)).status == Status.WRONG_APPEND_OFFSET
        assert await read_all(service) == b"first"

    async def test_of_racing_appends_at_one_offset_one_wins(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"base")
        statuses: list[Status] = []

        async def race(number: int) -> None:
            statuses.append((await _append(service, b"%02d" % number, offset=4)).status)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(race, number)
        assert sorted(statuses) == [Status.OK] + [Status.WRONG_APPEND_OFFSET] * 19
        assert len(await read_all(service)) == 6

    async def test_fifty_appends_at_once(self, service: JournalService) -> None:
        await _create(service)
        bodies = [bytes([65 + number % 50]) * (1 + number * 37 % 4000) for number in range(50)]
        commits: dict[int, Fragment] = {}

        async def one(number: int) -> None:
            body = bodies[number]
            content: Content = body if number % 2 else _pieces(body, 700)
            commits[number] = await _commit(service, content)
            assert await read_all(service, offset=commits[number].begin) >= body

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        content = await read_all(service)
        at = 0
        for number, commit in sorted(commits.items(), key=lambda item: item[1].begin):
            assert commit.begin == at
            assert content[commit.begin : commit.end] == bodies[number]
            assert commit.sum == hashlib.sha1(bodies[number]).digest()
            at = commit.end
        assert at == len(content)

    async def test_large_and_small_appends_at_once(self, service: JournalService) -> None:
        await _create(service)
        bodies = [_noise(2 * _MIB, 1), *(b"%d" % number * 500 for number in range(10)), _noise(2 * _MIB, 2)]
        commits: dict[int, Fragment] = {}

        async def one(number: int) -> None:
            commits[number] = await _commit(service, _pieces(bodies[number], 200_000))

        async with trio.open_nursery() as nursery:
            for number in range(len(bodies)):
                nursery.start_soon(one, number)
        content = await read_all(service)
        ranges = sorted((commit.begin, commit.end) for commit in commits.values())
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == len(content) == sum(map(len, bodies))
        for number, commit in commits.items():
            assert content[commit.begin : commit.end] == bodies[number]

    async def test_journals_do_not_wait_for_each_other(self, service: JournalService) -> None:
        await _create(service, spec_of(_ONE), spec_of(_TWO))
        slow = _Slow(_noise(2 * _MIB))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, slow, _ONE)
            await slow.begun.wait()
            await self.settle()
            for number in range(5):
                assert (await _commit(service, b"x", _TWO)).begin == number
            slow.go_on.set()

    async def test_metadata_suffix_of_the_name_is_ignored(self, service: JournalService) -> None:
        await _create(service)
        commit = await _commit(service, b"hello", f"{_ONE};x")
        assert (commit.journal, commit.begin) == (_ONE, 0)
        assert (await _commit(service, b" you", f"{_ONE};some/thing=else")).begin == 5
        assert await read_all(service, f"{_ONE};x") == b"hello you"
        assert (await _fragments(service, f"{_ONE};x"))[0].journal == _ONE
        assert (await _append(service, b"x", f"{_NONE};x")).status == Status.JOURNAL_NOT_FOUND

    async def test_flags_forbid(self, service: JournalService) -> None:
        await _create(service, spec_of(_ONE, flags=JournalFlags.O_RDONLY), spec_of(_TWO, flags=JournalFlags.O_WRONLY))
        for content in (b"x", _pieces(b"xy", 1), _noise(2 * _MIB)):
            assert (await _append(service, content, _ONE)).status == Status.NOT_ALLOWED
        assert (await _commit(service, b"", _ONE)).end == 0
        assert await read_all(service, _ONE) == b""
        await _commit(service, b"x", _TWO)
        responses = await _responses(service, ReadRequest(_TWO, block=True))
        assert [response.status for response in responses] == [Status.NOT_ALLOWED]
        assert (await service.fragments(FragmentsRequest(_TWO))).status == Status.NOT_ALLOWED
        await _apply(service, JournalChange(-1, spec_of(_TWO, flags=JournalFlags.O_RDWR)))
        assert await read_all(service, _TWO) == b"x"

    async def test_a_throttled_journal_is_a_journal(self, service: JournalService) -> None:
        """A rate limit changes when, and not what."""
        await _create(service, spec_of(max_append_rate=64 * _MIB))
        assert (await _commit(service)).sum == EMPTY_SHA1
        assert (await _commit(service, _pieces(b"", 1))).sum == EMPTY_SHA1
        assert (await _commit(service, b"hello", union_registers=_label("aa"))).begin == 0
        assert (await _commit(service, _pieces(_noise(2 * _MIB), 100_000))).begin == 5
        assert (await _append(service, b"x", offset=3)).status == Status.WRONG_APPEND_OFFSET
        assert (await _append(service, b"", suspend=SuspendControl.KEEP)).status == Status.OK
        assert (await _append(service, _pieces(b"", 1), suspend=SuspendControl.KEEP)).status == Status.OK
        assert (await _append(service, b"x", suspend=SuspendControl.KEEP)).status == Status.NOT_ALLOWED
        assert await read_all(service) == b"hello" + _noise(2 * _MIB)
        with pytest.raises(AppendFailed, match="register modification requires non-empty Append"):
            await _append(service, b"", union_registers=_label("bb"))
        assert (await _append(service, b"", suspend=SuspendControl.NOW)).status == Status.SUSPENDED
        assert await _suspended(service) == (SuspendLevel.PARTIAL, 5 + 2 * _MIB)
        readonly = spec_of(_TWO, max_append_rate=_MIB, flags=JournalFlags.O_RDONLY)
        await _create(service, readonly)
        assert (await _commit(service, b"", _TWO)).end == 0

    # --- Append: registers ----------------------------------------------------------------------------------

    async def test_registers_union_and_subtract(self, service: JournalService) -> None:
        await _create(service)

        async def change(union: LabelSet | None = None, subtract: LabelSet | None = None) -> LabelSet:
            response = await _append(service, b".", union_registers=union, subtract_registers=subtract)
            assert response.status == Status.OK
            assert response.registers == await _registers(service)
            assert response.registers is not None
            return response.registers

        assert await change() == LabelSet()
        several = _labels(("aa", "1"), ("bb", "1"), ("bb", "2"))
        assert await change(several) == several
        # A name of the union takes the place of all of that name's values.
        assert await change(_labels(("bb", "3"))) == _labels(("aa", "1"), ("bb", "3"))
        assert await change(_labels(("bb", "3"), ("bb", "4"), ("cc", ""))) == _labels(
            ("aa", "1"), ("bb", "3"), ("bb", "4"), ("cc", "")
        )
        # A name is subtracted only with exactly its values.
        assert await change(None, _labels(("aa", "2"), ("bb", "3"))) == _labels(
            ("aa", "1"), ("bb", "3"), ("bb", "4"), ("cc", "")
        )
        assert await change(None, _labels(("aa", "1"), ("cc", ""))) == _labels(("bb", "3"), ("bb", "4"))
        # Subtract comes first.
        assert await change(_labels(("bb", "5")), _labels(("bb", "5"))) == _labels(("bb", "5"))
        assert await change(_labels(("dd", "1")), _labels(("bb", "5"))) == _labels(("dd", "1"))
        assert await change(None, _labels(("dd", "1"))) == LabelSet()

    async def test_registers_are_each_journals_own(self, service: JournalService) -> None:
        await _create(service, spec_of(_ONE), spec_of(_TWO))
        await _commit(service, b"x", _ONE, union_registers=_label("aa"))
        assert await _registers(service, _ONE) == _label("aa")
        assert await _registers(service, _TWO) == LabelSet()

    async def test_check_registers(self, service: JournalService) -> None:
        await _create(service)
        # Nothing is known: anything matches.
        assert (await _commit(service, b"1", check_registers=parse_selector("author=me"))).begin == 0
        await _commit(service, b"2", union_registers=_labels(("author", "me"), ("epoch", "7")))
        for selector, matches in [
            ("author=me", True),
            ("author", True),
            ("author=me,epoch in (6,7)", True),
            ("author!=you", True),
            ("", True),
            ("author=you", False),
            ("!author", False),
            ("author=me,epoch=8", False),
            ("other", False),
        ]:
            for content in (b"x", b"", _noise(2 * _MIB)):
                head = (await _commit(service)).end
                response = await _append(service, content, check_registers=parse_selector(selector))
                assert response.registers == _labels(("author", "me"), ("epoch", "7"))
                if matches:
                    assert response.status == Status.OK
                else:
                    assert (response.status, response.commit) == (Status.REGISTER_MISMATCH, None)
                    assert (await _commit(service)).end == head

    async def test_mismatch_changes_no_register(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"x", union_registers=_label("author", "me"))
        response = await _append(
            service, b"y", check_registers=parse_selector("author=you"), union_registers=_label("author", "you")
        )
        assert response.status == Status.REGISTER_MISMATCH
        assert await _registers(service) == _label("author", "me")

    async def test_register_mismatch_comes_before_a_wrong_offset(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"x", union_registers=_label("author", "me"))
        both = await _append(service, b"y", check_registers=parse_selector("author=you"), offset=77)
        assert both.status == Status.REGISTER_MISMATCH

    async def test_register_change_needs_content(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"x", union_registers=_label("aa"))
        changes: list[dict[str, Any]] = [{"union_registers": _label("bb")}, {"subtract_registers": _label("aa")}]
        for fields in changes:
            for content in (b"", _pieces(b"", 1)):
                with pytest.raises(AppendFailed) as caught:
                    await _append(service, content, **fields)
                assert str(caught.value).startswith("append stream: register modification requires non-empty Append")
        assert await _registers(service) == _label("aa")
        empty = await _append(service, b"", union_registers=LabelSet(), subtract_registers=LabelSet())
        assert empty.status == Status.OK

    async def test_fencing_by_registers(self, service: JournalService) -> None:
        """Of writers that each take the register over, exactly those append that hold it."""
        await _create(service)
        mine: dict[int, int] = {}

        async def write(author: int) -> None:
            await _commit(service, b"-", union_registers=_label("author", f"w{author}"))
            mine[author] = 0
            while True:
                check = parse_selector(f"author=w{author}")
                response = await _append(service, b"%d" % author, check_registers=check)
                if response.status == Status.REGISTER_MISMATCH or mine[author] == 5:
                    return
                mine[author] += 1

        async with trio.open_nursery() as nursery:
            for author in range(4):
                nursery.start_soon(write, author)
        content = await read_all(service)
        assert max(mine.values()) == 5
        for part, following in itertools.pairwise(content.split(b"-")):
            assert len(set(part)) <= 1, "somebody else's bytes"
            assert not part or not set(part) & set(following)

    # --- Append: cancellation -------------------------------------------------------------------------------

    async def test_cancelled_while_waiting_it_did_not_happen(self, service: JournalService) -> None:
        await _create(service)
        holder = _Slow(_noise(2 * _MIB))
        ends: dict[int, int] = {}

        async def one(number: int, scope: trio.CancelScope) -> None:
            with scope:
                ends[number] = (await _commit(service, b"%d" % number)).end

        scopes = [trio.CancelScope() for _ in range(6)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, holder)
            await holder.begun.wait()
            await self.settle()
            for number, scope in enumerate(scopes):
                nursery.start_soon(one, number, scope)
                await self.settle()
            assert ends == {}
            for number in (0, 2, 5):
                scopes[number].cancel()
            await self.settle()
            holder.go_on.set()
        assert sorted(ends) == [1, 3, 4]
        assert [scope.cancelled_caught for scope in scopes] == [True, False, True, False, False, True]
        tail = await read_all(service, offset=2 * _MIB)
        assert sorted(tail) == sorted(b"134")

    @pytest.mark.parametrize("length", [0, 10, 2 * _MIB])
    async def test_cancelled_in_the_middle_of_a_body(self, service: JournalService, length: int) -> None:
        await _create(service)
        await _commit(service, b"before")
        body = _Slow(_noise(length))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, body)
            await body.begun.wait()
            await self.settle()
            nursery.cancel_scope.cancel()
        assert body.closed
        assert (await _commit(service, b"after")).begin == 6
        assert await read_all(service) == b"beforeafter"

    async def test_neighbours_of_a_cancelled_body_are_unharmed(self, service: JournalService) -> None:
        await _create(service)
        body = _Slow(_noise(2 * _MIB))
        scope = trio.CancelScope()
        commits: list[Fragment] = []

        async def cancelled() -> None:
            with scope:
                await _commit(service, body)

        async def neighbour(content: bytes) -> None:
            commits.append(await _commit(service, content))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await body.begun.wait()
            await self.settle()
            for content in (b"aaa", b"bb", _noise(2 * _MIB)):
                nursery.start_soon(neighbour, content)
            await self.settle()
            assert commits == []
            scope.cancel()
        assert scope.cancelled_caught
        assert sorted(commit.length for commit in commits) == [2, 3, 2 * _MIB]
        assert len(await read_all(service)) == 2 * _MIB + 5

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_wherever_it_is_cancelled_it_happened_or_not(self, service: JournalService, streamed: bool) -> None:
        await _create(service)
        expected = b""
        for step in range(1, 200):
            content = b"<%d>" % step
            body: Content = _pieces(content, 1) if streamed else content
            outcome = await cancel_at_step(step, lambda body=body: _commit(service, body))  # type: ignore[misc]
            await _commit(service)  # a barrier: whatever stands has come through
            found = await read_all(service)
            assert found in (expected, expected + content)
            if not outcome.cancelled:
                assert found == expected + content, "acknowledged and not there"
            expected = found
            if not outcome.reached:
                break
        else:
            pytest.fail("never done")
        assert step > 1

    async def test_append_ends_at_the_deadline(self, service: JournalService) -> None:
        await _create(service)
        holder = _Slow(_noise(2 * _MIB))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_commit, service, holder)
            await holder.begun.wait()
            await self.settle()
            with pytest.raises(BroadsheetError):
                await _append(service, b"late", scope=Scope(deadline=trio.current_time() + 0.02))
            holder.go_on.set()
        assert len(await read_all(service)) == 2 * _MIB
        in_time = await _append(service, b"!", scope=Scope(deadline=trio.current_time() + 10))
        assert in_time.status == Status.OK

    # --- Suspension -----------------------------------------------------------------------------------------

    async def test_controls_on_an_active_journal(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        for control in SuspendControl:
            if control == SuspendControl.NOW:
                continue
            # The journal holds what no store has, so IF_FLUSHED leaves it as it is.
            assert (await _append(service, b"", suspend=control)).status == Status.OK
            assert await _suspended(service) == (SuspendLevel.NONE, 0)
        for control in (SuspendControl.RESUME, SuspendControl.NO_RESUME):
            assert (await _append(service, b"!", suspend=control)).status == Status.OK
        assert await read_all(service) == b"hello!!"

    @pytest.mark.parametrize("control", [SuspendControl.IF_FLUSHED, SuspendControl.NOW])
    async def test_an_empty_journal_is_suspended_fully(self, service: JournalService, control: SuspendControl) -> None:
        await _create(service)
        response = await _append(service, b"", suspend=control)
        assert (response.status, response.commit) == (Status.SUSPENDED, None)
        assert await _suspended(service) == (SuspendLevel.FULL, 0)
        assert (await _find(service)).route.members == ()
        for other in SuspendControl:
            if other != SuspendControl.RESUME:
                assert (await _append(service, b"", suspend=other)).status == Status.SUSPENDED
                assert await _suspended(service) == (SuspendLevel.FULL, 0)
        assert (await _append(service, b"x", suspend=SuspendControl.NO_RESUME)).status == Status.SUSPENDED
        assert [it.status for it in await _responses(service, ReadRequest(_ONE, block=True))] == [Status.SUSPENDED]
        assert (await service.fragments(FragmentsRequest(_ONE))).status == Status.SUSPENDED
        assert (await _commit(service, b"again")).begin == 0
        assert await _suspended(service) == (SuspendLevel.NONE, 0)
        assert await read_all(service) == b"again"

    async def test_a_journal_with_content_is_suspended_partially(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello", union_registers=_label("aa"))
        assert (await _append(service, b"", suspend=SuspendControl.NOW)).status == Status.SUSPENDED
        assert await _suspended(service) == (SuspendLevel.PARTIAL, 5)
        for control in (SuspendControl.NOW, SuspendControl.IF_FLUSHED, SuspendControl.NO_RESUME):
            assert (await _append(service, b"", suspend=control)).status == Status.SUSPENDED
            assert await _suspended(service) == (SuspendLevel.PARTIAL, 5)
        assert (await _append(service, b"x", suspend=SuspendControl.NO_RESUME)).status == Status.SUSPENDED
        assert (await _commit(service, b"", suspend=SuspendControl.KEEP)).end == 5
        assert (await _append(service, b"x", suspend=SuspendControl.KEEP)).status == Status.NOT_ALLOWED
        assert await _suspended(service) == (SuspendLevel.PARTIAL, 5)
        assert await read_all(service) == b"hello"  # still readable
        assert (await _commit(service, b" you")).begin == 5
        assert await _suspended(service) == (SuspendLevel.NONE, 5)
        assert await _registers(service) == _label("aa")
        assert await read_all(service) == b"hello you"

    async def test_a_barrier_resumes(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        assert (await _append(service, b"", suspend=SuspendControl.NOW)).status == Status.SUSPENDED
        assert (await _commit(service)).end == 5
        assert await _suspended(service) == (SuspendLevel.NONE, 5)

    async def test_a_large_body_resumes(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        assert (await _append(service, b"", suspend=SuspendControl.NOW)).status == Status.SUSPENDED
        content = _noise(2 * _MIB)
        assert (await _commit(service, _pieces(content, 300_000))).begin == 5
        assert await _suspended(service) == (SuspendLevel.NONE, 5)
        assert await read_all(service) == b"hello" + content

    @pytest.mark.parametrize("control", [SuspendControl.IF_FLUSHED, SuspendControl.NOW, SuspendControl.KEEP])
    async def test_content_and_suspension_exclude_each_other(
        self, service: JournalService, control: SuspendControl
    ) -> None:
        await _create(service)
        await _commit(service, b"hello")
        for content in (b"x", _pieces(b"xy", 1), _noise(2 * _MIB)):
            status = (await _append(service, content, suspend=control)).status
            assert status in (Status.NOT_ALLOWED, Status.SUSPENDED)
            assert control == SuspendControl.NOW or status == Status.NOT_ALLOWED
        assert await read_all(service) == b"hello"

    @pytest.mark.parametrize("level", list(SuspendLevel))
    @pytest.mark.parametrize("length", [3, 2 * _MIB])
    async def test_a_journal_goes_on_at_its_suspend_offset(
        self, service: JournalService, level: SuspendLevel, length: int
    ) -> None:
        await _create(service, spec_of(suspend=Suspend(level, 1024)))
        assert (await _commit(service, _noise(length))).begin == 1024
        assert await _suspended(service) == (SuspendLevel.NONE, 1024)
        assert (await _commit(service, b"more")).begin == 1024 + length
        assert (await read_all(service, offset=1024)) == _noise(length) + b"more"

    async def test_suspended_again_it_keeps_its_offset(self, service: JournalService) -> None:
        await _create(service, spec_of(suspend=Suspend(SuspendLevel.PARTIAL, 1024)))
        assert (await _append(service, b"", suspend=SuspendControl.NOW)).status == Status.SUSPENDED
        assert await _suspended(service) == (SuspendLevel.FULL, 1024)
        assert (await _commit(service, b"x")).begin == 1024

    @pytest.mark.parametrize("content", [b"", b"hello"])
    async def test_of_racing_suspensions_each_is_answered_so(self, service: JournalService, content: bytes) -> None:
        await _create(service)
        if content:
            await _commit(service, content)
        statuses: list[Status] = []

        async def suspend() -> None:
            statuses.append((await _append(service, b"", suspend=SuspendControl.NOW)).status)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(suspend)
        assert statuses == [Status.SUSPENDED] * 5
        level = SuspendLevel.PARTIAL if content else SuspendLevel.FULL
        assert await _suspended(service) == (level, len(content))

    async def test_suspending_and_appending_at_once(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"0")
        begins: list[int] = []

        async def append(number: int) -> None:
            begins.append((await _commit(service, b"%d" % number)).begin)

        async with trio.open_nursery() as nursery:
            for number in range(1, 9):
                nursery.start_soon(append, number)
                if number % 3 == 0:
                    nursery.start_soon(functools.partial(_append, service, b"", suspend=SuspendControl.NOW))
        assert sorted(begins) == list(range(1, 9))
        assert sorted(await read_all(service)) == sorted(b"012345678")

    # --- Read -----------------------------------------------------------------------------------------------

    async def test_first_fragment_is_closed_at_once(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"first")
        await _commit(service, b"second, and longer")
        await _commit(service, b"third")
        responses = await _responses(service, ReadRequest(_ONE))
        _check_stream(responses)
        metadata = [response for response in responses if response.content is None]
        assert [(it.status, it.offset, it.write_head) for it in metadata] == [
            (Status.OK, 0, 28),
            (Status.OK, 5, 28),
            (Status.OFFSET_NOT_YET_AVAILABLE, 28, 28),
        ]
        fragments = [response.fragment for response in metadata if response.fragment is not None]
        assert [(fragment.begin, fragment.end) for fragment in fragments] == [(0, 5), (5, 28)]
        assert fragments[0].sum == hashlib.sha1(b"first").digest()
        assert fragments[1].sum == hashlib.sha1(b"second, and longerthird").digest()
        assert _content(responses) == b"firstsecond, and longerthird"
        _check_routed(responses[0].header)

    async def test_read_from_each_offset(self, service: JournalService) -> None:
        await _create(service)
        content = b""
        for part in (b"first", b"second", b"third"):
            await _commit(service, part)
            content += part
        for offset in range(len(content) + 1):
            responses = await _responses(service, ReadRequest(_ONE, offset))
            _check_stream(responses)
            assert _content(responses) == content[offset:]
            assert responses[0].offset == offset
            assert responses[-1].status == Status.OFFSET_NOT_YET_AVAILABLE

    async def test_read_beyond_the_end(self, service: JournalService) -> None:
        await _create(service)
        for head in (0, 5):
            for offset in (head, head + 1, 2**40, -1):
                responses = await _responses(service, ReadRequest(_ONE, offset))
                assert [it.status for it in responses] == [Status.OFFSET_NOT_YET_AVAILABLE]
                assert responses[0].write_head == head
                assert responses[0].offset == (head if offset == -1 else offset)
                assert responses[0].fragment is None
                _check_routed(responses[0].header)
            await _commit(service, b"hello")

    async def test_read_of_no_such_journal(self, service: JournalService) -> None:
        for block in (False, True):
            responses = await _responses(service, ReadRequest(_NONE, block=block))
            assert [it.status for it in responses] == [Status.JOURNAL_NOT_FOUND]
        assert (await service.fragments(FragmentsRequest(_NONE))).status == Status.JOURNAL_NOT_FOUND

    @pytest.mark.parametrize("offset", [0, 5, -1])
    async def test_blocked_read_wakes_at_each_append(self, service: JournalService, offset: int) -> None:
        await _create(service)
        await _commit(service, b"hello")
        expected = b"hello" if offset == 0 else b""
        responses: list[ReadResponse] = []
        arrived = trio.Event()

        async def follow() -> None:
            async with service.read(ReadRequest(_ONE, offset, block=True)) as stream:
                async for response in stream:
                    responses.append(response)
                    if _content(responses) == expected:
                        arrived.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await self.settle()
            assert _content(responses) == expected
            for content in (b" ", b"world", _noise(2 * _MIB), b"!"):
                arrived, expected = trio.Event(), expected + content
                await _commit(service, content)
                await arrived.wait()
            nursery.cancel_scope.cancel()
        _check_stream(responses)
        assert all(response.status == Status.OK for response in responses)

    async def test_blocked_read_waits_for_an_offset_beyond(self, service: JournalService) -> None:
        await _create(service)
        got: list[bytes] = []

        async def follow() -> None:
            async with service.read(ReadRequest(_ONE, 8, block=True)) as stream:
                async for response in stream:
                    if response.content is not None:
                        assert response.offset == 8
                        got.append(bytes(response.content))
                        break

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            for _ in range(2):
                await _commit(service, b"1234")
                await self.settle()
                assert got == []
            await _commit(service, b"5678")
        assert got == [b"5678"]

    async def test_read_to_an_end_offset(self, service: JournalService) -> None:
        await _create(service)
        content = b"firstsecondthird"
        for part in (b"first", b"second", b"third"):
            await _commit(service, part)
        for begin, end in [(0, 3), (0, 5), (0, 6), (0, 11), (2, 16), (7, 8), (5, 11), (0, 16)]:
            for block in (False, True):
                responses = await _responses(service, ReadRequest(_ONE, begin, block=block, end_offset=end))
                _check_stream(responses)
                assert _content(responses) == content[begin:end]
                assert responses[-1].content is not None, f"[{begin}, {end}): the last chunk is the end"
        for begin in (0, 3, 15):
            responses = await _responses(service, ReadRequest(_ONE, begin, end_offset=begin))
            assert [(it.status, it.content) for it in responses] == [(Status.OK, None)]

    async def test_blocked_read_to_an_end_offset_that_comes(self, service: JournalService) -> None:
        await _create(service)
        got: list[bytes] = []

        async def follow() -> None:
            got.append(_content(await _responses(service, ReadRequest(_ONE, block=True, end_offset=8))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            for part in (b"123", b"456", b"78"):
                await self.settle()
                assert got == []
                await _commit(service, part)
        assert got == [b"12345678"]

    async def test_metadata_only(self, service: JournalService) -> None:
        await _create(service)
        for part in (b"first", b"second"):
            await _commit(service, part)
        for offset, span in [(0, (0, 5)), (4, (0, 5)), (5, (5, 11)), (10, (5, 11))]:
            responses = await _responses(service, ReadRequest(_ONE, offset, metadata_only=True, block=True))
            assert [(it.status, it.offset, it.write_head, it.content) for it in responses] == [
                (Status.OK, offset, 11, None)
            ]
            fragment = responses[0].fragment
            assert fragment is not None
            assert (fragment.begin, fragment.end) == span
        responses = await _responses(service, ReadRequest(_ONE, -1, metadata_only=True))
        assert [(it.status, it.offset, it.write_head) for it in responses] == [
            (Status.OFFSET_NOT_YET_AVAILABLE, 11, 11)
        ]

    async def test_a_large_journal_comes_back_whole(self, service: JournalService) -> None:
        await _create(service)
        parts = [_noise(700_000, seed) for seed in range(9)]
        for part in parts:
            await _commit(service, part)
        responses = await _responses(service, ReadRequest(_ONE))
        _check_stream(responses)
        assert _content(responses) == b"".join(parts)
        assert await read_all(service, offset=3_333_333) == b"".join(parts)[3_333_333:]

    async def test_content_is_the_readers(self, service: JournalService) -> None:
        """A buffer that was given out does not change when more is appended, or read."""
        await _create(service)
        await _commit(service, b"-")
        await _commit(service, b"a" * 1000)
        held = [it for it in await _responses(service, ReadRequest(_ONE)) if it.content is not None]
        await _commit(service, b"b" * 1000)
        await read_all(service)
        assert _content(held) == b"-" + b"a" * 1000

    async def test_readers_see_a_prefix_at_any_time(self, service: JournalService) -> None:
        await _create(service)
        expected = b"".join(b"%04d\n" % number for number in range(200))

        async def write() -> None:
            for number in range(200):
                await _commit(service, b"%04d\n" % number)

        async def look() -> None:
            length = 0
            while length < len(expected):
                found = await read_all(service)
                assert expected.startswith(found)
                assert len(found) >= length, "what was read is gone"
                assert len(found) % 5 == 0, "part of an append"
                length = len(found)

        async def tail() -> None:
            responses = await _responses(service, ReadRequest(_ONE, block=True, end_offset=len(expected)))
            _check_stream(responses)
            assert _content(responses) == expected

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(look)
                nursery.start_soon(tail)
            nursery.start_soon(write)

    async def test_blocked_read_ends_when_the_journal_is_deleted(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        ended: list[bytes] = []

        async def follow(offset: int) -> None:
            ended.append(_content(await _responses(service, ReadRequest(_ONE, offset, block=True))))

        async with trio.open_nursery() as nursery:
            for offset in (0, 5, -1, 1000):
                nursery.start_soon(follow, offset)
            await self.settle()
            assert ended == []
            await _apply(service, JournalChange(-1, delete=_ONE))
        assert sorted(ended) == [b"", b"", b"", b"hello"]

    async def test_waiting_appends_end_when_the_journal_is_deleted(self, service: JournalService) -> None:
        await _create(service)
        large, small = _Slow(_noise(2 * _MIB)), _Slow(b"small")
        failed: list[str] = []

        async def append(what: str, content: Content) -> None:
            try:
                response = await _append(service, content)
            except AppendFailed:
                failed.append(what)
            else:
                if response.status == Status.JOURNAL_NOT_FOUND:
                    failed.append(what)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append, "large", large)
            nursery.start_soon(append, "small", small)
            await large.begun.wait()
            await small.begun.wait()
            await self.settle()
            nursery.start_soon(append, "waiting", b"waiting")
            await self.settle()
            revision = await _create_again(service)
            large.go_on.set()
            small.go_on.set()
        assert sorted(failed) == ["large", "small", "waiting"]
        assert (await _find(service)).create_revision == revision
        assert await read_all(service) == b""
        assert (await _commit(service, b"new")).begin == 0

    async def test_read_ends_at_the_deadline(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        for offset in (0, 5, -1):
            scope = Scope(deadline=trio.current_time() + 0.05 + self.cushion_s)
            responses = await _responses(service, ReadRequest(_ONE, offset, block=True), scope)
            assert _content(responses) == (b"hello" if offset == 0 else b"")
            assert all(response.status == Status.OK for response in responses)

    async def test_read_stream_left_early(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"-")
        await _commit(service, _noise(2 * _MIB))
        for count in range(5):
            async with service.read(ReadRequest(_ONE, block=True)) as stream:
                for _ in range(count):
                    await anext(stream)
        assert len(await read_all(service)) == 2 * _MIB + 1

    async def test_cancelled_read_goes_on_where_it_was(self, service: JournalService) -> None:
        await _create(service)
        await _commit(service, b"hello")
        got = b""
        async with service.read(ReadRequest(_ONE, block=True)) as stream:
            while got != b"hello":
                response = await anext(stream)
                got += bytes(response.content or b"")
            with trio.move_on_after(0.02) as scope:
                await anext(stream)
            assert scope.cancelled_caught
        assert (await _commit(service, b" you")).begin == 5
        assert await read_all(service, offset=5) == b" you"

    # --- Stores and fragments -------------------------------------------------------------------------------

    async def test_fragments_without_a_store(self, service: JournalService) -> None:
        await _create(service)
        assert await _fragments(service) == []
        await _commit(service, b"first")
        await _commit(service, b"second")
        found = await _fragments(service)
        assert [(it.journal, it.begin, it.end) for it in found] == [(_ONE, 0, 5), (_ONE, 5, 11)]
        assert [it.sum for it in found] == [hashlib.sha1(b"first").digest(), hashlib.sha1(b"second").digest()]
        assert {(it.backing_store, it.mod_time) for it in found} == {("", 0)}
        # An upper bound leaves out what is in no store; a lower one does not.
        assert await _fragments(service, end_mod_time=2**40) == []
        assert await _fragments(service, begin_mod_time=2**40) == found
        response = await service.fragments(FragmentsRequest(_ONE, signature_ttl_s=60))
        assert [listed.signed_url for listed in response.fragments] == ["", ""]

    async def test_fragments_in_pages(self, service: JournalService) -> None:
        await _create(service, spec_of(fragment_length=1024))
        for number in range(7):
            await _commit(service, _noise(1025, number))
        every = await _fragments(service)
        assert [it.begin for it in every] == [1025 * number for number in range(7)]
        for limit in (1, 2, 3, 6, 7, 8, 10_000):
            found: list[Fragment] = []
            token, pages = 0, 0
            while True:
                response = await service.fragments(FragmentsRequest(_ONE, page_limit=limit, next_page_token=token))
                assert len(response.fragments) <= limit
                found += [listed.spec for listed in response.fragments]
                token = response.next_page_token
                pages += 1
                if not token:
                    break
            assert found == every
            assert pages == -(-7 // limit)
        assert await _fragments(service, next_page_token=1) == every[1:]
        assert await _fragments(service, next_page_token=1025) == every[1:]
        assert await _fragments(service, next_page_token=10**9) == []

    @pytest.mark.parametrize("codec", [CompressionCodec.NONE, CompressionCodec.SNAPPY])
    async def test_fragments_go_to_the_store(self, service: JournalService, codec: CompressionCodec) -> None:
        store = self._store()
        await _create(
            service, spec_of(fragment_length=1024, fragment_stores=(store,), fragment_compression_codec=codec)
        )
        content = b""
        for number in range(4):
            content += _noise(2000, number)
            assert (await _commit(service, _noise(2000, number))).compression_codec == codec
        found = await self.until_persisted(service, 3)
        assert [(it.begin, it.end) for it in found] == [(at, at + 2000) for at in range(0, 8000, 2000)]
        for fragment in found[:3]:
            assert fragment.backing_store == store
            assert fragment.mod_time > 0
            assert fragment.compression_codec == codec
            assert fragment.sum == hashlib.sha1(content[fragment.begin : fragment.end]).digest()
        assert (found[3].backing_store, found[3].mod_time) == ("", 0)
        for offset in (0, 1, 1999, 2000, 3333, 7999, 8000):
            responses = await _responses(service, ReadRequest(_ONE, offset))
            _check_stream(responses)
            assert _content(responses) == content[offset:]
        metadata = [it for it in await _responses(service, ReadRequest(_ONE)) if it.fragment is not None]
        assert [bool(it.fragment_url) for it in metadata] == [True, True, True, False]
        assert metadata[0].fragment_url.endswith(found[0].content_path)
        signed = await service.fragments(FragmentsRequest(_ONE, signature_ttl_s=60))
        assert [bool(it.signed_url) for it in signed.fragments] == [True, True, True, False]
        plain = await service.fragments(FragmentsRequest(_ONE))
        assert [it.signed_url for it in plain.fragments] == [""] * 4

    async def test_modification_times(self, service: JournalService) -> None:
        await _create(service, spec_of(fragment_length=1024, fragment_stores=(self._store(),)))
        for number in range(3):
            await _commit(service, _noise(2000, number))
        found = await self.until_persisted(service, 2)
        first, last = found[0].mod_time, found[1].mod_time
        assert await _fragments(service, begin_mod_time=first, end_mod_time=last) == found[:2]
        assert await _fragments(service, end_mod_time=first - 1) == []
        assert await _fragments(service, begin_mod_time=last + 1) == found[2:]
        # A read passes over what was persisted before its begin_mod_time; what is local is never too old.
        responses = await _responses(service, ReadRequest(_ONE, begin_mod_time=last + 1))
        _check_stream(responses)
        assert (responses[0].status, responses[0].offset) == (Status.OK, 4000)
        assert _content(responses) == _noise(2000, 2)
        assert len(_content(await _responses(service, ReadRequest(_ONE, begin_mod_time=first)))) == 6000

    async def test_store_is_found_by_a_new_journal_of_the_name(self, service: JournalService) -> None:
        """Deleting a journal deletes no fragment: who creates it again goes on after what the store holds."""
        spec = spec_of(fragment_length=1024, fragment_stores=(self._store(),))
        await _create(service, spec)
        for number in range(3):
            await _commit(service, _noise(2000, number))
        await self.until_persisted(service, 2)
        await _apply(service, JournalChange(-1, delete=_ONE))
        await _create(service, spec)
        assert await read_all(service) == _noise(2000, 0) + _noise(2000, 1)
        refused = await _append(service, b"x")
        assert (refused.status, refused.commit) == (Status.INDEX_HAS_GREATER_OFFSET, None)
        assert (await _append(service, _noise(2 * _MIB))).status == Status.INDEX_HAS_GREATER_OFFSET
        assert (await _append(service, b"", suspend=SuspendControl.KEEP)).status == Status.INDEX_HAS_GREATER_OFFSET
        assert (await _append(service, b"x", offset=3999)).status == Status.WRONG_APPEND_OFFSET
        reset = await _append(service, b"", offset=4000, suspend=SuspendControl.KEEP)
        assert reset.status == Status.OK
        assert (await _commit(service, b"after")).begin == 4000
        assert (await read_all(service))[4000:] == b"after"

    @pytest.mark.parametrize("length", [5, 2 * _MIB])
    async def test_head_reset_of_a_journal_with_an_older_suspend_offset(
        self, service: JournalService, length: int
    ) -> None:
        spec = spec_of(fragment_length=1024, fragment_stores=(self._store(),))
        await _create(service, spec)
        for number in range(3):
            await _commit(service, _noise(2000, number))
        await self.until_persisted(service, 2)
        await _apply(service, JournalChange(-1, delete=_ONE))
        await _create(service, replace(spec, suspend=Suspend(SuspendLevel.NONE, 1000)))
        assert (await _append(service, b"x")).status == Status.INDEX_HAS_GREATER_OFFSET
        assert (await _commit(service, _noise(length), offset=4000)).begin == 4000

    async def test_store_health(self, service: JournalService) -> None:
        if self.store_url is not None:
            healthy = await service.store_health(FragmentStoreHealthRequest(self.store_url))
            assert (healthy.status, healthy.store_health_error) == (Status.OK, "")
            _check_unrouted(healthy.header)
        missing = await service.store_health(FragmentStoreHealthRequest("file:///no/such/folder/"))
        assert missing.status == Status.FRAGMENT_STORE_UNHEALTHY
        assert missing.store_health_error

    async def test_appends_are_refused_while_the_store_is_unusable(self, service: JournalService) -> None:
        await _create(service, spec_of(fragment_stores=("file:///no/such/folder/",)))
        response = await _append(service, b"x")
        assert response.status == Status.FRAGMENT_STORE_UNHEALTHY
        assert response.store_health_error.startswith("fragment store file:///no/such/folder/ unhealthy: ")
        await _apply(service, JournalChange(-1, spec_of()))
        assert (await _commit(service, b"x")).begin == 0

    # --- Scopes ---------------------------------------------------------------------------------------------

    async def test_what_claims_do_not_select_is_not_there(self, service: JournalService) -> None:
        self._need_claims()
        await _create(service, spec_of(_ONE, labels=_label("env", "prod")), spec_of(_TWO, labels=_label("env", "test")))
        await _commit(service, b"one", _ONE)
        await _commit(service, b"two", _TWO)
        for selector in ("env=prod", f"name={_ONE}", "name:prefix=conformance/o", "env!=test"):
            scope = _may(selector=selector)
            assert (await _append(service, b"!", _ONE, scope)).status == Status.OK
            assert (await _append(service, b"!", _TWO, scope)).status == Status.JOURNAL_NOT_FOUND
            assert (await _append(service, _noise(2 * _MIB), _TWO, scope)).status == Status.JOURNAL_NOT_FOUND
            assert (await _read_one(service, ReadRequest(_ONE), scope)).status == Status.OK
            hidden = await _responses(service, ReadRequest(_TWO, block=True), scope)
            assert [it.status for it in hidden] == [Status.JOURNAL_NOT_FOUND]
            assert hidden[0].write_head == 0
            assert (await service.fragments(FragmentsRequest(_ONE), scope)).status == Status.OK
            assert (await service.fragments(FragmentsRequest(_TWO), scope)).status == Status.JOURNAL_NOT_FOUND
            assert await _list(service, "", scope) == [_ONE]
            assert await _list(service, f"name={_TWO}", scope) == []
        assert await read_all(service, _TWO) == b"two"
        assert (await read_all(service, _ONE)).startswith(b"one!!!!")

    async def test_prefix_in_claims_is_for_list_alone(self, service: JournalService) -> None:
        self._need_claims()
        await _create(service)
        scope = _may(selector="prefix=conformance/")
        assert await _list(service, "", scope) == [_ONE]
        assert await _list(service, "", _may(selector="prefix=other/")) == []
        assert (await _append(service, b"x", scope=scope)).status == Status.JOURNAL_NOT_FOUND

    async def test_watch_sees_what_the_claims_select(self, service: JournalService) -> None:
        self._need_claims()
        await _create(service, spec_of(_ONE, labels=_label("env", "prod")), spec_of(_TWO, labels=_label("env", "test")))
        async with service.watch(ListRequest(), _may(selector="env=prod")) as watch:
            mirror = _Mirror()
            mirror.take(await anext(watch))
            assert mirror.names == [_ONE]
            await _apply(service, JournalChange(-1, delete=_TWO))  # never shown, so not told
            await _apply(service, JournalChange(-1, spec_of(_NONE, labels=_label("env", "prod"))))
            await mirror.until(watch, lambda: mirror.names == [_NONE, _ONE])
            await _apply(service, JournalChange(-1, spec_of(_ONE, labels=_label("env", "test"))))
            await mirror.until(watch, lambda: mirror.names == [_NONE])

    async def test_apply_only_what_the_claims_select(self, service: JournalService) -> None:
        self._need_claims()
        scope = _may(selector="env=prod")
        with pytest.raises(NotAuthorized, match=f"^not authorized to {_ONE}$"):
            await _apply(service, JournalChange(0, spec_of()), scope=scope)
        with pytest.raises(NotAuthorized):
            await _apply(
                service,
                JournalChange(0, spec_of(_TWO, labels=_label("env", "prod"))),
                JournalChange(0, spec_of(_ONE)),
                scope=scope,
            )
        assert await _list(service) == []
        mine = spec_of(labels=_label("env", "prod"))
        assert (await _apply(service, JournalChange(0, mine), scope=scope)).status == Status.OK
        # Of what is to be deleted only the name is looked at.
        with pytest.raises(NotAuthorized):
            await _apply(service, JournalChange(-1, delete=_ONE), scope=scope)
        by_name = _may(selector=f"name={_ONE}")
        assert (await _apply(service, JournalChange(-1, delete=_ONE), scope=by_name)).status == Status.OK

    @pytest.mark.parametrize("capability", [Capability.LIST, Capability.APPLY, Capability.READ, Capability.APPEND])
    async def test_capabilities(self, service: JournalService, capability: Capability) -> None:
        self._need_claims()
        await _create(service)
        calls: dict[str, tuple[Capability, Callable[[Scope], Any]]] = {
            "list": (Capability.LIST, lambda scope: service.list(ListRequest(), scope)),
            "watch": (Capability.LIST, lambda scope: _first_change(service, scope)),
            "apply": (Capability.APPLY, lambda scope: service.apply(ApplyRequest(), scope)),
            "read": (Capability.READ, lambda scope: _read_one(service, ReadRequest(_ONE), scope)),
            "fragments": (Capability.READ, lambda scope: service.fragments(FragmentsRequest(_ONE), scope)),
            "store_health": (
                Capability.READ,
                lambda scope: service.store_health(FragmentStoreHealthRequest("file:///no/"), scope),
            ),
            "append": (Capability.APPEND, lambda scope: _append(service, b"x", scope=scope)),
        }
        for needed, call in calls.values():
            await call(_may(needed))
            if capability == needed:
                with pytest.raises(NotAuthorized) as caught:
                    await call(_may(Capability.ALL & ~capability))
                assert str(caught.value) == f"authorization is missing required {capability.name} capability"
        assert await read_all(service) == (b"xx" if capability == 0 else b"x")

    # --- Validation -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("name", "text"), _BAD_JOURNALS)
    async def test_invalid_journal_names(self, service: JournalService, name: str, text: str) -> None:
        for call in (
            lambda: _append(service, b"x", name),
            lambda: _responses(service, ReadRequest(name)),
            lambda: service.fragments(FragmentsRequest(name)),
        ):
            await _invalid(call, text)

    @pytest.mark.parametrize(("fields", "text"), _BAD_APPENDS)
    async def test_invalid_appends(self, service: JournalService, fields: dict[str, Any], text: str) -> None:
        await _create(service)
        for _ in range(2):  # of a journal never used, and of one in use
            for journal in (_ONE, _NONE):
                for content in (b"x", b"", _pieces(b"x", 1)):
                    await _invalid(lambda c=content, j=journal: _append(service, c, j, **fields), text)  # type: ignore[misc]
            await _commit(service, b"x")
        assert await read_all(service) == b"xx"
        assert await _registers(service) == LabelSet()

    @pytest.mark.parametrize(("fields", "text"), _BAD_READS)
    async def test_invalid_reads(self, service: JournalService, fields: dict[str, Any], text: str) -> None:
        await _create(service)
        for journal in (_ONE, _NONE):
            await _invalid(lambda j=journal: _responses(service, ReadRequest(j, **fields)), text)  # type: ignore[misc]

    @pytest.mark.parametrize(("selector", "text"), _BAD_SELECTORS)
    async def test_invalid_selectors(self, service: JournalService, selector: LabelSelector, text: str) -> None:
        await _invalid(lambda: service.list(ListRequest(selector)), text)
        await _invalid(lambda: _first_change(service, UNSCOPED, selector), text)

    @pytest.mark.parametrize(("fields", "text"), _BAD_FRAGMENT_REQUESTS)
    async def test_invalid_fragment_requests(self, service: JournalService, fields: dict[str, Any], text: str) -> None:
        await _create(service)
        for journal in (_ONE, _NONE):
            await _invalid(lambda j=journal: service.fragments(FragmentsRequest(j, **fields)), text)  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            *((change, f": {text}") for change, text in _BAD_CHANGES),
            *((change, f".{text}") for change, text in _BAD_CHANGES_WITHIN),
        ],
    )
    async def test_invalid_changes(self, service: JournalService, change: JournalChange, text: str) -> None:
        await _invalid(lambda: _apply(service, change), f"Changes[0]{text}")
        good = JournalChange(0, spec_of(_TWO))
        await _invalid(lambda: _apply(service, good, change), f"Changes[1]{text}")
        assert await _list(service) == []

    @pytest.mark.parametrize(
        ("store", "text"),
        [
            ("folder", "FragmentStore: not absolute (folder)"),
            ("s3:///no-bucket/", "FragmentStore: missing bucket (s3:///no-bucket/)"),
        ],
    )
    async def test_invalid_store_health_requests(self, service: JournalService, store: str, text: str) -> None:
        await _invalid(lambda: service.store_health(FragmentStoreHealthRequest(store)), text)


async def _create_again(service: JournalService) -> int:
    assert (await _apply(service, JournalChange(-1, delete=_ONE))).status == Status.OK
    return await _create(service)


async def _first_change(
    service: JournalService, scope: Scope, selector: LabelSelector | None = None
) -> WatchChange:
    async with service.watch(ListRequest(selector or LabelSelector()), scope) as watch:
        return await anext(aiter(watch))


async def _invalid(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        await call()
    assert str(caught.value) == text

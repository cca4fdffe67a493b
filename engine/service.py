"""`JournalService`: what a set of journals can do. The first and widest of the four seams (design.md §2).

It is implemented by `engine.Engine`, later by the cluster's broker, and by the network clients; facades and the
handles (`Journal`, `Reader`, `Appender`) take one. All pass `broadsheet.testing.conformance.journal_service`.

Requests and responses are frozen values with the field names of spec/broker-protocol.md §4, with three differences:

* an offset or limit that is not given is `None`, not 0; an explicit append offset of 0 is checked;
* content is a stream of buffers of any size, and a facade cuts it to its frames;
* watches yield changes, not snapshots.

**Outcomes.** What the protocol reports in a `status` field is returned in a response. What it reports as a failed
RPC is raised: `ValidationError` for a request that cannot be, `AppendFailed` for an append rolled back,
`OutcomeUnknown` where nobody can tell, `EngineClosed` at the end. A service never retries.

**Scope.** Every call takes one: who asks, until when, and how far the request may travel. What the claims do not
select does not exist for that caller (spec/broker-protocol.md §9).
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from broadsheet.engine.errors import Status, ValidationError
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.durations import format_duration
from broadsheet.engine.journal.spec import JournalChange, JournalSpec
from broadsheet.engine.labels import LabelSelector, LabelSet

__all__ = [
    "MAX_OFFSET",
    "UNSCOPED",
    "AppendRequest",
    "AppendResponse",
    "ApplyRequest",
    "ApplyResponse",
    "Buffer",
    "Capability",
    "Claims",
    "Content",
    "EtcdHeader",
    "FragmentStoreHealthRequest",
    "FragmentStoreHealthResponse",
    "FragmentsRequest",
    "FragmentsResponse",
    "Header",
    "JournalService",
    "ListRequest",
    "ListResponse",
    "ListedFragment",
    "ListedJournal",
    "ProcessId",
    "ReadRequest",
    "ReadResponse",
    "ReadStream",
    "Route",
    "Scope",
    "SuspendControl",
    "WatchChange",
    "WatchStream",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
Content: TypeAlias = Buffer | AsyncIterable[Buffer]
"""What an append takes. A buffer is complete as it stands. Of an iterable, the normal end commits, and an
exception (`AppendAborted`, or any other) rolls back and comes out of `append`. A buffer that an iterable yields must
stay unchanged until the next one is asked for."""

MAX_OFFSET = 2**63 - 1


# --- Where an answer comes from ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessId:
    zone: str = ""
    suffix: str = ""

    def __bool__(self) -> bool:
        return bool(self.zone or self.suffix)


@dataclass(frozen=True, slots=True)
class Route:
    """Members of a journal's assignment in key order; `primary` indexes them, -1 for none."""

    members: tuple[ProcessId, ...] = ()
    primary: int = -1
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EtcdHeader:
    """The coordinator's identity and revision. Clients refuse zeros, so a stand-alone engine has its own."""

    cluster_id: int
    member_id: int
    revision: int
    raft_term: int


@dataclass(frozen=True, slots=True)
class Header:
    process_id: ProcessId
    route: Route
    etcd: EtcdHeader


# --- Who asks ---------------------------------------------------------------------------------------------


class Capability(IntFlag):
    """Bits of a claim (spec/broker-protocol.md §9)."""

    LIST = 1 << 1
    APPLY = 1 << 2
    READ = 1 << 3
    APPEND = 1 << 4
    REPLICATE = 1 << 5
    ALL = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Claims:
    """What the caller may do, to the journals whose labels (and implicit `name`) `selector` selects."""

    capability: Capability = Capability.ALL
    selector: LabelSelector = field(default_factory=LabelSelector)


@dataclass(frozen=True, slots=True)
class Scope:
    """Who asks, until when, and how far the request may travel.

    claims: None is the process itself: everything is allowed and visible.
    deadline: seconds on the Runtime's clock after which waits end (a blocked read ends cleanly).
    min_revision: the answer must reflect at least this coordinator revision.
    proxied_header: set by a broker that forwards the request.
    may_proxy: False if the answer must come from the process asked.
    """

    claims: Claims | None = None
    deadline: float | None = None
    min_revision: int = 0
    proxied_header: Header | None = None
    may_proxy: bool = True


UNSCOPED = Scope()


# --- Append -----------------------------------------------------------------------------------------------


class SuspendControl(IntEnum):
    RESUME = 0
    NO_RESUME = 1
    IF_FLUSHED = 2
    NOW = 3
    KEEP = 4


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """offset: byte offset at which the append must land, None for wherever the head is."""

    journal: str
    offset: int | None = None
    check_registers: LabelSelector | None = None
    union_registers: LabelSet | None = None
    subtract_registers: LabelSet | None = None
    suspend: SuspendControl = SuspendControl.RESUME

    def validate(self) -> None:
        """Raise `ValidationError` with the texts of spec/broker-protocol.md §5."""
        _validate_journal(self.journal)
        if self.offset is not None and not 0 <= self.offset <= MAX_OFFSET:
            raise ValidationError(f"invalid Offset ({self.offset}; expected >= 0)", journal=self.journal)
        if self.check_registers is not None:
            _within("CheckRegisters", self.check_registers.validate)
        if self.union_registers is not None:
            _within("UnionRegisters", self.union_registers.validate)
        if self.subtract_registers is not None:
            _within("SubtractRegisters", self.subtract_registers.validate)


@dataclass(frozen=True, slots=True)
class AppendResponse:
    """`commit` is set if OK: begin and end of exactly this append, sum over its bytes (SHA-1 of nothing for a
    barrier). `registers` is set if OK or REGISTER_MISMATCH."""

    status: Status
    header: Header
    commit: Fragment | None = None
    registers: LabelSet | None = None
    total_chunks: int = 0
    delayed_chunks: int = 0
    store_health_error: str = ""


# --- Read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """offset -1 is the end of the index when the request is served. end_offset: None reads on; begin_mod_time:
    unix seconds, 0 for none."""

    journal: str
    offset: int = 0
    block: bool = False
    do_not_proxy: bool = False
    metadata_only: bool = False
    end_offset: int | None = None
    begin_mod_time: int = 0

    def validate(self) -> None:
        _validate_journal(self.journal)
        if not -1 <= self.offset <= MAX_OFFSET:
            raise ValidationError(
                f"invalid Offset ({self.offset}; expected -1 <= Offset <= MaxInt64)", journal=self.journal
            )
        if self.end_offset is not None and self.end_offset < self.offset:
            raise ValidationError(
                f"invalid EndOffset ({self.end_offset}; expected 0 or Offset <= EndOffset)", journal=self.journal
            )


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """Metadata (`content` is None), or content at `offset`. `header` is on the first response only."""

    status: Status = Status.OK
    header: Header | None = None
    offset: int = 0
    write_head: int = 0
    fragment: Fragment | None = None
    fragment_url: str = ""
    content: Buffer | None = None


@runtime_checkable
class ReadStream(Protocol):
    """Responses in order: one metadata, its content, the next metadata … . The end of iteration is a clean EOF.

    A content buffer is the caller's: it is never changed afterwards."""

    def __aiter__(self) -> ReadStream: ...

    async def __anext__(self) -> ReadResponse: ...


# --- List, watch, apply -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListRequest:
    selector: LabelSelector = field(default_factory=LabelSelector)

    def validate(self) -> None:
        _within("Selector", self.selector.validate_list)


@dataclass(frozen=True, slots=True)
class ListedJournal:
    spec: JournalSpec
    mod_revision: int
    route: Route
    create_revision: int


@dataclass(frozen=True, slots=True)
class ListResponse:
    """Journals in the byte order of their names, as of `header.etcd.revision`."""

    status: Status
    header: Header
    journals: tuple[ListedJournal, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchChange:
    """What changed between the previous change and `header.etcd.revision`. The first one holds every selected
    journal as upserted (or, when resumed, what changed since). A journal that is no longer selected is deleted."""

    header: Header
    upserted: tuple[ListedJournal, ...] = ()
    deleted: tuple[str, ...] = ()


@runtime_checkable
class WatchStream(Protocol):
    def __aiter__(self) -> WatchStream: ...

    async def __anext__(self) -> WatchChange: ...


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    changes: tuple[JournalChange, ...] = ()

    def validate(self, *, allow_lz4: bool = False) -> None:
        for index, change in enumerate(self.changes):
            context = f"Changes[{index}]"
            revision = change.expect_mod_revision
            if change.upsert is not None and change.delete:
                raise ValidationError("both Upsert and Delete are set (expected exactly one)", context=context)
            if change.upsert is not None:
                try:
                    change.upsert.validate(allow_lz4=allow_lz4)
                except ValidationError as error:
                    raise error.within("Upsert").within(context) from None
                if revision < -1:
                    raise ValidationError(
                        f"invalid ExpectModRevision ({revision}; expected >= 0 or -1)", context=context
                    )
            elif change.delete:
                try:
                    _validate_journal(change.delete, context="Delete")
                except ValidationError as error:
                    raise error.within(context) from None
                if revision <= 0 and revision != -1:
                    raise ValidationError(
                        f"invalid ExpectModRevision ({revision}; expected > 0 or -1)", context=context
                    )
            else:
                raise ValidationError("neither Upsert nor Delete are set (expected exactly one)", context=context)


@dataclass(frozen=True, slots=True)
class ApplyResponse:
    """OK, or ETCD_TRANSACTION_FAILED and nothing changed. `conflicts` names the journals whose revision was not
    the expected one (ours; the wire does not carry it)."""

    status: Status
    header: Header
    conflicts: tuple[str, ...] = ()


# --- Fragments --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FragmentsRequest:
    """Times are unix seconds, 0 for none; `signature_ttl_s` asks for signed URLs."""

    journal: str
    begin_mod_time: int = 0
    end_mod_time: int = 0
    next_page_token: int = 0
    page_limit: int = 0
    signature_ttl_s: float | None = None
    do_not_proxy: bool = False

    def validate(self) -> None:
        _validate_journal(self.journal)
        if self.end_mod_time and self.end_mod_time < self.begin_mod_time:
            raise ValidationError(
                f"invalid EndModTime ({self.end_mod_time} must be after {self.begin_mod_time})",
                journal=self.journal,
            )
        if self.next_page_token < 0:
            raise ValidationError(
                f"invalid NextPageToken ({self.next_page_token}; must be >= 0)", journal=self.journal
            )
        if not 0 <= self.page_limit <= 10_000:
            raise ValidationError(
                f"invalid PageLimit ({self.page_limit}; must be >= 0 and <= 10000)", journal=self.journal
            )
        if self.signature_ttl_s is not None and self.signature_ttl_s <= 0:
            raise ValidationError(
                f"invalid SignatureTTL ({format_duration(round(self.signature_ttl_s * 1e9))}; must be > 0s)",
                journal=self.journal,
            )


@dataclass(frozen=True, slots=True)
class ListedFragment:
    spec: Fragment
    signed_url: str = ""


@dataclass(frozen=True, slots=True)
class FragmentsResponse:
    """`next_page_token` is the begin of the next fragment not returned, 0 when done."""

    status: Status
    header: Header
    fragments: tuple[ListedFragment, ...] = ()
    next_page_token: int = 0


@dataclass(frozen=True, slots=True)
class FragmentStoreHealthRequest:
    fragment_store: str

    def validate(self) -> None:
        from broadsheet.engine.journal.spec import validate_store

        _within("FragmentStore", partial(validate_store, self.fragment_store))


@dataclass(frozen=True, slots=True)
class FragmentStoreHealthResponse:
    status: Status
    header: Header
    store_health_error: str = ""


# --- The seam ---------------------------------------------------------------------------------------------


class JournalService(Protocol):
    """A set of journals. Every method may raise `ValidationError` and `EngineClosed`, and is cancellable at each
    await; a cancelled call has either happened or not, never in part."""

    async def append(
        self, request: AppendRequest, content: Content = b"", scope: Scope = UNSCOPED
    ) -> AppendResponse:
        """Append `content` as one atomic span.

        Returns once the service's durability is reached. Raises `AppendFailed` (rolled back, nothing written),
        `OutcomeUnknown`, or what the content iterable raised (rolled back). Cancelled before its group is
        sealed, it is rolled back; afterwards it stands.
        """
        ...

    def read(
        self, request: ReadRequest, scope: Scope = UNSCOPED
    ) -> AbstractAsyncContextManager[ReadStream]:
        """Stream the journal from `request.offset` (spec/broker-protocol.md §7.1)."""
        ...

    async def list(self, request: ListRequest, scope: Scope = UNSCOPED) -> ListResponse:
        """All selected journals (spec/broker-protocol.md §7.5)."""
        ...

    def watch(
        self, request: ListRequest, scope: Scope = UNSCOPED, *, resume_revision: int = 0
    ) -> AbstractAsyncContextManager[WatchStream]:
        """Changes of the selected journals, from now, or from after `resume_revision`. Ends only with the
        service or the scope's deadline."""
        ...

    async def apply(self, request: ApplyRequest, scope: Scope = UNSCOPED) -> ApplyResponse:
        """Create, change and delete journals: all of the changes or none (spec/broker-protocol.md §7.6)."""
        ...

    async def fragments(self, request: FragmentsRequest, scope: Scope = UNSCOPED) -> FragmentsResponse:
        """The journal's fragments, spool included (spec/broker-protocol.md §7.7)."""
        ...

    async def store_health(
        self, request: FragmentStoreHealthRequest, scope: Scope = UNSCOPED
    ) -> FragmentStoreHealthResponse:
        """Whether a fragment store can be written, read and listed (spec/broker-protocol.md §7.8)."""
        ...


def _validate_journal(name: str, context: str = "Journal") -> None:
    from broadsheet.engine.labels.tokens import validate_request_journal

    try:
        validate_request_journal(name)
    except ValidationError as error:
        raise error.within(context) from None


def _within(context: str, validate: ValidateCall) -> None:
    try:
        validate()
    except ValidationError as error:
        raise error.within(context) from None


class ValidateCall(Protocol):
    def __call__(self) -> None: ...

"""The one tree of errors.

Every failure that a caller can meet is a `BroadsheetError`. Two branches tell whose fault it is:

* `LocalError`: the caller asked for something that cannot be (a bad name, a used-up handle).
* `RemoteError`: the engine or broker could not do it (a full disk, a lost connection, a status that is not OK).

Each carries `journal` and `offset` where they are known, `status` (the wire status, spec/broker-protocol.md §3,
or None where the wire has none) and `hint`: what to do about it. `OutcomeUnknown` is the third outcome of an
append: it *may* have happened.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "AppendAborted",
    "AppendFailed",
    "BroadsheetError",
    "CorruptData",
    "DeadlineExceeded",
    "EngineClosed",
    "EngineLocked",
    "EngineWritesFailed",
    "LocalError",
    "NotAuthorized",
    "OutcomeUnknown",
    "RemoteError",
    "SlowAppend",
    "Status",
    "StatusError",
    "StorageError",
    "ValidationError",
]


class Status(IntEnum):
    """Application status of a response (spec/broker-protocol.md §3)."""

    OK = 0
    JOURNAL_NOT_FOUND = 1
    NO_JOURNAL_PRIMARY_BROKER = 2
    NOT_JOURNAL_PRIMARY_BROKER = 3
    INSUFFICIENT_JOURNAL_BROKERS = 4
    NOT_JOURNAL_BROKER = 5
    OFFSET_NOT_YET_AVAILABLE = 6
    WRONG_ROUTE = 7
    PROPOSAL_MISMATCH = 8
    ETCD_TRANSACTION_FAILED = 9
    NOT_ALLOWED = 10
    WRONG_APPEND_OFFSET = 11
    INDEX_HAS_GREATER_OFFSET = 12
    REGISTER_MISMATCH = 13
    SUSPENDED = 14
    FRAGMENT_STORE_UNHEALTHY = 15


class BroadsheetError(Exception):
    """Base of all errors of this library."""

    def __init__(
        self,
        text: str,
        *,
        journal: str | None = None,
        offset: int | None = None,
        status: Status | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(text)
        self.text = text
        self.journal = journal
        self.offset = offset
        self.status = status
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


class LocalError(BroadsheetError):
    """The caller did it: the same call will fail again."""


class RemoteError(BroadsheetError):
    """The engine, its disk or its network did it."""


class ValidationError(LocalError):
    """A request, spec, label or name is not valid.

    `str()` is the exact text of spec/broker-protocol.md §5: the context path, `": "`, the reason. `within`
    returns a copy with one more context in front, as nested messages are reported.
    """

    def __init__(self, text: str, *, context: str = "", journal: str | None = None) -> None:
        super().__init__(text, journal=journal)
        self.context = context

    def within(self, context: str) -> ValidationError:
        joined = f"{context}.{self.context}" if self.context else context
        return ValidationError(self.text, context=joined, journal=self.journal)

    def __str__(self) -> str:
        return f"{self.context}: {self.text}" if self.context else self.text


class NotAuthorized(LocalError):
    """The caller's claims lack the capability (spec/broker-protocol.md §9)."""


class DeadlineExceeded(RemoteError):
    """The scope's deadline passed before the request was done; nothing was written."""


class AppendAborted(LocalError):
    """Raised *by a content iterable* to abandon its append; the append is rolled back."""


class EngineClosed(LocalError):
    """The engine (or handle) was closed before or while it was used."""


class EngineLocked(LocalError):
    """Another process has the engine's folder open for writing."""


class StatusError(RemoteError):
    """A response whose status is not OK, raised by the handles (`Journal`, `Reader`, `Appender`)."""


class AppendFailed(RemoteError):
    """The append was rolled back: nothing of it is in the journal."""


class SlowAppend(AppendFailed):
    """The content arrived at less than the minimum append rate; rolled back (spec/replication.md §5.7)."""


class StorageError(AppendFailed):
    """The disk refused a write before anything was acknowledged (full, read-only, EIO); rolled back."""


class OutcomeUnknown(RemoteError):
    """The append may or may not be in the journal: the connection or the disk failed at the decisive moment."""


class EngineWritesFailed(RemoteError):
    """A sync or log write failed earlier: this engine takes no more writes until it is opened again."""


class CorruptData(RemoteError):
    """A record, spool or fragment does not hold what it promises. `path` names the file, which is kept."""

    def __init__(
        self, text: str, *, path: str, journal: str | None = None, offset: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(text, journal=journal, offset=offset, hint=hint or "the file was kept as it is")
        self.path = path

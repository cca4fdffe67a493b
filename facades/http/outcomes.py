"""How failures are told over HTTP (spec/http-gateway.md §4 and §7, spec/broker-protocol.md §3)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from broadsheet.engine.errors import (
    AppendFailed,
    BroadsheetError,
    CorruptData,
    EngineClosed,
    EngineWritesFailed,
    NotAuthorized,
    OutcomeUnknown,
    Status,
    StatusError,
)

__all__ = ["GrpcCode", "RpcFailure", "http_status_of_append", "http_status_of_read", "rpc_failure"]

APPEND_CONTEXT = "append stream: "


class GrpcCode(IntEnum):
    """The codes of gRPC that a journal service fails with."""

    CANCELED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    UNIMPLEMENTED = 12
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def go_name(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """A failed call: its gRPC code and text, and the status and text of a plain HTTP answer."""

    code: GrpcCode
    text: str
    http_status: int
    http_text: str


def rpc_failure(error: BroadsheetError, *, append: bool = False) -> RpcFailure:
    """What to tell of an error that a service raised, other than `ValidationError`."""
    if isinstance(error, StatusError) and error.status is not None:
        status = http_status_of_append(error.status) if append else http_status_of_read(error.status)
        return RpcFailure(GrpcCode.UNKNOWN, error.status.name, status, error.status.name)
    if isinstance(error, AppendFailed):
        text = str(error)
        return _rpc(GrpcCode.UNKNOWN, text if text.startswith(APPEND_CONTEXT) else APPEND_CONTEXT + text)
    if isinstance(error, OutcomeUnknown):
        # Not UNAVAILABLE, which clients retry: the append may stand, and a retry would write it twice.
        return RpcFailure(GrpcCode.UNKNOWN, str(error), 503, str(error))
    if isinstance(error, (EngineWritesFailed, EngineClosed)):
        return RpcFailure(GrpcCode.UNAVAILABLE, str(error), 503, str(error))
    if isinstance(error, NotAuthorized):
        return RpcFailure(GrpcCode.UNAUTHENTICATED, str(error), 401, str(error))
    if isinstance(error, CorruptData):
        return _rpc(GrpcCode.DATA_LOSS, f"{error}: {error.path}" if error.path not in str(error) else str(error))
    return _rpc(GrpcCode.UNKNOWN, str(error))


def http_status_of_read(status: Status) -> int:
    """HTTP status of a GET or HEAD whose first response has this status."""
    return _READ_STATUSES.get(status, 500)


def http_status_of_append(status: Status) -> int:
    """HTTP status of a PUT. Gazette answers 500 to a missing journal; we part from it (design.md §10)."""
    if status is Status.OK:
        return 204
    return 404 if status is Status.JOURNAL_NOT_FOUND else 500


_READ_STATUSES = {
    Status.OK: 206,
    Status.JOURNAL_NOT_FOUND: 404,
    Status.INSUFFICIENT_JOURNAL_BROKERS: 503,
    Status.OFFSET_NOT_YET_AVAILABLE: 416,
}


def _rpc(code: GrpcCode, text: str) -> RpcFailure:
    return RpcFailure(code, text, 500, f"rpc error: code = {code.go_name} desc = {text}")

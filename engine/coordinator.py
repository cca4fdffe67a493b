"""`Coordinator`: revisioned keys, transactions, leases and prefix watches. The second seam (design.md §2).

etcd's model and no more. Specs, assignments and hints live behind it, so that a stand-alone engine needs no etcd and
a cluster shares one. Implemented by `LocalCoordinator` (in memory, or durable in an engine's folder) and, in the
cluster room, by an etcd client. Each passes `broadsheet.testing.conformance.coordinator`.

Revisions start at 1 for an empty store, grow by one with each transaction that writes, and never go back, not even
over a restart. Keys and values are bytes; keys are ordered.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from broadsheet.engine.errors import LocalError, RemoteError

__all__ = [
    "Compacted",
    "Compare",
    "CompareTarget",
    "Coordinator",
    "CoordinatorIdentity",
    "Delete",
    "DuplicateKey",
    "KeyEvents",
    "KeyValue",
    "KeyWatch",
    "LeaseNotFound",
    "Operation",
    "Put",
    "RangeResult",
    "TransactionResult",
]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """`version` counts the puts since the key was created; `lease` is 0 for none."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease: int = 0


class CompareTarget(Enum):
    MOD_REVISION = "mod_revision"
    CREATE_REVISION = "create_revision"
    VERSION = "version"
    VALUE = "value"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds if the key's `target` equals `value`. A missing key has revisions, version and lease 0, no value."""

    key: bytes
    target: CompareTarget
    value: int | bytes


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: bytes


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """`revision` is the store's revision after the transaction, whether it took place or not."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix, in order, as of `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class KeyEvents:
    """What one revision (or a batch of them, up to `revision`) changed under the prefix: the last state of each
    changed key. `deleted` holds keys."""

    revision: int
    put: tuple[KeyValue, ...] = ()
    deleted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CoordinatorIdentity:
    """Stable, non-zero ids, and the term (1 for a coordinator that never elects)."""

    cluster_id: int
    member_id: int
    raft_term: int = 1


class DuplicateKey(LocalError):
    """A transaction names one key twice in its operations."""


class LeaseNotFound(RemoteError):
    """The lease expired or was revoked (or never was)."""


class Compacted(RemoteError):
    """A watch asked for revisions that are no longer kept: load the range again and watch from there."""


@runtime_checkable
class KeyWatch(Protocol):
    def __aiter__(self) -> KeyWatch: ...

    async def __anext__(self) -> KeyEvents: ...


class Coordinator(Protocol):
    identity: CoordinatorIdentity

    async def range(self, prefix: bytes) -> RangeResult: ...

    async def transact(
        self, compares: tuple[Compare, ...], operations: tuple[Operation, ...]
    ) -> TransactionResult:
        """Apply all operations at one new revision if all compares hold, else nothing.

        Raises `DuplicateKey`, `LeaseNotFound` (a put under a lease that is gone; nothing changed). Returns when
        the change is as durable as the store.
        """
        ...

    def watch(self, prefix: bytes, after_revision: int) -> AbstractAsyncContextManager[KeyWatch]:
        """Events under the prefix with revisions greater than `after_revision`, in order, none missing.
        Raises `Compacted` from the first `__anext__` if they are no longer kept."""
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """A lease that ends unless kept alive; its keys are deleted with it."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew for another full TTL, returned in seconds. Raises `LeaseNotFound`."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys, at one revision. Raises `LeaseNotFound`."""
        ...

"""`Engine`: journals of this process, on a folder or in memory (design.md §2, §3).

    async with Engine.open("data") as engine:
        await engine.create_journal("examples/events")
        ...

It puts the parts together and resolves requests; the parts decide and write: `journal.replica` and
`journal.committer` append, `journal.reading` reads, `fragments.persister` persists, `catalog` and `local_coordinator`
keep the specs.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import trio

from broadsheet.engine.catalog import (
    ITEMS,
    Catalog,
    JournalEntry,
    encode_spec,
    item_key,
    item_name,
)
from broadsheet.engine.coordinator import (
    Compare,
    CompareTarget,
    CoordinatorIdentity,
    Delete,
    Operation,
    Put,
)
from broadsheet.engine.errors import (
    AppendFailed,
    BroadsheetError,
    DeadlineExceeded,
    EngineClosed,
    NotAuthorized,
    Status,
    StorageError,
    ValidationError,
)
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.fragments.persister import Persister
from broadsheet.engine.fragments.store import FragmentStore, StoreUnhealthy, open_store
from broadsheet.engine.handles import Appender, Journal, Reader
from broadsheet.engine.journal.append_fsm import SetSuspend
from broadsheet.engine.journal.appending import Appending
from broadsheet.engine.journal.commit_log import DEFAULT_FILE_BYTES, CommitLog
from broadsheet.engine.journal.committer import (
    CHECKPOINT_LOG_BYTES,
    CHECKPOINT_SPOOL_BYTES,
    Captured,
    Committer,
    Durability,
)
from broadsheet.engine.journal.durable import WritesBroken
from broadsheet.engine.journal.folder import Folder, Identity, new_identity
from broadsheet.engine.journal.index import IndexEntry
from broadsheet.engine.journal.log_format import Buffer as LogBuffer
from broadsheet.engine.journal.reading import EngineReadStream
from broadsheet.engine.journal.recovery import CoordinatorState, Recovered, recover
from broadsheet.engine.journal.replica import Replica
from broadsheet.engine.journal.spec import JournalSpec, Suspend, SuspendLevel
from broadsheet.engine.journal.spool import CompletedSpool
from broadsheet.engine.journal.spool_files import SpoolFiles
from broadsheet.engine.key_value import Change, KeyValueStore, encode_snapshot
from broadsheet.engine.labels import LabelSet, split_journal_meta
from broadsheet.engine.local_coordinator import LocalCoordinator
from broadsheet.engine.nurseries import exit_nursery
from broadsheet.engine.runtime import MemoryFiles, RealRuntime, Runtime
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    AppendResponse,
    ApplyRequest,
    ApplyResponse,
    Capability,
    Content,
    EtcdHeader,
    FragmentsRequest,
    FragmentsResponse,
    FragmentStoreHealthRequest,
    FragmentStoreHealthResponse,
    Header,
    ListedFragment,
    ListRequest,
    ListResponse,
    ProcessId,
    ReadRequest,
    ReadResponse,
    Route,
    Scope,
    SuspendControl,
)
from broadsheet.engine.watching import EngineWatch

__all__ = ["Durability", "Engine", "EngineOptions"]

logger = logging.getLogger("broadsheet.engine")

INLINE_BYTES = 128 << 10
DEFAULT_PAGE_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Rates are bytes/s (max_append_rate 0: none). inline_bytes: in mode `fsync`, groups up to this size are written
    into the commit log itself. The rest bounds the log between checkpoints."""

    min_append_rate: int = 65536
    max_append_rate: int = 0
    inline_bytes: int = INLINE_BYTES
    log_file_bytes: int = DEFAULT_FILE_BYTES
    checkpoint_log_bytes: int = CHECKPOINT_LOG_BYTES
    checkpoint_spool_bytes: int = CHECKPOINT_SPOOL_BYTES


class Engine:
    """A `JournalService`. Use `open` or `in_memory`, as an async context manager."""

    def __init__(
        self,
        runtime: Runtime,
        root: str | None,
        durability: Durability,
        *,
        file_root: str | None = None,
        endpoint: str = "",
        options: EngineOptions | None = None,
    ) -> None:
        self.runtime = runtime
        self.durability = durability
        self.options = options or EngineOptions()
        self.min_append_rate = self.options.min_append_rate
        self.max_append_rate = self.options.max_append_rate
        self.inline_limit = self.options.inline_bytes if durability is Durability.FSYNC else 0
        self._root = root
        self._file_root = file_root
        self._endpoint = endpoint
        self.catalog = Catalog()
        self._appending = Appending(self)
        self._stores: dict[str, FragmentStore] = {}
        self._draining = False
        self._started = False
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None
        self._header: Header | None = None
        self._header_revision = 0
        self._revision_changed = trio.lowlevel.ParkingLot()
        self._watch_scopes: set[trio.CancelScope] = set()
        # Set by _start:
        self.identity: Identity
        self.coordinator: LocalCoordinator
        self.spool_files: SpoolFiles
        self._committer: Committer
        self._persister: Persister
        self._opened: list[Callable[[], None]] = []
        self._store: KeyValueStore
        self._log: CommitLog | None = None
        self.recovered_records = 0
        """Log records that were played back at open."""
        self.quarantined: tuple[str, ...] = ()
        """Copies of files that were kept aside at open: what an unclean end left behind."""

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        durability: Durability | str = Durability.FSYNC,
        file_root: str | None = None,
        endpoint: str = "",
        min_append_rate: int = 65536,
        max_append_rate: int = 0,
        options: EngineOptions | None = None,
        runtime: Runtime | None = None,
    ) -> Engine:
        """An engine on a folder, made if it is missing; entering it finds everything that was acknowledged.

        durability: `fsync` (an acknowledged append survives a power cut) or `os` (the death of the process).
        file_root: where `file://` stores begin, by default the folder's own `fragments`.
        Entering raises `EngineLocked`, `StorageError`, `CorruptData`.
        """
        try:
            mode = Durability(durability)
        except ValueError:
            raise ValidationError(
                f"unknown durability {durability!r} (expected fsync or os)", context="Engine.open"
            ) from None
        if mode is Durability.MEMORY:
            raise ValidationError("a folder cannot have durability memory", context="Engine.open")
        options = options or EngineOptions(min_append_rate, max_append_rate)
        root = os.path.abspath(os.fspath(folder))
        return cls(
            runtime or RealRuntime(), root, mode, file_root=file_root, endpoint=endpoint, options=options
        )

    @classmethod
    def in_memory(
        cls,
        *,
        endpoint: str = "",
        min_append_rate: int = 65536,
        max_append_rate: int = 0,
        options: EngineOptions | None = None,
        runtime: Runtime | None = None,
    ) -> Engine:
        """An engine that leaves nothing behind: files, stores and specs are in memory."""
        options = options or EngineOptions(min_append_rate, max_append_rate)
        return cls(
            runtime or RealRuntime(MemoryFiles()), None, Durability.MEMORY, endpoint=endpoint, options=options
        )

    # --- Life --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Engine:
        if self._started:
            raise EngineClosed("an Engine is entered once", hint="open another one")
        self._started = True
        manager = trio.open_nursery()
        nursery = await manager.__aenter__()
        try:
            await self._start()
        except BaseException as error:
            try:
                self._close_files()
            finally:
                await exit_nursery(manager, nursery, error)
            raise
        nursery.start_soon(self._committer.run)
        nursery.start_soon(self._persister.run)
        nursery.start_soon(self.coordinator.run)
        self._nursery_manager, self._nursery = manager, nursery
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._nursery_manager is not None and self._nursery is not None
        try:
            with trio.CancelScope(shield=True):
                await self._stop()
        finally:
            try:
                swallowed = await exit_nursery(self._nursery_manager, self._nursery, error)
            finally:
                self._close_files()
        return swallowed

    def _close_files(self) -> None:
        """The last opened first; the folder's lock last of all."""
        while self._opened:
            try:
                self._opened.pop()()
            except OSError as error:
                # What was promised is durable already; the rest of the files must still be closed.
                logger.warning("closing a file: %s", error)

    async def _start(self) -> None:
        runtime = self.runtime
        if self._root is None:
            self.identity = new_identity(runtime)
            for path in ("/spools", "/fragments"):
                runtime.files.make_dirs(path)
            self._file_root = "/fragments"
            store = KeyValueStore()
            self.spool_files = SpoolFiles(runtime, "/spools", 1, in_memory=True)
            self._committer = self._make_committer(None)
        else:
            folder = Folder(runtime, self._root)
            store = await self._recover(folder)
        self._persister = Persister(runtime)
        self.coordinator = LocalCoordinator(
            store,
            CoordinatorIdentity(self.identity.cluster_id, self.identity.member_id),
            runtime.clock,
            self._committer.persist,
        )
        self.coordinator.on_change = self._on_change
        for journal in self.catalog.entries():
            if journal.state is not None and journal.state.completed:
                self._replica(journal)  # its spools are to be persisted

    async def _recover(self, folder: Folder) -> KeyValueStore:
        runtime, options = self.runtime, self.options
        if self._file_root is None:
            self._file_root = folder.fragments
        state = _RecoveringCoordinator()

        def work() -> Recovered:
            self._opened.append(folder.prepare())
            self.identity = folder.identity()
            return recover(runtime, folder, CoordinatorState(state.restore, state.apply))

        try:
            recovered = await runtime.threads.run(work)
        except (OSError, WritesBroken) as error:
            raise StorageError(f"cannot open {folder.root}: {error}", hint="see to the disk, then try again") from error
        self.spool_files = SpoolFiles(runtime, folder.spools, recovered.next_spool_id)
        self._opened.append(self.spool_files.close)
        self._log = CommitLog(
            runtime,
            folder.log,
            self.identity.cluster_id,
            file_bytes=options.log_file_bytes,
            durable=self.durability is Durability.FSYNC,
        )
        self._opened.append(self._log.close)
        self._committer = self._make_committer(folder)
        self._committer.adopt_snapshots(recovered.old_snapshots, recovered.position)
        self._log.adopt([(base, path) for base, path in recovered.log_files if base != recovered.position])

        self.catalog.load(state.store.range(ITEMS).items)
        self.recovered_records = recovered.replayed_records
        self.quarantined = tuple(recovered.quarantined)
        for path in recovered.quarantined:
            logger.warning("the end of the commit log could not be read; kept aside: %s", path)
        for spool_id in recovered.touched_spools:
            self.spool_files.note_written(spool_id, 0)
        for name, journal_state in recovered.journals.items():
            found = self.catalog.get(name)
            if found is not None and found.create_revision == journal_state.create_revision:
                found.state = journal_state
            else:  # committed beside the journal's deletion, in one round
                for spool in (journal_state.open, *journal_state.completed):
                    if spool.spool_id:
                        self.spool_files.retire(spool.spool_id)
        try:
            self._log.begin(recovered.position, recovered.proven)
            self._store = state.store
            if recovered.needs_checkpoint:
                await self._committer.checkpoint()
            self.spool_files.adopt_spares(recovered.unused_spools)
        except (OSError, WritesBroken) as error:
            raise StorageError(
                f"cannot write to {folder.root}: {error}", hint="make room or mend the disk, then try again"
            ) from error
        return state.store

    def _make_committer(self, folder: Folder | None) -> Committer:
        committer = Committer(
            self.runtime,
            self.durability,
            folder,
            self._log,
            self.spool_files,
            self.identity.cluster_id,
            self._capture,
            checkpoint_log_bytes=self.options.checkpoint_log_bytes,
            checkpoint_spool_bytes=self.options.checkpoint_spool_bytes,
        )
        self._opened.append(committer.close)
        return committer

    def _capture(self) -> Captured:
        snapshot = self._store.snapshot()
        states = []
        for journal in self.catalog.entries():
            state = journal.replica.state() if journal.replica is not None else journal.state
            if state is not None:
                states.append(state)
        return Captured(lambda: encode_snapshot(snapshot), states)

    async def drain(self) -> None:
        """Begin to close: new requests are refused with `EngineClosed`, blocked reads and watches end cleanly,
        appends that are under way complete."""
        self._draining = True
        for journal in self.catalog.entries():
            if journal.replica is not None:
                journal.replica.changed.unpark_all()
        self._revision_changed.unpark_all()
        for scope in self._watch_scopes:
            scope.cancel()
        await trio.lowlevel.checkpoint()

    async def _stop(self) -> None:
        await self.drain()
        closed = EngineClosed("the engine was closed before this append was complete")
        for journal in self.catalog.entries():
            if journal.replica is not None:
                journal.replica.close_writes(closed)
        await self._committer.settle()
        for journal in self.catalog.entries():
            if journal.replica is not None:
                journal.replica.close(closed)
        if self._log is not None and self._committer.failure is None and self._committer.is_checkpoint_due:
            try:
                await self._committer.checkpoint()
            except (OSError, BroadsheetError) as error:
                # Nothing depends on it: the next open reads the log instead.
                logger.warning("no checkpoint at close: %s", error)
        await self._committer.settle()  # a change may have begun a round during the checkpoint
        self._committer.close()  # with no await in between

    def watching(self, cancel_scope: trio.CancelScope, *, begins: bool) -> None:
        if begins:
            self._watch_scopes.add(cancel_scope)
        else:
            self._watch_scopes.discard(cancel_scope)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def process_id(self) -> ProcessId:
        return self.identity.process_id

    def advertise(self, endpoint: str) -> None:
        """The URL under which clients reach this engine's facade: routes name it."""
        self._endpoint = endpoint
        self._header = None
        for journal in self.catalog.entries():
            if journal.replica is not None:
                journal.replica.header_cache = None

    def ready_problem(self) -> str | None:
        """Why the engine cannot do all of its work, None if it can."""
        if self._draining:
            return "the engine is closing"
        if self._committer.failure is not None:
            return str(self._committer.failure)
        committer = self._committer
        return committer.storage_error or committer.checkpoint_error or self._persister.last_error or None

    # --- Handles -----------------------------------------------------------------------------------------

    async def create_journal(self, name: str, spec: JournalSpec | None = None) -> Journal:
        """Create a journal unless it exists (then it stays as it is), and return its handle.

        spec: all but the name; by default one replica, no store, 64 MiB fragments."""
        return await Journal.create(self, name, spec)

    def journal(self, name: str) -> Journal:
        return Journal(self, name)

    def reader(self, name: str, offset: int = 0, *, block: bool = True) -> Reader:
        return Reader(self, name, offset, block=block)

    def appender(self, name: str) -> Appender:
        return Appender(self, name)

    # --- Append ------------------------------------------------------------------------------------------

    async def append(
        self, request: AppendRequest, content: Content = b"", scope: Scope = UNSCOPED
    ) -> AppendResponse:
        journal = self.catalog.get(request.journal)
        replica: Replica
        if (
            journal is not None
            and journal.replica is not None
            and scope is UNSCOPED
            and not self._draining
            and journal.replica.index.refreshed
            and journal.spec.suspend is None
        ):
            replica = journal.replica  # the name is that of a journal, so it is valid
            if (
                request.offset is not None
                or request.check_registers
                or request.union_registers
                or request.subtract_registers
            ):
                request.validate()
        else:
            request.validate()
            resolved = await self.resolve_append(request, scope)
            if isinstance(resolved, AppendResponse):
                return resolved
            replica = resolved
        return await self._appending.append(replica, request, content, scope)

    async def resolve_append(self, request: AppendRequest, scope: Scope) -> Replica | AppendResponse:
        journal = await self._resolve(request.journal, scope, Capability.APPEND)
        if journal is None:
            return AppendResponse(Status.JOURNAL_NOT_FOUND, self.unrouted_header())
        if journal.is_fully_suspended:
            if request.suspend != SuspendControl.RESUME:
                return AppendResponse(Status.SUSPENDED, self.unrouted_header())
            suspend = journal.spec.suspend
            assert suspend is not None
            await self._set_suspend(journal.spec.name, SetSuspend(SuspendLevel.NONE, suspend.offset))
            found = self.catalog.get(journal.spec.name)
            if found is None:
                return AppendResponse(Status.JOURNAL_NOT_FOUND, self.unrouted_header())
            journal = found
        replica = self._replica(journal)
        await self._refresh(replica)
        if replica.store_error:
            return AppendResponse(
                Status.FRAGMENT_STORE_UNHEALTHY,
                self.header(replica),
                store_health_error=replica.store_error,
            )
        return replica

    async def set_suspend(self, replica: Replica, decision: SetSuspend) -> None:
        await self._set_suspend(replica.name, decision)

    async def _set_suspend(self, name: str, decision: SetSuspend) -> None:
        """Compare-and-set the spec's suspension. A raced change is left as it is: the append decides anew."""
        entry = self.catalog.get(name)
        if entry is None:
            return
        spec = replace(entry.spec, suspend=Suspend(decision.level, decision.offset))
        await self.coordinator.transact(
            (Compare(item_key(name), CompareTarget.MOD_REVISION, entry.mod_revision),),
            (Put(item_key(name), encode_spec(spec)),),
        )

    # --- Read --------------------------------------------------------------------------------------------

    def read(self, request: ReadRequest, scope: Scope = UNSCOPED) -> EngineReadStream:
        request.validate()
        return EngineReadStream(self, request, scope)

    async def resolve_read(self, request: ReadRequest, scope: Scope) -> Replica | ReadResponse:
        journal = await self._resolve(request.journal, scope, Capability.READ)
        if journal is None:
            return ReadResponse(Status.JOURNAL_NOT_FOUND, self.unrouted_header())
        if journal.is_fully_suspended:
            return ReadResponse(Status.SUSPENDED, self.unrouted_header())
        replica = self._replica(journal)
        if not journal.spec.may_read:
            return ReadResponse(Status.NOT_ALLOWED, self.header(replica))
        await self._refresh(replica)
        return replica

    # --- List, watch, apply ------------------------------------------------------------------------------

    async def list(self, request: ListRequest, scope: Scope = UNSCOPED) -> ListResponse:
        request.validate()
        await self._admit(scope, Capability.LIST)
        header = self.unrouted_header()
        route = self.route()
        found = []
        for name in self.catalog.select(request.selector.with_prefix_rewritten(), scope.claims):
            entry = self.catalog.get(name)
            assert entry is not None
            found.append(entry.listed(route))
        return ListResponse(Status.OK, header, tuple(found))

    @asynccontextmanager
    async def watch(
        self, request: ListRequest, scope: Scope = UNSCOPED, *, resume_revision: int = 0
    ) -> AsyncIterator[EngineWatch]:
        request.validate()
        await self._admit(scope, Capability.LIST)
        after = resume_revision or self.coordinator.revision
        async with self.coordinator.watch(ITEMS, after) as events:
            yield EngineWatch(self, request.selector, scope, aiter(events), resumes=resume_revision > 0)

    async def apply(self, request: ApplyRequest, scope: Scope = UNSCOPED) -> ApplyResponse:
        request.validate()
        await self._admit(scope, Capability.APPLY)
        compares: list[Compare] = []
        operations: list[Operation] = []
        names: list[tuple[str, int]] = []
        for change in request.changes:
            name = change.upsert.name if change.upsert is not None else change.delete
            key = item_key(name)
            if scope.claims is not None:
                labels = (change.upsert.labels if change.upsert is not None else LabelSet()).with_name_label(name)
                if not scope.claims.selector.matches(labels):
                    raise NotAuthorized(f"not authorized to {name}", journal=name)
            if change.expect_mod_revision != -1:
                compares.append(Compare(key, CompareTarget.MOD_REVISION, change.expect_mod_revision))
            if change.upsert is not None:
                operations.append(Put(key, encode_spec(change.upsert)))
            else:
                operations.append(Delete(key))
            names.append((name, change.expect_mod_revision))
        result = await self.coordinator.transact(tuple(compares), tuple(operations))
        if not result.succeeded:
            conflicts = tuple(
                name for name, expected in names if expected != -1 and self._revision_of(name) != expected
            )
            return ApplyResponse(Status.ETCD_TRANSACTION_FAILED, self.unrouted_header(), conflicts)
        return ApplyResponse(Status.OK, self.unrouted_header())

    def _revision_of(self, name: str) -> int:
        journal = self.catalog.get(name)
        return journal.mod_revision if journal is not None else 0

    def _on_change(self, change: Change) -> None:
        """The coordinator's keys have changed: follow."""
        followed = self.catalog.follow(change)
        for entry in followed.removed:
            self._remove(entry)
        for entry, before in followed.updated:
            replica = entry.replica
            if replica is None:
                continue
            replica.spec = entry.spec
            if before.fragment.stores != entry.spec.fragment.stores:
                replica.index.refreshed = False
                if not before.fragment.stores:
                    replica.resume_persisting()
        if followed.removed:
            self._committer.spools_retired()
        if followed.updated:
            self._persister.retry_now()
        self._revision_changed.unpark_all()

    def _remove(self, entry: JournalEntry) -> None:
        name = entry.spec.name
        if entry.replica is None and entry.state is not None:
            entry.replica = Replica(self, entry.spec, entry.create_revision, entry.state)
        if entry.replica is not None:
            entry.replica.close(
                AppendFailed(f"{name} was deleted", journal=name, hint="create it, then append again"),
                deleted=True,
            )

    # --- Fragments ---------------------------------------------------------------------------------------

    async def fragments(self, request: FragmentsRequest, scope: Scope = UNSCOPED) -> FragmentsResponse:
        request.validate()
        journal = await self._resolve(request.journal, scope, Capability.READ)
        if journal is None:
            return FragmentsResponse(Status.JOURNAL_NOT_FOUND, self.unrouted_header())
        if journal.is_fully_suspended:
            return FragmentsResponse(Status.SUSPENDED, self.unrouted_header())
        replica = self._replica(journal)
        if not journal.spec.may_read:
            return FragmentsResponse(Status.NOT_ALLOWED, self.header(replica))
        await self._refresh(replica)
        limit = request.page_limit or DEFAULT_PAGE_LIMIT
        index = replica.index
        found: list[ListedFragment] = []
        next_page_token = 0
        for position in range(index.from_begin(request.next_page_token), len(index)):
            fragment = index[position].fragment
            if fragment.mod_time and fragment.mod_time < request.begin_mod_time:
                continue
            if request.end_mod_time and not 0 < fragment.mod_time <= request.end_mod_time:
                continue
            if len(found) == limit:
                next_page_token = fragment.begin
                break
            url = ""
            if request.signature_ttl_s is not None and fragment.backing_store:
                url = self.store(fragment.backing_store).url_of(fragment)
            found.append(ListedFragment(fragment, url))
        return FragmentsResponse(Status.OK, self.header(replica), tuple(found), next_page_token)

    async def store_health(
        self, request: FragmentStoreHealthRequest, scope: Scope = UNSCOPED
    ) -> FragmentStoreHealthResponse:
        request.validate()
        await self._admit(scope, Capability.READ)
        try:
            # Not `self.store`: what anyone asks about is not to be kept.
            store = open_store(
                request.fragment_store, self.runtime.files, self._file_root or "", self.runtime.random
            )
            await self.runtime.threads.run(store.check)
        except StoreUnhealthy as error:
            return FragmentStoreHealthResponse(
                Status.FRAGMENT_STORE_UNHEALTHY, self.unrouted_header(), error.text
            )
        return FragmentStoreHealthResponse(Status.OK, self.unrouted_header())

    def store(self, url: str) -> FragmentStore:
        """Raises `StoreUnhealthy`."""
        store = self._stores.get(url)
        if store is None:
            assert self._file_root is not None
            store = self._stores[url] = open_store(
                url, self.runtime.files, self._file_root, self.runtime.random
            )
        return store

    async def _refresh(self, replica: Replica) -> None:
        """The gate that a journal's first use passes: its stores were listed once."""
        while not replica.index.refreshed:
            if replica.refreshing is not None:
                await replica.refreshing.wait()
                if replica.store_error:
                    return
                continue
            replica.refreshing = trio.Event()
            try:
                await self._list_stores(replica)
            finally:
                replica.refreshing.set()
                replica.refreshing = None
            if replica.store_error:
                return

    async def _list_stores(self, replica: Replica) -> None:
        replica.store_error = ""
        replica.index.begin_refresh()
        url = ""
        found: list[Fragment] = []
        try:
            for url in replica.spec.fragment.stores:
                store = self.store(url)
                found += await self.runtime.threads.run(partial(self._list_store, store, replica.name))
        except (StoreUnhealthy, OSError) as error:
            text = error.text if isinstance(error, StoreUnhealthy) else str(error)
            replica.store_error = f"fragment store {url} unhealthy: {text}"
            logger.warning("%s: %s", replica.name, replica.store_error)
            replica.index.abandon_refresh()
            return
        replica.refreshed(found)

    @staticmethod
    def _list_store(store: FragmentStore, journal: str) -> Sequence[Fragment]:
        store.check()
        return store.list(journal)

    # --- What replicas ask of their host -----------------------------------------------------------------

    def wake(self, replica: Replica) -> None:
        self._committer.wake(replica)

    def storage_failed(self, error: StorageError) -> None:
        self._committer.storage_error = str(error)

    def note(self, payload: Sequence[LogBuffer]) -> None:
        self._committer.note(payload)

    def completed(self, replica: Replica, entry: IndexEntry, spool: CompletedSpool) -> None:
        if replica.spec.fragment.stores:
            self._persister.submit(_PersistSpool(self, replica, entry, spool.fragment))

    def header(self, replica: Replica) -> Header:
        revision = self.coordinator.revision
        header = replica.header_cache
        if header is None or header.etcd.revision != revision:
            header = replica.header_cache = Header(self.process_id, self.route(), self._etcd_header())
        return header

    def route(self) -> Route:
        endpoints = (self._endpoint,) if self._endpoint else ()
        return Route((self.process_id,), 0, endpoints)

    def _etcd_header(self) -> EtcdHeader:
        identity = self.coordinator.identity
        return EtcdHeader(
            identity.cluster_id, identity.member_id, self.coordinator.revision, identity.raft_term
        )

    def unrouted_header(self) -> Header:
        return Header(self.process_id, Route(), self._etcd_header())

    # --- Resolution --------------------------------------------------------------------------------------

    async def _admit(self, scope: Scope, capability: Capability) -> None:
        await trio.lowlevel.checkpoint()
        if self._nursery is None:
            raise EngineClosed("the engine is not open", hint="use it as an async context manager")
        if scope.claims is not None and capability not in scope.claims.capability:
            raise NotAuthorized(f"authorization is missing required {capability.name} capability")
        if scope.proxied_header is not None:
            theirs, ours = scope.proxied_header.etcd.cluster_id, self.identity.cluster_id
            if theirs != ours:
                raise ValidationError(f"request Etcd ClusterId doesn't match our own ({theirs} vs {ours})")
            asked, own = scope.proxied_header.process_id, self.process_id
            if asked and asked != own:
                raise ValidationError(
                    f"request ProcessId doesn't match our own (zone:\"{asked.zone}\" suffix:\"{asked.suffix}\"  vs "
                    f"zone:\"{own.zone}\" suffix:\"{own.suffix}\" )"
                )
        revision = scope.min_revision
        if scope.proxied_header is not None:
            revision = max(revision, scope.proxied_header.etcd.revision)
        while self.coordinator.revision < revision and not self._draining:
            with trio.CancelScope(deadline=math.inf if scope.deadline is None else scope.deadline) as waiting:
                await self._revision_changed.park()
            if waiting.cancelled_caught:
                raise DeadlineExceeded(
                    f"the deadline passed before revision {revision} was there (it is {self.coordinator.revision})"
                )
        if self._draining:
            raise EngineClosed("the engine is closing")

    async def _resolve(self, name: str, scope: Scope, capability: Capability) -> JournalEntry | None:
        await self._admit(scope, capability)
        name, _ = split_journal_meta(name)
        journal = self.catalog.get(name)
        if journal is None:
            return None
        if scope.claims is not None and not scope.claims.selector.matches(
            journal.spec.labels.with_name_label(name)
        ):
            return None
        return journal

    def _replica(self, journal: JournalEntry) -> Replica:
        replica = journal.replica
        if replica is None:
            replica = journal.replica = Replica(
                self, journal.spec, journal.create_revision, journal.state
            )
            journal.state = None
            replica.resume_persisting()
        return replica


class _PersistSpool:
    """A `PersistTask` for one completed spool of a replica."""

    __slots__ = ("_engine", "_entry", "_replica", "fragment", "spool_path")

    def __init__(self, engine: Engine, replica: Replica, entry: IndexEntry, fragment: Fragment) -> None:
        self._engine = engine
        self._replica = replica
        self._entry = entry
        self.fragment = fragment
        self.spool_path = engine.spool_files.path(entry.spool_id)

    def store(self) -> FragmentStore | None:
        spec = self._replica.spec.fragment
        if not spec.stores:
            return None
        if spec.path_postfix_template:
            raise StoreUnhealthy(
                "path_postfix_template is not evaluated yet", hint="the fragment is kept as a spool until it is"
            )
        return self._engine.store(spec.stores[0])

    def is_wanted(self) -> bool:
        return not self._replica.closed and not self._entry.released

    def done(self, fragment: Fragment) -> None:
        self._replica.persisted(self._entry, fragment)


class _RecoveringCoordinator:
    """The coordinator's state while recovery plays the log back."""

    def __init__(self) -> None:
        self.store = KeyValueStore()

    def restore(self, chunks: Iterable[bytes]) -> None:
        self.store = KeyValueStore.restore(chunks)

    def apply(self, data: bytes) -> Iterable[str]:
        change = Change.decode(data)
        self.store.apply(change)
        return [item_name(key) for key in change.deletes if key.startswith(ITEMS)]

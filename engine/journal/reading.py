"""The read stream of the engine: `read_fsm`'s decisions, with the file reads that they ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import trio

from broadsheet.engine.errors import CorruptData, DeadlineExceeded, Status, StorageError
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.fragments.store import FragmentStore
from broadsheet.engine.journal.index import IndexEntry
from broadsheet.engine.journal.read_fsm import content_end, ends_after_metadata, query
from broadsheet.engine.journal.replica import Replica
from broadsheet.engine.journal.spool_files import SpoolFiles
from broadsheet.engine.runtime import Runtime
from broadsheet.engine.service import Header, ReadRequest, ReadResponse, Scope

__all__ = ["EngineReadStream", "ReadHost"]

logger = logging.getLogger("broadsheet.engine")

CONTENT_BYTES = 256 << 10


class ReadHost(Protocol):
    runtime: Runtime
    spool_files: SpoolFiles

    @property
    def is_draining(self) -> bool: ...

    async def resolve_read(self, request: ReadRequest, scope: Scope) -> Replica | ReadResponse:
        """The replica to read from, its index refreshed, or the one response that is the answer."""
        ...

    def header(self, replica: Replica) -> Header: ...

    def store(self, url: str) -> FragmentStore: ...


class EngineReadStream:
    """A `ReadStream`, and its own async context manager: leaving it gives up the files in use."""

    def __init__(self, host: ReadHost, request: ReadRequest, scope: Scope) -> None:
        self._host = host
        self._request = request
        self._scope = scope
        self._replica: Replica | None = None
        self._offset = request.offset
        self._end = 0  # of the content that is being sent
        self._entry: IndexEntry | None = None
        self._pieces: Iterator[bytes] | None = None
        self._ended = False
        self._wait: trio.CancelScope | None = None

    async def __aenter__(self) -> EngineReadStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._give_up()

    def __aiter__(self) -> EngineReadStream:
        return self

    async def __anext__(self) -> ReadResponse:
        if self._ended:
            raise StopAsyncIteration
        if self._entry is not None:
            response = await self._content()
            if response is not None:
                return response
        return await self._metadata()

    async def _metadata(self) -> ReadResponse:
        request = self._request
        header: Header | None = None
        if self._replica is None:
            try:
                resolved = await self._host.resolve_read(request, self._scope)
            except DeadlineExceeded:
                self._ended = True
                raise StopAsyncIteration from None
            if isinstance(resolved, ReadResponse):
                self._ended = True
                return resolved
            self._replica = resolved
            header = self._host.header(resolved)
        else:
            await trio.lowlevel.checkpoint()
        replica = self._replica
        while True:
            if replica.closed or self._host.is_draining:
                self._ended = True
                raise StopAsyncIteration
            now_s = self._host.runtime.clock.now_ns() // 1_000_000_000
            result = query(replica.index, self._offset, request.begin_mod_time, now_s)
            self._offset = result.offset
            if result.status == Status.OK or not request.block:
                break
            if not await self._changed(replica):
                self._ended = True
                raise StopAsyncIteration

        member = result.member
        if ends_after_metadata(request, result):
            self._ended = True
        elif member is not None:
            self._entry = member
            self._end = content_end(request, member.end)
            if member.is_local:
                replica.acquire(member)
        fragment: Fragment | None = None
        url = ""
        if member is not None:
            fragment = member.fragment
            if fragment.backing_store and fragment.mod_time:
                url = self._host.store(fragment.backing_store).url_of(fragment)
        return ReadResponse(result.status, header, result.offset, replica.index.end, fragment, url)

    async def _changed(self, replica: Replica) -> bool:
        """Wait for the index to change. False if the scope's deadline came first."""
        deadline = self._scope.deadline
        if deadline is None:
            await replica.changed.park()
            return True
        with trio.move_on_at(deadline) as scope:
            await replica.changed.park()
        return not scope.cancelled_caught

    async def _content(self) -> ReadResponse | None:
        """The next buffer of the fragment; None when it is sent."""
        await trio.lowlevel.checkpoint()
        entry, replica = self._entry, self._replica
        assert entry is not None and replica is not None
        if self._offset >= self._end or replica.closed or self._host.is_draining:
            self._give_up()
            if self._request.end_offset is not None and self._offset >= self._request.end_offset:
                self._ended = True
                raise StopAsyncIteration
            return None
        if entry.is_local:
            content = self._read_spool(replica, entry)
        else:
            content = await self._read_store(entry)
        offset = self._offset
        self._offset += len(content)
        return ReadResponse(offset=offset, content=content)

    def _read_spool(self, replica: Replica, entry: IndexEntry) -> bytes:
        length = min(CONTENT_BYTES, self._end - self._offset)
        try:
            file = self._host.spool_files.file(entry.spool_id)
            content = file.pread(length, self._offset - entry.begin)
        except OSError as error:
            raise StorageError(
                f"cannot read {replica.name}: {error.strerror or error}",
                journal=replica.name,
                offset=self._offset,
                hint="the spool's file was kept; see to the disk",
            ) from error
        if len(content) != length:
            raise CorruptData(
                f"the spool of {replica.name} ends before offset {self._end}, which was committed",
                path=file.path,
                journal=replica.name,
                offset=self._offset,
            )
        return content

    async def _read_store(self, entry: IndexEntry) -> bytes:
        fragment = entry.fragment
        if self._pieces is None:
            self._pieces = self._host.store(fragment.backing_store).read(fragment, self._offset)
        pieces = self._pieces
        try:
            piece = await self._host.runtime.threads.run(lambda: next(pieces, b""))
        except FileNotFoundError as error:
            raise CorruptData(
                f"the store listed {fragment.content_path} and has it no more",
                path=str(error.filename or fragment.content_path),
                journal=fragment.journal,
                offset=self._offset,
                hint="restore it from a backup; a refresh of the index will show what is left",
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot read {fragment.content_path}: {error.strerror or error}",
                journal=fragment.journal,
                offset=self._offset,
                hint="see to the store, then read again from this offset",
            ) from error
        if not piece:
            raise CorruptData(
                "the object ends early",
                path=fragment.content_path,
                journal=fragment.journal,
                offset=self._offset,
            )
        return piece[: self._end - self._offset]

    def _give_up(self) -> None:
        entry, replica = self._entry, self._replica
        self._entry = None
        if self._pieces is not None:
            pieces, self._pieces = self._pieces, None
            try:
                pieces.close()  # type: ignore[attr-defined]  # a generator: closes its file
            except OSError as error:
                logger.warning("closing an object of %s: %s", self._request.journal, error)
        if entry is not None and replica is not None and entry.is_local:
            replica.unacquire(entry)

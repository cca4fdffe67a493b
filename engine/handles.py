"""What a Python programmer holds: `Journal`, `Reader`, `Appender`, over any `JournalService` (design.md §2).

They raise where the service answers with a status: `StatusError` carries it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from broadsheet.engine.errors import BroadsheetError, EngineClosed, LocalError, Status, StatusError, ValidationError
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.labels import LabelSelector, LabelSet
from broadsheet.engine.nurseries import exit_nursery
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    AppendResponse,
    ApplyRequest,
    Content,
    FragmentsRequest,
    JournalService,
    ReadRequest,
    ReadStream,
    Scope,
)

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Appender", "AppenderFull", "Journal", "Reader", "raise_for_status"]

BATCH_BYTES = 1 << 20
LINGER_S = 0.005
MAX_BUFFERED_BYTES = 16 << 20
MAX_LINE_BYTES = 16 << 20

DEFAULT_SPEC = JournalSpec(
    replication=1,
    fragment=FragmentSpec(
        length=64 << 20, compression_codec=CompressionCodec.SNAPPY, refresh_interval_ns=300 * 10**9
    ),
)

_HINTS = {
    Status.JOURNAL_NOT_FOUND: "create the journal, or check its name and your claims",
    Status.NOT_ALLOWED: "the journal's flags forbid it",
    Status.WRONG_APPEND_OFFSET: "another append came first: read up to the head, then decide again",
    Status.REGISTER_MISMATCH: "another writer has changed the registers: it may have taken over",
    Status.INDEX_HAS_GREATER_OFFSET: "the store knows more than this engine: reset the head to go on after it",
    Status.OFFSET_NOT_YET_AVAILABLE: "there is nothing there yet: read with block=True to wait",
    Status.SUSPENDED: "append without a suspend control to resume the journal",
}


class AppenderFull(LocalError):
    """`Appender.write` was called on and on without `drain` or `flush`."""


def raise_for_status(status: Status, journal: str, offset: int | None = None, detail: str = "") -> None:
    """Raise `StatusError` unless OK."""
    if status != Status.OK:
        text = f"{journal}: {status.name}" + (f" at offset {offset}" if offset is not None else "")
        raise StatusError(
            f"{text}: {detail}" if detail else text,
            journal=journal,
            offset=offset,
            status=status,
            hint=_HINTS.get(status, ""),
        )


class Journal:
    """One journal of a service."""

    def __init__(self, service: JournalService, name: str, scope: Scope = UNSCOPED) -> None:
        self.service = service
        self.name = name
        self.scope = scope

    @classmethod
    async def create(cls, service: JournalService, name: str, spec: JournalSpec | None = None) -> Journal:
        """Create it unless it is there."""
        spec = replace(spec or DEFAULT_SPEC, name=name)
        response = await service.apply(ApplyRequest((JournalChange(0, spec),)))
        if response.status != Status.ETCD_TRANSACTION_FAILED:
            raise_for_status(response.status, name)
        return cls(service, name)

    async def append(
        self,
        content: Content,
        *,
        offset: int | None = None,
        check_registers: LabelSelector | None = None,
        union_registers: LabelSet | None = None,
        subtract_registers: LabelSet | None = None,
    ) -> Fragment:
        """Append atomically; returns the range taken and its SHA-1. Raises `StatusError`, `AppendFailed`,
        `OutcomeUnknown`."""
        request = AppendRequest(self.name, offset, check_registers, union_registers, subtract_registers)
        response = await self.service.append(request, content, self.scope)
        return _committed(response, self.name, offset)

    async def registers(self) -> LabelSet:
        """The registers, as of a barrier."""
        response = await self.service.append(AppendRequest(self.name), b"", self.scope)
        _committed(response, self.name, None)
        return response.registers or LabelSet()

    async def head(self) -> int:
        """The write head: offset at which the next append will begin."""
        request = ReadRequest(self.name, -1, metadata_only=True)
        async with self.service.read(request, self.scope) as stream:
            async for response in stream:
                if response.status != Status.OFFSET_NOT_YET_AVAILABLE:
                    raise_for_status(response.status, self.name)
                return response.write_head
        raise EngineClosed("the service ended the read", journal=self.name)

    async def read(self, offset: int = 0, end: int | None = None) -> bytes:
        """What is there from `offset` (to `end`) in one piece. For much of it, use a `Reader`."""
        async with Reader(self.service, self.name, offset, block=False, end=end, scope=self.scope) as reader:
            return b"".join([bytes(piece) async for piece in reader])

    async def fragments(self) -> list[Fragment]:
        """All fragments, in order; those without a backing store are local."""
        found: list[Fragment] = []
        token = 0
        while True:
            request = FragmentsRequest(self.name, next_page_token=token)
            response = await self.service.fragments(request, self.scope)
            raise_for_status(response.status, self.name)
            found += [listed.spec for listed in response.fragments]
            token = response.next_page_token
            if not token:
                return found

    def reader(self, offset: int = 0, *, block: bool = True) -> Reader:
        return Reader(self.service, self.name, offset, block=block, scope=self.scope)

    def appender(self) -> Appender:
        return Appender(self.service, self.name, scope=self.scope)


def _committed(response: AppendResponse, journal: str, offset: int | None) -> Fragment:
    raise_for_status(response.status, journal, offset, response.store_health_error)
    assert response.commit is not None
    return response.commit


class Reader:
    """Iterates over a journal's bytes, or its lines. `offset` is that of the next byte to come: keep it to resume.

    block: wait for more at the end (a tail), else end there. A `Reader` is its own async context manager.
    """

    def __init__(
        self,
        service: JournalService,
        journal: str,
        offset: int = 0,
        *,
        block: bool = True,
        end: int | None = None,
        scope: Scope = UNSCOPED,
    ) -> None:
        self.service = service
        self.journal = journal
        self.offset = offset
        self._request = ReadRequest(journal, offset, block=block, end_offset=end)
        self._scope = scope
        self._stream: ReadStream | None = None
        self._manager = service.read(self._request, scope)

    async def __aenter__(self) -> Self:
        self._stream = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream = None
        await self._manager.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | bytearray | memoryview:
        """The next buffer. Raises `StatusError`, unless the read is not blocking and is at the end."""
        if self._stream is None:
            raise EngineClosed("use a Reader as an async context manager", journal=self.journal)
        while True:
            response = await anext(self._stream)
            if response.content is not None:
                if response.offset != self.offset:
                    self.offset = response.offset
                self.offset += len(response.content)
                return response.content
            if response.status == Status.OFFSET_NOT_YET_AVAILABLE:
                if self.offset == -1:
                    self.offset = response.offset
                raise StopAsyncIteration
            raise_for_status(response.status, self.journal, self.offset)
            self.offset = response.offset

    @asynccontextmanager
    async def lines(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Iterate over whole lines, each with its `\\n`. `offset` is then that of the next line. What follows the
        last `\\n` is not yielded, and not counted."""
        async with aclosing(self._lines()) as lines:
            yield lines

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        rest = b""
        begin = self.offset
        async for buffer in self:
            if self.offset - len(buffer) != begin + len(rest):  # at the first, or after a gap
                begin = self.offset - len(buffer)
                rest = b""
            pieces = (rest + buffer).split(b"\n")
            rest = pieces.pop()
            after = self.offset
            if len(rest) > MAX_LINE_BYTES:
                raise ValidationError(
                    f"{self.journal}: a line at offset {begin} is longer than {MAX_LINE_BYTES} bytes"
                )
            for piece in pieces:
                begin += len(piece) + 1
                self.offset = begin
                yield piece + b"\n"
            self.offset = after
        self.offset = begin if begin != -1 else self.offset


class Appender:
    """Appends records in batches. Each batch is one atomic append, so a record is never split.

        async with engine.appender("examples/events") as appender:
            for record in records:
                if not appender.write(record):
                    await appender.drain()

    `write` is a plain call and only collects. A batch goes out when it is large enough, when it has waited for a few
    milliseconds, and at `flush`. Leaving the block flushes. The first error ends the appender: it is raised from
    the next `write`, `drain`, `flush`, or from leaving the block; records after the last flush may be lost then.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_inflight",
        "_manager",
        "_max",
        "_nursery",
        "_records",
        "_request",
        "_scope",
        "_sending",
        "_size",
        "_waiters",
        "_wake",
        "batch_bytes",
        "journal",
        "linger_s",
        "offset",
        "service",
    )

    def __init__(
        self,
        service: JournalService,
        journal: str,
        *,
        batch_bytes: int = BATCH_BYTES,
        linger_s: float = LINGER_S,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        scope: Scope = UNSCOPED,
    ) -> None:
        self.service = service
        self.journal = journal
        self.batch_bytes = batch_bytes
        self.linger_s = linger_s
        self.offset = 0
        self._request = AppendRequest(journal)
        self._scope = scope
        self._max = max_buffered_bytes
        self._records: list[bytes] = []
        self._size = 0
        self._inflight = 0
        self._sending = trio.Lock()
        self._error: BroadsheetError | None = None
        self._closed: EngineClosed | None = EngineClosed(
            "use an Appender as an async context manager", journal=journal
        )
        self._wake: trio.Event | None = None
        self._waiters = trio.lowlevel.ParkingLot()
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self._nursery = await self._manager.__aenter__()
        self._wake = trio.Event()
        self._closed = None
        self._nursery.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._nursery is not None
        failure: BaseException | None = None
        try:
            if error is None:
                await self.flush()
        except BaseException as raised:
            failure = raised
        self._closed = EngineClosed("the appender was closed", journal=self.journal, hint="use another one")
        swallowed = await exit_nursery(self._manager, self._nursery, failure or error)
        if failure is not None and not swallowed:
            raise failure
        return swallowed

    def write(self, record: bytes) -> bool:
        """Add a record (copied only later: it must not change). False when it is time to `drain`.

        Raises the error that ended the appender, and `AppenderFull` if False was not heeded."""
        self._records.append(record)
        size = self._size = self._size + len(record)
        if size < self.batch_bytes and len(self._records) != 1:
            return True
        return self._written(size)

    def _written(self, size: int) -> bool:
        """The rare half of `write`: a batch begins, or is full."""
        refusal = self._error or self._closed
        if refusal is not None:
            self._records.clear()  # so that the next write is a first one, too
            self._size = 0
            raise refusal
        assert self._wake is not None
        if size + self._inflight > self._max:
            self._records.pop()
            self._size = sum(map(len, self._records))
            raise AppenderFull(
                f"{self.journal}: {self._max} bytes are waiting to be appended",
                journal=self.journal,
                hint="await drain() when write() returns False",
            )
        self._wake.set()
        return size < self.batch_bytes

    async def drain(self) -> None:
        """Wait until there is room for another batch."""
        while self._size >= self.batch_bytes and self._error is None:
            await self._send()
        if self._error is not None:
            raise self._error

    async def flush(self) -> int:
        """Wait until everything written so far is appended; returns the offset after it."""
        await self._send()
        if self._error is not None:
            raise self._error
        return self.offset

    async def _run(self) -> None:
        """Send what has lingered."""
        while True:
            assert self._wake is not None
            await self._wake.wait()
            self._wake = trio.Event()
            if self._size < self.batch_bytes and self.linger_s:
                await trio.sleep(self.linger_s)
            if self._error is None and self._records:
                await self._send()

    async def _send(self) -> None:
        """Append what there is. One append at a time keeps the order."""
        if self._sending.locked():
            async with self._sending:
                await self._append()
        else:
            self._sending.acquire_nowait()
            try:
                await self._append()
            finally:
                self._sending.release()

    async def _append(self) -> None:
        records = self._records
        if not records or self._error is not None:
            await trio.lowlevel.checkpoint()
            return
        self._records = []
        self._inflight, self._size = self._size, 0
        try:
            response = await self.service.append(self._request, b"".join(records), self._scope)
            raise_for_status(response.status, self.journal, None, response.store_health_error)
        except BroadsheetError as error:
            self._error = error
            self._records, self._size = [], 0  # what was written meanwhile; the next write is to be told
        except BaseException:
            self._error = EngineClosed(
                "the appender was cancelled while a batch was on its way", journal=self.journal
            )
            raise
        else:
            assert response.commit is not None
            self.offset = response.commit.end
        finally:
            self._inflight = 0



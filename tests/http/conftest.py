"""A small `JournalService` that stands in for the engine, a server on it, and a client that sees every byte."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio

from broadsheet.engine.errors import Status
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalSpec
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    AppendResponse,
    ApplyRequest,
    ApplyResponse,
    Content,
    EtcdHeader,
    FragmentsRequest,
    FragmentsResponse,
    FragmentStoreHealthRequest,
    FragmentStoreHealthResponse,
    Header,
    JournalService,
    ListedFragment,
    ListedJournal,
    ListRequest,
    ListResponse,
    ProcessId,
    ReadRequest,
    ReadResponse,
    Route,
    Scope,
    WatchChange,
)
from broadsheet.facades.http import serve_http

MEMBER = ProcessId("local", "decent-bluebird")
ENDPOINT = "http://127.0.0.1:9103"
MINUTE_NS = 60 * 10**9


def spec(name: str, **fields: Any) -> JournalSpec:
    fragment = FragmentSpec(
        length=1 << 20,
        compression_codec=CompressionCodec.SNAPPY,
        stores=("file:///",),
        refresh_interval_ns=MINUTE_NS,
    )
    return JournalSpec(name, 1, fragment=fragment, **fields)


@dataclass
class FakeJournal:
    """Content of a journal. `script` replaces what a read yields; `append_outcome` what an append ends with."""

    spec: JournalSpec
    revision: int
    create_revision: int
    data: bytearray = field(default_factory=bytearray)
    begin: int = 0
    status: Status = Status.OK
    deleted: bool = False
    routed: bool = True
    script: list[ReadResponse | BaseException] | None = None
    append_outcome: BaseException | AppendResponse | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class FakeService:
    """Journals in bytearrays. Everything that happens is counted, so that tests can wait for it."""

    def __init__(self) -> None:
        self.journals: dict[str, FakeJournal] = {}
        self.revision = 1
        self.changed = trio.Condition()
        self.closing = False
        self.reading = 0  # reads under way
        self.receiving = 0  # appends that have begun to take content
        self.received_bytes = 0
        self.appends = 0
        self.gate: trio.Event | None = None  # holds appends back

    def make(self, name: str, **fields: Any) -> FakeJournal:
        self.revision += 1
        journal = FakeJournal(spec(name), self.revision, self.revision, **fields)
        self.journals[name] = journal
        return journal

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this service's state holds."""
        async with self.changed:
            while not condition():
                await self.changed.wait()

    async def drain(self) -> None:
        self.closing = True
        await self.notify()

    def header(self, journal: FakeJournal | None) -> Header:
        route = Route()
        if journal is not None and journal.routed:
            route = Route((MEMBER,), 0, (ENDPOINT,))
        return Header(MEMBER, route, EtcdHeader(11, 12, self.revision, 2))

    # --- JournalService ---

    async def append(
        self, request: AppendRequest, content: Content = b"", scope: Scope = UNSCOPED
    ) -> AppendResponse:
        request.validate()
        journal = self.journals.get(request.journal)
        if journal is None:
            return AppendResponse(Status.JOURNAL_NOT_FOUND, self.header(None))
        if journal.status is not Status.OK:
            return AppendResponse(journal.status, self.header(journal))
        if isinstance(journal.append_outcome, BaseException):
            raise journal.append_outcome
        if journal.append_outcome is not None:
            return journal.append_outcome
        if request.offset is not None and request.offset != journal.end:
            return AppendResponse(Status.WRONG_APPEND_OFFSET, self.header(journal))
        self.receiving += 1
        await self.notify()
        async with journal.lock:
            parts: list[bytes] = []
            if isinstance(content, bytes | bytearray | memoryview):
                parts.append(bytes(content))
            else:
                async for part in content:
                    parts.append(bytes(part))
                    self.received_bytes += len(part)
                    await self.notify()
            if self.gate is not None:
                await self.gate.wait()
            data = b"".join(parts)
            begin = journal.end
            end = begin + len(data)
            journal.data += data
        self.appends += 1
        await self.notify()
        commit = Fragment(
            journal.spec.name, begin, end, hashlib.sha1(data).digest(), CompressionCodec.SNAPPY
        )
        return AppendResponse(Status.OK, self.header(journal), commit, request.union_registers)

    @asynccontextmanager
    async def read(self, request: ReadRequest, scope: Scope = UNSCOPED) -> AsyncIterator[Any]:
        responses = self._read(request)
        self.reading += 1
        await self.notify()
        try:
            yield responses
        finally:
            self.reading -= 1
            with trio.CancelScope(shield=True):
                await responses.aclose()
                await self.notify()

    async def _read(self, request: ReadRequest) -> AsyncIterator[ReadResponse]:
        request.validate()
        journal = self.journals.get(request.journal.partition(";")[0])
        if journal is None:
            yield ReadResponse(Status.JOURNAL_NOT_FOUND, self.header(None))
            return
        header: Header | None = self.header(journal)
        if journal.status is not Status.OK:
            yield ReadResponse(journal.status, header)
            return
        if journal.script is not None:
            for item in journal.script:
                if isinstance(item, BaseException):
                    raise item
                yield replace(item, header=header) if item.header is None and header else item
                header = None
            return
        offset = journal.end if request.offset == -1 else max(request.offset, journal.begin)
        while True:
            if offset >= journal.end and request.block:
                at = offset
                await self.until(lambda: at < journal.end or self.closing or journal.deleted)  # noqa: B023
            if self.closing or journal.deleted:
                return
            if offset >= journal.end:
                yield ReadResponse(Status.OFFSET_NOT_YET_AVAILABLE, header, offset, journal.end)
                return
            content = bytes(journal.data[offset - journal.begin :])
            digest = hashlib.sha1(journal.data).digest()
            fragment = Fragment(
                journal.spec.name, journal.begin, journal.end, digest, CompressionCodec.SNAPPY
            )
            yield ReadResponse(Status.OK, header, offset, journal.end, fragment)
            header = None
            if request.metadata_only:
                return
            yield ReadResponse(offset=offset, content=content)
            offset += len(content)

    async def list(self, request: ListRequest, scope: Scope = UNSCOPED) -> ListResponse:
        request.validate()
        selector = request.selector.with_prefix_rewritten()
        return ListResponse(
            Status.OK,
            self.header(None),
            tuple(
                self._listed(journal)
                for name, journal in sorted(self.journals.items())
                if selector.matches(journal.spec.labels.with_name_label(name))
            ),
        )

    def _listed(self, journal: FakeJournal) -> ListedJournal:
        route = self.header(journal).route
        return ListedJournal(journal.spec, journal.revision, route, journal.create_revision)

    @asynccontextmanager
    async def watch(
        self, request: ListRequest, scope: Scope = UNSCOPED, *, resume_revision: int = 0
    ) -> AsyncIterator[Any]:
        request.validate()

        async def changes() -> AsyncIterator[WatchChange]:
            seen = resume_revision
            known: set[str] = set()
            while not self.closing:
                upserted = [j for _, j in sorted(self.journals.items()) if j.revision > seen]
                deleted = sorted(known - self.journals.keys())
                seen, known = self.revision, set(self.journals)
                yield WatchChange(
                    self.header(None), tuple(map(self._listed, upserted)), tuple(deleted)
                )
                await self.until(lambda: self.closing or self.revision > seen)  # noqa: B023

        yield changes()

    async def apply(self, request: ApplyRequest, scope: Scope = UNSCOPED) -> ApplyResponse:
        request.validate()
        conflicts = []
        for change in request.changes:
            name = change.upsert.name if change.upsert is not None else change.delete
            have = self.journals[name].revision if name in self.journals else 0
            if change.expect_mod_revision not in (-1, have):
                conflicts.append(name)
        if conflicts:
            return ApplyResponse(Status.ETCD_TRANSACTION_FAILED, self.header(None), tuple(conflicts))
        self.revision += 1
        for change in request.changes:
            if change.upsert is None:
                journal = self.journals.pop(change.delete, None)
                if journal is not None:
                    journal.deleted = True
            elif change.upsert.name in self.journals:
                self.journals[change.upsert.name].spec = change.upsert
                self.journals[change.upsert.name].revision = self.revision
            else:
                self.journals[change.upsert.name] = FakeJournal(change.upsert, self.revision, self.revision)
        await self.notify()
        return ApplyResponse(Status.OK, self.header(None))

    async def fragments(self, request: FragmentsRequest, scope: Scope = UNSCOPED) -> FragmentsResponse:
        request.validate()
        journal = self.journals.get(request.journal)
        if journal is None:
            return FragmentsResponse(Status.JOURNAL_NOT_FOUND, self.header(None))
        digest = hashlib.sha1(journal.data).digest()
        fragment = Fragment(
            request.journal, journal.begin, journal.end, digest, CompressionCodec.SNAPPY, "file:///", 1795230694
        )
        return FragmentsResponse(Status.OK, self.header(journal), (ListedFragment(fragment, "file:///x"),))

    async def store_health(
        self, request: FragmentStoreHealthRequest, scope: Scope = UNSCOPED
    ) -> FragmentStoreHealthResponse:
        return FragmentStoreHealthResponse(Status.OK, self.header(None))


def _is_a_service(fake: FakeService) -> JournalService:
    return fake  # mypy and readers: the double follows the seam


class Reply:
    """One response as it was on the wire."""

    def __init__(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status_line = lines[0]
        self.status = int(lines[0].split(" ")[1])
        self.header_lines = [line for line in lines[1:] if not line.startswith("Date: ")]
        self.headers = dict(line.split(": ", 1) for line in lines[1:])
        self.chunks: list[bytes] = []
        self.body = b""
        self.trailers: dict[str, str] = {}
        self.complete = False


class Client:
    """A connection, by the byte. Every wait fails after 10 seconds instead of hanging."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = b""

    async def send(self, data: bytes) -> None:
        with trio.fail_after(10):
            await self.stream.send_all(data)

    async def request(
        self, method: str, target: str, body: bytes | None = None, headers: str = "", version: str = "1.1"
    ) -> Reply:
        await self.send_request(method, target, body, headers, version)
        return await self.reply(method)

    async def send_request(
        self, method: str, target: str, body: bytes | None = None, headers: str = "", version: str = "1.1"
    ) -> None:
        if body is not None:
            headers += f"Content-Length: {len(body)}\r\n"
        head = f"{method} {target} HTTP/{version}\r\nHost: test\r\n{headers}\r\n"
        await self.send(head.encode("latin-1") + (body or b""))

    async def more(self) -> bytes:
        with trio.fail_after(10):
            data = bytes(await self.stream.receive_some(1 << 16))
        self.buffer += data
        return data

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with a mark."""
        while mark not in self.buffer:
            if not await self.more():
                raise EOFError(self.buffer)
        end = self.buffer.index(mark) + len(mark)
        found, self.buffer = self.buffer[:end], self.buffer[end:]
        return found

    async def exactly(self, length: int) -> bytes:
        while len(self.buffer) < length:
            if not await self.more():
                raise EOFError(self.buffer)
        found, self.buffer = self.buffer[:length], self.buffer[length:]
        return found

    async def head(self) -> Reply:
        return Reply((await self.until(b"\r\n\r\n"))[:-4])

    async def chunk(self, reply: Reply) -> bytes:
        """One chunk of a chunked body; the last one (empty) brings the trailers."""
        length = int(await self.until(b"\r\n"), 16)
        if length:
            data = await self.exactly(length)
            assert await self.exactly(2) == b"\r\n"
            reply.chunks.append(data)
            reply.body += data
            return data
        while (line := (await self.until(b"\r\n"))[:-2]) != b"":
            name, _, value = line.decode("latin-1").partition(": ")
            reply.trailers[name] = value
        reply.complete = True
        return b""

    async def reply(self, method: str = "GET") -> Reply:
        reply = await self.head()
        if method == "HEAD" or reply.status in (204, 304) or reply.status < 200:
            reply.complete = True
        elif "Content-Length" in reply.headers:
            reply.body = await self.exactly(int(reply.headers["Content-Length"]))
            reply.complete = True
        elif reply.headers.get("Transfer-Encoding") == "chunked":
            while await self.chunk(reply):
                pass
        else:
            reply.body = await self.rest()
            reply.complete = True
        return reply

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        while await self.more():
            pass
        found, self.buffer = self.buffer, b""
        return found

    def reset(self) -> None:
        """Close so that the server gets a RST."""
        self.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.stream.socket.close()


@dataclass
class Server:
    """A running server and the means to talk to it."""

    service: Any
    port: int
    shutdown: trio.Event
    ready: list[str] = field(default_factory=list)
    stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> Client:
        return Client(await trio.open_tcp_stream("127.0.0.1", self.port))

    async def request(
        self, method: str, target: str, body: bytes | None = None, headers: str = "", version: str = "1.1"
    ) -> Reply:
        """One request on a connection of its own."""
        client = await self.connect()
        async with client.stream:
            return await client.request(method, target, body, headers, version)


@asynccontextmanager
async def serving(service: Any, **options: Any) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        server = Server(service, 0, trio.Event())

        async def run(task_status: Any) -> None:
            await serve_http(
                service,
                port=0,
                shutdown=server.shutdown,
                ready_problem=lambda: server.ready[0] if server.ready else None,
                task_status=task_status,
                **options,
            )
            server.stopped.set()

        addresses = await nursery.start(run)
        server.port = addresses[0][1]
        yield server
        nursery.cancel_scope.cancel()


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
async def server(fake: FakeService) -> AsyncIterator[Server]:
    """A server on the fake service, which holds the empty journal `ex/aaaa`."""
    fake.make("ex/aaaa")
    async with serving(fake, allow_origins=["http://ok.example"]) as running:
        yield running


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`serve(service, **options)`: a server on any service, as an async context manager."""
    return serving

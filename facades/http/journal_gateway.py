"""GET, HEAD and PUT of journals (spec/http-gateway.md §1 to §5), as plain ASGI: this is the hot path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import trio

from broadsheet.engine.errors import AppendAborted, BroadsheetError, Status, ValidationError
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    Buffer,
    Content,
    JournalService,
    ReadRequest,
    ReadResponse,
)
from broadsheet.engine.service import Scope as ServiceScope
from broadsheet.facades.http.asgi import (
    ClientGone,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    send_response,
    send_text,
)
from broadsheet.facades.http.journal_headers import HeaderWriter, trailer_value
from broadsheet.facades.http.outcomes import http_status_of_append, http_status_of_read, rpc_failure
from broadsheet.facades.http.query import QueryError, parse_read_query, refuse_parameters
from broadsheet.facades.http.sniff import sniff_content_type

__all__ = ["MAX_CHUNK_BYTES", "JournalGateway", "RequestBody", "cut", "request_content"]

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk of a response body (design.md §10)."""

TERMINATED = "broker terminated RPC"
OFFSET_JUMP = "offset jump"
CANCELED = "context canceled"
UNEXPECTED_EOF = "unexpected EOF"


class JournalGateway:
    """An ASGI app in which every path is the name of a journal."""

    def __init__(self, service: JournalService) -> None:
        self._service = service
        self._headers = HeaderWriter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if "//" in path or "/." in path:
            clean = _clean_url_path(path)
            if clean != path:
                await _redirect(scope, send, clean)
                return
        journal = path[1:]
        method = scope["method"]
        try:
            if method == "PUT":
                await self._append(journal, scope, receive, send)
            elif method in ("GET", "HEAD"):
                offset, block = parse_read_query(scope["query_string"])
                request = ReadRequest(journal, offset, block, metadata_only=method == "HEAD")
                request.validate()
                await _Read(self._service, self._headers, request, scope, send).run(receive)
            else:
                await send_text(send, 400, f"unknown method: {method}")
        except (QueryError, ValidationError) as error:
            await send_text(send, 400, str(error))

    async def _append(self, journal: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            refuse_parameters(scope["query_string"])
        request = AppendRequest(journal)
        if ";" in journal:
            request.validate()
            request = AppendRequest(journal.partition(";")[0])
        try:
            response = await self._service.append(request, await request_content(scope, receive), self._scope(scope))
        except ValidationError:
            raise
        except AppendAborted as error:
            await send_text(send, 400, str(error))
            return
        except BroadsheetError as error:
            failure = rpc_failure(error, append=True)
            await send_text(send, failure.http_status, failure.http_text)
            return
        status = response.status
        if status is Status.OK:
            await send_response(send, 204, self._headers.of_append(response, scope["raw_path"]))
        elif status is Status.FRAGMENT_STORE_UNHEALTHY and response.store_health_error:
            await send_text(send, 500, f"{response.store_health_error}: {status.name}")
        else:
            await send_text(send, http_status_of_append(status), status.name)

    def _scope(self, scope: Scope) -> ServiceScope:
        """Who asks. Authorization (a token's claims) will enter here."""
        return UNSCOPED


class _Read:
    """One GET or HEAD, from its first response to its last.

    A client that goes away is noticed by `receive`, and ends the wait for the service's next response. It does not end
    a send that is under way: one to a closed connection fails by itself, and a client that closed only its sending
    side still reads what it gets, which must not break off in the middle of a chunk.
    """

    def __init__(
        self, service: JournalService, headers: HeaderWriter, request: ReadRequest, scope: Scope, send: Send
    ) -> None:
        self._service = service
        self._headers = headers
        self._request = request
        self._raw_path: bytes = scope["raw_path"]
        self._trailers = scope["http_version"] != "1.0"
        self._send = send
        self._first: ReadResponse | None = None
        self._started = False  # the head is sent
        self._gone = False
        self._wait: trio.CancelScope | None = None  # of the wait that a disconnect ends

    async def run(self, receive: Receive) -> None:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive)
            try:
                await self._serve()
            except ClientGone:
                pass
            except Exception as error:  # carried past the nursery, which would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._wait is not None:
            self._wait.cancel()

    async def _serve(self) -> None:
        try:
            reason = await self._stream()
        except ValidationError:
            raise
        except BroadsheetError as error:
            failure = rpc_failure(error)
            if self._first is None:
                await send_text(self._send, failure.http_status, failure.http_text)
                return
            reason = failure.http_text
        if reason is not None:
            await self._finish(reason)

    async def _stream(self) -> str | None:
        """Send the content; returns why it ended, or None if all is said."""
        async with self._service.read(self._request, UNSCOPED) as stream:
            responses = aiter(stream)
            first = await self._next(responses)
            if first is None:
                await send_text(self._send, 408 if self._gone else 500, CANCELED if self._gone else TERMINATED)
                return None
            if first.status is not Status.OK:
                headers = self._headers.of_refused_read(first, self._raw_path)
                await send_text(self._send, http_status_of_read(first.status), first.status.name, headers)
                return None
            self._first = first
            if self._request.metadata_only:
                headers = self._headers.of_read(first, self._raw_path, trailer=False)
                await send_response(self._send, 206, headers)
                return None
            offset = first.offset  # a jump before this one is swallowed: Content-Range tells
            while (response := await self._next(responses)) is not None:
                content = response.content
                if content is not None:
                    await self._content(content)
                    offset += len(content)
                elif response.status is not Status.OK:
                    return response.status.name
                elif response.offset != offset:
                    return OFFSET_JUMP
            return f"rpc error: code = Canceled desc = {CANCELED}" if self._gone else TERMINATED

    async def _next(self, responses: AsyncIterator[ReadResponse]) -> ReadResponse | None:
        """The next response; None at the end, or when the client is gone.

        A read that does not block is carried on once it has begun. It ends soon by itself, and serves clients that
        half-close (`nc -N`)."""
        if self._first is not None and not self._request.block:
            return await anext(responses, None)
        if self._gone:
            return None
        with trio.CancelScope() as self._wait:
            return await anext(responses, None)
        return None

    async def _content(self, content: Buffer) -> None:
        if not self._started:
            await self._start([(b"Content-Type", sniff_content_type(content))])
        for piece in cut(content, MAX_CHUNK_BYTES):
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _start(self, more_headers: Headers) -> None:
        assert self._first is not None
        headers = self._headers.of_read(self._first, self._raw_path, trailer=self._trailers)
        self._started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": 206,
                "headers": headers + more_headers,
                "trailers": self._trailers,
            }
        )

    async def _finish(self, reason: str) -> None:
        if not self._started:
            await self._start([])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._trailers:
            trailer = [(b"X-Close-Error", trailer_value(reason))]
            await self._send({"type": "http.response.trailers", "headers": trailer})


class RequestBody:
    """The body of a request as content of an append. A body cut short raises `AppendAborted`."""

    __slots__ = ("_message", "_receive")

    def __init__(self, receive: Receive, message: Message | None = None) -> None:
        self._receive = receive
        self._message = message  # received already, or None

    def __aiter__(self) -> AsyncIterator[Buffer]:
        return self

    async def __anext__(self) -> Buffer:
        while True:
            message = self._message
            if message is None:
                message = await self._receive()
            elif message.get("more_body") is False:
                raise StopAsyncIteration
            if message["type"] != "http.request":
                raise AppendAborted(UNEXPECTED_EOF)
            body = message.get("body", b"")
            assert isinstance(body, bytes)
            # The end is remembered, and told at the next call.
            self._message = None if message.get("more_body", False) else _END_OF_BODY
            if body:
                return body


_END_OF_BODY: Message = {"type": "http.request", "more_body": False}


async def request_content(scope: Scope, receive: Receive) -> Content:
    """The request's body: bytes if it has arrived whole, else an iterable.

    A client that waits for `100 Continue` gets it only when the service asks for content, so that a refusal
    spares the upload.
    """
    for name, _ in scope["headers"]:
        if name == b"expect":
            return RequestBody(receive)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        return body
    return RequestBody(receive, message)


def cut(content: Buffer, length: int) -> list[Buffer]:
    """Content in pieces of at most `length` bytes, without copying."""
    if len(content) <= length:
        return [content] if len(content) else []
    view = memoryview(content)
    return [view[at : at + length] for at in range(0, len(view), length)]


def _clean_url_path(path: str) -> str:
    """Lexically clean path; a trailing slash stays."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    clean = "/" + "/".join(parts)
    return clean + "/" if path.endswith("/") and parts else clean


async def _redirect(scope: Scope, send: Send, path: str) -> None:
    location = quote(path, safe="/;=+.@:!$&'()*,~-_")
    if scope["query_string"]:
        location += "?" + scope["query_string"].decode("latin-1")
    await send_response(
        send,
        307,
        [(b"Content-Length", b"0"), (b"Location", location.encode("latin-1"))],
    )

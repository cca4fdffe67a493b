"""The JSON gateway below `/v1/` (spec/http-gateway.md §7), and what we add to it.

| Route (all POST) | Call | Request | Response |
|---|---|---|---|
| `/v1/journals/list` | List, or its watch | ListRequest as JSON | one `{"result": ListResponse}` a line |
| `/v1/journals/read` | Read | ReadRequest as JSON | one `{"result": ReadResponse}` a line |
| `/v1/journals/apply` | Apply (ours) | ApplyRequest as JSON | ApplyResponse as JSON |
| `/v1/journals/append` | Append (ours) | parameters in the query, content as body | AppendResponse as JSON |
| `/v1/journals/fragments` | ListFragments (ours) | FragmentsRequest as JSON | FragmentsResponse as JSON |

Parameters of append: `journal`; `offset` (bytes; may be 0); `check_registers` (a selector); `union_registers` and
`subtract_registers` (`name=value,name=value`); `suspend` (`SUSPEND_RESUME`, …). Our routes answer a status that is
not OK with an HTTP status of 4xx or 5xx and the response as body; a call that fails has
`{"code": …, "message": …, "details": []}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from broadsheet.engine.errors import AppendAborted, BroadsheetError, Status, ValidationError
from broadsheet.engine.labels import Label, LabelSet, parse_selector
from broadsheet.engine.service import (
    UNSCOPED,
    AppendRequest,
    Header,
    JournalService,
    ListedJournal,
    ListRequest,
    ReadResponse,
    SuspendControl,
)
from broadsheet.engine.service import Scope as ServiceScope
from broadsheet.facades.http.asgi import ASGIApp, ClientGone, Message, Receive, Scope, Send, until_disconnect
from broadsheet.facades.http.journal_gateway import UNEXPECTED_EOF, cut, request_content
from broadsheet.facades.http.json_codec import (
    EMPTY_HEADER,
    Json,
    JsonSyntaxError,
    append_response_json,
    apply_response_json,
    dump,
    fragments_response_json,
    header_json,
    listed_journal_json,
    load,
    parse_apply_request,
    parse_fragments_request,
    parse_list_request,
    parse_read_request,
    read_response_bytes,
)
from broadsheet.facades.http.outcomes import GrpcCode, RpcFailure, rpc_failure
from broadsheet.facades.http.query import QueryError, parse_pairs

__all__ = ["MAX_JSON_BYTES", "JsonGateway"]

MAX_JSON_BYTES = 64 << 20
"""Largest JSON body that is read. An apply of ten thousand specs takes about 6 MB."""

JSON_BODY_TIMEOUT_S = 60.0
LISTED_AT_ONCE = 25
CONTENT_AT_ONCE_BYTES = 192 * 1024  # a multiple of three: base64 without padding

_STREAM_HEADERS = [
    (b"Content-Type", b"application/json"),
    (b"Grpc-Metadata-Content-Type", b"application/grpc"),
]
_HTTP_REASONS = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
_STATUSES = {
    Status.OK: 200,
    Status.JOURNAL_NOT_FOUND: 404,
    Status.NOT_ALLOWED: 403,
    Status.ETCD_TRANSACTION_FAILED: 409,
    Status.WRONG_APPEND_OFFSET: 409,
    Status.INDEX_HAS_GREATER_OFFSET: 409,
    Status.REGISTER_MISMATCH: 409,
    Status.SUSPENDED: 409,
    Status.OFFSET_NOT_YET_AVAILABLE: 416,
}
_CORS_HEADERS = (
    "Cache-Control, Content-Language, Content-Length, Content-Type, Expires, Last-Modified, Pragma, Authorization"
)


class _Refused(Exception):
    """A request that got no further than its body or parameters."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class JsonGateway:
    """Handlers of the routes below `/v1/`. `routes()` is for a Starlette app."""

    def __init__(self, service: JournalService, *, allow_origins: Sequence[str] = ()) -> None:
        self._service = service
        self._origins = frozenset(allow_origins)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/journals/list", _Endpoint(self._list, self._origins)),
            Route("/v1/journals/read", _Endpoint(self._read, self._origins)),
            Route("/v1/journals/apply", _Endpoint(self._apply, self._origins)),
            Route("/v1/journals/append", _Endpoint(self._append, self._origins)),
            Route("/v1/journals/fragments", _Endpoint(self._fragments, self._origins)),
            Route("/v1/{rest:path}", _Endpoint(None, self._origins)),
        ]

    def _scope(self, request: Request, min_revision: int = 0) -> ServiceScope:
        """Who asks. Authorization (a token's claims) will enter here."""
        return ServiceScope(min_revision=min_revision) if min_revision else UNSCOPED

    # --- Streams ---

    async def _list(self, request: Request, receive: Receive, send: Send) -> None:
        listing, watch, revision = parse_list_request(await _json_body(request))
        scope = self._scope(request)
        lines = _Lines(send)

        async def snapshot(header: Header, journals: Sequence[ListedJournal]) -> None:
            for message in _list_messages(header, journals):
                await lines.send(b'{"result":' + dump(message) + b"}\n")

        async def work() -> None:
            if not watch:
                response = await self._service.list(listing, scope)
                await snapshot(response.header, response.journals)
                return
            await self._watch(listing, scope, revision, lines, snapshot)

        await lines.run(receive, work)

    async def _watch(
        self,
        listing: ListRequest,
        scope: ServiceScope,
        revision: int,
        lines: _Lines,
        snapshot: Callable[[Header, Sequence[ListedJournal]], Awaitable[None]],
    ) -> None:
        """Snapshots, made here of the service's changes. After each comes one empty response."""
        known: dict[str, ListedJournal] = {}
        if revision:
            # A resumed watch yields what changed since; the snapshot needs what did not.
            first = await self._service.list(listing, scope)
            known = {journal.spec.name: journal for journal in first.journals}
        terminator = b'{"result":%s}\n' % dump({"status": "OK", "header": header_json(EMPTY_HEADER), "journals": []})
        async with self._service.watch(listing, scope, resume_revision=revision) as changes:
            async for change in changes:
                for name in change.deleted:
                    known.pop(name, None)
                for journal in change.upserted:
                    known[journal.spec.name] = journal
                journals = [known[name] for name in sorted(known, key=str.encode)]
                await snapshot(change.header, journals)
                await lines.send(terminator)

    async def _read(self, request: Request, receive: Receive, send: Send) -> None:
        reading, min_revision = parse_read_request(await _json_body(request))
        scope = self._scope(request, min_revision)
        lines = _Lines(send)

        async def work() -> None:
            reading.validate()
            async with self._service.read(reading, scope) as responses:
                async for response in responses:
                    for message in _read_messages(response):
                        await lines.send(b'{"result":' + message + b"}\n")

        await lines.run(receive, work)

    # --- Single responses ---

    async def _apply(self, request: Request, receive: Receive, send: Send) -> None:
        changes = parse_apply_request(await _json_body(request))
        response = await self._service.apply(changes, self._scope(request))
        await _respond(request, receive, send, response.status, apply_response_json(response))

    async def _append(self, request: Request, receive: Receive, send: Send) -> None:
        append = _append_request(request.scope["query_string"])
        content = await request_content(request.scope, receive)
        response = await self._service.append(append, content, self._scope(request))
        await _respond(request, receive, send, response.status, append_response_json(response))

    async def _fragments(self, request: Request, receive: Receive, send: Send) -> None:
        listing = parse_fragments_request(await _json_body(request))
        response = await self._service.fragments(listing, self._scope(request))
        await _respond(request, receive, send, response.status, fragments_response_json(response))


class _Endpoint:
    """One route as an ASGI app: methods, CORS, and the answers to what a handler raises."""

    def __init__(
        self, handler: Callable[[Request, Receive, Send], Awaitable[None]] | None, origins: frozenset[str]
    ) -> None:
        self._handler = handler
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        send = self._with_cors(request, send)
        answer: ASGIApp | None = None
        try:
            if request.method == "OPTIONS":
                answer = Response()
            elif request.method != "POST" or self._handler is None:
                answer = _problem(501, GrpcCode.UNIMPLEMENTED, "Not Implemented")
            else:
                await self._handler(request, receive, send)
        except (JsonSyntaxError, QueryError) as error:
            answer = _problem(400, GrpcCode.INVALID_ARGUMENT, str(error))
        except _Refused as error:
            answer = _problem(error.status, GrpcCode.INVALID_ARGUMENT, str(error))
        except ValidationError as error:
            answer = _problem(400, GrpcCode.INVALID_ARGUMENT, str(error))
        except AppendAborted as error:
            answer = _problem(400, GrpcCode.CANCELED, str(error))
        except BroadsheetError as error:
            failure = rpc_failure(error, append=scope["path"].endswith("/append"))
            answer = _problem(failure.http_status, failure.code, failure.text)
        except ClientDisconnect:
            answer = _problem(400, GrpcCode.CANCELED, UNEXPECTED_EOF)
        if answer is not None:
            await answer(scope, receive, send)

    def _with_cors(self, request: Request, send: Send) -> Send:
        origin = request.headers.get("origin")
        if origin is None or origin not in self._origins:
            return send
        added = [
            (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
            (b"Access-Control-Allow-Methods", b"GET, POST, OPTIONS"),
            (b"Access-Control-Allow-Headers", _CORS_HEADERS.encode("ascii")),
        ]

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_cors


class _Lines:
    """A response of JSON lines, begun with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def run(self, receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, which sends lines; end the response as it ends. A client that goes cancels it."""
        try:
            try:
                if await until_disconnect(receive, work):
                    return
            except ValidationError as error:
                await self._fail(RpcFailure(GrpcCode.UNKNOWN, str(error), 500, ""))
            except BroadsheetError as error:
                await self._fail(rpc_failure(error))
            if not self._started:
                await self._start(200)
            await self._send({"type": "http.response.body", "body": b""})
        except ClientGone:
            pass

    async def send(self, line: bytes) -> None:
        if not self._started:
            await self._start(200)
        await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def _start(self, status: int) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": _STREAM_HEADERS})

    async def _fail(self, failure: RpcFailure) -> None:
        """The stream's error: its status if nothing was sent, and its last line in any case."""
        if not self._started:
            await self._start(failure.http_status)
        error = {
            "grpcCode": int(failure.code),
            "httpCode": failure.http_status,
            "message": failure.text,
            "httpStatus": _HTTP_REASONS.get(failure.http_status, ""),
            "details": [],
        }
        await self._send({"type": "http.response.body", "body": dump({"error": error}) + b"\n", "more_body": True})


def _list_messages(header: Header, journals: Sequence[ListedJournal]) -> Iterable[Json]:
    """A listing in messages of 25 journals; the first carries the header, and is there for an empty listing."""
    for begin in range(0, max(len(journals), 1), LISTED_AT_ONCE):
        yield {
            "status": "OK",
            "header": header_json(EMPTY_HEADER if begin else header),
            "journals": [listed_journal_json(journal) for journal in journals[begin : begin + LISTED_AT_ONCE]],
        }


def _read_messages(response: ReadResponse) -> Iterable[bytes]:
    if response.content is None:
        yield read_response_bytes(response)
        return
    offset = response.offset
    for piece in cut(response.content, CONTENT_AT_ONCE_BYTES):
        yield read_response_bytes(ReadResponse(offset=offset, content=piece))
        offset += len(piece)


def _problem(status: int, code: GrpcCode, text: str) -> Response:
    body = dump({"code": int(code), "message": text, "details": []})
    return Response(body, status, media_type="application/json")


async def _respond(request: Request, receive: Receive, send: Send, status: Status, body: Json) -> None:
    response = Response(dump(body), _STATUSES.get(status, 503), media_type="application/json")
    await response(request.scope, receive, send)


async def _json_body(request: Request) -> Json:
    """The request's JSON object, bounded in size and time."""
    body = bytearray()
    with trio.move_on_after(JSON_BODY_TIMEOUT_S) as limit:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_JSON_BYTES:
                raise _Refused(413, f"the body is larger than {MAX_JSON_BYTES} bytes")
    if limit.cancelled_caught:
        raise _Refused(408, f"the body did not arrive within {JSON_BODY_TIMEOUT_S:g} s")
    return load(bytes(body))


def _append_request(query: bytes) -> AppendRequest:
    given: dict[str, str] = {}
    for name, value in parse_pairs(query):
        if name not in ("journal", "offset", "check_registers", "union_registers", "subtract_registers", "suspend"):
            raise QueryError(f'unknown parameter "{name}"')
        given[name] = value
    offset = given.get("offset")
    if offset is not None and not (offset.isascii() and offset.isdecimal() and len(offset) < 20):
        raise QueryError(f'offset must be a number of bytes, not "{offset}"')
    selector = given.get("check_registers")
    suspend = given.get("suspend", "RESUME").upper().removeprefix("SUSPEND_")
    if suspend not in SuspendControl.__members__:
        raise QueryError(f'suspend must be one of {", ".join(SuspendControl.__members__)}, not "{suspend}"')
    return AppendRequest(
        given.get("journal", ""),
        None if offset is None else int(offset),
        None if selector is None else parse_selector(selector),
        _labels(given.get("union_registers")),
        _labels(given.get("subtract_registers")),
        SuspendControl[suspend],
    )


def _labels(text: str | None) -> LabelSet | None:
    """`name=value,name=value` as a set, in any order."""
    if text is None:
        return None
    pairs = (part.partition("=") for part in text.split(",") if part)
    return LabelSet(tuple(sorted((Label(name, value) for name, _, value in pairs), key=_label_key)))


def _label_key(label: Label) -> tuple[bytes, bytes]:
    return label.name.encode("utf-8"), label.value.encode("utf-8")

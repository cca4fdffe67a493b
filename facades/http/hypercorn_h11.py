"""hypercorn's HTTP/1.1 server, with what a journal gateway needs and hypercorn 0.18 does not do.

This is the only module that knows hypercorn. It subclasses the three classes that a connection is made of and
replaces, by overriding methods, what is missing or costs too much. hypercorn is pinned to 0.18 (pyproject.toml) and
tests/http/test_wire.py looks at the bytes on the wire, so an upgrade that breaks an override shows.

| hypercorn 0.18 | here |
|---|---|
| no trailers over HTTP/1.1 | ASGI `http.response.trailers` become chunked trailers; none for HTTP/1.0 |
| no reason phrase; a `server:` header | as spec/http-gateway.md has them |
| head, body and end are separate sends | the head goes out with the first body, the end with the last |
| big chunks are copied into one buffer with their framing | one `writev` of the parts |
| a send is shielded: a stalled client blocks a shutdown for ever | every wait is cancellable |
| after a broken send the app keeps sending into nothing | `send` raises `ClientGone` |
| a body is always two ASGI messages; 64 KiB reads | a body that has arrived whole is one message; 96 KiB reads |
| `100 Continue` at once | when the app first asks for the body, so that a refusal comes before the upload |
| EOF from the client ends the response | half-closed clients: the app sees `http.disconnect` and may still answer |
| an app that ends early leaves the reader blocked in a full queue | the queue breaks; unread input is drained |
| an idle task is started and cancelled around every request | one deadline on the connection's cancel scope |
| an exception after the head is sent ends the body as if it were complete | the connection is cut |
| pipelined input hides a disconnect | input is watched, up to a bound, while a response is under way |
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeAlias

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import h11 as hypercorn_protocol
from hypercorn.protocol import http_stream as hypercorn_stream
from hypercorn.protocol.events import Body, Request, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID
from hypercorn.protocol.http_stream import ASGIHTTPState
from hypercorn.trio import task_group as hypercorn_task_group
from hypercorn.trio import tcp_server as hypercorn_tcp_server
from hypercorn.trio import worker_context as hypercorn_worker_context
from hypercorn.typing import ConnectionState
from hypercorn.utils import UnexpectedMessageError, parse_socket_addr

from broadsheet.facades.http.asgi import ASGIApp, ClientGone, Message, Scope

__all__ = ["IDLE_S", "GatewayConfig", "GatewayConnection", "ServerContext"]

RECEIVE_BYTES = 96 * 1024
"""Bytes asked of the socket at once. More would pay for fewer calls with page faults: from 128 KiB on, glibc takes
fresh pages from the kernel for each buffer, and bulk uploads measured 0.7 GB/s instead of 1.4 to 1.8."""

LINGER_S = 2.0
"""How long unread input of a client that was answered early is thrown away before its connection is closed. Closing
at once would reset the connection, and the client might never see the answer."""

IDLE_S = 75.0
"""How long a connection may wait for a request, and how long the head of one may take to arrive."""

QUEUED_MESSAGES = 2
"""Body messages (each up to RECEIVE_BYTES) that wait for the app before reading from the socket stops."""

FAIR_SHARE_BYTES = 64 * 1024
"""A response that sends this much at once lets the other tasks run before it goes on."""

_log = logging.getLogger("broadsheet.http")

# Without their types: hypercorn's annotations name its own collaborators, which these overrides replace.
_H11Protocol: Any = hypercorn_protocol.H11Protocol
_HTTPStream: Any = hypercorn_stream.HTTPStream
_TaskGroup: Any = hypercorn_task_group.TaskGroup
_TCPServer: Any = hypercorn_tcp_server.TCPServer
_WorkerContext: Any = hypercorn_worker_context.WorkerContext

_REASONS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
_REASONS[416] = b"Requested Range Not Satisfiable"  # the phrase differs between versions of Python
_REASONS[413] = b"Request Entity Too Large"
_FRAMING_HEADERS = frozenset({b"Connection", b"Content-Length", b"Transfer-Encoding", b"Upgrade"})
_NO_BODY_STATUSES = frozenset({204, 304})
_CHUNKED_HEADER = b"Transfer-Encoding: chunked\r\n"


class GatewayConfig(Config):
    """hypercorn's settings, as the gateway wants them."""

    keep_alive_timeout = IDLE_S
    keep_alive_max_requests = 2**63 - 1  # hypercorn closes a connection after 1000 requests otherwise
    h11_max_incomplete_size = 64 * 1024
    include_server_header = False

    def __init__(self) -> None:
        super().__init__()
        self._date_second = -1
        self._date_headers: list[tuple[bytes, bytes]] = []

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        second = int(time.time())
        if second != self._date_second:
            self._date_second = second
            self._date_headers = [(b"Date", formatdate(second, usegmt=True).encode("ascii"))]
        return self._date_headers


class ServerContext(_WorkerContext):  # type: ignore[misc]
    """What the connections of one server share: whether it is draining, and which they are."""

    def __init__(self) -> None:
        super().__init__(None)
        self.connections: set[GatewayConnection] = set()
        self.draining = False

    def drain(self) -> None:
        """Close the connections that wait for a request. The others close after the response they are at."""
        self.draining = True
        for connection in list(self.connections):
            connection.close_if_idle()


class AppTaskGroup(_TaskGroup):  # type: ignore[misc]
    """Starts the app in the connection's nursery, on an `AppInbox`."""

    async def spawn_app(
        self, app: ASGIApp, config: Config, scope: Scope, send: GatewayStream.AppSend
    ) -> AppInbox:
        inbox = AppInbox()
        self._nursery.start_soon(_run_app, app, scope, inbox, send)
        return inbox


async def _run_app(
    app: ASGIApp, scope: Scope, inbox: AppInbox, send: GatewayStream.AppSend
) -> None:
    try:
        await app(scope, inbox.receive, send)
    except ClientGone:
        pass  # said once, by whoever noticed; the app has nothing to add
    except Exception:  # the boundary between an app and its server: log, answer 500 or cut, serve the others
        _log.exception("unhandled error", extra={"fields": {"method": scope["method"], "path": scope["path"]}})
    finally:
        inbox.close_receiver()
    await send(None)


class AppInbox:
    """ASGI messages on their way from the connection's reader to the app. Bounded; either end may close."""

    __slots__ = ("_receiver", "_sender", "want_body")

    def __init__(self) -> None:
        self._sender, self._receiver = trio.open_memory_channel[Message](QUEUED_MESSAGES)
        self.want_body: Callable[[], Awaitable[None]] | None = None

    async def receive(self) -> Message:
        """The ASGI `receive` of the app."""
        try:
            return self._receiver.receive_nowait()
        except trio.EndOfChannel:
            return {"type": "http.disconnect"}
        except trio.WouldBlock:
            pass
        if self.want_body is not None:
            await self.want_body()
        try:
            return await self._receiver.receive()
        except trio.EndOfChannel:
            return {"type": "http.disconnect"}

    async def __call__(self, message: Message) -> None:
        try:
            try:
                self._sender.send_nowait(message)
            except trio.WouldBlock:
                await self._sender.send(message)
        except trio.BrokenResourceError:
            pass  # the app has ended; what still comes is not for it
        except trio.ClosedResourceError:
            pass  # disconnected meanwhile

    def disconnect(self) -> None:
        """After what is queued, the app receives `http.disconnect`."""
        self._sender.close()

    def close_receiver(self) -> None:
        self._receiver.close()


class GatewayStream(_HTTPStream):  # type: ignore[misc]
    """One request and its response: ASGI messages in, h11 events out."""

    AppSend: TypeAlias = Callable[[Message | None], Awaitable[None]]

    app_put: AppInbox
    state: ASGIHTTPState

    def __init__(self, protocol: GatewayProtocol) -> None:
        super().__init__(
            protocol.app,
            protocol.config,
            protocol.context,
            protocol.task_group,
            protocol.ssl,
            protocol.client,
            protocol.server,
            protocol.stream_send,
            STREAM_ID,
        )
        self._protocol = protocol
        self._start: Message | None = None  # `http.response.start`, until it is sent

    async def handle(self, event: StreamEvent) -> None:
        if isinstance(event, Request):
            await super().handle(event)
            scope = self.scope
            scope["asgi"]["spec_version"] = "2.4"
            scope["extensions"]["http.response.trailers"] = {}
            self.app_put.want_body = self._protocol.continue_body
        elif isinstance(event, Body):
            await self.app_put({"type": "http.request", "body": event.data, "more_body": True})
        elif isinstance(event, StreamClosed):
            self.app_put.disconnect()
        else:
            raise TypeError(f"unexpected {event!r}")

    async def put_last_body(self, body: bytes) -> None:
        await self.app_put({"type": "http.request", "body": body, "more_body": False})

    async def app_send(self, message: Message | None) -> None:
        """The ASGI `send`. None, from `_run_app`, says that the app has returned."""
        if message is None:
            if self.state is ASGIHTTPState.REQUEST:
                await self._protocol.send_error(500)
            elif self.state is not ASGIHTTPState.CLOSED:
                _log.debug("response left unfinished, connection cut")
                self._protocol.cut()
            self.state = ASGIHTTPState.CLOSED
            return
        kind = message["type"]
        protocol = self._protocol
        if kind == "http.response.start" and self.state is ASGIHTTPState.REQUEST:
            self._start = message
            self.response = message
            self.state = ASGIHTTPState.RESPONSE
        elif kind == "http.response.body" and self.state is ASGIHTTPState.RESPONSE:
            parts = self._head()
            protocol.add_body(parts, message.get("body", b""))
            if message.get("more_body", False):
                await protocol.send_parts(parts)
            elif self.response.get("trailers", False):
                self.state = ASGIHTTPState.TRAILERS
                if parts:
                    await protocol.send_parts(parts)
            else:
                await self._end(parts, [])
        elif kind == "http.response.trailers" and self.state is ASGIHTTPState.TRAILERS:
            await self._end(self._head(), list(message.get("headers", [])))
        else:
            raise UnexpectedMessageError(self.state, kind)

    def _head(self) -> list[bytes]:
        start, self._start = self._start, None
        if start is None:
            return []
        return [self._protocol.build_head(int(start["status"]), list(start.get("headers", [])))]

    async def _end(self, parts: list[bytes], trailers: list[tuple[bytes, bytes]]) -> None:
        self._protocol.add_end(parts, trailers)
        self.state = ASGIHTTPState.CLOSED
        await self._protocol.send_parts(parts)
        await self._protocol.end_cycle()


class GatewayProtocol(_H11Protocol):  # type: ignore[misc]
    """The HTTP/1.1 state of one connection, between its bytes and its streams."""

    stream: GatewayStream | None
    connection: h11.Connection

    def __init__(self, transport: GatewayConnection, task_group: AppTaskGroup, client: Any, server: Any) -> None:
        super().__init__(
            transport.app,
            transport.config,
            transport.context,
            task_group,
            ConnectionState({}),
            False,
            client,
            server,
            transport.protocol_send,
        )
        self._transport = transport
        self._method = b""
        self._chunked = False

    # --- From the client ---

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            self.connection.receive_data(event.data)
            await self._handle_events()
        elif isinstance(event, Closed) and self.stream is not None:
            await self.stream.handle(StreamClosed(stream_id=STREAM_ID))

    async def _handle_events(self) -> None:
        body: list[bytes] = []  # what has arrived of the body is handed on in one message
        while True:
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(error)
                return
            if type(event) is h11.Data:
                body.append(event.data)
            elif type(event) is h11.EndOfMessage:
                if self.stream is not None:
                    await self.stream.put_last_body(b"".join(body))
                body = []
            else:
                if body:
                    if self.stream is not None:
                        await self.stream.handle(Body(stream_id=STREAM_ID, data=b"".join(body)))
                    body = []
                if type(event) is h11.Request:
                    await self.send(Updated(idle=False))
                    await self._create_stream(event)
                elif event is h11.PAUSED:
                    await self.can_read.clear()
                    for data in await self._transport.receive_while_paused(self.can_read):
                        self.connection.receive_data(data)
                    if self._transport.closed:
                        return
                else:
                    return  # NEED_DATA, ConnectionClosed

    async def _create_stream(self, request: h11.Request) -> None:
        self._method = request.method
        self.stream = GatewayStream(self)
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode("ascii"),
                method=request.method.decode("ascii"),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """The client broke the protocol, or went away in the middle of a message."""
        if self.stream is not None:
            await self.stream.handle(StreamClosed(stream_id=STREAM_ID))  # the app decides what to answer
        elif self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.send_error(error.error_status_hint)
        else:
            self.cut()

    async def continue_body(self) -> None:
        """Say `100 Continue` if the client waits for it."""
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(
                h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            )

    # --- To the client ---

    def build_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Status line and headers, in the case and order given, then Date and what the framing needs."""
        framing: list[tuple[bytes, bytes]] = []
        lines: list[bytes] = []
        for name, value in (*headers, *self.config.response_headers("h11")):
            # Starlette writes names in lower case; Go, and so Gazette, in title case.
            title = _title_case(name) if name.islower() else name
            if title in _FRAMING_HEADERS:
                framing.append((title, value))
            else:
                lines.append(b"%b: %b\r\n" % (title, value))
        if self.context.draining:
            framing.append((b"Connection", b"close"))
        # h11 decides on framing and sees the headers that matter to it. The others are set before them: letting it
        # check and copy each would cost a sixth of a small request.
        block = b"".join(lines)
        if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
            raise ValueError("a response header contains a line break")
        head = self.connection.send(
            h11.Response(status_code=status, headers=framing, reason=_REASONS.get(status, b""))
        )
        begin = head.index(b"\n") + 1
        head = head[:begin] + block + head[begin:]
        no_body = self._method == b"HEAD" or status in _NO_BODY_STATUSES
        self._chunked = not no_body and _CHUNKED_HEADER in head
        if self._method == b"HEAD":
            head = head.replace(_CHUNKED_HEADER, b"")  # h11 says how a GET would be framed; Go's server does not
        return head

    def add_body(self, parts: list[bytes], body: bytes) -> None:
        if len(body) and self._method != b"HEAD":
            chunk = self.connection.send_with_data_passthrough(h11.Data(data=body))
            assert chunk is not None
            parts.extend(chunk)

    def add_end(self, parts: list[bytes], trailers: list[tuple[bytes, bytes]]) -> None:
        end = h11.EndOfMessage(headers=trailers) if trailers and self._chunked else h11.EndOfMessage()
        try:
            data = self.connection.send(end)
        except h11.LocalProtocolError:  # less body than the app's own Content-Length promised
            self.cut()
            raise
        if data:
            parts.append(data)

    async def send_parts(self, parts: Sequence[bytes]) -> None:
        """Send buffers one after another, in as few system calls and copies as possible."""
        await self._transport.send_buffers(parts)

    async def send_error(self, status: int) -> None:
        """Answer for the server itself, and close."""
        reason = _REASONS.get(status, b"")
        text = b"%d %s\n" % (status, reason)
        headers = [
            (b"Connection", b"close"),
            (b"Content-Length", b"%d" % len(text)),
            (b"Content-Type", b"text/plain; charset=utf-8"),
        ]
        try:
            parts = [self.build_head(status, headers)]
            self.add_body(parts, text)
            self.add_end(parts, [])
            await self.send_parts(parts)
        except ClientGone:
            return
        await self.end_cycle()

    async def end_cycle(self) -> None:
        """The response is sent: wait for the next request, or close."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.app_put.want_body = None
        connection = self.connection
        if (
            connection.our_state is h11.DONE
            and connection.their_state is h11.DONE
            and not self.context.draining
        ):
            connection.start_next_cycle()
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())
        await self.can_read.set()

    def cut(self) -> None:
        """Close at once, so that the client sees an unfinished response."""
        self.stream = None
        self._transport.close()

    @property
    def unread_input(self) -> bool:
        """Whether the client may still be sending a body nobody wants."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)


class GatewayConnection(_TCPServer):  # type: ignore[misc]
    """One accepted connection. `await connection.run()` serves it to its end; cancellable at every wait."""

    protocol: GatewayProtocol
    context: ServerContext

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, context: ServerContext, stream: trio.SocketStream
    ) -> None:
        super().__init__(app, config, context, {}, stream)
        self._scope = trio.CancelScope()
        self._idle = True
        self._lingering = False
        self.closed = False

    async def run(self) -> None:
        self.context.connections.add(self)
        sock = self.stream.socket
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
            self._wait_for_request()
            with self._scope:
                async with AppTaskGroup() as task_group:
                    self.protocol = GatewayProtocol(self, task_group, client, server)
                    await self._read_data()
        except OSError as error:
            _log.debug("connection failed", extra={"fields": {"err": str(error)}})
        finally:
            self.context.connections.discard(self)
            self.close()

    async def _read_data(self) -> None:
        protocol = self.protocol
        try:
            while not self.closed:
                data = await self.stream.receive_some(RECEIVE_BYTES)
                if not self._lingering:
                    await protocol.handle(RawData(data))
                if not data:
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError, ClientGone):
            pass
        await protocol.handle(Closed())
        if protocol.stream is None:
            self.close()

    async def receive_while_paused(self, resumed: Any) -> list[bytes]:
        """Wait until the response under way is done, and watch the client meanwhile.

        Returns what it sent of its next requests; about RECEIVE_BYTES of it, then it is left in the socket."""
        kept: list[bytes] = []

        async def watch() -> None:
            received = 0
            while received < RECEIVE_BYTES:
                try:
                    data = await self.stream.receive_some(RECEIVE_BYTES)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                kept.append(data)
                received += len(data)
                if not data:
                    await self.protocol.handle(Closed())
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await resumed.wait()
            nursery.cancel_scope.cancel()
        return kept

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self.send_buffers([event.data])
        elif isinstance(event, Closed):
            self._close_politely()
        elif isinstance(event, Updated):
            if event.idle:
                self._wait_for_request()
            else:
                self._idle = False
                self._scope.deadline = math.inf

    async def send_buffers(self, buffers: Sequence[bytes]) -> None:
        """Send all of them. Raises `ClientGone`.

        Straight to the socket: what fits into its buffer, as nearly every response does, costs one system call and
        no turn of the scheduler, and framing needs no copy. A stalled client is waited for, cancellably.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        sock = self.stream.socket
        left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = 0
        try:
            while left:
                try:
                    sent = os.writev(sock.fileno(), left)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(sock)
                    continue
                total += sent
                while left and sent >= len(left[0]):
                    sent -= len(left[0])
                    del left[0]
                if sent:
                    left[0] = left[0][sent:]
        except (OSError, trio.ClosedResourceError) as error:
            self.close()
            raise ClientGone(str(error)) from error
        if total >= FAIR_SHARE_BYTES:
            await trio.lowlevel.checkpoint()

    # --- Its end ---

    def _wait_for_request(self) -> None:
        self._idle = True
        self._scope.deadline = trio.current_time() + self.config.keep_alive_timeout
        if self.context.draining:
            self.close()

    def close_if_idle(self) -> None:
        if self._idle:
            self.close()

    def _close_politely(self) -> None:
        if self.closed:
            return
        if not self.protocol.unread_input:
            self.close()
            return
        try:
            self.stream.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._lingering = True
        self._scope.deadline = trio.current_time() + LINGER_S

    def close(self) -> None:
        """Close the socket. Whoever waits on it wakes up."""
        if not self.closed:
            self.closed = True
            self.stream.socket.close()


@lru_cache(maxsize=256)
def _title_case(name: bytes) -> bytes:
    return name.title()


def _origin_form(target: bytes) -> bytes:
    """`/path?query` of a request target; proxies' clients send `http://host/path?query`."""
    if target.startswith(b"/"):
        return target
    scheme, separator, rest = target.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        _, slash, path = rest.partition(b"/")
        return slash + path or b"/"
    return target

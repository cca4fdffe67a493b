"""Accepting connections: one port for HTTP/1.x and, later, HTTP/2 (stack.md §1).

The first bytes of a connection are looked at without taking them. Those of an HTTP/2 client go to a handler that is
plugged in (gRPC); everything else is HTTP/1.x.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import trio

from broadsheet.facades.http.asgi import ASGIApp
from broadsheet.facades.http.hypercorn_h11 import IDLE_S, GatewayConfig, GatewayConnection, ServerContext

__all__ = ["Http2Handler", "open_listeners", "serve_asgi"]

Http2Handler: TypeAlias = Callable[[trio.SocketStream], Awaitable[None]]
"""Serves a connection whose unread bytes begin with the HTTP/2 preface, to its end."""

HTTP2_PREFACE = b"PRI * HTTP/2.0"
BACKLOG = 1024

_log = logging.getLogger("broadsheet.http")


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on TCP `host`:`port` (0 for any free port). Raises OSError, EADDRINUSE among them."""
    return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)


async def serve_asgi(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    *,
    http2_handler: Http2Handler | None = None,
    shutdown: trio.Event | None = None,
    drain_timeout_s: float = 10.0,
    idle_timeout_s: float = IDLE_S,
    task_status: trio.TaskStatus[Sequence[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI app until cancelled, or until `shutdown` is set and its requests are done.

    `task_status.started` gets the bound addresses. After `shutdown` no connection is accepted, idle ones are closed,
    and running requests may finish within `drain_timeout_s` seconds; then they are cancelled.
    """
    context = ServerContext()
    config = GatewayConfig()
    config.keep_alive_timeout = idle_timeout_s

    async def serve_stream(stream: trio.SocketStream) -> None:
        try:
            with trio.CancelScope(deadline=trio.current_time() + idle_timeout_s) as scope:
                waiting.add(scope)
                try:
                    http2 = await _begins_http2(stream)
                finally:
                    waiting.discard(scope)
                scope.deadline = math.inf
                if not http2:
                    await GatewayConnection(app, config, context, stream).run()
                elif http2_handler is not None:
                    await http2_handler(stream)
                else:
                    _log.warning("HTTP/2 is not served here (gRPC is not built yet); connection closed")
                    await stream.receive_some(1 << 16)  # closing over unread bytes would reset the connection
        except OSError as error:
            _log.debug("connection failed", extra={"fields": {"err": str(error)}})
        except Exception:  # a bug in serving one connection must not end the others
            _log.exception("unhandled error, connection closed")
        finally:
            await trio.aclose_forcefully(stream)

    waiting: set[trio.CancelScope] = set()  # connections that have not sent a byte yet
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(_accept, serve_stream, listeners, connections)
            task_status.started([_address(listener) for listener in listeners])
            if shutdown is None:
                await trio.sleep_forever()
            else:
                await shutdown.wait()
            accepting.cancel_scope.cancel()
        for scope in list(waiting):
            scope.cancel()
        context.drain()
        connections.cancel_scope.deadline = trio.current_time() + drain_timeout_s


async def _accept(
    serve_stream: Callable[[trio.SocketStream], Awaitable[None]],
    listeners: Sequence[trio.SocketListener],
    connections: trio.Nursery,
) -> None:
    await trio.serve_listeners(serve_stream, list(listeners), handler_nursery=connections)


def _address(listener: trio.SocketListener) -> tuple[str, int]:
    name = listener.socket.getsockname()
    return name[0], name[1]


async def _begins_http2(stream: trio.SocketStream) -> bool:
    """Whether the first bytes, which stay in the socket, are those of an HTTP/2 client."""
    pause_s = 0.001
    while True:
        head = await stream.socket.recv(len(HTTP2_PREFACE), socket.MSG_PEEK)
        if head == HTTP2_PREFACE:
            return True
        if not head or not HTTP2_PREFACE.startswith(head):
            return False
        # Fewer bytes than tell ("P" may become PUT). The socket stays readable, so there is nothing to wait on.
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
        if len(await stream.socket.recv(len(HTTP2_PREFACE), socket.MSG_PEEK)) == len(head) and pause_s == 0.05:
            return False  # a client that stops in the middle of its first word gets HTTP/1.1's answer

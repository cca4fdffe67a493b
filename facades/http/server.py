"""`serve_http`: a journal service on a port."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from broadsheet.engine.service import JournalService
from broadsheet.facades.http.app import ReadyProblem, make_app
from broadsheet.facades.http.listener import Http2Handler, open_listeners, serve_asgi

__all__ = ["serve_http"]


async def serve_http(
    service: JournalService,
    *,
    listeners: Sequence[trio.SocketListener] | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    ready_problem: ReadyProblem = lambda: None,
    allow_origins: Sequence[str] = (),
    http2_handler: Http2Handler | None = None,
    shutdown: trio.Event | None = None,
    drain_timeout_s: float = 10.0,
    task_status: trio.TaskStatus[Sequence[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the gateways of spec/http-gateway.md until cancelled, or until `shutdown` is set and requests are done.

    `listeners` are opened already (`open_listeners`), or `host` and `port` (0: any free one) are. `task_status`
    gets their addresses. `ready_problem` answers `/debug/ready`: None, or why not. `http2_handler` takes the
    connections that begin as HTTP/2. After `shutdown` no connection is accepted, and running requests have
    `drain_timeout_s` seconds; it is for the caller to end blocked reads, by closing or draining the service.
    Raises OSError if the port cannot be had.
    """
    if listeners is None:
        listeners = await open_listeners(host, port)
    app = make_app(service, ready_problem=ready_problem, allow_origins=allow_origins)
    await serve_asgi(
        app,
        listeners,
        http2_handler=http2_handler,
        shutdown=shutdown,
        drain_timeout_s=drain_timeout_s,
        task_status=task_status,
    )

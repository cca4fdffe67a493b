"""The whole of what one port serves over HTTP/1.x, as one ASGI app (spec/http-gateway.md, first paragraph)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from broadsheet.engine.service import JournalService
from broadsheet.facades.http.asgi import ASGIApp, Receive, Scope, Send
from broadsheet.facades.http.journal_gateway import JournalGateway
from broadsheet.facades.http.json_gateway import JsonGateway

__all__ = ["ReadyProblem", "make_app"]

ReadyProblem = Callable[[], str | None]
"""Why a process cannot do its work, for people; None while it can."""


def make_app(
    service: JournalService,
    *,
    ready_problem: ReadyProblem = lambda: None,
    allow_origins: Sequence[str] = (),
) -> ASGIApp:
    """`/v1/` is the JSON gateway, `/debug/` diagnostics, and every other path a journal.

    `allow_origins` are the CORS origins of `/v1/`.
    """
    journals = JournalGateway(service)

    async def ready(request: Request) -> Response:
        problem = ready_problem()
        return Response() if problem is None else PlainTextResponse(problem + "\n", 503)

    async def missing(request: Request) -> Response:
        return PlainTextResponse("404 page not found\n", 404)

    routed = Starlette(
        routes=[
            Route("/debug/ready", ready, methods=["GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE"]),
            Route("/debug/{rest:path}", missing),
            *JsonGateway(service, allow_origins=allow_origins).routes(),
        ]
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        # Journals go past Starlette: its request objects and routing cost more than an append.
        if path.startswith(("/v1/", "/debug/")) and "//" not in path and "/." not in path:
            await routed(scope, receive, send)
        else:
            await journals(scope, receive, send)

    return app

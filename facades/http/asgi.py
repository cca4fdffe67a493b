"""The few words of ASGI that the gateway and its server share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

import trio

__all__ = [
    "ASGIApp",
    "ClientGone",
    "Headers",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "send_response",
    "send_text",
    "until_disconnect",
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]


class ClientGone(ConnectionError):
    """Raised by ASGI `send` when the connection is closed or reset. There is nobody left to tell."""


async def send_response(send: Send, status: int, headers: Headers, body: bytes = b"") -> None:
    """A whole response at once."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_text(send: Send, status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A plain text response, as Go's `http.Error` words it: the text and a newline."""
    body = text.encode("utf-8") + b"\n"
    await send_response(
        send,
        status,
        [
            (b"Content-Type", b"text/plain; charset=utf-8"),
            *headers,
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Content-Length", b"%d" % len(body)),
        ],
        body,
    )


async def until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work`, whose request body is read, and cancel it when the client goes away or half-closes.

    Returns whether it was cancelled so. What `work` raises is raised.
    """
    failure: Exception | None = None
    done = False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            await work()
            done = True
        except Exception as error:  # carried past the nursery, which would wrap it in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return not done

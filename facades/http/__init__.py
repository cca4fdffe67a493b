"""Journals over HTTP/1.x: the journal gateway, the JSON gateway, and the server they run on.

Names are imported on first use: a client of the JSON forms needs no web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broadsheet.facades.http.app import make_app
    from broadsheet.facades.http.listener import open_listeners, serve_asgi
    from broadsheet.facades.http.server import serve_http

__all__ = ["make_app", "open_listeners", "serve_asgi", "serve_http"]

_HOMES = {
    "make_app": "broadsheet.facades.http.app",
    "open_listeners": "broadsheet.facades.http.listener",
    "serve_asgi": "broadsheet.facades.http.listener",
    "serve_http": "broadsheet.facades.http.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Response headers of journal reads and appends (spec/http-gateway.md §3), in the order Go writes them: by name."""

from __future__ import annotations

from email.utils import formatdate

from broadsheet.engine.service import AppendResponse, Header, ReadResponse, Route
from broadsheet.facades.http.asgi import Headers

__all__ = ["HeaderWriter", "route_token", "trailer_value"]

_END = b"-9223372036854775807/9223372036854775807"
_CONTROLS = dict.fromkeys((*range(32), 127), " ")


class HeaderWriter:
    """Builds header lists. Remembers the texts of the latest route, which few journals of an engine differ in."""

    __slots__ = ("_location", "_route", "_token")

    def __init__(self) -> None:
        self._route: Route | None = None
        self._token = b""
        self._location = b""

    def of_read(self, response: ReadResponse, raw_path: bytes, *, trailer: bool) -> Headers:
        """Headers of a read that goes on. `raw_path` is the request's path as it came."""
        headers: Headers = []
        fragment = response.fragment
        if fragment is not None:
            headers.append((b"Content-Range", b"bytes %d%s" % (response.offset, _END)))
        self._add_location(headers, response.header, raw_path)
        if trailer:
            headers.append((b"Trailer", b"X-Close-Error"))
        if fragment is not None:
            if fragment.mod_time:
                modified = formatdate(fragment.mod_time, usegmt=True)
                headers.append((b"X-Fragment-Last-Modified", modified.encode("ascii")))
                if response.fragment_url:
                    headers.append((b"X-Fragment-Location", response.fragment_url.encode("utf-8")))
            headers.append((b"X-Fragment-Name", fragment.content_name.encode("ascii")))
        self._add_token(headers, response.header)
        if response.write_head:
            headers.append((b"X-Write-Head", b"%d" % response.write_head))
        return headers

    def of_refused_read(self, response: ReadResponse, raw_path: bytes) -> Headers:
        """Headers of a read whose first response is not OK."""
        headers: Headers = []
        self._add_location(headers, response.header, raw_path)
        self._add_token(headers, response.header)
        if response.write_head:
            headers.append((b"X-Write-Head", b"%d" % response.write_head))
        return headers

    def of_append(self, response: AppendResponse, raw_path: bytes) -> Headers:
        """Headers of an append that is committed."""
        headers: Headers = []
        self._add_location(headers, response.header, raw_path)
        commit = response.commit
        if commit is not None:
            end = b"%d" % commit.end
            headers.append((b"X-Commit-Begin", b"%d" % commit.begin))
            headers.append((b"X-Commit-End", end))
            headers.append((b"X-Commit-Sha1-Sum", commit.sum.hex().encode("ascii")))
            self._add_token(headers, response.header)
            headers.append((b"X-Write-Head", end))
        return headers

    def _add_location(self, headers: Headers, header: Header | None, raw_path: bytes) -> None:
        if header is not None and header.route.members:
            self._remember(header.route)
            if self._location:
                headers.append((b"Location", self._location + raw_path))

    def _add_token(self, headers: Headers, header: Header | None) -> None:
        if header is not None and header.route.members:
            self._remember(header.route)
            headers.append((b"X-Route-Token", self._token))

    def _remember(self, route: Route) -> None:
        if route is self._route:
            return
        self._route = route
        self._token = route_token(route).encode("ascii")
        endpoint = ""
        if 0 <= route.primary < len(route.endpoints):
            endpoint = route.endpoints[route.primary]
        self._location = endpoint.rstrip("/").encode("utf-8")


def route_token(route: Route) -> str:
    """Protobuf compact text of a Route: fields in number order, zero values left out."""
    parts = []
    for member in route.members:
        inner = ""
        if member.zone:
            inner += f"zone:{_quote(member.zone)} "
        if member.suffix:
            inner += f"suffix:{_quote(member.suffix)} "
        parts.append(f"members:<{inner}>")
    if route.primary:
        parts.append(f"primary:{route.primary}")
    parts.extend(f"endpoints:{_quote(endpoint)}" for endpoint in route.endpoints)
    return " ".join(parts)


def trailer_value(text: str) -> bytes:
    """A text as a header value: on one line, UTF-8."""
    return text.translate(_CONTROLS).strip().encode("utf-8")


def _quote(text: str) -> str:
    out = []
    for byte in text.encode("utf-8"):
        char = chr(byte)
        if char in '"\\':
            out.append("\\" + char)
        elif 0x20 <= byte < 0x7F:
            out.append(char)
        else:
            out.append(_ESCAPES.get(char, f"\\{byte:03o}"))
    return '"' + "".join(out) + '"'


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

"""The routes below `/v1/` of a broker, for the commands: blocking, on the standard library's HTTP client, which is
imported in a tenth of the time that httpx takes. (A start of `broadsheet journals list` is mostly imports.)

Failures come as `BrokerFailed`, whose text is that of the broker, or says that there is none.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlencode, urlsplit

from broadsheet.facades.http.json_codec import Json

__all__ = ["Broker", "BrokerFailed"]

CONNECT_TIMEOUT_S = 10.0


class BrokerFailed(Exception):
    """A call failed. `status` is the name of the response's status, "" if there was no response."""

    def __init__(self, text: str, status: str = "", hint: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.hint = hint


class Broker:
    """A broker by its URL. Each call has a connection of its own, so calls may be made from several threads."""

    def __init__(self, address: str) -> None:
        try:
            url = urlsplit(address)
            self._port = url.port
        except ValueError as error:
            raise BrokerFailed(f"{address}: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise BrokerFailed(f"{address}: expected an address like http://localhost:8080")
        self._address = address
        self._host = url.hostname
        self._class = HTTPSConnection if url.scheme == "https" else HTTPConnection
        self._path = url.path.rstrip("/")

    def list(self, selector: Json) -> Json:
        """All selected journals as one ListResponse, in camelCase JSON."""
        whole: Json = {}
        for message in self._stream("list", {"selector": selector}):
            if whole:
                whole["journals"].extend(message["journals"])
            else:
                whole = message
        return whole

    def read(self, request: Json) -> Iterator[Json]:
        """The ReadResponses of a ReadRequest."""
        return self._stream("read", request)

    def apply(self, request: Json) -> Json:
        return self._call("apply", json.dumps(request).encode())

    def fragments(self, request: Json) -> Json:
        return self._call("fragments", json.dumps(request).encode())

    def append(self, journal: str, content: Iterable[bytes] | bytes) -> Json:
        return self._call("append?" + urlencode({"journal": journal}), content)

    def _call(self, route: str, body: Iterable[bytes] | bytes) -> Json:
        with self._post(route, body) as response:
            value = _decode(response.read(), response.status)
        if response.status == 200:
            return value
        if "status" in value:
            hint = "changed meanwhile: " + ", ".join(value["conflicts"]) if value.get("conflicts") else ""
            raise BrokerFailed(value.get("storeHealthError") or value["status"], value["status"], hint)
        raise BrokerFailed(_problem(value, response.status))

    def _stream(self, route: str, request: Json) -> Iterator[Json]:
        with self._post(route, json.dumps(request).encode()) as response:
            while line := response.readline():
                value = _decode(line, response.status)
                if "result" not in value:
                    raise BrokerFailed(_problem(value.get("error", value), response.status))
                result: Json = value["result"]
                yield result

    @contextmanager
    def _post(self, route: str, body: Iterable[bytes] | bytes) -> Iterator[HTTPResponse]:
        connection = self._class(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            try:
                connection.connect()
            except OSError as error:
                reason = error.strerror or str(error)
                hint = "is `broadsheet serve` running there?"
                raise BrokerFailed(f"cannot reach {self._address}: {reason}", hint=hint) from None
            connection.sock.settimeout(None)  # a blocked read waits for ever
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target = f"{self._path}/v1/journals/{route}"
            if isinstance(body, bytes):
                connection.request("POST", target, body)
            else:
                _send_in_chunks(connection, target, body)
            yield connection.getresponse()
        except (HTTPException, ConnectionError) as error:
            raise BrokerFailed(f"{self._address}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _send_in_chunks(connection: HTTPConnection, target: str, body: Iterable[bytes]) -> None:
    """Send a body of unknown length. A broker that answers early stops listening; its answer tells why."""
    connection.putrequest("POST", target)
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for part in body:
        try:
            connection.send(b"%x\r\n%b\r\n" % (len(part), part))
        except ConnectionError:
            return
    connection.send(b"0\r\n\r\n")


def _decode(text: bytes, status: int) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BrokerFailed(f"the answer ({status}) is not JSON; is it a broker?")
    return value


def _problem(value: Json, status: int) -> str:
    return str(value.get("message") or f"the broker answered {status}")

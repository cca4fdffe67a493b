"""What is on the wire, byte for byte, and what happens to connections that end badly.

These tests pin the behaviour that `facades/http/hypercorn_h11.py` adds to hypercorn."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio

from broadsheet.engine.errors import Status
from broadsheet.engine.service import ReadResponse
from broadsheet.facades.http import open_listeners, serve_asgi
from broadsheet.facades.http.hypercorn_h11 import RECEIVE_BYTES

MIB = 1 << 20


def test_hypercorn_is_the_version_that_was_overridden() -> None:
    assert version("hypercorn").startswith("0.18."), "read facades/http/hypercorn_h11.py against the new version"


async def test_trailer_bytes(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello"
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?offset=2", headers="Connection: close\r\n")
    raw = await client.rest()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == b"3\r\nllo\r\n0\r\nX-Close-Error: OFFSET_NOT_YET_AVAILABLE\r\n\r\n"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 206 Partial Content"
    assert re.fullmatch(rb"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", lines[-3])
    assert lines[-2:] == [b"Transfer-Encoding: chunked", b"Connection: close"]
    assert b"server" not in head.lower()


async def test_http_1_0_body_ends_with_the_connection(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello\r\n0\r\n\r\n"
    client = await server.connect()
    await client.send(b"GET /ex/aaaa HTTP/1.0\r\n\r\n")
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert body == b"hello\r\n0\r\n\r\n"
    assert head.startswith(b"HTTP/1.1 206 Partial Content\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Trailer" not in head
    assert b"Connection: close" in head


async def test_http_1_0_put(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send(b"PUT /ex/aaaa HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello")
    assert (await client.rest()).startswith(b"HTTP/1.1 204 No Content\r\n")
    assert fake.journals["ex/aaaa"].data == b"hello"


async def test_connection_is_used_on_after_trailers_heads_and_errors(server: Any, fake: Any) -> None:
    client = await server.connect()
    fake.journals["ex/aaaa"].data += b"hello"
    for _ in range(3):
        assert (await client.request("GET", "/ex/aaaa")).trailers
        assert (await client.request("HEAD", "/ex/aaaa")).status == 206
        assert (await client.request("HEAD", "/ex/none")).status == 404
        assert (await client.request("GET", "/ex/none")).status == 404
        assert (await client.request("PUT", "/ex/aaaa", b"x" * 100_000)).status == 204
        assert (await client.request("BREW", "/ex/aaaa", b"coffee")).status == 400
        assert (await client.request("POST", "/v1/journals/list", b"{}")).status == 200
        assert (await client.request("GET", "/debug/ready")).status == 200


async def test_many_requests_on_one_connection(server: Any, fake: Any) -> None:
    """hypercorn alone closes after 1000."""
    client = await server.connect()
    for _ in range(2300):
        assert (await client.request("PUT", "/ex/aaaa", b"x")).status == 204
    assert len(fake.journals["ex/aaaa"].data) == 2300


async def test_pipelined_requests(server: Any, fake: Any) -> None:
    client = await server.connect()
    one = b"PUT /ex/aaaa HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab\n"
    await client.send(one * 50 + b"GET /ex/aaaa HTTP/1.1\r\nHost: x\r\n\r\n")
    for number in range(50):
        reply = await client.reply("PUT")
        assert (reply.status, reply.headers["X-Commit-Begin"]) == (204, str(3 * number))
    assert (await client.reply()).body == b"ab\n" * 50


async def test_request_byte_by_byte(server: Any, fake: Any) -> None:
    client = await server.connect()
    for byte in b"PUT /ex/aaaa HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n":
        await client.send(bytes([byte]))
        await trio.lowlevel.checkpoint()
    assert (await client.reply()).status == 204
    assert fake.journals["ex/aaaa"].data == b"ab"


# --- Expect ---


async def test_expect_continue(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send(b"PUT /ex/aaaa HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(b"hello")
    assert (await client.reply()).status == 204
    assert fake.journals["ex/aaaa"].data == b"hello"


async def test_refusal_comes_before_the_body(server: Any) -> None:
    client = await server.connect()
    await client.send(b"PUT /ex/none HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    reply = await client.reply()
    assert reply.status == 404
    await client.rest()  # closed: nobody knows whether the body still comes


async def test_early_answer_reaches_a_client_that_keeps_sending(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].status = Status.NOT_ALLOWED
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", None, f"Content-Length: {64 * MIB}\r\n")

    async def keep_sending() -> None:
        try:
            for _ in range(64):
                await client.stream.send_all(bytes(MIB))
        except trio.BrokenResourceError:
            pass  # the server has stopped listening, which it may

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_sending)
        reply = await client.reply()
        assert (reply.status, reply.body) == (500, b"NOT_ALLOWED\n")
        nursery.cancel_scope.cancel()
    await client.stream.aclose()


# --- Bodies cut short ---


@pytest.mark.parametrize("framing", ["Content-Length: 1000\r\n", "Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("end", ["half-close", "close", "reset"])
async def test_truncated_put_is_rolled_back(server: Any, fake: Any, framing: str, end: str) -> None:
    await server.request("PUT", "/ex/aaaa", b"before")
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", None, framing)
    await client.send(b"a\r\n0123456789\r\n" if "chunked" in framing else b"0123456789")
    await fake.until(lambda: fake.received_bytes >= 10)
    if end == "half-close":
        await client.stream.send_eof()
        reply = await client.reply()
        assert (reply.status, reply.body) == (400, b"unexpected EOF\n")
    elif end == "close":
        await client.stream.aclose()
    else:
        client.reset()
    reply = await server.request("PUT", "/ex/aaaa", b"after")  # waits for the journal, so for the rollback
    assert reply.headers["X-Commit-Begin"] == "6"
    assert fake.journals["ex/aaaa"].data == b"beforeafter"


async def test_broken_chunk_is_rolled_back(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", None, "Transfer-Encoding: chunked\r\n")
    await client.send(b"2\r\nab\r\nzz\r\n")
    assert (await client.reply()).status == 400
    await client.rest()
    assert fake.journals["ex/aaaa"].data == b""


async def test_whole_put_with_half_close_is_committed(server: Any, fake: Any) -> None:
    """What `nc -N` sends."""
    fake.gate = trio.Event()
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", b"hello")
    await client.stream.send_eof()
    await fake.until(lambda: fake.receiving == 1)
    fake.gate.set()
    assert (await client.reply()).status == 204
    assert await client.rest() == b""


# --- Readers that go ---


@pytest.mark.parametrize("query", ["?block=true", ""])
async def test_half_closed_reader_gets_408(server: Any, fake: Any, query: str) -> None:
    if not query:
        fake.journals["ex/aaaa"].script = []  # replaced below by a read that never answers
        fake.read = fake_read_never(fake)
    client = await server.connect()
    await client.send_request("GET", f"/ex/aaaa{query}")
    await client.stream.send_eof()
    reply = await client.reply()
    assert reply.status_line == "HTTP/1.1 408 Request Timeout"
    assert reply.body == b"context canceled\n"
    await fake.until(lambda: fake.reading == 0)
    assert await client.rest() == b""


def fake_read_never(fake: Any) -> Any:
    @asynccontextmanager
    async def read(request: Any, scope: Any = None) -> Any:
        async def responses() -> Any:
            await trio.sleep_forever()
            yield None

        yield responses()

    return read


async def test_half_closed_reader_that_does_not_block_gets_a_whole_answer(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += bytes(3 * MIB)
    for _ in range(20):
        client = await server.connect()
        await client.send_request("GET", "/ex/aaaa")
        await client.stream.send_eof()
        reply = await client.reply()
        assert reply.complete
        assert reply.status in (206, 408)
        if reply.status == 206:
            assert len(reply.body) == 3 * MIB
            assert reply.trailers == {"X-Close-Error": "OFFSET_NOT_YET_AVAILABLE"}
        assert await client.rest() == b""


async def test_half_closed_while_streaming(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"abc"
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    reply = await client.head()
    assert await client.chunk(reply) == b"abc"
    await client.stream.send_eof()
    assert await client.chunk(reply) == b""
    assert reply.trailers == {"X-Close-Error": "rpc error: code = Canceled desc = context canceled"}


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("content", [b"", b"abc"])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_disconnect_cancels_a_blocked_read(
    server: Any, fake: Any, end: str, content: bytes, pipelined: bool
) -> None:
    fake.journals["ex/aaaa"].data += content
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    if pipelined:
        await client.send_request("GET", "/ex/aaaa")
    await fake.until(lambda: fake.reading == 1)
    if end == "close":
        await client.stream.aclose()
    else:
        client.reset()
    with trio.fail_after(10):
        await fake.until(lambda: fake.reading == 0)


async def test_stalled_reader_holds_little_and_ends_with_its_connection(server: Any, fake: Any) -> None:
    taken = 0

    class Endless(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            nonlocal taken
            yield ReadResponse(Status.OK, None, 0, 1 << 40)
            block = bytes(MIB)
            while True:
                taken += 1
                yield ReadResponse(offset=(taken - 1) * MIB, content=block)

    fake.journals["ex/aaaa"].script = Endless()
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa")
    await client.head()
    await fake.until(lambda: fake.reading == 1)
    with trio.fail_after(10):  # until the socket buffers are full, and nothing moves any more
        before = -1
        while before != taken:
            before = taken
            await trio.sleep(0.1)
    assert taken < 64
    await server.request("PUT", "/ex/aaaa", b"others are served")
    client.reset()
    with trio.fail_after(10):
        await fake.until(lambda: fake.reading == 0)


async def test_stalled_uploader_hinders_no_one_else(server: Any, fake: Any) -> None:
    fake.make("ex/bbbb")
    client = await server.connect()
    await client.send_request("PUT", "/ex/bbbb", None, "Content-Length: 1000\r\n")
    await client.send(b"x")
    await fake.until(lambda: fake.received_bytes == 1)
    assert (await server.request("PUT", "/ex/aaaa", b"y")).status == 204
    client.reset()


async def test_upload_is_held_back_by_a_slow_service(server: Any, fake: Any) -> None:
    """The server buffers a few messages, not the body."""
    await fake.journals["ex/aaaa"].lock.acquire()
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", None, f"Content-Length: {64 * MIB}\r\n")
    sent = 0
    with trio.move_on_after(10) as scope:
        while sent < 64:
            scope.deadline = trio.current_time() + 1
            await client.stream.send_all(bytes(MIB))
            sent += 1
    assert sent * MIB < 4 * RECEIVE_BYTES + 32 * MIB
    client.reset()


# --- Bad requests ---


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"bogus\r\n\r\n", 400),
        (b"GET /ex/aaaa HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /ex/aaaa HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /ex/a\x00aaa HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /ex/\xc3\xa9aaa HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /ex/aaaa HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"PUT /ex/aaaa HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"PUT /ex/aaaa HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"PUT /ex/aaaa HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS on a plain port
    ],
)
async def test_bad_requests(server: Any, fake: Any, data: bytes, status: int) -> None:
    client = await server.connect()
    await client.send(data)
    reply = await client.reply()
    assert reply.status == status
    assert reply.status_line.split(" ", 2)[2]
    assert await client.rest() == b""
    assert (await server.request("PUT", "/ex/aaaa", b"x")).status == 204


async def test_websocket_and_h2c_upgrades_are_ignored(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"abc"
    for upgrade in ("websocket", "h2c"):
        headers = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        assert (await server.request("GET", "/ex/aaaa", headers=headers)).body == b"abc"


async def test_silent_and_empty_connections(server: Any) -> None:
    for _ in range(3):
        client = await server.connect()
        await client.stream.aclose()
    assert (await server.request("GET", "/debug/ready")).status == 200


# --- HTTP/2 ---

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def test_http2_is_closed_politely_without_a_handler(server: Any, caplog: Any) -> None:
    client = await server.connect()
    await client.send(PREFACE)
    assert await client.rest() == b""
    assert "HTTP/2 is not served here" in caplog.text


@pytest.mark.parametrize("split", [1, 3, 13, 24])
async def test_http2_is_handed_on_with_all_its_bytes(serve: Any, fake: Any, split: int) -> None:
    async def handler(stream: trio.SocketStream) -> None:
        received = b""
        while len(received) < len(PREFACE):
            received += await stream.receive_some(100)
        await stream.send_all(b"got " + received)

    async with serve(fake, http2_handler=handler) as server:
        client = await server.connect()
        await client.send(PREFACE[:split])
        await trio.sleep(0.01)  # the first bytes arrive alone
        await client.send(PREFACE[split:])
        assert await client.rest() == b"got " + PREFACE


# --- Apps that fail ---


async def _failing_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/before":
        raise ValueError("before")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    raise ValueError("after")


async def test_app_that_raises(caplog: Any) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await open_listeners("127.0.0.1", 0)
        nursery.start_soon(serve_asgi, _failing_app, listeners)
        port = listeners[0].socket.getsockname()[1]
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET /before HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"500 Internal Server Error" in await _read_all(stream)
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET /after HTTP/1.1\r\nHost: x\r\n\r\n")
        body = await _read_all(stream)
        assert body.endswith(b"4\r\nsome\r\n")  # no last chunk: the client sees that it is cut
        nursery.cancel_scope.cancel()
    assert caplog.text.count("unhandled error") == 2


async def _read_all(stream: trio.SocketStream) -> bytes:
    data = b""
    with trio.fail_after(10):
        while part := await stream.receive_some(1 << 16):
            data += part
    return data


# --- The end of the server ---


async def test_shutdown_finishes_requests_and_closes_idle_connections(serve: Any, fake: Any) -> None:
    fake.make("ex/aaaa")
    fake.gate = trio.Event()
    async with serve(fake) as server:
        idle, fresh, busy, reader = [await server.connect() for _ in range(4)]
        assert (await idle.request("GET", "/debug/ready")).status == 200
        await busy.send_request("PUT", "/ex/aaaa", b"hello")
        await reader.send_request("GET", "/ex/aaaa?block=true")
        await fake.until(lambda: fake.receiving == 1 and fake.reading == 1)
        server.shutdown.set()
        assert await idle.rest() == b""
        assert await fresh.rest() == b""
        with pytest.raises(OSError):
            await trio.open_tcp_stream("127.0.0.1", server.port)
        await fake.drain()
        fake.gate.set()
        reply = await busy.reply()
        assert (reply.status, reply.headers["Connection"]) == (204, "close")
        assert await busy.rest() == b""
        assert (await reader.reply()).body == b"broker terminated RPC\n"
        with trio.fail_after(5):
            await server.stopped.wait()


async def test_shutdown_is_bounded(serve: Any, fake: Any) -> None:
    fake.make("ex/aaaa")
    fake.gate = trio.Event()  # never set
    async with serve(fake, drain_timeout_s=0.1) as server:
        busy = await server.connect()
        await busy.send_request("PUT", "/ex/aaaa", b"hello")
        await fake.until(lambda: fake.receiving == 1)
        server.shutdown.set()
        assert await busy.rest() == b""
        with trio.fail_after(5):
            await server.stopped.wait()
    assert fake.journals["ex/aaaa"].data == b""


async def test_idle_connections_time_out(fake: Any) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await open_listeners("127.0.0.1", 0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async def run() -> None:
            await serve_asgi(app, listeners, idle_timeout_s=0.2)

        nursery.start_soon(run)
        port = listeners[0].socket.getsockname()[1]
        silent = await trio.open_tcp_stream("127.0.0.1", port)
        slow = await trio.open_tcp_stream("127.0.0.1", port)
        await slow.send_all(b"GET / HTTP/1.1\r\nHost: ")
        used = await trio.open_tcp_stream("127.0.0.1", port)
        await used.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for stream in (silent, slow):
            assert await _read_all(stream) == b""
        assert (await _read_all(used)).startswith(b"HTTP/1.1 204 No Content")
        nursery.cancel_scope.cancel()


# --- curl ---

CURL = shutil.which("curl")


@pytest.mark.skipif(CURL is None, reason="curl is not installed; the raw-socket tests above see the same bytes")
async def test_curl(server: Any, fake: Any, tmp_path: Path) -> None:
    async def curl(*arguments: str) -> str:
        assert CURL is not None
        done = await trio.run_process(
            [CURL, "-sS", "--max-time", "20", *arguments], capture_stdout=True, stderr=subprocess.STDOUT
        )
        return bytes(done.stdout).decode()

    url = f"{server.url}/ex/aaaa"
    assert await curl("-X", "PUT", "--data-binary", "hello world", "-w", "%{http_code}", url) == "204"
    big = tmp_path / "big"
    big.write_bytes(b"0123456789abcdef" * (MIB // 4))
    assert await curl("-T", str(big), "-w", "%{http_code}", url) == "204"  # sends Expect: 100-continue
    assert fake.journals["ex/aaaa"].data == b"hello world" + big.read_bytes()
    text = await curl("-i", f"{url}?offset=0")
    assert text.startswith("HTTP/1.1 206 Partial Content\r\n")
    assert "hello world0123" in text
    fake.journals["ex/aaaa"].data[11:] = b""
    text = await curl("-i", "--raw", f"{url}?offset=5")
    assert text.endswith("6\r\n world\r\n0\r\nX-Close-Error: OFFSET_NOT_YET_AVAILABLE\r\n\r\n")
    assert (await curl("-I", url)).startswith("HTTP/1.1 206 Partial Content\r\n")
    assert await curl("-0", url) == "hello world"
    assert "416 Requested Range Not Satisfiable" in await curl("-i", f"{url}?offset=11")
    assert await curl("-T", str(big), "-w", "%{http_code}", f"{server.url}/ex/none") == "JOURNAL_NOT_FOUND\n404"
    assert await curl("-o", str(tmp_path / "a"), "-w", "%{http_code}", "-L", f"{server.url}/ex//aaaa") == "206"

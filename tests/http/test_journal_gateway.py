"""Reads and appends over HTTP against spec/http-gateway.md §1 to §5."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from broadsheet.engine.errors import (
    AppendFailed,
    CorruptData,
    EngineClosed,
    EngineWritesFailed,
    NotAuthorized,
    OutcomeUnknown,
    SlowAppend,
    Status,
    StorageError,
)
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.service import AppendResponse, ReadResponse

TOKEN = 'members:<zone:"local" suffix:"decent-bluebird" > endpoints:"http://127.0.0.1:9103"'
ERROR_HEADERS = ["Content-Type: text/plain; charset=utf-8", "X-Content-Type-Options: nosniff"]
SLOW = "append stream: client stream didn't sustain the minimum append data rate"


# --- The transcripts of §8, line by line ---


async def test_put(server: Any) -> None:
    reply = await server.request("PUT", "/ex/aaaa", b"hello world")
    assert reply.status_line == "HTTP/1.1 204 No Content"
    assert reply.header_lines == [
        "Location: http://127.0.0.1:9103/ex/aaaa",
        "X-Commit-Begin: 0",
        "X-Commit-End: 11",
        "X-Commit-Sha1-Sum: 2aae6c35c94fcfb415dbe95f408b9ce91ee846ed",
        f"X-Route-Token: {TOKEN}",
        "X-Write-Head: 11",
    ]


async def test_get_from_offset(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello world"
    reply = await server.request("GET", "/ex/aaaa?offset=5")
    assert reply.status_line == "HTTP/1.1 206 Partial Content"
    assert reply.header_lines == [
        "Content-Range: bytes 5-9223372036854775807/9223372036854775807",
        "Location: http://127.0.0.1:9103/ex/aaaa",
        "Trailer: X-Close-Error",
        "X-Fragment-Name: 0000000000000000-000000000000000b-2aae6c35c94fcfb415dbe95f408b9ce91ee846ed.sz",
        f"X-Route-Token: {TOKEN}",
        "X-Write-Head: 11",
        "Content-Type: text/plain; charset=utf-8",
        "Transfer-Encoding: chunked",
    ]
    assert reply.body == b" world"
    assert reply.trailers == {"X-Close-Error": "OFFSET_NOT_YET_AVAILABLE"}


async def test_head_of_a_persisted_fragment(server: Any, fake: Any) -> None:
    digest = bytes.fromhex("979461e4e48f90742115836702a1c33cf5efa6ef")
    fragment = Fragment("ex/aaaa", 0, 0x17165, digest, CompressionCodec.NONE, "file:///", 1795230714)
    url = f"file:///ex/aaaa/date=2026-11-21/hour=03/{fragment.content_name}"
    fake.journals["ex/aaaa"].script = [ReadResponse(Status.OK, None, 0, 283695, fragment, url)]
    reply = await server.request("HEAD", "/ex/aaaa")
    assert reply.status_line == "HTTP/1.1 206 Partial Content"
    assert reply.header_lines == [
        "Content-Range: bytes 0-9223372036854775807/9223372036854775807",
        "Location: http://127.0.0.1:9103/ex/aaaa",
        "X-Fragment-Last-Modified: Sat, 21 Nov 2026 03:11:54 GMT",
        f"X-Fragment-Location: {url}",
        f"X-Fragment-Name: {fragment.content_name}",
        f"X-Route-Token: {TOKEN}",
        "X-Write-Head: 283695",
    ]


@pytest.mark.parametrize("target", ["/ex/aaaa?offset=11", "/ex/aaaa?offset=-1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_offset_not_yet_available(server: Any, fake: Any, method: str, target: str) -> None:
    fake.journals["ex/aaaa"].data += b"hello world"
    reply = await server.request(method, target)
    assert reply.status_line == "HTTP/1.1 416 Requested Range Not Satisfiable"
    assert reply.header_lines == [
        "Content-Type: text/plain; charset=utf-8",
        "Location: http://127.0.0.1:9103/ex/aaaa",
        f"X-Route-Token: {TOKEN}",
        "X-Write-Head: 11",
        "X-Content-Type-Options: nosniff",
        "Content-Length: 25",
    ]
    assert reply.body == (b"OFFSET_NOT_YET_AVAILABLE\n" if method == "GET" else b"")


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
async def test_missing_journal(server: Any, method: str) -> None:
    reply = await server.request(method, "/ex/missing", b"x" if method == "PUT" else None)
    assert reply.status_line == "HTTP/1.1 404 Not Found"  # a PUT too: design.md §10
    assert reply.header_lines == [*ERROR_HEADERS, "Content-Length: 18"]
    assert reply.body == (b"" if method == "HEAD" else b"JOURNAL_NOT_FOUND\n")


@pytest.mark.parametrize("status", [Status.NOT_ALLOWED, Status.SUSPENDED])
async def test_refused_read_tells_the_route(server: Any, fake: Any, status: Status) -> None:
    fake.journals["ex/aaaa"].status = status
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.status_line == "HTTP/1.1 500 Internal Server Error"
    assert "Location: http://127.0.0.1:9103/ex/aaaa" in reply.header_lines
    assert f"X-Route-Token: {TOKEN}" in reply.header_lines
    assert reply.body == status.name.encode() + b"\n"


async def test_no_brokers(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].status = Status.INSUFFICIENT_JOURNAL_BROKERS
    fake.journals["ex/aaaa"].routed = False
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.status_line == "HTTP/1.1 503 Service Unavailable"
    assert reply.header_lines == [*ERROR_HEADERS, "Content-Length: 29"]


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS", "PATCH", "BREW"])
async def test_unknown_method(server: Any, method: str) -> None:
    reply = await server.request(method, "/ex/aaaa", b"x")
    assert reply.status_line == "HTTP/1.1 400 Bad Request"
    assert reply.header_lines[:2] == ERROR_HEADERS
    assert reply.body == f"unknown method: {method}\n".encode()


# --- Parameters ---


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("/ex/aaaa?bogus=1", 'schema: invalid path "bogus"'),
        ("/ex/aaaa?bogus=1&offset=x", 'schema: invalid path "bogus" (and 1 other error)'),
        ("/ex/aaaa?offset=x", 'schema: error converting value for "offset"'),
        ("/ex/aaaa?offset=1_0", 'schema: error converting value for "offset"'),
        ("/ex/aaaa?offset=9223372036854775808", 'schema: error converting value for "offset"'),
        ("/ex/aaaa?offset=" + "9" * 5000, 'schema: error converting value for "offset"'),
        ("/ex/aaaa?block=maybe", 'schema: error converting value for "block"'),
        ("/ex/aaaa?block=yes", 'schema: error converting value for "block"'),
        ("/ex/aaaa?offset=-2", "invalid Offset (-2; expected -1 <= Offset <= MaxInt64)"),
        ("/ex/aaaa?a;b", "invalid semicolon separator in query"),
        ("/ex/aaaa?offset=%zz", 'invalid URL escape "%zz"'),
        ("/ex/aaaa?offset=%2", 'invalid URL escape "%2"'),
        ("/", "Journal: invalid length (0; expected 4 <= length <= 512)"),
        ("/abc", "Journal: invalid length (3; expected 4 <= length <= 512)"),
        ("/ex/a%20b", "Journal: not a valid token (ex/a b)"),
        ("/ex/aaaa/", "Journal: must be a clean path (ex/aaaa/)"),
    ],
)
async def test_bad_read(server: Any, target: str, text: str) -> None:
    reply = await server.request("GET", target)
    assert (reply.status, reply.body.decode()) == (400, text + "\n")
    assert reply.header_lines[:2] == ERROR_HEADERS


@pytest.mark.parametrize("target", ["/ex/aaaa?offset=0", "/ex/aaaa?block=true", "/ex/aaaa?x="])
async def test_put_takes_no_parameters(server: Any, fake: Any, target: str) -> None:
    reply = await server.request("PUT", target, b"x")
    name = target.partition("?")[2].partition("=")[0]
    assert (reply.status, reply.body.decode()) == (400, f'schema: invalid path "{name}"\n')
    assert fake.journals["ex/aaaa"].data == b""


@pytest.mark.parametrize(
    "query", ["offset=3", "OFFSET=3", "oFFset=%33", "offset=1&offset=3", "offset=%2B3", "offset=3&block=", "&offset=3&"]
)
async def test_offset_forms(server: Any, fake: Any, query: str) -> None:
    fake.journals["ex/aaaa"].data += b"abcdef"
    assert (await server.request("GET", f"/ex/aaaa?{query}")).body == b"def"


@pytest.mark.parametrize("query", ["offset=", "block=f", "block=0", "block=False", ""])
async def test_defaults(server: Any, fake: Any, query: str) -> None:
    fake.journals["ex/aaaa"].data += b"abcdef"
    reply = await server.request("GET", f"/ex/aaaa?{query}", headers="Range: bytes=1-2\r\n")
    assert (reply.status, reply.body) == (206, b"abcdef")


# --- Paths ---


@pytest.mark.parametrize(
    ("target", "location"),
    [
        ("/ex//aaaa", "/ex/aaaa"),
        ("//ex/aaaa", "/ex/aaaa"),
        ("/ex/./aaaa?offset=3", "/ex/aaaa?offset=3"),
        ("/ex/../aaaa", "/aaaa"),
        ("/../../etc/passwd", "/etc/passwd"),
        ("/ex/%2e%2e/b%20c", "/b%20c"),
        ("/v1//journals/list", "/v1/journals/list"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_unclean_paths_are_redirected(server: Any, method: str, target: str, location: str) -> None:
    reply = await server.request(method, target, b"x" if method == "PUT" else None)
    assert reply.status_line == "HTTP/1.1 307 Temporary Redirect"
    assert reply.headers["Location"] == location


async def test_meta_is_stripped_and_kept_in_location(server: Any, fake: Any) -> None:
    reply = await server.request("PUT", "/ex/aaaa;some/meta", b"hello")
    assert (reply.status, reply.headers["Location"]) == (204, "http://127.0.0.1:9103/ex/aaaa;some/meta")
    reply = await server.request("GET", "/ex/aaaa;some/meta")
    assert (reply.body, reply.headers["Location"]) == (b"hello", "http://127.0.0.1:9103/ex/aaaa;some/meta")
    reply = await server.request("PUT", "/ex/aaaa;", b"hello")
    assert reply.status == 400
    assert b"metadata path segment" in reply.body


async def test_absolute_form_and_healthz(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"abc"
    assert (await server.request("GET", "http://proxied.example/ex/aaaa?offset=1")).body == b"bc"
    assert (await server.request("GET", "/healthz")).status == 404


# --- Appends ---


async def test_empty_put_is_a_barrier(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"abc"
    for headers, body in (("", b""), ("", None), ("Transfer-Encoding: chunked\r\n", None)):
        client = await server.connect()
        await client.send_request("PUT", "/ex/aaaa", body, headers)
        if headers:
            await client.send(b"0\r\n\r\n")
        reply = await client.reply()
        assert (reply.status, reply.headers["X-Commit-Begin"], reply.headers["X-Commit-End"]) == (204, "3", "3")
        assert reply.headers["X-Commit-Sha1-Sum"] == "da39a3ee5e6b4b0d3255bfef95601890afd80709"
        await client.stream.aclose()


async def test_chunked_put_in_pieces(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("PUT", "/ex/aaaa", None, "Transfer-Encoding: chunked\r\n")
    for piece in (b"hello", b" ", b"world"):
        await client.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await fake.until(lambda: fake.received_bytes >= 1)
    assert fake.journals["ex/aaaa"].data == b""
    await client.send(b"0\r\nX-Ignored: trailer\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, reply.headers["X-Commit-End"]) == (204, "11")
    assert fake.journals["ex/aaaa"].data == b"hello world"


async def test_big_put_arrives_whole(server: Any, fake: Any) -> None:
    body = bytes(range(256)) * 12345
    reply = await server.request("PUT", "/ex/aaaa", body)
    assert reply.status == 204
    assert fake.journals["ex/aaaa"].data == body


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (SlowAppend(SLOW), 500, f"rpc error: code = Unknown desc = {SLOW}"),
        (SlowAppend(SLOW.removeprefix("append stream: ")), 500, f"rpc error: code = Unknown desc = {SLOW}"),
        (AppendFailed("append stream: x"), 500, "rpc error: code = Unknown desc = append stream: x"),
        (
            StorageError("no space left on device", hint="free some"),
            500,
            "rpc error: code = Unknown desc = append stream: no space left on device (free some)",
        ),
        (OutcomeUnknown("a sync failed"), 503, "a sync failed"),
        (EngineWritesFailed("fsync failed", hint="open it again"), 503, "fsync failed (open it again)"),
        (EngineClosed("the engine is closed"), 503, "the engine is closed"),
        (NotAuthorized("authorization is missing required APPEND capability"), 401, "authorization is missing"),
    ],
)
async def test_failed_appends(server: Any, fake: Any, outcome: Exception, status: int, text: str) -> None:
    fake.journals["ex/aaaa"].append_outcome = outcome
    reply = await server.request("PUT", "/ex/aaaa", b"x")
    assert reply.status == status
    assert reply.body.decode().startswith(text)
    assert reply.header_lines[:2] == ERROR_HEADERS


@pytest.mark.parametrize(
    "status",
    [
        Status.NOT_ALLOWED,
        Status.INSUFFICIENT_JOURNAL_BROKERS,
        Status.INDEX_HAS_GREATER_OFFSET,
        Status.NO_JOURNAL_PRIMARY_BROKER,
        Status.SUSPENDED,
    ],
)
async def test_refused_appends(server: Any, fake: Any, status: Status) -> None:
    fake.journals["ex/aaaa"].status = status
    reply = await server.request("PUT", "/ex/aaaa", b"x")
    assert reply.status_line == "HTTP/1.1 500 Internal Server Error"
    assert reply.header_lines == [*ERROR_HEADERS, f"Content-Length: {len(status.name) + 1}"]
    assert reply.body == status.name.encode() + b"\n"


async def test_unhealthy_store(server: Any, fake: Any) -> None:
    cause = "fragment store s3://x/ unhealthy: no such bucket"
    fake.journals["ex/aaaa"].append_outcome = AppendResponse(
        Status.FRAGMENT_STORE_UNHEALTHY, fake.header(None), store_health_error=cause
    )
    reply = await server.request("PUT", "/ex/aaaa", b"x")
    assert (reply.status, reply.body.decode()) == (500, f"{cause}: FRAGMENT_STORE_UNHEALTHY\n")


async def test_parallel_puts_are_whole(server: Any, fake: Any) -> None:
    replies = []

    async def put(number: int) -> None:
        body = b"%03d" % number + bytes([number]) * 10_000 + b"\n"
        replies.append((body, await server.request("PUT", "/ex/aaaa", body)))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(put, number)
    content = bytes(fake.journals["ex/aaaa"].data)
    assert len(content) == 50 * 10_004
    for body, reply in replies:
        begin, end = int(reply.headers["X-Commit-Begin"]), int(reply.headers["X-Commit-End"])
        assert content[begin:end] == body


# --- Reads that stream ---


async def test_blocking_read_sends_nothing_until_content(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true&offset=-1")
    await fake.until(lambda: fake.reading == 1)
    await server.request("HEAD", "/ex/aaaa")  # a round trip later
    assert client.buffer == b""
    with trio.move_on_after(0.05) as scope:  # nothing to wait for: that is the point
        await client.stream.receive_some(1)
    assert scope.cancelled_caught
    await server.request("PUT", "/ex/aaaa", b"one")
    reply = await client.head()
    assert reply.headers["Content-Range"].startswith("bytes 0-")
    assert await client.chunk(reply) == b"one"
    await server.request("PUT", "/ex/aaaa", b"three")
    assert await client.chunk(reply) == b"three"


async def test_blocking_head(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("HEAD", "/ex/aaaa?block=1")
    await fake.until(lambda: fake.reading == 1)
    await server.request("PUT", "/ex/aaaa", b"one")
    reply = await client.reply("HEAD")
    assert (reply.status, reply.headers["X-Write-Head"]) == (206, "3")


async def test_deleted_journal_ends_the_stream(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"abc"
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    reply = await client.head()
    assert await client.chunk(reply) == b"abc"
    fake.journals["ex/aaaa"].deleted = True
    await fake.notify()
    assert await client.chunk(reply) == b""
    assert reply.trailers == {"X-Close-Error": "broker terminated RPC"}


async def test_terminated_before_the_first_response(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    await fake.until(lambda: fake.reading == 1)
    await fake.drain()
    reply = await client.reply()
    assert (reply.status, reply.body) == (500, b"broker terminated RPC\n")


def _ok(offset: int, end: int = 100) -> ReadResponse:
    fragment = Fragment("ex/aaaa", 0, end, bytes(20), CompressionCodec.NONE)
    return ReadResponse(Status.OK, None, offset, end, fragment)


async def test_first_offset_jump_is_swallowed_and_a_later_one_ends(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].script = [
        _ok(7),
        ReadResponse(offset=7, content=b"abc"),
        _ok(10),
        ReadResponse(offset=10, content=b"def"),
        _ok(20),
        ReadResponse(offset=20, content=b"ghi"),
    ]
    reply = await server.request("GET", "/ex/aaaa?offset=2")
    assert reply.headers["Content-Range"].startswith("bytes 7-")
    assert reply.chunks == [b"abc", b"def"]
    assert reply.trailers == {"X-Close-Error": "offset jump"}


async def test_failure_after_the_first_response(server: Any, fake: Any) -> None:
    error = CorruptData("sum does not match", path="/data/spool", journal="ex/aaaa")
    fake.journals["ex/aaaa"].script = [_ok(0), error]
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.status == 206
    assert reply.body == b""
    assert "Content-Type" not in reply.headers
    expected = "rpc error: code = DataLoss desc = sum does not match (the file was kept as it is): /data/spool"
    assert reply.trailers == {"X-Close-Error": expected}


async def test_failure_before_the_first_response(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].script = [CorruptData("bad\r\nrecord", path="/x")]
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.status == 500
    assert reply.body.startswith(b"rpc error: code = DataLoss desc = bad")


async def test_trailer_text_cannot_break_out(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].script = [_ok(0), CorruptData("bad\r\nX-Evil: 1\r\n\r\n\u00e9", path="/x")]
    client = await server.connect()
    reply = await client.request("GET", "/ex/aaaa")
    assert list(reply.trailers) == ["X-Close-Error"]
    assert (await client.request("GET", "/ex/aaaa")).status == 206


async def test_content_is_cut_to_a_mebibyte_and_not_joined(server: Any, fake: Any) -> None:
    big = bytes(range(256)) * 4096 * 2 + b"tail"
    fake.journals["ex/aaaa"].script = [
        _ok(0, len(big) + 3),
        ReadResponse(offset=0, content=memoryview(b"abc")),
        ReadResponse(offset=3, content=bytearray(big)),
    ]
    reply = await server.request("GET", "/ex/aaaa")
    assert [len(chunk) for chunk in reply.chunks] == [3, 1 << 20, 1 << 20, 4]
    assert reply.body == b"abc" + big


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"a": 1}\n', "text/plain; charset=utf-8"),
        ("größe\n".encode(), "text/plain; charset=utf-8"),
        (b"a\x00b", "application/octet-stream"),
        (b"  <html><body>", "text/html; charset=utf-8"),
        (b"<htmlx", "text/plain; charset=utf-8"),
        (b"<?xml version='1.0'?>", "text/xml; charset=utf-8"),
        (b"\x1f\x8b\x08\x00", "application/x-gzip"),
        (b"\x89PNG\r\n\x1a\n...", "image/png"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
        (b"RIFF....WAVE", "audio/wave"),
        (b"%PDF-1.4", "application/pdf"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(16), "video/mp4"),
        (b"\xff\xfea\x00", "text/plain; charset=utf-16le"),
    ],
)
async def test_content_type_is_sniffed(server: Any, fake: Any, content: bytes, kind: str) -> None:
    fake.journals["ex/aaaa"].data += content
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.headers["Content-Type"] == kind


# --- Readiness ---


async def test_ready(server: Any) -> None:
    reply = await server.request("GET", "/debug/ready")
    assert (reply.status, reply.body) == (200, b"")
    server.ready.append("writes failed: No space left on device")
    reply = await server.request("GET", "/debug/ready")
    assert (reply.status, reply.body) == (503, b"writes failed: No space left on device\n")
    assert (await server.request("GET", "/debug/bogus")).status == 404

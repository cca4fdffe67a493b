"""The HTTP gateway on the engine itself: what the test double cannot show."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from broadsheet.engine import Engine

MIB = 1 << 20
JOURNALS = {
    "changes": [
        {
            "upsert": {
                "name": name,
                "replication": 1,
                "labels": {"labels": [{"name": "content-type", "value": "text/plain"}]},
                "fragment": {
                    "length": str(MIB),
                    "compressionCodec": "SNAPPY",
                    "stores": ["file:///"],
                    "refreshInterval": "60s",
                },
            }
        }
        for name in ("ex/aaaa", "ex/bbbb")
    ]
}


@asynccontextmanager
async def running(serve: Any, engine: Engine) -> AsyncIterator[Any]:
    async with engine, serve(engine) as server:
        engine.advertise(server.url)
        reply = await server.request("POST", "/v1/journals/apply", json.dumps(JOURNALS).encode())
        assert reply.status in (200, 409), reply.body
        yield server


@pytest.fixture(params=["memory", "os", "fsync"])
async def server(request: Any, serve: Any, tmp_path: Path) -> AsyncIterator[Any]:
    engine = (
        Engine.in_memory()
        if request.param == "memory"
        else Engine.open(tmp_path / "data", durability=request.param)
    )
    async with running(serve, engine) as started:
        yield started


async def test_append_and_read(server: Any) -> None:
    reply = await server.request("PUT", "/ex/aaaa", b"hello world")
    assert reply.status_line == "HTTP/1.1 204 No Content"
    token = reply.headers["X-Route-Token"]
    assert token.endswith(f'endpoints:"{server.url}"')
    assert reply.header_lines == [
        f"Location: {server.url}/ex/aaaa",
        "X-Commit-Begin: 0",
        "X-Commit-End: 11",
        "X-Commit-Sha1-Sum: 2aae6c35c94fcfb415dbe95f408b9ce91ee846ed",
        f"X-Route-Token: {token}",
        "X-Write-Head: 11",
    ]
    reply = await server.request("GET", "/ex/aaaa?offset=5")
    assert reply.header_lines == [
        "Content-Range: bytes 5-9223372036854775807/9223372036854775807",
        f"Location: {server.url}/ex/aaaa",
        "Trailer: X-Close-Error",
        "X-Fragment-Name: 0000000000000000-000000000000000b-2aae6c35c94fcfb415dbe95f408b9ce91ee846ed.sz",
        f"X-Route-Token: {token}",
        "X-Write-Head: 11",
        "Content-Type: text/plain; charset=utf-8",
        "Transfer-Encoding: chunked",
    ]
    assert (reply.body, reply.trailers) == (b" world", {"X-Close-Error": "OFFSET_NOT_YET_AVAILABLE"})
    for target in ("/ex/aaaa?offset=11", "/ex/aaaa?offset=-1"):
        reply = await server.request("GET", target)
        assert (reply.status, reply.headers["X-Write-Head"]) == (416, "11")
    assert (await server.request("PUT", "/ex/missing", b"x")).status == 404
    assert (await server.request("PUT", "/abc", b"x")).body.startswith(b"Journal: invalid length (3;")


async def test_empty_put_and_meta(server: Any) -> None:
    reply = await server.request("PUT", "/ex/aaaa;meta", b"")
    assert (reply.status, reply.headers["X-Commit-End"]) == (204, "0")
    assert reply.headers["X-Commit-Sha1-Sum"] == hashlib.sha1(b"").hexdigest()
    assert reply.headers["Location"] == f"{server.url}/ex/aaaa;meta"


async def test_content_larger_than_fragments_comes_back_whole(server: Any) -> None:
    content = os.urandom(MIB) * 5 + b"tail"
    client = await server.connect()
    for begin in range(0, len(content), 700_000):
        reply = await client.request("PUT", "/ex/aaaa", content[begin : begin + 700_000])
        assert reply.status == 204
    reply = await client.request("PUT", "/ex/aaaa", content)
    assert reply.headers["X-Commit-Sha1-Sum"] == hashlib.sha1(content).hexdigest()
    reply = await client.request("GET", "/ex/aaaa")
    assert reply.body == content + content
    reply = await client.request("GET", f"/ex/aaaa?offset={len(content) - 3}")
    assert reply.body == content[-3:] + content


async def test_truncated_body_is_rolled_back_and_neighbours_stand(server: Any) -> None:
    for length in (10, 3 * MIB):  # one waits in memory, one streams into the spool
        client = await server.connect()
        await client.send_request("PUT", "/ex/aaaa", None, f"Content-Length: {4 * MIB}\r\n")
        await client.send(bytes(length))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.request, "PUT", "/ex/aaaa", b"neighbour\n")
            await trio.sleep(0.02)  # so that both are under way; either order is right
            client.reset()
    reply = await server.request("GET", "/ex/aaaa")
    assert reply.body == b"neighbour\n" * 2


async def test_racing_appends_are_whole(server: Any) -> None:
    replies: list[tuple[bytes, Any]] = []

    async def put(number: int) -> None:
        client = await server.connect()
        async with client.stream:
            for _ in range(5):
                body = os.urandom(1 + 977 * number)
                replies.append((body, await client.request("PUT", "/ex/aaaa", body)))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(put, number)
    content = (await server.request("GET", "/ex/aaaa")).body
    for body, reply in replies:
        begin, end = int(reply.headers["X-Commit-Begin"]), int(reply.headers["X-Commit-End"])
        assert content[begin:end] == body
        assert reply.headers["X-Commit-Sha1-Sum"] == hashlib.sha1(body).hexdigest()
    assert len(content) == sum(len(body) for body, _ in replies)


async def test_blocking_read_follows(server: Any) -> None:
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true&offset=-1")
    writer = await server.connect()
    expected = b""
    reply = None
    for number in range(20):
        body = b"line %d\n" % number
        assert (await writer.request("PUT", "/ex/aaaa", body)).status == 204
        expected += body
        reply = reply or await client.head()
        while len(reply.body) < len(expected):
            await client.chunk(reply)
    assert reply is not None
    assert reply.body == expected


async def test_shutdown_ends_blocked_reads(server: Any) -> None:
    await server.request("PUT", "/ex/aaaa", b"hello")
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    reply = await client.head()
    assert await client.chunk(reply) == b"hello"
    server.shutdown.set()
    await server.service.drain()
    assert await client.chunk(reply) == b""
    assert reply.trailers == {"X-Close-Error": "broker terminated RPC"}
    with trio.fail_after(5):
        await server.stopped.wait()


async def test_requests_to_a_closing_engine(server: Any) -> None:
    await server.service.drain()
    reply = await server.request("PUT", "/ex/aaaa", b"x")
    assert reply.status == 503
    assert reply.body


async def test_deleted_journal(server: Any) -> None:
    client = await server.connect()
    await client.send_request("GET", "/ex/aaaa?block=true")
    await server.request("PUT", "/ex/aaaa", b"hello")
    reply = await client.head()
    assert await client.chunk(reply) == b"hello"
    change = json.dumps({"changes": [{"delete": "ex/aaaa", "expectModRevision": -1}]}).encode()
    assert (await server.request("POST", "/v1/journals/apply", change)).status == 200
    assert await client.chunk(reply) == b""
    assert reply.trailers == {"X-Close-Error": "broker terminated RPC"}
    assert (await server.request("GET", "/ex/aaaa")).status == 404


async def test_json_routes(server: Any) -> None:
    async def post(route: str, value: Any) -> Any:
        reply = await server.request("POST", f"/v1/journals/{route}", json.dumps(value).encode())
        return reply.status, [json.loads(line) for line in reply.body.splitlines()]

    status, [listing] = await post("list", {})
    assert [journal["spec"]["name"] for journal in listing["result"]["journals"]] == ["ex/aaaa", "ex/bbbb"]
    assert status == 200
    target = "/v1/journals/append?journal=ex/aaaa&union_registers=author=me&offset=0"
    reply = await server.request("POST", target, b"hello")
    result = json.loads(reply.body)
    assert (reply.status, result["commit"]["end"]) == (200, "5")
    assert result["registers"]["labels"] == [{"name": "author", "value": "me", "prefix": False}]
    target = "/v1/journals/append?journal=ex/aaaa&check_registers=author=you"
    reply = await server.request("POST", target, b"hello")
    assert (reply.status, json.loads(reply.body)["status"]) == (409, "REGISTER_MISMATCH")
    status, [fragments] = await post("fragments", {"journal": "ex/aaaa"})
    assert fragments["fragments"][0]["spec"]["end"] == "5"
    status, read = await post("read", {"journal": "ex/aaaa", "endOffset": "3"})
    assert [line["result"]["content"] for line in read if line["result"]["content"]] == ["aGVs"]
    status, conflict = await post("apply", JOURNALS)
    assert (status, conflict[0]["conflicts"]) == (409, ["ex/aaaa", "ex/bbbb"])


async def test_watch(server: Any) -> None:
    client = await server.connect()
    await client.send_request("POST", "/v1/journals/list", b'{"watch":true}')
    reply = await client.head()
    snapshot = json.loads(await client.chunk(reply))["result"]
    assert len(snapshot["journals"]) == 2
    await client.chunk(reply)
    change = json.dumps({"changes": [{"delete": "ex/aaaa", "expectModRevision": -1}]}).encode()
    await server.request("POST", "/v1/journals/apply", change)
    snapshot = json.loads(await client.chunk(reply))["result"]
    assert [journal["spec"]["name"] for journal in snapshot["journals"]] == ["ex/bbbb"]


async def test_readers_and_writers_that_vanish_leave_nothing(server: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        client = await server.connect()
        if number % 3 == 0:
            await client.send_request("GET", "/ex/aaaa?block=true")
        elif number % 3 == 1:
            await client.send_request("PUT", "/ex/aaaa", None, "Content-Length: 100\r\n")
            await client.send(b"x")
        else:
            await client.send_request("POST", "/v1/journals/list", b'{"watch":true}')
        await trio.lowlevel.checkpoint()
        client.reset()
    assert (await server.request("PUT", "/ex/aaaa", b"still here")).headers["X-Commit-Begin"] == "0"
    server.shutdown.set()
    await server.service.drain()
    with trio.fail_after(5):
        await server.stopped.wait()
    # Journal files may have been opened meanwhile; sockets must not have stayed.
    assert len(os.listdir("/proc/self/fd")) < before + 20

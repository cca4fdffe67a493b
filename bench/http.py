"""The HTTP gateway on an engine in mode `os`, against an empty ASGI app on the same server; the client is a process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import trio

from bench.report import Gate, Report
from broadsheet.engine import Engine

ROUNDS = 5
SMALL = 4000
BULK_BYTES = 256 << 20


async def _empty(scope: dict, receive: Callable, send: Callable) -> None:  # type: ignore[type-arg]
    """The least that an app can do: take the body, answer 204."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _serve(kind: str, folder: str, ready: Connection) -> None:
    async def main() -> None:
        from broadsheet.facades.http import open_listeners, serve_asgi, serve_http

        listeners = await open_listeners("127.0.0.1", 0)
        port = listeners[0].socket.getsockname()[1]
        if kind == "empty":
            ready.send(port)
            await serve_asgi(_empty, listeners)
        else:
            async with Engine.open(folder, durability="os") as engine:
                await engine.create_journal("bench/journal")
                ready.send(port)
                await serve_http(engine, listeners=listeners)

    trio.run(main)


class Server:
    def __init__(self, kind: str, where: str) -> None:
        self.folder = tempfile.mkdtemp(dir=where)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, self.folder, theirs), daemon=True)
        self.process.start()
        self.port: int = ours.recv()

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def small_puts(server: Server, count: int = SMALL) -> float:
    """PUTs of 100 bytes per second, one connection, one at a time."""
    request = (
        b"PUT /bench/journal HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n" + b"x" * 99 + b"\n"
    )
    with server.connect() as connection:
        for number in range(count + 200):
            if number == 200:
                begin = time.perf_counter()
            connection.sendall(request)
            if not connection.recv(4096).startswith(b"HTTP/1.1 204"):
                raise RuntimeError("a PUT failed")
        return count / (time.perf_counter() - begin)


def bulk_put(server: Server) -> float:
    """MB/s of one PUT."""
    block = os.urandom(1 << 20)
    with server.connect() as connection:
        begin = time.perf_counter()
        connection.sendall(
            b"PUT /bench/journal HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BULK_BYTES
        )
        for _ in range(BULK_BYTES >> 20):
            connection.sendall(block)
        if not connection.recv(4096).startswith(b"HTTP/1.1 204"):
            raise RuntimeError("a PUT failed")
        return BULK_BYTES / (time.perf_counter() - begin) / 1e6


def bulk_get(server: Server) -> float:
    """MB/s of one GET of everything."""
    buffer = bytearray(1 << 20)
    received = 0
    with server.connect() as connection:
        connection.settimeout(10)
        begin = time.perf_counter()
        connection.sendall(b"GET /bench/journal HTTP/1.0\r\nHost: localhost\r\n\r\n")
        while (n := connection.recv_into(buffer)) > 0:
            received += n
        return received / (time.perf_counter() - begin) / 1e6


def run(report: Report, where: str) -> None:
    ours, empty = Server("journal", where), Server("empty", where)
    try:
        results = [(small_puts(ours), small_puts(empty)) for _ in range(ROUNDS)]
        mine, peer = (statistics.median(column) for column in zip(*results, strict=True))
        ratio = statistics.median(a / b for a, b in results)
        detail = f"{mine:,.0f} against {peer:,.0f} /s"
        report.add(Gate("HTTP, os: PUT of 100 B, against an empty ASGI app", ratio, 0.8, "x", detail))
    finally:
        ours.close()
        empty.close()
    server = Server("journal", where)
    try:
        puts = statistics.median(bulk_put(server) for _ in range(ROUNDS))
        report.add(Gate("HTTP, os: bulk PUT", puts, 400, "MB/s"))
        gets = statistics.median(bulk_get(server) for _ in range(ROUNDS))
        report.add(Gate("HTTP, os: bulk GET", gets, 1000, "MB/s"))
    finally:
        server.close()



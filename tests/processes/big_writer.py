"""Appends much and reads it back, in constant memory; prints figures as JSON.

    python big_writer.py FOLDER BYTES STORE

STORE: "none", or "file" for a store of uncompressed fragments.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import AsyncIterator

import trio

from broadsheet.engine.engine import Engine
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalSpec

BUFFER = 1 << 20
STREAM = 64 << 20  # bytes of an append that is streamed


def peak_mb() -> float:
    """Of this program: `getrusage` counts what the process was before it became one, too."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


async def main(folder: str, total: int, store: str) -> None:
    buffers = [bytes([number]) * BUFFER for number in range(16)]
    stores = ("file:///",) if store == "file" else ()
    spec = JournalSpec("", 1, fragment=FragmentSpec(256 << 20, CompressionCodec.NONE, stores, 10**9))
    figures: dict[str, float] = {"start_mb": peak_mb()}
    async with Engine.open(folder, durability="os") as engine:
        journal = await engine.create_journal("memory/big", spec)
        number = crc = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal number, crc
            for _ in range(STREAM // BUFFER):
                buffer = buffers[number % 16]
                crc = zlib.crc32(buffer[:64], crc)
                number += 1
                yield buffer

        started = time.perf_counter()
        while number * BUFFER < total:
            if (number * BUFFER // STREAM) % 2:
                await journal.append(body())
            else:
                for _ in range(STREAM // BUFFER):
                    buffer = buffers[number % 16]
                    crc = zlib.crc32(buffer[:64], crc)
                    number += 1
                    await journal.append(buffer)
        figures["append_s"] = time.perf_counter() - started
        figures["append_mb"] = peak_mb()

        started = time.perf_counter()
        read = found = 0
        async with journal.reader(block=False) as reader:
            async for piece in reader:
                # The first 64 bytes of each buffer: enough to tell them apart.
                at = -read % BUFFER
                while at < len(piece):
                    found = zlib.crc32(piece[at : at + 64], found)
                    at += BUFFER
                read += len(piece)
        figures["read_s"] = time.perf_counter() - started
        figures["bytes"] = read
        figures["same"] = read == number * BUFFER == await journal.head() and found == crc
        figures["fragments"] = len(await journal.fragments())
        figures["persisted"] = sum(bool(it.backing_store) for it in await journal.fragments())
    figures["peak_mb"] = peak_mb()
    print(json.dumps(figures))


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), sys.argv[3])

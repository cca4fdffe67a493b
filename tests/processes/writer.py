"""A writer that is killed: opens an engine, appends from several tasks without end, tells of each acknowledged append.

    python writer.py FOLDER DURABILITY ROUND

One line to stdout per acknowledged append: journal, begin, end, first record, last record. A record is one line of
the journal: `round.task.number` and a filler whose length is known from those.
"""

from __future__ import annotations

import os
import sys

import trio

from broadsheet.engine.engine import Engine, EngineOptions
from broadsheet.engine.handles import DEFAULT_SPEC
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalSpec

JOURNALS = {
    "plain/small": DEFAULT_SPEC,
    "plain/large": JournalSpec("", 1, fragment=FragmentSpec(1 << 20, CompressionCodec.NONE, (), 10**9)),
    "stored": JournalSpec("", 1, fragment=FragmentSpec(200_000, CompressionCodec.SNAPPY, ("file:///",), 10**9)),
}


def record(round_: int, task: int, number: int, journal: str) -> bytes:
    length = (number * 37 + task) % (9000 if journal == "plain/large" else 200)
    return b"%d.%d.%d " % (round_, task, number) + b"x" * length + b"\n"


def tell(journal: str, begin: int, end: int, task: int, first: int, last: int) -> None:
    os.write(1, f"{journal} {begin} {end} {task} {first} {last}\n".encode())


async def append(engine: Engine, name: str, round_: int, task: int) -> None:
    """One record an append; every tenth one is streamed."""
    journal = engine.journal(name)
    number = 0
    while True:
        content = record(round_, task, number, name)

        async def body(content: bytes = content):  # type: ignore[no-untyped-def]
            for at in range(0, len(content), 1000):
                yield content[at : at + 1000]

        commit = await journal.append(body() if number % 10 == 9 else content)
        tell(name, commit.begin, commit.end, task, number, number)
        number += 1


async def append_batches(engine: Engine, name: str, round_: int, task: int) -> None:
    """Through an `Appender`: many records an append."""
    number = 0
    async with engine.appender(name) as appender:
        while True:
            first, length = number, 0
            for _ in range(50):
                content = record(round_, task, number, name)
                appender.write(content)
                length += len(content)
                number += 1
            end = await appender.flush()
            tell(name, end - length, end, task, first, number - 1)


async def append_huge(engine: Engine, name: str, round_: int, task: int) -> None:
    """Bodies that stream into the spool while they hold the journal."""
    journal = engine.journal(name)
    number = 0
    while True:
        first = number
        content = bytearray()
        while len(content) <= 1_200_000:
            content += record(round_, task, number, name)
            number += 1
        commit = await journal.append(bytes(content))
        tell(name, commit.begin, commit.end, task, first, number - 1)
        await trio.sleep(0.02)


async def main(folder: str, durability: str, round_: int) -> None:
    # Checkpoints and recycled files within a fraction of a second.
    options = EngineOptions(log_file_bytes=1 << 20, checkpoint_log_bytes=1 << 20, checkpoint_spool_bytes=8 << 20)
    async with Engine.open(folder, durability=durability, options=options) as engine:
        for name, spec in JOURNALS.items():
            await engine.create_journal(name, spec)
        os.write(1, b"ready\n")
        async with trio.open_nursery() as nursery:
            for task in range(3):
                nursery.start_soon(append, engine, "plain/small", round_, task)
                nursery.start_soon(append, engine, "plain/large", round_, task)
            nursery.start_soon(append_batches, engine, "plain/small", round_, 3)
            nursery.start_soon(append_huge, engine, "plain/large", round_, 3)
            for task in range(2):
                nursery.start_soon(append_batches, engine, "stored", round_, task)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""The store is listed while spools are put into it: whatever comes first, nothing that was appended goes missing."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import trio

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalSpec
from broadsheet.engine.runtime import Threads, Worker
from broadsheet.testing.simulation import SimulatedDisk, SimulatedRuntime, run_simulated

T = TypeVar("T")
FOLDER = "/disk/engine"
SPEC = JournalSpec("stored", 1, fragment=FragmentSpec(1024, CompressionCodec.NONE, ("file:///",), 10**9))
CONTENT = [random.Random(number).randbytes(1100) for number in range(8)]
MODES = [Durability.FSYNC, Durability.OS]


@dataclass
class SlowThreads:
    """It takes a while until a call begins, and until its result is known."""

    threads: Threads
    delay_s: Callable[[], float]

    async def run(self, call: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            await trio.sleep(self.delay_s())
            result = await self.threads.run(call)
            await trio.sleep(self.delay_s())
        return result

    def worker(self) -> Worker:
        return self.threads.worker()


def open_engine(disk: SimulatedDisk, durability: Durability, seed: int, *, slow: bool) -> Engine:
    delays = random.Random(f"delays {seed}")
    runtime = SimulatedRuntime(seed, disk)
    if slow:
        runtime.threads = SlowThreads(runtime.threads, lambda: delays.expovariate(100))
    return Engine.open(FOLDER, durability=durability, options=EngineOptions(inline_bytes=300), runtime=runtime)


def unpersisted(durability: Durability) -> SimulatedDisk:
    """A journal of 8 fragments, none of which could be put into its store."""
    disk = SimulatedDisk(random.Random(1), tracing=False)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    disk.fail_matching(lambda call: call.operation == "pwrite" and ".partial-" in call.path, full, times=None)

    async def main() -> None:
        async with open_engine(disk, durability, 0, slow=False) as engine:
            journal = await engine.create_journal("stored", SPEC)
            for content in CONTENT:
                await journal.append(content)

    run_simulated(main)
    return disk.clone()


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_a_journal_is_whole_while_its_spools_are_persisted(durability: Durability) -> None:
    disk = unpersisted(durability)
    expected = b"".join(CONTENT)

    async def main(disk: SimulatedDisk, seed: int) -> None:
        moments = random.Random(f"moments {seed}")
        with trio.fail_after(10_000):
            async with open_engine(disk, durability, seed, slow=True) as engine:
                journal = engine.journal("stored")
                if seed % 2:
                    await trio.sleep(moments.expovariate(30))
                for _ in range(12):
                    assert await journal.read() == expected, "bytes that were there are missing"
                    assert await journal.head() == len(expected)
                    await trio.sleep(moments.expovariate(50))
                await trio.sleep(1000)
                assert await journal.read() == expected
                assert [bool(it.backing_store) for it in await journal.fragments()] == [True] * 7 + [False]
                assert (await journal.append(b"on")).begin == len(expected)

    for seed in range(60):
        run_simulated(main, disk.clone(), seed, seed=seed)

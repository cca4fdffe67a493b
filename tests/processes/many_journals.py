"""Creates many journals, or opens an engine that has them; prints figures as JSON.

    python many_journals.py create|open FOLDER COUNT
"""

from __future__ import annotations

import gc
import json
import sys
import time

import trio

from broadsheet.engine.engine import Engine
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.labels import Label, LabelSelector, LabelSet
from broadsheet.engine.service import ApplyRequest, ListRequest


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6


def spec(number: int) -> JournalSpec:
    labels = LabelSet((Label("app", f"app-{number % 100}"), Label("number", str(number))))
    fragment = FragmentSpec(64 << 20, CompressionCodec.SNAPPY, ("file:///",), 300 * 10**9)
    return JournalSpec(f"many/journal-{number:06d}", 1, labels, fragment)


async def create(folder: str, count: int) -> dict[str, float]:
    async with Engine.open(folder) as engine:
        started = time.perf_counter()
        response = await engine.apply(ApplyRequest(tuple(JournalChange(0, spec(number)) for number in range(count))))
        return {"status": int(response.status), "apply_s": time.perf_counter() - started}


async def open_again(folder: str, count: int) -> dict[str, float]:
    gc.collect()
    before = resident_mb()
    started = time.perf_counter()
    async with Engine.open(folder) as engine:
        opened = time.perf_counter() - started
        gc.collect()
        idle = resident_mb() - before
        listed = len((await engine.list(ListRequest(LabelSelector()))).journals)
        # All of them in use: each has a replica, and bytes in a spool of its own.
        for number in range(0, count, 10):
            await engine.journal(spec(number).name).append(b"x")
        gc.collect()
        used = resident_mb() - before
    return {
        "open_s": opened,
        "listed": listed,
        "replayed": engine.recovered_records,
        "idle_kb_each": idle * 1e3 / count,
        "used_kb_each": (used - idle) * 1e3 / (count / 10),
    }


if __name__ == "__main__":
    what, folder, count = sys.argv[1:]
    print(json.dumps(trio.run(create if what == "create" else open_again, folder, int(count))))

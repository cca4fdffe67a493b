"""The engine against sqlite3, and against the bare system calls (design.md §7)."""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import trio

from bench.report import Gate, Report
from broadsheet.engine import Engine
from broadsheet.engine.handles import DEFAULT_SPEC
from broadsheet.engine.journal.spec import JournalChange
from broadsheet.engine.service import AppendRequest, ApplyRequest

RECORD = os.urandom(49).hex().encode() + b"x\n"  # 100 bytes
ROUNDS = 5


def engine_batches(folder: str, durability: str, commits: int, per_commit: int) -> float:
    """Records/s through an Appender, one flush per commit."""

    async def main() -> float:
        async with Engine.open(folder, durability=durability) as engine:
            await engine.create_journal("bench/journal")
            async with engine.appender("bench/journal") as appender:
                write, flush = appender.write, appender.flush
                for _ in range(max(3, commits // 20)):
                    for _ in range(per_commit):
                        write(RECORD)
                    await flush()
                begin = time.perf_counter()
                for _ in range(commits):
                    for _ in range(per_commit):
                        write(RECORD)
                    await flush()
                return commits * per_commit / (time.perf_counter() - begin)

    return trio.run(main)


def sqlite_batches(folder: str, synchronous: str, commits: int, per_commit: int) -> float:
    """Rows/s into a table of one blob column, one transaction per commit, WAL."""
    db = sqlite3.connect(os.path.join(folder, "peer.db"), isolation_level=None)
    db.execute("pragma journal_mode=wal")
    db.execute(f"pragma synchronous={synchronous}")
    db.execute("create table if not exists records (content blob)")
    rows = [(RECORD,)] * per_commit
    insert = "insert into records values (?)"

    def commit() -> None:
        db.execute("begin")
        if per_commit == 1:
            db.execute(insert, (RECORD,))
        else:
            db.executemany(insert, rows)
        db.execute("commit")

    for _ in range(max(3, commits // 20)):
        commit()
    begin = time.perf_counter()
    for _ in range(commits):
        commit()
    elapsed = time.perf_counter() - begin
    db.close()
    return commits * per_commit / elapsed


def sync_loop(folder: str, count: int) -> float:
    """The bare minimum of a durable append from a task: write, then fdatasync in a thread; per second."""

    async def main() -> float:
        fd = os.open(os.path.join(folder, "bare"), os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, bytes(1 << 20), 0)
        os.fsync(fd)
        begin = time.perf_counter()
        for number in range(count):
            os.pwrite(fd, RECORD, number * 128)
            await trio.to_thread.run_sync(os.fdatasync, fd)
        elapsed = time.perf_counter() - begin
        os.close(fd)
        return count / elapsed

    return trio.run(main)


def engine_appends(folder: str, durability: str, count: int, tasks: int) -> float:
    """Appends/s of `tasks` tasks that each await every append."""

    async def main() -> float:
        async with Engine.open(folder, durability=durability) as engine:
            await engine.create_journal("bench/journal")
            request = AppendRequest("bench/journal")

            async def work(number: int) -> None:
                for _ in range(number):
                    await engine.append(request, RECORD)

            await work(50)
            begin = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(tasks):
                    nursery.start_soon(work, count // tasks)
            return count / (time.perf_counter() - begin)

    return trio.run(main)


def open_many(folder: str, count: int) -> float:
    """Seconds to open an engine of `count` journals, each with content."""

    async def make() -> None:
        async with Engine.open(folder, durability="os") as engine:
            changes = []
            for number in range(count):
                name = f"bench/part-{number:06}"
                from dataclasses import replace

                changes.append(JournalChange(0, replace(DEFAULT_SPEC, name=name)))
            await engine.apply(ApplyRequest(tuple(changes)))
            for number in range(count):
                await engine.append(AppendRequest(f"bench/part-{number:06}"), b"x")

    async def open_() -> float:
        begin = time.perf_counter()
        async with Engine.open(folder, durability="os"):
            return time.perf_counter() - begin

    trio.run(make)
    return statistics.median(trio.run(open_) for _ in range(ROUNDS))


def import_ms() -> float:
    """Milliseconds that `import broadsheet.engine` takes over `import trio`."""
    code = "import time, trio; t = time.perf_counter(); import broadsheet.engine; print(time.perf_counter() - t)"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env)
    times = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env).stdout)
        for _ in range(ROUNDS)
    ]
    return statistics.median(times) * 1000


def _median(call: Callable[[str], float], where: str) -> float:
    """Median of fresh folders."""
    results = []
    for _ in range(ROUNDS):
        folder = tempfile.mkdtemp(dir=where)
        try:
            results.append(call(folder))
        finally:
            shutil.rmtree(folder)
    return statistics.median(results)


def _ratio(ours: Callable[[str], float], peer: Callable[[str], float], where: str) -> tuple[float, float, float]:
    """Medians of ours and the peer's, measured in turns, and of the ratios."""
    results = []
    for _ in range(ROUNDS):
        pair = []
        for call in (ours, peer):
            folder = tempfile.mkdtemp(dir=where)
            try:
                pair.append(call(folder))
            finally:
                shutil.rmtree(folder)
        results.append(pair)
    return (
        statistics.median(pair[0] for pair in results),
        statistics.median(pair[1] for pair in results),
        statistics.median(pair[0] / pair[1] for pair in results),
    )


def run(report: Report, where: str) -> None:
    for durability, synchronous, per_commit, commits, least in (
        ("os", "NORMAL", 10_000, 30, 1.5),
        ("os", "NORMAL", 100, 1500, 1.2),
        ("os", "NORMAL", 1, 8000, 0.25),
        ("fsync", "FULL", 100, 600, 1.0),
        ("fsync", "FULL", 1, 1500, 0.7),
    ):
        ours, peer, ratio = _ratio(
            partial(engine_batches, durability=durability, commits=commits, per_commit=per_commit),
            partial(sqlite_batches, synchronous=synchronous, commits=commits, per_commit=per_commit),
            where,
        )
        report.add(
            Gate(
                f"{durability}: {per_commit} records of 100 B per commit, against sqlite WAL {synchronous}",
                ratio,
                least,
                "x",
                f"{ours:,.0f} against {peer:,.0f} records/s",
            )
        )
    for tasks, count, least in ((1, 1500, 0.7), (64, 20_000, 8.0)):
        ours, peer, ratio = _ratio(
            partial(engine_appends, durability="fsync", count=count, tasks=tasks),
            partial(sync_loop, count=1500),
            where,
        )
        report.add(
            Gate(
                f"fsync: {tasks} task(s) that await each append, against write + fdatasync in a thread",
                ratio,
                least,
                "x",
                f"{ours:,.0f} against {peer:,.0f} /s",
            )
        )
    rate = _median(partial(engine_appends, durability="os", count=20_000, tasks=1), where)
    report.add(Gate("os: single awaited appends", rate, 20_000, "/s"))
    report.add(Gate("import broadsheet.engine over import trio", import_ms(), 60, "ms", at_most=True))
    folder = tempfile.mkdtemp(dir=where)
    try:
        report.add(Gate("opening 10,000 journals", open_many(folder, 10_000), 1.0, "s", at_most=True))
    finally:
        shutil.rmtree(folder)



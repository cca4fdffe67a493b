"""kill -9 under load, 20 rounds: everything acknowledged is there, whole and in its place, nothing is half there.

`writer.py` goes on in the folder that the one before it was killed in; after each kill the folder is opened in this
process, read, and compared with what the writers had told.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from broadsheet.engine.engine import Engine

ROUNDS = 20
WRITER = Path(__file__).with_name("writer.py")
Acknowledged = tuple[str, int, int, int, int, int, int]  # journal, begin, end, round, task, first, last


def record(round_: int, task: int, number: int, journal: str) -> bytes:
    """As in writer.py."""
    length = (number * 37 + task) % (9000 if journal == "plain/large" else 200)
    return b"%d.%d.%d " % (round_, task, number) + b"x" * length + b"\n"


def kill_one(folder: Path, durability: str, round_: int, rng: random.Random) -> list[Acknowledged]:
    """Let a writer write for a moment, and kill it. What it had told until then."""
    writer = subprocess.Popen(
        [sys.executable, str(WRITER), str(folder), durability, str(round_)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"ready\n"
        # Kill it at a random one of its acknowledgements: a time of the writer's own.
        told = []
        for _ in range(rng.choice((1, 20, 100, 500, 1500))):
            told.append(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert writer.returncode == -signal.SIGKILL
    found = []
    for line in told:
        if line.endswith(b"\n"):  # the kill may cut the last one
            name, *numbers = line.decode().split()
            begin, end, task, first, last = map(int, numbers)
            found.append((name, begin, end, round_, task, first, last))
    return found


def check(name: str, begin: int, content: bytes, acknowledged: list[Acknowledged], known: set[bytes]) -> int:
    """Content from `begin` on: the acknowledged appends at their places, and else whole records, each once."""
    for _, first_byte, end, round_, task, first, last in acknowledged:
        expected = b"".join(record(round_, task, number, name) for number in range(first, last + 1))
        found = content[first_byte - begin : end - begin]
        assert found == expected, f"{name} [{first_byte}, {end}) of round {round_}, task {task}"
    assert not content or content.endswith(b"\n"), f"{name} ends in the midst of a record"
    lines = content.splitlines(keepends=True)
    for line in lines:
        words = line.split(b" ")[0].split(b".")
        assert len(words) == 3, f"{name}: {line[:60]!r}"
        round_, task, number = map(int, words)
        assert line == record(round_, task, number, name), f"{name}: {line[:60]!r} is torn"
    heads = [line.split(b" ")[0] for line in lines]
    assert known.isdisjoint(heads) and len(set(heads)) == len(heads), f"{name}: a record is there twice"
    known.update(heads)
    return len(lines)


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_kill_9_under_load(durability: str, tmp_path: Path) -> None:
    rng = random.Random(durability)
    folder = tmp_path / "engine"
    checked: dict[str, int] = {}
    known: dict[str, set[bytes]] = {}
    appends = records = replayed = torn = 0
    started = time.perf_counter()
    for round_ in range(ROUNDS):
        acknowledged = await trio.to_thread.run_sync(kill_one, folder, durability, round_, rng)
        assert acknowledged, "the writer was killed before it had told of anything"
        appends += len(acknowledged)
        async with Engine.open(folder, durability=durability) as engine:
            replayed += engine.recovered_records
            torn += len(engine.quarantined)
            for name in ("plain/small", "plain/large", "stored"):
                begin = checked.setdefault(name, 0)
                content = await engine.journal(name).read(begin)
                mine = [it for it in acknowledged if it[0] == name]
                records += check(name, begin, content, mine, known.setdefault(name, set()))
                checked[name] = begin + len(content)
                assert await engine.journal(name).head() == checked[name]
            assert engine.ready_problem() is None
    print(
        f"{durability}: {ROUNDS} kills, {appends} acknowledged appends, {records} records, "
        f"{sum(checked.values()) >> 20} MiB, {replayed} log records replayed, "
        f"{torn} files kept aside, {time.perf_counter() - started:.1f} s"
    )
    assert replayed > 0
    # Once more from the beginning, over everything that all of them left, what is in the store by now included.
    async with Engine.open(folder, durability=durability) as engine:
        for name, end in checked.items():
            content = await engine.journal(name).read()
            assert len(content) == end
            check(name, 0, content, [], set())

"""Crashes at every file call of the engine that `serve` runs, on a disk that forgets, tears and reorders.

What is checked after each is said in `broadsheet.testing.simulation.engine_model`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from broadsheet.engine.engine import Durability
from broadsheet.testing.simulation.crash_search import Findings, search
from broadsheet.testing.simulation.disk import Mutations
from broadsheet.testing.simulation.engine_model import EngineRun, new_disk

CRASHES = int(os.environ.get("BROADSHEET_CRASHES", "10000"))
SEEDS_PER_JOB = 2

SYNCS = (
    "fdatasync:identity",
    "fdatasync:log",
    "sync_dir:log",
    "fdatasync:spool",
    "sync_dir:spool",
    "fdatasync:snapshot",
    "fdatasync:fragment",
    "sync_dir:fragment",
    "sync_dir:folder",
    "fdatasync:quarantine",
    "sync_dir:quarantine",
)
WRITES = ("pwrite:identity", "pwrite:log", "pwrite:spool", "pwrite:fragment", "pwrite:snapshot")
RENAMES = ("rename:identity", "rename:snapshot", "rename:fragment")

HARMLESS = {
    # Recovery checks the bytes that a record speaks of, and until the acknowledgement it ends the log where they are
    # not there: a spool's bytes may reach the disk before or after the record that names them.
    ("pwrite:spool", "pwrite:log"),
}


def _job(seeds: range) -> Findings:
    logging.disable(logging.CRITICAL)
    findings = Findings()
    for seed in seeds:
        findings.add(search(seed, Durability.OS if seed % 3 == 0 else Durability.FSYNC))
    return findings


def test_ten_thousand_crash_points(capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings()
    context = multiprocessing.get_context("spawn")
    jobs = (range(at, at + SEEDS_PER_JOB) for at in range(1, 1_000_000, SEEDS_PER_JOB))
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        while findings.points < CRASHES and not findings.broken:
            for result in pool.map(_job, [next(jobs) for _ in range(4)]):
                findings.add(result)
    with capsys.disabled():
        print(f"\n{findings.points} crash points, {findings.checks} crashes; states by kind:")
        for kind, count in sorted(findings.kinds.items()):
            print(f"  {count:6} {kind}")
        print("  at " + ", ".join(f"{site} {count}" for site, count in sorted(findings.sites.items())))
        print("  decisions: " + ", ".join(f"{name} {n}" for name, n in sorted(findings.decisions.items())))
    assert not findings.broken, "\n".join([*findings.broken[:10], findings.first])
    assert findings.points >= CRASHES
    # What the search is for must have been met: else it proves less than it says.
    kinds = " ".join(findings.kinds)
    for mark in ("fsync, power: replays", "torn tail", "unknown kept", "unknown lost", "os, process"):
        assert mark in kinds, f"no state of kind {mark!r} was met"
    for site in ("rename:snapshot", "unlink:snapshot", "rename:log", "rename:spool", "rename:fragment"):
        assert findings.sites[site], f"no crash at {site}"
    for decision in ("append OK", "append AppendAborted", "delete OK", "barrier OK"):
        assert any(decision in name for name in findings.decisions), f"no decision {decision!r} was met"


def _detects(mutations: Mutations, seeds: range, *, every: int = 1) -> bool:
    logging.disable(logging.CRITICAL)
    try:
        return any(
            search(
                seed,
                Durability.FSYNC,
                mutations=mutations,
                stop_at_first=True,
                outcomes=2,
                lives=2,
                every=every,
            ).broken
            for seed in seeds
        )
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("site", SYNCS)
def test_each_sync_is_needed(site: str) -> None:
    mutations = Mutations()
    mutations.skip_sync(site)
    assert _detects(mutations, range(1, 30)), f"nobody noticed that {site} does nothing"


def test_every_sync_is_among_them() -> None:
    """A sync at a new site must be added above, and so be shown to be needed."""
    seen: set[str] = set()
    for seed in range(1, 5):
        disk = new_disk(seed)
        EngineRun(seed, Durability.FSYNC, disk).run()
        seen |= set(disk.sync_sites_seen)
    assert seen <= set(SYNCS)
    assert len(seen) >= len(SYNCS) - 2  # the quarantine is met only after a torn tail


@pytest.mark.parametrize("first", WRITES)
@pytest.mark.parametrize("second", [*WRITES, *RENAMES, "fdatasync:log"])
def test_no_two_writes_can_be_swapped(first: str, second: str) -> None:
    mutations = Mutations()
    mutations.delay_write(first, until_after=second)
    noticed = _detects(mutations, range(1, 4 if (first, second) in HARMLESS else 12), every=2)
    assert noticed is ((first, second) not in HARMLESS)


def _trace(seed: int, durability: Durability) -> list[str]:
    findings = search(seed, durability, every=10_000, keep_traces=True)
    assert not findings.broken
    return [line for trace in findings.traces for line in trace]


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS])
def test_a_seed_replays_exactly(durability: Durability) -> None:
    one, two = _trace(77, durability), _trace(77, durability)
    assert one == two
    assert any(" pwrite " in line for line in one)
    assert any(line.startswith("append ") for line in one)
    assert sum(line.startswith("content ") for line in one) == 3
    assert _trace(78, durability) != one


@pytest.mark.soak
@pytest.mark.parametrize("job", range(0, 400, 4))
def test_soak(job: int) -> None:
    findings = _job(range(10_000 + job, 10_004 + job))
    assert not findings.broken, "\n".join([*findings.broken[:10], findings.first])

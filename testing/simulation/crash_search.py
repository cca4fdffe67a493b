"""Searching an engine's crash points: every file call of many seeded runs, and of runs that follow a crash.

Each seed is a chain of lives: a fresh engine, then one opened on what a crash at a random point of the life before
left, and so on, so that recovery's own file calls are among the crash points. At each point several crashes are
checked (`engine_model.check`).
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass, field

from broadsheet.engine.engine import Durability, EngineOptions
from broadsheet.engine.errors import BroadsheetError
from broadsheet.testing.simulation.disk import CrashKind, Mutations
from broadsheet.testing.simulation.engine_model import (
    CrashPoint,
    EngineRun,
    History,
    HookedDisk,
    Violation,
    check,
    new_disk,
)

__all__ = ["Findings", "search"]


@dataclass(slots=True)
class Findings:
    """points: crash points met. checks: crashes tried. kinds: distinct states by kind, with counts. broken: one line
    per broken promise, the seed and point in it; `first` is the first one's traceback."""

    points: int = 0
    checks: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    first: str = ""
    traces: list[list[str]] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.points += other.points
        self.checks += other.checks
        self.kinds += other.kinds
        self.sites += other.sites
        self.decisions += other.decisions
        self.broken += other.broken
        self.first = self.first or other.first


def search(
    seed: int,
    durability: Durability,
    *,
    lives: int = 3,
    steps: int = 10,
    every: int = 1,
    outcomes: int = 1,
    mutations: Mutations | None = None,
    options: EngineOptions | None = None,
    stop_at_first: bool = False,
    keep_traces: bool = False,
) -> Findings:
    """Check every `every`-th crash point of one seed's chain of lives, power cuts with `outcomes` results each."""
    findings = Findings()
    rng = random.Random(f"search {seed}")
    history = History()
    disk = new_disk(seed)
    if mutations is not None:
        disk.mutations = mutations
    now_ns = 1_700_000_000_000_000_000
    for life in range(lives):
        points: list[CrashPoint] = []

        def note(site: str, disk: HookedDisk = disk, points: list[CrashPoint] = points) -> None:
            points.append(CrashPoint(disk.clone(), len(history.events), site, disk.calls + 1))

        disk.on_effect = note
        run = EngineRun(seed * 10 + life, durability, disk, history, steps=steps, options=options, now_ns=now_ns)
        try:
            run.run()
        except (BroadsheetError, Violation, BaseExceptionGroup) as error:
            _report(findings, f"seed {seed} life {life}", error)
            return findings
        finally:
            disk.on_effect = None
        now_ns += 3600 * 10**9
        findings.decisions += run.decisions
        if keep_traces:
            findings.traces.append(disk.trace)
        for number, point in enumerate(points):
            findings.points += 1
            if (number + seed) % every:
                continue
            kinds: list[CrashKind] = ["process"]
            if durability is Durability.FSYNC:
                kinds += ["power"] * outcomes
            elif number % 4 == 0:
                kinds += ["power"]
            for attempt, kind in enumerate(kinds):
                findings.checks += 1
                try:
                    found = check(point, history, durability, kind, seed * 1000 + attempt, options)
                except (BroadsheetError, Violation, BaseExceptionGroup, OSError, ValueError) as error:
                    _report(findings, f"seed {seed} life {life} call {point.number} {point.site} {kind}", error)
                    if stop_at_first:
                        return findings
                else:
                    findings.kinds[f"{durability.value}, {kind}: {found.kind}"] += 1
                    findings.sites[point.site] += 1
        if life + 1 < lives:
            point = rng.choice(points)
            kind = rng.choice(("process", "power")) if durability is Durability.FSYNC else "process"
            survived = point.disk.crash(rng, kind)
            assert isinstance(survived, HookedDisk)
            disk = survived
            del history.events[point.seen :]
    return findings


def _report(findings: Findings, where: str, error: BaseException) -> None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    findings.broken.append(f"{where}: {type(error).__name__}: {error}")
    if not findings.first:
        findings.first = "".join(traceback.format_exception(error))

"""Fail at call n, then at n + 1, …: every file call of a workload fails once, in every way it can.

Two lives of an engine, from a missing folder to a close after a restart, run once without a fault to learn their file
calls; then once per call, with that call failing. Whatever it hits, only documented errors come out, nothing hangs,
no task and no file stays behind, the engine goes on as far as it says, and the next open finds what was acknowledged
and nothing of what was reported as rolled back.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import trio
from trio._core._run import GLOBAL_RUN_CONTEXT

from broadsheet.engine.engine import Durability, Engine
from broadsheet.engine.errors import (
    BroadsheetError,
    EngineWritesFailed,
    OutcomeUnknown,
    Status,
    StatusError,
    StorageError,
)
from broadsheet.engine.handles import Journal
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.labels import Label, LabelSet
from broadsheet.engine.service import AppendRequest, ApplyRequest, ListRequest
from broadsheet.testing.simulation import SimulatedDisk, SimulatedFile, SimulatedRuntime, run_simulated
from broadsheet.testing.simulation.engine_model import (
    CrashPoint,
    History,
    check,
    classify,
    content_of,
    parse_content,
    small_options,
)

FOLDER = "/disk/engine"
SHOWN = 30

# Calls that can meet a full disk. `exists` never fails on a real one (it answers False), nor does giving up a lock.
NEED_SPACE = ("create", "pwrite", "rename", "make_dirs", "fdatasync", "sync_dir", "truncate")
NEVER_FAIL = ("exists", "unlock")
EFFECTS = ("create", "pwrite", "rename", "unlink", "make_dirs")


class WatchedDisk(SimulatedDisk):
    """Remembers the handles it gave out."""

    handles: list[SimulatedFile]

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        return self._remember(super().open(path, create=create))

    def open_read(self, path: str) -> SimulatedFile:
        return self._remember(super().open_read(path))

    def _remember(self, file: SimulatedFile) -> SimulatedFile:
        self.handles = [*getattr(self, "handles", []), file]
        return file

    def left_open(self) -> list[str]:
        return [handle.path for handle in getattr(self, "handles", []) if handle._open]


def new_disk() -> WatchedDisk:
    return WatchedDisk(random.Random(7), classify=classify)


@contextmanager
def no_hang(seconds: float = 10.0) -> Iterator[None]:
    """A run that hangs where nothing can cancel it is ended by a signal."""

    rung = []

    def ring(*_: object) -> None:
        rung.append(True)
        raise TimeoutError("the run hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if rung:
            GLOBAL_RUN_CONTEXT.__dict__.clear()  # the run that was shot must not keep others from running


# --- The workload -----------------------------------------------------------------------------------------


def spec_of(name: str) -> JournalSpec:
    return JournalSpec(
        name,
        1,
        LabelSet((Label("generation", "1"),)),
        FragmentSpec(
            1024,
            CompressionCodec.SNAPPY if name.endswith("snappy") else CompressionCodec.NONE,
            ("file:///",) if name.startswith("stored/") else (),
            10**9,
        ),
        max_append_rate=1 << 20 if name.startswith("held/") else 0,  # then every append streams into the spool
    )


NAMES = ("plain/one", "stored/raw", "stored/snappy", "held/slow")
FIRST_LIFE = {
    "plain/one": (40, 200, 700, 330, 90),
    "stored/raw": (700, 400, 500),
    "stored/snappy": (200, 900, 300),
    "held/slow": (900, 300),
}
SECOND_LIFE = dict.fromkeys(NAMES, (100, 1000))


@dataclass
class Run:
    """The lives of an engine on one disk, and what its user saw."""

    durability: Durability
    disk: WatchedDisk
    history: History = field(default_factory=History)
    problems: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    created: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    unknown_creates: set[str] = field(default_factory=set)
    next_id: int = 1
    writes_failed: bool = False
    points: list[CrashPoint] = field(default_factory=list)

    def lives(self, *, check_handles: bool = True) -> None:
        for number, appends in enumerate((FIRST_LIFE, SECOND_LIFE)):
            self.writes_failed = False
            with no_hang():
                run_simulated(self._life, number, appends, seed=number)
            if check_handles and self.disk.left_open():
                self.problems.append(f"life {number}: files left open: {sorted(self.disk.left_open())}")
                self.disk.handles = []

    async def _life(self, number: int, appends: dict[str, tuple[int, ...]]) -> None:
        runtime = SimulatedRuntime(1, self.disk, now_ns=1_700_000_000_000_000_000 + number * 3600 * 10**9)
        tasks = trio.lowlevel.current_statistics().tasks_living
        try:
            with trio.fail_after(10_000):
                engine = Engine.open(FOLDER, durability=self.durability, options=small_options(), runtime=runtime)
                async with engine:
                    await self._work(engine, appends)
        except BaseException as error:
            self._note(error, f"life {number}")
        if trio.lowlevel.current_statistics().tasks_living != tasks:
            self.problems.append(f"life {number}: tasks were left behind")

    async def _work(self, engine: Engine, appends: dict[str, tuple[int, ...]]) -> None:
        for name in NAMES:
            if name not in self.created:
                await self._create(engine, name)
        async with trio.open_nursery() as nursery:
            for name, lengths in appends.items():
                nursery.start_soon(self._append_all, engine, name, lengths[0::2])
                nursery.start_soon(self._append_all, engine, name, lengths[1::2])
        await trio.sleep(200)  # simulated: spools are persisted, what failed is tried again
        problem = engine.ready_problem()
        if problem is not None and "an earlier write failed" in problem:
            self.writes_failed = True  # by a record that nobody waited for
        elif problem is not None:
            self.problems.append(f"not ready long after a fault that is gone: {problem}")
        for name in sorted(self.created):
            await self._read(engine, name)
        await self._try("list", lambda: engine.list(ListRequest()))
        if self.writes_failed:
            await self._after_writes_failed(engine)

    async def _append_all(self, engine: Engine, name: str, lengths: tuple[int, ...]) -> None:
        if name in self.created:
            for length in lengths:
                refused = await self._append(engine, name, length)
                if refused and not await self._append_until_accepted(engine, name):
                    self.problems.append(f"{name} does not go on after a fault that is gone")

    async def _append_until_accepted(self, engine: Engine, name: str) -> bool:
        """A fault strikes once: after it the journal goes on."""
        return not await self._append(engine, name, 60) or self.writes_failed

    async def _create(self, engine: Engine, name: str) -> None:
        for _ in range(2):
            self.history.add("creating", name, 1)
            try:
                with trio.fail_after(1000):
                    response = await engine.apply(ApplyRequest((JournalChange(0, spec_of(name)),)))
            except BaseException as error:
                self._note(error, f"create {name}")
                if isinstance(error, StorageError):
                    self.refused.add(name)
                    if await self._is_listed(engine, name):
                        self.problems.append(f"{name} was refused and is listed")
                    continue
                if isinstance(error, OutcomeUnknown):
                    self.unknown_creates.add(name)
                    self.writes_failed = True
                return
            known_unknown = response.status == Status.ETCD_TRANSACTION_FAILED and name in self.unknown_creates
            if response.status != Status.OK and not known_unknown:
                self.problems.append(f"create {name}: {response.status.name}")
            self.refused.discard(name)
            self.created.add(name)
            self.history.add("created", name, 1)
            self.history.add("revision", "", 0, 0, response.header.etcd.revision)
            return
        self.problems.append(f"{name} cannot be created after a fault that is gone")

    async def _is_listed(self, engine: Engine, name: str) -> bool:
        return name in [it.spec.name for it in (await engine.list(ListRequest())).journals]

    async def _append(self, engine: Engine, name: str, length: int) -> bool:
        """True if it was refused."""
        id_, self.next_id = self.next_id, self.next_id + 1
        registers = LabelSet((Label("last", str(id_)),)) if id_ % 3 == 0 else None
        content = content_of(id_, length)
        self.history.add("send", name, 1, id_, begin=1 if registers else 0)

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, length, 400):
                await trio.lowlevel.checkpoint()
                yield content[at : at + 400]

        try:
            with trio.fail_after(1000):
                request = AppendRequest(name, union_registers=registers)
                response = await engine.append(request, body() if id_ % 2 else content)
        except BaseException as error:
            self._note(error, f"append {id_} to {name}")
            if not isinstance(error, OutcomeUnknown):
                self.history.add("rolled_back", name, 1, id_)
            if isinstance(error, OutcomeUnknown | EngineWritesFailed):
                self.writes_failed = True
            self._keep_point("the first error")
            return True
        if response.status == Status.OK:
            assert response.commit is not None
            self.history.add("ack", name, 1, id_, response.commit.begin, response.commit.end)
            if self.points:
                self._keep_point("the first append after the first error")
            return False
        self.errors.append(f"append: {response.status.name}")
        self.history.add("rolled_back", name, 1, id_)
        return True

    def _keep_point(self, what: str) -> None:
        """The machine may stop right here, too."""
        if what not in [point.site for point in self.points]:
            self.points.append(CrashPoint(self.disk.clone(), len(self.history.events), what, self.disk.calls))

    async def _read(self, engine: Engine, name: str) -> None:
        for attempt in range(2):
            content = await self._try(f"read {name}", lambda: Journal(engine, name).read())
            if isinstance(content, bytes):
                break
            if attempt:
                self.problems.append(f"{name} cannot be read after a fault that is gone")
                return
        assert isinstance(content, bytes)
        model = self.history.model(len(self.history.events))[0][name][1]
        present = {id_: (begin, end) for id_, begin, end in parse_content(content, name)}
        for id_, place in model.acknowledged.items():
            if present.get(id_) != place:
                self.problems.append(f"{name}: append {id_}, acknowledged at {place}, reads as {present.get(id_)}")
        for id_ in model.rolled_back & present.keys():
            self.problems.append(f"{name}: append {id_} was rolled back and can be read")

    async def _after_writes_failed(self, engine: Engine) -> None:
        """Writes are refused, each with the same error; the rest goes on, and /debug/ready will say so."""
        if not engine.ready_problem():
            self.problems.append("writes have failed and the engine calls itself ready")
        for name in sorted(self.created):
            with pytest.raises(EngineWritesFailed), trio.fail_after(1000):
                await engine.append(AppendRequest(name), b"more")
        with pytest.raises(EngineWritesFailed), trio.fail_after(1000):
            await engine.apply(ApplyRequest((JournalChange(0, spec_of("plain/late")),)))

    async def _try(self, what: str, call: Callable[[], Awaitable[object]]) -> object:
        try:
            with trio.fail_after(1000):
                return await call()
        except BaseException as error:
            self._note(error, what)
            return None

    def _note(self, error: BaseException, what: str) -> None:
        """Documented errors are counted, all others are problems."""
        if isinstance(error, BroadsheetError) and type(error).__module__ == "broadsheet.engine.errors":
            self.errors.append(f"{what.split(maxsplit=1)[0]}: {type(error).__name__}")
            if not str(error):
                self.problems.append(f"{what}: an error without a text")
            return
        if isinstance(error, StatusError):
            return
        if isinstance(error, TimeoutError):
            raise error
        at = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
        self.problems.append(f"{what}: {type(error).__name__}: {error} (at {at})")

    # --- Afterwards

    def verify(self) -> None:
        """What the next open finds, after the ways in which the machine may stop now."""
        self.disk.clear_faults()
        self._keep_point("the end")
        kinds = ("process", "power") if self.durability is Durability.FSYNC else ("process",)
        for kind in kinds:
            for point in self.points:
                try:
                    with no_hang():
                        check(point, self.history, self.durability, kind, 3)
                        if point.site == "the end":
                            run_simulated(self._goes_on, point.disk.crash(random.Random(5), kind))
                except Exception as error:
                    while isinstance(error, BaseExceptionGroup):
                        error = error.exceptions[0]
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    self.problems.append(f"{kind} at {point.site}: {type(error).__name__}: {error} (at {at})")

    async def _goes_on(self, disk: SimulatedDisk) -> None:
        engine = Engine.open(
            FOLDER, durability=self.durability, options=small_options(), runtime=SimulatedRuntime(4, disk)
        )
        async with engine:
            listed = [it.spec.name for it in (await engine.list(ListRequest())).journals]
            for name in self.refused - self.created - self.unknown_creates:
                if name in listed:
                    self.problems.append(f"{name} was refused and is there after a restart")
            for name in sorted(self.created):
                begin = await Journal(engine, name).head()
                commit = await Journal(engine, name).append(b"x" * 500)
                if commit.begin != begin or await Journal(engine, name).read(begin) != b"x" * 500:
                    self.problems.append(f"{name} does not go on after a restart")


_baselines: dict[Durability, list[str]] = {}


def baseline(durability: Durability) -> list[str]:
    """The operation and file of every call of the run in which none fails: call n is at index n - 1."""
    if durability not in _baselines:
        run = Run(durability, new_disk())
        run.lives()
        run.verify()
        assert run.problems == []
        assert run.errors == []
        calls = [line.split(" ", 1)[1] for line in run.disk.trace if line.split(" ", 1)[0].isdigit()]
        assert len(calls) == run.disk.calls
        _baselines[durability] = calls
    return _baselines[durability]


def fail_each(durability: Durability, number: int, *, partial: bool, among: tuple[str, ...] | None) -> None:
    problems: list[tuple[str, str]] = []
    met: set[str] = set()
    tried = 0
    for n, line in enumerate(baseline(durability), start=1):
        operation = line.split()[0]
        if operation in NEVER_FAIL or (among is not None and operation not in among):
            continue
        tried += 1
        run = Run(durability, new_disk())
        run.disk.fail_at(n, OSError(number, os.strerror(number)), partial=partial)
        try:
            # A handle whose close failed counts as open.
            run.lives(check_handles=operation != "close")
        except BaseException as error:
            run.problems.append(f"{type(error).__name__}: {error}")
        else:
            run.verify()
        met.update(run.errors)
        problems += [(f"call {n} ({line})", problem) for problem in run.problems]
    print(f"{durability.value} {errno.errorcode[number]}: {tried} calls failed; met: {', '.join(sorted(met))}")
    assert tried > 50
    assert any("StorageError" in error for error in met)
    assert not problems, summary(problems)


def summary(problems: list[tuple[str, str]]) -> str:
    """Problems that differ in numbers and names alone are told once, with the first call that led there."""
    kinds: dict[str, list[str]] = {}
    for call, problem in problems:
        kinds.setdefault(re.sub(r"(plain|held|stored)/\w+|\d+", "#", problem), []).append(f"{call}: {problem}")
    lines = [f"{len(found)} x e.g. {found[0]}" for found in kinds.values()]
    return f"{len(problems)} problems of {len(kinds)} kinds:\n" + "\n".join(lines[:SHOWN])


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of faults are thousands of warnings."""
    caplog.set_level(logging.CRITICAL, "broadsheet.engine")


MODES = [Durability.FSYNC, Durability.OS]


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_every_call_meets_an_io_error(durability: Durability) -> None:
    fail_each(durability, errno.EIO, partial=False, among=None)


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
def test_every_call_that_needs_space_meets_a_full_disk(durability: Durability) -> None:
    fail_each(durability, errno.ENOSPC, partial=False, among=NEED_SPACE)


@pytest.mark.parametrize("durability", MODES, ids=lambda it: it.value)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_every_change_is_made_in_part_and_then_fails(durability: Durability, number: int) -> None:
    """Part of a write is written; another change is made, and reported as failed."""
    fail_each(durability, number, partial=True, among=EFFECTS)

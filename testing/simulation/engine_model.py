"""A workload for an engine on a simulated disk, and the model that every crash of it is held against.

`EngineRun` drives an engine (the one that `serve` runs) with appends, aborts, cancellations, rolls, register and spec
changes, restarts; each step that a user could see goes into `History`. A `CrashPoint` is the disk as it stood before
one file call, and how long the history was then. `check` opens an engine on what a crash leaves of that disk and
compares:

* every acknowledged append is there, at its range; every append that was reported as rolled back is not;
* every other one is there whole, once, or not at all; nothing else is there;
* registers are those of the last append that is there; the revision has not gone back; specs are those acknowledged;
* what a store lists is named after its content.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import trio

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.errors import (
    AppendAborted,
    AppendFailed,
    BroadsheetError,
    OutcomeUnknown,
    Status,
)
from broadsheet.engine.fragments.store import FileStore
from broadsheet.engine.handles import Journal
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.labels import Label, LabelSet
from broadsheet.engine.service import AppendRequest, ApplyRequest, ListRequest
from broadsheet.testing.simulation.disk import CrashKind, SimulatedDisk
from broadsheet.testing.simulation.runtime import SimulatedRuntime, run_simulated

__all__ = ["CrashPoint", "EngineRun", "History", "HookedDisk", "Violation", "check", "small_options"]

FOLDER = "/disk/engine"
HEADER_BYTES = 14


class Violation(AssertionError):
    """A promise was broken."""


def small_options() -> EngineOptions:
    """Limits so small that a few dozen appends rotate, checkpoint and recycle the log, and use both ways that
    content goes (into the log, and into the spool alone)."""
    return EngineOptions(inline_bytes=300, log_file_bytes=4096, checkpoint_log_bytes=3000, checkpoint_spool_bytes=6000)


# --- What was seen ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class JournalModel:
    """One journal of one generation (its creation). `unknown` may or may not be in it."""

    generation: int
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    rolled_back: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    setting: set[int] = field(default_factory=set)
    created: bool = False
    deleting: bool = False
    deleted: bool = False


Event = tuple[str, str, int, int, int, int]
"""(what, journal, generation, append id, begin, end); unused ones are 0. Of `send`, begin is 1 if the append sets
the register `last` to its id."""


class History:
    """Events in the order in which a user saw them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, what: str, journal: str, generation: int = 0, id_: int = 0, begin: int = 0, end: int = 0) -> None:
        self.events.append((what, journal, generation, id_, begin, end))

    def model(self, length: int) -> tuple[dict[str, dict[int, JournalModel]], int]:
        """(journals by name and generation, the highest revision seen) after the first `length` events."""
        journals: dict[str, dict[int, JournalModel]] = {}
        revision = 0
        for what, name, generation, id_, begin, end in self.events[:length]:
            if what == "revision":
                revision = max(revision, begin)
                continue
            journal = journals.setdefault(name, {}).setdefault(generation, JournalModel(generation))
            if what == "creating":
                pass
            elif what == "created":
                journal.created = True
            elif what == "deleting":
                journal.deleting = True
            elif what == "deleted":
                journal.deleted = True
            elif what == "send":
                journal.unknown.add(id_)
                if begin:
                    journal.setting.add(id_)
            elif what == "ack":
                journal.unknown.discard(id_)
                journal.acknowledged[id_] = (begin, end)
            elif what == "rolled_back":
                journal.unknown.discard(id_)
                journal.rolled_back.add(id_)
        return journals, revision


def content_of(id_: int, length: int) -> bytes:
    """An append's content: tells its id and length, and is like no other's."""
    filler = hashlib.sha256(b"%d" % id_).digest() * (length // 32 + 1)
    return b"%08x%06x" % (id_, length) + filler[: length - HEADER_BYTES]


def parse_content(content: bytes, name: str) -> list[tuple[int, int, int]]:
    """(id, begin, end) of the whole appends that content consists of. Raises `Violation` for anything else."""
    found = []
    at = 0
    while at < len(content):
        try:
            id_, length = int(content[at : at + 8], 16), int(content[at + 8 : at + 14], 16)
        except ValueError:
            raise Violation(f"{name}: no append begins at {at}: {content[at : at + 20]!r}") from None
        if content[at : at + length] != content_of(id_, length):
            raise Violation(f"{name}: append {id_} at {at} is torn")
        found.append((id_, at, at + length))
        at += length
    return found


# --- The disk, watched ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The machine just before one file call: `disk` as it stands, `seen` events of the history long."""

    disk: SimulatedDisk
    seen: int
    site: str
    number: int


class HookedDisk(SimulatedDisk):
    """Tells of each call that changes something, before it does."""

    on_effect: Callable[[str], None] | None = None

    def _begin(self, operation: str, kind: str, relative: str, detail: str = "", **position: int):  # type: ignore[no-untyped-def]
        if self.on_effect is not None and operation not in ("pread", "open", "open_read", "exists", "list_dir", "size"):
            self.on_effect(f"{operation}:{kind}")
        return super()._begin(operation, kind, relative, detail, **position)


def classify(path: str) -> str:
    """Classes of files whose syncs and writes are different promises."""
    if path.endswith((".snapshot", ".snapshot.tmp")):
        return "snapshot"
    for part, kind in (
        ("/log/", "log"),
        ("/spools/", "spool"),
        ("/fragments", "fragment"),
        ("/quarantine", "quarantine"),
        ("identity.json", "identity"),
    ):
        if part in f"/{path}/":
            return kind
    return "folder"


def new_disk(seed: int) -> HookedDisk:
    return HookedDisk(random.Random(f"disk {seed}"), classify=classify)


# --- The workload -----------------------------------------------------------------------------------------


class EngineRun:
    """One life of an engine, from open to close, by one seed. `history` and `next_id` go on over several."""

    def __init__(
        self,
        seed: int,
        durability: Durability,
        disk: SimulatedDisk,
        history: History | None = None,
        *,
        steps: int = 12,
        workers: int = 3,
        options: EngineOptions | None = None,
        now_ns: int = 1_700_000_000_000_000_000,
    ) -> None:
        self.seed = seed
        self.durability = durability
        self.disk = disk
        self.history = history if history is not None else History()
        self.rng = random.Random(f"run {seed}")
        self.runtime = SimulatedRuntime(seed, disk, now_ns=now_ns)
        self.options = options or small_options()
        self.steps = steps
        self.workers = workers
        self.decisions: Counter[str] = Counter()
        self.next_id = 1 + sum(1 for event in self.history.events if event[0] == "send")
        self._generations: dict[str, int] = {}
        self._under_way: Counter[str] = Counter()
        self._deleting = False

    def run(self) -> None:
        run_simulated(self.main, seed=self.seed)

    def trace(self, line: str) -> None:
        self.disk.trace.append(line)

    async def main(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 2))):  # restarts in which nothing happens
            async with Engine.open(
                FOLDER, durability=self.durability, options=self.options, runtime=self.runtime
            ):
                pass
        engine = Engine.open(FOLDER, durability=self.durability, options=self.options, runtime=self.runtime)
        async with engine:
            await self._absorb(engine)
            names = ["plain/one", "plain/two", "stored/raw", "stored/snappy", "held/slow"]
            for name in names:
                if name not in self._generations:
                    await self._create(engine, name)
            async with trio.open_nursery() as nursery:
                for number in range(self.workers):
                    nursery.start_soon(self._worker, engine, names, number)
        digest = hashlib.sha256()
        for path in sorted(self.disk.walk()):
            digest.update(path.encode() + self.disk.content(path))
        self.trace(f"content {digest.hexdigest()}")

    async def _absorb(self, engine: Engine) -> None:
        """What is there after a restart stays there; what is not, stays away."""
        journals, _ = self.history.model(len(self.history.events))
        listed = {it.spec.name: _generation_of(it.spec) for it in (await engine.list(ListRequest())).journals}
        self._generations = dict(listed)
        for name, generations in journals.items():
            for generation, model in generations.items():
                if listed.get(name) != generation:
                    self.history.add("deleting", name, generation)
                    self.history.add("deleted", name, generation)
                    continue
                self.history.add("created", name, generation)
                present = {id_: (b, e) for id_, b, e in parse_content(await Journal(engine, name).read(), name)}
                for id_ in sorted(model.unknown):
                    if id_ in present:
                        self.history.add("ack", name, generation, id_, *present[id_])
                    else:
                        self.history.add("rolled_back", name, generation, id_)

    async def _create(self, engine: Engine, name: str) -> None:
        generation = 1 + max((event[2] for event in self.history.events if event[1] == name), default=0)
        spec = _spec(name, generation)
        self.history.add("creating", name, generation)
        response = await engine.apply(ApplyRequest((JournalChange(0, spec),)))
        if response.status == Status.OK:
            self._generations[name] = generation
            self.history.add("created", name, generation)
            self.history.add("revision", "", 0, 0, response.header.etcd.revision)

    async def _worker(self, engine: Engine, names: list[str], number: int) -> None:
        rng = self.rng
        for _ in range(self.steps):
            name = rng.choice(names)
            choice = rng.random()
            if choice < 0.6:
                await self._append(engine, name, rng.choice((20, 40, 90, 200, 330, 700)))
            elif choice < 0.7:
                await self._append_streamed(engine, name, rng.randint(20, 1500), rng.random() < 0.4)
            elif choice < 0.78:
                with trio.move_on_after(0):
                    await trio.lowlevel.checkpoint()
                    await self._append(engine, name, 50)
            elif choice < 0.84:
                await self._barrier(engine, name)
            elif choice < 0.9:
                await trio.sleep(rng.random())
            elif choice < 0.95 and name in ("plain/two", "plain/one"):
                await self._delete_and_create(engine, name)
            else:
                await self._change_spec(engine, name)

    async def _append(self, engine: Engine, name: str, length: int) -> None:
        generation = self._generations.get(name)
        if generation is None:
            return
        id_, self.next_id = self.next_id, self.next_id + 1
        registers = None
        if id_ % 3 == 0:
            registers = LabelSet((Label("last", str(id_)),))
        self.history.add("send", name, generation, id_, begin=1 if registers else 0)
        request = AppendRequest(name, union_registers=registers)
        await self._outcome(engine, request, content_of(id_, length), name, generation, id_)

    async def _append_streamed(self, engine: Engine, name: str, length: int, aborts: bool) -> None:
        generation = self._generations.get(name)
        if generation is None:
            return
        id_, self.next_id = self.next_id, self.next_id + 1
        whole = content_of(id_, length)

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, len(whole), 400):
                yield whole[at : at + 400]
                await trio.lowlevel.checkpoint()
                if aborts and at:
                    raise AppendAborted("the client went away")

        self.history.add("send", name, generation, id_)
        await self._outcome(engine, AppendRequest(name), body(), name, generation, id_)

    async def _outcome(
        self,
        engine: Engine,
        request: AppendRequest,
        content: bytes | AsyncIterator[bytes],
        name: str,
        generation: int,
        id_: int,
    ) -> None:
        self._under_way[name] += 1
        try:
            response = await engine.append(request, content)
        except (AppendAborted, AppendFailed) as error:
            self.history.add("rolled_back", name, generation, id_)
            self._decided(f"append {name} {id_} {type(error).__name__}")
        except OutcomeUnknown as error:
            self._decided(f"append {name} {id_} {type(error).__name__}")
        except BroadsheetError as error:
            self.history.add("rolled_back", name, generation, id_)
            self._decided(f"append {name} {id_} {type(error).__name__}")
        else:
            if response.status == Status.OK:
                assert response.commit is not None
                self.history.add("ack", name, generation, id_, response.commit.begin, response.commit.end)
            else:
                self.history.add("rolled_back", name, generation, id_)
            self._decided(f"append {name} {id_} {response.status.name} {response.commit and response.commit.end}")
        finally:
            self._under_way[name] -= 1

    async def _barrier(self, engine: Engine, name: str) -> None:
        response = await engine.append(AppendRequest(name))
        self._decided(f"barrier {name} {response.status.name}")

    async def _delete_and_create(self, engine: Engine, name: str) -> None:
        generation = self._generations.get(name)
        if generation is None or self._deleting:
            return
        self._deleting = True
        self.history.add("deleting", name, generation)
        response = await engine.apply(ApplyRequest((JournalChange(-1, None, name),)))
        self._decided(f"delete {name} {response.status.name}")
        if response.status == Status.OK:
            self.history.add("deleted", name, generation)
            self.history.add("revision", "", 0, 0, response.header.etcd.revision)
        # Appends were sent all the while; none of them may meet the next generation, which has the same name.
        self._generations.pop(name, None)
        while self._under_way[name]:
            await trio.lowlevel.checkpoint()
        await self._create(engine, name)
        self._deleting = False

    async def _change_spec(self, engine: Engine, name: str) -> None:
        listed = (await engine.list(ListRequest())).journals
        found = next((it for it in listed if it.spec.name == name), None)
        if found is None:
            return
        response = await engine.apply(ApplyRequest((JournalChange(found.mod_revision, found.spec),)))
        self._decided(f"apply {name} {response.status.name}")
        if response.status == Status.OK:
            self.history.add("revision", "", 0, 0, response.header.etcd.revision)

    def _decided(self, line: str) -> None:
        self.decisions[" ".join(word for word in line.split() if word.isalpha())] += 1
        self.trace(line)


def _spec(name: str, generation: int) -> JournalSpec:
    stored = name.startswith("stored/")
    codec = CompressionCodec.SNAPPY if name.endswith("snappy") else CompressionCodec.NONE
    return JournalSpec(
        name,
        1,
        LabelSet((Label("generation", str(generation)),)),
        FragmentSpec(1024, codec, ("file:///",) if stored else (), 10**9),
        max_append_rate=10**6 if name == "held/slow" else 0,  # its appends stream while they hold the journal
    )


def _generation_of(spec: JournalSpec) -> int:
    return int(spec.labels.value("generation") or 0)


# --- The check --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """What a check met, for counting distinct kinds of states."""

    replayed: int = 0
    quarantined: bool = False
    rewritten: bool = False
    unknown_kept: bool = False
    unknown_lost: bool = False

    @property
    def kind(self) -> str:
        marks = [
            "replays" if self.replayed else "nothing to replay",
            "torn tail" if self.quarantined else "",
            "unknown kept" if self.unknown_kept else "",
            "unknown lost" if self.unknown_lost else "",
        ]
        return ", ".join(mark for mark in marks if mark)


def check(
    point: CrashPoint,
    history: History,
    durability: Durability,
    kind: CrashKind,
    seed: int,
    options: EngineOptions | None = None,
) -> Found:
    """Crash at this point in this way, restart, compare. Raises `Violation`, or what opening raises."""
    disk = point.disk.crash(random.Random(f"crash {seed} {point.number} {kind}"), kind)
    promised = durability is Durability.FSYNC or kind == "process"
    journals, revision = history.model(point.seen)
    found = Found()

    async def main() -> None:
        runtime = SimulatedRuntime(seed, disk)
        engine = Engine.open(FOLDER, durability=durability, options=options or small_options(), runtime=runtime)
        async with engine:
            if promised and engine.coordinator.revision < revision:
                raise Violation(f"the revision went back from {revision} to {engine.coordinator.revision}")
            listed = {it.spec.name: it for it in (await engine.list(ListRequest())).journals}
            for name, generations in journals.items():
                for model in generations.values():
                    there = name in listed and _generation_of(listed[name].spec) == model.generation
                    if promised and model.created and not model.deleting and not there:
                        raise Violation(f"{name} was created and is gone")
                    if promised and model.deleted and there:
                        raise Violation(f"{name} was deleted and is back")
                    if there:
                        await _check_journal(engine, name, model, promised, found)
            store = engine.store("file:///")
            assert isinstance(store, FileStore)
            for name in ("stored/raw", "stored/snappy"):
                for fragment in store.list(name):
                    content = b"".join(store.read(fragment, fragment.begin))
                    if hashlib.sha1(content).digest() != fragment.sum:
                        raise Violation(f"{fragment.content_path} is not what its name says")
            found.replayed = engine.recovered_records
            if engine.quarantined:
                found.quarantined = True
                _check_kept(engine.quarantined, disk, seed)

    run_simulated(main, seed=seed)
    if seed % 3 == 0:  # what a recovery found, the next one finds
        run_simulated(main, seed=seed)
    return found


def _check_kept(paths: tuple[str, ...], disk: SimulatedDisk, seed: int) -> None:
    """What recovery says it kept aside must survive another power cut: the originals are overwritten."""
    after = disk.clone().crash(random.Random(seed), "power")
    kept = set(after.walk())
    for path in paths:
        relative = path.removeprefix("/disk/")
        if relative not in kept or after.content(relative) != disk.content(relative):
            raise Violation(f"{relative} was kept aside, and did not survive a power cut")


async def _check_journal(engine: Engine, name: str, model: JournalModel, promised: bool, found: Found) -> None:
    content = await Journal(engine, name).read()
    present = {id_: (begin, end) for id_, begin, end in parse_content(content, name)}
    known = model.acknowledged.keys() | model.unknown
    for id_ in present:
        if id_ not in known:
            what = "was reported as rolled back" if id_ in model.rolled_back else "was never sent here"
            raise Violation(f"{name}: append {id_} is there and {what}")
    if promised:
        for id_, place in model.acknowledged.items():
            if present.get(id_) != place:
                raise Violation(f"{name}: append {id_} was acknowledged at {place}, found {present.get(id_)}")
    found.unknown_kept |= any(id_ in present for id_ in model.unknown)
    found.unknown_lost |= any(id_ not in present for id_ in model.unknown)
    expected = LabelSet()
    for id_, _ in sorted(present.items(), key=lambda item: item[1]):
        if id_ in model.setting:
            expected = LabelSet((Label("last", str(id_)),))
    response = await engine.append(AppendRequest(name))
    if promised and response.status == Status.OK and response.registers != expected:
        raise Violation(f"{name}: registers are {response.registers}, expected {expected}")
    if promised and response.status != Status.OK:
        raise Violation(f"{name}: a barrier answers {response.status.name}")

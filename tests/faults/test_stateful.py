"""Programs of appends, spec changes, restarts and crashes, made up by Hypothesis and held against a model.

A program is a list of lives; a life is a list of operations, which an interpreter runs against an engine on the
simulated disk and against the model, and an end: a close, or a crash at some file call of the life. Each life begins
with a comparison of everything that is there with the model; operations compare what they answer.

A failing program is printed whole, and is a value: paste it into `test_replay`'s list to run it again.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from trio._core._run import GLOBAL_RUN_CONTEXT

from broadsheet.engine.engine import Durability, Engine
from broadsheet.engine.errors import AppendAborted, Status
from broadsheet.engine.handles import Journal
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.labels import Label, LabelSet, parse_selector
from broadsheet.engine.runtime import ReadableBuffer
from broadsheet.engine.service import AppendRequest, ApplyRequest, ListRequest
from broadsheet.testing.simulation import (
    SimulatedDisk,
    SimulatedFile,
    SimulatedRuntime,
    cancel_at_step,
    run_simulated,
)
from broadsheet.testing.simulation.engine_model import content_of, parse_content, small_options

FOLDER = "/disk/engine"
NAMES = ("plain", "held", "stored")
HOUR_NS = 3600 * 10**9

# --- Programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Append:
    """`streamed`: in pieces. `ends`: how: "well", "abort" (by its source, half way), "cancel" (at its `step`-th await).
    `sets`: the register `last` is set to the append's id."""

    name: str
    length: int
    streamed: bool = False
    sets: bool = False
    ends: str = "well"
    step: int = 1


@dataclass(frozen=True)
class Together:
    """Appends at the same time: they form groups."""

    appends: tuple[Append, ...]


@dataclass(frozen=True)
class At:
    """An append at an explicit offset: the head and `delta`."""

    name: str
    delta: int


@dataclass(frozen=True)
class Checked:
    """An append that checks the register `last`: for the value it has, or for another one."""

    name: str
    right: bool


@dataclass(frozen=True)
class Barrier:
    name: str


@dataclass(frozen=True)
class Read:
    name: str


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Create:
    name: str


@dataclass(frozen=True)
class Wait:
    """Spools are persisted, files recycled."""


Operation = Append | Together | At | Checked | Barrier | Read | Delete | Create | Wait


@dataclass(frozen=True)
class Crash:
    """At the `call`-th file call of the life, or after its close if there are fewer. It may be half done (`moment`)."""

    kind: str
    call: int
    moment: str = "before"


@dataclass(frozen=True)
class Life:
    operations: tuple[Operation, ...]
    crash: Crash | None = None


names = st.sampled_from(NAMES)
lengths = st.one_of(st.integers(14, 60), st.integers(14, 400), st.sampled_from((299, 300, 301, 700, 1100, 1500)))
appends = st.builds(Append, names, lengths, st.booleans(), st.booleans())
operations = st.one_of(
    appends,
    st.lists(appends, min_size=2, max_size=6).map(lambda it: Together(tuple(it))),
    st.builds(Append, names, lengths, st.just(True), st.booleans(), st.just("abort")),
    st.builds(Append, names, lengths, st.booleans(), st.booleans(), st.just("cancel"), st.integers(1, 8)),
    st.builds(At, names, st.one_of(st.just(0), st.integers(-20, 20))),
    st.builds(Checked, names, st.booleans()),
    st.builds(Barrier, names),
    st.builds(Read, names),
    st.builds(Create, names),
    st.builds(Delete, st.sampled_from(("plain", "held"))),  # what is in a store outlives its journal
    st.builds(Wait),
)
crashes = st.builds(
    Crash,
    st.sampled_from(("process", "power")),
    st.one_of(st.integers(1, 60), st.integers(20, 150), st.integers(50, 300)),
    st.sampled_from(("before", "partial", "after")),
)
crashed_lives = st.builds(Life, st.lists(operations, min_size=5, max_size=25).map(tuple), crashes)
lives = st.one_of(crashed_lives, crashed_lives, st.builds(Life, st.lists(operations, max_size=12).map(tuple)))
programs = st.lists(lives, min_size=2, max_size=5).map(tuple)


# --- The model --------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A promise was broken."""


@dataclass
class JournalModel:
    """`unknown` appends may or may not be there; so may the journal itself while `creating`, or `deleting`."""

    generation: int
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    setting: set[int] = field(default_factory=set)
    creating: bool = True
    deleting: bool = False

    @property
    def head(self) -> int:
        return max((end for _, end in self.acknowledged.values()), default=0)

    @property
    def registers(self) -> LabelSet:
        last = max((self.acknowledged[id_], id_) for id_ in {*self.acknowledged} & self.setting)[1:]
        return LabelSet((Label("last", str(last[0])),))

    def expected_registers(self) -> LabelSet:
        return self.registers if self.setting & self.acknowledged.keys() else LabelSet()

    def compare(self, content: bytes, name: str) -> None:
        """And learn which of the unknown appends are there."""
        present = {id_: (begin, end) for id_, begin, end in parse_content(content, name)}
        for id_, place in self.acknowledged.items():
            if present.get(id_) != place:
                raise Broken(f"{name}: append {id_} was acknowledged at {place} and is at {present.get(id_)}")
        for id_ in present:
            if id_ not in self.acknowledged and id_ not in self.unknown:
                raise Broken(f"{name}: append {id_} is there, and was never acknowledged, or was rolled back")
        self.acknowledged = present
        self.unknown = set()


class StoppingFile(SimulatedFile):
    def pwrite(self, buffers: Sequence[ReadableBuffer], offset: int) -> None:
        disk = self._disk
        assert isinstance(disk, StoppingDisk)
        if disk.calls + 1 == disk.stop_at and disk.moment == "partial":
            payload = b"".join(buffers)
            disk.stop()
            assert disk.stopped is not None
            file = disk.stopped.open(self.path)
            file.pwrite([payload[: disk._rng.randrange(len(payload) + 1)]], offset)
        super().pwrite(buffers, offset)


class StoppingDisk(SimulatedDisk):
    """Keeps the machine as it is at one call, and lets the run go on: what is unwound after a crash cannot disturb."""

    stop_at = 0
    moment = "before"
    stopped: SimulatedDisk | None = None
    on_stop: Callable[[], None] = staticmethod(lambda: None)

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        super().open(path, create=create)
        return StoppingFile(self, self._find(path), path, writable=True)

    def _begin(self, operation: str, kind: str, relative: str, detail: str = "", **position: int):  # type: ignore[no-untyped-def,override]
        if self.stop_at and self.calls + 1 == self.stop_at + (self.moment == "after") and self.stopped is None:
            self.stop()
        return super()._begin(operation, kind, relative, detail, **position)

    def stop(self) -> None:
        self.stopped = self.clone()
        self.on_stop()


class Interpreter:
    """Runs a program. `seen` counts what it met."""

    def __init__(self, durability: Durability, seed: int = 0) -> None:
        self.durability = durability
        self.seed = seed
        self.disk = StoppingDisk(random.Random(seed), tracing=False)
        self.journals: dict[str, list[JournalModel]] = {name: [] for name in NAMES}
        self.revision = 0
        self.next_id = 1
        self.generation = 0
        self.promised = True
        self.seen: Counter[str] = Counter()

    def run(self, program: tuple[Life, ...]) -> None:
        for number, life in enumerate((*program, Life(()))):
            disk = self.disk
            kept: list[tuple[dict[str, list[JournalModel]], int, int]] = []
            if life.crash is not None:
                disk.stop_at, disk.moment = life.crash.call, life.crash.moment
                disk.on_stop = lambda kept=kept: kept.append((deepcopy(self.journals), self.revision, self.generation))
            run_simulated(self._live, life, number, seed=self.seed + number)
            self.promised = True
            kind = "process"
            if life.crash is not None:
                kind = life.crash.kind
                self.seen[f"{kind} crash {'in' if kept else 'after'} a life"] += 1
                self.promised = self.durability is Durability.FSYNC or kind == "process"
            if kept:
                assert disk.stopped is not None
                disk = disk.stopped
                self.journals, self.revision, self.generation = kept[0]
            survived = disk.crash(random.Random(self.seed * 100 + number), kind)  # type: ignore[arg-type]
            assert isinstance(survived, StoppingDisk)
            self.disk = survived
            if not self.promised:
                # A power cut in mode `os`: what is there is whole, and that is all.
                run_simulated(self._read_all, seed=self.seed)
                return

    async def _read_all(self) -> None:
        runtime = SimulatedRuntime(self.seed, self.disk)
        async with Engine.open(FOLDER, durability=self.durability, options=small_options(), runtime=runtime) as engine:
            for listed in (await engine.list(ListRequest())).journals:
                parse_content(await Journal(engine, listed.spec.name).read(), listed.spec.name)

    async def _live(self, life: Life, number: int) -> None:
        runtime = SimulatedRuntime(self.seed, self.disk, now_ns=1_700_000_000_000_000_000 + number * HOUR_NS)
        with trio.fail_after(100_000):
            engine = Engine.open(FOLDER, durability=self.durability, options=small_options(), runtime=runtime)
            async with engine:
                await self._compare(engine)
                for operation in life.operations:
                    await self._operate(engine, operation)
                    if engine.ready_problem() is not None:
                        raise Broken(f"after {operation}: {engine.ready_problem()}")

    # --- After a restart

    async def _compare(self, engine: Engine) -> None:
        if engine.coordinator.revision < self.revision:
            raise Broken(f"the revision went back from {self.revision} to {engine.coordinator.revision}")
        self.revision = engine.coordinator.revision
        listed = {
            it.spec.name: int(it.spec.labels.value("generation") or 0)
            for it in (await engine.list(ListRequest())).journals
        }
        for name, models in self.journals.items():
            found = None
            for model in models:
                there = listed.get(name) == model.generation
                if not there and not model.creating and not model.deleting:
                    raise Broken(f"{name} of generation {model.generation} was created and is gone")
                if there:
                    found = model
            if name in listed and found is None:
                raise Broken(f"{name} of generation {listed[name]} is there, and was deleted or never created")
            self.journals[name] = [found] if found is not None else []
            if found is not None:
                found.creating = found.deleting = False
                self.seen["unknown appends after a restart"] += len(found.unknown)
                found.compare(await Journal(engine, name).read(), name)
                await self._barrier(engine, name, found)
        if engine.recovered_records:
            self.seen["restarts with records to replay"] += 1
        if engine.quarantined:
            self.seen["restarts with a torn end"] += 1

    # --- Operations

    async def _operate(self, engine: Engine, operation: Operation) -> None:
        self.seen[type(operation).__name__] += 1
        if isinstance(operation, Wait):
            await trio.sleep(30)
            return
        if isinstance(operation, Together):
            async with trio.open_nursery() as nursery:
                for append in operation.appends:
                    if self._model(append.name) is not None:
                        nursery.start_soon(self._append, engine, append)
            return
        name = operation.name
        model = self._model(name)
        if isinstance(operation, Create):
            await self._create(engine, name)
        elif model is None:
            response = await engine.append(AppendRequest(name), b"x")
            if response.status != Status.JOURNAL_NOT_FOUND:
                raise Broken(f"{name} is not there, and an append answers {response.status.name}")
        elif isinstance(operation, Append):
            await self._append(engine, operation)
        elif isinstance(operation, Delete):
            await self._delete(engine, name, model)
        else:
            # The barrier is behind whatever was cancelled on its way: now it is known what there is.
            await engine.append(AppendRequest(name))
            model.compare(await Journal(engine, name).read(), name)
            if isinstance(operation, Barrier):
                await self._barrier(engine, name, model)
            elif isinstance(operation, At):
                await self._at(engine, name, model, operation.delta)
            elif isinstance(operation, Checked):
                await self._checked(engine, name, model, operation.right)

    def _model(self, name: str) -> JournalModel | None:
        return self.journals[name][-1] if self.journals[name] else None

    def _new_id(self, model: JournalModel, *, sets: bool = False) -> int:
        id_, self.next_id = self.next_id, self.next_id + 1
        model.unknown.add(id_)
        if sets:
            model.setting.add(id_)
        return id_

    async def _append(self, engine: Engine, append: Append) -> None:
        model = self._model(append.name)
        assert model is not None
        id_ = self._new_id(model, sets=append.sets)
        content = content_of(id_, append.length)
        registers = LabelSet((Label("last", str(id_)),)) if append.sets else None
        request = AppendRequest(append.name, union_registers=registers)

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, len(content), 150):
                if append.ends == "abort" and at >= len(content) // 2:
                    raise AppendAborted("the source gave up")
                yield content[at : at + 150]
                await trio.lowlevel.checkpoint()
            if append.ends == "abort":
                raise AppendAborted("the source gave up")

        async def send() -> None:
            response = await engine.append(request, body() if append.streamed else content)
            if response.status != Status.OK or response.commit is None:
                raise Broken(f"{append} answers {response.status.name}")
            if response.commit.length != append.length:
                raise Broken(f"{append} got {response.commit}")
            self._acknowledge(model, id_, response.commit.begin, response.commit.end)

        if append.ends == "cancel":
            outcome = await cancel_at_step(append.step, send)
            self.seen["cancelled appends"] += outcome.cancelled
        elif append.ends == "abort":
            try:
                await send()
            except AppendAborted:
                model.unknown.discard(id_)
            else:
                raise Broken(f"{append} was committed")
        else:
            await send()

    def _acknowledge(self, model: JournalModel, id_: int, begin: int, end: int) -> None:
        for other, (first, last) in model.acknowledged.items():
            if begin < last and first < end:
                raise Broken(f"appends {id_} and {other} were both given [{begin}, {end})")
        model.unknown.discard(id_)
        model.acknowledged[id_] = (begin, end)

    async def _barrier(self, engine: Engine, name: str, model: JournalModel) -> None:
        response = await engine.append(AppendRequest(name))
        if response.status != Status.OK or response.commit is None:
            raise Broken(f"a barrier of {name} answers {response.status.name}")
        if (response.commit.begin, response.commit.end) != (model.head, model.head):
            raise Broken(f"a barrier of {name} is at {response.commit.begin}, the head at {model.head}")
        expected = model.expected_registers()
        if response.registers != expected:
            raise Broken(f"{name}: registers are {response.registers}, expected {expected}")

    async def _at(self, engine: Engine, name: str, model: JournalModel, delta: int) -> None:
        offset = max(0, model.head + delta)
        id_ = self._new_id(model)
        response = await engine.append(AppendRequest(name, offset), content_of(id_, 40))
        if offset == model.head:
            if response.status != Status.OK or response.commit is None or response.commit.begin != offset:
                raise Broken(f"an append to {name} at its head {offset}: {response.status.name} {response.commit}")
            self._acknowledge(model, id_, response.commit.begin, response.commit.end)
        else:
            if response.status != Status.WRONG_APPEND_OFFSET:
                raise Broken(f"an append to {name} at {offset}, not {model.head}: {response.status.name}")
            model.unknown.discard(id_)

    async def _checked(self, engine: Engine, name: str, model: JournalModel, right: bool) -> None:
        have = model.expected_registers()
        value = have.value("last") if have else None
        wanted = value if right and value else "another"
        id_ = self._new_id(model)
        request = AppendRequest(name, check_registers=parse_selector(f"last={wanted}"))
        response = await engine.append(request, content_of(id_, 30))
        if not have or wanted == value:  # no registers match anything
            if response.status != Status.OK or response.commit is None:
                raise Broken(f"{name}: last={wanted} is refused with {response.status.name} where last is {value}")
            self._acknowledge(model, id_, response.commit.begin, response.commit.end)
        else:
            if response.status != Status.REGISTER_MISMATCH or response.registers != have:
                raise Broken(f"{name}: last={wanted} answers {response.status.name} where last is {value}")
            model.unknown.discard(id_)

    async def _create(self, engine: Engine, name: str) -> None:
        exists = self._model(name) is not None
        generation = self.generation + 1
        spec = spec_of(name, generation)
        if not exists:
            self.generation = generation
            self.journals[name].append(JournalModel(generation))
        response = await engine.apply(ApplyRequest((JournalChange(0, spec),)))
        if response.status != (Status.ETCD_TRANSACTION_FAILED if exists else Status.OK):
            raise Broken(f"create {name}, which {'exists' if exists else 'does not exist'}: {response.status.name}")
        self.journals[name][-1].creating = False
        self._saw_revision(response.header.etcd.revision, grew=not exists)

    async def _delete(self, engine: Engine, name: str, model: JournalModel) -> None:
        model.deleting = True
        response = await engine.apply(ApplyRequest((JournalChange(-1, None, name),)))
        if response.status != Status.OK:
            raise Broken(f"delete {name}: {response.status.name}")
        self.journals[name] = []
        self._saw_revision(response.header.etcd.revision, grew=True)

    def _saw_revision(self, revision: int, *, grew: bool) -> None:
        if revision < self.revision + grew:
            raise Broken(f"revision {revision} after {self.revision}")
        self.revision = revision


def spec_of(name: str, generation: int) -> JournalSpec:
    return JournalSpec(
        name,
        1,
        LabelSet((Label("generation", str(generation)),)),
        FragmentSpec(
            1024,
            CompressionCodec.SNAPPY if name == "stored" else CompressionCodec.NONE,
            ("file:///",) if name == "stored" else (),
            10**9,
        ),
        max_append_rate=1 << 20 if name == "held" else 0,  # then every append streams into the spool
    )


@contextmanager
def _no_hang(seconds: float = 10.0) -> Iterator[None]:
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


def run_program(program: tuple[Life, ...], durability: Durability, seed: int) -> Interpreter:
    interpreter = Interpreter(durability, seed)
    # Every journal is there from the beginning: most programs would otherwise speak of none.
    with _no_hang():
        interpreter.run((Life(tuple(Create(name) for name in NAMES)), *program))
    return interpreter


EXAMPLES = 300
seen: Counter[str] = Counter()


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS], ids=lambda it: it.value)
def test_programs_keep_the_promises(durability: Durability) -> None:
    seen.clear()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs, seed=st.integers(0, 1000))
    def hold(program: tuple[Life, ...], seed: int) -> None:
        seen.update(run_program(program, durability, seed).seen)
        seen["programs"] += 1

    hold()
    print(", ".join(f"{what}: {count}" for what, count in sorted(seen.items())))
    crashes_met = ("process crash in a life", "power crash in a life")
    for what in (*crashes_met, "restarts with records to replay", "cancelled appends"):
        assert seen[what] >= EXAMPLES // 10, f"{what}: {seen[what]}"
    if durability is Durability.FSYNC:
        assert seen["restarts with a torn end"] > 0


REPLAYS: list[tuple[tuple[Life, ...], Durability, int]] = [
    # A cancelled append, and a crash behind it; a journal made anew between.
    (
        (
            Life((Append("plain", 40, ends="cancel", step=2), Append("plain", 700, sets=True), Delete("plain"))),
            Life((Create("plain"), Append("plain", 300), Wait()), Crash("power", 12, "partial")),
            Life((Append("plain", 1500, True), Read("plain")), Crash("process", 9, "partial")),
        ),
        Durability.FSYNC,
        3,
    ),
]


@pytest.mark.parametrize(("program", "durability", "seed"), REPLAYS)
def test_replay(program: tuple[Life, ...], durability: Durability, seed: int) -> None:
    """Programs that were of interest once. The same seed gives the same run."""
    first = run_program(program, durability, seed)
    second = run_program(program, durability, seed)
    assert first.seen == second.seen
    assert [first.disk.content(path) for path in first.disk.walk()] == [
        second.disk.content(path) for path in second.disk.walk()
    ]

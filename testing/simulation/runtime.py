"""`SimulatedRuntime`: one seed's clock, randomness, disk and threads; and trio made to follow the same seed.

A simulated run is one thread on trio's autojumping `MockClock`: whenever every task waits, time jumps to the
next deadline. `run_simulated` also seeds the generator with which trio orders the tasks that are runnable at
once, so that a seed gives the same schedule, the same calls of the disk (`SimulatedDisk.trace`) and the same
crash again.

    runtime = SimulatedRuntime(seed)
    runtime.disk.crash_at(17)
    try:
        run_simulated(program, runtime, seed=seed)
    except BaseException as error:
        if not is_simulated_crash(error):
            raise
    runtime = runtime.reboot("power")   # and run the recovery

Not under control: the iteration order of sets of str or bytes (set PYTHONHASHSEED, or sort), and `id()`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
import trio.testing
from trio._core import _run as trio_run

from broadsheet.engine.runtime import Clock, Files, Threads, Worker
from broadsheet.testing.simulation.disk import CrashKind, SimulatedDisk

__all__ = [
    "EPOCH_NS",
    "SimulatedClock",
    "SimulatedRuntime",
    "SimulatedThreads",
    "SimulatedWorker",
    "deterministic_trio",
    "run_simulated",
]

T = TypeVar("T")

EPOCH_NS = 1_700_000_000_000_000_000
"""Wall time at the start of a simulated run, in nanoseconds since the unix epoch."""


class SimulatedClock:
    """Wall time that follows trio's clock, until a test makes it jump. Outside of `trio.run` it stands
    still."""

    __slots__ = ("_base_ns", "_last_ns")

    def __init__(self, now_ns: int = EPOCH_NS) -> None:
        self._base_ns = now_ns
        self._last_ns = now_ns

    def now_ns(self) -> int:
        try:
            self._last_ns = self._base_ns + round(trio.current_time() * 1e9)
        except RuntimeError:
            pass  # no trio here: between two runs, or in a plain test
        return self._last_ns

    def monotonic(self) -> float:
        return trio.current_time()

    def set_ns(self, now_ns: int) -> None:
        """Make the wall clock show `now_ns` now."""
        self._base_ns += now_ns - self.now_ns()
        self._last_ns = now_ns

    def jump(self, seconds: float) -> None:
        """Move the wall clock, forward or back; trio's clock and its deadlines are untouched."""
        self.set_ns(self.now_ns() + round(seconds * 1e9))


class SimulatedThreads:
    """Calls run in the loop, with a scheduling point on either side, so that others run while "the thread"
    does.

    `delay_s` gives how long a call takes (before its effect), e.g. `lambda: rng.expovariate(100)` for a slow
    disk.
    """

    __slots__ = ("delay_s",)

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self.delay_s = delay_s

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            if self.delay_s is None:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(self.delay_s())
            result = call()
            await trio.lowlevel.checkpoint()
        return result

    def worker(self) -> Worker:
        return SimulatedWorker(self.delay_s)


class SimulatedWorker:
    """The calls run one after another in a system task of trio, with the same scheduling points."""

    __slots__ = ("_calls", "_delay_s", "_running")

    def __init__(self, delay_s: Callable[[], float] | None) -> None:
        self._delay_s = delay_s
        self._calls: deque[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = deque()
        self._running = False

    def submit(self, call: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._calls.append((call, done))
        if not self._running:
            self._running = True
            trio.lowlevel.spawn_system_task(self._run)

    def close(self) -> None:
        pass

    async def _run(self) -> None:
        with trio.CancelScope(shield=True):
            while self._calls:
                call, done = self._calls.popleft()
                if self._delay_s is None:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.sleep(self._delay_s())
                error: BaseException | None = None
                try:
                    call()
                except BaseException as raised:  # a crash, too, goes to whoever asked
                    error = raised
                await trio.lowlevel.checkpoint()
                done(error)
            self._running = False


class SimulatedRuntime:
    """A `Runtime` of one seed. `files` is `disk`, and `clock` is `simulated_clock`, under the names and types
    of the seam; `random` and the disk draw from separate streams.

    `delay_s` as in `SimulatedThreads`. A disk that is given keeps its content and takes this runtime's clock
    for its modification times.
    """

    __slots__ = ("_delay_s", "clock", "disk", "files", "random", "seed", "simulated_clock", "threads")

    def __init__(
        self,
        seed: int,
        disk: SimulatedDisk | None = None,
        *,
        now_ns: int = EPOCH_NS,
        delay_s: Callable[[], float] | None = None,
    ) -> None:
        self.seed = seed
        self.simulated_clock = SimulatedClock(now_ns)
        self.clock: Clock = self.simulated_clock
        self.random: random.Random = random.Random(f"runtime {seed}")
        self.threads: Threads = SimulatedThreads(delay_s)
        self.disk = disk if disk is not None else SimulatedDisk(random.Random(f"disk {seed}"))
        self.disk.now_s = self._now_s
        self.files: Files = self.disk
        self._delay_s = delay_s

    def reboot(self, kind: CrashKind, *, rng: random.Random | None = None, after_s: float = 1.0) -> SimulatedRuntime:
        """Crash the disk (see `SimulatedDisk.crash`; `rng` defaults to one of this seed) and start anew on
        what is left, `after_s` seconds later by the wall clock."""
        disk = self.disk.crash(rng if rng is not None else random.Random(f"crash {self.seed}"), kind)
        now_ns = self.clock.now_ns() + round(after_s * 1e9)
        return SimulatedRuntime(self.seed, disk, now_ns=now_ns, delay_s=self._delay_s)

    def _now_s(self) -> float:
        return self.clock.now_ns() / 1e9


@contextmanager
def deterministic_trio(seed: int) -> Iterator[None]:
    """Make each `trio.run` inside follow `seed`: the same tasks get the same schedule.

    trio shuffles the tasks that are runnable at once with a generator of its own, and, unless told otherwise,
    does not sort them first (they come from sets). Both are set here and put back after: there is no public
    way.
    """
    generator = trio_run._r
    state = generator.getstate()
    allowed = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    generator.seed(seed)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed  # type: ignore[misc]
        generator.setstate(state)


def run_simulated(main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """`trio.run(main, *args)` on an autojumping clock, with the schedule of `seed`."""
    with deterministic_trio(seed):
        return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))

"""One seed, one run: the simulated runtime's clock, threads and schedule."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime

import pytest
import trio
from trio._core import _run as trio_run

from broadsheet.engine.runtime import Runtime
from broadsheet.testing.simulation import (
    EPOCH_NS,
    SimulatedCrash,
    SimulatedDisk,
    SimulatedRuntime,
    cancel_at_step,
    deterministic_trio,
    is_simulated_crash,
    run_simulated,
)


async def busy(runtime: Runtime) -> list[str]:
    """Several tasks that write, sync in threads, sleep at random and wake each other."""
    order: list[str] = []
    folder = "/disk/log"
    runtime.files.make_dirs(folder)
    bell = trio.Event()

    async def work(name: int) -> None:
        file = runtime.files.open(f"{folder}/{name}", create=True)
        await bell.wait()
        for number in range(5):
            file.pwrite([runtime.random.randbytes(100)], number * 100)
            await runtime.threads.run(file.sync)
            order.append(f"{name}.{number}")
            if number == 2:
                await trio.sleep(runtime.random.choice((0, 1, 1)))
        await runtime.threads.run(lambda: runtime.files.sync_dir(folder))

    async with trio.open_nursery() as nursery:
        for name in range(8):
            nursery.start_soon(work, name)
        await trio.sleep(1)
        bell.set()
    return order


def test_same_seed_same_run() -> None:
    runs = []
    for seed in (1, 1, 2):
        runtime = SimulatedRuntime(seed)
        order = run_simulated(busy, runtime, seed=seed)
        boot = runtime.reboot("power")
        runs.append((order, runtime.disk.trace, {path: boot.disk.content(path) for path in boot.disk.walk()}))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert sorted(runs[0][0]) == sorted(runs[2][0])


def test_schedules_differ_between_seeds() -> None:
    orders = {tuple(run_simulated(busy, SimulatedRuntime(0), seed=seed)) for seed in range(10)}
    assert len(orders) == 10


@pytest.mark.parametrize("kind", ["process", "power"])
def test_same_seed_same_crash(kind: str) -> None:
    seen = []
    for _ in range(2):
        runtime = SimulatedRuntime(3)
        runtime.disk.crash_at(40, "partial")
        with pytest.raises(BaseException) as caught:
            run_simulated(busy, runtime, seed=3)
        assert is_simulated_crash(caught.value)
        boot = runtime.reboot("power" if kind == "power" else "process")
        seen.append((runtime.disk.trace, {path: boot.disk.content(path) for path in boot.disk.walk()}))
        assert boot.clock.now_ns() > runtime.clock.now_ns()
        run_simulated(busy, boot, seed=3)
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 40


def test_trio_is_left_as_it_was() -> None:
    state, allowed = trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    with deterministic_trio(1):
        trio_run._r.random()
    assert trio_run._r.getstate() == state
    assert allowed == trio_run._ALLOW_DETERMINISTIC_SCHEDULING


def test_clock_follows_trio_and_jumps() -> None:
    runtime = SimulatedRuntime(1)
    clock = runtime.simulated_clock
    assert clock.now_ns() == EPOCH_NS
    assert datetime.fromtimestamp(EPOCH_NS // 10**9, tz=UTC).year == 2023

    async def main() -> None:
        assert clock.now_ns() == EPOCH_NS
        await trio.sleep(3600)
        assert clock.now_ns() == EPOCH_NS + 3600 * 10**9
        assert clock.monotonic() == trio.current_time() == 3600
        clock.jump(-7200)
        assert clock.now_ns() == EPOCH_NS - 3600 * 10**9
        assert clock.monotonic() == 3600
        await trio.sleep(1)
        assert clock.now_ns() == EPOCH_NS - 3599 * 10**9
        runtime.files.open("/disk/a", create=True).pwrite([b"x"], 0)
        assert runtime.files.list_dir("/disk")[0].mod_time == EPOCH_NS // 10**9 - 3599
        clock.set_ns(5)
        assert clock.now_ns() == 5

    run_simulated(main)
    assert clock.now_ns() == 5


def test_slow_disk() -> None:
    runtime = SimulatedRuntime(1, delay_s=lambda: 0.25)

    async def main() -> None:
        await runtime.threads.run(lambda: None)
        assert trio.current_time() == 0.25
        with trio.move_on_after(0.1):
            await runtime.threads.run(lambda: None)
        assert trio.current_time() == 0.5  # not cancellable once begun

    run_simulated(main)


def test_thread_calls_are_whole_or_not_begun() -> None:
    done: list[int] = []

    async def main() -> None:
        runtime = SimulatedRuntime(1)
        for step in itertools.count(1):
            outcome = await cancel_at_step(step, lambda step=step: runtime.threads.run(lambda: done.append(step)))  # type: ignore[misc]
            assert outcome.cancelled is (step not in done)
            if not outcome.reached:
                return

    run_simulated(main)
    assert len(done) >= 3


def test_a_disk_of_ones_own() -> None:
    disk = SimulatedDisk(random.Random(1), root="/srv/journals")
    runtime = SimulatedRuntime(1, disk)
    assert runtime.disk is runtime.files is disk
    runtime.disk.stop()
    with pytest.raises(SimulatedCrash):
        runtime.files.exists("/srv/journals")
    assert runtime.reboot("process").files.exists("/srv/journals")

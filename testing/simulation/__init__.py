"""Deterministic simulation: a runtime of one seed, and a disk that forgets, tears and fails."""

from broadsheet.testing.simulation.cancellation import Cancellation, cancel_at_step
from broadsheet.testing.simulation.disk import (
    SECTOR_BYTES,
    Call,
    CrashKind,
    Moment,
    Mutations,
    SimulatedCrash,
    SimulatedDisk,
    SimulatedFile,
    is_simulated_crash,
)
from broadsheet.testing.simulation.runtime import (
    EPOCH_NS,
    SimulatedClock,
    SimulatedRuntime,
    SimulatedThreads,
    deterministic_trio,
    run_simulated,
)

__all__ = [
    "EPOCH_NS",
    "SECTOR_BYTES",
    "Call",
    "Cancellation",
    "CrashKind",
    "Moment",
    "Mutations",
    "SimulatedClock",
    "SimulatedCrash",
    "SimulatedDisk",
    "SimulatedFile",
    "SimulatedRuntime",
    "SimulatedThreads",
    "cancel_at_step",
    "deterministic_trio",
    "is_simulated_crash",
    "run_simulated",
]

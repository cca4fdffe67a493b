"""`FlowControl`: the golden vectors, the check vectors of spec/replication.md §5.7, and what its forecasts promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from broadsheet.engine.journal.flow_control import QUANTUM_MS, SLOW_APPEND_TEXT, FlowControl, Underflow

FIELDS = ("balance", "charge", "delayed_chunks", "max_rate", "spent", "total_chunks")


def test_golden_vectors(vectors: Callable[[str], Any]) -> None:
    entries = vectors("flow_control.json")
    assert len(entries) > 3
    for entry in entries:
        flow = FlowControl(entry["min_append_rate"], entry["flag_max_append_rate"])
        for number, step in enumerate(entry["trace"]):
            where = f"{entry['name']}, step {number}"
            error = released = None
            if step["op"] == "start":
                flow.start(step["journal_max_append_rate"], step["now_ms"])
            elif step["op"] == "chunk":
                released = flow.chunk(step["length"])
            elif step["op"] == "tick":
                try:
                    released = flow.tick(step["now_ms"])
                except Underflow as raised:
                    error = str(raised)
            else:
                flow.invalidate()
            assert {name: getattr(flow, name) for name in FIELDS} == step["after"], where
            assert error == step.get("error"), where
            if released is not None and step["op"] != "invalidate":
                assert released == step["released"], where


def test_check_vectors_of_the_specification() -> None:
    flow = FlowControl(1000)
    flow.start(10_000, 0)
    assert flow.chunk(9_980)
    assert (flow.balance, flow.charge) == (20, 0)
    assert not flow.chunk(40)
    assert (flow.balance, flow.charge) == (0, 20)
    assert not flow.tick(1)
    assert flow.charge == 10
    assert flow.tick(100_001)
    assert (flow.balance, flow.spent, flow.charge) == (99_990, 10, 0)
    assert flow.chunk(40)
    assert (flow.balance, flow.spent) == (99_950, 50)
    with pytest.raises(Underflow, match=SLOW_APPEND_TEXT):
        flow.tick(100_052)


def test_unthrottled_whatever_the_process_allows() -> None:
    flow = FlowControl(1000, 500)
    flow.start(0, 0)
    assert flow.chunk(1 << 30)
    flow.start(10_000, 1)
    assert flow.max_rate == 500
    flow.start(400, 2)
    assert flow.max_rate == 400


def test_time_going_back_is_skipped() -> None:
    flow = FlowControl(1000)
    flow.start(1000, 10_000)
    flow.chunk(1500)
    before = {name: getattr(flow, name) for name in FIELDS}
    assert not flow.tick(5_000)
    assert {name: getattr(flow, name) for name in FIELDS} == before
    flow.tick(10_100)
    assert flow.charge == 400


def test_balance_outlives_an_append() -> None:
    flow = FlowControl(100)
    flow.start(1000, 0)
    assert flow.chunk(1000)
    flow.start(1000, 100)
    assert flow.balance == 100
    flow.start(1000, 1_000_000)
    assert flow.balance == 10_000


def test_invalidate_lets_the_rest_pass() -> None:
    flow = FlowControl(100)
    flow.start(1000, 0)
    assert not flow.chunk(5000)
    flow.invalidate()
    assert flow.charge == 0
    assert flow.chunk(10**9)


@given(st.integers(1, 10**6), st.integers(1, 10**8), st.integers(0, 10**6))
def test_release_comes_when_it_was_forecast(max_rate: int, length: int, bank: int) -> None:
    flow = FlowControl(0)
    flow.start(max_rate, 0)
    flow.balance = min(bank, length - 1)
    assert not flow.chunk(length)
    assert flow.balance == 0
    assume(flow.charge <= max_rate * 10)  # else the bank fills before
    wait_ms = flow.ms_to_release()
    assert wait_ms > 0
    flow.spent = flow.min_rate = 10**12
    if wait_ms > 1:
        early = FlowControl(0)
        early.start(max_rate, 0)
        early.balance = min(bank, length - 1)
        early.chunk(length)
        early.spent = early.min_rate = 10**12
        assert not early.tick(wait_ms - 1)
    assert flow.tick(wait_ms)


@given(st.integers(1, 10**7), st.integers(0, 10**7))
def test_underflow_comes_when_it_was_forecast(min_rate: int, used: int) -> None:
    flow = FlowControl(min_rate)
    flow.start(0, 0)
    flow.spent = max(1, min_rate - used)
    wait_ms = flow.ms_to_underflow()
    assert wait_ms % QUANTUM_MS == 0
    assert wait_ms > 0
    with pytest.raises(Underflow):
        flow.tick(wait_ms)


def test_no_minimum_rate_fails_at_the_first_tick() -> None:
    """An accident of the reference, kept (spec/broker-protocol.md §7.2)."""
    flow = FlowControl(0)
    flow.start(0, 0)
    assert flow.ms_to_underflow() == QUANTUM_MS
    with pytest.raises(Underflow):
        flow.tick(QUANTUM_MS)

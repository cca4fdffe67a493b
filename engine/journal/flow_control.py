"""Append flow control (spec/replication.md §5.7). Sans-I/O.

Two rates hold an append stream between them. The journal's maximum fills a bank, `balance`, from which content is
paid (`charge` is what the chunk in hand still owes; it is released at 0). The process's minimum drains `spent`, the
credit that arriving content refills; at 0 the client is too slow. Bytes, milliseconds, bytes per second.

The balance outlives an append: one object per replica, `start` for each append.
"""

from __future__ import annotations

__all__ = ["QUANTUM_MS", "SLOW_APPEND_TEXT", "FlowControl", "Underflow"]

QUANTUM_MS = 50
BURST_FACTOR = 10
SLOW_APPEND_TEXT = "client stream didn't sustain the minimum append data rate"


class Underflow(Exception):
    """The stream did not sustain the minimum rate."""

    def __init__(self) -> None:
        super().__init__(SLOW_APPEND_TEXT)


class FlowControl:
    __slots__ = (
        "_flag_max_rate",
        "_last_ms",
        "balance",
        "charge",
        "delayed_chunks",
        "max_rate",
        "min_rate",
        "spent",
        "total_chunks",
    )

    def __init__(self, min_rate: int, flag_max_rate: int = 0) -> None:
        self.min_rate = min_rate
        self._flag_max_rate = flag_max_rate
        self.max_rate = 0
        self.balance = 0
        self.spent = 0
        self.charge = 0
        self.total_chunks = 0
        self.delayed_chunks = 0
        self._last_ms: int | None = None

    def start(self, journal_max_rate: int, now_ms: int) -> None:
        """An append begins. A journal without a rate is unthrottled, whatever the process's maximum."""
        rate = journal_max_rate
        if 0 < self._flag_max_rate < rate:
            rate = self._flag_max_rate
        if self._last_ms is None:
            self.balance = rate
        self.max_rate = rate
        if self._last_ms is not None:
            self._accrue(now_ms)
        self._last_ms = now_ms if self._last_ms is None else max(self._last_ms, now_ms)
        self.spent = self.min_rate
        self.charge = 0
        self.total_chunks = 0
        self.delayed_chunks = 0

    def chunk(self, length: int) -> bool:
        """Content of `length` bytes arrived. True if it may go on at once."""
        self.total_chunks += 1
        self.charge = length
        self._debit()
        if self.charge:
            self.delayed_chunks += 1
            return False
        return True

    def tick(self, now_ms: int) -> bool:
        """Time passes. True if no chunk is waiting (any longer). Raises `Underflow`."""
        elapsed = self._accrue(now_ms)
        if elapsed > 0:
            self.spent = max(0, self.spent - self.min_rate * elapsed // 1000)
            self._debit()
            if self.spent <= 0:
                raise Underflow
        return self.charge == 0

    def invalidate(self) -> None:
        """The route changed: the rest of this append is not throttled, so that it ends soon."""
        self.max_rate = 0
        self._debit()

    def ms_to_release(self) -> int:
        """Milliseconds after which the waiting chunk will be paid for."""
        if self.charge == 0 or self.max_rate == 0:
            return 0
        return -(-self.charge * 1000 // self.max_rate)

    def ms_to_underflow(self) -> int:
        """Milliseconds until the stream fails if nothing arrives, rounded up to the quantum of ticks."""
        if self.min_rate <= 0:
            return QUANTUM_MS
        return (-(-self.spent * 1000 // self.min_rate) + QUANTUM_MS - 1) // QUANTUM_MS * QUANTUM_MS

    def _accrue(self, now_ms: int) -> int:
        elapsed = now_ms - (self._last_ms if self._last_ms is not None else now_ms)
        if elapsed > 0:
            self.balance = min(self.balance + self.max_rate * elapsed // 1000, BURST_FACTOR * self.max_rate)
            self._last_ms = now_ms
        return elapsed

    def _debit(self) -> None:
        paid = self.charge if self.max_rate == 0 else min(self.charge, self.balance)
        self.balance = max(0, self.balance - paid)
        self.charge -= paid
        self.spent = min(self.spent + paid, self.min_rate)

"""Cancel a call at each of its awaits in turn.

for step in itertools.count(1):
    outcome = await cancel_at_step(step, lambda: journal.append(...))
    ...check what holds, whether it was cancelled or not...
    if not outcome.reached:
        break
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

__all__ = ["Cancellation", "cancel_at_step"]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """`reached`: the call was still running at that step; `cancelled`: it ended by being cancelled. A call
    may be reached and not cancelled: where it is shielded, or past its last checkpoint."""

    reached: bool
    cancelled: bool


class _CancelAfterStep(trio.abc.Instrument):
    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self._task = trio.lowlevel.current_task()
        self._left = step
        self._scope = scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def cancel_at_step(step: int, call: Callable[[], Awaitable[object]]) -> Cancellation:
    """Run `call()` and cancel it when its task yields to trio for the `step`-th time (from 1). Errors
    propagate."""
    with trio.CancelScope() as scope:
        instrument = _CancelAfterStep(step, scope)
        trio.lowlevel.add_instrument(instrument)
        try:
            await call()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return Cancellation(scope.cancel_called, scope.cancelled_caught)

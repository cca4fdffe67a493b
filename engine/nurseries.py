"""Leaving a nursery that was entered by hand, as the handles and the engine do in `__aenter__` and `__aexit__`."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager

import trio

__all__ = ["exit_nursery"]

logger = logging.getLogger("broadsheet.engine")


async def exit_nursery(
    manager: AbstractAsyncContextManager[trio.Nursery], nursery: trio.Nursery, error: BaseException | None
) -> bool:
    """Cancel the nursery's tasks and leave it. Returns whether the body's `error` was taken care of.

    An error of the body comes out as it went in: a nursery would put it into a group. If a task has failed, too, the
    body's own error tells more, and the task's is logged. A cancelled body is the nursery's own business.
    """
    nursery.cancel_scope.cancel()
    if error is not None and _holds_cancelled(error):
        return bool(await manager.__aexit__(type(error), error, error.__traceback__))
    try:
        await manager.__aexit__(None, None, None)
    except BaseException:
        if error is None:
            raise
        logger.exception("a background task failed, too")
    return False


def _holds_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_holds_cancelled, error.exceptions))
    return isinstance(error, trio.Cancelled)

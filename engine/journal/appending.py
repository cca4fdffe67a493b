"""Taking in one append: whole into its journal's queue, or streamed while it holds the journal (design.md §3).

A body of at most 1 MiB is received before it queues, from a budget that all of an engine's appends share; a larger
one, one for which there is no budget, and any to a journal with a maximum rate, streams into the spool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import trio

from broadsheet.engine.errors import AppendFailed, BroadsheetError, DeadlineExceeded, OutcomeUnknown
from broadsheet.engine.journal.append_fsm import SetSuspend
from broadsheet.engine.journal.flow_control import FlowControl
from broadsheet.engine.journal.receiving import receive
from broadsheet.engine.journal.replica import YOUR_TURN, AppendItem, Replica
from broadsheet.engine.runtime import Runtime
from broadsheet.engine.service import AppendRequest, AppendResponse, Buffer, Content, Scope

__all__ = ["AppendHost", "Appending"]

SMALL_BODY_BYTES = 1 << 20
BODY_BUDGET_BYTES = 64 << 20
STREAM_SLICE_BYTES = 1 << 20
APPENDS_PER_TURN = 16


class AppendHost(Protocol):
    runtime: Runtime
    min_append_rate: int

    async def resolve_append(self, request: AppendRequest, scope: Scope) -> Replica | AppendResponse:
        """The replica to append to, or the answer."""
        ...

    async def set_suspend(self, replica: Replica, decision: SetSuspend) -> None:
        """Store the suspension in the journal's spec, unless the spec has changed meanwhile."""
        ...


class Appending:
    def __init__(self, host: AppendHost) -> None:
        self._host = host
        self._budget = BODY_BUDGET_BYTES
        self._done_at_once = 0

    async def append(
        self, replica: Replica, request: AppendRequest, content: Content, scope: Scope
    ) -> AppendResponse:
        # An append that is done at once does not wait anywhere: a cancelled caller must be told here.
        await trio.lowlevel.checkpoint_if_cancelled()
        items: list[AppendItem] = []
        if scope.deadline is None:
            return await self._append(replica, request, content, scope, items)
        with trio.move_on_at(scope.deadline):
            return await self._append(replica, request, content, scope, items)
        journal = replica.name
        if items and items[-1].sealed:
            raise OutcomeUnknown(
                f"append to {journal}: the deadline passed while it was being committed",
                journal=journal,
                hint="it is most likely in the journal: read to find out",
            )
        raise DeadlineExceeded(
            f"append to {journal}: the deadline passed, and nothing was written", journal=journal
        )

    async def _append(
        self,
        replica: Replica,
        request: AppendRequest,
        content: Content,
        scope: Scope,
        items: list[AppendItem],
    ) -> AppendResponse:
        throttled = replica.spec.max_append_rate > 0
        if isinstance(content, bytes | bytearray | memoryview):
            if len(content) <= SMALL_BODY_BYTES and not throttled:
                return await self._whole(replica, request, bytes(content), scope, items)
            view = memoryview(content).cast("B")
            slices = [view[at : at + STREAM_SLICE_BYTES] for at in range(0, len(view), STREAM_SLICE_BYTES)]
            return await self._streamed(replica, request, slices, None, scope, items)

        iterator = aiter(content)
        try:
            if throttled:
                return await self._streamed(replica, request, [], iterator, scope, items)
            return await self._received(replica, request, iterator, scope, items)
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    async def _received(
        self,
        replica: Replica,
        request: AppendRequest,
        iterator: AsyncIterator[Buffer],
        scope: Scope,
        items: list[AppendItem],
    ) -> AppendResponse:
        received: list[Buffer] = []
        length = reserved = 0
        runtime = self._host.runtime
        flow = FlowControl(self._host.min_append_rate)
        flow.start(0, round(runtime.clock.monotonic() * 1000))
        try:
            async with aclosing(receive(iterator, flow, runtime)) as chunks:
                async for chunk in chunks:
                    received.append(bytes(chunk))
                    length += len(chunk)
                    if length > SMALL_BODY_BYTES or self._budget < len(chunk):
                        break
                    self._budget -= len(chunk)
                    reserved += len(chunk)
                else:
                    return await self._whole(replica, request, b"".join(received), scope, items)
            return await self._streamed(replica, request, received, iterator, scope, items)
        finally:
            self._budget += reserved

    async def _whole(
        self,
        replica: Replica,
        request: AppendRequest,
        content: bytes,
        scope: Scope,
        items: list[AppendItem],
    ) -> AppendResponse:
        item = AppendItem(request, content)
        items.append(item)
        replica.enqueue(item)
        while True:
            outcome = item.outcome
            if outcome is None:
                outcome = await item.wait(replica.abandon)
            else:
                # Committed in this very call. Others get their turn at every 16th such append: a turn costs as much as
                # the append itself.
                self._done_at_once += 1
                if self._done_at_once % APPENDS_PER_TURN == 0:
                    await trio.lowlevel.cancel_shielded_checkpoint()
            if type(outcome) is AppendResponse:
                return outcome
            answer = await self._after(replica, item, outcome, scope)
            if answer is not None:
                return answer

    async def _streamed(
        self,
        replica: Replica,
        request: AppendRequest,
        first: Sequence[Buffer],
        rest: AsyncIterator[Buffer] | None,
        scope: Scope,
        items: list[AppendItem],
    ) -> AppendResponse:
        item = AppendItem(request, b"", held=True)
        items.append(item)
        replica.enqueue(item)
        while True:
            outcome = await item.wait(replica.abandon)
            if outcome is YOUR_TURN:
                outcome = await replica.stream(item, first, rest)
            if isinstance(outcome, AppendResponse):
                return outcome
            answer = await self._after(replica, item, outcome, scope)
            if answer is not None:
                return answer

    async def _after(
        self, replica: Replica, item: AppendItem, outcome: object, scope: Scope
    ) -> AppendResponse | None:
        """Raise an error; or change the journal's suspension while the append holds it. None: it is first in the
        queue again, and decided anew. (At the back of it, one that suspends and one that resumes could undo each
        other for ever.)"""
        if isinstance(outcome, BroadsheetError):
            raise outcome
        assert isinstance(outcome, SetSuspend)
        answer: AppendResponse | None = None
        again = False
        try:
            await self._host.set_suspend(replica, outcome)
            resolved = await self._host.resolve_append(item.request, scope)
            if isinstance(resolved, AppendResponse):
                answer = resolved
            elif resolved is not replica:
                raise AppendFailed(f"{replica.name} was deleted", journal=replica.name)
            else:
                again = True
        finally:
            replica.let_go(item, again=again)
        return answer

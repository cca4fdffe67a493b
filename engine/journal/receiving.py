"""Taking in the content of an append at the rates that flow control allows (spec/replication.md §5.7)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import trio

from broadsheet.engine.errors import SlowAppend
from broadsheet.engine.journal.flow_control import QUANTUM_MS, SLOW_APPEND_TEXT, FlowControl, Underflow
from broadsheet.engine.runtime import Runtime

__all__ = ["chained", "receive"]

Buffer = bytes | bytearray | memoryview


async def chained(first: Sequence[Buffer], rest: AsyncIterator[Buffer] | None) -> AsyncGenerator[Buffer, None]:
    """What was received already, then what is still to come."""
    for buffer in first:
        yield buffer
        await trio.lowlevel.checkpoint()
    if rest is not None:
        async for buffer in rest:
            yield buffer


async def receive(
    chunks: AsyncIterator[Buffer], flow: FlowControl, runtime: Runtime
) -> AsyncGenerator[Buffer, None]:
    """The chunks, each when it is paid for. Raises `SlowAppend`, and what the source raises."""
    clock = runtime.clock
    last_ms = round(clock.monotonic() * 1000)
    try:
        while True:
            chunk: Buffer | None = None
            ended = False
            with trio.move_on_after(flow.ms_to_underflow() / 1000):
                try:
                    chunk = await anext(chunks)
                    if type(chunk) is memoryview and chunk.itemsize != 1:
                        chunk = chunk.cast("B")
                except StopAsyncIteration:
                    ended = True
            now_ms = round(clock.monotonic() * 1000)
            if ended:
                return
            if chunk is None:
                flow.tick(now_ms)  # the credit is used up: raises, unless time was not what it seemed
                if now_ms - last_ms >= 2 * QUANTUM_MS:
                    raise Underflow
                continue
            if now_ms - last_ms >= QUANTUM_MS:
                flow.tick(now_ms)
                last_ms = now_ms
            if len(chunk) and not flow.chunk(len(chunk)):
                while True:
                    await trio.sleep(max(1, min(flow.ms_to_release(), QUANTUM_MS)) / 1000)
                    last_ms = round(clock.monotonic() * 1000)
                    if flow.tick(last_ms):
                        break
            yield chunk
    except Underflow:
        raise SlowAppend(
            f"append stream: {SLOW_APPEND_TEXT}",
            hint=f"send at least {flow.min_rate} bytes/s, or buffer the content before appending it",
        ) from None

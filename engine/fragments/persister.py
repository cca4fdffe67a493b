"""The persister: completed spools become fragments of a store (spec/replication.md §10).

One task takes them in order. A failure is logged and tried again with a growing pause, without end: the spool stays
where it is, and nothing is lost by waiting. Nothing here deletes; the replica gives a spool up when the store is
known to have it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from broadsheet.engine.errors import BroadsheetError, CorruptData
from broadsheet.engine.fragments.codecs import compress, require_supported
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.fragments.store import FragmentStore
from broadsheet.engine.runtime import Runtime

__all__ = ["PersistTask", "Persister"]

logger = logging.getLogger("broadsheet.engine")

PIECE_BYTES = 1 << 20
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 60.0


class PersistTask(Protocol):
    """A completed spool. `store` is the one that its journal's spec names now, None if it names none or the
    journal is gone; raises `BroadsheetError` if there is one that cannot be used."""

    fragment: Fragment
    spool_path: str

    def store(self) -> FragmentStore | None: ...

    def is_wanted(self) -> bool:
        """False once the journal is gone or the spool was given up."""
        ...

    def done(self, fragment: Fragment) -> None: ...


@dataclass(slots=True)
class _Waiting:
    task: PersistTask
    due: float
    attempts: int = 0


class Persister:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queue: list[_Waiting] = []
        self._wake = trio.Event()
        self._busy = False
        self._idle = trio.lowlevel.ParkingLot()
        self.last_error = ""

    def submit(self, task: PersistTask) -> None:
        self._queue.append(_Waiting(task, -math.inf))
        self._wake.set()

    @property
    def pending(self) -> int:
        """Spools that are not in their store yet."""
        return len(self._queue) + self._busy

    async def settle(self) -> None:
        """Wait until nothing is due now (what failed and is to be retried later does not count)."""
        while self._busy or any(it.due <= self._runtime.clock.monotonic() for it in self._queue):
            await self._idle.park()

    async def run(self) -> None:
        while True:
            now = self._runtime.clock.monotonic()
            index = next((i for i, it in enumerate(self._queue) if it.due <= now), None)
            if index is None:
                self._idle.unpark_all()
                self._wake = trio.Event()
                with trio.move_on_at(min((it.due for it in self._queue), default=math.inf)):
                    await self._wake.wait()
                continue
            waiting = self._queue.pop(index)
            self._busy = True
            try:
                if not await self._persist(waiting):
                    self._queue.append(waiting)
            finally:
                self._busy = False

    def retry_now(self) -> None:
        """Something that may have stood in the way has changed."""
        for waiting in self._queue:
            waiting.due = -math.inf
        self._wake.set()

    async def _persist(self, waiting: _Waiting) -> bool:
        task = waiting.task
        if not task.is_wanted():
            return True
        try:
            store = task.store()
            if store is None:
                waiting.due = math.inf  # until its spec names one: `retry_now`
                return False
            require_supported(task.fragment.compression_codec)
            fragment = await self._runtime.threads.run(partial(self._put, store, task))
        except (OSError, BroadsheetError) as error:
            self.last_error = f"failed to persist {task.fragment.content_path}: {error}"
            pause = min(LAST_RETRY_S, FIRST_RETRY_S * 2**waiting.attempts)
            waiting.attempts += 1
            waiting.due = self._runtime.clock.monotonic() + pause
            logger.warning("%s (will retry in %.3g s)", self.last_error, pause)
            return False
        self.last_error = ""
        if task.is_wanted():
            task.done(fragment)
        return True

    def _put(self, store: FragmentStore, task: PersistTask) -> Fragment:
        """In a thread."""
        pieces = self._content(task)
        return store.put(task.fragment, compress(task.fragment.compression_codec, pieces))

    def _content(self, task: PersistTask) -> Iterator[bytes]:
        """The spool's content, refused if it is not what its name will say."""
        import hashlib

        sha = hashlib.sha1(usedforsecurity=False)
        length = task.fragment.length
        file = self._runtime.files.open_read(task.spool_path)
        try:
            offset = 0
            while offset < length:
                piece = file.pread(min(PIECE_BYTES, length - offset), offset)
                if not piece:
                    break
                sha.update(piece)
                yield piece
                offset += len(piece)
        finally:
            file.close()
        if sha.digest() != task.fragment.sum:
            raise CorruptData(
                f"the spool of {task.fragment.content_path} does not hold what was committed",
                path=task.spool_path,
                journal=task.fragment.journal,
                offset=task.fragment.begin,
            )



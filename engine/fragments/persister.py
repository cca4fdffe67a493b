"""The persister: completed spools become fragments of a store (spec/replication.md §10).

One task takes them in order. A failure is logged and tried again with a growing pause, without end: the spool stays
where it is, and nothing is lost by waiting. Nothing here deletes; the replica gives a spool up when the store is
known to have it.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
from collections import deque
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
LAST_DOUBLING = 10


class PersistTask(Protocol):
    """A completed spool, to be put into the store that its journal's spec names at that time."""

    fragment: Fragment
    spool_path: str

    def store(self) -> FragmentStore | None:
        """None if the spec names none (any more). Raises `BroadsheetError` for one that cannot be used."""
        ...

    def is_wanted(self) -> bool:
        """False once the journal is gone or the spool was given up."""
        ...

    def done(self, fragment: Fragment) -> None: ...


@dataclass(slots=True, order=True)
class _Later:
    due: float
    number: int
    task: PersistTask
    attempts: int
    error: str


class Persister:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ready: deque[tuple[PersistTask, int, str]] = deque()
        self._later: list[_Later] = []
        self._numbers = 0
        self._wake = trio.Event()
        self._busy = False
        self._idle = trio.lowlevel.ParkingLot()
        self._trying = ""

    def submit(self, task: PersistTask) -> None:
        self._ready.append((task, 0, ""))
        self._wake.set()

    @property
    def pending(self) -> int:
        """Spools on their way to a store."""
        return len(self._ready) + len(self._later) + self._busy

    @property
    def last_error(self) -> str:
        """Why a spool that is still wanted is not in its store, "" if there is none such."""
        waiting = ((it.task, it.error) for it in self._later)
        ready = ((task, error) for task, _, error in self._ready)
        return self._trying or next((error for task, error in (*waiting, *ready) if error and task.is_wanted()), "")

    async def settle(self) -> None:
        """Wait until nothing is due now (what failed and is to be tried again later does not count)."""
        while self._busy or self._ready:
            await self._idle.park()

    def retry_now(self) -> None:
        """Something that may have stood in the way has changed."""
        self._ready.extend((it.task, it.attempts, it.error) for it in sorted(self._later))
        self._later.clear()
        self._wake.set()

    async def run(self) -> None:
        while True:
            now = self._runtime.clock.monotonic()
            while self._later and self._later[0].due <= now:
                later = heapq.heappop(self._later)
                self._ready.append((later.task, later.attempts, later.error))
            if not self._ready:
                self._idle.unpark_all()
                self._wake = trio.Event()
                with trio.move_on_at(self._later[0].due if self._later else math.inf):
                    await self._wake.wait()
                continue
            task, attempts, self._trying = self._ready.popleft()
            self._busy = True
            try:
                await self._persist(task, attempts)
            finally:
                self._busy = False
                self._trying = ""

    async def _persist(self, task: PersistTask, attempts: int) -> None:
        if not task.is_wanted():
            return
        try:
            store = task.store()
            if store is None:
                return
            require_supported(task.fragment.compression_codec)
            fragment = await self._runtime.threads.run(partial(self._put, store, task))
        except (OSError, BroadsheetError) as error:
            text = f"failed to persist {task.fragment.content_path}: {error}"
            pause = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts, LAST_DOUBLING))
            self._numbers += 1
            due = self._runtime.clock.monotonic() + pause
            heapq.heappush(self._later, _Later(due, self._numbers, task, attempts + 1, text))
            logger.warning("%s (will retry in %.3g s)", text, pause)
            return
        if task.is_wanted():
            task.done(fragment)

    def _put(self, store: FragmentStore, task: PersistTask) -> Fragment:
        """In a thread."""
        return store.put(task.fragment, compress(task.fragment.compression_codec, self._content(task)))

    def _content(self, task: PersistTask) -> Iterator[bytes]:
        """The spool's content, refused if it is not what its name will say."""
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

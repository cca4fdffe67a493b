"""Files of local spools: numbered, opened as needed, reused (docs/format.md §4).

Any number of spools, few open files: handles are kept for the most recently used only. A file whose spool is
retired is reused for a new one (overwriting is many times faster than extending, stack.md §3), but only after a
checkpoint: until then the log may be replayed against it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from broadsheet.engine.journal.durable import WritesBroken, close_quietly, sync_dir, sync_file
from broadsheet.engine.runtime import File, Runtime

__all__ = ["SpoolCheckpoint", "SpoolFiles", "parse_spool_name", "spool_name"]

OPEN_FILES = 256
SPARE_FILES = 4
GROW_AHEAD_FROM = 1 << 20
GROW_AHEAD_BYTES = 16 << 20


def spool_name(spool_id: int) -> str:
    return f"{spool_id:016x}.spool"


def parse_spool_name(name: str) -> int | None:
    stem, dot, suffix = name.partition(".")
    if suffix != "spool" or not dot or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class SpoolCheckpoint:
    """What a checkpoint has to do (`sync`, in a thread) and may do afterwards (`SpoolFiles.finish`)."""

    dirty: frozenset[int]
    retired: tuple[int, ...]
    sync: Callable[[], None]


class SpoolFiles:
    def __init__(self, runtime: Runtime, folder: str, next_id: int, *, in_memory: bool = False) -> None:
        self._in_memory = in_memory
        self._files = runtime.files
        self._folder = folder
        self._open: OrderedDict[int, File] = OrderedDict()
        self._dirty: set[int] = set()
        self._broken: WritesBroken | None = None
        self._grown: dict[int, int] = {}
        self._retired: list[int] = []
        self._spares: list[str] = []
        self._names_unsynced = True  # the process before this one may have died before it synced them
        self._names_lock = threading.Lock()
        self.unsynced_bytes = 0
        self.next_id = next_id

    def path(self, spool_id: int) -> str:
        return f"{self._folder}/{spool_name(spool_id)}"

    def create(self) -> int:
        """A new spool's file; what it holds is not to be read before it is written. Raises OSError."""
        spool_id = self.next_id
        self.next_id += 1  # also if this fails: who knows what is under the name then
        path = self.path(spool_id)
        try:
            if self._spares:
                self._files.rename(self._spares.pop(), path)
            file = self._files.open(path, create=True)
        finally:
            self._names_unsynced = True  # after the name is there: whoever clears it, in another thread, syncs it
        self._keep(spool_id, file)
        return spool_id

    def file(self, spool_id: int) -> File:
        file = self._open.get(spool_id)
        if file is not None:
            self._open.move_to_end(spool_id)
            return file
        file = self._files.open(self.path(spool_id))
        self._keep(spool_id, file)
        return file

    def _keep(self, spool_id: int, file: File) -> None:
        self._open[spool_id] = file
        if len(self._open) > OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            close_quietly(oldest)

    def write(self, spool_id: int, content: bytes | bytearray | memoryview, offset: int) -> None:
        """Write content into a spool's file. Raises OSError."""
        file = self.file(spool_id)
        end = offset + len(content)
        if not self._in_memory and end >= GROW_AHEAD_FROM and end > self._grown.get(spool_id, 0):
            # A write inside the file's length costs half of one that makes it longer (measured).
            grown = end + GROW_AHEAD_BYTES
            if file.size() < grown:
                file.truncate(grown)
            self._grown[spool_id] = grown
        file.pwrite((content,), offset)
        self.note_written(spool_id, len(content))

    def note_written(self, spool_id: int, length: int) -> None:
        self._dirty.add(spool_id)
        self.unsynced_bytes += length

    def sync(self, spool_ids: list[int]) -> None:
        """Make these spools' content and names durable; runs in a thread, on handles of its own. Raises
        `WritesBroken`, and OSError if one cannot be opened."""
        self.refuse_if_broken()
        for spool_id in spool_ids:
            file = self._files.open(self.path(spool_id))
            try:
                sync_file(file)
            except WritesBroken as error:
                self._broken = error
                raise
            finally:
                close_quietly(file)
        with self._names_lock:  # whoever finds the names synced must not be ahead of the one who syncs them
            if self._names_unsynced:
                self._names_unsynced = False  # cleared first: a name made meanwhile sets it again
                try:
                    sync_dir(self._files, self._folder)
                except BaseException as error:
                    self._names_unsynced = True
                    if isinstance(error, WritesBroken):
                        self._broken = error
                    raise

    def refuse_if_broken(self) -> None:
        """After a sync of one thread has failed, one of another proves nothing. Raises `WritesBroken`."""
        if self._broken is not None:
            raise WritesBroken(str(self._broken))

    def retire(self, spool_id: int) -> None:
        """The spool's content is elsewhere, or not wanted any more."""
        self._retired.append(spool_id)
        self._grown.pop(spool_id, None)
        self._dirty.discard(spool_id)
        if self._in_memory:  # no log speaks of it, and open handles stay readable
            self._retired.clear()
            self._open.pop(spool_id, None)
            self._files.unlink(self.path(spool_id))

    @property
    def retired(self) -> int:
        """Spools whose files are free after the next checkpoint."""
        return len(self._retired)

    def begin_checkpoint(self) -> SpoolCheckpoint:
        dirty, self._dirty = frozenset(self._dirty), set()
        retired, self._retired = tuple(self._retired), []
        self.unsynced_bytes = 0
        return SpoolCheckpoint(dirty, retired, lambda: self.sync(sorted(dirty)))

    def abandon(self, checkpoint: SpoolCheckpoint) -> None:
        """The checkpoint failed: all of it is still to be done."""
        self._dirty |= checkpoint.dirty
        self._retired = [*checkpoint.retired, *self._retired]

    def finish(self, checkpoint: SpoolCheckpoint) -> None:
        """A durable snapshot no longer speaks of the retired spools: their files are free."""
        for spool_id in checkpoint.retired:
            file = self._open.pop(spool_id, None)
            if file is not None:
                close_quietly(file)
            if len(self._spares) < SPARE_FILES:
                self._spares.append(self.path(spool_id))
            else:
                self._files.unlink(self.path(spool_id))

    def adopt_spares(self, paths: list[str]) -> None:
        """Files found at open that nothing speaks of."""
        for path in paths:
            if len(self._spares) < SPARE_FILES:
                self._spares.append(path)
            else:
                self._files.unlink(path)

    def close(self) -> None:
        for file in self._open.values():
            close_quietly(file)
        self._open.clear()

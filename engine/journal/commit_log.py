"""The commit log's files: writing, rotating, recycling (docs/format.md §3).

One per engine. Positions are byte offsets in an endless log; each file holds the records from its base on. The
calls are synchronous: the committer decides which run in a thread. Writes and rotation have one caller at a time.

A file is recycled only through `recycle_before`, which the checkpoint calls when everything the file tells of is
safe elsewhere.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from broadsheet.engine.journal.durable import WritesBroken, close_quietly, sync_dir, sync_file
from broadsheet.engine.journal.log_format import (
    FILE_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    Buffer,
    FileHeader,
    encode_file_header,
    frame,
    framed_length,
)
from broadsheet.engine.runtime import File, Files, Runtime

__all__ = ["DEFAULT_FILE_BYTES", "CommitLog", "log_name", "parse_log_name"]

DEFAULT_FILE_BYTES = 16 << 20
SPARE_FILES = 2
ALLOCATE_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def log_name(base: int) -> str:
    return f"{base:016x}.log"


def parse_log_name(name: str) -> int | None:
    stem, dot, suffix = name.partition(".")
    if suffix != "log" or not dot or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


class CommitLog:
    """`position` is where the next record goes; everything below `proven` is durable."""

    def __init__(
        self,
        runtime: Runtime,
        folder: str,
        engine_id: int,
        *,
        file_bytes: int = DEFAULT_FILE_BYTES,
        durable: bool,
    ) -> None:
        self._files: Files = runtime.files
        self._random = runtime.random
        self._folder = folder
        self._engine_id = engine_id
        self._file_bytes = file_bytes
        self._durable = durable
        self._file: File | None = None
        self._salt = 0
        self._base = 0
        self._allocated = 0
        self.position = 0
        self.proven = 0
        self._unsynced: list[File] = []  # rotated away from, not yet synced
        self._names_unsynced = False
        self._used: list[tuple[int, str]] = []  # (base, path) of older files, oldest first
        self._spares: list[str] = []

    def adopt(self, used: Sequence[tuple[int, str]]) -> None:
        """Files found at open: recycled by and by, when `recycle_before` passes them."""
        self._used = sorted(used)

    @property
    def bytes_in_use(self) -> int:
        """Log bytes since the oldest file that is still needed."""
        return self.position - (self._used[0][0] if self._used else self._base)

    def begin(self, position: int, proven: int) -> None:
        """Start writing at `position`, in a file of its own."""
        self.position = position
        self.proven = proven
        self._open_file()

    def write(self, records: Sequence[Sequence[Buffer]]) -> None:
        """Write records one after another. They are in the page cache when this returns.

        Raises OSError with ENOSPC if there is no room: nothing of them will ever be read. Raises `WritesBroken` on
        any other failure: some of them may be.
        """
        lengths = [framed_length(sum(map(len, payload))) for payload in records]
        total = sum(lengths)
        if self.position - self._base + total + FILE_HEADER_BYTES > self._file_bytes:
            # Before anything is written: one call's records are in one file, so that a failure takes them all back.
            self.rotate()
        buffers: list[Buffer] = []
        position = self.position
        for payload, length in zip(records, lengths, strict=True):
            buffers += frame(self._salt, position, self.proven, payload)
            position += length
        if buffers:
            self._write(buffers, self.position)
        self.position = position

    def write_one(self, payload: Sequence[Buffer]) -> None:
        """`write` for the one record that an append in mode `os` makes: the hot path."""
        position = self.position
        length = RECORD_HEADER_BYTES + 7
        for part in payload:
            length += len(part)
        length &= ~7
        if position - self._base + length + FILE_HEADER_BYTES > self._file_bytes:
            self.write([payload])
            return
        self._write([b"".join(frame(self._salt, position, self.proven, payload))], position)
        self.position = position + length

    def _write(self, buffers: list[Buffer], position: int) -> None:
        assert self._file is not None
        offset = FILE_HEADER_BYTES + position - self._base
        if self._durable:
            self._allocate(offset + sum(map(len, buffers)))
        try:
            self._file.pwrite(buffers, offset)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise WritesBroken(f"writing {self._file.path}: {error}") from error
            self._erase(offset)
            raise

    def _allocate(self, end: int) -> None:
        """Zeros ahead of the records: a sync of bytes that overwrite others is a third cheaper than of bytes that
        make the file longer. Without room for them, go without."""
        assert self._file is not None
        if end <= self._allocated:
            return
        size = min(max(end, self._allocated + min(ALLOCATE_BYTES, max(self._allocated, 65536))), self._file_bytes)
        try:
            if size > self._allocated:
                self._file.pwrite([bytes(size - self._allocated)], self._allocated)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise WritesBroken(f"writing {self._file.path}: {error}") from error
        self._allocated = max(end, size)

    def _erase(self, offset: int) -> None:
        """A write failed for lack of space. Some whole records of it may be there: take back the first, without
        which none of the others is read."""
        assert self._file is not None
        try:
            if self._file.size() > offset:
                self._file.pwrite([bytes(min(RECORD_HEADER_BYTES, self._file.size() - offset))], offset)
                if self._durable:
                    sync_file(self._file)
        except OSError as error:
            raise WritesBroken(f"taking back a record of {self._file.path}: {error}") from error

    def sync(self) -> None:
        """Make everything written so far durable. Raises `WritesBroken`: a failed sync is never tried again."""
        position = self.position
        for file in (*self._unsynced, self._file):
            assert file is not None
            sync_file(file)
        if self._names_unsynced:
            sync_dir(self._files, self._folder)
            self._names_unsynced = False
        for file in self._unsynced:
            close_quietly(file)
        self._unsynced.clear()
        self.proven = position

    def rotate(self) -> None:
        """Go on in a new file, unless this one has no records yet. Raises OSError (ENOSPC and others) if there can
        be none; the old one stays."""
        if self._file is not None and self.position == self._base:
            return
        old, base = self._file, self._base
        self._open_file()
        if old is not None:
            self._used.append((base, old.path))
            if self._durable:
                self._unsynced.append(old)
            else:
                close_quietly(old)

    def _open_file(self) -> None:
        path = f"{self._folder}/{log_name(self.position)}"
        salt = self._random.getrandbits(63) | 1
        header = encode_file_header(FileHeader(salt, self.position, self.proven, self._engine_id))
        file: File | None = None
        spare = self._spares.pop() if self._spares else None
        try:
            if spare is not None:
                self._files.rename(spare, path)
            file = self._files.open(path, create=True)
            self._allocated = max(file.size(), FILE_HEADER_BYTES)
            file.pwrite([header], 0)
        except OSError:
            if file is not None:
                close_quietly(file)
            for left in (spare, path):  # `path` must not stay between the files in use: the next one takes it over
                if left is not None and self._files.exists(left):
                    self._spares.append(left)
            raise
        self._file, self._salt, self._base = file, salt, self.position
        self._names_unsynced = True

    def recycle_before(self, position: int) -> None:
        """Everything below `position` is safe elsewhere: keep a few of those files for reuse, unlink the rest."""
        while self._used and self._used[0][0] < position:
            _, path = self._used.pop(0)
            if len(self._spares) < SPARE_FILES:
                self._spares.append(path)
            else:
                self._files.unlink(path)

    def close(self) -> None:
        for file in self._unsynced:
            close_quietly(file)
        self._unsynced.clear()
        if self._file is not None:
            close_quietly(self._file)
            self._file = None

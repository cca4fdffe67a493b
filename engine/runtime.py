"""`Runtime`: the clock, randomness, files and threads of the process, injected. The third seam (design.md §2).

Nothing else in the engine touches `time`, `random`, `os` files or threads. The real one below costs a method call
more than the system call; the simulated one (`broadsheet.testing.simulation`) runs everything in one thread from
one seed, on a disk that forgets, tears and fails. Both pass `broadsheet.testing.conformance.runtime`.

**Files.** The calls are those the durability argument of docs/format.md is made of, and no more. Each is
synchronous; `sync` and `sync_dir` may take milliseconds and are called in a thread (`Threads.run`). Paths are
absolute strings. Errors are `OSError` as the system raises them. What is guaranteed after a power cut is only what
`sync` (content and length of a file) and `sync_dir` (names in a folder) returned from.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

import trio

__all__ = [
    "Clock",
    "DirEntry",
    "File",
    "Files",
    "MemoryFiles",
    "OsFiles",
    "RealRuntime",
    "Runtime",
    "Threads",
    "Worker",
]

T = TypeVar("T")
ReadableBuffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a folder: size in bytes, modification time in unix seconds."""

    name: str
    is_dir: bool
    size: int
    mod_time: int


class File(Protocol):
    """An open file. `path` is the name it was opened under."""

    path: str

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at the end of the file."""
        ...

    def pwrite(self, buffers: Sequence[ReadableBuffer], offset: int) -> None:
        """Write all buffers, one after another, from `offset` on. On an error any part of them may be written."""
        ...

    def sync(self) -> None:
        """Make content and length survive a power cut (fdatasync)."""
        ...

    def truncate(self, length: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Files(Protocol):
    """The file system."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; `create` makes it (mode 0600) where it is missing."""
        ...

    def open_read(self, path: str) -> File:
        """Open for reading only."""
        ...

    def exists(self, path: str) -> bool: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def make_dirs(self, path: str, mode: int = 0o750) -> None:
        """Make the folder and its parents where they are missing."""
        ...

    def list_dir(self, path: str) -> list[DirEntry]:
        """Names in a folder in byte order; a missing folder is empty."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names of a folder survive a power cut."""
        ...

    def lock(self, path: str) -> Callable[[], None]:
        """Take an exclusive lock on a file made for it; returns its release. Raises BlockingIOError if taken."""
        ...


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall time in nanoseconds since the unix epoch. May jump."""
        ...

    def monotonic(self) -> float:
        """Seconds on trio's clock: the one of deadlines and sleeps."""
        ...


class Worker(Protocol):
    """One thread that runs calls in the order they are given."""

    def submit(self, call: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run `call` in the thread, then `done` in the event loop, with what `call` raised. `done` must not raise."""
        ...

    def close(self) -> None:
        """Let the thread end when it has run what it was given."""
        ...


class Threads(Protocol):
    async def run(self, call: Callable[[], T]) -> T:
        """Run a blocking call outside the event loop. Not cancellable: it returns when the call does."""
        ...

    def worker(self) -> Worker:
        """A thread of one's own, for what must be quick: no task is woken on the way there and back."""
        ...


class Runtime(Protocol):
    clock: Clock
    files: Files
    threads: Threads
    random: random.Random


# --- The real one -----------------------------------------------------------------------------------------


class OsFile:
    """A file descriptor. Reads and writes go to the page cache, straight from the loop (stack.md §3)."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]  # a signal, or a file over 2 GiB: the system may return less
        have = len(data)
        while have < length:
            data = os.pread(self._fd, length - have, offset + have)
            if not data:
                break
            parts.append(data)
            have += len(data)
        return b"".join(parts)

    def pwrite(self, buffers: Sequence[ReadableBuffer], offset: int) -> None:
        if len(buffers) == 1:
            buffer = buffers[0]
            written = os.pwrite(self._fd, buffer, offset)
            if written == len(buffer):
                return
            rest: ReadableBuffer = memoryview(buffer)[written:]
        else:
            total = sum(map(len, buffers))
            written = os.pwritev(self._fd, buffers, offset) if len(buffers) <= 1000 else 0
            if written == total:
                return
            rest = memoryview(b"".join(buffers))[written:]
        offset += written
        while len(rest):
            written = os.pwrite(self._fd, rest, offset)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            rest = rest[written:]
            offset += written

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OsFiles:
    """The file system of the machine."""

    def open(self, path: str, *, create: bool = False) -> OsFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return OsFile(path, os.open(path, flags, 0o600))

    def open_read(self, path: str) -> OsFile:
        return OsFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_dirs(self, path: str, mode: int = 0o750) -> None:
        os.makedirs(path, mode, exist_ok=True)

    def list_dir(self, path: str) -> list[DirEntry]:
        entries = []
        try:
            with os.scandir(path) as names:
                for name in names:
                    try:
                        info = name.stat()
                    except FileNotFoundError:
                        continue  # renamed away since the folder was read
                    entries.append(
                        DirEntry(name.name, stat.S_ISDIR(info.st_mode), info.st_size, int(info.st_mtime))
                    )
        except FileNotFoundError:
            return []
        entries.sort(key=lambda entry: entry.name)
        return entries

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> Callable[[], None]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return lambda: os.close(fd)


class MemoryFile:
    """A file of `MemoryFiles`. Stays readable through open handles after it is unlinked, as POSIX has it."""

    __slots__ = ("_data", "path")

    def __init__(self, path: str, data: bytearray) -> None:
        self.path = path
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        return bytes(self._data[offset : offset + length])

    def pwrite(self, buffers: Sequence[ReadableBuffer], offset: int) -> None:
        data = self._data
        for buffer in buffers:
            if not len(buffer):
                continue
            if offset > len(data):
                data.extend(bytes(offset - len(data)))
            data[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def sync(self) -> None:
        pass

    def truncate(self, length: int) -> None:
        if length < len(self._data):
            del self._data[length:]
        else:
            self._data.extend(bytes(length - len(self._data)))

    def size(self) -> int:
        return len(self._data)

    def close(self) -> None:
        pass


class MemoryFiles:
    """A file system in memory: what `Engine.in_memory()` keeps its spools and fragments in."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._files: dict[str, bytearray] = {}
        self._times: dict[str, int] = {}
        self._dirs: dict[str, set[str]] = {"/": set()}
        self._locks: set[str] = set()
        self._now_s = now_s

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        data = self._files.get(path)
        if data is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            parent, _, name = path.rpartition("/")
            self._children(parent or "/").add(name)
            data = self._files[path] = bytearray()
            self._times[path] = int(self._now_s())
        return MemoryFile(path, data)

    def open_read(self, path: str) -> MemoryFile:
        return self.open(path)

    def exists(self, path: str) -> bool:
        return path in self._files or path.rstrip("/") in self._dirs

    def rename(self, source: str, target: str) -> None:
        if source not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if source == target:
            return
        parent, _, name = target.rpartition("/")
        self._children(parent or "/").add(name)
        self._files[target] = self._files.pop(source)
        self._times[target] = self._times.pop(source)
        parent, _, name = source.rpartition("/")
        self._children(parent or "/").discard(name)

    def unlink(self, path: str) -> None:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del self._files[path], self._times[path]
        parent, _, name = path.rpartition("/")
        self._children(parent or "/").discard(name)

    def make_dirs(self, path: str, mode: int = 0o750) -> None:
        path = path.rstrip("/") or "/"
        if path in self._dirs:
            return
        if path in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        parent, _, name = path.rpartition("/")
        self.make_dirs(parent or "/", mode)
        self._dirs[parent or "/"].add(name)
        self._dirs[path] = set()

    def list_dir(self, path: str) -> list[DirEntry]:
        path = path.rstrip("/") or "/"
        prefix = "" if path == "/" else path
        entries = []
        for name in sorted(self._dirs.get(path, ())):
            child = f"{prefix}/{name}"
            if child in self._dirs:
                entries.append(DirEntry(name, True, 0, 0))
            else:
                entries.append(DirEntry(name, False, len(self._files[child]), self._times[child]))
        return entries

    def sync_dir(self, path: str) -> None:
        pass

    def lock(self, path: str) -> Callable[[], None]:
        if path in self._locks:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
        self.open(path, create=True)
        self._locks.add(path)
        return lambda: self._locks.discard(path)

    def walk(self) -> Iterator[str]:
        """Every file's path, for tests and inspection."""
        return iter(sorted(self._files))

    def _children(self, folder: str) -> set[str]:
        try:
            return self._dirs[folder]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from None


class RealClock:
    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return trio.current_time()


class RealWorker:
    """A hop there and back costs about 80 us; `trio.to_thread` needs 130."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._calls: SimpleQueue[tuple[Callable[[], None], Callable[[BaseException | None], None]] | None]
        self._calls = SimpleQueue()
        # A daemon: a process that is told to die does not wait for a disk that hangs.
        threading.Thread(target=self._run, name="broadsheet worker", daemon=True).start()

    def submit(self, call: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._calls.put((call, done))

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:  # it belongs to whoever asked, whatever it is
                error = raised
            try:
                self._token.run_sync_soon(done, error)
            except trio.RunFinishedError:
                return
            del item, call, done, error


class RealThreads:
    async def run(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call)

    def worker(self) -> Worker:
        return RealWorker()


class RealRuntime:
    """This process, this machine. `files` may be `MemoryFiles()` for an engine that leaves nothing behind."""

    __slots__ = ("clock", "files", "random", "threads")

    def __init__(self, files: Files | None = None) -> None:
        self.clock: Clock = RealClock()
        self.files: Files = files if files is not None else OsFiles()
        self.threads: Threads = RealThreads()
        self.random: random.Random = secrets.SystemRandom()

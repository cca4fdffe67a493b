"""A disk that forgets, tears and fails: `Files` of `broadsheet.engine.runtime`, in memory and from one seed.

**Three copies of the truth.** A file is what the process reads (`_Inode.data`, the page cache), and what
would be left of it after a power cut. The second is kept as a difference, so that a write costs little:
`undo` has the old bytes of each 512-byte sector that was durable and was written since, `pending` the
un-synced writes in order. A sync drops both. Names are kept the same way: the live names, the durable names,
and the un-synced operations.

**What a power cut does** (`crash(rng, "power")`), per file, at the choice of the generator: nothing un-synced
is left, or all of it, or the first k writes, or what any subset of the writes left in the sectors they
touched, or each sector in any version it had since the last sync, independently. The length is, independently
again, any it had since then; what was never written there reads as zeros. A sector is atomic.

A name survives if `sync_dir` of its folder returned after it was made; other operations on names survive in
any subset, but each name's own history is kept in order, and a rename is one operation. `sync` of a file
makes no name durable, and the names in a folder are lost with the folder's own.

**What kill -9 does** (`crash(rng, "process")`): handles and locks are gone, all else stays, still un-synced.

**Faults** hit calls by number (`fail_at`, `crash_at`, `misdirect_at`), by predicate (`fail_matching`) or by
space (`capacity_bytes`). A failed `sync` has Linux's meaning: the dirty pages count as clean from then on, so
a later sync that returns does not make them durable (`evict` shows what a read finds once the page cache lets
go of them).

**Sites and mutations.** The site of a call is `operation:class`, e.g. `pwrite:log`, the class given by
`classify`. `mutations` changes the program's order of effects: `skip_sync` removes a sync, `delay_write`
swaps a write with a later one. A test that removes each of `sync_sites_seen` in turn must fail for each, or
the sync is not needed.

Nothing here awaits: see `broadsheet.testing.simulation.runtime` for the clock and the scheduling around it.
"""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from broadsheet.engine.runtime import DirEntry, ReadableBuffer

__all__ = [
    "SECTOR_BYTES",
    "Call",
    "CrashKind",
    "Moment",
    "Mutations",
    "SimulatedCrash",
    "SimulatedDisk",
    "SimulatedFile",
    "is_simulated_crash",
]

SECTOR_BYTES = 512

CrashKind = Literal["process", "power"]
Moment = Literal["before", "partial", "after"]

_SYNCS = frozenset({"fdatasync", "sync_dir"})
_EFFECTS = frozenset({"create", "pwrite", "fdatasync", "truncate", "rename", "unlink", "make_dirs", "sync_dir"})
_SOME_DAY_S = 1_700_000_000


class SimulatedCrash(BaseException):
    """The machine stopped here. Not an `Exception`: no handler of the program under test may survive it."""


def is_simulated_crash(error: BaseException) -> bool:
    """Whether an error is a `SimulatedCrash`, or a group (of groups) of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_simulated_crash, error.exceptions))
    return isinstance(error, SimulatedCrash)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the disk. `path` is relative to the root; `offset` and `length` in bytes, 0 where they mean
    nothing."""

    number: int
    operation: str
    site: str
    path: str
    offset: int
    length: int


class Mutations:
    """Changes to the program under test, said in terms of its calls of the disk. They outlive a crash."""

    def __init__(self) -> None:
        self.skipped: set[str] = set()
        """Sites of syncs that do nothing."""
        self.delayed: dict[str, str] = {}
        """Sites of writes that are held, with the sites that release them."""

    def skip_sync(self, site: str) -> None:
        """Let every sync at `site` (`fdatasync:log`, `sync_dir:log`) return with nothing done."""
        if site.partition(":")[0] not in _SYNCS:
            raise ValueError(f"not the site of a sync: {site}")
        self.skipped.add(site)

    def delay_write(self, site: str, *, until_after: str) -> None:
        """Hold back every write at `site` until a call at the site `until_after` was made.

        The process reads what it wrote, but a crash of either kind before that loses it. A sync of the file
        in the meantime moves along with the write. With both sites the same, each two writes there change
        places.
        """
        if not site.startswith("pwrite:"):
            raise ValueError(f"not the site of a write: {site}")
        self.delayed[site] = until_after

    def clear(self) -> None:
        self.skipped.clear()
        self.delayed.clear()


@dataclass(frozen=True, slots=True)
class _Fault:
    """What befalls one call. `error` is None for a crash."""

    moment: Moment
    error: OSError | None = None
    shift_bytes: int | None = None  # not None: no error at all, but a write that lands elsewhere


@dataclass(slots=True)
class _Matcher:
    matches: Callable[[Call], bool]
    fault: _Fault
    left: int | None


@dataclass(slots=True)
class _HeldWrite:
    inode: _Inode
    offset: int
    payload: bytes
    until: str
    due: bool = False
    synced: bool = False


class _Inode:
    """Content of a file: see the module's first paragraph."""

    __slots__ = ("data", "durable_length", "held", "mod_time", "orphans", "pending", "shared", "undo")

    def __init__(self, data: bytearray, mod_time: int, *, durable: bool) -> None:
        self.data = data
        self.shared = False  # `data` is another inode's too: copy before the next write
        self.durable_length = len(data) if durable else 0
        self.undo: dict[int, bytes] = {}
        self.pending: list[tuple[int, bytes, int]] = []  # offset, bytes, length of the file after it
        self.orphans: set[int] | None = None  # sectors a failed sync gave up on
        self.held: list[_HeldWrite] | None = None
        self.mod_time = mod_time

    def clone(self) -> _Inode:
        twin = _Inode(self.data, self.mod_time, durable=False)
        twin.shared = self.shared = True
        twin.durable_length = self.durable_length
        twin.undo = self.undo.copy()
        twin.pending = self.pending.copy()
        twin.orphans = None if self.orphans is None else self.orphans.copy()
        return twin  # what is held by a mutation has not reached the system: a clone is what the system has

    # -- the process's side

    def write(self, offset: int, payload: bytes) -> None:
        if self.shared:
            self.data = bytearray(self.data)
            self.shared = False
        data = self.data
        end = offset + len(payload)
        if offset < self.durable_length:
            self._preserve(offset, end)
        if offset > len(data):
            data.extend(bytes(offset - len(data)))
        data[offset:end] = payload
        if self.orphans:
            self.orphans.difference_update(_sectors(offset, end))
        self.pending.append((offset, payload, len(data)))

    def truncate(self, length: int) -> None:
        if self.shared:
            self.data = bytearray(self.data)
            self.shared = False
        data = self.data
        before = len(data)
        if length < before:
            if length < self.durable_length:
                self._preserve(length, before)
            del data[length:]
            self.pending.append((length, bytes(before - length), length))
        elif length > before:
            data.extend(bytes(length - before))
            self.pending.append((before, b"", length))

    def read(self, offset: int, length: int) -> bytes:
        if self.held:
            return bytes(self.seen_by_process()[offset : offset + length])
        return bytes(self.data[offset : offset + length])

    def seen_by_process(self) -> bytearray:
        """The content with the held writes laid over it."""
        data = bytearray(self.data)
        for held in self.held or ():
            _write(data, held.offset, held.payload)
        return data

    # -- the disk's side

    def sync(self) -> None:
        if self.orphans:
            self._sync_around(self.orphans)
            return
        self.undo.clear()
        self.pending.clear()
        self.durable_length = len(self.data)

    def fail_sync(self) -> None:
        """The write-back failed: what is dirty now is never tried again unless it is written again."""
        orphans = self.orphans if self.orphans is not None else set()
        for offset, payload, _ in self.pending:
            orphans.update(_sectors(offset, offset + len(payload)))
        self.orphans = orphans

    def evict(self) -> None:
        """Drop clean pages from the page cache: orphaned sectors read as the disk has them."""
        orphans = self.orphans or set()
        self.orphans = None
        self.data = bytearray(self.data)
        self.shared = False
        for sector in orphans:
            start = sector * SECTOR_BYTES
            stop = min(start + SECTOR_BYTES, len(self.data))
            if start < stop:
                self.data[start:stop] = self._old(sector, stop - start)
                self.undo.pop(sector, None)
        self.pending = [
            (first, part, length)
            for offset, payload, length in self.pending
            for sector, first, part in _split(offset, payload)
            if sector not in orphans
        ]

    def after_power_cut(self, rng: random.Random) -> bytearray:
        """One of the contents that may be found at the next boot."""
        if not self.pending:
            if self.durable_length == len(self.data) and not self.undo:
                self.shared = True
                return self.data
            return self._durable()
        pending = self.pending
        chance = rng.random()
        if chance < 0.15:
            return self._durable()
        if chance < 0.3 and not self.orphans:
            self.shared = True
            return self.data
        disk = self._durable()
        if chance < 0.5:  # the first few
            count = rng.randint(0, len(pending))
            length = pending[count - 1][2] if count else self.durable_length
            for offset, payload, _ in pending[:count]:
                _write(disk, offset, payload)
        else:
            length = rng.choice((self.durable_length, len(self.data), rng.choice(pending)[2]))
            self._tear(disk, rng, whole=chance < 0.65)
        if len(disk) < length:
            disk.extend(bytes(length - len(disk)))
        del disk[length:]
        return disk

    def durable(self) -> bytes:
        """What is left if nothing un-synced is."""
        return bytes(self._durable())

    def _durable(self) -> bytearray:
        length = self.durable_length
        disk = bytearray(memoryview(self.data)[:length])
        if len(disk) < length:
            disk.extend(bytes(length - len(disk)))
        for sector, old in self.undo.items():
            start = sector * SECTOR_BYTES
            disk[start : start + len(old)] = old
        return disk

    def _tear(self, disk: bytearray, rng: random.Random, *, whole: bool) -> None:
        """Write each sector in one of the versions it had: any, or (`whole`) the one that the last of the
        writes that were lucky left, the same ones for all sectors."""
        versions: dict[int, list[int]] = {}
        for index, (offset, payload, _) in enumerate(self.pending):
            for sector in _sectors(offset, offset + len(payload)):
                versions.setdefault(sector, []).append(index)
        share = rng.choice((0.1, 0.5, 0.9))
        lucky = [rng.random() < share for _ in self.pending] if whole else []
        random_value, choice = rng.random, rng.choice
        for sector, writes in versions.items():
            if whole:
                last = max((index for index in writes if lucky[index]), default=-1)
            elif random_value() < share:
                last = writes[-1]
            else:
                last = -1 if len(writes) == 1 else choice((-1, *writes[:-1]))
            start, stop = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
            for index in writes:
                if index > last:
                    break
                offset, payload, _ = self.pending[index]
                first, end = max(start, offset), min(stop, offset + len(payload))
                _write(disk, first, payload[first - offset : end - offset])

    def _preserve(self, start: int, end: int) -> None:
        """Keep the durable bytes of the sectors that are about to change."""
        undo, data, durable_length = self.undo, self.data, self.durable_length
        for sector in _sectors(start, min(end, durable_length)):
            if sector not in undo:
                first = sector * SECTOR_BYTES
                undo[sector] = bytes(data[first : min(first + SECTOR_BYTES, durable_length)])

    def _old(self, sector: int, size: int) -> bytes:
        """The first `size` durable bytes of a sector, and zeros where there are fewer."""
        old = self.undo.get(sector)
        if old is None:  # appended to, at most: what was durable is still there
            start = sector * SECTOR_BYTES
            old = bytes(self.data[start : min(start + SECTOR_BYTES, self.durable_length)])
        old = old[:size]
        return old + bytes(size - len(old))

    def _sync_around(self, orphans: set[int]) -> None:
        length = len(self.data)
        undo: dict[int, bytes] = {}
        pending = []
        for sector in sorted(orphans):
            start = sector * SECTOR_BYTES
            size = min(SECTOR_BYTES, length - start)
            if size <= 0:
                continue
            undo[sector] = self._old(sector, size)
            pending.append((start, bytes(self.data[start : start + size]), length))
        self.undo, self.pending, self.durable_length = undo, pending, length


class SimulatedFile:
    """A handle of `SimulatedDisk`."""

    __slots__ = ("_class", "_disk", "_inode", "_open", "_relative", "_writable", "path")

    def __init__(self, disk: SimulatedDisk, inode: _Inode, path: str, *, writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._inode = inode
        self._relative, self._class = disk._label(path)
        self._writable = writable
        self._open = True

    def pread(self, length: int, offset: int) -> bytes:
        fault = self._disk._begin(
            "pread", self._class, self._relative, f" {offset} {length}", offset=offset, length=length
        )
        if fault is not None:
            self._disk._before(fault)
        self._check(writing=False)
        data = self._inode.read(offset, length)
        if fault is not None:
            self._disk._after(fault)
        return data

    def pwrite(self, buffers: Sequence[ReadableBuffer], offset: int) -> None:
        only = buffers[0] if len(buffers) == 1 else None
        payload = only if isinstance(only, bytes) else b"".join(buffers)
        disk = self._disk
        length = len(payload)
        fault = disk._begin(
            "pwrite",
            self._class,
            self._relative,
            f" {offset} {length} crc={zlib.crc32(payload):08x}" if disk._tracing else "",
            offset=offset,
            length=length,
        )
        if fault is not None:
            if fault.shift_bytes is not None:
                offset = max(0, offset + fault.shift_bytes)
            disk._before(fault)
            if fault.moment == "partial":
                payload = payload[: disk._rng.randrange(length + 1)]
        self._check(writing=True)
        if disk.capacity_bytes is not None:
            payload, full = disk._fit(self._inode, offset, payload)
        else:
            full = False
        if payload:
            if disk.mutations.delayed:
                disk._write_or_hold(self._inode, self._class, offset, payload)
            else:
                self._inode.write(offset, payload)
            self._inode.mod_time = int(disk.now_s())
        if full:
            disk._mark("ENOSPC")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        if fault is not None:
            disk._after(fault)

    def sync(self) -> None:
        disk = self._disk
        fault = disk._begin("fdatasync", self._class, self._relative)
        if fault is not None:
            if fault.error is not None and fault.moment != "after":
                self._inode.fail_sync()
            disk._before(fault)
        self._check(writing=False)
        if fault is None or fault.moment != "partial":
            if disk.mutations.skipped and f"fdatasync:{self._class}" in disk.mutations.skipped:
                disk._mark("skipped")
            else:
                self._inode.sync()
                for held in self._inode.held or ():
                    held.synced = True
        if fault is not None:
            disk._after(fault)

    def truncate(self, length: int) -> None:
        disk = self._disk
        fault = disk._begin("truncate", self._class, self._relative, f" {length}", length=length)
        if fault is not None:
            disk._before(fault)
        self._check(writing=True)
        if self._inode.held:
            disk._release(self._inode)
        if disk.capacity_bytes is not None and length > len(self._inode.data):
            disk._check_space(length - len(self._inode.data), self.path)
        self._inode.truncate(length)
        self._inode.mod_time = int(disk.now_s())
        if fault is not None:
            disk._after(fault)

    def size(self) -> int:
        fault = self._disk._begin("size", self._class, self._relative)
        if fault is not None:
            self._disk._before(fault)
        self._check(writing=False)
        size = len(self._inode.seen_by_process() if self._inode.held else self._inode.data)
        if fault is not None:
            self._disk._after(fault)
        return size

    def close(self) -> None:
        if self._open:
            fault = self._disk._begin("close", self._class, self._relative)
            if fault is not None:
                self._disk._before(fault)
            self._open = False
            if fault is not None:
                self._disk._after(fault)

    def _check(self, *, writing: bool) -> None:
        if not self._open or (writing and not self._writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)


class _NameChange:
    """One operation on names: `inode` (None: a folder) leaves `source` and appears as `target`."""

    __slots__ = ("inode", "source", "target")

    def __init__(self, inode: _Inode | None, source: str | None, target: str | None) -> None:
        self.inode = inode
        self.source = source
        self.target = target

    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.source, self.target) if name is not None)


class SimulatedDisk:
    """`Files` in memory, with crashes and faults. See the module's account.

    `root` is a folder that exists and is durable; paths in `trace`, `Call` and the helpers for tests are
    relative to it. `classify` maps such a path to its class (default: the top folder's name, or a file's own
    in the root). `capacity_bytes` bounds the sum of file lengths (ENOSPC). `now_s` gives modification times,
    in unix seconds. `rng` decides only how much of a partial write is written; crashes bring their own.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        root: str = "/disk",
        classify: Callable[[str], str] | None = None,
        capacity_bytes: int | None = None,
        now_s: Callable[[], float] | None = None,
        tracing: bool = True,
        mutations: Mutations | None = None,
    ) -> None:
        self.root = root.rstrip("/") or "/"
        self.capacity_bytes = capacity_bytes
        self.now_s: Callable[[], float] = now_s if now_s is not None else lambda: _SOME_DAY_S
        self.mutations = mutations if mutations is not None else Mutations()
        self.trace: list[str] = []
        self.calls = 0
        self.effects: list[int] = []
        """Numbers of the calls that changed something, or made it durable: where crashes make a
        difference."""

        self._rng = rng if rng is not None else random.Random(0)
        self._classify = classify if classify is not None else _top_folder
        self._tracing = tracing
        self._dead = False
        self._armed = False
        self._faults: dict[int, _Fault] = {}
        self._matchers: list[_Matcher] = []
        self._held: list[_HeldWrite] = []
        self._sites: dict[str, int] = {}
        self._labels: dict[str, tuple[str, str]] = {}
        self._prefix = self.root if self.root == "/" else self.root + "/"

        self._files: dict[str, _Inode] = {}
        self._dirs: dict[str, set[str]] = {"/": set()}
        self._locks: set[str] = set()
        self._durable_files: dict[str, _Inode] = {}
        self._durable_dirs: set[str] = {"/"}
        self._changes: list[_NameChange] = []
        self._make_dirs(self.root)
        self._durable_dirs.update(self._dirs)
        self._changes.clear()

    # --- Files ----------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        relative, kind = self._label(path)
        missing = path not in self._files
        fault = self._begin("create" if create and missing else "open", kind, relative)
        if fault is not None:
            self._before(fault)
        inode = self._create(path) if create and missing else self._find(path)
        if fault is not None:
            self._after(fault)
        return SimulatedFile(self, inode, path, writable=True)

    def open_read(self, path: str) -> SimulatedFile:
        relative, kind = self._label(path)
        fault = self._begin("open_read", kind, relative)
        if fault is not None:
            self._before(fault)
        inode = self._find(path)
        if fault is not None:
            self._after(fault)
        return SimulatedFile(self, inode, path, writable=False)

    def exists(self, path: str) -> bool:
        relative, kind = self._label(path)
        fault = self._begin("exists", kind, relative)
        if fault is not None:
            self._before(fault)
        found = path in self._files or (path.rstrip("/") or "/") in self._dirs
        if fault is not None:
            self._after(fault)
        return found

    def rename(self, source: str, target: str) -> None:
        """Files only: folders are not renamed by the engine, and refused with IsADirectoryError."""
        relative, kind = self._label(source)
        fault = self._begin("rename", kind, relative, f" {self._label(target)[0]}")
        if fault is not None:
            self._before(fault)
        inode = self._find(source)
        if target in self._dirs:
            raise _error(errno.EISDIR, target)
        if source != target:
            self._entries(target)
            del self._files[source]
            self._entries(source).discard(_name(source))
            self._files[target] = inode
            self._entries(target).add(_name(target))
            self._changes.append(_NameChange(inode, source, target))
        if fault is not None:
            self._after(fault)

    def unlink(self, path: str) -> None:
        relative, kind = self._label(path)
        fault = self._begin("unlink", kind, relative)
        if fault is not None:
            self._before(fault)
        inode = self._find(path)
        del self._files[path]
        self._entries(path).discard(_name(path))
        self._changes.append(_NameChange(inode, path, None))
        if fault is not None:
            self._after(fault)

    def make_dirs(self, path: str, mode: int = 0o750) -> None:
        relative, kind = self._label(path)
        fault = self._begin("make_dirs", kind, relative)
        if fault is not None:
            self._before(fault)
        self._make_dirs(path)
        if fault is not None:
            self._after(fault)

    def list_dir(self, path: str) -> list[DirEntry]:
        relative, kind = self._label(path)
        fault = self._begin("list_dir", kind, relative)
        if fault is not None:
            self._before(fault)
        path = path.rstrip("/") or "/"
        prefix = "/" if path == "/" else path + "/"
        if path in self._files:
            raise _error(errno.ENOTDIR, path)
        entries = []
        for name in sorted(self._dirs.get(path, ())):
            inode = self._files.get(prefix + name)
            if inode is None:
                entries.append(DirEntry(name, True, 0, 0))
            else:
                data = inode.seen_by_process() if inode.held else inode.data
                entries.append(DirEntry(name, False, len(data), inode.mod_time))
        if fault is not None:
            self._after(fault)
        return entries

    def sync_dir(self, path: str) -> None:
        relative, kind = self._label(path)
        fault = self._begin("sync_dir", kind, relative)
        if fault is not None:
            self._before(fault)
        path = path.rstrip("/") or "/"
        if path not in self._dirs:
            raise _error(errno.ENOTDIR if path in self._files else errno.ENOENT, path)
        if fault is None or fault.moment != "partial":
            if self.mutations.skipped and f"sync_dir:{kind}" in self.mutations.skipped:
                self._mark("skipped")
            elif self._changes:
                self._sync_names(path)
        if fault is not None:
            self._after(fault)

    def lock(self, path: str) -> Callable[[], None]:
        relative, kind = self._label(path)
        fault = self._begin("lock", kind, relative)
        if fault is not None:
            self._before(fault)
        if path not in self._files:
            self._create(path)
        if path in self._locks:
            raise _error(errno.EAGAIN, path)
        self._locks.add(path)
        if fault is not None:
            self._after(fault)

        def release() -> None:
            fault = self._begin("unlock", kind, relative)
            if fault is not None:
                self._before(fault)
            self._locks.discard(path)
            if fault is not None:
                self._after(fault)

        return release

    # --- Crashes --------------------------------------------------------------------------------------------

    def crash(self, rng: random.Random, kind: CrashKind) -> SimulatedDisk:
        """Stop the machine (`power`) or the process (`process`); returns the disk as the next boot finds it.

        Every later call of this disk, and of its handles, raises `SimulatedCrash`. It may be crashed again,
        with another `rng`, for another of the outcomes of the same moment. The new disk counts from 0 and has
        no faults armed; it shares `mutations`.
        """
        self._dead = True
        return self._after_power_cut(rng) if kind == "power" else self.clone()

    def clone(self) -> SimulatedDisk:
        """A copy with the same content, names and un-synced changes, but without handles, locks, faults and
        trace. Contents are shared until written."""
        twins: dict[int, _Inode] = {}

        def twin(inode: _Inode) -> _Inode:
            key = id(inode)
            if key not in twins:
                twins[key] = inode.clone()
            return twins[key]

        boot = self._blank()
        boot._files = {path: twin(inode) for path, inode in self._files.items()}
        boot._dirs = {path: names.copy() for path, names in self._dirs.items()}
        boot._durable_files = {path: twin(inode) for path, inode in self._durable_files.items()}
        boot._durable_dirs = self._durable_dirs.copy()
        boot._changes = [
            _NameChange(twin(c.inode) if c.inode is not None else None, c.source, c.target) for c in self._changes
        ]
        return boot

    @property
    def crashed(self) -> bool:
        """Whether the machine has stopped."""
        return self._dead

    def _blank(self) -> SimulatedDisk:
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return type(self)(
            rng,
            root=self.root,
            classify=self._classify,
            capacity_bytes=self.capacity_bytes,
            now_s=self.now_s,
            tracing=self._tracing,
            mutations=self.mutations,
        )

    def _after_power_cut(self, rng: random.Random) -> SimulatedDisk:
        boot = self._blank()
        files = self._durable_files.copy()
        dirs = self._durable_dirs.copy()
        for change in self._surviving_changes(rng):
            _apply(change, files, dirs)
        found: dict[int, _Inode] = {}
        for path in sorted(dirs):  # a parent sorts before its children
            parent = _parent(path)
            if parent in boot._dirs and path not in boot._dirs:
                boot._dirs[path] = set()
                boot._dirs[parent].add(_name(path))
        for path, inode in files.items():
            names = boot._dirs.get(_parent(path))
            if names is None:
                continue  # its folder's own name was lost
            survivor = found.get(id(inode))
            if survivor is None:
                data = inode.after_power_cut(rng)
                survivor = found[id(inode)] = _Inode(data, inode.mod_time, durable=True)
                survivor.shared = data is inode.data
            boot._files[path] = survivor
            names.add(_name(path))
        boot._durable_files = boot._files.copy()
        boot._durable_dirs = set(boot._dirs)
        return boot

    def _surviving_changes(self, rng: random.Random) -> list[_NameChange]:
        changes = self._changes
        if not changes:
            return []
        chance = rng.random()
        if chance < 0.2:
            return []
        if chance < 0.4:
            return changes
        if chance < 0.6:
            return changes[: rng.randint(0, len(changes))]
        share = rng.choice((0.2, 0.5, 0.8))
        kept: list[_NameChange] = []
        broken: set[str] = set()  # a name's history ends with the first operation on it that was lost
        for change in changes:
            names = change.names()
            if rng.random() < share and broken.isdisjoint(names):
                kept.append(change)
            else:
                broken.update(names)
        return kept

    def _sync_names(self, folder: str) -> None:
        """Make the changes in a folder durable, and the earlier ones that they are built on."""
        names: set[str] = set()
        kept: list[_NameChange] = []
        durable: list[_NameChange] = []
        for change in reversed(self._changes):
            touched = change.names()
            if any(_parent(name) == folder for name in touched) or not names.isdisjoint(touched):
                names.update(touched)
                durable.append(change)
            else:
                kept.append(change)
        for change in reversed(durable):
            _apply(change, self._durable_files, self._durable_dirs)
        kept.reverse()
        self._changes = kept

    # --- Faults ---------------------------------------------------------------------------------------------

    def fail_at(self, number: int, error: OSError, *, partial: bool = False) -> None:
        """Make call `number` (the first is 1) raise a copy of `error`, without effect. With `partial`, a
        write writes some of its bytes first, and any other call but a sync takes full effect. A sync that
        fails makes nothing durable and gives up on what was dirty, as Linux does."""
        self._faults[number] = _Fault("partial" if partial else "before", error)
        self._armed = True

    def fail_matching(
        self,
        matches: Callable[[Call], bool],
        error: OSError,
        *,
        times: int | None = 1,
        partial: bool = False,
    ) -> None:
        """Make the next `times` (None: all) calls that match raise a copy of `error`, as `fail_at` does."""
        self._matchers.append(_Matcher(matches, _Fault("partial" if partial else "before", error), times))
        self._armed = True

    def crash_at(self, number: int, when: Moment = "before") -> None:
        """Raise `SimulatedCrash` at call `number`: before its effect, in the midst of a write, or after its
        effect. From then on every call raises it; `crash` gives the disk of the next boot."""
        self._faults[number] = _Fault(when)
        self._armed = True

    def misdirect_at(self, number: int, shift_bytes: int) -> None:
        """Let the write that is call `number` land `shift_bytes` further on, and report success."""
        self._faults[number] = _Fault("after", None, shift_bytes)
        self._armed = True

    def stop(self) -> None:
        """Let every call from now on raise `SimulatedCrash`."""
        self._dead = True

    def clear_faults(self) -> None:
        """Disarm all faults that have not struck."""
        self._faults.clear()
        self._matchers.clear()
        self._armed = False

    # --- What tests look at, and spoil ----------------------------------------------------------------------

    @property
    def sites_seen(self) -> dict[str, int]:
        """Calls by site since boot, in order of the first one."""
        return dict(self._sites)

    @property
    def sync_sites_seen(self) -> list[str]:
        """Sites for `Mutations.skip_sync`."""
        return [site for site in self._sites if site.partition(":")[0] in _SYNCS]

    @property
    def write_sites_seen(self) -> list[str]:
        """Sites for `Mutations.delay_write`."""
        return [site for site in self._sites if site.startswith("pwrite:")]

    @property
    def effect_sites_seen(self) -> list[str]:
        """Sites for `until_after` of `Mutations.delay_write`: of every call that changes something or
        syncs."""
        return [site for site in self._sites if site.partition(":")[0] in _EFFECTS]

    def content(self, path: str, *, durable: bool = False) -> bytes:
        """A file's bytes as a reader finds them, or (`durable`) if all that is not synced were lost."""
        inode = self._find(self.absolute(path))
        return inode.durable() if durable else bytes(inode.seen_by_process())

    def walk(self) -> Iterator[str]:
        """Paths of all files under the root, relative to it, in order."""
        return iter(sorted(p[len(self._prefix) :] for p in self._files if p.startswith(self._prefix)))

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Flip one bit of a file, on the disk and in the page cache. Uncounted."""
        inode = self._find(self.absolute(path))
        self._own(inode)
        inode.data[offset] ^= 1 << bit
        sector, within = divmod(offset, SECTOR_BYTES)
        old = inode.undo.get(sector)
        if old is not None and within < len(old):
            spoilt = bytearray(old)
            spoilt[within] ^= 1 << bit
            inode.undo[sector] = bytes(spoilt)

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        """Change bytes of a file durably (all of it becomes durable). Uncounted."""
        inode = self._find(self.absolute(path))
        inode.write(offset, data)
        inode.orphans = None
        inode.sync()

    def truncate(self, path: str, length: int) -> None:
        """Cut (or lengthen) a file to `length` bytes durably (all of it becomes durable). Uncounted."""
        inode = self._find(self.absolute(path))
        inode.truncate(length)
        inode.orphans = None
        inode.sync()

    def evict(self, path: str) -> None:
        """Drop a file's clean pages from the page cache: after a failed sync, reads find the old bytes.
        Uncounted."""
        self._find(self.absolute(path)).evict()

    def absolute(self, path: str) -> str:
        """The path of something given relative to the root; an absolute path stays as it is."""
        return path if path.startswith("/") else self._prefix + path

    # --- Inside ---------------------------------------------------------------------------------------------

    def _begin(
        self,
        operation: str,
        kind: str,
        relative: str,
        detail: str = "",
        *,
        offset: int = 0,
        length: int = 0,
    ) -> _Fault | None:
        """Count and trace a call; returns what befalls it."""
        if self._dead:
            raise SimulatedCrash(f"{operation} {relative} after the crash")
        if self._held:
            self._release_due()
        self.calls = number = self.calls + 1
        site = f"{operation}:{kind}"
        sites = self._sites
        sites[site] = sites.get(site, 0) + 1
        if self._tracing:
            self.trace.append(f"{number} {operation} {relative}{detail}")
        if operation in _EFFECTS:
            self.effects.append(number)
        if self._held:
            for held in self._held:
                if held.until == site:
                    held.due = True
        if not self._armed:
            return None
        fault = self._faults.pop(number, None)
        if fault is None and self._matchers:
            call = Call(number, operation, site, relative, offset, length)
            for matcher in self._matchers:
                if matcher.left != 0 and matcher.matches(call):
                    if matcher.left is not None:
                        matcher.left -= 1
                    fault = matcher.fault
                    break
        return fault

    def _before(self, fault: _Fault) -> None:
        if fault.moment == "before":
            self._strike(fault)

    def _after(self, fault: _Fault) -> None:
        if fault.shift_bytes is None:
            self._strike(fault)

    def _strike(self, fault: _Fault) -> None:
        if fault.error is None:
            self._mark(f"crash {fault.moment}")
            self._dead = True
            raise SimulatedCrash(self.trace[-1] if self.trace else f"call {self.calls}")
        number = fault.error.errno or errno.EIO
        self._mark(errno.errorcode.get(number, str(number)))
        raise OSError(number, fault.error.strerror or os.strerror(number))

    def _mark(self, remark: str) -> None:
        if self._tracing:
            self.trace[-1] += f" !{remark}"

    def _label(self, path: str) -> tuple[str, str]:
        label = self._labels.get(path)
        if label is None:
            relative = path[len(self._prefix) :] if path.startswith(self._prefix) else path
            relative = "." if path == self.root else relative.rstrip("/") or "/"
            label = self._labels[path] = (relative, self._classify(relative))
        return label

    def _find(self, path: str) -> _Inode:
        inode = self._files.get(path)
        if inode is None:
            raise _error(errno.EISDIR if (path.rstrip("/") or "/") in self._dirs else errno.ENOENT, path)
        return inode

    def _entries(self, path: str) -> set[str]:
        parent = _parent(path)
        names = self._dirs.get(parent)
        if names is None:
            raise _error(errno.ENOTDIR if parent in self._files else errno.ENOENT, path)
        return names

    def _create(self, path: str) -> _Inode:
        if path in self._dirs:
            raise _error(errno.EISDIR, path)
        self._entries(path).add(_name(path))
        inode = self._files[path] = _Inode(bytearray(), int(self.now_s()), durable=True)
        self._changes.append(_NameChange(inode, None, path))
        return inode

    def _make_dirs(self, path: str) -> None:
        path = path.rstrip("/") or "/"
        if path in self._dirs:
            return
        if path in self._files:
            raise _error(errno.EEXIST, path)
        parent = _parent(path)
        if parent in self._files:
            raise _error(errno.ENOTDIR, path)
        self._make_dirs(parent)
        self._dirs[parent].add(_name(path))
        self._dirs[path] = set()
        self._changes.append(_NameChange(None, None, path))

    def _own(self, inode: _Inode) -> None:
        if inode.shared:
            inode.data = bytearray(inode.data)
            inode.shared = False

    def _free_bytes(self) -> int:
        assert self.capacity_bytes is not None
        return self.capacity_bytes - sum(len(inode.data) for inode in self._files.values())

    def _fit(self, inode: _Inode, offset: int, payload: bytes) -> tuple[bytes, bool]:
        """As much of a write as there is space for, and whether that is not all."""
        growth = offset + len(payload) - len(inode.data)
        if growth <= 0 or growth <= (free := self._free_bytes()):
            return payload, False
        return payload[: max(0, len(payload) - growth + max(0, free))], True

    def _check_space(self, growth: int, path: str) -> None:
        if growth > self._free_bytes():
            self._mark("ENOSPC")
            raise _error(errno.ENOSPC, path)

    def _write_or_hold(self, inode: _Inode, kind: str, offset: int, payload: bytes) -> None:
        site = f"pwrite:{kind}"
        until = self.mutations.delayed.get(site)
        if until is None or (until == site and any(held.until == site for held in self._held)):
            if inode.held and until is None:
                self._release(inode)  # another site writes the same file: keep their order
            inode.write(offset, payload)
            return
        held = _HeldWrite(inode, offset, payload, until)
        self._held.append(held)
        inode.held = [*(inode.held or ()), held]
        self._mark("held")

    def _release_due(self) -> None:
        due = [held for held in self._held if held.due]
        if due:
            self._held = [held for held in self._held if not held.due]
            self._land(due)

    def _release(self, inode: _Inode) -> None:
        mine = [held for held in self._held if held.inode is inode]
        self._held = [held for held in self._held if held.inode is not inode]
        self._land(mine)

    def _land(self, writes: list[_HeldWrite]) -> None:
        for held in writes:
            inode = held.inode
            inode.held = [other for other in inode.held or () if other is not held] or None
            inode.write(held.offset, held.payload)
            if held.synced:
                inode.sync()


def _apply(change: _NameChange, files: dict[str, _Inode], dirs: set[str]) -> None:
    if change.inode is None:
        assert change.target is not None
        dirs.add(change.target)
        return
    if change.source is not None and files.get(change.source) is change.inode:
        del files[change.source]
    if change.target is not None:
        files[change.target] = change.inode


def _top_folder(relative: str) -> str:
    return relative.partition("/")[0]


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _sectors(start: int, end: int) -> range:
    return range(start // SECTOR_BYTES, (end + SECTOR_BYTES - 1) // SECTOR_BYTES) if end > start else range(0)


def _write(data: bytearray, offset: int, payload: bytes) -> None:
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(payload)] = payload


def _split(offset: int, payload: bytes) -> Iterator[tuple[int, int, bytes]]:
    """A write cut at sector bounds, as (sector, offset in the file, bytes)."""
    for sector in _sectors(offset, offset + len(payload)):
        first = max(sector * SECTOR_BYTES, offset)
        yield sector, first, payload[first - offset : (sector + 1) * SECTOR_BYTES - offset]


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)

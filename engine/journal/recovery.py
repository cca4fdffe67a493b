"""Recovery: from an engine's folder to the state it acknowledged (docs/format.md §5).

The newest snapshot, then the log from its position on, record by record. Bytes that a record carries are written to
their spool again; bytes that it only speaks of are checked against it. Where the log ends is decided by
`log_format.judge`; what follows the end is kept in quarantine. Nothing is deleted here but unfinished snapshots.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from broadsheet.engine.errors import CorruptData
from broadsheet.engine.fragments.fragment import ZERO_SUM, Fragment
from broadsheet.engine.journal.commit_log import parse_log_name
from broadsheet.engine.journal.folder import Folder
from broadsheet.engine.journal.log_format import (
    CoordinatorRecord,
    End,
    GroupRecord,
    JournalState,
    LogFile,
    Record,
    ReleaseRecord,
    RollRecord,
    SpoolState,
    decode_record,
    decode_snapshot,
    judge,
    registers_from_bytes,
    scan,
)
from broadsheet.engine.journal.spool_files import parse_spool_name, spool_name
from broadsheet.engine.labels import LabelSet
from broadsheet.engine.runtime import Runtime

__all__ = ["CoordinatorState", "Recovered", "recover", "snapshot_name"]

CHECK_BYTES = 1 << 20


def snapshot_name(position: int) -> str:
    return f"{position:016x}.snapshot"


def _parse_snapshot_name(name: str) -> int | None:
    stem, _, suffix = name.partition(".")
    if suffix != "snapshot" or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """How recovery feeds the coordinator. `apply` returns the (name, create_revision) of deleted journals."""

    restore: Callable[[Iterable[bytes]], None]
    apply: Callable[[bytes], Iterable[str]]


@dataclass(slots=True)
class Recovered:
    """position: where the log goes on (in a new file). needs_checkpoint: it must not be written before a snapshot
    at that position is durable. log_files: (base, path) of all found.
    touched_spools: those the log spoke of, to be synced before the next snapshot."""

    position: int
    proven: int
    needs_checkpoint: bool
    next_spool_id: int
    journals: dict[str, JournalState]
    log_files: list[tuple[int, str]]
    old_snapshots: list[str]
    unused_spools: list[str]
    touched_spools: list[int]
    quarantined: list[str] = field(default_factory=list)
    replayed_records: int = 0


@dataclass(slots=True)
class _Journal:
    """A journal while its records are played back."""

    name: str
    create_revision: int
    open: SpoolState
    completed: dict[int, SpoolState] = field(default_factory=dict)

    def frozen(self) -> JournalState:
        return JournalState(self.name, self.create_revision, self.open, tuple(self.completed.values()))


class _Mismatch(Exception):
    """A record speaks of bytes that its spool does not hold."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


def recover(runtime: Runtime, folder: Folder, coordinator: CoordinatorState) -> Recovered:
    """Raises `CorruptData` if anything that was durable is not there any more, and OSError."""
    return _Recovery(runtime, folder, coordinator).run()


class _Recovery:
    def __init__(self, runtime: Runtime, folder: Folder, coordinator: CoordinatorState) -> None:
        self._files = runtime.files
        self._folder = folder
        self._coordinator = coordinator
        self._journals: dict[str, _Journal] = {}
        self._touched: set[int] = set()
        self._gone: set[tuple[str, int]] = set()
        self._next_spool_id = 1

    def run(self) -> Recovered:
        snapshots = []
        log_files = []
        for entry in self._files.list_dir(self._folder.log):
            path = f"{self._folder.log}/{entry.name}"
            position = _parse_snapshot_name(entry.name)
            if position is not None:
                snapshots.append((position, path))
            if entry.name.endswith(".snapshot.tmp"):
                self._files.unlink(path)  # never finished, never named: nothing was ever made to rest on it
            base = parse_log_name(entry.name)
            if base is not None:
                log_files.append((base, path))
        start = self._load_snapshot(snapshots)

        scanned = [
            scan(path, base, self._folder.read_file(path)) for base, path in sorted(log_files) if base >= start
        ]
        verdict = judge(scanned, start)
        if verdict.end is End.CORRUPT:
            raise CorruptData(
                f"the commit log's record at position {verdict.position} cannot be read, "
                f"but everything before {verdict.proven} was made durable",
                path=verdict.path,
                hint="nothing was changed; restore the file from a backup, or the folder from its stores",
            )
        leftover = list(verdict.leftover)
        position, replayed = self._replay(scanned, verdict.position, verdict.proven, leftover)

        quarantined = [self._folder.keep_aside(path) for path in leftover]
        beyond = max([position, *(file.end for file in scanned), *(base for base, _ in log_files)], default=start)
        used = {
            spool_name(spool.spool_id)
            for journal in self._journals.values()
            for spool in (journal.open, *journal.completed.values())
            if spool.spool_id
        }
        unused = []
        for entry in self._files.list_dir(self._folder.spools):
            spool_id = parse_spool_name(entry.name)
            if spool_id is None or entry.name in used:
                continue
            self._next_spool_id = max(self._next_spool_id, spool_id + 1)
            path = f"{self._folder.spools}/{entry.name}"
            if leftover:
                # What the dropped end of the log spoke of may be in here.
                quarantined.append(self._folder.keep_aside(path))
            unused.append(path)
        untouched = not replayed and not leftover and position == start
        return Recovered(
            # If anything is to be snapshotted, go on beyond every file there is, under a name of its own.
            position=start if untouched else (beyond + 8192) & ~4095,
            proven=start,
            needs_checkpoint=not untouched,
            next_spool_id=self._next_spool_id,
            journals={name: journal.frozen() for name, journal in self._journals.items()},
            log_files=sorted(log_files),
            old_snapshots=[path for _, path in snapshots],
            unused_spools=unused,
            touched_spools=sorted(self._touched),
            quarantined=quarantined,
            replayed_records=replayed,
        )

    def _load_snapshot(self, snapshots: list[tuple[int, str]]) -> int:
        if not snapshots:
            return 0
        position, path = max(snapshots)
        snapshot = decode_snapshot(self._folder.read_file(path))
        if snapshot is None or snapshot.position != position:
            raise CorruptData("the snapshot is damaged", path=path)
        self._coordinator.restore(snapshot.coordinator)
        self._next_spool_id = snapshot.next_spool_id
        for state in snapshot.journals:
            completed = {spool.spool_id: spool for spool in state.completed}
            self._journals[state.journal] = _Journal(state.journal, state.create_revision, state.open, completed)
        return position

    def _replay(
        self, files: list[LogFile], end: int, proven: int, leftover: list[str]
    ) -> tuple[int, int]:
        """Returns the position the log really ends at: earlier than `end` if a spool does not hold what an
        unproven record says."""
        count = 0
        for number, file in enumerate(files):
            for record in file.records:
                if record.position >= end:
                    return end, count
                try:
                    self._apply(decode_record(record.payload), file.path)
                except _Mismatch as mismatch:
                    if record.position < proven:
                        raise CorruptData(str(mismatch), path=mismatch.path) from None
                    leftover[:] = [f.path for f in files[number:] if f.records or f.torn]
                    return record.position, count
                except ValueError as error:
                    raise CorruptData(
                        str(error), path=file.path, hint="use the version of the program that wrote it"
                    ) from error
                count += 1
        return end, count

    def _apply(self, record: Record, path: str) -> None:
        if type(record) is GroupRecord:
            self._group(record, path)
        elif type(record) is RollRecord:
            self._roll(record)
        elif type(record) is ReleaseRecord:
            journal = self._journals.get(record.journal)
            if journal is not None and journal.create_revision == record.create_revision:
                if journal.open.spool_id == record.spool_id:  # its roll was not worth a record
                    fragment = journal.open.fragment
                    self._roll(
                        RollRecord(
                            record.journal, record.create_revision, fragment.end, fragment.compression_codec, None
                        )
                    )
                journal.completed.pop(record.spool_id, None)
        elif type(record) is CoordinatorRecord:
            for name in self._coordinator.apply(record.change):
                gone = self._journals.pop(name, None)
                if gone is not None:
                    self._gone.add((name, gone.create_revision))

    def _journal(self, name: str, create_revision: int) -> _Journal:
        journal = self._journals.get(name)
        if journal is None or journal.create_revision != create_revision:
            empty = SpoolState(0, Fragment(name), 0, LabelSet())
            journal = self._journals[name] = _Journal(name, create_revision, empty)
        return journal

    def _group(self, record: GroupRecord, path: str) -> None:
        if (record.journal, record.create_revision) in self._gone:
            # Committed while its deletion was on its way to the coordinator: it went with the journal.
            self._next_spool_id = max(self._next_spool_id, record.spool_id + 1)
            return
        journal = self._journal(record.journal, record.create_revision)
        open_ = journal.open
        if record.spool_id != open_.spool_id or record.spool_begin != open_.fragment.begin:
            if open_.fragment.length:
                journal.completed[open_.spool_id] = open_
            fragment = Fragment(record.journal, record.spool_begin, record.spool_begin)
            open_ = SpoolState(record.spool_id, fragment, 0, open_.registers)
        if record.begin != open_.fragment.end:
            raise CorruptData(
                f"a record says that bytes from {record.begin} on follow, where the spool ends at "
                f"{open_.fragment.end}",
                path=path,
                journal=record.journal,
                offset=record.begin,
            )
        self._next_spool_id = max(self._next_spool_id, record.spool_id + 1)
        if record.content is not None:
            self._write_again(record)
        else:
            self._check(record)
        # Whether written again or found to be there: the next snapshot will vouch for it, so it must be synced first.
        self._touched.add(record.spool_id)
        registers = open_.registers if record.registers is None else registers_from_bytes(record.registers)
        fragment = Fragment(record.journal, record.spool_begin, record.end, record.spool_sum, record.codec)
        journal.open = SpoolState(record.spool_id, fragment, record.first_append_time_ns, registers)

    def _roll(self, record: RollRecord) -> None:
        if (record.journal, record.create_revision) in self._gone:
            return
        journal = self._journal(record.journal, record.create_revision)
        open_ = journal.open
        if open_.fragment.length:
            journal.completed[open_.spool_id] = open_
        registers = open_.registers if record.registers is None else registers_from_bytes(record.registers)
        fragment = Fragment(record.journal, record.offset, record.offset, ZERO_SUM, record.codec)
        journal.open = SpoolState(0, fragment, 0, registers)

    def _write_again(self, record: GroupRecord) -> None:
        assert record.content is not None
        path = f"{self._folder.spools}/{spool_name(record.spool_id)}"
        file = self._files.open(path, create=True)
        try:
            file.pwrite([record.content], record.begin - record.spool_begin)
        finally:
            file.close()

    def _check(self, record: GroupRecord) -> None:
        path = f"{self._folder.spools}/{spool_name(record.spool_id)}"
        try:
            file = self._files.open_read(path)
        except FileNotFoundError:
            raise _Mismatch(path, "a spool that the commit log speaks of is missing") from None
        begins_spool = record.begin == record.spool_begin  # then the spool's SHA-1 is the content's own
        sha = hashlib.sha1(usedforsecurity=False)
        try:
            crc = 0
            offset, end = record.begin - record.spool_begin, record.end - record.spool_begin
            while offset < end:
                piece = file.pread(min(CHECK_BYTES, end - offset), offset)
                if not piece:
                    raise _Mismatch(path, f"the spool is shorter than the {end} bytes that were committed")
                if begins_spool:
                    sha.update(piece)
                else:
                    crc = zlib.crc32(piece, crc)
                offset += len(piece)
        finally:
            file.close()
        if (sha.digest() != record.spool_sum) if begins_spool else (crc != record.content_crc):
            raise _Mismatch(
                path,
                f"bytes [{record.begin}, {record.end}) of {record.journal} are not those that were committed",
            )


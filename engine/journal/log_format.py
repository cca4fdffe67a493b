"""Bytes of the commit log and of snapshots (docs/format.md). Sans-I/O.

A log file is a header and records. A record is framed with the file's salt (fresh for each use of a file, so that
bytes of an earlier use never read as records), its own position in the endless log, the position that was *proven*
durable when it was written, a length and a CRC-32 over all of it. Records start at multiples of 8.

`scan` reads one file's records up to the first that is not good; `judge` decides over the files of a log what an
unreadable record means: the end of the log, or corruption.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.labels import Label, LabelSet

__all__ = [
    "FILE_HEADER_BYTES",
    "RECORD_HEADER_BYTES",
    "CoordinatorRecord",
    "End",
    "FileHeader",
    "GroupRecord",
    "LogFile",
    "Record",
    "ReleaseRecord",
    "RollRecord",
    "ScannedRecord",
    "Verdict",
    "decode_record",
    "encode_file_header",
    "frame",
    "framed_length",
    "judge",
    "registers_from_bytes",
    "registers_to_bytes",
    "scan",
]

Buffer = bytes | bytearray | memoryview

MAGIC = b"BSHEET\x00\x01"  # the last byte is the format's version
_FILE_HEADER = struct.Struct("<8sQQQQI")
FILE_HEADER_BYTES = 64
_RECORD_HEADER = struct.Struct("<QQQII")
RECORD_HEADER_BYTES = _RECORD_HEADER.size
_RECORD_PREFIX = struct.Struct("<QQQI")
_CRC = struct.Struct("<I")
_PADDING = [b"", *(bytes(8 - n) for n in range(1, 8))]
MAX_PAYLOAD_BYTES = 1 << 30


# --- Files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileHeader:
    """base: log position of the first record. proven: log position known durable when the file was begun."""

    salt: int
    base: int
    proven: int
    engine_id: int


def encode_file_header(header: FileHeader) -> bytes:
    fields = struct.pack("<8sQQQQ", MAGIC, header.salt, header.base, header.proven, header.engine_id)
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(FILE_HEADER_BYTES, b"\0")


def decode_file_header(data: Buffer) -> FileHeader | None:
    """None if it is not a whole header of this format."""
    if len(data) < FILE_HEADER_BYTES:
        return None
    magic, salt, base, proven, engine_id, crc = _FILE_HEADER.unpack_from(data)
    if magic != MAGIC or crc != zlib.crc32(data[: _FILE_HEADER.size - 4]):
        return None
    return FileHeader(salt, base, proven, engine_id)


def framed_length(payload_length: int) -> int:
    return (RECORD_HEADER_BYTES + payload_length + 7) & ~7


def frame(salt: int, position: int, proven: int, payload: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of one record, padding included. Payload buffers are not copied."""
    length = 0
    for part in payload:
        length += len(part)
    prefix = _RECORD_PREFIX.pack(salt, position, proven, length)
    crc = zlib.crc32(prefix)
    for part in payload:
        crc = zlib.crc32(part, crc)
    buffers: list[Buffer] = [prefix + _CRC.pack(crc), *payload]
    padding = _PADDING[(RECORD_HEADER_BYTES + length) & 7]
    if padding:
        buffers.append(padding)
    return buffers


# --- Scanning ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    position: int
    proven: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class LogFile:
    """What one file holds. end: log position after the last good record. torn: something of this file's own
    generation follows it. proven: the greatest proven position any good record of the file tells of, those beyond
    a bad one included."""

    path: str
    base: int
    header_is_good: bool
    records: tuple[ScannedRecord, ...]
    end: int
    torn: bool
    proven: int


def scan(path: str, base: int, data: bytes) -> LogFile:
    """Read a file's records. `base` is what its name says."""
    header = decode_file_header(data)
    view = memoryview(data)
    offset = FILE_HEADER_BYTES
    good = header is not None and header.base == base
    if header is not None and good:
        salt, proven = header.salt, header.proven
    else:
        # Records that read well behind a damaged header show that this was a log file in use, and what was proven.
        salt, proven = struct.unpack_from("<Q", data, offset)[0] if len(data) >= offset + 8 else 0, 0
    records = []
    position = base
    while salt and (record := _read_record(view, offset, salt, position)) is not None:
        records.append(record)
        proven = max(proven, record.proven)
        step = framed_length(len(record.payload))
        offset += step
        position += step
    torn = False
    needle = struct.pack("<Q", salt)
    at = data.find(needle, offset) if salt else -1
    while at >= 0:
        later = _read_record(view, at, salt, base + at - FILE_HEADER_BYTES)
        if later is not None:
            proven = max(proven, later.proven)
        torn = torn or good or later is not None
        at = data.find(needle, at + 8)
    if not good:
        return LogFile(path, base, False, (), base, torn or bool(records), proven)
    return LogFile(path, base, True, tuple(records), position, torn, proven)


def _read_record(view: memoryview, offset: int, salt: int, position: int) -> ScannedRecord | None:
    if offset + RECORD_HEADER_BYTES > len(view):
        return None
    found_salt, found_position, proven, length, crc = _RECORD_HEADER.unpack_from(view, offset)
    if found_salt != salt or found_position != position or length > MAX_PAYLOAD_BYTES:
        return None
    start = offset + RECORD_HEADER_BYTES
    payload = view[start : start + length]
    if len(payload) != length or zlib.crc32(payload, zlib.crc32(view[offset : start - 4])) != crc:
        return None
    return ScannedRecord(position, proven, payload)


class End(Enum):
    """Why the log ends where it does."""

    CLEAN = "nothing follows the last record"
    TORN = "the record after the last good one was never wholly written"
    CORRUPT = "a record that was durable cannot be read"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The log's good records are those below `position`. `path` and `position` name the bad record, if any.
    `leftover`: files that hold something at or after `position`, to be kept aside."""

    end: End
    position: int
    path: str
    proven: int
    leftover: tuple[str, ...] = ()


def judge(files: Sequence[LogFile], start: int) -> Verdict:
    """Decide where the log that begins at `start` ends. Files are in order of base, none ends before `start`.

    A bad record before the highest position that any good record calls proven is corruption. One at or after it
    ends the log: it was never acknowledged under a promise, or (mode `os`) nothing was promised.
    """
    proven = max((file.proven for file in files), default=start)
    position = start
    for number, file in enumerate(files):
        path = file.path
        if file.base != position or not file.header_is_good:
            # A file is missing or was never begun. If that was durable, or its records are there, it is damage.
            if proven > position:
                return Verdict(End.CORRUPT, position, path, proven)
            rest = tuple(f.path for f in files[number:] if f.records or f.torn)
            return Verdict(End.TORN if rest else End.CLEAN, position, path, proven, rest)
        position = file.end
        following = files[number + 1] if number + 1 < len(files) else None
        if following is not None and following.base == position and following.header_is_good:
            continue
        if proven > position:
            return Verdict(End.CORRUPT, position, path, proven)
        rest = tuple(f.path for f in files[number:] if f.torn or (f is not file and f.records))
        return Verdict(End.TORN if rest else End.CLEAN, position, path, proven, rest)
    return Verdict(End.CLEAN, position, files[-1].path if files else "", proven)


# --- Records ----------------------------------------------------------------------------------------------

_GROUP, _ROLL, _RELEASE, _COORDINATOR = 1, 2, 3, 4
_HAS_CONTENT, _HAS_REGISTERS = 1, 2
_JOURNAL = struct.Struct("<BBHIIIQQQQQQ20s")


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Content [begin, end) was committed to a journal's spool.

    content: the bytes, or None if they are in the spool's file. Then `content_crc` is their CRC-32, or, if they are the
    spool's first, 0: `spool_sum` is their own sum.
    spool_sum: SHA-1 of [spool_begin, end). registers: None if unchanged. Times in ns since the epoch.
    """

    journal: str
    create_revision: int
    spool_id: int
    spool_begin: int
    begin: int
    end: int
    first_append_time_ns: int
    codec: CompressionCodec
    spool_sum: bytes
    registers: bytes | None
    content_crc: int
    content: Buffer | None

    def encode(self, content: Sequence[Buffer] = ()) -> list[Buffer]:
        """`content` is given in pieces here, if it is to be in the record; the attribute is not looked at."""
        name = self.journal.encode()
        registers = self.registers
        flags = (_HAS_CONTENT if content else 0) | (_HAS_REGISTERS if registers is not None else 0)
        head = _JOURNAL.pack(
            _GROUP,
            flags,
            self.codec,
            len(name),
            len(registers) if registers is not None else 0,
            self.content_crc,
            self.create_revision,
            self.spool_id,
            self.spool_begin,
            self.begin,
            self.end,
            self.first_append_time_ns,
            self.spool_sum,
        )
        return [head + name + (registers or b""), *content]


@dataclass(frozen=True, slots=True)
class RollRecord:
    """The journal's spool was completed, and an empty one begins at `offset`."""

    journal: str
    create_revision: int
    offset: int
    codec: CompressionCodec
    registers: bytes | None

    def encode(self) -> list[Buffer]:
        name = self.journal.encode()
        registers = self.registers
        head = _JOURNAL.pack(
            _ROLL,
            _HAS_REGISTERS if registers is not None else 0,
            self.codec,
            len(name),
            len(registers) if registers is not None else 0,
            0,
            self.create_revision,
            0,
            self.offset,
            self.offset,
            self.offset,
            0,
            bytes(20),
        )
        return [head + name + (registers or b"")]


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """A completed spool is in its fragment store: its local file is no longer needed."""

    journal: str
    create_revision: int
    spool_id: int

    def encode(self) -> list[Buffer]:
        name = self.journal.encode()
        return [
            _JOURNAL.pack(
                _RELEASE, 0, 0, len(name), 0, 0, self.create_revision, self.spool_id, 0, 0, 0, 0, bytes(20)
            )
            + name
        ]


@dataclass(frozen=True, slots=True)
class CoordinatorRecord:
    """A change of the local coordinator, in its own encoding."""

    change: bytes

    def encode(self) -> list[Buffer]:
        return [bytes((_COORDINATOR,)), self.change]


Record = GroupRecord | RollRecord | ReleaseRecord | CoordinatorRecord


def decode_record(payload: memoryview) -> Record:
    """Raises ValueError for a record of a kind this version does not know."""
    kind = payload[0] if len(payload) else 0
    if kind == _COORDINATOR:
        return CoordinatorRecord(bytes(payload[1:]))
    if kind not in (_GROUP, _ROLL, _RELEASE):
        raise ValueError(f"unknown kind of record: {kind}")
    (
        _,
        flags,
        codec,
        name_length,
        registers_length,
        crc,
        create_revision,
        spool_id,
        spool_begin,
        begin,
        end,
        first_append_time_ns,
        spool_sum,
    ) = _JOURNAL.unpack_from(payload)
    at = _JOURNAL.size
    name = str(payload[at : at + name_length], "utf-8")
    at += name_length
    registers = bytes(payload[at : at + registers_length]) if flags & _HAS_REGISTERS else None
    at += registers_length
    if kind == _RELEASE:
        return ReleaseRecord(name, create_revision, spool_id)
    if kind == _ROLL:
        return RollRecord(name, create_revision, begin, CompressionCodec(codec), registers)
    return GroupRecord(
        name,
        create_revision,
        spool_id,
        spool_begin,
        begin,
        end,
        first_append_time_ns,
        CompressionCodec(codec),
        spool_sum,
        registers,
        crc,
        payload[at:] if flags & _HAS_CONTENT else None,
    )


def registers_to_bytes(registers: LabelSet) -> bytes:
    return json.dumps([[label.name, label.value] for label in registers.labels], separators=(",", ":")).encode()


def registers_from_bytes(data: bytes | None) -> LabelSet:
    if not data:
        return LabelSet()
    return LabelSet(tuple(Label(name, value) for name, value in json.loads(data)))


# --- Snapshots --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpoolState:
    """A local spool: `fragment` has its range, sum and codec."""

    spool_id: int
    fragment: Fragment
    first_append_time_ns: int
    registers: LabelSet


@dataclass(frozen=True, slots=True)
class JournalState:
    """All that a replica must find again: its open spool and those completed but not yet in a store."""

    journal: str
    create_revision: int
    open: SpoolState
    completed: tuple[SpoolState, ...] = ()


def encode_journal_state(state: JournalState) -> bytes:
    def spool(it: SpoolState) -> list[object]:
        f = it.fragment
        registers = [[label.name, label.value] for label in it.registers.labels]
        return [it.spool_id, f.begin, f.end, f.sum.hex(), int(f.compression_codec), it.first_append_time_ns, registers]

    document = [state.journal, state.create_revision, spool(state.open), [spool(it) for it in state.completed]]
    return json.dumps(document, separators=(",", ":")).encode()


def decode_journal_state(data: Buffer) -> JournalState:
    journal, create_revision, open_, completed = json.loads(bytes(data))

    def spool(it: list[object]) -> SpoolState:
        spool_id, begin, end, sum_, codec, first_append_time_ns, registers = it
        assert isinstance(spool_id, int) and isinstance(begin, int) and isinstance(end, int)
        assert isinstance(sum_, str) and isinstance(codec, int) and isinstance(first_append_time_ns, int)
        assert isinstance(registers, list)
        fragment = Fragment(journal, begin, end, bytes.fromhex(sum_), CompressionCodec(codec))
        labels = LabelSet(tuple(Label(name, value) for name, value in registers))
        return SpoolState(spool_id, fragment, first_append_time_ns, labels)

    return JournalState(journal, create_revision, spool(open_), tuple(spool(it) for it in completed))


_SNAPSHOT_HEAD, _SNAPSHOT_COORDINATOR, _SNAPSHOT_JOURNAL, _SNAPSHOT_END = 16, 17, 18, 19


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the log held before `position`. next_spool_id: greater than any id ever used."""

    position: int
    next_spool_id: int
    coordinator: tuple[bytes, ...]
    journals: tuple[JournalState, ...]


def encode_snapshot(
    position: int,
    next_spool_id: int,
    engine_id: int,
    coordinator: Iterable[bytes],
    journals: Iterable[JournalState],
) -> Iterable[bytes]:
    """The file's content in pieces: a file header, then framed records, an end record with their count last."""
    yield encode_file_header(FileHeader(engine_id, position, position, engine_id))
    at = 0
    count = 0

    def record(kind: int, body: bytes) -> bytes:
        nonlocal at, count
        framed = b"".join(frame(engine_id, at, position, [bytes((kind,)), body]))
        at += len(framed)
        count += 1
        return framed

    yield record(_SNAPSHOT_HEAD, json.dumps({"next_spool_id": next_spool_id}).encode())
    for chunk in coordinator:
        yield record(_SNAPSHOT_COORDINATOR, chunk)
    batch: list[bytes] = []
    for state in journals:
        batch.append(record(_SNAPSHOT_JOURNAL, encode_journal_state(state)))
        if len(batch) >= 256:
            yield b"".join(batch)
            batch.clear()
    yield b"".join(batch)
    yield record(_SNAPSHOT_END, str(count).encode())


def decode_snapshot(data: bytes) -> Snapshot | None:
    """None if it is not whole: snapshots are synced before they are given their name, so that is damage."""
    header = decode_file_header(data)
    if header is None:
        return None
    view = memoryview(data)
    next_spool_id = 0
    coordinator: list[bytes] = []
    journals: list[JournalState] = []
    at = count = 0
    while (record := _read_record(view, FILE_HEADER_BYTES + at, header.salt, at)) is not None:
        kind, body = record.payload[0], record.payload[1:]
        if kind == _SNAPSHOT_HEAD:
            next_spool_id = json.loads(bytes(body))["next_spool_id"]
        elif kind == _SNAPSHOT_COORDINATOR:
            coordinator.append(bytes(body))
        elif kind == _SNAPSHOT_JOURNAL:
            journals.append(decode_journal_state(body))
        elif kind == _SNAPSHOT_END:
            if int(bytes(body)) != count:
                return None
            return Snapshot(header.base, next_spool_id, tuple(coordinator), tuple(journals))
        else:
            return None
        at += framed_length(len(record.payload))
        count += 1
    return None

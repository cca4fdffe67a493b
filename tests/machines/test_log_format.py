"""The commit log's bytes: damaged at every place, only good records are read, and damage is told from a torn end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.fragments.fragment import ZERO_SUM, Fragment
from broadsheet.engine.journal.log_format import (
    FILE_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    CoordinatorRecord,
    End,
    FileHeader,
    GroupRecord,
    JournalState,
    LogFile,
    Record,
    ReleaseRecord,
    RollRecord,
    SpoolState,
    Verdict,
    decode_record,
    decode_snapshot,
    encode_file_header,
    encode_snapshot,
    frame,
    framed_length,
    judge,
    registers_from_bytes,
    registers_to_bytes,
    scan,
)
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.labels import LabelSet

ENGINE_ID = 77
HEADER_FIELDS_BYTES = 44  # what the header's checksum covers, and the checksum


@dataclass(frozen=True)
class Written:
    position: int
    proven: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.position + framed_length(len(self.payload))


@dataclass(frozen=True)
class File:
    """A log file as it should be."""

    base: int
    proven: int
    records: tuple[Written, ...]
    data: bytes

    @property
    def path(self) -> str:
        return f"{self.base:x}.log"

    @property
    def end(self) -> int:
        return self.records[-1].end if self.records else self.base

    def offset(self, record: Written) -> int:
        return FILE_HEADER_BYTES + record.position - self.base

    def scan(self, data: bytes | None = None) -> LogFile:
        return scan(self.path, self.base, self.data if data is None else data)


def make_file(salt: int, base: int, proven: int, records: Sequence[tuple[bytes, int]]) -> File:
    """Records are (payload, proven): one that is negative counts back from the record's own position."""
    position, data, written = base, encode_file_header(FileHeader(salt, base, proven, ENGINE_ID)), []
    for payload, told in records:
        record = Written(position, position + told if told < 0 else told, payload)
        data += b"".join(frame(salt, position, record.proven, [payload[:3], memoryview(payload)[3:]]))
        written.append(record)
        position = record.end
    return File(base, proven, tuple(written), data)


SALT = 0x1122334455667788
PAYLOADS = [b"\x01first", b"", b"\x02" + bytes(range(40)), b"\x04eightbyt", b"\x03fourth and last", b"\x01tail"]


def in_promise() -> File:
    """As mode `fsync` writes it: each record proves what was there before the round of its own."""
    lag = [0, 0, -40, -1, 0, 0]
    proven, records, position = 0, [], 0
    for payload, back in zip(PAYLOADS, lag, strict=True):
        records.append((payload, max(proven, position + back)))
        proven = max(proven, position + back)
        position += framed_length(len(payload))
    return make_file(SALT, 0, 0, records)


def without_promise() -> File:
    """As mode `os` writes it: nothing is proven."""
    return make_file(SALT, 0, 0, [(payload, 0) for payload in PAYLOADS])


def as_read(file: LogFile) -> list[tuple[int, int, bytes]]:
    return [(record.position, record.proven, bytes(record.payload)) for record in file.records]


def as_written(records: Sequence[Written]) -> list[tuple[int, int, bytes]]:
    return [(record.position, record.proven, record.payload) for record in records]


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each single bit the other way round: (byte, data)."""
    for at in range(len(data)):
        for bit in range(8):
            yield at, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def hit_by(file: File, at: int) -> Written | None:
    """The record that holds this byte (not the padding after it)."""
    for record in file.records:
        start = file.offset(record)
        if start <= at < start + RECORD_HEADER_BYTES + len(record.payload):
            return record
    return None


def expected_verdict(bad: int, surviving: Sequence[Written], headers: Sequence[File], files_end: int) -> End | None:
    """CORRUPT exactly if something that can be read calls more than `bad` proven. Else None: the log ends there."""
    proven = max([*(record.proven for record in surviving), *(file.proven for file in headers)], default=0)
    return End.CORRUPT if proven > bad else None


# --- One file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [in_promise(), without_promise()], ids=["fsync", "os"])
def test_whole(file: File) -> None:
    found = file.scan()
    assert as_read(found) == as_written(file.records)
    assert (found.end, found.torn, found.header_is_good) == (file.end, False, True)
    assert found.proven == max(record.proven for record in file.records)
    assert judge([found], 0) == Verdict(End.CLEAN, file.end, file.path, found.proven)
    zeros = scan(file.path, 0, file.data + bytes(4096))
    assert as_read(zeros) == as_read(found)
    assert not zeros.torn


@pytest.mark.parametrize("file", [in_promise(), without_promise()], ids=["fsync", "os"])
def test_truncated_at_every_place(file: File) -> None:
    """A file cut short ends the log, and never reads as damage: no record proves what comes after itself."""
    ends = []
    for length in range(len(file.data) + 1):
        found = file.scan(file.data[:length])
        whole = [
            record
            for record in file.records
            if length >= file.offset(record) + RECORD_HEADER_BYTES + len(record.payload)
        ]
        if length < FILE_HEADER_BYTES:
            assert not found.header_is_good
            whole = []
        assert as_read(found) == as_written(whole)
        verdict = judge([found], 0)
        assert verdict.end is not End.CORRUPT
        assert verdict.position == (whole[-1].end if whole else 0)
        ends.append(verdict.end)
    assert End.TORN in ends
    assert End.CLEAN in ends


@pytest.mark.parametrize("file", [in_promise(), without_promise()], ids=["fsync", "os"])
def test_every_flip_of_a_bit(file: File) -> None:
    seen = set()
    for at, data in flips(file.data):
        found = file.scan(data)
        verdict = judge([found], 0)
        if at < FILE_HEADER_BYTES:
            if at >= HEADER_FIELDS_BYTES:  # padding
                assert as_read(found) == as_written(file.records)
                continue
            assert not found.header_is_good
            good: Sequence[Written] = ()
            bad, surviving, headers = 0, file.records, []
        else:
            hit = hit_by(file, at)
            if hit is None:  # padding
                assert as_read(found) == as_written(file.records)
                assert verdict.end is End.CLEAN
                continue
            number = file.records.index(hit)
            good, bad = file.records[:number], hit.position
            surviving, headers = [*good, *file.records[number + 1 :]], [file]
        assert as_read(found) == as_written(good), f"byte {at}"
        expected = expected_verdict(bad, surviving, headers, file.end)
        assert (verdict.end is End.CORRUPT) == (expected is End.CORRUPT), f"byte {at}"
        assert verdict.position == bad, f"byte {at}"
        if verdict.end is End.TORN:
            assert verdict.leftover == (file.path,)
        seen.add(verdict.end)
    # In mode `os` nothing is corruption, as nothing was promised.
    assert (End.CORRUPT in seen) == any(record.proven for record in file.records)
    assert End.TORN in seen


def test_a_damaged_header_before_what_was_proven() -> None:
    """One bit of a header must not make a log of acknowledged records look as if it had never been begun."""
    file = in_promise()
    found = file.scan(bytes([file.data[0] ^ 1]) + file.data[1:])
    verdict = judge([found], 0)
    assert verdict.end is End.CORRUPT
    assert (verdict.position, verdict.path) == (0, file.path)
    unproven = without_promise()
    found = unproven.scan(bytes([unproven.data[0] ^ 1]) + unproven.data[1:])
    assert judge([found], 0).end is End.TORN


def test_stale_bytes_of_another_salt_are_never_records() -> None:
    """A recycled file: new records over those of an earlier use, whichever way the ends fall."""
    for stale_base, fresh_base in [(0, 4096), (4096, 4096)]:
        stale = make_file(SALT, stale_base, stale_base, [(payload, stale_base) for payload in PAYLOADS * 2])
        for count in range(len(PAYLOADS) + 1):
            fresh = make_file(SALT + 2, fresh_base, fresh_base, [(payload, fresh_base) for payload in PAYLOADS[:count]])
            data = fresh.data + stale.data[len(fresh.data) :]
            found = fresh.scan(data)
            assert as_read(found) == as_written(fresh.records)
            assert (found.end, found.torn, found.proven) == (fresh.end, False, fresh_base)
            assert judge([found], fresh_base).end is End.CLEAN


def test_new_header_over_stale_records_that_was_never_wholly_written() -> None:
    stale = make_file(SALT, 0, 0, [(payload, 0) for payload in PAYLOADS])
    fresh = make_file(SALT + 2, 4096, 4096, [])
    for cut in range(FILE_HEADER_BYTES):
        data = fresh.data[:cut] + stale.data[cut:]
        found = scan("x", 4096, data)
        assert found.records == ()
        assert judge([found], 4096).end is not End.CORRUPT
        assert judge([found], 4096).position == 4096


def test_a_record_moved_within_the_file_is_none() -> None:
    """A record holds its own position, so that a copy of it elsewhere is not one."""
    file = make_file(SALT, 0, 0, [(b"12345678", 0)] * 3)
    step = framed_length(8)
    one = file.data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + step]
    found = file.scan(file.data[: FILE_HEADER_BYTES + step] + one)
    assert len(found.records) == 1
    assert found.torn


def test_the_name_must_agree_with_the_header() -> None:
    file = in_promise()
    assert not scan("x", 8, file.data).header_is_good
    assert scan("x", 8, file.data).records == ()


@pytest.mark.parametrize("length", range(20))
def test_frames_are_multiples_of_eight(length: int) -> None:
    framed = b"".join(frame(SALT, 0, 0, [bytes(length)]))
    assert len(framed) == framed_length(length)
    assert len(framed) % 8 == 0
    assert len(framed) < RECORD_HEADER_BYTES + length + 8


# --- Several files ----------------------------------------------------------------------------------------


def three_files(*, durable: bool) -> list[File]:
    files: list[File] = []
    base = 4096
    for number in range(3):
        records = [(payload, 4096) for payload in PAYLOADS[:3]]
        if durable:
            # Each record proves what came before the one before it.
            position, records = base, []
            before = base
            for payload in PAYLOADS[:3]:
                records.append((payload, before))
                before = position
                position += framed_length(len(payload))
        file = make_file(SALT + 2 * number, base, base if durable else 4096, records)
        files.append(file)
        base = file.end
    return files


@pytest.mark.parametrize("durable", [True, False])
def test_whole_log_of_files(durable: bool) -> None:
    files = three_files(durable=durable)
    verdict = judge([file.scan() for file in files], 4096)
    assert (verdict.end, verdict.position, verdict.leftover) == (End.CLEAN, files[-1].end, ())
    assert judge([], 4096) == Verdict(End.CLEAN, 4096, "", 4096)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_every_flip_in_each_of_several_files(durable: bool, damaged: int) -> None:
    files = three_files(durable=durable)
    whole = [file.scan() for file in files]
    file = files[damaged]
    others = [it for it in files if it is not file]
    for at, data in flips(file.data):
        scanned = [*whole]
        scanned[damaged] = file.scan(data)
        verdict = judge(scanned, 4096)
        hit = hit_by(file, at)
        if at < HEADER_FIELDS_BYTES:
            bad, surviving, headers = file.base, list(file.records), others
        elif hit is not None:
            bad, surviving, headers = hit.position, [it for it in file.records if it is not hit], files
        else:
            assert verdict.end is End.CLEAN
            continue
        surviving = [*surviving, *itertools.chain.from_iterable(other.records for other in others)]
        corrupt = expected_verdict(bad, surviving, headers, files[-1].end) is End.CORRUPT
        assert (verdict.end is End.CORRUPT) == corrupt, f"byte {at}"
        assert verdict.position == bad, f"byte {at}"
        if not corrupt:
            # What follows is kept aside: all later files that hold records.
            assert set(verdict.leftover) >= {it.path for it in files[damaged + 1 :]}


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_truncation_in_each_of_several_files(durable: bool, damaged: int) -> None:
    files = three_files(durable=durable)
    file = files[damaged]
    for length in range(len(file.data)):
        scanned = [it.scan() for it in files]
        scanned[damaged] = file.scan(file.data[:length])
        whole = [it for it in file.records if length >= file.offset(it) + RECORD_HEADER_BYTES + len(it.payload)]
        if length < FILE_HEADER_BYTES:
            whole = []
        verdict = judge(scanned, 4096)
        if len(whole) == len(file.records):
            assert verdict.end is End.CLEAN  # only padding was lost
            continue
        bad = whole[-1].end if whole else file.base
        surviving = [*whole, *itertools.chain.from_iterable(it.records for it in files if it is not file)]
        headers = [it for it in files if it is not file or length >= FILE_HEADER_BYTES]
        corrupt = expected_verdict(bad, surviving, headers, files[-1].end) is End.CORRUPT
        assert (verdict.end is End.CORRUPT) == corrupt
        assert verdict.position == bad


def test_a_file_that_is_missing() -> None:
    one, two, three = three_files(durable=True)
    assert judge([one.scan(), three.scan()], 4096).end is End.CORRUPT
    assert judge([two.scan(), three.scan()], 4096).end is End.CORRUPT
    one, two, three = three_files(durable=False)
    verdict = judge([one.scan(), three.scan()], 4096)
    assert (verdict.end, verdict.position, verdict.leftover) == (End.TORN, one.end, (three.path,))


# --- Records and snapshots --------------------------------------------------------------------------------

offsets = st.integers(0, 2**63 - 1)
sums = st.binary(min_size=20, max_size=20)
names = st.sampled_from(["a/journal", "ä/journal", "x" * 512])
codecs = st.sampled_from([codec for codec in CompressionCodec if codec])
registers = st.sampled_from([None, LabelSet(), LabelSet.of(("author", "me"), ("ü", '"quoted"\\'))])
registers_bytes = registers.map(lambda labels: None if labels is None else registers_to_bytes(labels))

records = st.one_of(
    st.builds(
        GroupRecord,
        names,
        offsets,
        offsets,
        offsets,
        offsets,
        offsets,
        offsets,
        codecs,
        sums,
        registers_bytes,
        st.integers(0, 2**32 - 1),
        st.one_of(st.none(), st.binary(min_size=1, max_size=50)),
    ),
    st.builds(RollRecord, names, offsets, offsets, codecs, registers_bytes),
    st.builds(ReleaseRecord, names, offsets, offsets),
    st.builds(CoordinatorRecord, st.binary(max_size=50)),
)


@given(records)
def test_records_come_back(record: Record) -> None:
    content: list[bytes | memoryview] = []
    if isinstance(record, GroupRecord) and record.content is not None:
        content = [bytes(record.content[:7]), memoryview(record.content)[7:]]
    encoded = record.encode(content) if isinstance(record, GroupRecord) else record.encode()
    found = decode_record(memoryview(b"".join(encoded)))
    if isinstance(found, GroupRecord) and found.content is not None:
        found = replace(found, content=bytes(found.content))
    assert found == record


@given(registers)
def test_registers_come_back(labels: LabelSet | None) -> None:
    assert registers_from_bytes(None if labels is None else registers_to_bytes(labels)) == (labels or LabelSet())


def test_unknown_kinds_of_records_are_refused() -> None:
    for payload in (b"", b"\x00", b"\x09something"):
        with pytest.raises(ValueError, match="unknown kind"):
            decode_record(memoryview(payload))


spools = st.builds(
    lambda *fields: (*fields[:-1], fields[-1] or LabelSet()),
    st.integers(1, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    sums,
    codecs,
    st.integers(0, 2**62),
    registers,
)


Made = tuple[int, int, int, bytes, CompressionCodec, int, LabelSet]


def state_of(name: str, revision: int, made: list[Made]) -> JournalState:
    states = [
        SpoolState(id_, Fragment(name, begin, begin + length, sum_, codec), first, labels)
        for id_, begin, length, sum_, codec, first, labels in made
    ]
    return JournalState(name, revision, states[0], tuple(states[1:]))


states = st.builds(state_of, names, st.integers(1, 2**40), st.lists(spools, min_size=1, max_size=3))


@given(
    st.integers(0, 2**60).map(lambda position: position * 8),
    st.integers(1, 2**40),
    st.lists(st.binary(max_size=30), max_size=3),
    st.lists(states, max_size=5),
)
def test_snapshots_come_back(position: int, next_id: int, chunks: list[bytes], journals: list[JournalState]) -> None:
    found = decode_snapshot(b"".join(encode_snapshot(position, next_id, ENGINE_ID, chunks, journals)))
    assert found is not None
    assert (found.position, found.next_spool_id) == (position, next_id)
    assert found.coordinator == tuple(chunks)
    assert found.journals == tuple(journals)


def test_snapshot_of_many_journals() -> None:
    journals = [
        state_of(f"a/journal/{number}", number + 1, [(0, 1, 0, ZERO_SUM, CompressionCodec.NONE, 0, LabelSet())])
        for number in range(600)
    ]
    found = decode_snapshot(b"".join(encode_snapshot(8, 9, ENGINE_ID, [], journals)))
    assert found is not None
    assert found.journals == tuple(journals)


def small_snapshot() -> bytes:
    journal = state_of("a/journal", 3, [(1, 0, 5, bytes(range(20)), CompressionCodec.SNAPPY, 7, LabelSet.of(aa="1"))])
    return b"".join(encode_snapshot(64, 2, ENGINE_ID, [b"coordinator"], [journal]))


def test_snapshot_cut_short_is_none() -> None:
    data = small_snapshot()
    whole = decode_snapshot(data)
    assert whole is not None
    for length in range(len(data)):
        found = decode_snapshot(data[:length])
        assert found is None or (found == whole and not data[length:].strip(b"\0"))


def test_snapshot_with_any_bit_flipped_is_none() -> None:
    data = small_snapshot()
    whole = decode_snapshot(data)
    same = 0
    for at, flipped in flips(data):
        found = decode_snapshot(flipped)
        if found is not None:
            assert found == whole, f"byte {at}"
            same += 1
    assert same < 8 * (FILE_HEADER_BYTES - HEADER_FIELDS_BYTES + 7 * 5)  # padding only

"""SNAPPY against python-snappy and Gazette's own file, skipping, and objects that are damaged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import snappy
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.fragments.codecs import BadCompression, compress, decompress, require_supported
from broadsheet.engine.journal.spec import CompressionCodec

NONE, SNAPPY = CompressionCodec.NONE, CompressionCodec.SNAPPY
STREAM_ID = bytes.fromhex("ff060000734e61507059")
HELLO_WORLD = bytes.fromhex("ff060000734e61507059010f0000007ed86d68656c6c6f20776f726c64")
CHUNK = 65_536


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def unpacked(pieces: Iterable[bytes], codec: CompressionCodec = SNAPPY, skip: int = 0) -> bytes:
    return b"".join(decompress(codec, pieces, skip))


def packed(content: bytes, size: int = 1 << 20, codec: CompressionCodec = SNAPPY) -> bytes:
    return b"".join(compress(codec, cut(content, size)))


def sample(length: int) -> bytes:
    """Half of it compresses, half does not."""
    rng = random.Random(length)
    return b"".join(rng.randbytes(500) + b"compressible " * 40 for _ in range(length // 1020 + 1))[:length]


def chunk_ends(data: bytes) -> list[int]:
    ends, at = [], 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at + 1 : at + 4], "little")
        ends.append(at)
    return ends


LENGTHS = [1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1000, CHUNK, 1 << 20])
def test_python_snappy_reads_ours(length: int, size: int) -> None:
    content = sample(length)
    data = packed(content, size)
    assert data.startswith(STREAM_ID)
    assert data.count(STREAM_ID) == 1
    assert snappy.StreamDecompressor().decompress(data) == content
    assert unpacked(cut(data, 999)) == content


@pytest.mark.parametrize("length", LENGTHS)
def test_we_read_python_snappy(length: int) -> None:
    content = sample(length)
    data = snappy.StreamCompressor().compress(content)
    for size in (1, 7, 1000, 1 << 20):
        if size > 1 or length < 1000:
            assert unpacked(cut(data, size)) == content


def test_golden_content(vectors: Callable[[str], Any]) -> None:
    vectors("uuids.json")  # says so where there are none
    folder = Path(__file__).resolve().parents[3] / "shared" / "vectors" / "codecs"
    raw, data = (folder / "content.raw").read_bytes(), (folder / "content.sz").read_bytes()
    assert unpacked(cut(data, 10_000)) == raw
    for skip in (1, len(raw) // 2, len(raw) - 1, len(raw)):
        assert unpacked([data], skip=skip) == raw[skip:]
    assert snappy.StreamDecompressor().decompress(packed(raw)) == raw


def test_worked_object() -> None:
    """The object observed in spec/fragments.md §5."""
    assert unpacked([HELLO_WORLD]) == b"hello world"
    assert unpacked(cut(HELLO_WORLD, 1)) == b"hello world"
    assert packed(b"hello world") == HELLO_WORLD


def test_skip_at_every_class_of_offset() -> None:
    content = sample(3 * CHUNK + 100)
    data = packed(content)
    boundaries = [0, CHUNK, 2 * CHUNK, 3 * CHUNK, len(content)]
    offsets = {at + near for at in boundaries for near in (-1, 0, 1)} | {1000, CHUNK + 30_000}
    for skip in sorted(offsets):
        if 0 <= skip <= len(content):
            for pieces in ([data], list(cut(data, 5000))):
                assert unpacked(pieces, skip=skip) == content[skip:], skip
                assert unpacked(cut(content, 5000), NONE, skip) == content[skip:], skip


def test_what_is_skipped_is_not_decompressed() -> None:
    """A reader that resumes at the end of a large object pays for little of it."""
    content = sample(4 * CHUNK)
    data = bytearray(packed(content))
    data[chunk_ends(bytes(data))[0] + 100] ^= 1  # in the first chunk
    with pytest.raises(BadCompression):
        unpacked([bytes(data)])
    assert unpacked([bytes(data)], skip=CHUNK) == content[CHUNK:]


def test_truncated_at_every_place() -> None:
    content = sample(300)
    data = snappy.StreamCompressor().compress(content[:100]) + snappy.StreamCompressor().compress(content[100:])[10:]
    ends = chunk_ends(data)
    assert len(ends) == 3
    for length in range(len(data)):
        if length in ends:
            # Complete as far as it goes: the store, which knows the length, refuses it.
            assert content.startswith(unpacked([data[:length]]))
            continue
        with pytest.raises(BadCompression):
            unpacked([data[:length]])
        with pytest.raises(BadCompression):
            unpacked(cut(data[:length], 3))
    assert unpacked([data]) == content


def test_every_flip_of_a_bit() -> None:
    """Whatever is changed, what comes out is the content, or an error, or (a chunk made skippable) too little."""
    for content in (b"hello world", b"compressible " * 20):
        data = packed(content)
        assert (data[10] == 0) == (len(content) > 100)  # a compressed chunk, and one that is not
        outcomes = set()
        for at in range(len(data)):
            for bit in range(8):
                flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                try:
                    found = unpacked([flipped])
                except BadCompression:
                    outcomes.add("refused")
                    continue
                if found != content:
                    assert (at, bit, found) == (10, 7, b"")
                    outcomes.add("skipped")
        assert outcomes == {"refused", "skipped"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"hello world, this is not snappy",
        HELLO_WORLD[10:],
        HELLO_WORLD + b"\x02\x01\x00\x00x",  # reserved, not to be passed over
        HELLO_WORLD + b"\x01\x03\x00\x00abc",  # too short for its checksum
        HELLO_WORLD + b"\x00\x04\x00\x00abcd",  # no length
        STREAM_ID + b"\x01" + (CHUNK + 5).to_bytes(3, "little") + bytes(CHUNK + 5),  # too long
    ],
)
def test_what_is_no_object(data: bytes) -> None:
    for skip in (0, 1 << 30):
        with pytest.raises(BadCompression):
            unpacked([data], skip=skip)


def test_padding_and_repeated_stream_identifiers() -> None:
    data = HELLO_WORLD + b"\xfe\x05\x00\x00.....\x80\x01\x00\x00." + HELLO_WORLD
    assert unpacked(cut(data, 4)) == b"hello world" * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=8), st.integers(0, 10_000), st.integers(1, 4000))
def test_round_trip(pieces: list[bytes], skip: int, size: int) -> None:
    content = b"".join(pieces)
    for codec in (NONE, SNAPPY):
        data = b"".join(compress(codec, pieces))
        if data:
            assert unpacked(cut(data, size), codec, skip) == content[skip:]
            assert hashlib.sha1(unpacked([data], codec)).digest() == hashlib.sha1(content).digest()


@pytest.mark.parametrize("codec", [CompressionCodec.GZIP, CompressionCodec.ZSTANDARD, CompressionCodec.LZ4])
def test_codecs_to_come(codec: CompressionCodec) -> None:
    for call in (
        lambda: require_supported(codec),
        lambda: list(compress(codec, [b"x"])),
        lambda: list(decompress(codec, [b"x"])),
    ):
        with pytest.raises(ValidationError, match=codec.name):
            call()

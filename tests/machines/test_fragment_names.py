"""Names of fragments, both ways: the golden vectors and the table of spec/fragments.md §1."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.fragments.fragment import ZERO_SUM, Fragment, codec_extension, parse_content_path
from broadsheet.engine.journal.spec import CompressionCodec

HELLO = "aaf4c61ddcc5e8a2dabede0f3b482cd9aea9434d"


def digest(parts: list[Any]) -> bytes:
    """20 bytes of the three numbers of an SHA1Sum (spec/broker-protocol.md §2)."""
    one, two, three = map(int, parts)
    return one.to_bytes(8, "big") + two.to_bytes(8, "big") + three.to_bytes(4, "big")


def test_golden_names(vectors: Callable[[str], Any]) -> None:
    entries = vectors("fragment_names.json")["format"]
    assert entries
    for entry in entries:
        content = entry["content"].encode()
        sum_ = digest(entry["sum_parts"])
        assert sum_ == (hashlib.sha1(content).digest() if content else ZERO_SUM)
        path = entry["content_path"]
        postfix = path.removeprefix("foo/bar/").removesuffix(entry["content_name"]).rstrip("/")
        codec = CompressionCodec[entry["codec"]]
        fragment = Fragment("foo/bar", entry["begin"], entry["end"], sum_, codec, path_postfix=postfix)
        assert fragment.content_name == entry["content_name"]
        assert fragment.content_path == path
        assert fragment.length == len(content)
        assert parse_content_path("foo/bar", path.removeprefix("foo/bar/")) == fragment


def test_golden_parsing(vectors: Callable[[str], Any]) -> None:
    entries = vectors("fragment_names.json")["parse"]
    assert entries
    for entry in entries:
        if entry["error"] is not None:
            with pytest.raises(ValidationError) as caught:
                parse_content_path("foo/bar", entry["name"])
            assert str(caught.value) == entry["error"]
            continue
        expected = entry["fragment"]
        found = parse_content_path("foo/bar", entry["name"])
        parts = expected.get("sum", {})
        assert found == Fragment(
            "foo/bar",
            int(expected.get("begin", 0)),
            int(expected.get("end", 0)),
            digest([parts.get("part1", 0), parts.get("part2", 0), parts.get("part3", 0)]),
            CompressionCodec[expected["compression_codec"]],
            path_postfix=expected.get("path_postfix", ""),
        )


@pytest.mark.parametrize(
    ("codec", "extension"),
    [
        (CompressionCodec.NONE, ".raw"),
        (CompressionCodec.GZIP, ".gz"),
        (CompressionCodec.ZSTANDARD, ".zst"),
        (CompressionCodec.SNAPPY, ".sz"),
        (CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION, ""),
    ],
)
def test_names_of_the_specification(codec: CompressionCodec, extension: str) -> None:
    fragment = Fragment("ex/demo", 0, 5, hashlib.sha1(b"hello").digest(), codec)
    name = f"0000000000000000-0000000000000005-{HELLO}{extension}"
    assert fragment.content_path == f"ex/demo/{name}"
    assert parse_content_path("ex/demo", name) == fragment
    assert parse_content_path("ex/demo", f"date=2026-11-21/hour=03/{name}").path_postfix == "date=2026-11-21/hour=03"
    assert parse_content_path("ex/demo", name.upper() if extension else name).compression_codec == codec


def test_observed_sum() -> None:
    """The worked SHA1Sum of spec/broker-protocol.md §2."""
    assert digest([12318688712325458082, 15762279902843776217, 2930328397]).hex() == HELLO


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"0-5-{HELLO}.lzma", "unrecognized compression extension: .lzma"),
        (f"0-5-{HELLO}.lz4", "unrecognized compression extension: .lz4"),
        ("0-5.raw", "wrong Fragment format: 0-5"),
        (f"0-5-6-{HELLO}.raw", f"wrong Fragment format: 0-5-6-{HELLO}"),
        (f"x-5-{HELLO}.raw", 'Begin: strconv.ParseInt: parsing "x": invalid syntax'),
        (f"0--{HELLO}.raw", 'End: strconv.ParseInt: parsing "": invalid syntax'),
        (
            f"0-{'8'.ljust(16, '0')}-{HELLO}.raw",
            'End: strconv.ParseInt: parsing "8000000000000000": value out of range',
        ),
        (f"6-5-{HELLO}.raw", "expected Begin <= End (have 6, 5)"),
        (f"0-5-{HELLO}00.raw", f"invalid SHA1Sum length: {HELLO}00"),
        (f"0-5-{HELLO[1:]}.raw", "Sum: encoding/hex: odd length hex string"),
        (f".partial-0-5-{HELLO}.raw12345678", f"wrong Fragment format: .partial-0-5-{HELLO}"),
        (f"a b/0-5-{HELLO}.raw", "PathPostfix: not a valid token (a b)"),
    ],
)
def test_names_that_are_none(name: str, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_content_path("ex/demo", name)
    assert str(caught.value) == text


def test_our_codec_is_read_only_where_it_is_allowed() -> None:
    name = f"0000000000000000-0000000000000005-{HELLO}{codec_extension(CompressionCodec.LZ4)}"
    assert parse_content_path("ex/demo", name, allow_lz4=True).compression_codec == CompressionCodec.LZ4


codecs = st.sampled_from([codec for codec in CompressionCodec if codec not in (0, 100)])


@given(
    st.integers(0, 2**62),
    st.integers(0, 2**40),
    st.binary(min_size=20, max_size=20),
    codecs,
    st.sampled_from(["", "a", "a/b=c", "date=2026-11-21/hour=03"]),
)
def test_round_trip(begin: int, length: int, sum_: bytes, codec: CompressionCodec, postfix: str) -> None:
    fragment = Fragment("some/journal", begin, begin + length, sum_, codec, path_postfix=postfix)
    assert parse_content_path("some/journal", fragment.content_path.removeprefix("some/journal/")) == fragment

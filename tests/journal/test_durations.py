"""Go's duration text and protobuf's JSON durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.durations import (
    format_duration,
    format_json_duration,
    parse_duration,
    parse_json_duration,
)

SECOND = 10**9
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (-1, "-1ns"),
        (1_100, "1.1µs"),
        (2_200_000, "2.2ms"),
        (999_000_000, "999ms"),
        (SECOND, "1s"),
        (1_500_000_000, "1.5s"),
        (59_999_000_000, "59.999s"),
        (60 * SECOND, "1m0s"),
        (86_400_001_000_000, "24h0m0.001s"),
        (5_400 * SECOND, "1h30m0s"),
        (-5_400 * SECOND, "-1h30m0s"),
        (2**63 - 1, "2562047h47m16.854775807s"),
        (-(2**63), "-2562047h47m16.854775808s"),
    ],
)
def test_go_text(duration_ns, text):
    assert format_duration(duration_ns) == text
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("0", 0),
        ("-0", 0),
        ("+5s", 5 * SECOND),
        ("1h30m", 5_400 * SECOND),
        ("500ms", SECOND // 2),
        (".5s", SECOND // 2),
        ("1.s", SECOND),
        ("1.5h", 5_400 * SECOND),
        ("1us1µs1μs", 3_000),
        ("1.9ns", 1),
        ("-1.9ns", -1),
        ("90s1m", 150 * SECOND),
        ("0.000000000000000000001h", 0),
    ],
)
def test_go_text_other_forms(text, duration_ns):
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        (".s", 'time: invalid duration ".s"'),
        ("s", 'time: invalid duration "s"'),
        (" 1s", 'time: invalid duration " 1s"'),
        ("--1s", 'time: invalid duration "--1s"'),
        ("5", 'time: missing unit in duration "5"'),
        ("1s5", 'time: missing unit in duration "1s5"'),
        ("5x", 'time: unknown unit "x" in duration "5x"'),
        ("5d", 'time: unknown unit "d" in duration "5d"'),
        ("٣s", 'time: invalid duration "٣s"'),
        ("2562047h47m16.854775808s", 'time: invalid duration "2562047h47m16.854775808s"'),
        ("9" * 5000 + "s", 'time: invalid duration "' + "9" * 5000 + 's"'),
    ],
)
def test_go_text_errors(text, error):
    with pytest.raises(ValidationError) as caught:
        parse_duration(text)
    assert str(caught.value) == error


@given(INT64)
def test_round_trips(duration_ns):
    assert parse_duration(format_duration(duration_ns)) == duration_ns
    assert parse_json_duration(format_json_duration(duration_ns)) == duration_ns


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0s"),
        (60 * SECOND, "60s"),
        (1_500_000_000, "1.500s"),
        (-1_000, "-0.000001s"),
        (1, "0.000000001s"),
        (20_998_000_000, "20.998s"),
    ],
)
def test_json_text(duration_ns, text):
    assert format_json_duration(duration_ns) == text
    assert parse_json_duration(text) == duration_ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "1",
        "1m",
        "1.s",
        ".5s",
        "1.0000000001s",
        "1 s",
        "+1s",
        "1_0s",
        "٣s",
        "99999999999s",
        "9300000000s",
    ],
)
def test_json_text_errors(text):
    with pytest.raises(ValidationError):
        parse_json_duration(text)

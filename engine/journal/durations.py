"""Durations as text: Go's form (`1h30m`, `1m0s`) and the JSON form of protobuf (`90s`, `0.500s`).

Durations are whole nanoseconds in an `int`, within the 64 bits that Go and the wire give them.
"""

from __future__ import annotations

from functools import cache, lru_cache

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels.tokens import go_quote

__all__ = [
    "HOUR_NS",
    "MICROSECOND_NS",
    "MILLISECOND_NS",
    "MINUTE_NS",
    "SECOND_NS",
    "format_duration",
    "format_json_duration",
    "parse_duration",
    "parse_json_duration",
]

MICROSECOND_NS = 1_000
MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS

_MAX_NS = 2**63 - 1
_DIGITS = "0123456789"


@cache
def _units() -> dict[str, int]:
    return {
        "ns": 1,
        "us": MICROSECOND_NS,
        "\u00b5s": MICROSECOND_NS,  # micro sign
        "\u03bcs": MICROSECOND_NS,  # Greek letter mu
        "ms": MILLISECOND_NS,
        "s": SECOND_NS,
        "m": MINUTE_NS,
        "h": HOUR_NS,
    }


def parse_duration(text: str) -> int:
    """Nanoseconds of a Go duration: signed decimal numbers with units, as `-1.5h`, `2h45m`, or a bare `0`.

    Fractions of a nanosecond are cut off. Raises `ValidationError` with Go's texts.
    """
    rest = text[1:] if text[:1] in ("-", "+") else text
    negative = text[:1] == "-"
    if rest == "0":
        return 0
    if not rest:
        raise _invalid(text)
    total = 0
    while rest:
        whole, rest = _split_while(rest, _DIGITS)
        fraction = ""
        if rest[:1] == ".":
            fraction, rest = _split_while(rest[1:], _DIGITS)
        if not whole and not fraction:
            raise _invalid(text)
        unit, rest = _split_until(rest, _DIGITS + ".")
        if not unit:
            raise ValidationError(f"time: missing unit in duration {go_quote(text)}")
        unit_ns = _units().get(unit)
        if unit_ns is None:
            raise ValidationError(f"time: unknown unit {go_quote(unit)} in duration {go_quote(text)}")
        if len(whole) > 4096 or len(fraction) > 4096:
            raise _invalid(text)  # far out of range, or absurd: spare int() the work
        total += int(whole or 0) * unit_ns + int(fraction or 0) * unit_ns // 10 ** len(fraction)
    if total > _MAX_NS + negative:
        raise _invalid(text)
    return -total if negative else total


def format_duration(duration_ns: int) -> str:
    """The text of Go's `time.Duration.String`: `1h0m0.5s`, `1m0s`, `1.5s`, `500ms`, `0s`."""
    if duration_ns == 0:
        return "0s"
    sign = "-" if duration_ns < 0 else ""
    size = abs(duration_ns)
    if size < MICROSECOND_NS:
        return f"{sign}{size}ns"
    if size < MILLISECOND_NS:
        return f"{sign}{_decimal(size, 3)}\u00b5s"
    if size < SECOND_NS:
        return f"{sign}{_decimal(size, 6)}ms"
    minutes, rest = divmod(size, MINUTE_NS)
    seconds = _decimal(rest, 9) + "s"
    if not minutes:
        return sign + seconds
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}h{minutes}m{seconds}" if hours else f"{sign}{minutes}m{seconds}"


@lru_cache(maxsize=1024)
def parse_json_duration(text: str) -> int:
    """Nanoseconds of protobuf's JSON form: decimal seconds, at most nine decimals, and `s`."""
    sign = -1 if text[:1] == "-" else 1
    body = text[1:] if sign < 0 else text
    whole, dot, fraction = body[:-1].partition(".")
    digits = whole + fraction
    well_formed = body[-1:] == "s" and whole and digits.isascii() and digits.isdigit()
    if not well_formed or len(whole) > 10 or (dot and not 1 <= len(fraction) <= 9):
        raise ValidationError(f'expected a duration in seconds such as "60s" or "0.5s" (have {text!r})')
    duration_ns = sign * (int(whole) * SECOND_NS + int(fraction.ljust(9, "0")))
    if not -_MAX_NS - 1 <= duration_ns <= _MAX_NS:
        raise ValidationError(f"duration out of range ({text})")
    return duration_ns


def format_json_duration(duration_ns: int) -> str:
    """Protobuf's JSON form: seconds with zero, three, six or nine decimals, as needed."""
    seconds, nanos = divmod(abs(duration_ns), SECOND_NS)
    sign = "-" if duration_ns < 0 else ""
    if not nanos:
        return f"{sign}{seconds}s"
    decimals = f"{nanos:09d}"
    while decimals.endswith("000"):
        decimals = decimals[:-3]
    return f"{sign}{seconds}.{decimals}s"


def _decimal(value: int, places: int) -> str:
    """`value / 10**places` without trailing zeros."""
    whole, rest = divmod(value, 10**places)
    return f"{whole}.{rest:0{places}d}".rstrip("0") if rest else str(whole)


def _split_while(text: str, chars: str) -> tuple[str, str]:
    rest = text.lstrip(chars)
    return text[: len(text) - len(rest)], rest


def _split_until(text: str, chars: str) -> tuple[str, str]:
    for index, char in enumerate(text):
        if char in chars:
            return text[:index], text[index:]
    return text, ""


def _invalid(text: str) -> ValidationError:
    return ValidationError(f"time: invalid duration {go_quote(text)}")

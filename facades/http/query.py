"""Query parameters of the journal gateway (spec/http-gateway.md §2), with the exact texts of its refusals."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

__all__ = ["QueryError", "parse_pairs", "parse_read_query", "refuse_parameters"]

_MAX_INT64 = 2**63 - 1
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True", "on"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


class QueryError(Exception):
    """A query that is refused with 400 and this text."""


def parse_pairs(query: bytes) -> list[tuple[str, str]]:
    """Names and values in their order, decoded. Raises `QueryError`."""
    pairs = []
    for part in query.split(b"&"):
        if not part:
            continue
        if b";" in part:
            raise QueryError("invalid semicolon separator in query")
        name, _, value = part.partition(b"=")
        pairs.append((_unescape(name), _unescape(value)))
    return pairs


def parse_read_query(query: bytes) -> tuple[int, bool]:
    """`offset` and `block` of a GET or HEAD. Names in any case, the last of a repeated one wins, empty is default.

    Raises `QueryError`. The range of `offset` is for the request's own validation.
    """
    given: dict[str, tuple[str, str]] = {}
    unknown: dict[str, None] = {}
    for name, value in parse_pairs(query):
        key = name.lower()
        if key in ("offset", "block"):
            given[key] = (name, value)
        else:
            unknown[name] = None
    problems = _unknown(unknown)
    offset, block = 0, False
    name, value = given.get("offset", ("", ""))
    if value:
        if _INTEGER.fullmatch(value) and -_MAX_INT64 - 1 <= int(value[:40]) <= _MAX_INT64:
            offset = int(value)
        else:
            problems.append(f'schema: error converting value for "{name}"')
    name, value = given.get("block", ("", ""))
    if value:
        if value in _BOOLEANS:
            block = _BOOLEANS[value]
        else:
            problems.append(f'schema: error converting value for "{name}"')
    _raise(problems)
    return offset, block


def refuse_parameters(query: bytes) -> None:
    """The query of a PUT, which takes none. Raises `QueryError`."""
    _raise(_unknown(dict.fromkeys(name for name, _ in parse_pairs(query))))


def _unescape(text: bytes) -> str:
    bad = _BAD_ESCAPE.search(text)
    if bad is not None:
        escape = text[bad.start() : bad.start() + 3].decode("latin-1")
        raise QueryError(f'invalid URL escape "{escape}"')
    return unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8", "replace")


def _unknown(names: dict[str, None]) -> list[str]:
    return [f'schema: invalid path "{name}"' for name in names]


def _raise(problems: list[str]) -> None:
    if not problems:
        return
    others = len(problems) - 1
    if others == 0:
        raise QueryError(problems[0])
    raise QueryError(f"{problems[0]} (and {others} other error{'s' if others > 1 else ''})")

"""Tokens, path components and journal names: the alphabets and lengths of spec/broker-protocol.md §5.

Lengths are in bytes of UTF-8. The alphabet is Unicode letters (L*), Unicode numbers (all of N*) and a few
symbols. `str.isalnum` is exactly "L* or N*" (a test walks all code points), which spares a table.
"""

from __future__ import annotations

from broadsheet.engine.errors import ValidationError

__all__ = [
    "JOURNAL_NAME_MAX_BYTES",
    "JOURNAL_NAME_MIN_BYTES",
    "PATH_SYMBOLS",
    "TOKEN_SYMBOLS",
    "clean_path",
    "go_quote",
    "split_journal_meta",
    "validate_journal_name",
    "validate_path_component",
    "validate_request_journal",
    "validate_token",
]

TOKEN_SYMBOLS = "-_+/."
PATH_SYMBOLS = TOKEN_SYMBOLS + "=%"

JOURNAL_NAME_MIN_BYTES = 4
JOURNAL_NAME_MAX_BYTES = 512

_ASCII_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_ALPHABETS = {symbols: frozenset(_ASCII_ALNUM + symbols) for symbols in (TOKEN_SYMBOLS, PATH_SYMBOLS)}
_GO_ESCAPES = {
    "\\": "\\\\",
    '"': '\\"',
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
}


def validate_token(text: str, min_bytes: int, max_bytes: int, *, symbols: str = TOKEN_SYMBOLS) -> None:
    """Raise `ValidationError` unless `text` is a token of `min_bytes..max_bytes` (both inclusive).

    `symbols` is `TOKEN_SYMBOLS` (names) or `PATH_SYMBOLS` (label values, path components).
    """
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if not min_bytes <= size <= max_bytes:
        raise ValidationError(f"invalid length ({size}; expected {min_bytes} <= length <= {max_bytes})")
    rest = set(text) - _ALPHABETS[symbols]
    if rest and not "".join(rest).isalnum():
        raise ValidationError(f"not a valid token ({text})")


def clean_path(path: str) -> str:
    """The shortest lexical equal of a slash-separated path, by the rules of Go's `path.Clean`.

    No doubled, trailing or `.` segments; `..` removes the segment before it and survives only at the front of
    a relative path. The empty path cleans to `"."`. (`posixpath.normpath` differs: it keeps a leading `//`.)
    """
    rooted = path.startswith("/")
    kept: list[str] = []
    for segment in path.split("/"):
        if segment in ("", "."):
            continue
        if segment != "..":
            kept.append(segment)
        elif kept and kept[-1] != "..":
            kept.pop()
        elif not rooted:
            kept.append(segment)
    return ("/" if rooted else "") + "/".join(kept) or "."


def validate_path_component(text: str, min_bytes: int, max_bytes: int) -> None:
    """Raise `ValidationError` unless `text` is a relative, clean path of path tokens."""
    validate_token(text, min_bytes, max_bytes, symbols=PATH_SYMBOLS)
    if not text:
        return  # only where min_bytes is 0: an optional component that is absent
    if clean_path(text) != text:
        raise ValidationError(f"must be a clean path ({text})")
    if text[0] == "/":
        raise ValidationError(f"cannot begin with '/' ({text})")


def split_journal_meta(name: str) -> tuple[str, str | None]:
    """Split a journal name at its first `;` into the name and its metadata segment.

    The segment is None where there is no `;`, and excludes the `;`.
    """
    journal, separator, meta = name.partition(";")
    return journal, (meta if separator else None)


def validate_request_journal(name: str) -> None:
    """Raise `ValidationError` unless `name` may be named by a request: `journal` or `journal;meta`."""
    journal, meta = split_journal_meta(name)
    validate_path_component(journal, JOURNAL_NAME_MIN_BYTES, JOURNAL_NAME_MAX_BYTES)
    if meta is not None:
        try:
            validate_path_component(meta, 1, JOURNAL_NAME_MAX_BYTES)
        except ValidationError as err:
            raise err.within("metadata path segment") from None


def validate_journal_name(name: str) -> None:
    """Raise `ValidationError` unless `name` can be the name of a journal itself: no metadata segment.

    The error has no context; the caller adds its own (`Name`, `Journal`).
    """
    validate_request_journal(name)
    meta = split_journal_meta(name)[1]
    if meta is not None:
        raise ValidationError(f"cannot have a metadata path segment (;{meta}; expected no segment)")


def go_quote(text: str) -> str:
    """`text` in double quotes, escaped as Go's `%q` does: the texts of several errors hold such quotes."""
    out = []
    for char in text:
        code = ord(char)
        if char in _GO_ESCAPES:
            out.append(_GO_ESCAPES[char])
        elif char == " " or (char.isprintable() and not char.isspace()):
            out.append(char)
        elif code < 0x80:
            out.append(f"\\x{code:02x}")
        else:
            out.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return '"' + "".join(out) + '"'

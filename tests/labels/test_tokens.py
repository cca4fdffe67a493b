"""Tokens, path components, journal names (spec/broker-protocol.md §5)."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels import (
    clean_path,
    split_journal_meta,
    validate_journal_name,
    validate_path_component,
    validate_request_journal,
    validate_token,
)
from broadsheet.engine.labels.tokens import go_quote


def error_of(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except ValidationError as err:
        return str(err)
    return None


def test_journal_names_golden(vectors):
    for case in vectors("journal_names.json"):
        assert error_of(validate_request_journal, case["name"]) == case["error"], case


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("foo/bar", None),
        ("a=1/b%2", None),
        ("données", None),
        ("Ⅻ½四", None),  # numbers of categories Nl and No, and a letter
        ("foo/bar;meta=x", None),
        ("../foo", None),
        ("éé", None),  # four bytes
        ("é", "invalid length (2; expected 4 <= length <= 512)"),
        ("a" * 513, "invalid length (513; expected 4 <= length <= 512)"),
        ("foo bar", "not a valid token (foo bar)"),
        ("foo\n", "not a valid token (foo\n)"),
        ("foo\ud800", "not a valid token (foo\ud800)"),
        ("foo/", "must be a clean path (foo/)"),
        ("/foo", "cannot begin with '/' (/foo)"),
        ("abcd;", "metadata path segment: invalid length (0; expected 1 <= length <= 512)"),
        ("abcd;a;b", "metadata path segment: not a valid token (a;b)"),
        ("abcd;a//b", "metadata path segment: must be a clean path (a//b)"),
    ],
)
def test_request_journal(name, error):
    assert error_of(validate_request_journal, name) == error


def test_journal_name_has_no_meta():
    assert error_of(validate_journal_name, "foo/bar") is None
    assert (
        error_of(validate_journal_name, "foo/bar;x")
        == "cannot have a metadata path segment (;x; expected no segment)"
    )
    assert split_journal_meta("foo/bar;x;y") == ("foo/bar", "x;y")
    assert split_journal_meta("foo/bar;") == ("foo/bar", "")
    assert split_journal_meta("foo/bar") == ("foo/bar", None)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("", "."),
        (".", "."),
        ("/", "/"),
        ("//a", "/a"),
        ("a/b/", "a/b"),
        ("a//b", "a/b"),
        ("a/./b", "a/b"),
        ("a/../b", "b"),
        ("a/..", "."),
        ("../a", "../a"),
        ("../../a/../b", "../../b"),
        ("/../a", "/a"),
        ("a/b/../../..", ".."),
        ("...", "..."),
    ],
)
def test_clean_path(path, clean):
    assert clean_path(path) == clean


def test_optional_component():
    assert error_of(validate_path_component, "", 0, 512) is None


def test_tokens_have_fewer_symbols_than_paths():
    assert error_of(validate_token, "a=b", 2, 64) == "not a valid token (a=b)"
    assert error_of(validate_token, "a-_+/.b", 2, 64) is None
    assert error_of(validate_token, "a", 2, 64) == "invalid length (1; expected 2 <= length <= 64)"


def test_alphabet_is_unicode_letters_and_numbers():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        assert char.isalnum() == (unicodedata.category(char)[0] in "LN")


def test_go_quote():
    assert go_quote('a"b\\\n\x01é\u2028') == '"a\\"b\\\\\\n\\x01é\\u2028"'

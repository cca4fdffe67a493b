"""The selector grammar, its canonical text, and matching (spec/journals.md §5)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels import EVERYTHING, Label, LabelSelector, LabelSet, parse_selector

NAMES = st.one_of(
    st.sampled_from(["aa", "name", "prefix", "in", "not", "notin", "app.gazette.dev/tag", "né", "a-", "a/"]),
    st.text("abé½_+/.-", min_size=2, max_size=6),
)
VALUES = st.one_of(
    st.sampled_from(["x", "in", "=", "==", "%20", "a/b/"]), st.text("ab=%½/", min_size=1, max_size=4)
)


@st.composite
def valid_sets(draw):
    """Sets as a selector may hold: an empty value stands alone, and (name, value) is unique."""
    labels = []
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        values = draw(st.lists(VALUES, unique=True, max_size=3)) or [""]
        labels += [Label(name, value, draw(st.booleans())) for value in values]
    return LabelSet(tuple(sorted(labels, key=lambda label: (label.name, label.value))))


SELECTORS = st.builds(LabelSelector, valid_sets(), valid_sets())


def error_of(check, *args):
    try:
        check(*args)
    except ValidationError as err:
        return str(err)
    return None


def test_parse_golden(vectors):
    for case in vectors("label_selectors.json")["parse"]:
        assert error_of(parse_selector, case["selector"]) == case["error"], case
        if case["error"] is None:
            selector = parse_selector(case["selector"])
            assert str(selector) == case["text"]
            assert selector.to_json() == case["json"]
            assert LabelSelector.from_json(case["json"]) == selector


def test_match_golden(vectors):
    for case in vectors("label_selectors.json")["match"]:
        labels = LabelSet.of(*[(name, value) for name, value in case["labels"] or []])
        assert parse_selector(case["selector"]).matches(labels) == case["matches"], case


def test_json_golden(vectors):
    for case in vectors("proto_messages.json"):
        if case["type"] == "protocol.LabelSelector":
            assert LabelSelector.from_json(case["json"]).to_json() == case["json"]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("foo = bar", "foo=bar"),
        ("foo==bar", "foo=bar"),
        ("foo === bar", None),
        ("foo====bar", "foo====bar"),
        ("foo=", "foo"),
        ("foo!=", "!foo"),
        ("foo in (b, a , b,)", "foo in (a,b)"),
        ("foo in(a)", "foo=a"),
        ("foo not in (x)", "foo!=x"),
        ("foo notin (y,x)", "foo notin (x,y)"),
        (" !foo , bar ,", "bar,!foo"),
        ("! foo", "!foo"),
        ("in in (in)", "in=in"),
        ("name:prefix=ex/", "name:prefix=ex/"),
        ("foo:prefix in (b,a),foo=aa", "foo=aa,foo:prefix in (a,b)"),
        ("zz,aa!=1,aa=2", "aa=2,zz,aa!=1"),
        ("né=½", "né=½"),
        ("aa in (,)", "aa"),
        ("aa=x,aa=x", "aa=x"),
        ("a=b", None),
        ("foo  = bar", None),
        ("foo in ()", None),
        ("foo,,bar", None),
        ("foo=b c", None),
        (" ", None),
        (",", None),
        ("foo=bar\n", None),
        ("foo\t=bar", None),
        ("foo:prefx=a", None),
    ],
)
def test_parse(text, canonical):
    if canonical is None:
        assert error_of(parse_selector, text)
    else:
        assert str(parse_selector(text)) == canonical


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("aa,a", 'could not match "a" to a label selector expression'),
        ('aa="b"', 'could not match "aa=\\"b\\"" to a label selector expression'),
        (
            "cc,aa in (x, b c)",
            'parsing "aa in (x, b c)": could not match " b c" to a label selector set expression',
        ),
        ("a" * 65, "Include.Labels[0].Name: invalid length (65; expected 2 <= length <= 64)"),
        ("!bb" + "a" * 65, "Exclude.Labels[0].Name: invalid length (67; expected 2 <= length <= 64)"),
        ("aa,aa=b", "Include: Label has empty & non-empty values (index 1; label aa value b)"),
        (
            "aa!=b,aa:prefix!=b",
            "Exclude: Labels not in unique, sorted order (index 1; label aa value b <= b)",
        ),
    ],
)
def test_parse_errors(text, error):
    assert error_of(parse_selector, text) == error


@given(SELECTORS)
def test_text_round_trip(selector):
    assert parse_selector(str(selector)) == selector


@given(st.text("ab=!,() inot:prefix/", max_size=20))
def test_canonical_text_is_a_fixed_point(text):
    try:
        selector = parse_selector(text)
    except ValidationError:
        return
    assert parse_selector(str(selector)) == selector


@given(SELECTORS)
def test_json_round_trip(selector):
    for defaults in (False, True):
        document = json.loads(json.dumps(selector.to_json(defaults=defaults)))
        assert LabelSelector.from_json(document) == selector


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ("x", "expected a JSON object, not str"),
        ({"includes": {}}, "unknown field 'includes'"),
        ({"include": []}, "include: expected a JSON object, not list"),
        ({"exclude": {"labels": [1]}}, "exclude.labels[0]: expected a JSON object, not int"),
    ],
)
def test_json_is_strict(document, error):
    assert error_of(LabelSelector.from_json, document) == error


def test_empty_json():
    assert LabelSelector.from_json({}) == LabelSelector.from_json(None) == EVERYTHING
    assert EVERYTHING.to_json() == {"include": {}, "exclude": {}}


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("", {}, True),
        ("aa", {"aa": ""}, True),
        ("aa", {"aa": "1"}, True),
        ("aa", {"bb": "1"}, False),
        ("aa=1,bb", {"aa": "1"}, False),
        ("aa in (1,2)", {"aa": "2"}, True),
        ("aa=1,aa=2", {"aa": "2"}, True),
        ("aa:prefix=1", {"aa": "12"}, True),
        ("aa:prefix=1", {"aa": "21"}, False),
        ("aa=1,aa:prefix=2", {"aa": "21"}, True),
        ("!aa", {"aa": "1"}, False),
        ("aa!=1", {}, True),
        ("aa!=1", {"aa": "1"}, False),
        ("aa:prefix!=1", {"aa": "12"}, False),
        ("aa,aa!=1", {"aa": "1"}, False),
    ],
)
def test_matches(text, labels, matches):
    assert parse_selector(text).matches(LabelSet.of(**labels)) == matches


def test_prefix_is_rewritten():
    plain = parse_selector("aa=1")
    assert plain.with_prefix_rewritten() is plain
    selector = parse_selector("prefix=x/,name=foo/bar,zz,prefix!=x/y/").with_prefix_rewritten()
    assert str(selector) == "name=foo/bar,name:prefix=x/,zz,name:prefix!=x/y/"
    assert selector.matches(LabelSet.of(name="x/z", zz=""))
    assert not selector.matches(LabelSet.of(name="x/y/z", zz=""))


def test_validate_list():
    parse_selector("prefix=x/").validate_list()
    parse_selector("name:prefix=x").validate_list()
    assert (
        error_of(parse_selector("prefix=x").validate_list)
        == "Include.Labels[\"prefix\"]: expected trailing '/' (x)"
    )
    assert (
        error_of(parse_selector("aa,!prefix").validate_list)
        == "Exclude.Labels[\"prefix\"]: expected trailing '/' ()"
    )
    broken = LabelSelector(LabelSet((Label("a"),)))
    assert error_of(broken.validate_list).startswith("Include.Labels[0].Name: invalid length")

"""Labels and label sets (spec/journals.md §4)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels import Label, LabelSet, intersect, subtract, union

PAIRS = st.lists(st.tuples(st.sampled_from(["aa", "bb", "cc"]), st.sampled_from(["", "1", "2"])))
SETS = PAIRS.map(lambda pairs: LabelSet.of(*pairs))


def error_of(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except ValidationError as err:
        return str(err)
    return None


def raw(*labels):
    return LabelSet(tuple(Label(*label) for label in labels))


def test_label_validation_golden(vectors):
    for case in vectors("label_validation.json"):
        label = Label(case["name"], case["value"], case["prefix"])
        assert error_of(label.validate) == case["error"], case
        in_set = error_of(LabelSet((label,)).validate, allow_prefix=True)
        assert in_set == (case["error"] and f"Labels[0].{case['error']}")


def test_label_set_json_golden(vectors):
    for case in vectors("proto_messages.json"):
        if case["type"] == "protocol.JournalSpec":
            labels = case["json"].get("labels", {})
            assert LabelSet.from_json(labels).to_json() == labels


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        ([], None),
        ([("aa", ""), ("bb", "1"), ("bb", "2")], None),
        ([("a", "x")], "Labels[0].Name: invalid length (1; expected 2 <= length <= 64)"),
        ([("aa", ""), ("a b", "")], "Labels[1].Name: not a valid token (a b)"),
        ([("aa", "x y")], "Labels[0].Value: not a valid token (x y)"),
        ([("aa", "v" * 1025)], "Labels[0].Value: invalid length (1025; expected 0 <= length <= 1024)"),
        ([("aa", "x/../y//")], None),  # a value need not be a clean path
        (
            [("bb", ""), ("aa", "")],
            "Labels not in unique, sorted order (index 1; label name aa <= bb)",
        ),
        (
            [("aa", "2"), ("aa", "1")],
            "Labels not in unique, sorted order (index 1; label aa value 1 <= 2)",
        ),
        (
            [("aa", "1"), ("aa", "1")],
            "Labels not in unique, sorted order (index 1; label aa value 1 <= 1)",
        ),
        (
            [("aa", ""), ("aa", "1")],
            "Label has empty & non-empty values (index 1; label aa value 1)",
        ),
        ([("aa", "1", True)], "Labels[0]: Prefix may not be set outside of a LabelSelector"),
    ],
)
def test_validate(labels, error):
    assert error_of(raw(*labels).validate) == error


def test_validate_allows_prefix_in_selectors():
    raw(("aa", "1", True)).validate(allow_prefix=True)


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        ([("aa", "1"), ("aa", "2")], None),
        (
            [("content-type", "text/csv"), ("content-type", "text/plain")],
            "expected single-value Label has multiple values (index 1; label content-type value text/plain)",
        ),
        (
            [("app.gazette.dev/region", "a"), ("app.gazette.dev/region", "b")],
            "expected single-value Label has multiple values (index 1; label app.gazette.dev/region value b)",
        ),
        ([("app.gazette.dev/tag", "a"), ("app.gazette.dev/tag", "b")], None),
        ([("content-type", "application/x-ndjson")], None),
        ([("content-type", "text")], None),
        ([("content-type", "")], "parsing content-type: mime: no media type"),
        ([("content-type", "text/")], "parsing content-type: mime: expected token after slash"),
        (
            [("content-type", "text=x")],
            "parsing content-type: mime: expected slash after first token",
        ),
        (
            [("content-type", "text/x/y")],
            "parsing content-type: mime: unexpected content after media subtype",
        ),
        (
            [("app.gazette.dev/message-type", "T")],
            "expected content-type label alongside app.gazette.dev/message-type",
        ),
        (
            [("app.gazette.dev/message-subtype", "T")],
            "expected app.gazette.dev/message-type label alongside app.gazette.dev/message-subtype",
        ),
        (
            [
                ("app.gazette.dev/message-subtype", "T"),
                ("app.gazette.dev/message-type", "T"),
                ("content-type", "text/csv"),
            ],
            None,
        ),
    ],
)
def test_constraints(labels, error):
    assert error_of(raw(*labels).validate_constraints) == error


def test_of_and_lookups():
    labels = LabelSet.of(("cc", "2"), ("cc", "1"), name="x", aa="")
    assert [(label.name, label.value) for label in labels] == [
        ("aa", ""),
        ("cc", "1"),
        ("cc", "2"),
        ("name", "x"),
    ]
    assert labels.values("cc") == ("1", "2")
    assert labels.values("zz") == ()
    assert labels.value("cc") == "1"
    assert labels.value("zz") is None
    assert len(labels) == 4
    assert labels and not LabelSet()
    assert hash(labels) == hash(LabelSet.of(*[(label.name, label.value) for label in labels]))


def test_with_name_label():
    labels = LabelSet.of(aa="1", zz="2").with_name_label("foo/bar")
    assert labels == LabelSet.of(aa="1", name="foo/bar", zz="2")
    assert labels.with_name_label("baz") == LabelSet.of(aa="1", name="baz", zz="2")
    assert LabelSet().with_name_label("baz") == LabelSet.of(name="baz")


def test_set_operations():
    left = LabelSet.of(("aa", "1"), ("aa", "2"), ("bb", "1"))
    right = LabelSet.of(("aa", "1"), ("bb", "1"), ("cc", ""))
    assert union(left, right) == LabelSet.of(("aa", "1"), ("aa", "2"), ("bb", "1"), ("cc", ""))
    assert union(right, left) == right
    assert intersect(left, right) == LabelSet.of(bb="1")
    assert subtract(left, right) == LabelSet.of(("aa", "1"), ("aa", "2"))


def test_union_does_not_mend_the_order():
    unsorted = raw(("zz", ""), ("aa", ""))
    assert error_of(union(unsorted, LabelSet.of(bb="")).validate) is not None


@given(SETS, SETS)
def test_set_operations_by_name(left, right):
    def by_name(labels):
        return {label.name: labels.values(label.name) for label in labels}

    a, b = by_name(left), by_name(right)
    assert by_name(union(left, right)) == {**b, **a}
    assert by_name(intersect(left, right)) == {name: a[name] for name in a if b.get(name) == a[name]}
    assert by_name(subtract(left, right)) == {name: a[name] for name in a if b.get(name) != a[name]}
    for result in (union(left, right), intersect(left, right), subtract(left, right)):
        keys = [(label.name, label.value) for label in result]
        assert keys == sorted(keys)


@given(SETS)
def test_json_round_trip(labels):
    for defaults in (False, True):
        document = json.loads(json.dumps(labels.to_json(defaults=defaults)))
        assert LabelSet.from_json(document) == labels


def test_json_shapes():
    assert LabelSet().to_json() == {}
    assert LabelSet().to_json(defaults=True) == {"labels": []}
    assert LabelSet.from_json({"labels": None}) == LabelSet.from_json(None) == LabelSet()
    one = raw(("aa", "b", True))
    assert one.to_json() == {"labels": [{"name": "aa", "value": "b", "prefix": True}]}
    assert LabelSet.of(aa="").to_json(defaults=True) == {
        "labels": [{"name": "aa", "value": "", "prefix": False}]
    }


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ([], "expected a JSON object, not list"),
        ({"label": []}, "unknown field 'label'"),
        ({"labels": {}}, "labels: expected a list, not dict"),
        ({"labels": ["x"]}, "labels[0]: expected a JSON object, not str"),
        ({"labels": [{"name": 1}]}, "labels[0].name: expected a string, not int"),
        ({"labels": [{}, {"value": None}]}, "labels[1].value: expected a string, not NoneType"),
        ({"labels": [{"prefix": 1}]}, "labels[0].prefix: expected a boolean, not int"),
        ({"labels": [{"nome": "x"}]}, "labels[0]: unknown field 'nome'"),
    ],
)
def test_json_is_strict(document, error):
    assert error_of(LabelSet.from_json, document) == error

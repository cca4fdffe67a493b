"""YAML trees of specs: reading, pushing down, hoisting, writing (spec/journals.md §2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalChange,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from broadsheet.engine.journal.spec_tree import (
    SpecNode,
    flatten,
    format_tree,
    hoist,
    hoist_tree,
    parse_tree,
    push_down,
)
from broadsheet.engine.labels import LabelSet

SECOND = 10**9


def error_of(check, *args):
    try:
        check(*args)
    except ValidationError as err:
        return str(err)
    return None


def test_trees_golden(vectors):
    for case in vectors("journal_specs.json"):
        if "yaml_error" in case:
            assert error_of(parse_tree, case["yaml"]) == case["yaml_error"]
            continue
        tree = parse_tree(case["yaml"])
        if "tree_error" in case:
            assert error_of(flatten, tree) == case["tree_error"]
            continue
        pushed = push_down(tree)
        changes = flatten(tree)
        for node, change, journal in zip(pushed.terminals(), changes, case["journals"], strict=True):
            assert node.spec.to_json() == journal["spec"]
            assert error_of(node.spec.validate) == journal["spec_error"]
            if journal["delete"]:
                assert change == JournalChange(journal["revision"], None, journal["spec"]["name"])
            else:
                assert change == JournalChange(journal["revision"], node.spec)
        assert format_tree(hoist_tree(pushed)) == case["hoisted_yaml"]
        assert flatten(parse_tree(case["hoisted_yaml"])) == changes


TREE = """\
comment: all of them
name: ex/
replication: 3
labels: [{name: aa, value: x}, {name: bb, value: 1}]
fragment: {length: 1024, compression_codec: GZIP, stores: ["s3://b/"], refresh_interval: 1h30m, retention: 60}
flags: O_RDWR
max_append_rate: 1_000
suspend: {level: FULL, offset: 5}
delete: false
children:
- name: ex/one
  replication: 1
  labels: [{name: bb, value: "2"}, {name: bb, value: "3"}]
  fragment: {stores: [], compression_codec: NONE, retention: 0}
  flags: O_RDONLY
  revision: 7
- name: ex/sub/
  delete: true
  fragment: {flush_interval: 1m}
  children:
  - {name: ex/sub/a, revision: -1}
  - {name: ex/sub/b, delete: false, fragment: {stores: null}, suspend: {level: 1}}
"""


def test_push_down():
    aa, bb = ("aa", "x"), ("bb", "1")
    one, a, b = flatten(parse_tree(TREE))
    assert one == JournalChange(
        7,
        JournalSpec(
            "ex/one",
            1,
            LabelSet.of(aa, ("bb", "2"), ("bb", "3")),
            FragmentSpec(1024, CompressionCodec.NONE, (), 5400 * SECOND, 60),
            1,
            1000,
        ),
    )
    assert a == JournalChange(-1, None, "ex/sub/a")
    assert b == JournalChange(
        0,
        JournalSpec(
            "ex/sub/b",
            3,
            LabelSet.of(aa, bb),
            FragmentSpec(1024, CompressionCodec.GZIP, ("s3://b/",), 5400 * SECOND, 60, 60 * SECOND),
            4,
            1000,
            Suspend(SuspendLevel.PARTIAL),
        ),
    )


def test_no_stores_are_inherited_from_a_directory_that_has_none():
    tree = parse_tree(
        "name: ex/\nfragment: {stores: ['s3://b/']}\nchildren:\n"
        "- name: ex/a/\n  fragment: {stores: []}\n  children: [{name: ex/a/one}]\n"
        "- name: ex/b/\n  children: [{name: ex/b/one}]\n"
    )
    stores = [change.upsert.fragment.stores for change in flatten(tree)]
    assert stores == [(), ("s3://b/",)]


def test_labels_are_not_sorted_for_you():
    (change,) = flatten(parse_tree("name: ex/one\nlabels: [{name: zz}, {name: aa}]\n"))
    assert "not in unique, sorted order" in error_of(change.upsert.labels.validate)


def test_empty_documents_are_empty_nodes():
    for text in ("", "# only a comment\n", "{}", "null"):
        assert parse_tree(text) == SpecNode()
        assert error_of(flatten, parse_tree(text)) == "expected one or more Children"
    assert format_tree(SpecNode()) == "{}\n"
    assert hoist([]) == SpecNode()


CODECS = "INVALID, NONE, GZIP, ZSTANDARD, SNAPPY, GZIP_OFFLOAD_DECOMPRESSION"


def unmarshal(*lines):
    return "yaml: unmarshal errors:\n  " + "\n  ".join(lines)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: a\nnome: b\n", unmarshal("line 2: field nome not found in type journalspace.Node")),
        ("name: a\nname: b\n", unmarshal("line 2: field name already set in type journalspace.Node")),
        ("<<: {name: a}\n", unmarshal("line 1: field << not found in type journalspace.Node")),
        (
            "name: a\nfragment:\n  sizes: 1\n  length: 1\n  length: 2\n",
            unmarshal(
                "line 3: field sizes not found in type protocol.JournalSpec_Fragment",
                "line 5: field length already set in type protocol.JournalSpec_Fragment",
            ),
        ),
        (
            "children:\n- name: a\n  labels:\n  - {nam: x}\n",
            unmarshal("line 4: field nam not found in type protocol.Label"),
        ),
        ("suspend: {x: 1}", unmarshal("line 1: field x not found in type protocol.JournalSpec_Suspend")),
        ("replication: three", unmarshal("line 1: cannot unmarshal !!str `three` into int32")),
        ("replication: 1.5", unmarshal("line 1: cannot unmarshal !!float `1.5` into int32")),
        ("replication: 2147483648", unmarshal("line 1: cannot unmarshal !!int `2147483648` into int32")),
        ("replication: [1]", unmarshal("line 1: cannot unmarshal !!seq into int32")),
        ("delete: 1", unmarshal("line 1: cannot unmarshal !!int `1` into bool")),
        ("name: {}", unmarshal("line 1: cannot unmarshal !!map into string")),
        ("labels: x", unmarshal("line 1: cannot unmarshal !!str `x` into []protocol.Label")),
        ("fragment: x", unmarshal("line 1: cannot unmarshal !!str `x` into protocol.JournalSpec_Fragment")),
        ("children: {}", unmarshal("line 1: cannot unmarshal !!map into []journalspace.Node")),
        ("- name: a", unmarshal("line 1: cannot unmarshal !!seq into journalspace.Node")),
        (
            "fragment: {retention: 5x}",
            unmarshal("line 1: cannot unmarshal !!str `5x` into time.Duration"),
        ),
        (
            "fragment: {compression_codec: ZIP}",
            f'"ZIP" is not a valid CompressionCodec (options are [{CODECS}])',
        ),
        (
            "fragment: {compression_codec: 4}",
            f'"4" is not a valid CompressionCodec (options are [{CODECS}])',
        ),
        (
            "flags: O_NONE",
            '"O_NONE" is not a valid JournalSpec_Flag '
            "(options are [NOT_SPECIFIED, O_RDONLY, O_WRONLY, O_RDWR])",
        ),
        (
            "suspend: {level: SOME}",
            '"SOME" is not a valid JournalSpec_Suspend_Level (options are [NONE, PARTIAL, FULL])',
        ),
        ("name: a\n---\nname: b\n", "yaml: line 2: but found another document"),
        ("name: [a\n", "yaml: line 2: did not find expected ',' or ']'"),
        ("name: *x\n", "yaml: line 1: found undefined alias 'x'"),
    ],
)
def test_yaml_errors(text, error):
    assert error_of(parse_tree, text) == error


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "children: &a [{children: *a}]",
        "name: \0",
        "\ud800",
    ],
)
def test_hostile_yaml_is_refused(text):
    assert error_of(parse_tree, text)


def test_alias_bombs_are_refused():
    lines = ["children:", "- {children: &x0 [{name: a}]}"]
    for level in range(1, 12):
        aliases = ", ".join(f"{{children: *x{level - 1}}}" for _ in range(9))
        lines.append(f"- {{children: &x{level} [{aliases}]}}")
    assert error_of(parse_tree, "\n".join(lines)) == "yaml: document contains excessive aliasing"


def test_anchors_are_allowed():
    tree = parse_tree(
        "name: ex/\nchildren:\n- name: ex/a\n  fragment: &f {length: 5000}\n- {name: ex/b, fragment: *f}\n"
    )
    assert [change.upsert.fragment.length for change in flatten(tree)] == [5000, 5000]


def test_enums_by_name_or_number():
    node = parse_tree("flags: 2\nsuspend: {level: 2}\nfragment: {compression_codec: SNAPPY}")
    assert node.spec.flags == 2
    assert node.spec.suspend == Suspend(SuspendLevel.FULL)
    assert parse_tree("flags: 9").spec.flags == 9
    assert parse_tree("flags: O_WRONLY").spec.flags == 2
    assert parse_tree("suspend: {}").spec.suspend == Suspend()
    assert parse_tree("suspend:").spec.suspend is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: ex/", "expected one or more Children"),
        ("name: ex/\nrevision: 3\nchildren: [{name: ex/a}]", "unexpected Revision (3)"),
        (
            "name: ex/\nchildren: [{name: ez/a}]",
            "expected parent Name to prefix child (ex/ vs ez/a)",
        ),
        (
            "name: ex/\nchildren: [{name: ex/a}, {name: ex/a}]",
            "expected Children to be ordered (ind 1; ex/a vs ex/a)",
        ),
        ("name: abc", "Name: invalid length (3; expected 4 <= length <= 512)"),
        (
            "name: abcd\nchildren: [{name: abcd/e}]",
            "expected no Children with non-directory Node (abcd)",
        ),
        (
            "children: [{name: ex/, children: [{name: ex/a}, {name: ex/!}]}]",
            "Children[0].Children[1].Name: not a valid token (ex/!)",
        ),
    ],
)
def test_shape_errors(text, error):
    assert error_of(flatten, parse_tree(text)) == error


def test_hoist_example():
    """The example of spec/journals.md §2."""
    base = LabelSet.of(("content-type", "text/plain"))
    one = JournalSpec("ex/aaaa", 1, base, FragmentSpec(65536, CompressionCodec.SNAPPY, ("file:///",), SECOND))
    other = JournalSpec("ex/ro", 1, base, FragmentSpec(65536, refresh_interval_ns=SECOND), 1)
    tree = hoist([(other, 3), (one, 3)])
    assert format_tree(tree) == (
        "name: ex/\nreplication: 1\nlabels:\n- name: content-type\n  value: text/plain\n"
        "fragment:\n  length: 65536\n  refresh_interval: 1s\n"
        "children:\n"
        "- name: ex/aaaa\n  fragment:\n    compression_codec: SNAPPY\n    stores:\n    - file:///\n"
        "  revision: 3\n"
        "- name: ex/ro\n  flags: O_RDONLY\n  revision: 3\n"
    )
    assert flatten(tree) == [JournalChange(3, one), JournalChange(3, other)]


def test_grouping():
    names = ["a/b/one", "a/b/two", "a/c", "exam", "exam-x", "exam/a", "exam/b/c/d", "exam/b/c/e", "solo/x/y"]
    tree = hoist([(JournalSpec(name), 1) for name in reversed(names)])

    def shape(node):
        return (node.name, [shape(child) for child in node.children]) if node.children else node.name

    assert shape(tree) == (
        "",
        [
            ("a/", [("a/b/", ["a/b/one", "a/b/two"]), "a/c"]),
            "exam",
            "exam-x",
            ("exam/", ["exam/a", ("exam/b/c/", ["exam/b/c/d", "exam/b/c/e"])]),
            "solo/x/y",
        ],
    )
    assert hoist([(JournalSpec("solo/x/y"), 5)]) == SpecNode(JournalSpec("solo/x/y"), revision=5)


SEGMENTS = st.sampled_from(["aaaa", "aaaa-x", "bé", "b/c", "b/d", "c/c/c"])
NAMES = st.lists(SEGMENTS, min_size=2, max_size=3).map("/".join)
TEXTS = st.sampled_from(
    ["", "x", "1", "true", "y", "a=b", "2006-01-02", "1e3", "-", "é", "=", "a/b.c", "0x1f"]
)
ANY_TEXT = st.one_of(TEXTS, st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
FRAGMENTS = st.builds(
    FragmentSpec,
    length=st.sampled_from([0, 1024, 4096]),
    compression_codec=st.sampled_from(CompressionCodec),
    stores=st.lists(st.sampled_from(["file:///", "s3://b/?x='y' #\" z", "gs://b/: "]), max_size=2).map(tuple),
    refresh_interval_ns=st.sampled_from([0, SECOND, 60 * SECOND]),
    retention_ns=st.sampled_from([0, 1, 3600 * SECOND]),
    flush_interval_ns=st.sampled_from([0, -5, 60 * SECOND]),
    path_postfix_template=st.one_of(ANY_TEXT, st.just('{{ .X "a: b #c" }}')),
)
SPECS = st.builds(
    JournalSpec,
    name=NAMES,
    replication=st.integers(0, 2),
    labels=st.lists(st.tuples(st.sampled_from(["aa", "bb", "y", "1"]), ANY_TEXT), max_size=3).map(
        lambda pairs: LabelSet.of(*pairs)
    ),
    fragment=FRAGMENTS,
    flags=st.sampled_from([0, 1, 2, 4, 7]),
    max_append_rate=st.sampled_from([0, 5]),
    suspend=st.none() | st.builds(Suspend, st.sampled_from(SuspendLevel), st.sampled_from([0, 7])),
)
JOURNALS = st.lists(
    st.tuples(SPECS, st.integers(1, 5)), max_size=6, unique_by=lambda journal: journal[0].name, min_size=1
)


@settings(deadline=None)
@given(JOURNALS)
def test_hoist_and_flatten_are_inverse(journals):
    tree = hoist(journals)
    expected = [JournalChange(revision, spec) for spec, revision in journals]
    expected.sort(key=lambda change: change.upsert.name)
    assert flatten(tree) == expected
    text = format_tree(tree)
    assert parse_tree(text) == tree
    assert flatten(parse_tree(text)) == expected


@settings(deadline=None)
@given(st.text(max_size=30) | st.text("nam:e \n-{}[]&*!|>'\"#,?x1", max_size=40))
def test_reading_fails_only_as_documented(text):
    try:
        tree = parse_tree(text)
    except ValidationError:
        return
    assert parse_tree(format_tree(tree)) == tree


def test_comments_and_delete_are_written():
    text = 'comment: "two\\nlines"\ndelete: false\nname: ex/a\nfragment:\n  stores: []\nrevision: 2\n'
    assert format_tree(parse_tree(text)) == text

"""JournalSpec: its validator, its JSON, and fragment store URLs (spec/journals.md §1 and §3)."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalChange,
    JournalFlags,
    JournalSpec,
    Suspend,
    SuspendLevel,
    parse_store_url,
    validate_store,
)
from broadsheet.engine.labels import Label, LabelSet

SECOND = 10**9
FRAGMENT = FragmentSpec(
    length=65536,
    compression_codec=CompressionCodec.SNAPPY,
    stores=("file:///",),
    refresh_interval_ns=60 * SECOND,
)
SPEC = JournalSpec("ex/demo", 1, LabelSet.of(("content-type", "text/plain")), FRAGMENT)

INT64 = st.integers(-(2**63), 2**63 - 1)
SPECS = st.builds(
    JournalSpec,
    name=st.text(max_size=8),
    replication=st.integers(-(2**31), 2**31 - 1),
    labels=st.lists(
        st.builds(Label, st.text(max_size=3), st.text(max_size=3), st.booleans()), max_size=3
    ).map(lambda labels: LabelSet(tuple(labels))),
    fragment=st.builds(
        FragmentSpec,
        length=INT64,
        compression_codec=st.one_of(
            st.sampled_from(CompressionCodec), st.integers(6, 99).map(CompressionCodec)
        ),
        stores=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        refresh_interval_ns=INT64,
        retention_ns=INT64,
        flush_interval_ns=INT64,
        path_postfix_template=st.text(max_size=5),
    ),
    flags=st.integers(0, 2**32 - 1),
    max_append_rate=INT64,
    suspend=st.none() | st.builds(Suspend, st.integers(-3, 9).map(SuspendLevel), INT64),
)


def error_of(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except ValidationError as err:
        return str(err)
    return None


def fragment(**fields):
    return replace(SPEC, fragment=replace(FRAGMENT, **fields))


# The validator.


def test_a_valid_spec():
    SPEC.validate()


LENGTHS = "expected 1024 <= length <= 17179869184"


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (replace(SPEC, name="abc"), "Name: invalid length (3; expected 4 <= length <= 512)"),
        (replace(SPEC, name="a bc"), "Name: not a valid token (a bc)"),
        (replace(SPEC, name="ab/c/"), "Name: must be a clean path (ab/c/)"),
        (replace(SPEC, name="/abc"), "Name: cannot begin with '/' (/abc)"),
        (
            replace(SPEC, name="abcd;meta"),
            "Name cannot have a metadata path segment (;meta; expected no segment)",
        ),
        (
            replace(SPEC, name="abcd;"),
            "Name.metadata path segment: invalid length (0; expected 1 <= length <= 512)",
        ),
        (replace(SPEC, replication=0), "invalid Replication (0; expected 1 <= Replication <= 5)"),
        (replace(SPEC, replication=6), "invalid Replication (6; expected 1 <= Replication <= 5)"),
        (
            replace(SPEC, labels=LabelSet.of(a="b")),
            "Labels.Labels[0].Name: invalid length (1; expected 2 <= length <= 64)",
        ),
        (replace(SPEC, labels=LabelSet.of(name="x")), 'Labels cannot include label "name"'),
        (replace(SPEC, labels=LabelSet.of(prefix="x/")), 'Labels cannot include label "prefix"'),
        (
            replace(SPEC, labels=LabelSet.of(("content-type", ""))),
            "Labels: parsing content-type: mime: no media type",
        ),
        (fragment(length=1023), f"Fragment: invalid Length (1023; {LENGTHS})"),
        (fragment(length=17179869185), f"Fragment: invalid Length (17179869185; {LENGTHS})"),
        (
            fragment(compression_codec=CompressionCodec.INVALID),
            "Fragment.CompressionCodec: invalid value (INVALID)",
        ),
        (fragment(compression_codec=CompressionCodec(9)), "Fragment.CompressionCodec: invalid value (9)"),
        (fragment(compression_codec=CompressionCodec.LZ4), "Fragment.CompressionCodec: invalid value (LZ4)"),
        (fragment(stores=("s3://b/", "x")), "Fragment.Stores[1]: not absolute (x)"),
        (
            fragment(compression_codec=CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION),
            "Fragment: GZIP_OFFLOAD_DECOMPRESSION is incompatible with file:// stores (file:///)",
        ),
        (
            fragment(refresh_interval_ns=SECOND - 1_000_000),
            "Fragment: invalid RefreshInterval (999ms; expected 1s <= interval <= 24h0m0s)",
        ),
        (
            fragment(refresh_interval_ns=86_400 * SECOND + 1_000_000),
            "Fragment: invalid RefreshInterval (24h0m0.001s; expected 1s <= interval <= 24h0m0s)",
        ),
        (
            fragment(flush_interval_ns=60 * SECOND - 1_000_000),
            "Fragment: invalid FlushInterval (59.999s; expected >= 1m0s)",
        ),
        (
            fragment(flush_interval_ns=-1),
            "Fragment: invalid FlushInterval (-1ns; expected >= 1m0s)",
        ),
        (
            fragment(path_postfix_template="{{ .Nope }}"),
            'Fragment.PathPostfixTemplate: template: postfix:1: unsupported expression ".Nope"',
        ),
        (replace(SPEC, flags=3), "Flags: invalid combination (3)"),
        (replace(SPEC, flags=8), "Flags: invalid combination (8)"),
        (replace(SPEC, max_append_rate=-1), "invalid MaxAppendRate (-1; expected >= 0)"),
        (
            replace(SPEC, suspend=Suspend(SuspendLevel(3), 0)),
            "Suspend.Level: invalid Level variant (3)",
        ),
        (
            replace(SPEC, suspend=Suspend(SuspendLevel.FULL, -5)),
            "Suspend.Offset: invalid Offset (-5; expected >= 0)",
        ),
    ],
)
def test_validate(spec, error):
    assert error_of(spec.validate) == error


def test_first_failure_wins():
    """Breaks everything, and mends it in the order of the checks."""
    spec = JournalSpec(
        "abc",
        0,
        LabelSet((Label("zz"), Label("name", "x"))),
        FragmentSpec(0, CompressionCodec.INVALID, ("x",), 0, 0, 1, "{{"),
        3,
        -1,
        Suspend(SuspendLevel(7), -1),
    )
    mends = [
        ("Name:", lambda it: replace(it, name="abcd;x")),
        ("Name cannot", lambda it: replace(it, name="abcd")),
        ("invalid Replication", lambda it: replace(it, replication=1)),
        ("Labels: Labels not in", lambda it: replace(it, labels=LabelSet.of(("content-type", ""), name="x"))),
        ("Labels cannot", lambda it: replace(it, labels=LabelSet.of(("content-type", "")))),
        ("Labels: parsing", lambda it: replace(it, labels=LabelSet())),
        ("Fragment: invalid Length", lambda it: replace(it, fragment=replace(it.fragment, length=1024))),
        (
            "Fragment.CompressionCodec",
            lambda it: replace(it, fragment=replace(it.fragment, compression_codec=CompressionCodec.GZIP)),
        ),
        ("Fragment.Stores[0]", lambda it: replace(it, fragment=replace(it.fragment, stores=()))),
        (
            "Fragment: invalid Refresh",
            lambda it: replace(it, fragment=replace(it.fragment, refresh_interval_ns=SECOND)),
        ),
        (
            "Fragment: invalid Flush",
            lambda it: replace(it, fragment=replace(it.fragment, flush_interval_ns=0)),
        ),
        (
            "Fragment.PathPostfixTemplate",
            lambda it: replace(it, fragment=replace(it.fragment, path_postfix_template="")),
        ),
        ("Flags:", lambda it: replace(it, flags=4)),
        ("invalid MaxAppendRate", lambda it: replace(it, max_append_rate=0)),
        ("Suspend.Level", lambda it: replace(it, suspend=Suspend(SuspendLevel.NONE, -1))),
        ("Suspend.Offset", lambda it: replace(it, suspend=Suspend())),
    ]
    for start, mend in mends:
        assert str(error_of(spec.validate)).startswith(start)
        spec = mend(spec)
    spec.validate()


def test_what_is_allowed():
    offload = {"compression_codec": CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION}
    fragment(**offload, stores=()).validate()
    fragment(**offload, stores=("s3://b/", "file:///")).validate()  # only the first store counts
    fragment(compression_codec=CompressionCodec.LZ4).validate(allow_lz4=True)
    fragment(retention_ns=-1).validate()
    fragment(flush_interval_ns=60 * SECOND, refresh_interval_ns=86_400 * SECOND).validate()
    replace(SPEC, suspend=Suspend(SuspendLevel.PARTIAL, 7), flags=JournalFlags.O_RDONLY).validate()


@pytest.mark.parametrize(
    ("flags", "may_read", "may_write"),
    [(0, True, True), (1, True, False), (2, False, True), (4, True, True), (3, False, False)],
)
def test_flags(flags, may_read, may_write):
    spec = replace(SPEC, flags=flags)
    assert (spec.may_read, spec.may_write) == (may_read, may_write)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("", None),
        ("plain/text", None),
        ("}} is text", None),
        ('date={{.Spool.FirstAppendTime.Format "2006-01-02"}}', None),
        ('a={{ .Spool.FirstAppendTime.Format "2006" }}/b={{ .Spool.FirstAppendTime.Format `15` }}', None),
        ('{{.JournalSpec.LabelSet.ValueOf "a}}b"}}/static', None),
        ('{{ .Spool.Registers.ValueOf "aa" }}/{{.JournalSpec.Name}}', None),
        ("{{.JournalSpec.Name", "template: postfix:1: unclosed action"),
        ("a\n{{", "template: postfix:2: unclosed action"),
        ("{{}}", 'template: postfix:1: unsupported expression ""'),
        (
            "x\n{{.JournalSpec.Name}}\n{{ .Spool.Foo }}",
            'template: postfix:3: unsupported expression ".Spool.Foo"',
        ),
        (
            "{{.Spool.Registers.ValueOf}}",
            'template: postfix:1: unsupported expression ".Spool.Registers.ValueOf"',
        ),
    ],
)
def test_path_postfix_template(template, error):
    found = error_of(fragment(path_postfix_template=template).validate)
    assert found == (error and f"Fragment.PathPostfixTemplate: {error}")


# Store URLs.


def test_stores_golden(vectors):
    for case in vectors("fragment_stores.json"):
        assert error_of(validate_store, case["store"]) == case["error"], case


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("file:///", None),
        ("FILE:///a/", None),
        ("file:/a/", None),
        ("file:///a%20b%2F", None),
        ("s3://bucket/prefix/?profile=x&endpoint=http://h", None),
        ("gs://user@bucket/", None),
        ("azure-ad://tenant/account/container/", None),
        ("azure-ad://tenant/account/container/a/b/", None),
        ("", "not absolute ()"),
        ("a/b/", "not absolute (a/b/)"),
        ("//host/", "not absolute (//host/)"),
        ("ftp://a/", "invalid scheme (ftp)"),
        ("s3:///x/", "missing bucket (s3:///x/)"),
        ("gs:x/", "missing bucket (gs:x/)"),
        ("azure://", "missing bucket (azure://)"),
        ("azure-ad:///a/c/", "missing tenant ID (azure-ad:///a/c/)"),
        ("azure-ad://t", "missing storage account (azure-ad://t)"),
        ("azure-ad://t/", "missing storage account (azure-ad://t/)"),
        ("azure-ad://t//c/", "missing storage account (azure-ad://t//c/)"),
        ("azure-ad://t/acct", "missing storage container (azure-ad://t/acct)"),
        ("azure-ad://t/acct/", "missing storage container (azure-ad://t/acct/)"),
        ("azure-ad://t/a/c", "path component doesn't end in '/' (/a/c)"),
        ("file://host/a/", "file scheme cannot have host (file://host/a/)"),
        ("file://", "path component doesn't end in '/' ()"),
        ("s3://bucket/a?x=/", "path component doesn't end in '/' (/a)"),
        ("s3://bucket/a#/", "path component doesn't end in '/' (/a)"),
        ("s3://b/a%2", 'parse "s3://b/a%2": invalid URL escape "%2"'),
        ("s3://b/%zz/", 'parse "s3://b/%zz/": invalid URL escape "%zz"'),
        ("s3://b:x/", 'parse "s3://b:x/": invalid port ":x" after host'),
        ("s3://b c/", 'parse "s3://b c/": invalid character " " in host name'),
        ("s3://[::1/", "parse \"s3://[::1/\": missing ']' in host"),
        (":x", 'parse ":x": missing protocol scheme'),
        ("1a:b/c", 'parse "1a:b/c": first path segment in URL cannot contain colon'),
        ("s3://b/\n/", 'parse "s3://b/\\n/": net/url: invalid control character in URL'),
    ],
)
def test_stores(url, error):
    assert error_of(validate_store, url) == error


def test_parts_of_a_store():
    assert parse_store_url("S3://bucket:80/a%20b/?x=%zz#f") == ("s3", "bucket:80", "/a b/", "x=%zz")


@given(st.text("s3file:/?#%[]@ \n\0é.", max_size=20))
def test_store_urls_fail_only_as_documented(url):
    error_of(validate_store, url)


# JSON.


def test_specs_golden(vectors):
    for case in vectors("journal_specs.json"):
        for journal in case.get("journals", ()):
            spec = JournalSpec.from_json(journal["spec"])
            assert spec.to_json() == journal["spec"]
            assert error_of(spec.validate) == journal["spec_error"]


def test_json_golden(vectors):
    for case in vectors("proto_messages.json"):
        if case["type"] == "protocol.JournalSpec":
            assert JournalSpec.from_json(case["json"]).to_json() == case["json"]


def test_json_shapes():
    spec = replace(SPEC, max_append_rate=5, flags=1, suspend=Suspend(SuspendLevel.FULL, 12))
    assert spec.to_json() == {
        "name": "ex/demo",
        "replication": 1,
        "labels": {"labels": [{"name": "content-type", "value": "text/plain"}]},
        "fragment": {
            "length": "65536",
            "compression_codec": "SNAPPY",
            "stores": ["file:///"],
            "refresh_interval": "60s",
        },
        "flags": 1,
        "max_append_rate": "5",
        "suspend": {"level": "FULL", "offset": "12"},
    }
    assert JournalSpec().to_json() == {"labels": {}, "fragment": {}}
    assert JournalSpec(suspend=Suspend()).to_json()["suspend"] == {}
    assert JournalSpec().to_json_camel() == {
        "name": "",
        "replication": 0,
        "labels": {"labels": []},
        "fragment": {
            "length": "0",
            "compressionCodec": "INVALID",
            "stores": [],
            "refreshInterval": "0s",
            "retention": "0s",
            "flushInterval": "0s",
            "pathPostfixTemplate": "",
        },
        "flags": 0,
        "maxAppendRate": "0",
        "suspend": None,
    }
    camel = spec.to_json_camel()
    assert camel["labels"] == {"labels": [{"name": "content-type", "value": "text/plain", "prefix": False}]}
    assert camel["suspend"] == {"level": "FULL", "offset": "12"}


def test_json_accepts():
    document = {
        "labels": None,
        "fragment": {"length": 1024, "compression_codec": 3, "refresh_interval": "1.5s"},
        "max_append_rate": 9,
        "suspend": {"level": 2, "offset": "-3"},
    }
    assert JournalSpec.from_json(document) == JournalSpec(
        fragment=FragmentSpec(1024, CompressionCodec.ZSTANDARD, refresh_interval_ns=1_500_000_000),
        max_append_rate=9,
        suspend=Suspend(SuspendLevel.FULL, -3),
    )
    full = SPEC.to_json(defaults=True)
    assert full["suspend"] is None
    assert JournalSpec.from_json(full) == SPEC


@given(SPECS)
def test_json_round_trip(spec):
    for defaults in (False, True):
        assert JournalSpec.from_json(json.loads(json.dumps(spec.to_json(defaults=defaults)))) == spec
    json.dumps(spec.to_json_camel())


CODECS = "INVALID, NONE, GZIP, ZSTANDARD, SNAPPY, GZIP_OFFLOAD_DECOMPRESSION"


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (None, "expected a JSON object, not NoneType"),
        ({"nome": ""}, "unknown field 'nome'"),
        ({"name": 1}, "name: expected a string, not int"),
        ({"replication": 1.0}, "replication: expected an integer, not float"),
        ({"replication": True}, "replication: expected an integer, not bool"),
        ({"replication": 2**31}, "replication: integer out of range (2147483648)"),
        ({"flags": -1}, "flags: integer out of range (-1)"),
        ({"flags": 2**32}, "flags: integer out of range (4294967296)"),
        ({"max_append_rate": str(2**63)}, "max_append_rate: integer out of range (9223372036854775808)"),
        ({"max_append_rate": "1_0"}, "max_append_rate: expected a decimal integer (have '1_0')"),
        ({"max_append_rate": ""}, "max_append_rate: expected a decimal integer (have '')"),
        ({"labels": []}, "labels: expected a JSON object, not list"),
        ({"labels": {"labels": [{"x": 1}]}}, "labels.labels[0]: unknown field 'x'"),
        ({"fragment": []}, "fragment: expected a JSON object, not list"),
        ({"fragment": {"refreshInterval": "1s"}}, "fragment: unknown field 'refreshInterval'"),
        ({"fragment": {"length": []}}, "fragment.length: expected an integer, not list"),
        ({"fragment": {"length": True}}, "fragment.length: expected an integer, not bool"),
        ({"fragment": {"stores": "file:///"}}, "fragment.stores: expected a list, not str"),
        ({"fragment": {"stores": ["x", 1]}}, "fragment.stores[1]: expected a string, not int"),
        ({"fragment": {"stores": [[]]}}, "fragment.stores[0]: expected a string, not list"),
        ({"fragment": {"retention": 5}}, "fragment.retention: expected a duration, not int"),
        (
            {"fragment": {"retention": "1m"}},
            'fragment.retention: expected a duration in seconds such as "60s" or "0.5s" (have \'1m\')',
        ),
        (
            {"fragment": {"compression_codec": "BOGUS"}},
            f'fragment.compression_codec: "BOGUS" is not a valid CompressionCodec (options are [{CODECS}])',
        ),
        (
            {"fragment": {"compression_codec": None}},
            "fragment.compression_codec: expected the name of an enum value, not NoneType",
        ),
        (
            {"fragment": {"path_postfix_template": 1}},
            "fragment.path_postfix_template: expected a string, not int",
        ),
        ({"suspend": []}, "suspend: expected a JSON object, not list"),
        ({"suspend": {"levels": 1}}, "suspend: unknown field 'levels'"),
        ({"suspend": {"offset": None}}, "suspend.offset: expected an integer, not NoneType"),
        (
            {"suspend": {"level": "X"}},
            'suspend.level: "X" is not a valid JournalSpec_Suspend_Level (options are [NONE, PARTIAL, FULL])',
        ),
    ],
)
def test_json_is_strict(document, error):
    assert error_of(JournalSpec.from_json, document) == error


def test_unknown_enum_numbers_are_kept():
    document = {"labels": {}, "fragment": {"compression_codec": 42}, "suspend": {"level": 9}}
    spec = JournalSpec.from_json(document)
    assert spec.to_json() == document
    assert spec.fragment.compression_codec == 42
    assert not spec.fragment.compression_codec.is_known
    assert CompressionCodec(1) is CompressionCodec.NONE


def test_decoding_is_fast():
    documents = json.loads(
        json.dumps(
            [
                {
                    **SPEC.to_json(),
                    "name": f"ex/topic-{number // 100}/part-{number:06d}",
                    "labels": LabelSet.of(
                        ("app.gazette.dev/message-type", f"T{number // 100}"),
                        ("content-type", "application/x-ndjson"),
                        ("env", "prod"),
                        ("part", f"{number % 100}"),
                        ("unique", f"{number}"),
                    ).to_json(),
                }
                for number in range(10_000)
            ]
        )
    )
    start = time.perf_counter()
    specs = [JournalSpec.from_json(document) for document in documents]
    took_us = (time.perf_counter() - start) * 1e6 / len(documents)
    print(f"{took_us:.1f} us to decode a spec")
    assert len({spec.name for spec in specs}) == 10_000
    assert took_us < 75  # the aim is 25


# Changes.


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (JournalChange(0, SPEC), None),
        (JournalChange(-1, SPEC), None),
        (JournalChange(5, None, "ex/demo"), None),
        (JournalChange(-1, None, "ex/demo"), None),
        (JournalChange(0, SPEC, "ex/demo"), "both Upsert and Delete are set (expected exactly one)"),
        (JournalChange(0), "neither Upsert nor Delete are set (expected exactly one)"),
        (
            JournalChange(0, replace(SPEC, name="x")),
            "Upsert.Name: invalid length (1; expected 4 <= length <= 512)",
        ),
        (JournalChange(-2, SPEC), "invalid ExpectModRevision (-2; expected >= 0 or -1)"),
        (JournalChange(1, None, "x"), "Delete: invalid length (1; expected 4 <= length <= 512)"),
        (JournalChange(0, None, "ex/demo"), "invalid ExpectModRevision (0; expected > 0 or -1)"),
    ],
)
def test_changes(change, error):
    assert error_of(change.validate) == error

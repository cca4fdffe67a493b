"""The selector index agrees with matching one by one, and is fast with 100,000 journals."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.labels import Label, LabelSelector, LabelSet, SelectorIndex, parse_selector

JOURNALS = st.sampled_from([f"{a}{b}/{c}" for a in "xy" for b in ("", "é", "-") for c in ("a", "ab", "b")])
PAIRS = st.tuples(st.sampled_from(["aa", "bb", "name", "prefix"]), st.sampled_from(["", "1", "12", "2", "é"]))
LABELS = st.lists(PAIRS, max_size=4).map(lambda pairs: LabelSet.of(*pairs))
ENTRIES = st.lists(
    st.one_of(
        st.builds(
            Label,
            st.sampled_from(["aa", "bb", "cc", "prefix"]),
            st.sampled_from(["", "1", "12", "2", "x/"]),
            st.booleans(),
        ),
        st.builds(
            Label,
            st.just("name"),
            st.one_of(JOURNALS, st.sampled_from(["", "x", "xé/", "y-/a"])),
            st.booleans(),
        ),
    ),
    max_size=4,
).map(lambda labels: LabelSet(tuple(labels)))
SELECTORS = st.builds(LabelSelector, ENTRIES, ENTRIES)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), JOURNALS, LABELS),
        st.tuples(st.just("discard"), JOURNALS, LABELS),
        st.tuples(st.just("select"), SELECTORS, st.none()),
    ),
    max_size=25,
)


def expected(journals, selector):
    rewritten = selector.with_prefix_rewritten()
    chosen = [name for name, labels in journals.items() if rewritten.matches(labels.with_name_label(name))]
    return sorted(chosen, key=str.encode)


@settings(deadline=None, max_examples=300)
@given(OPERATIONS, st.lists(SELECTORS, min_size=1, max_size=4))
def test_agrees_with_matches(operations, selectors):
    index, journals = SelectorIndex(), {}
    for kind, subject, labels in operations:
        if kind == "add":
            index.add(subject, labels)
            journals[subject] = labels
        elif kind == "discard":
            index.discard(subject)
            journals.pop(subject, None)
        else:
            assert index.select(subject) == expected(journals, subject)
    assert len(index) == len(journals)
    for selector in selectors:
        assert index.select(selector) == expected(journals, selector)


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.lists(SELECTORS, min_size=1, max_size=6))
def test_agrees_with_matches_when_many(random, selectors):
    """Enough journals that each way of reading a posting, and of sorting, is taken."""
    values = ["", "1", "12", "2"]
    journals = {
        f"{random.choice('xy')}/{random.randrange(900)}": LabelSet.of(
            ("aa", random.choice(values)), ("bb", f"{random.choice(values)}{random.randrange(90)}")
        )
        for _ in range(300)
    }
    index = SelectorIndex()
    index.add_many(journals.items())
    for selector in selectors:
        assert index.select(selector) == expected(journals, selector)
    for name in random.sample(sorted(journals), len(journals) // 2):
        index.discard(name)
        del journals[name]
    for selector in selectors:
        assert index.select(selector) == expected(journals, selector)


def test_results_belong_to_the_caller():
    index = SelectorIndex()
    index.add("foo/bar", LabelSet())
    index.select(parse_selector("")).clear()
    assert index.select(parse_selector("")) == ["foo/bar"]


def test_emptied_index_keeps_nothing():
    index = SelectorIndex()
    for count in range(100):
        index.add(f"foo/{count}", LabelSet.of(aa=str(count % 3), bb=str(count)))
    index.select(parse_selector("bb:prefix=1"))
    for count in range(100):
        index.discard(f"foo/{count}")
    index.discard("never/there")
    assert len(index) == 0
    assert "foo/1" not in index
    assert not index._postings and not index._present and not index._values


def journal(number):
    return f"acme/topic-{number // 100:04d}/part-{number % 100:03d}", LabelSet.of(
        ("app.gazette.dev/message-type", f"Type{number // 100}"),
        ("content-type", "application/x-ndjson"),
        ("env", "prod" if number % 2 else "dev"),
        ("part", f"{number % 100:03d}"),
        ("unique", f"u{number:06d}"),
    )


@pytest.fixture(scope="module")
def large():
    index = SelectorIndex()
    index.add_many(journal(number) for number in range(100_000))
    index.select(parse_selector("unique:prefix=u"))  # sorts what is sorted on first use
    return index


def median_ms(index, selector, count=21):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        index.select(selector)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


# The aim is 1 ms for selective queries; tests run on busy machines, hence three times that.
@pytest.mark.parametrize(
    ("text", "count", "limit_ms"),
    [
        ("name=acme/topic-0003/part-004", 1, 3),
        ("prefix=acme/topic-0003/", 100, 3),
        ("env=prod,app.gazette.dev/message-type=Type77", 50, 3),
        ("content-type,env=dev,part=008,app.gazette.dev/message-type in (Type7,Type8)", 2, 3),
        ("unique:prefix=u00012", 10, 3),
        ("name:prefix=acme/topic-00,part=001,env!=dev", 100, 3),
        ("env=prod,part=002", 0, 3),
        ("env=prod", 50_000, 60),
        ("", 100_000, 10),
    ],
)
def test_speed_with_100_000_journals(large, text, count, limit_ms):
    selector = parse_selector(text)
    assert len(large.select(selector)) == count
    took_ms = median_ms(large, selector)
    print(f"{took_ms:.3f} ms, {count} journals: {text}")
    assert took_ms < limit_ms


def test_adding_many_is_cheap(large):
    items = [(f"new/{name}", labels) for name, labels in map(journal, range(10_000))]
    start = time.perf_counter()
    large.add_many(items)
    assert len(large.select(parse_selector("prefix=new/"))) == 10_000
    took_ms = (time.perf_counter() - start) * 1e3
    for name, _ in items:
        large.discard(name)
    print(f"adding 10,000 to 100,000 and selecting: {took_ms:.1f} ms")
    assert took_ms < 500

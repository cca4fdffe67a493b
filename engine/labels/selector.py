"""Label selectors: the grammar, its canonical text, and matching (spec/journals.md §5).

A selector is two label sets. A set of labels is selected if no entry of `exclude` matches it and, for every
name in `include`, at least one of the entries of that name does. An entry without value matches any value.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels.label_set import EMPTY_LABEL_SET, NAME_LABEL, PREFIX_LABEL, Label, LabelSet
from broadsheet.engine.labels.tokens import go_quote

__all__ = ["EVERYTHING", "LabelSelector", "entry_matches", "parse_selector"]

_PREFIX_SUFFIX = ":prefix"
_SELECTOR_KEYS = frozenset({"include", "exclude"})


def entry_matches(entry: Label, labels: LabelSet) -> bool:
    """Whether one entry of a selector matches a set of labels."""
    name, value = entry.name, entry.value
    if not value:
        return any(label.name == name for label in labels.labels)
    if entry.prefix:
        return any(label.name == name and label.value.startswith(value) for label in labels.labels)
    return any(label.value == value and label.name == name for label in labels.labels)


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """What to include and what to exclude; the empty selector selects everything.

    `str()` gives the canonical text, which `parse_selector` reads back to an equal selector.
    """

    include: LabelSet = EMPTY_LABEL_SET
    exclude: LabelSet = EMPTY_LABEL_SET

    def matches(self, labels: LabelSet) -> bool:
        """Whether `labels` is selected. For journals, give `spec.labels.with_name_label(spec.name)`."""
        for entry in self.exclude.labels:
            if entry_matches(entry, labels):
                return False
        found: dict[str, bool] = {}
        for entry in self.include.labels:
            found[entry.name] = found.get(entry.name, False) or entry_matches(entry, labels)
        return all(found.values())

    def with_prefix_rewritten(self) -> LabelSelector:
        """This selector with pseudo-labels `prefix` turned into prefix matches of `name`.

        Only List does this (spec/journals.md §5); elsewhere `prefix` matches nothing.
        """
        include, exclude = _rewrite_prefix(self.include), _rewrite_prefix(self.exclude)
        if include is self.include and exclude is self.exclude:
            return self
        return LabelSelector(include, exclude)

    def validate(self) -> None:
        """Raise `ValidationError`, with context `Include` or `Exclude`, unless both sets are valid."""
        for context, labels in (("Include", self.include), ("Exclude", self.exclude)):
            try:
                labels.validate(allow_prefix=True)
            except ValidationError as err:
                raise err.within(context) from None

    def validate_list(self) -> None:
        """`validate`, and the rule of ListRequest: values of the pseudo-label `prefix` end in `/`.

        Contexts are relative to the selector; a ListRequest puts `Selector` before them.
        """
        self.validate()
        for context, labels in (("Include", self.include), ("Exclude", self.exclude)):
            for label in labels.labels:
                if label.name == PREFIX_LABEL and not label.value.endswith("/"):
                    raise ValidationError(
                        f"expected trailing '/' ({label.value})", context=f'{context}.Labels["prefix"]'
                    )

    def to_json(self, *, defaults: bool = False) -> dict[str, object]:
        """The selector as JSON-able values; names are the same in snake and camel case."""
        return {
            "include": self.include.to_json(defaults=defaults),
            "exclude": self.exclude.to_json(defaults=defaults),
        }

    @classmethod
    def from_json(cls, value: object) -> LabelSelector:
        """The inverse of `to_json`. Raises `ValidationError` on unknown keys and wrong types."""
        if value is None:
            return EVERYTHING
        if type(value) is not dict:
            raise ValidationError(f"expected a JSON object, not {type(value).__name__}")
        for key in value:
            if key not in _SELECTOR_KEYS:
                raise ValidationError(f"unknown field {key!r}")
        sets = []
        for key in ("include", "exclude"):
            try:
                sets.append(LabelSet.from_json(value.get(key)))
            except ValidationError as err:
                raise err.within(key) from None
        return cls(*sets)

    def __str__(self) -> str:
        return ",".join([*_texts(self.include, "=", "", " in "), *_texts(self.exclude, "!=", "!", " notin ")])


EVERYTHING = LabelSelector()


def parse_selector(text: str) -> LabelSelector:
    """Parse the text of a selector, by the grammar of spec/journals.md §5.

    The empty text selects everything. Raises `ValidationError` if the text does not match the grammar, or
    if the result is not a valid selector.
    """
    equal, not_equal, is_in, not_in, exists, not_exists, member = _patterns()
    include: list[Label] = []
    exclude: list[Label] = []
    rest = text
    while rest:
        values = [""]
        # The order of the alternatives is part of the grammar.
        if match := equal.match(rest) or not_equal.match(rest):
            values = [match[2]]
        elif match := is_in.match(rest) or not_in.match(rest):
            values = _parse_members(member, rest, match[2])
        else:
            match = exists.match(rest) or not_exists.match(rest)
        if match is None:
            raise ValidationError(f"could not match {go_quote(rest)} to a label selector expression")
        target = exclude if match.re in (not_equal, not_in, not_exists) else include
        for value in values:
            _insert(target, match[1], value)
        rest = rest[match.end() :]
    selector = LabelSelector(LabelSet(tuple(include)), LabelSet(tuple(exclude)))
    selector.validate()
    return selector


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    """equal, not-equal, in, not-in, exists, not-exists, and the member of a set. Compiled on first use."""
    # \w is `str.isalnum` or "_": Unicode letters and numbers, as in `tokens`.
    name, value, end = r" ?([\w\-+/.]{2,}(?::prefix)?)", r" ?([\w\-+/.=%]*)", r" ?(?:,|\Z)"
    members = r" ?\(([^)]+)\)"
    return tuple(
        re.compile(pattern + end)
        for pattern in (
            f"{name} ?==?{value}",
            f"{name} ?!={value}",
            f"{name} in{members}",
            f"{name} not ?in{members}",
            name,
            f" ?!{name}",
            value,
        )
    )


def _parse_members(member: re.Pattern[str], rest: str, body: str) -> list[str]:
    values = []
    while body:
        match = member.match(body)
        if match is None:
            raise ValidationError(
                f"parsing {go_quote(rest)}: "
                f"could not match {go_quote(body)} to a label selector set expression"
            )
        values.append(match[1])
        body = body[match.end() :]
    return values


def _insert(labels: list[Label], name: str, value: str) -> None:
    prefix = name.endswith(_PREFIX_SUFFIX)
    label = Label(name.removesuffix(_PREFIX_SUFFIX), value, prefix)
    at = bisect_left(labels, (label.name, value), key=lambda other: (other.name, other.value))
    if label not in labels[at : at + 2]:  # at most two share (name, value): one with prefix, one without
        labels.insert(at, label)


def _rewrite_prefix(labels: LabelSet) -> LabelSet:
    if not any(label.name == PREFIX_LABEL for label in labels.labels):
        return labels
    rewritten = {
        Label(NAME_LABEL, label.value, True) if label.name == PREFIX_LABEL else label
        for label in labels.labels
    }
    return LabelSet(tuple(sorted(rewritten, key=lambda label: (label.name, label.value, label.prefix))))


def _texts(labels: LabelSet, equals: str, exists: str, contains: str) -> Iterable[str]:
    # A stable sort: entries of a name may alternate between prefix and not, ordered by value.
    entries = sorted(labels.labels, key=lambda label: (label.name, label.prefix))
    for (name, prefix), group in groupby(entries, key=lambda label: (label.name, label.prefix)):
        values = [label.value for label in group]
        shown = name + _PREFIX_SUFFIX if prefix else name
        if values == [""]:
            yield exists + shown
        elif len(values) == 1:
            # After `=` alone, a `=` that begins the value would be read as the other half of `==`.
            yield shown + ("==" if equals == "=" and values[0][0] == "=" else equals) + values[0]
        else:
            yield f"{shown}{contains}({','.join(values)})"

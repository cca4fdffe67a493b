"""Labels and sets of labels (spec/journals.md §4).

A `LabelSet` is what journals carry, what registers hold, and half of a selector. Its order is part of its
validity: labels ascend strictly by (name, value). Code-point order, which Python compares by, is the byte
order of UTF-8. Construction checks nothing, since sets are decoded far more often than they enter the system;
`LabelSet.validate` is called at the door.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.labels.tokens import PATH_SYMBOLS, validate_token

__all__ = [
    "CONTENT_TYPE",
    "EMPTY_LABEL_SET",
    "INSTANCE",
    "MANAGED_BY",
    "MESSAGE_SUBTYPE",
    "MESSAGE_TYPE",
    "NAME_LABEL",
    "PREFIX_LABEL",
    "REGION",
    "SINGLE_VALUED_LABELS",
    "TAG",
    "Label",
    "LabelSet",
    "intersect",
    "subtract",
    "union",
]

CONTENT_TYPE = "content-type"
INSTANCE = "app.gazette.dev/instance"
MANAGED_BY = "app.gazette.dev/managed-by"
MESSAGE_SUBTYPE = "app.gazette.dev/message-subtype"
MESSAGE_TYPE = "app.gazette.dev/message-type"
REGION = "app.gazette.dev/region"
TAG = "app.gazette.dev/tag"

NAME_LABEL = "name"
"""Implicit label of every journal: its name."""
PREFIX_LABEL = "prefix"
"""Pseudo-label of List selectors: a prefix of the name that ends in `/`."""

SINGLE_VALUED_LABELS = frozenset({CONTENT_TYPE, INSTANCE, MANAGED_BY, MESSAGE_SUBTYPE, MESSAGE_TYPE, REGION})

_NAME_MIN_BYTES, _NAME_MAX_BYTES, _VALUE_MAX_BYTES = 2, 64, 1024
_LABEL_KEYS = frozenset({"name", "value", "prefix"})
# RFC 2045 `tspecials`: what may not be in a token of a media type.
_MEDIA_TYPE_SPECIALS = frozenset('()<>@,;:\\"/[]?=')


@dataclass(frozen=True, slots=True)
class Label:
    """A name and a value. `prefix` (only in selectors) makes the value match as a prefix."""

    name: str = ""
    value: str = ""
    prefix: bool = False

    def validate(self) -> None:
        """Raise `ValidationError`, with context `Name` or `Value`, unless both are tokens of legal length."""
        try:
            validate_token(self.name, _NAME_MIN_BYTES, _NAME_MAX_BYTES)
        except ValidationError as err:
            raise err.within("Name") from None
        try:
            validate_token(self.value, 0, _VALUE_MAX_BYTES, symbols=PATH_SYMBOLS)
        except ValidationError as err:
            raise err.within("Value") from None


@dataclass(frozen=True, slots=True)
class LabelSet:
    """An immutable sequence of labels; valid when strictly ascending by (name, value)."""

    labels: tuple[Label, ...] = ()

    @classmethod
    def of(cls, /, *pairs: tuple[str, str], **names: str) -> LabelSet:
        """The sorted set of `(name, value)` pairs and of `name="value"` arguments."""
        every = {*pairs, *names.items()}
        return cls(tuple(Label(name, value) for name, value in sorted(every)))

    def __bool__(self) -> bool:
        return bool(self.labels)

    def __iter__(self) -> Iterator[Label]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def values(self, name: str) -> tuple[str, ...]:
        """All values of a label, in the order of the set; empty if it has none."""
        return tuple([label.value for label in self.labels if label.name == name])

    def value(self, name: str) -> str | None:
        """The first value of a label, or None."""
        for label in self.labels:
            if label.name == name:
                return label.value
        return None

    def with_name_label(self, journal_name: str) -> LabelSet:
        """This set with the implicit label `name`, as journals are matched (spec/journals.md §4).

        A `name` of the set's own, which no valid spec has, is replaced.
        """
        own = [label for label in self.labels if label.name != NAME_LABEL]
        place = sum(1 for label in own if label.name < NAME_LABEL)
        own.insert(place, Label(NAME_LABEL, journal_name))
        return LabelSet(tuple(own))

    def validate(self, *, allow_prefix: bool = False) -> None:
        """Raise `ValidationError` for the first broken rule of spec/journals.md §4.

        `allow_prefix` is for the halves of a selector.
        """
        previous: Label | None = None
        for index, label in enumerate(self.labels):
            try:
                label.validate()
                if label.prefix and not allow_prefix:
                    raise ValidationError("Prefix may not be set outside of a LabelSelector")
            except ValidationError as err:
                raise err.within(f"Labels[{index}]") from None
            if previous is not None:
                _validate_order(index, previous, label)
            previous = label

    def validate_constraints(self) -> None:
        """Raise `ValidationError` unless the well-known labels are used as spec/journals.md §4 asks.

        Single-valued labels have one value, the content type is a media type, a message type comes with a
        content type, and a message sub-type with a message type. The set is taken to be in valid order.
        """
        names = set()
        for index, label in enumerate(self.labels):
            if label.name in names and label.name in SINGLE_VALUED_LABELS:
                raise ValidationError(
                    f"expected single-value Label has multiple values "
                    f"(index {index}; label {label.name} value {label.value})"
                )
            names.add(label.name)
        content_type = self.value(CONTENT_TYPE)
        if content_type is not None:
            problem = _media_type_problem(content_type)
            if problem:
                raise ValidationError(f"parsing content-type: mime: {problem}")
        if MESSAGE_TYPE in names and CONTENT_TYPE not in names:
            raise ValidationError(f"expected content-type label alongside {MESSAGE_TYPE}")
        if MESSAGE_SUBTYPE in names and MESSAGE_TYPE not in names:
            raise ValidationError(f"expected {MESSAGE_TYPE} label alongside {MESSAGE_SUBTYPE}")

    def to_json(self, *, defaults: bool = False) -> dict[str, object]:
        """The set as JSON-able values: `{"labels": [{"name": .., "value": ..}]}`.

        Empty fields are left out unless `defaults`. The names are the same in snake and camel case.
        """
        if defaults:
            return {
                "labels": [
                    {"name": label.name, "value": label.value, "prefix": label.prefix}
                    for label in self.labels
                ]
            }
        if not self.labels:
            return {}
        listed = []
        for label in self.labels:
            item: dict[str, object] = {}
            if label.name:
                item["name"] = label.name
            if label.value:
                item["value"] = label.value
            if label.prefix:
                item["prefix"] = True
            listed.append(item)
        return {"labels": listed}

    @classmethod
    def from_json(cls, value: object) -> LabelSet:
        """The inverse of `to_json`; absent and null mean empty.

        Raises `ValidationError` on unknown keys and wrong types. Rules of content are left to `validate`.
        """
        if value is None:
            return EMPTY_LABEL_SET
        if type(value) is not dict:
            raise ValidationError(f"expected a JSON object, not {type(value).__name__}")
        listed = value.get("labels")
        if len(value) != ("labels" in value):
            unknown = next(key for key in value if key != "labels")
            raise ValidationError(f"unknown field {unknown!r}")
        if listed is None:
            return EMPTY_LABEL_SET
        if type(listed) is not list:
            raise ValidationError(f"expected a list, not {type(listed).__name__}", context="labels")
        labels = []
        for index, item in enumerate(listed):
            if type(item) is not dict or not item.keys() <= _LABEL_KEYS:
                raise _bad_label(item, index)
            name, text, prefix = item.get("name", ""), item.get("value", ""), item.get("prefix", False)
            if type(name) is not str or type(text) is not str or type(prefix) is not bool:
                raise _bad_label(item, index)
            labels.append(_shared_label(name, text, prefix))
        return cls(tuple(labels))


EMPTY_LABEL_SET = LabelSet()


@lru_cache(maxsize=16384)
def _shared_label(name: str, value: str, prefix: bool) -> Label:
    """One object for equal labels: thousands of journals carry the same few."""
    return Label(name, value, prefix)


def union(left: LabelSet, right: LabelSet) -> LabelSet:
    """The labels of both; a name in both keeps the values it has in `left` only."""
    if not right.labels:
        return left
    if not left.labels:
        return right
    taken = {label.name for label in left.labels}
    return _merge(left.labels, [label for label in right.labels if label.name not in taken])


def intersect(left: LabelSet, right: LabelSet) -> LabelSet:
    """The names whose complete lists of values are equal in both."""
    if left.labels == right.labels:
        return left
    equal = _equal_names(left, right)
    return LabelSet(tuple([label for label in left.labels if label.name in equal]))


def subtract(left: LabelSet, right: LabelSet) -> LabelSet:
    """The names of `left`, save those whose complete list of values is equal in `right`."""
    if not right.labels:
        return left
    equal = _equal_names(left, right)
    return LabelSet(tuple([label for label in left.labels if label.name not in equal]))


def _merge(left: Iterable[Label], right: list[Label]) -> LabelSet:
    # A merge and not a sort: a list that was given out of order stays so, and is refused when validated.
    out = []
    at = 0
    for label in left:
        while at < len(right) and right[at].name < label.name:
            out.append(right[at])
            at += 1
        out.append(label)
    out.extend(right[at:])
    return LabelSet(tuple(out))


def _values_by_name(labels: LabelSet) -> dict[str, list[tuple[str, bool]]]:
    grouped: dict[str, list[tuple[str, bool]]] = {}
    for label in labels.labels:
        grouped.setdefault(label.name, []).append((label.value, label.prefix))
    return grouped


def _equal_names(left: LabelSet, right: LabelSet) -> set[str]:
    others = _values_by_name(right)
    return {name for name, values in _values_by_name(left).items() if others.get(name) == values}


def _validate_order(index: int, previous: Label, label: Label) -> None:
    if label.name < previous.name:
        raise ValidationError(
            f"Labels not in unique, sorted order (index {index}; label name {label.name} <= {previous.name})"
        )
    if label.name != previous.name:
        return
    if label.value <= previous.value:
        raise ValidationError(
            f"Labels not in unique, sorted order "
            f"(index {index}; label {label.name} value {label.value} <= {previous.value})"
        )
    if not previous.value:
        raise ValidationError(
            f"Label has empty & non-empty values (index {index}; label {label.name} value {label.value})"
        )


def _media_type_problem(value: str) -> str | None:
    """What is wrong with a media type, in the words of Go's `mime`; None if nothing is.

    Parameters (`; charset=..`) need no parsing: a label's value cannot hold a `;`.
    """
    kind, slash, rest = value.strip().lower().partition("/")
    token = _leading_token(kind)
    if not token:
        return "no media type"
    if token != kind:
        return "expected slash after first token"
    if not slash:
        return None
    subtype = _leading_token(rest)
    if not subtype:
        return "expected token after slash"
    return None if subtype == rest else "unexpected content after media subtype"


def _leading_token(text: str) -> str:
    for index, char in enumerate(text):
        if not " " < char < "\x7f" or char in _MEDIA_TYPE_SPECIALS:
            return text[:index]
    return text


def _bad_label(item: object, index: int) -> ValidationError:
    context = f"labels[{index}]"
    if type(item) is not dict:
        return ValidationError(f"expected a JSON object, not {type(item).__name__}", context=context)
    for key, value in item.items():
        if key not in _LABEL_KEYS:
            return ValidationError(f"unknown field {key!r}", context=context)
        expected = bool if key == "prefix" else str
        if type(value) is not expected:
            wanted = "a boolean" if key == "prefix" else "a string"
            found = type(value).__name__
            return ValidationError(f"expected {wanted}, not {found}", context=f"{context}.{key}")
    raise AssertionError("not a bad label")

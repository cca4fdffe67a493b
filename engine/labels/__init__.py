"""Labels, label sets, selectors and the index that selects journals (spec/journals.md §4 and §5)."""

from __future__ import annotations

from broadsheet.engine.labels.index import SelectorIndex
from broadsheet.engine.labels.label_set import (
    CONTENT_TYPE,
    EMPTY_LABEL_SET,
    INSTANCE,
    MANAGED_BY,
    MESSAGE_SUBTYPE,
    MESSAGE_TYPE,
    NAME_LABEL,
    PREFIX_LABEL,
    REGION,
    SINGLE_VALUED_LABELS,
    TAG,
    Label,
    LabelSet,
    intersect,
    subtract,
    union,
)
from broadsheet.engine.labels.selector import EVERYTHING, LabelSelector, parse_selector
from broadsheet.engine.labels.tokens import (
    clean_path,
    split_journal_meta,
    validate_journal_name,
    validate_path_component,
    validate_request_journal,
    validate_token,
)

__all__ = [
    "CONTENT_TYPE",
    "EMPTY_LABEL_SET",
    "EVERYTHING",
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
    "LabelSelector",
    "LabelSet",
    "SelectorIndex",
    "clean_path",
    "intersect",
    "parse_selector",
    "split_journal_meta",
    "subtract",
    "union",
    "validate_journal_name",
    "validate_path_component",
    "validate_request_journal",
    "validate_token",
]

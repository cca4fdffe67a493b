"""JournalSpec and its parts: every field, and the one validator (spec/journals.md §1 and §3).

Values are frozen. Construction checks nothing: specs are decoded by the ten thousand when an engine opens,
and were validated when they entered it. Enums are open, as on the wire: a number without a name is kept, and
refused by `validate`. Durations are whole nanoseconds, sizes bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.durations import (
    HOUR_NS,
    MINUTE_NS,
    SECOND_NS,
    format_duration,
    format_json_duration,
    parse_json_duration,
)
from broadsheet.engine.labels.label_set import EMPTY_LABEL_SET, NAME_LABEL, PREFIX_LABEL, LabelSet
from broadsheet.engine.labels.tokens import go_quote, split_journal_meta, validate_request_journal

__all__ = [
    "LENGTH_MAX_BYTES",
    "LENGTH_MIN_BYTES",
    "REPLICATION_MAX",
    "CompressionCodec",
    "FragmentSpec",
    "JournalChange",
    "JournalFlags",
    "JournalSpec",
    "StoreURL",
    "Suspend",
    "SuspendLevel",
    "parse_store_url",
    "validate_store",
]

REPLICATION_MAX = 5
LENGTH_MIN_BYTES = 1 << 10
LENGTH_MAX_BYTES = 1 << 34
_REFRESH_MIN_NS, _REFRESH_MAX_NS = SECOND_NS, 24 * HOUR_NS
_FLUSH_MIN_NS = MINUTE_NS


class _OpenEnum(IntEnum):
    """An enum that holds any number; one without a name has its digits for a name."""

    @classmethod
    def _missing_(cls, value: object) -> _OpenEnum | None:
        if type(value) is not int:
            return None
        member = int.__new__(cls, value)
        member._name_ = str(value)
        member._value_ = value
        return member

    @property
    def is_known(self) -> bool:
        """Whether this number has a name."""
        return int(self) in type(self)._value2member_map_


class CompressionCodec(_OpenEnum):
    """How persisted fragments are compressed (spec/broker-protocol.md §3).

    `LZ4` is ours. Gazette's clients reject a whole listing that holds it, so `validate` refuses it unless
    told otherwise.
    """

    INVALID = 0
    NONE = 1
    GZIP = 2
    ZSTANDARD = 3
    SNAPPY = 4
    GZIP_OFFLOAD_DECOMPRESSION = 5
    LZ4 = 100

    def validate(self, *, allow_lz4: bool = False) -> None:
        """Raise `ValidationError` unless this is a codec to compress with."""
        ours = self is CompressionCodec.LZ4 and not allow_lz4
        if self == CompressionCodec.INVALID or ours or not self.is_known:
            raise ValidationError(f"invalid value ({self.name})")


class JournalFlags(IntEnum):
    """Who may do what. A spec carries one of these numbers; `NOT_SPECIFIED` means `O_RDWR`."""

    NOT_SPECIFIED = 0
    O_RDONLY = 1
    O_WRONLY = 2
    O_RDWR = 4


class SuspendLevel(_OpenEnum):
    """How far a journal is suspended: to one replica (`PARTIAL`), or to none (`FULL`)."""

    NONE = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class FragmentSpec:
    """How the fragments of a journal are cut, compressed and stored.

    `length` is in uncompressed bytes. The first of `stores` is written to, all are read. Zero durations mean:
    `retention_ns` keep for ever, `flush_interval_ns` no flushing by time.
    """

    length: int = 0
    compression_codec: CompressionCodec = CompressionCodec.INVALID
    stores: tuple[str, ...] = ()
    refresh_interval_ns: int = 0
    retention_ns: int = 0
    flush_interval_ns: int = 0
    path_postfix_template: str = ""

    def validate(self, *, allow_lz4: bool = False) -> None:
        """Raise `ValidationError` for the first broken rule, in the order of spec/journals.md §1."""
        if not LENGTH_MIN_BYTES <= self.length <= LENGTH_MAX_BYTES:
            raise ValidationError(
                f"invalid Length ({self.length}; expected {LENGTH_MIN_BYTES} <= length <= {LENGTH_MAX_BYTES})"
            )
        with _Within("CompressionCodec"):
            self.compression_codec.validate(allow_lz4=allow_lz4)
        offload = self.compression_codec == CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION
        for index, store in enumerate(self.stores):
            with _Within(f"Stores[{index}]"):
                validate_store(store)
            if offload and index == 0 and parse_store_url(store).scheme == "file":
                raise ValidationError(
                    f"GZIP_OFFLOAD_DECOMPRESSION is incompatible with file:// stores ({store})"
                )
        if not _REFRESH_MIN_NS <= self.refresh_interval_ns <= _REFRESH_MAX_NS:
            raise ValidationError(
                f"invalid RefreshInterval ({format_duration(self.refresh_interval_ns)}; "
                f"expected {format_duration(_REFRESH_MIN_NS)} <= interval <= "
                f"{format_duration(_REFRESH_MAX_NS)})"
            )
        if self.flush_interval_ns != 0 and self.flush_interval_ns < _FLUSH_MIN_NS:
            raise ValidationError(
                f"invalid FlushInterval ({format_duration(self.flush_interval_ns)}; "
                f"expected >= {format_duration(_FLUSH_MIN_NS)})"
            )
        with _Within("PathPostfixTemplate"):
            _validate_template(self.path_postfix_template)

    def to_json(self, *, defaults: bool = False) -> dict[str, object]:
        """JSON-able values under Gazette's snake_case names; zero fields are left out unless `defaults`."""
        full: dict[str, object] = {
            "length": str(self.length),
            "compression_codec": _enum_json(self.compression_codec),
            "stores": list(self.stores),
            "refresh_interval": format_json_duration(self.refresh_interval_ns),
            "retention": format_json_duration(self.retention_ns),
            "flush_interval": format_json_duration(self.flush_interval_ns),
            "path_postfix_template": self.path_postfix_template,
        }
        return full if defaults else {key: value for key, value in full.items() if value != _ZEROS[key]}

    @classmethod
    def from_json(cls, value: object) -> FragmentSpec:
        """The inverse of `to_json`. Raises `ValidationError` on unknown keys and wrong types."""
        if value is None:
            return _EMPTY_FRAGMENT_SPEC
        if type(value) is not dict:
            raise ValidationError(f"expected a JSON object, not {type(value).__name__}")
        if not value.keys() <= _FRAGMENT_KEYS:
            raise _unknown_field(value, _FRAGMENT_KEYS)
        get = value.get
        stores = get("stores", ())
        if type(stores) is list:
            stores = tuple(stores)
        raw = (
            get("length", 0),
            get("compression_codec", 0),
            stores,
            get("refresh_interval", "0s"),
            get("retention", "0s"),
            get("flush_interval", "0s"),
            get("path_postfix_template", ""),
        )
        try:
            return _decode_fragment_spec(*raw)
        except TypeError:  # not hashable, so a list or object where there should be none
            return _decode_fragment_spec.__wrapped__(*raw)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Suspension of a journal, managed by its broker. `offset` is the first that the journal resumes at."""

    level: SuspendLevel = SuspendLevel.NONE
    offset: int = 0

    def validate(self) -> None:
        """Raise `ValidationError` unless the level is known and the offset is not negative."""
        if not self.level.is_known:
            raise ValidationError(f"invalid Level variant ({int(self.level)})", context="Level")
        if self.offset < 0:
            raise ValidationError(f"invalid Offset ({self.offset}; expected >= 0)", context="Offset")

    def to_json(self, *, defaults: bool = False) -> dict[str, object]:
        """JSON-able values; zero fields are left out unless `defaults`."""
        full: dict[str, object] = {"level": _enum_json(self.level), "offset": str(self.offset)}
        return full if defaults else {key: value for key, value in full.items() if value != _ZEROS[key]}

    @classmethod
    def from_json(cls, value: object) -> Suspend:
        """The inverse of `to_json`. Raises `ValidationError` on unknown keys and wrong types."""
        if type(value) is not dict:
            raise ValidationError(f"expected a JSON object, not {type(value).__name__}")
        if not value.keys() <= _SUSPEND_KEYS:
            raise _unknown_field(value, _SUSPEND_KEYS)
        with _Within("level"):
            level = _enum(value.get("level", 0), SuspendLevel, "JournalSpec_Suspend_Level")
        return cls(level, _integer(value.get("offset", 0), "offset", 64))


_EMPTY_FRAGMENT_SPEC = FragmentSpec()


@dataclass(frozen=True, slots=True)
class JournalSpec:
    """The desired state of one journal. `max_append_rate` is in bytes per second, 0 for no limit."""

    name: str = ""
    replication: int = 0
    labels: LabelSet = EMPTY_LABEL_SET
    fragment: FragmentSpec = _EMPTY_FRAGMENT_SPEC
    flags: int = 0
    max_append_rate: int = 0
    suspend: Suspend | None = None

    @property
    def may_read(self) -> bool:
        """Whether the flags allow reads."""
        return self.flags in (JournalFlags.NOT_SPECIFIED, JournalFlags.O_RDONLY, JournalFlags.O_RDWR)

    @property
    def may_write(self) -> bool:
        """Whether the flags allow appends."""
        return self.flags in (JournalFlags.NOT_SPECIFIED, JournalFlags.O_WRONLY, JournalFlags.O_RDWR)

    def validate(self, *, allow_lz4: bool = False) -> None:
        """Raise `ValidationError` for the first broken rule, in the order of spec/journals.md §1."""
        with _Within("Name"):
            validate_request_journal(self.name)
        meta = split_journal_meta(self.name)[1]
        if meta is not None:
            raise ValidationError(f"Name cannot have a metadata path segment (;{meta}; expected no segment)")
        if not 1 <= self.replication <= REPLICATION_MAX:
            raise ValidationError(
                f"invalid Replication ({self.replication}; expected 1 <= Replication <= {REPLICATION_MAX})"
            )
        with _Within("Labels"):
            self.labels.validate()
        for reserved in (NAME_LABEL, PREFIX_LABEL):
            if self.labels.value(reserved) is not None:
                raise ValidationError(f'Labels cannot include label "{reserved}"')
        with _Within("Labels"):
            self.labels.validate_constraints()
        with _Within("Fragment"):
            self.fragment.validate(allow_lz4=allow_lz4)
        if self.flags not in _FLAG_VALUES:
            raise ValidationError(f"invalid combination ({self.flags})", context="Flags")
        if self.max_append_rate < 0:
            raise ValidationError(f"invalid MaxAppendRate ({self.max_append_rate}; expected >= 0)")
        if self.suspend is not None:
            with _Within("Suspend"):
                self.suspend.validate()

    def to_json(self, *, defaults: bool = False) -> dict[str, object]:
        """JSON-able values under Gazette's snake_case names, 64-bit integers as decimal strings.

        Zero fields are left out, save the embedded messages `labels` and `fragment`; with `defaults` none is,
        and an absent `suspend` is null.
        """
        out: dict[str, object] = {}
        if self.name or defaults:
            out["name"] = self.name
        if self.replication or defaults:
            out["replication"] = self.replication
        out["labels"] = self.labels.to_json(defaults=defaults)
        out["fragment"] = self.fragment.to_json(defaults=defaults)
        if self.flags or defaults:
            out["flags"] = int(self.flags)
        if self.max_append_rate or defaults:
            out["max_append_rate"] = str(self.max_append_rate)
        if self.suspend is not None:
            out["suspend"] = self.suspend.to_json(defaults=defaults)
        elif defaults:
            out["suspend"] = None
        return out

    def to_json_camel(self) -> dict[str, object]:
        """`to_json` with lowerCamelCase names and all defaults, as the JSON gateway has it
        (spec/http-gateway.md §7)."""
        camel: dict[str, object] = _camel(self.to_json(defaults=True))
        return camel

    @classmethod
    def from_json(cls, value: object) -> JournalSpec:
        """The inverse of `to_json`; 64-bit integers may be strings or numbers, enums names or numbers.

        Raises `ValidationError` on unknown keys and wrong types. The rules of content are left to `validate`.
        """
        if type(value) is not dict:
            raise ValidationError(f"expected a JSON object, not {type(value).__name__}")
        if not value.keys() <= _SPEC_KEYS:
            raise _unknown_field(value, _SPEC_KEYS)
        get = value.get
        name = get("name", "")
        if type(name) is not str:
            raise _wrong_type(name, "a string", "name")
        # No `with`, unlike elsewhere: this is the path of every spec when an engine opens.
        try:
            context = "labels"
            labels = LabelSet.from_json(get("labels"))
            context = "fragment"
            fragment = FragmentSpec.from_json(get("fragment"))
            context = "suspend"
            suspend = get("suspend")
            suspended = None if suspend is None else Suspend.from_json(suspend)
        except ValidationError as err:
            raise err.within(context) from None
        return cls(
            name,
            _integer(get("replication", 0), "replication", 32),
            labels,
            fragment,
            _integer(get("flags", 0), "flags", 32, signed=False),
            _integer(get("max_append_rate", 0), "max_append_rate", 64),
            suspended,
        )


@dataclass(frozen=True, slots=True)
class JournalChange:
    """One change of an Apply: an upsert, or the name of a journal to delete.

    `expect_mod_revision` is the revision the journal must have: 0 if it must not exist, -1 for any.
    """

    expect_mod_revision: int
    upsert: JournalSpec | None = None
    delete: str = ""

    def validate(self, *, allow_lz4: bool = False) -> None:
        """Raise `ValidationError` for the first broken rule of ApplyRequest.Change
        (spec/broker-protocol.md §5); contexts are relative to the change."""
        if self.upsert is not None:
            if self.delete:
                raise ValidationError("both Upsert and Delete are set (expected exactly one)")
            with _Within("Upsert"):
                self.upsert.validate(allow_lz4=allow_lz4)
            if self.expect_mod_revision < -1:
                raise ValidationError(
                    f"invalid ExpectModRevision ({self.expect_mod_revision}; expected >= 0 or -1)"
                )
        elif self.delete:
            with _Within("Delete"):
                validate_request_journal(self.delete)
            if self.expect_mod_revision <= 0 and self.expect_mod_revision != -1:
                raise ValidationError(
                    f"invalid ExpectModRevision ({self.expect_mod_revision}; expected > 0 or -1)"
                )
        else:
            raise ValidationError("neither Upsert nor Delete are set (expected exactly one)")


# Fragment store URLs (spec/journals.md §3).


class StoreURL(NamedTuple):
    """The parts of a fragment store URL. `path` is decoded, `query` is as given."""

    scheme: str
    host: str
    path: str
    query: str


def validate_store(url: str) -> None:
    """Raise `ValidationError` unless `url` can name a fragment store. Its query is not looked at."""
    scheme, host, path, _ = parse_store_url(url)
    if not scheme:
        raise ValidationError(f"not absolute ({url})")
    if scheme in ("s3", "gs", "azure"):
        if not host:
            raise ValidationError(f"missing bucket ({url})")
    elif scheme == "azure-ad":
        account, _, rest = path.removeprefix("/").partition("/")
        for part, what in (
            (host, "tenant ID"),
            (account, "storage account"),
            (rest.partition("/")[0], "storage container"),
        ):
            if not part:
                raise ValidationError(f"missing {what} ({url})")
    elif scheme == "file":
        if host:
            raise ValidationError(f"file scheme cannot have host ({url})")
    else:
        raise ValidationError(f"invalid scheme ({scheme})")
    if not path.endswith("/"):
        raise ValidationError(f"path component doesn't end in '/' ({path})")


def parse_store_url(url: str) -> StoreURL:
    """Split a URL as Go's `net/url` does, and refuse with its texts what it refuses.

    The standard library's `urlsplit` refuses next to nothing, so specs it lets pass would fail in Gazette.
    """
    base = url.partition("#")[0]

    def refuse(reason: str) -> ValidationError:
        return ValidationError(f"parse {go_quote(base)}: {reason}")

    if any(char < " " or char == "\x7f" for char in base):
        raise refuse("net/url: invalid control character in URL")
    match = _scheme_pattern().match(base)
    if base.startswith(":"):
        raise refuse("missing protocol scheme")
    scheme = match[1].lower() if match else ""
    rest, _, query = base[match.end() if match else 0 :].partition("?")
    if not rest.startswith("/"):
        if scheme:
            return StoreURL(scheme, "", "", query)  # opaque, as in `mailto:x`
        if ":" in rest.partition("/")[0]:
            raise refuse("first path segment in URL cannot contain colon")
    host = ""
    if rest.startswith("//") and (scheme or not rest.startswith("///")):
        authority, slash, tail = rest[2:].partition("/")
        rest = slash + tail
        host = authority.rpartition("@")[2]
        problem = _host_problem(host)
        if problem:
            raise refuse(problem)
    path, bad_escape = _unescape(rest)
    if bad_escape is not None:
        raise refuse(f"invalid URL escape {go_quote(bad_escape)}")
    return StoreURL(scheme, host, path, query)


@cache
def _scheme_pattern() -> re.Pattern[str]:
    return re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


def _host_problem(host: str) -> str | None:
    _, colon, port = host.rpartition(":")
    if host.startswith("["):
        if "]" not in host:
            return "missing ']' in host"
        port = host.rpartition("]")[2]
        colon, port = port[:1], port[1:]
        if colon not in ("", ":"):
            return f"invalid port {go_quote(colon + port)} after host"
    if colon and not all(char in "0123456789" for char in port):
        return f"invalid port {go_quote(colon + port)} after host"
    for index, char in enumerate(host):
        if char == "%":
            return f"invalid URL escape {go_quote(host[index : index + 3])}"
        if char.isascii() and not char.isalnum() and char not in "-_.~!$&'()*+,;=:[]<>\"":
            return f"invalid character {go_quote(char)} in host name"
    return None


def _unescape(path: str) -> tuple[str, str | None]:
    """The decoded path, and the first bad escape if there is one."""
    if "%" not in path:
        return path, None
    head, *parts = path.split("%")
    out = head.encode("utf-8", "surrogatepass")
    for part in parts:
        digits = part[:2]
        if len(digits) < 2 or not all(char in "0123456789abcdefABCDEF" for char in digits):
            return path, "%" + digits
        out += bytes.fromhex(digits) + part[2:].encode("utf-8", "surrogatepass")
    return out.decode("utf-8", "replace"), None


# The path postfix template (spec/fragments.md §2): the subset that we can execute.


def _validate_template(template: str) -> None:
    if not template:
        return
    rest, offset = template, 0
    while True:
        start = rest.find("{{")
        if start < 0:
            return
        end = rest.find("}}", start)
        # A string may hold `}}`: take the shortest action that is one of ours.
        match = _action_pattern().match(rest, start)
        line = template.count("\n", 0, offset + start) + 1
        if match is None:
            if end < 0:
                raise ValidationError(f"template: postfix:{line}: unclosed action")
            action = rest[start + 2 : end].strip()
            raise ValidationError(f"template: postfix:{line}: unsupported expression {go_quote(action)}")
        offset += match.end()
        rest = rest[match.end() :]


@cache
def _action_pattern() -> re.Pattern[str]:
    string = r'(?:"(?:[^"\\\n]|\\["\\abfnrtv])*"|`[^`]*`)'
    with_argument = (
        r"\.Spool\.FirstAppendTime\.Format|\.Spool\.Registers\.ValueOf|\.JournalSpec\.LabelSet\.ValueOf"
    )
    return re.compile(rf"\{{\{{\s*(?:(?:{with_argument})\s+{string}|\.JournalSpec\.Name)\s*\}}\}}")


# JSON.

_SPEC_KEYS = frozenset({"name", "replication", "labels", "fragment", "flags", "max_append_rate", "suspend"})
_FRAGMENT_KEYS = frozenset(
    {
        "length",
        "compression_codec",
        "stores",
        "refresh_interval",
        "retention",
        "flush_interval",
        "path_postfix_template",
    }
)
_SUSPEND_KEYS = frozenset({"level", "offset"})
_FLAG_VALUES = frozenset(JournalFlags)
_ZEROS: dict[str, object] = {
    "length": "0",
    "compression_codec": "INVALID",
    "stores": [],
    "refresh_interval": "0s",
    "retention": "0s",
    "flush_interval": "0s",
    "path_postfix_template": "",
    "level": "NONE",
    "offset": "0",
}

_E = TypeVar("_E", bound=_OpenEnum)


class _Within:
    """Adds a context to a `ValidationError` that passes through.

    A class, since a `contextlib.contextmanager` would cost five times as much.
    """

    __slots__ = ("_context",)

    def __init__(self, context: str) -> None:
        self._context = context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        if isinstance(err, ValidationError):
            raise err.within(self._context) from None


@lru_cache(maxsize=1024, typed=True)
def _decode_fragment_spec(
    length: object,
    codec: object,
    stores: object,
    refresh: object,
    retention: object,
    flush: object,
    template: object,
) -> FragmentSpec:
    """One object for equal inputs: journals of a topic share their fragment spec."""
    if type(stores) is not tuple:
        raise _wrong_type(stores, "a list", "stores")
    for index, store in enumerate(stores):
        if type(store) is not str:
            raise _wrong_type(store, "a string", f"stores[{index}]")
    if type(template) is not str:
        raise _wrong_type(template, "a string", "path_postfix_template")
    with _Within("compression_codec"):
        known_codec = _enum(codec, CompressionCodec, "CompressionCodec")
    return FragmentSpec(
        _integer(length, "length", 64),
        known_codec,
        stores,
        _duration(refresh, "refresh_interval"),
        _duration(retention, "retention"),
        _duration(flush, "flush_interval"),
        template,
    )


def _integer(value: object, field: str, bits: int, *, signed: bool = True) -> int:
    if type(value) is str:
        digits = value[1:] if value[:1] == "-" else value
        if len(digits) > 20 or not (digits.isascii() and digits.isdigit()):
            raise ValidationError(f"expected a decimal integer (have {value!r})", context=field)
        number = int(value)
    elif type(value) is int:
        number = value
    else:
        raise _wrong_type(value, "an integer", field)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if not low <= number <= high:
        raise ValidationError(f"integer out of range ({number})", context=field)
    return number


def _duration(value: object, field: str) -> int:
    if type(value) is not str:
        raise _wrong_type(value, "a duration", field)
    try:
        return parse_json_duration(value)
    except ValidationError as err:
        raise err.within(field) from None


def _enum(value: object, kind: type[_E], go_name: str) -> _E:
    if type(value) is str:
        try:
            return kind[value]
        except KeyError:
            options = ", ".join(member.name for member in kind if member.name != "LZ4")
            raise ValidationError(
                f"{go_quote(value)} is not a valid {go_name} (options are [{options}])"
            ) from None
    if type(value) is not int:
        raise _wrong_type(value, "the name of an enum value", "")
    return kind(_integer(value, "", 32))


def _enum_json(value: _OpenEnum) -> str | int:
    return value.name if value.is_known else int(value)


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel_name(key): _camel(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_camel(item) for item in value]
    return value


@lru_cache(maxsize=64)
def _camel_name(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _unknown_field(value: dict[str, object], known: frozenset[str]) -> ValidationError:
    unknown = next(key for key in value if key not in known)
    return ValidationError(f"unknown field {unknown!r}")


def _wrong_type(value: object, expected: str, field: str) -> ValidationError:
    return ValidationError(f"expected {expected}, not {type(value).__name__}", context=field)

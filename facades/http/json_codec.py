"""JSON forms of the service's messages, both ways (spec/http-gateway.md §7, spec/broker-protocol.md §4).

Written as protobuf's JSON mapping has it, in lowerCamelCase and with all defaults; 64-bit integers are decimal
strings. Read in either camelCase or snake_case. A message that cannot be read raises `ValidationError`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from broadsheet.engine.errors import Status, ValidationError
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.durations import parse_json_duration
from broadsheet.engine.journal.spec import CompressionCodec, JournalChange, JournalSpec
from broadsheet.engine.labels import LabelSelector, LabelSet
from broadsheet.engine.service import (
    AppendResponse,
    ApplyRequest,
    ApplyResponse,
    EtcdHeader,
    FragmentsRequest,
    FragmentsResponse,
    Header,
    ListedFragment,
    ListedJournal,
    ListRequest,
    ListResponse,
    ProcessId,
    ReadRequest,
    ReadResponse,
    Route,
)

__all__ = [
    "Json",
    "JsonSyntaxError",
    "append_response_json",
    "apply_request_json",
    "apply_response_json",
    "camel_names",
    "dump",
    "fragments_response_json",
    "header_json",
    "listed_journal_json",
    "load",
    "parse_append_response",
    "parse_apply_request",
    "parse_apply_response",
    "parse_fragments_request",
    "parse_fragments_response",
    "parse_list_request",
    "parse_listed_journal",
    "parse_listing",
    "parse_read_request",
    "parse_read_response",
    "read_response_bytes",
    "snake_names",
]

Json: TypeAlias = dict[str, Any]

_MAX_INT64 = 2**63 - 1
_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})

EMPTY_HEADER = Header(ProcessId(), Route(primary=0), EtcdHeader(0, 0, 0, 0))
"""The header of messages that carry none where the wire has no null."""


class JsonSyntaxError(ValueError):
    """A body that is not JSON; the text is that of Go's decoder where it is simple."""


# --- Text -------------------------------------------------------------------------------------------------


def dump(value: object) -> bytes:
    """Compact JSON. `<`, `>` and `&` are escaped as Go does."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_HTML).encode("utf-8")


def load(body: bytes) -> Json:
    """The JSON object of a request's body; an empty body is an empty object. Raises `JsonSyntaxError`."""
    if not body.strip():
        return {}
    try:
        text = body.decode("utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise JsonSyntaxError(f"invalid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(_go_syntax_error(error)) from None
    except RecursionError:
        raise JsonSyntaxError("exceeded max depth") from None
    if not isinstance(value, dict):
        raise JsonSyntaxError(f"expected a JSON object, not {type(value).__name__}")
    return value


_GO_EXPECTATIONS = (
    ("Expecting property name", "looking for beginning of object key string"),
    ("Expecting value", "looking for beginning of value"),
    ("Expecting ':'", "after object key"),
    ("Expecting ','", "after object key:value pair"),
    ("Extra data", "after top-level value"),
    ("Invalid control character", "in string literal"),
)


def _go_syntax_error(error: json.JSONDecodeError) -> str:
    rest = error.doc[error.pos :].lstrip(" \t\r\n")
    if not rest or error.msg.startswith("Unterminated string"):
        return "unexpected EOF"
    for begin, text in _GO_EXPECTATIONS:
        if error.msg.startswith(begin):
            return f"invalid character {rest[0]!r} {text}"
    return f"{error.msg} (at character {error.pos})"


def snake_names(value: Any) -> Any:
    """All object keys in snake_case. (No message has free keys.)"""
    if isinstance(value, dict):
        return {_snake(key): snake_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [snake_names(item) for item in value]
    return value


def camel_names(value: Any) -> Any:
    """All object keys in lowerCamelCase."""
    if isinstance(value, dict):
        return {_camel(key): camel_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [camel_names(item) for item in value]
    return value


@lru_cache(maxsize=512)
def _snake(name: str) -> str:
    return "".join("_" + char.lower() if char.isupper() else char for char in name)


@lru_cache(maxsize=512)
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


# --- Values, written --------------------------------------------------------------------------------------


def _process_id_json(process_id: ProcessId) -> Json:
    return {"zone": process_id.zone, "suffix": process_id.suffix}


def _route_json(route: Route) -> Json:
    return {
        "members": [_process_id_json(member) for member in route.members],
        "primary": route.primary,
        "endpoints": list(route.endpoints),
    }


def header_json(header: Header) -> Json:
    etcd = header.etcd
    return {
        "processId": _process_id_json(header.process_id),
        "route": _route_json(header.route),
        "etcd": {
            "clusterId": str(etcd.cluster_id),
            "memberId": str(etcd.member_id),
            "revision": str(etcd.revision),
            "raftTerm": str(etcd.raft_term),
        },
    }


def _fragment_json(fragment: Fragment) -> Json:
    digest = fragment.sum
    return {
        "journal": fragment.journal,
        "begin": str(fragment.begin),
        "end": str(fragment.end),
        "sum": {
            "part1": str(int.from_bytes(digest[0:8], "big")),
            "part2": str(int.from_bytes(digest[8:16], "big")),
            "part3": int.from_bytes(digest[16:20], "big"),
        },
        "compressionCodec": fragment.compression_codec.name,
        "backingStore": fragment.backing_store,
        "modTime": str(fragment.mod_time),
        "pathPostfix": fragment.path_postfix,
    }


def read_response_bytes(response: ReadResponse) -> bytes:
    """A ReadResponse as JSON text. Content is the caller's to cut: base64 makes it a third longer."""
    if response.content is not None:
        return (
            b'{"status":"OK","header":null,"offset":"%d","writeHead":"0","fragment":null,"fragmentUrl":"","content":"'
            % response.offset
            + b64encode(response.content)
            + b'"}'
        )
    return dump(
        {
            "status": response.status.name,
            "header": None if response.header is None else header_json(response.header),
            "offset": str(response.offset),
            "writeHead": str(response.write_head),
            "fragment": None if response.fragment is None else _fragment_json(response.fragment),
            "fragmentUrl": response.fragment_url,
            "content": None,
        }
    )


def listed_journal_json(journal: ListedJournal) -> Json:
    return {
        "spec": journal.spec.to_json_camel(),
        "modRevision": str(journal.mod_revision),
        "route": _route_json(journal.route),
        "createRevision": str(journal.create_revision),
    }


def append_response_json(response: AppendResponse) -> Json:
    return {
        "status": response.status.name,
        "header": header_json(response.header),
        "commit": None if response.commit is None else _fragment_json(response.commit),
        "registers": None if response.registers is None else response.registers.to_json(defaults=True),
        "totalChunks": str(response.total_chunks),
        "delayedChunks": str(response.delayed_chunks),
        "storeHealthError": response.store_health_error,
    }


def apply_response_json(response: ApplyResponse) -> Json:
    """`conflicts` is ours: the journals whose revision was not the expected one."""
    return {
        "status": response.status.name,
        "header": header_json(response.header),
        "conflicts": list(response.conflicts),
    }


def apply_request_json(request: ApplyRequest) -> Json:
    return {
        "changes": [
            {
                "expectModRevision": str(change.expect_mod_revision),
                "upsert": None if change.upsert is None else change.upsert.to_json_camel(),
                "delete": change.delete,
            }
            for change in request.changes
        ]
    }


def fragments_response_json(response: FragmentsResponse) -> Json:
    return {
        "status": response.status.name,
        "header": header_json(response.header),
        "fragments": [
            {"spec": _fragment_json(listed.spec), "signedUrl": listed.signed_url} for listed in response.fragments
        ],
        "nextPageToken": str(response.next_page_token),
    }


# --- Values, read -----------------------------------------------------------------------------------------


class _Fields:
    """The fields of one message, by snake_case name. What is read is taken; `end` refuses the rest."""

    __slots__ = ("_left", "_message")

    def __init__(self, value: object, message: str) -> None:
        if not isinstance(value, Mapping):
            raise ValidationError(f"expected a JSON object for {message}, not {type(value).__name__}")
        self._left = {_snake(key): (key, item) for key, item in value.items()}
        self._message = message

    def take(self, name: str) -> Any:
        """The field's value, None if absent or null."""
        return self._left.pop(name, (name, None))[1]

    def text(self, name: str) -> str:
        value = self.take(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ValidationError(f"expected a string, not {type(value).__name__}", context=name)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValidationError(f"expected true or false, not {type(value).__name__}", context=name)
        return value

    def integer(self, name: str, *, unsigned: bool = False) -> int:
        value = self.take(name)
        if value is None:
            return 0
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and value[:24].removeprefix("-").isdecimal() and value.isascii():
            number = int(value) if len(value) <= 24 else None
        low, high = (0, 2**64 - 1) if unsigned else (-_MAX_INT64 - 1, _MAX_INT64)
        if number is None or not low <= number <= high:
            raise ValidationError(f"expected a 64-bit integer, not {value!r}", context=name)
        return number

    def status(self) -> Status:
        value = self.take("status")
        if value is None:
            return Status.OK
        try:
            return Status(value) if isinstance(value, int) else Status[value]
        except (KeyError, ValueError):
            raise ValidationError(f"invalid status ({value})") from None

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ValidationError(f"expected a list, not {type(value).__name__}", context=name)
        return value

    def end(self) -> None:
        for key, _ in self._left.values():
            raise ValidationError(f'unknown field "{key}" in protocol.{self._message}')


def parse_read_request(value: object) -> tuple[ReadRequest, int]:
    """The request, and the least coordinator revision its answer must reflect."""
    fields = _Fields(value, "ReadRequest")
    fields.take("header")  # set by a proxying broker; nobody proxies over JSON
    request = ReadRequest(
        fields.text("journal"),
        fields.integer("offset"),
        fields.flag("block"),
        fields.flag("do_not_proxy"),
        fields.flag("metadata_only"),
        fields.integer("end_offset") or None,
        fields.integer("begin_mod_time"),
    )
    min_revision = fields.integer("min_etcd_revision")
    fields.end()
    return request, min_revision


def parse_list_request(value: object) -> tuple[ListRequest, bool, int]:
    """The request, whether to watch, and the revision to resume the watch after (0 for none)."""
    fields = _Fields(value, "ListRequest")
    selector = _within("selector", fields.take("selector"))
    watch = fields.flag("watch")
    resume = fields.take("watch_resume")
    fields.end()
    revision = 0 if resume is None else _parse_header(resume).etcd.revision
    return ListRequest(selector), watch, revision


def _within(name: str, value: object) -> LabelSelector:
    try:
        return LabelSelector.from_json(value)
    except ValidationError as error:
        raise error.within(name) from None


def parse_apply_request(value: object) -> ApplyRequest:
    fields = _Fields(value, "ApplyRequest")
    changes = []
    for index, item in enumerate(fields.items("changes")):
        try:
            change = _Fields(item, "ApplyRequest.Change")
            upsert = change.take("upsert")
            changes.append(
                JournalChange(
                    change.integer("expect_mod_revision"),
                    None if upsert is None else JournalSpec.from_json(snake_names(upsert)),
                    change.text("delete"),
                )
            )
            change.end()
        except ValidationError as error:
            raise error.within(f"changes[{index}]") from None
    fields.end()
    return ApplyRequest(tuple(changes))


def parse_fragments_request(value: object) -> FragmentsRequest:
    fields = _Fields(value, "FragmentsRequest")
    fields.take("header")
    ttl = fields.text("signature_ttl") or fields.text("signature_t_t_l")  # the proto's own name is signatureTTL
    request = FragmentsRequest(
        fields.text("journal"),
        fields.integer("begin_mod_time"),
        fields.integer("end_mod_time"),
        fields.integer("next_page_token"),
        fields.integer("page_limit"),
        parse_json_duration(ttl) / 1e9 if ttl else None,
        fields.flag("do_not_proxy"),
    )
    fields.end()
    return request


def _parse_process_id(value: object) -> ProcessId:
    fields = _Fields({} if value is None else value, "ProcessSpec.ID")
    return ProcessId(fields.text("zone"), fields.text("suffix"))


def _parse_route(value: object) -> Route:
    fields = _Fields({} if value is None else value, "Route")
    return Route(
        tuple(_parse_process_id(member) for member in fields.items("members")),
        fields.integer("primary"),
        tuple(str(endpoint) for endpoint in fields.items("endpoints")),
    )


def _parse_header(value: object) -> Header:
    fields = _Fields({} if value is None else value, "Header")
    etcd = _Fields(fields.take("etcd") or {}, "Header.Etcd")
    return Header(
        _parse_process_id(fields.take("process_id")),
        _parse_route(fields.take("route")),
        EtcdHeader(
            etcd.integer("cluster_id", unsigned=True),
            etcd.integer("member_id", unsigned=True),
            etcd.integer("revision"),
            etcd.integer("raft_term", unsigned=True),
        ),
    )


def _parse_fragment(value: object) -> Fragment:
    fields = _Fields(value, "Fragment")
    digest = _Fields(fields.take("sum") or {}, "SHA1Sum")
    codec = fields.take("compression_codec") or 0
    try:
        return Fragment(
            fields.text("journal"),
            fields.integer("begin"),
            fields.integer("end"),
            digest.integer("part1", unsigned=True).to_bytes(8, "big")
            + digest.integer("part2", unsigned=True).to_bytes(8, "big")
            + digest.integer("part3").to_bytes(4, "big"),
            CompressionCodec(codec) if isinstance(codec, int) else CompressionCodec[codec],
            fields.text("backing_store"),
            fields.integer("mod_time"),
            fields.text("path_postfix"),
        )
    except (KeyError, OverflowError) as error:
        raise ValidationError(f"not a Fragment: {error}") from None


def _maybe_fragment(value: object) -> Fragment | None:
    return None if value is None else _parse_fragment(value)


def parse_read_response(value: object) -> ReadResponse:
    fields = _Fields(value, "ReadResponse")
    header = fields.take("header")
    content = fields.text("content")
    try:
        decoded = b64decode(content, validate=True) if content else None
    except Base64Error as error:
        raise ValidationError(str(error), context="content") from None
    return ReadResponse(
        fields.status(),
        None if header is None else _parse_header(header),
        fields.integer("offset"),
        fields.integer("write_head"),
        _maybe_fragment(fields.take("fragment")),
        fields.text("fragment_url"),
        decoded,
    )


def parse_listed_journal(value: object) -> ListedJournal:
    fields = _Fields(value, "ListResponse.Journal")
    return ListedJournal(
        JournalSpec.from_json(snake_names(fields.take("spec"))),
        fields.integer("mod_revision"),
        _parse_route(fields.take("route")),
        fields.integer("create_revision"),
    )


def parse_listing(value: object) -> ListResponse:
    """One ListResponse; those of a long listing follow each other, the first with status and header."""
    fields = _Fields(value, "ListResponse")
    return ListResponse(
        fields.status(),
        _parse_header(fields.take("header")),
        tuple(parse_listed_journal(item) for item in fields.items("journals")),
    )


def parse_append_response(value: object) -> AppendResponse:
    fields = _Fields(value, "AppendResponse")
    registers = fields.take("registers")
    return AppendResponse(
        fields.status(),
        _parse_header(fields.take("header")),
        _maybe_fragment(fields.take("commit")),
        None if registers is None else LabelSet.from_json(registers),
        fields.integer("total_chunks"),
        fields.integer("delayed_chunks"),
        fields.text("store_health_error"),
    )


def parse_apply_response(value: object) -> ApplyResponse:
    fields = _Fields(value, "ApplyResponse")
    return ApplyResponse(
        fields.status(),
        _parse_header(fields.take("header")),
        tuple(str(name) for name in fields.items("conflicts")),
    )


def parse_fragments_response(value: object) -> FragmentsResponse:
    fields = _Fields(value, "FragmentsResponse")
    listed = []
    for item in fields.items("fragments"):
        one = _Fields(item, "FragmentsResponse._Fragment")
        listed.append(ListedFragment(_parse_fragment(one.take("spec")), one.text("signed_url")))
    return FragmentsResponse(
        fields.status(), _parse_header(fields.take("header")), tuple(listed), fields.integer("next_page_token")
    )

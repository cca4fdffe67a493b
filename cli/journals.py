"""What the `journals` commands do (spec/cli.md §4.1 to §4.7)."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from broadsheet.cli.client import Broker, BrokerFailed
from broadsheet.cli.logs import CommandFailed, log
from broadsheet.cli.tables import format_age, format_size, format_table
from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.durations import format_json_duration, parse_duration
from broadsheet.engine.journal.spec_tree import flatten, format_tree, hoist, parse_tree
from broadsheet.engine.labels import parse_selector
from broadsheet.engine.service import ApplyRequest, ReadResponse
from broadsheet.facades.http.json_codec import (
    Json,
    apply_request_json,
    parse_append_response,
    parse_apply_response,
    parse_fragments_response,
    parse_listed_journal,
    parse_read_response,
    snake_names,
)

__all__ = ["append_content", "apply_specs", "list_fragments", "list_journals", "read_content"]

READ_AHEAD_BYTES = 8 << 20
"""Input that is read before an append begins. A pipe may be slower than a broker bears (its minimum append rate)."""

CHUNK_BYTES = 1 << 20


@contextmanager
def _step(message: str) -> Iterator[None]:
    """Failures of the broker within become `CommandFailed` with this message."""
    try:
        yield
    except BrokerFailed as error:
        hint = {"hint": error.hint} if error.hint else {}
        raise CommandFailed(message, err=str(error), **hint) from None
    except ValidationError as error:
        raise CommandFailed(message, err=str(error)) from None


def _selector_json(text: str) -> Json:
    try:
        return parse_selector(text).to_json()
    except ValidationError as error:
        raise CommandFailed("failed to parse label selector", err=str(error)) from None


def _broker(address: str) -> Broker:
    with _step("invalid --broker.address"):
        return Broker(address)


def _names(broker: Broker, selector: str | None, journal: str | None) -> list[str]:
    """The journals a command is about. One that is named is not looked up."""
    if journal and selector:
        raise CommandFailed("give either --selector or --journal, not both")
    if journal:
        return [journal]
    if selector is None:
        raise CommandFailed("give --selector or --journal")
    with _step("failed to list journals"):
        listing = broker.list(_selector_json(selector))
    return [listed["spec"]["name"] for listed in listing["journals"]]


@contextmanager
def _standard_output() -> Iterator[IO[bytes]]:
    """stdout for bytes. A reader that has seen enough (`| head`) is no failure."""
    out = sys.stdout.buffer
    try:
        yield out
        out.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str) -> None:
    with _standard_output() as out:
        out.write(text.encode("utf-8"))


# --- list -------------------------------------------------------------------------------------------------


def list_journals(
    address: str,
    *,
    selector: str,
    style: str,
    labels: tuple[str, ...],
    primary: bool,
    replicas: bool,
    rf: bool,
    stores: bool,
) -> None:
    with _step("failed to list journals"):
        listing = _broker(address).list(_selector_json(selector))
    if style == "json":
        text = json.dumps(snake_names(listing), ensure_ascii=False, separators=(",", ":"))
        _print(text + "\n" if sys.stdout.isatty() else text)
        return
    journals = [parse_listed_journal(listed) for listed in listing["journals"]]
    if style == "yaml":
        _print(format_tree(hoist((journal.spec, journal.mod_revision) for journal in journals)))
        return
    header = ["Name"]
    header += [name for name, wanted in (("RF", rf), ("Primary", primary), ("Replicas", replicas)) if wanted]
    header += ["Stores"] if stores else []
    header += labels
    rows = []
    for journal in journals:
        spec, route = journal.spec, journal.route
        row = [spec.name]
        if rf:
            row.append(str(spec.replication))
        if primary:
            cell = route.members[route.primary].suffix if route.primary >= 0 else "<none>"
            row.append(cell + (" <S>" if spec.suspend is not None and spec.suspend.level else ""))
        if replicas:
            others = [member.suffix for index, member in enumerate(route.members) if index != route.primary]
            row.append(",".join(others))
        if stores:
            row.append(spec.fragment.stores[0] if spec.fragment.stores else "<none>")
        row.extend(",".join(spec.labels.values(label)) or "<none>" for label in labels)
        rows.append(row)
    _print(format_table(header, rows))


# --- apply ------------------------------------------------------------------------------------------------


def apply_specs(address: str, *, specs: str, max_txn_size: int) -> None:
    try:
        with _input(specs) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed("failed to read YAML input", err=str(error)) from None
    try:
        tree = parse_tree(text)
    except ValidationError as error:
        print(error, file=sys.stderr)
        raise CommandFailed("failed to decode journal tree", err="YAML decode failed") from None
    with _step("journal tree failed to validate"):
        changes = flatten(tree)
    with _step("failed to validate ApplyRequest"):
        ApplyRequest(tuple(changes)).validate()
    size = max_txn_size or max(len(changes), 1)
    broker = _broker(address)
    for begin in range(0, len(changes), size):
        request = ApplyRequest(tuple(changes[begin : begin + size]))
        with _step("failed to apply journals"):
            response = parse_apply_response(broker.apply(apply_request_json(request)))
        log.info("successfully applied", extra={"fields": {"revision": response.header.etcd.revision}})


@contextmanager
def _input(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


# --- append -----------------------------------------------------------------------------------------------


def append_content(address: str, *, selector: str | None, journal: str | None, path: str) -> None:
    broker = _broker(address)
    names = _names(broker, selector, journal)
    if not names:
        raise CommandFailed("mapping to journal", err="empty ListResponse")
    name = random.choice(names)
    try:
        with _input(path) as file, _step("appending to journal"):
            response = parse_append_response(broker.append(name, _content(file)))
    except OSError as error:  # of the input; the append was rolled back
        raise CommandFailed("failed to read input", err=str(error)) from None
    commit = response.commit
    assert commit is not None
    log.info("appended", extra={"fields": {"journal": name, "begin": commit.begin, "end": commit.end}})


def _content(file: IO[bytes]) -> bytes | Iterable[bytes]:
    begin = _read_up_to(file, READ_AHEAD_BYTES)
    return begin if len(begin) < READ_AHEAD_BYTES else _chain(begin, file)


def _read_up_to(file: IO[bytes], length: int) -> bytes:
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _chain(begin: bytes, file: IO[bytes]) -> Iterator[bytes]:
    yield begin
    while part := file.read(CHUNK_BYTES):
        yield part


# --- read -------------------------------------------------------------------------------------------------


def read_content(
    address: str,
    *,
    selector: str | None,
    journal: str | None,
    offset: int | None,
    block: bool,
    tail: bool,
    path: str,
) -> None:
    begin = offset if offset is not None else -1 if tail else 0
    broker = _broker(address)
    names = _names(broker, selector, journal)
    if not names:
        raise CommandFailed("no journals match selector", selector=selector)
    try:
        with _standard_output() if path == "-" else open(path, "wb") as out:
            if block and len(names) > 1:
                _Merge(broker, out, begin).run(names)
            else:
                for name in names:
                    for response in _read(broker, name, begin, block):
                        if response.content is not None:
                            out.write(response.content)
                            out.flush()
    except BrokenPipeError:
        raise  # handled where stdout is
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise CommandFailed("failed to write output", err=str(error)) from None


def _read(broker: Broker, name: str, offset: int, block: bool) -> Iterator[ReadResponse]:
    """Responses of one journal that are OK. Its end ends them; any other status fails."""
    log.info("read started", extra={"fields": {"journal": name, "offset": offset}})
    request = {"journal": name, "offset": str(offset), "block": block}
    ended = "broker terminated RPC"
    with _step("failed to read journal"):
        for message in broker.read(request):
            response = parse_read_response(message)
            if response.status.name == "OFFSET_NOT_YET_AVAILABLE" and not block:
                return
            if response.status:
                ended = response.status.name
                break
            if response.fragment is not None:
                fields = {
                    "journal": name,
                    "offset": response.offset,
                    "fragment.Begin": response.fragment.begin,
                    "fragment.End": response.fragment.end,
                    "fragment.URL": response.fragment_url,
                }
                log.debug("read is ready", extra={"fields": fields})
            yield response
    raise CommandFailed("failed to read journal", err=ended, journal=name)


class _Merge:
    """Blocking reads of several journals into one output, in units of whole fragment spans, so that what was appended
    together stays together. A thread each: the reads are endless, and the process ends with the first that fails."""

    def __init__(self, broker: Broker, out: IO[bytes], offset: int) -> None:
        self._broker = broker
        self._out = out
        self._offset = offset
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._failure: Exception | None = None

    def run(self, names: list[str]) -> None:
        for name in names:
            threading.Thread(target=self._guard, args=(name,), name=f"read {name}", daemon=True).start()
        self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _guard(self, name: str) -> None:
        try:
            self._copy(name)
        except Exception as error:  # carried to the main thread, which raises it
            self._failure = self._failure or error
            self._failed.set()

    def _copy(self, name: str) -> None:
        end = 0
        span: list[Any] = []
        for response in _read(self._broker, name, self._offset, True):
            if response.fragment is not None:
                end = response.fragment.end
            if response.content is not None:
                span.append(response.content)
                if response.offset + len(response.content) >= end:
                    with self._lock:
                        for content in span:
                            self._out.write(content)
                        self._out.flush()
                    span = []


# --- fragments --------------------------------------------------------------------------------------------


def list_fragments(
    address: str, *, selector: str, journal: str | None, style: str, begin: int, end: int, url_ttl: str
) -> None:
    try:
        ttl_ns = parse_duration(url_ttl)
    except ValidationError as error:
        raise CommandFailed("invalid --url-ttl", err=str(error)) from None
    rows = []
    broker = _broker(address)
    for name in _names(broker, None if journal else selector, journal):
        request: Json = {"journal": name, "beginModTime": str(begin), "endModTime": str(end)}
        if ttl_ns:
            request["signatureTTL"] = format_json_duration(ttl_ns)
        while True:
            with _step("failed to list fragments"):
                response = parse_fragments_response(broker.fragments(request))
            for listed in response.fragments:
                fragment = listed.spec
                if style == "json":
                    _print(json.dumps(_plain_fragment(listed.spec, listed.signed_url)) + "\n")
                    continue
                age = format_age(time.time() - fragment.mod_time) if fragment.mod_time else ""
                row = [
                    fragment.journal,
                    str(fragment.begin),
                    format_size(fragment.length),
                    age,
                    fragment.sum.hex()[:12] + "...",
                    fragment.compression_codec.name,
                ]
                rows.append([*row, listed.signed_url] if ttl_ns else row)
            if not response.next_page_token:
                break
            request["nextPageToken"] = str(response.next_page_token)
    if style == "table":
        header = ["Journal", "Offset", "Length", "Persisted", "SHA1", "Compression"]
        _print(format_table([*header, "URL"] if ttl_ns else header, rows))


def _plain_fragment(fragment: Any, url: str) -> Json:
    """The struct encoding of gazctl: numbers are numbers, zero fields are left out."""
    digest = fragment.sum
    parts = {
        "part1": int.from_bytes(digest[0:8], "big"),
        "part2": int.from_bytes(digest[8:16], "big"),
        "part3": int.from_bytes(digest[16:20], "big"),
    }
    spec = {
        "journal": fragment.journal,
        "begin": fragment.begin,
        "end": fragment.end,
        "sum": {name: part for name, part in parts.items() if part},
        "compression_codec": int(fragment.compression_codec),
        "backing_store": fragment.backing_store,
        "mod_time": fragment.mod_time,
        "path_postfix": fragment.path_postfix,
    }
    line: Json = {"spec": {name: value for name, value in spec.items() if value or name == "sum"}}
    if url:
        line["signed_url"] = url
    return line



"""`broadsheet journals …` against a running broker (spec/cli.md §4.1 to §4.7)."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

SPECS = """\
name: %s/
replication: 1
labels:
- name: content-type
  value: application/x-ndjson
fragment:
  length: 131072
  compression_codec: SNAPPY
  stores:
  - file:///
  refresh_interval: 1m0s
children:
- name: %s/one
  labels:
  - name: region
    value: eu
- name: %s/two
"""


def specs(name: str) -> bytes:
    return (SPECS % (name, name, name)).encode()


@pytest.fixture
def made(journals: Any, request: pytest.FixtureRequest) -> str:
    """Name of a folder with two new journals, `one` (region=eu) and `two`."""
    name = "t" + hashlib.sha1(request.node.name.encode()).hexdigest()[:10]
    done = journals("apply", input=specs(name))
    assert done.status == 0, done.err
    return name


# --- apply ---


def test_apply_tells_the_revision(journals: Any, tmp_path: Path) -> None:
    path = tmp_path / "specs.yaml"
    path.write_bytes(specs("applied"))
    done = journals("apply", "--specs", str(path))
    assert (done.status, done.out) == (0, "")
    assert re.fullmatch(
        r'time="\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ" level=info msg="successfully applied" revision=\d+', done.last_line
    )
    again = journals("apply", "--specs", str(path))
    assert (again.status, again.out) == (1, "")
    assert 'level=fatal msg="failed to apply journals" err=ETCD_TRANSACTION_FAILED' in again.last_line
    assert "applied/one" in again.last_line


def test_apply_lists_edit_round_trip(journals: Any, made: str) -> None:
    text = journals("list", "-l", f"prefix={made}/", "-o", "yaml").out
    assert journals("apply", input=text.replace("SNAPPY", "NONE").encode()).status == 0
    changed = journals("list", "-l", f"prefix={made}/", "-o", "yaml").out
    assert "compression_codec: NONE" in changed
    deleted = re.sub(r"  revision: (\d+)", r"  revision: \1\n  delete: true", changed)
    assert journals("apply", input=deleted.encode()).status == 0
    assert made not in journals("list").out


def test_apply_in_batches(journals: Any) -> None:
    done = journals("apply", "--max-txn-size", "1", input=specs("batched"))
    assert done.err.count("successfully applied") == 2


@pytest.mark.parametrize(
    ("text", "message", "before"),
    [
        ("name: ex/abc\nbogus: 1\n", 'msg="failed to decode journal tree" err="YAML decode failed"', "bogus not found"),
        ("{", 'msg="failed to decode journal tree" err="YAML decode failed"', "yaml: line"),
        ("name: abc\n", "Name: invalid length (3; expected 4 <= length <= 512)", ""),
        ("name: ex/abc\n", 'msg="failed to validate ApplyRequest"', ""),
        ("name: ex/\n", 'msg="journal tree failed to validate" err="expected one or more Children"', ""),
    ],
)
def test_bad_specs(journals: Any, text: str, message: str, before: str) -> None:
    done = journals("apply", input=text.encode())
    assert done.status == 1
    assert message in done.last_line
    assert "level=fatal" in done.last_line
    assert before in done.err


def test_specs_that_cannot_be_read(journals: Any, tmp_path: Path) -> None:
    done = journals("apply", "--specs", str(tmp_path / "none"))
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert 'msg="failed to read YAML input"' in done.err


# --- list ---


def test_list_table(journals: Any, made: str, broker: Any) -> None:
    done = journals(
        "list", "-l", f"name={made}/one", "-p", "-r", "--rf", "--stores", "-L", "region", "-L", "content-type"
    )
    lines = done.out.splitlines()
    names = [cell.strip() for cell in lines[1].strip("│").split("│")]
    cells = [cell.strip() for cell in lines[3].strip("│").split("│")]
    assert names == ["NAME", "RF", "PRIMARY", "REPLICAS", "STORES", "REGION", "CONTENT-TYPE"]
    suffix = broker.until("starting broker")["id"]
    assert cells == [f"{made}/one", "1", suffix, "", "file:///", "eu", "application/x-ndjson"]
    assert (lines[0][0], lines[0][-1], lines[2][0], lines[4][-1]) == ("┌", "┐", "├", "┘")
    assert len({len(line) for line in lines}) == 1


def test_list_nothing(journals: Any) -> None:
    done = journals("list", "-l", "name=nothing/here")
    assert (done.status, done.out.splitlines()[1]) == (0, "│ NAME │")
    assert journals("list", "-l", "name=nothing/here", "-o", "yaml").status == 0


def test_list_yaml(journals: Any, made: str) -> None:
    text = journals("list", "-l", f"prefix={made}/", "-o", "yaml").out
    revision = re.findall(r"revision: (\d+)", text)[0]
    expected = specs(made).decode().replace("    value: eu\n", f"    value: eu\n  revision: {revision}\n")
    assert text == expected + f"  revision: {revision}\n"


def test_list_json_is_one_object(journals: Any, made: str) -> None:
    out = journals("list", "-l", f"prefix={made}/", "-o", "json").out
    assert not out.endswith("\n")
    listing = json.loads(out)
    assert list(listing) == ["status", "header", "journals"]
    assert list(listing["header"]) == ["process_id", "route", "etcd"]
    [one, two] = listing["journals"]
    assert list(one) == ["spec", "mod_revision", "route", "create_revision"]
    assert one["spec"]["fragment"]["refresh_interval"] == "60s"
    assert two["spec"]["name"] == f"{made}/two"
    assert "endpoints" in one["route"]


def test_list_many(journals: Any) -> None:
    children = "".join(f"- name: many/{number:04}\n" for number in range(300))
    text = specs("many").decode().partition("children:")[0] + "children:\n" + children
    assert journals("apply", input=text.encode()).status == 0
    assert journals("list", "-l", "prefix=many/").out.count("many/") == 300


@pytest.mark.parametrize("command", ["list", "read", "append", "fragments"])
def test_bad_selector(journals: Any, command: str) -> None:
    done = journals(command, "-l", "a in ((")
    assert (done.status, done.err.count("\n")) == (1, 1)
    expected = 'msg="failed to parse label selector" err="could not match \\"a in ((\\" to a label selector expression"'
    assert expected in done.err


# --- append and read ---


def test_append_and_read(journals: Any, made: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 100
    path = tmp_path / "content"
    path.write_bytes(content)
    done = journals("append", "-l", f"name={made}/one", "-i", str(path))
    assert f"msg=appended begin=0 end=25600 journal={made}/one" in done.last_line
    assert journals("append", "--journal", f"{made}/one", input=b"more").status == 0
    assert journals("read", "-l", f"name={made}/one").raw == content + b"more"
    assert journals("read", "--journal", f"{made}/one", "--offset", "25598").raw == content[-2:] + b"more"
    assert journals("read", "--journal", f"{made}/one", "--tail").raw == b""
    out = tmp_path / "out"
    assert journals("read", "--journal", f"{made}/one", "-o", str(out)).raw == b""
    assert out.read_bytes() == content + b"more"


def test_big_append_is_one(journals: Any, made: str, broker: Any) -> None:
    content = b"0123456789abcdef" * (1 << 20)
    assert journals("append", "--journal", f"{made}/one", input=content).status == 0
    head = httpx.head(f"{broker.address}/{made}/one", params={"offset": 0}).headers
    assert head["X-Write-Head"] == str(len(content))
    assert journals("read", "--journal", f"{made}/one").raw == content


def test_read_of_several(journals: Any, made: str) -> None:
    journals("append", "--journal", f"{made}/one", input=b"one\n")
    journals("append", "--journal", f"{made}/two", input=b"two\n")
    assert journals("read", "-l", f"prefix={made}/").raw == b"one\ntwo\n"


@pytest.mark.parametrize("selected", ["one", "both"])
def test_blocking_read(journals: Any, popen: Any, broker: Any, made: str, selected: str) -> None:
    which = ["--journal", f"{made}/one"] if selected == "one" else ["-l", f"prefix={made}/"]
    reader = popen("journals", "read", *which, "--block", env={"BROKER_ADDRESS": broker.address})
    for number in range(3):
        journals("append", "--journal", f"{made}/one", input=b"line %d\n" % number)
        assert reader.stdout.readline() == b"line %d\n" % number
    if selected == "both":
        journals("append", "--journal", f"{made}/two", input=b"two\n")
        assert reader.stdout.readline() == b"two\n"
    reader.send_signal(signal.SIGINT)
    assert reader.wait(10) is not None


def test_reader_that_has_seen_enough_is_quiet(journals: Any, popen: Any, broker: Any, made: str) -> None:
    journals("append", "--journal", f"{made}/one", input=b"0123456789abcdef" * (1 << 18))
    reader = popen("journals", "read", "--journal", f"{made}/one", env={"BROKER_ADDRESS": broker.address})
    assert reader.stdout.read(10) == b"0123456789"
    reader.stdout.close()
    assert reader.wait(10) == 0
    assert [line for line in reader.stderr.read().splitlines() if b"read started" not in line] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["read", "--journal", "ex/none"], "err=JOURNAL_NOT_FOUND"),
        (["read", "--journal", "x"], 'err="Journal: invalid length (1; expected 4 <= length <= 512)"'),
        (["read", "-l", "name=ex/none"], 'msg="no journals match selector"'),
        (["read"], 'msg="give --selector or --journal"'),
        (["append", "--journal", "ex/none"], 'msg="appending to journal" err=JOURNAL_NOT_FOUND'),
        (["append", "-l", "name=ex/none"], 'msg="mapping to journal" err="empty ListResponse"'),
        (["append", "--journal", "ex/none", "-l", "name=ex/none"], "not both"),
        (["append", "--journal", "ex/none", "-i", "/nonexistent"], "failed to read input"),
        (["fragments", "--journal", "ex/none"], "err=JOURNAL_NOT_FOUND"),
        (["fragments", "--url-ttl", "soon"], "invalid --url-ttl"),
    ],
)
def test_failures_are_one_line(journals: Any, arguments: list[str], message: str) -> None:
    done = journals(*arguments, input=b"x")
    lines = [line for line in done.err.splitlines() if "read started" not in line]
    assert (done.status, len(lines)) == (1, 1), done.err
    assert "level=fatal" in lines[0]
    assert message in lines[0]


# --- fragments ---


def test_fragments(journals: Any, made: str) -> None:
    journals("append", "--journal", f"{made}/one", input=b"hello")
    done = journals("fragments", "-l", f"prefix={made}/")
    assert "│ JOURNAL".replace(" ", "") in done.out.replace(" ", "")
    assert re.search(rf"│ {made}/one\s+│ 0\s+│ 5 B\s+│\s+│ aaf4c61ddcc5... │ SNAPPY\s+│", done.out)
    line = json.loads(journals("fragments", "--journal", f"{made}/one", "-o", "json").out)
    assert line == {
        "spec": {
            "journal": f"{made}/one",
            "end": 5,
            "sum": {"part1": 12318688712325458082, "part2": 15762279902843776217, "part3": 2930328397},
            "compression_codec": 4,
        }
    }


# --- brokers that are none ---


def test_no_broker(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = run("journals", "list", "--broker.address", f"http://127.0.0.1:{port}")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert f"cannot reach http://127.0.0.1:{port}" in done.err
    assert "hint=" in done.err


@pytest.mark.parametrize("address", ["nonsense", "ftp://x", "http://[", "http://127.0.0.1:99999"])
def test_bad_address(run: Any, address: str) -> None:
    done = run("journals", "list", "--broker.address", address)
    assert (done.status, done.err.count("\n")) == (1, 1), done.err


# --- options ---


def test_options_before_or_after_the_command(run: Any, broker: Any) -> None:
    environment = {"BROKER_ADDRESS": "http://127.0.0.1:1"}
    before = run("journals", "--broker.address", broker.address, "list", env=environment)
    after = run("journals", "list", "--broker.address", broker.address, env=environment)
    assert (before.status, after.status) == (0, 0)  # a flag beats the environment


def test_log_level_and_format(journals: Any) -> None:
    done = journals("apply", "--log.format", "json", input=specs("logged"))
    line = json.loads(done.err)
    assert (line["level"], line["msg"], type(line["revision"])) == ("info", "successfully applied", int)
    assert journals("apply", "--log.level", "warn", input=specs("quiet")).err == ""
    done = journals("apply", "--log.format", "color", input=specs("colored"))
    assert re.match(r"\x1b\[36mINFO\x1b\[0m\[000\d\] successfully applied {26}\x1b\[36mrevision\x1b\[0m=\d+$", done.err)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["serve", "--help"], ["journals", "--help"], ["journals", "read", "-h"]]
)
def test_help(run: Any, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Usage: ")


@pytest.mark.parametrize("arguments", [["bogus"], ["serve", "--bogus"], ["journals", "list", "-o", "bogus"]])
def test_wrong_usage(run: Any, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert "Usage: " in done.err

"""The JSON gateway against spec/http-gateway.md §7, and our own routes below /v1/."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any
from urllib.parse import quote

import pytest

from broadsheet.engine.errors import CorruptData, OutcomeUnknown, Status, ValidationError
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.labels import LabelSet, parse_selector
from broadsheet.engine.service import (
    AppendRequest,
    AppendResponse,
    ApplyResponse,
    EtcdHeader,
    FragmentsResponse,
    Header,
    ListedFragment,
    ProcessId,
    ReadResponse,
    Route,
)
from broadsheet.facades.http import json_codec

HEADER = {
    "processId": {"zone": "local", "suffix": "decent-bluebird"},
    "route": {
        "members": [{"zone": "local", "suffix": "decent-bluebird"}],
        "primary": 0,
        "endpoints": ["http://127.0.0.1:9103"],
    },
    "etcd": {"clusterId": "11", "memberId": "12", "revision": "2", "raftTerm": "2"},
}
EMPTY_HEADER = {
    "processId": {"zone": "", "suffix": ""},
    "route": {"members": [], "primary": 0, "endpoints": []},
    "etcd": {"clusterId": "0", "memberId": "0", "revision": "0", "raftTerm": "0"},
}


async def post(server: Any, path: str, value: Any) -> Any:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return await server.request("POST", f"/v1/journals/{path}", body)


def lines(reply: Any) -> list[Any]:
    return [json.loads(line) for line in reply.body.splitlines()]


# --- read ---


async def test_read_messages(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello"
    reply = await post(server, "read", {"journal": "ex/aaaa", "offset": "2"})
    assert reply.status_line == "HTTP/1.1 200 OK"
    assert reply.header_lines == [
        "Content-Type: application/json",
        "Grpc-Metadata-Content-Type: application/grpc",
        "Transfer-Encoding: chunked",
    ]
    assert reply.body.startswith(b'{"result":{"status":"OK","header":{"processId":{"zone":"local",')
    assert lines(reply) == [
        {
            "result": {
                "status": "OK",
                "header": HEADER,
                "offset": "2",
                "writeHead": "5",
                "fragment": {
                    "journal": "ex/aaaa",
                    "begin": "0",
                    "end": "5",
                    "sum": {"part1": "12318688712325458082", "part2": "15762279902843776217", "part3": 2930328397},
                    "compressionCodec": "SNAPPY",
                    "backingStore": "",
                    "modTime": "0",
                    "pathPostfix": "",
                },
                "fragmentUrl": "",
                "content": None,
            }
        },
        {
            "result": {
                "status": "OK",
                "header": None,
                "offset": "2",
                "writeHead": "0",
                "fragment": None,
                "fragmentUrl": "",
                "content": "bGxv",
            }
        },
        {
            "result": {
                "status": "OFFSET_NOT_YET_AVAILABLE",
                "header": None,
                "offset": "5",
                "writeHead": "5",
                "fragment": None,
                "fragmentUrl": "",
                "content": None,
            }
        },
    ]


async def test_read_content_is_cut(server: Any, fake: Any) -> None:
    content = bytes(range(256)) * 4096
    fake.journals["ex/aaaa"].data += content
    results = [line["result"] for line in lines(await post(server, "read", {"journal": "ex/aaaa"}))]
    pieces = [(int(r["offset"]), b64decode(r["content"])) for r in results if r["content"] is not None]
    assert len(pieces) > 1
    for offset, piece in pieces:
        assert content[offset : offset + len(piece)] == piece
    assert b"".join(piece for _, piece in pieces) == content


async def test_read_takes_both_spellings(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello"
    for name in ("metadataOnly", "metadata_only"):
        reply = await post(server, "read", {"journal": "ex/aaaa", name: True, "offset": 1})
        assert len(lines(reply)) == 1


async def test_blocked_read_streams_and_ends_with_the_client(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("POST", "/v1/journals/read", b'{"journal":"ex/aaaa","block":true}')
    await fake.until(lambda: fake.reading == 1)
    assert client.buffer == b""
    await server.request("PUT", "/ex/aaaa", b"one")
    reply = await client.head()
    await client.chunk(reply)
    assert json.loads(await client.chunk(reply))["result"]["content"] == "b25l"
    await client.stream.aclose()
    await fake.until(lambda: fake.reading == 0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"journal": "a"}, "Journal: invalid length (1; expected 4 <= length <= 512)"),
        ({}, "Journal: invalid length (0; expected 4 <= length <= 512)"),
        ({"journal": "ex/aaaa", "offset": "-2"}, "invalid Offset (-2; expected -1 <= Offset <= MaxInt64)"),
    ],
)
async def test_invalid_read(server: Any, request_: Any, message: str) -> None:
    reply = await post(server, "read", request_)
    assert reply.status_line == "HTTP/1.1 500 Internal Server Error"
    assert json.loads(reply.body) == {
        "error": {
            "grpcCode": 2,
            "httpCode": 500,
            "message": message,
            "httpStatus": "Internal Server Error",
            "details": [],
        }
    }
    assert b"<" not in reply.body


async def test_read_that_fails_later(server: Any, fake: Any) -> None:
    fragment = Fragment("ex/aaaa", 0, 9, bytes(20), CompressionCodec.NONE)
    fake.journals["ex/aaaa"].script = [
        ReadResponse(Status.OK, None, 0, 9, fragment),
        CorruptData("bad", path="/x"),
    ]
    reply = await post(server, "read", {"journal": "ex/aaaa"})
    assert reply.status == 200
    assert lines(reply)[1]["error"]["grpcCode"] == 15


# --- bodies ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{bogus", "invalid character 'b' looking for beginning of object key string"),
        (b"bogus", "invalid character 'b' looking for beginning of value"),
        (b"{", "unexpected EOF"),
        (b'{"journal": "ex/aaaa"', "unexpected EOF"),
        (b'{"a" 1}', "invalid character '1' after object key"),
        (b'{"a": 1 "b"}', "invalid character '\"' after object key:value pair"),
        (b"{} x", "invalid character 'x' after top-level value"),
        (b"\xff", "invalid UTF-8 at byte 0"),
        (b"[]", "expected a JSON object, not list"),
        (b"[" * 100_000, "exceeded max depth"),
        (b'{"bogus": 1}', 'unknown field "bogus" in protocol.ReadRequest'),
        (b'{"journal": 1}', "journal: expected a string, not int"),
        (b'{"offset": 1.5}', "offset: expected a 64-bit integer, not 1.5"),
        (b'{"offset": true}', "offset: expected a 64-bit integer, not True"),
        (b'{"offset": "9223372036854775808"}', "offset: expected a 64-bit integer, not '9223372036854775808'"),
        (b'{"block": "yes"}', "block: expected true or false, not str"),
    ],
)
async def test_bodies_that_cannot_be_read(server: Any, body: bytes, message: str) -> None:
    reply = await post(server, "read", body)
    assert (reply.status, json.loads(reply.body)) == (400, {"code": 3, "message": message, "details": []})
    assert reply.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/v1/journals/list"),
        ("PUT", "/v1/journals/read"),
        ("POST", "/v1/bogus"),
        ("POST", "/v1/journals/list/x"),
        ("GET", "/v1/"),
    ],
)
async def test_not_implemented(server: Any, method: str, target: str) -> None:
    reply = await server.request(method, target, b"{}" if method != "GET" else None)
    assert (reply.status, reply.body) == (501, b'{"code":12,"message":"Not Implemented","details":[]}')


async def test_options_and_cors(server: Any) -> None:
    reply = await server.request("OPTIONS", "/v1/journals/list", headers="Origin: http://evil.example\r\n")
    assert (reply.status, reply.body) == (200, b"")
    assert "Access-Control-Allow-Origin" not in reply.headers
    for method, body in (("OPTIONS", None), ("POST", b"{}")):
        reply = await server.request(method, "/v1/journals/list", body, headers="Origin: http://ok.example\r\n")
        assert reply.status == 200
        assert reply.headers["Access-Control-Allow-Origin"] == "http://ok.example"
        assert reply.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
        assert reply.headers["Access-Control-Allow-Headers"].endswith("Pragma, Authorization")


# --- list ---


@pytest.mark.parametrize("body", [b"", b"{}", b'{"selector":null}'])
async def test_list_everything(server: Any, fake: Any, body: bytes) -> None:
    [message] = [line["result"] for line in lines(await post(server, "list", body))]
    assert message["header"] == {**HEADER, "route": {"members": [], "primary": -1, "endpoints": []}}
    assert message["journals"] == [
        {
            "spec": {
                "name": "ex/aaaa",
                "replication": 1,
                "labels": {"labels": []},
                "fragment": {
                    "length": "1048576",
                    "compressionCodec": "SNAPPY",
                    "stores": ["file:///"],
                    "refreshInterval": "60s",
                    "retention": "0s",
                    "flushInterval": "0s",
                    "pathPostfixTemplate": "",
                },
                "flags": 0,
                "maxAppendRate": "0",
                "suspend": None,
            },
            "modRevision": "2",
            "route": HEADER["route"],
            "createRevision": "2",
        }
    ]


async def test_long_list_is_in_messages_of_25(server: Any, fake: Any) -> None:
    for number in range(59):
        fake.make(f"many/{number:03}")
    messages = [line["result"] for line in lines(await post(server, "list", {}))]
    assert [len(message["journals"]) for message in messages] == [25, 25, 10]
    assert [message["header"] == EMPTY_HEADER for message in messages] == [False, True, True]


async def test_list_selects(server: Any, fake: Any) -> None:
    fake.make("other/bbbb")
    selector = parse_selector("prefix=other/").to_json()
    [message] = [line["result"] for line in lines(await post(server, "list", {"selector": selector}))]
    assert [journal["spec"]["name"] for journal in message["journals"]] == ["other/bbbb"]
    selector = parse_selector("name=nothing/here").to_json()
    [message] = [line["result"] for line in lines(await post(server, "list", {"selector": selector}))]
    assert message["journals"] == []


async def test_invalid_selector(server: Any) -> None:
    selector = {"include": {"labels": [{"name": "prefix", "value": "x"}]}}
    reply = await post(server, "list", {"selector": selector})
    assert (reply.status, json.loads(reply.body)["error"]["message"]) == (
        500,
        "Selector.Include.Labels[\"prefix\"]: expected trailing '/' (x)",
    )
    reply = await post(server, "list", {"selector": {"bogus": 1}})
    assert reply.status == 400


async def test_watch_sends_snapshots(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request("POST", "/v1/journals/list", b'{"watch":true}')
    reply = await client.head()

    async def snapshot() -> list[str]:
        message = json.loads(await client.chunk(reply))["result"]
        assert json.loads(await client.chunk(reply))["result"] == {
            "status": "OK",
            "header": EMPTY_HEADER,
            "journals": [],
        }
        return [journal["spec"]["name"] for journal in message["journals"]]

    assert await snapshot() == ["ex/aaaa"]
    fake.make("ex/bbbb")
    await fake.notify()
    assert await snapshot() == ["ex/aaaa", "ex/bbbb"]
    await post(server, "apply", {"changes": [{"delete": "ex/aaaa", "expectModRevision": -1}]})
    assert await snapshot() == ["ex/bbbb"]
    await fake.drain()
    assert await client.chunk(reply) == b""


# --- apply ---


def upsert(name: str, revision: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "expectModRevision": revision,
        "upsert": {
            "name": name,
            "replication": 1,
            "fragment": {"length": 1 << 20, "compressionCodec": "NONE", "refreshInterval": "60s"},
            **fields,
        },
    }


async def test_apply(server: Any, fake: Any) -> None:
    change = upsert("ex/bbbb", labels={"labels": [{"name": "region", "value": "eu"}]}, maxAppendRate="5")
    reply = await post(server, "apply", {"changes": [change]})
    assert reply.status == 200
    result = json.loads(reply.body)
    assert (result["status"], result["header"]["etcd"]["revision"], result["conflicts"]) == ("OK", "3", [])
    assert fake.journals["ex/bbbb"].spec.max_append_rate == 5
    snake = {"expect_mod_revision": "3", "upsert": json_codec.snake_names(change["upsert"])}
    assert (await post(server, "apply", {"changes": [snake]})).status == 200


async def test_apply_conflict(server: Any, fake: Any) -> None:
    reply = await post(server, "apply", {"changes": [upsert("ex/bbbb"), upsert("ex/aaaa")]})
    result = json.loads(reply.body)
    assert (reply.status, result["status"], result["conflicts"]) == (409, "ETCD_TRANSACTION_FAILED", ["ex/aaaa"])
    assert "ex/bbbb" not in fake.journals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([upsert("x")], "Changes[0].Upsert.Name: invalid length (1; expected 4 <= length <= 512)"),
        ([upsert("ex/bbbb"), {}], "Changes[1]: neither Upsert nor Delete are set (expected exactly one)"),
        ([{"delete": "ex/aaaa"}], "Changes[0]: invalid ExpectModRevision (0; expected > 0 or -1)"),
        ([{"bogus": 1}], 'changes[0]: unknown field "bogus" in protocol.ApplyRequest.Change'),
        ([upsert("ex/bbbb", bogus=1)], "changes[0]: unknown field 'bogus'"),
        ("x", "changes: expected a list, not str"),
    ],
)
async def test_invalid_apply(server: Any, fake: Any, changes: Any, message: str) -> None:
    reply = await post(server, "apply", {"changes": changes})
    assert (reply.status, json.loads(reply.body)) == (400, {"code": 3, "message": message, "details": []})
    assert list(fake.journals) == ["ex/aaaa"]


# --- append ---


async def append(server: Any, body: bytes = b"", **parameters: str) -> Any:
    query = "&".join(f"{name}={quote(value)}" for name, value in parameters.items())
    return await server.request("POST", f"/v1/journals/append?{query}", body)


async def test_append(server: Any, fake: Any) -> None:
    reply = await append(server, b"hello", journal="ex/aaaa", offset="0", union_registers="bb=2,aa=1")
    result = json.loads(reply.body)
    assert reply.status == 200
    assert (result["status"], result["header"]) == ("OK", HEADER)
    assert (result["commit"]["begin"], result["commit"]["end"]) == ("0", "5")
    assert result["registers"] == {
        "labels": [
            {"name": "aa", "value": "1", "prefix": False},
            {"name": "bb", "value": "2", "prefix": False},
        ]
    }
    parsed = json_codec.parse_append_response(result)
    assert parsed.commit is not None
    assert parsed.commit.sum.hex() == "aaf4c61ddcc5e8a2dabede0f3b482cd9aea9434d"


async def test_append_parameters_reach_the_service(server: Any, fake: Any) -> None:
    seen: list[AppendRequest] = []

    async def record(request: AppendRequest, content: Any = b"", scope: Any = None) -> AppendResponse:
        seen.append(request)
        return AppendResponse(Status.REGISTER_MISMATCH, fake.header(None), registers=LabelSet.of(("aa", "2")))

    fake.append = record
    reply = await append(
        server,
        b"x",
        journal="ex/aaaa",
        offset="7",
        check_registers="aa=1,!bb",
        subtract_registers="cc=",
        suspend="SUSPEND_NO_RESUME",
    )
    assert (reply.status, json.loads(reply.body)["status"]) == (409, "REGISTER_MISMATCH")
    [request] = seen
    assert (request.offset, request.suspend.name) == (7, "NO_RESUME")
    assert request.check_registers == parse_selector("aa=1,!bb")
    assert request.subtract_registers == LabelSet.of(("cc", ""))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bogus": "1"}, 'unknown parameter "bogus"'),
        ({"journal": "ex/aaaa", "offset": "-1"}, 'offset must be a number of bytes, not "-1"'),
        ({"journal": "ex/aaaa", "suspend": "x"}, "suspend must be one of"),
        ({"journal": "ex/aaaa", "check_registers": "(("}, 'could not match "((" to a label selector expression'),
        ({"journal": "x"}, "Journal: invalid length"),
        ({"journal": "ex/aaaa", "union_registers": "a!=b"}, "UnionRegisters.Labels[0]"),
    ],
)
async def test_invalid_append(server: Any, fake: Any, parameters: Any, message: str) -> None:
    reply = await append(server, b"x", **parameters)
    assert reply.status == 400
    assert message in json.loads(reply.body)["message"]
    assert fake.journals["ex/aaaa"].data == b""


async def test_append_refusals(server: Any, fake: Any) -> None:
    assert (await append(server, b"x", journal="ex/none")).status == 404
    assert (await append(server, b"x", journal="ex/aaaa", offset="5")).status == 409
    fake.journals["ex/aaaa"].append_outcome = OutcomeUnknown("nobody knows")
    reply = await append(server, b"x", journal="ex/aaaa")
    assert (reply.status, json.loads(reply.body)) == (503, {"code": 2, "message": "nobody knows", "details": []})


async def test_append_cut_short(server: Any, fake: Any) -> None:
    client = await server.connect()
    await client.send_request(
        "POST", "/v1/journals/append?journal=ex/aaaa", None, "Content-Length: 10\r\n"
    )
    await client.send(b"12345")
    await client.stream.send_eof()
    reply = await client.reply()
    assert (reply.status, json.loads(reply.body)["message"]) == (400, "unexpected EOF")
    assert fake.journals["ex/aaaa"].data == b""


# --- fragments ---


async def test_fragments(server: Any, fake: Any) -> None:
    fake.journals["ex/aaaa"].data += b"hello"
    reply = await post(server, "fragments", {"journal": "ex/aaaa", "signatureTTL": "60s", "pageLimit": 10})
    [listed] = json.loads(reply.body)["fragments"]
    assert listed["signedUrl"] == "file:///x"
    assert listed["spec"]["modTime"] == "1795230694"
    assert (await post(server, "fragments", {"journal": "ex/none"})).status == 404
    reply = await post(server, "fragments", {"journal": "ex/aaaa", "pageLimit": -1})
    assert json.loads(reply.body)["message"] == "invalid PageLimit (-1; must be >= 0 and <= 10000)"


# --- the codec, both ways ---


def test_codec_round_trips() -> None:
    header = Header(
        ProcessId("zone", "suffix-1"),
        Route((ProcessId("zone", "suffix-1"), ProcessId("zone", "suffix-2")), 1, ("http://a", "http://b")),
        EtcdHeader(2**64 - 1, 2**63, 7, 3),
    )
    digest = bytes(range(20))
    fragment = Fragment("ex/aaaa", 1, 2**40, digest, CompressionCodec.ZSTANDARD, "s3://b/", 99, "a=b")
    read = ReadResponse(Status.OK, header, 5, 2**40, fragment, "http://url")
    content = ReadResponse(offset=5, content=b"\x00\xff<&>")
    for response in (read, content):
        text = json_codec.read_response_bytes(response)
        assert json_codec.parse_read_response(json.loads(text)) == response
        assert json_codec.parse_read_response(json_codec.snake_names(json.loads(text))) == response
    append_response = AppendResponse(Status.OK, header, fragment, LabelSet.of(("aa", "1")), 3, 2, "x")
    value = json.loads(json_codec.dump(json_codec.append_response_json(append_response)))
    assert json_codec.parse_append_response(value) == append_response
    apply_response = ApplyResponse(Status.ETCD_TRANSACTION_FAILED, header, ("ex/aaaa",))
    value = json.loads(json_codec.dump(json_codec.apply_response_json(apply_response)))
    assert json_codec.parse_apply_response(value) == apply_response
    fragments = FragmentsResponse(Status.OK, header, (ListedFragment(fragment, "url"),), 12)
    value = json.loads(json_codec.dump(json_codec.fragments_response_json(fragments)))
    assert json_codec.parse_fragments_response(value) == fragments


@pytest.mark.parametrize("value", [1, [], {"status": "BOGUS"}, {"status": 99}, {"fragment": {"sum": {"part3": -1}}}])
def test_codec_refuses(value: Any) -> None:
    with pytest.raises(ValidationError):
        json_codec.parse_read_response(value)


def test_codec_reads_recorded_messages() -> None:
    """Messages that Gazette's own gateway wrote (spec/http-gateway.md §7)."""
    text = (
        '{"status":"OK","header":{"processId":{"zone":"local","suffix":"decent-bluebird"},"route":{"members":'
        '[{"zone":"local","suffix":"decent-bluebird"}],"primary":0,"endpoints":["http://127.0.0.1:9103"]},"etcd":'
        '{"clusterId":"12893156515918004863","memberId":"11664389837720366644","revision":"11","raftTerm":"2"}},'
        '"offset":"2","writeHead":"13","fragment":{"journal":"ex/nostore","begin":"0","end":"5","sum":{"part1":'
        '"12318688712325458082","part2":"15762279902843776217","part3":2930328397},"compressionCodec":"NONE",'
        '"backingStore":"","modTime":"0","pathPostfix":""},"fragmentUrl":"","content":null}'
    )
    assert json_codec.read_response_bytes(json_codec.parse_read_response(json.loads(text))).decode() == text

"""`Spool`: the golden vectors, a small one of our own, and Hypothesis against a naive model."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadsheet.engine.errors import Status, ValidationError
from broadsheet.engine.fragments.fragment import ZERO_SUM, Fragment
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.journal.spool import Spool
from broadsheet.engine.labels import LabelSet

NONE, SNAPPY = CompressionCodec.NONE, CompressionCodec.SNAPPY


def sha(content: bytes) -> bytes:
    return hashlib.sha1(content).digest()


def fragment_of(data: dict[str, Any]) -> Fragment:
    parts = data.get("sum", {})
    return Fragment(
        data.get("journal", ""),
        int(data.get("begin", 0)),
        int(data.get("end", 0)),
        int(parts.get("part1", 0)).to_bytes(8, "big")
        + int(parts.get("part2", 0)).to_bytes(8, "big")
        + int(parts.get("part3", 0)).to_bytes(4, "big"),
        CompressionCodec[data.get("compression_codec", "INVALID")],
        data.get("backing_store", ""),
        int(data.get("mod_time", 0)),
        data.get("path_postfix", ""),
    )


def test_golden_vectors(vectors: Callable[[str], Any]) -> None:
    entries = vectors("spool.json")
    assert len(entries) > 40
    for entry in entries:
        spool = Spool(entry["journal"])
        for number, step in enumerate(entry["steps"]):
            where = f"{entry['name']}, step {number}"
            request = step["request"]
            committed, completed = [], []
            error = None
            if "proposal" in request:
                registers = LabelSet.from_json(request.get("registers"))
                result = spool.propose(fragment_of(request["proposal"]), registers, 1)
                if request.get("acknowledge"):
                    response = step["response"]
                    assert result.status.name == response.get("status", "OK"), where
                    if "fragment" in response:
                        assert spool.fragment == fragment_of(response["fragment"]), where
                        assert spool.registers == LabelSet.from_json(response.get("registers")), where
                if result.committed:
                    committed = [spool.fragment]
                if result.completed is not None:
                    completed = [(result.completed.fragment, result.completed.registers)]
            else:
                content = base64.b64decode(request.get("content", ""))
                try:
                    at = spool.write(content, int(request.get("content_delta", 0)))
                    assert at == spool.end - spool.begin + spool.delta - len(content), where
                except ValidationError as raised:
                    error = str(raised)
            assert error == step["error"], where
            assert committed == [fragment_of(it) for it in step.get("committed") or ()], where
            assert completed == [
                (fragment_of(it["fragment"]), LabelSet.from_json(it.get("registers")))
                for it in step.get("completed") or ()
            ], where
            after = step["spool"]
            fragment = fragment_of(after["fragment"])
            assert spool.fragment == fragment, where
            assert spool.next() == fragment_of(after["next"] if "next" in after else after["fragment"]), where
            assert spool.registers == LabelSet.from_json(after.get("registers")), where
            assert spool.delta == after["delta"], where
            assert bool(spool.first_append_time_ns) == after["first_append_time_set"], where


def test_the_exchange_of_the_specification() -> None:
    """spec/replication.md §5.5: sync, `first`, commit, roll, `second`, commit, and what §6 says was observed."""
    spool = Spool("a/journal")
    registers = LabelSet.of(("aa", "1"))
    assert spool.propose(Fragment("a/journal", compression_codec=SNAPPY), LabelSet(), 7).rolled
    assert spool.write(b"first", 0) == 0
    first = Fragment("a/journal", 0, 5, bytes.fromhex("e0996a37c13d44c3b06074939d43fa3759bd32c1"), SNAPPY)
    assert spool.next() == first
    result = spool.propose(first, registers, 8)
    assert (result.status, result.committed, result.completed) == (Status.OK, True, None)
    assert (spool.registers, spool.first_append_time_ns) == (registers, 8)
    result = spool.propose(Fragment("a/journal", 5, 5, compression_codec=NONE), registers, 9)
    assert (result.status, result.rolled) == (Status.OK, True)
    assert result.completed is not None
    assert (result.completed.fragment, result.completed.first_append_time_ns) == (first, 8)
    assert spool.first_append_time_ns == 0
    assert spool.write(b"second", 0) == 0
    second = Fragment("a/journal", 5, 11, bytes.fromhex("352f7829a2384b001cc12b0c2613c756454a1f6a"), NONE)
    assert spool.propose(second, registers, 10).committed
    with pytest.raises(ValidationError, match=r"^invalid ContentDelta \(7; expected 0\)$"):
        spool.write(b"x", 7)
    assert spool.propose(Fragment("a/journal"), registers, 11).status == Status.PROPOSAL_MISMATCH
    beyond = spool.propose(Fragment("a/journal", 90, 100, sha(b"x"), NONE), LabelSet(), 12)
    assert (beyond.status, beyond.rolled) == (Status.PROPOSAL_MISMATCH, True)
    assert (spool.begin, spool.end, spool.registers) == (100, 100, LabelSet())
    assert spool.write(b"abc", 0) == 0
    assert spool.propose(Fragment("a/journal", 100, 103, sha(b"abc"), NONE), LabelSet(), 13).committed
    assert spool.propose(Fragment("a/journal", 103, 103, compression_codec=NONE), LabelSet(), 14).rolled
    stale = spool.propose(Fragment("a/journal", 100, 103, sha(b"abc"), NONE), LabelSet(), 15)
    assert (stale.status, stale.rolled) == (Status.PROPOSAL_MISMATCH, False)


@dataclass
class Naive:
    """The rules of spec/replication.md §4.1, on plain bytes."""

    begin: int = 0
    content: bytes = b""
    pending: bytes = b""
    codec: CompressionCodec = NONE
    registers: LabelSet = field(default_factory=LabelSet)
    first: int = 0

    def fragment(self, *, pending: bool = False) -> Fragment:
        content = self.content + (self.pending if pending else b"")
        sum_ = sha(content) if content else ZERO_SUM
        return Fragment("a/journal", self.begin, self.begin + len(content), sum_, self.codec)

    def propose(self, proposal: Fragment, registers: LabelSet, now: int) -> tuple[Status, Fragment | None, bool]:
        end = self.begin + len(self.content)
        completed = None
        if proposal.end > end + len(self.pending) or (proposal.end == end and proposal.begin == proposal.end):
            completed = self.fragment() if self.content else None
            if proposal.end > end:
                self.registers = registers
            self.begin, self.content, self.pending, self.first = proposal.end, b"", b"", 0
            self.codec = proposal.compression_codec
        if proposal == self.fragment() and registers == self.registers:
            self.pending = b""
            return Status.OK, completed, False
        if self.pending and proposal == self.fragment(pending=True):
            self.content, self.pending, self.registers = self.content + self.pending, b"", registers
            self.first = self.first or now
            return Status.OK, completed, True
        return Status.PROPOSAL_MISMATCH, completed, False


registers_strategy = st.sampled_from([LabelSet(), LabelSet.of(("aa", "1")), LabelSet.of(("aa", "2"))])
contents = st.binary(max_size=5)
codecs = st.sampled_from([NONE, SNAPPY])


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, Any]:
    kinds = ["write", "write", "commit", "commit", "same", "roll", "jump", "other", "restart", "back"]
    kind = draw(st.sampled_from(kinds))
    if kind == "write":
        return kind, (draw(contents), draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
    if kind == "other":
        begin, length = draw(st.integers(0, 12)), draw(st.integers(0, 6))
        sum_ = draw(st.sampled_from([ZERO_SUM, sha(b"x")]))
        fragment = Fragment("a/journal", begin, begin + length, sum_, draw(codecs))
        return kind, (fragment, draw(registers_strategy))
    return kind, (draw(codecs), draw(st.integers(0, 9)), draw(registers_strategy), draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(st.lists(steps(), max_size=25))
def test_against_a_naive_model(program: list[tuple[str, Any]]) -> None:
    spool, naive = Spool("a/journal"), Naive()
    for now, (kind, argument) in enumerate(program, 1):
        if kind == "write":
            content, wrong = argument
            if wrong:
                with pytest.raises(ValidationError):
                    spool.write(content, spool.delta + wrong)
            else:
                assert spool.write(content, spool.delta) == len(naive.content) + len(naive.pending)
                naive.pending += content
        elif kind == "back":
            spool.roll_back()
            naive.pending = b""
        elif kind == "restart":
            spool = Spool.restored(spool.fragment, spool.registers, spool.first_append_time_ns)
            naive.pending = b""
            assert spool.needs_rebuild == bool(naive.content)
            if naive.content:
                assert not spool.rebuild([naive.content[:-1]])
                assert not spool.rebuild([naive.content, b"x"])
                assert spool.needs_rebuild
            assert not naive.content or spool.rebuild([naive.content[:2], memoryview(naive.content)[2:]])
        else:
            if kind == "other":
                proposal, registers = argument
            else:
                codec, jump, registers, keep = argument
                registers = naive.registers if keep else registers
                end = naive.begin + len(naive.content)
                proposal = {
                    "commit": naive.fragment(pending=True),
                    "same": naive.fragment(),
                    "roll": Fragment("a/journal", end, end, compression_codec=codec),
                    "jump": Fragment("a/journal", end + jump, end + jump, compression_codec=codec),
                }[kind]
            status, completed, committed = naive.propose(proposal, registers, now)
            result = spool.propose(proposal, registers, now)
            assert result.status == status
            assert (result.completed.fragment if result.completed else None) == completed
            assert result.committed == committed
        assert spool.fragment == naive.fragment()
        assert spool.next() == naive.fragment(pending=True)
        assert (spool.delta, spool.registers) == (len(naive.pending), naive.registers)
        assert spool.first_append_time_ns == naive.first


def test_the_short_cut_of_a_proposer_is_the_rule() -> None:
    """`commit` and `roll`, which the engine calls, do what `propose` does."""
    one, other = Spool("a/journal"), Spool("a/journal")
    registers = LabelSet.of(("aa", "1"))
    for number in range(4):
        for spool in (one, other):
            spool.write(b"x" * number, 0)
        if number:
            assert one.propose(one.next(), registers, number).committed
            other.commit(other.next_sum(), registers, number)
        assert one.next() == other.next()
        assert (one.registers, one.first_append_time_ns) == (other.registers, other.first_append_time_ns)
    at = one.end
    completed = one.propose(Fragment("a/journal", at, at, compression_codec=SNAPPY), registers, 9).completed
    assert completed == other.roll(at, SNAPPY)
    assert completed is not None
    assert completed.fragment.sum == sha(b"x" * 6)
    assert one.next() == other.next()

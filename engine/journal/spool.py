"""The spool of a replica: the journal's newest, still growing fragment (spec/replication.md §4). Sans-I/O.

A spool holds one committed fragment [begin, end) with its running SHA-1 and the journal's registers, plus `delta`
bytes that were written after `end` and are not committed. Two kinds of message change it:

* **content** adds to delta (`write`);
* a **proposal** (a fragment P with registers Q) is answered, in this order:

  a. *roll*: P lies beyond end + delta, or is empty at end. The fragment is completed, the spool becomes empty at
     P.end; uncommitted bytes are dropped. This happens even if P is then refused.
  b. *same*: P and Q are what is committed: roll back to it.
  c. *commit*: P is exactly the fragment extended by delta.
  d. anything else is a mismatch.

The caller owns the bytes: `write` says at which file offset they belong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broadsheet.engine.errors import Status, ValidationError
from broadsheet.engine.fragments.fragment import ZERO_SUM, Fragment
from broadsheet.engine.journal.spec import CompressionCodec
from broadsheet.engine.labels import LabelSet

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["CompletedSpool", "ProposalResult", "Spool"]

NO_REGISTERS = LabelSet()


@dataclass(frozen=True, slots=True)
class CompletedSpool:
    """A rolled, non-empty fragment, ready to be persisted."""

    fragment: Fragment
    registers: LabelSet
    first_append_time_ns: int


@dataclass(frozen=True, slots=True)
class ProposalResult:
    """`status` is OK or PROPOSAL_MISMATCH (then the spool's fragment and registers are the answer)."""

    status: Status
    completed: CompletedSpool | None = None
    rolled: bool = False
    committed: bool = False


_OK_SAME = ProposalResult(Status.OK)
_OK_COMMITTED = ProposalResult(Status.OK, committed=True)


class Spool:
    """One per replica. `sum` is that of [begin, end), zeros when it is empty."""

    __slots__ = (
        "_committed_sha",
        "_sha",
        "begin",
        "codec",
        "delta",
        "end",
        "first_append_time_ns",
        "journal",
        "registers",
        "sum",
    )

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.begin = 0
        self.end = 0
        self.sum = ZERO_SUM
        self.codec = CompressionCodec.NONE
        self.registers = NO_REGISTERS
        self.delta = 0
        self.first_append_time_ns = 0
        self._sha: _Hash | None = hashlib.sha1(usedforsecurity=False)
        self._committed_sha: _Hash | None = self._sha.copy()

    @classmethod
    def restored(cls, fragment: Fragment, registers: LabelSet, first_append_time_ns: int) -> Spool:
        """A spool as it was committed before a restart. A running SHA-1 cannot be stored, so `rebuild` must be
        given the content before the first `write` (not at open: most spools are never written again)."""
        spool = cls(fragment.journal)
        spool.begin, spool.end, spool.sum = fragment.begin, fragment.end, fragment.sum
        spool.codec, spool.registers = fragment.compression_codec, registers
        spool.first_append_time_ns = first_append_time_ns
        if fragment.length:
            spool._sha = spool._committed_sha = None
        return spool

    @property
    def needs_rebuild(self) -> bool:
        return self._sha is None

    def rebuild(self, content: Iterable[bytes | memoryview]) -> bool:
        """Hash the committed content again. False if it is not what was committed: the file is corrupt."""
        sha = hashlib.sha1(usedforsecurity=False)
        for piece in content:
            sha.update(piece)
        if sha.digest() != self.sum:
            return False
        self._sha, self._committed_sha = sha, sha.copy()
        return True

    @property
    def fragment(self) -> Fragment:
        """What is committed."""
        return Fragment(self.journal, self.begin, self.end, self.sum, self.codec)

    def next_sum(self) -> bytes:
        """SHA-1 of the content from begin, uncommitted bytes included."""
        assert self._sha is not None
        return self._sha.digest() if self.end + self.delta > self.begin else ZERO_SUM

    def next(self) -> Fragment:
        """The fragment as it will be once what was written is committed."""
        return Fragment(self.journal, self.begin, self.end + self.delta, self.next_sum(), self.codec)

    def write(self, content: bytes | bytearray | memoryview, content_delta: int) -> int:
        """Take content in; returns the offset in the spool's file at which it belongs."""
        if content_delta != self.delta:
            raise ValidationError(
                f"invalid ContentDelta ({content_delta}; expected {self.delta})", journal=self.journal
            )
        assert self._sha is not None
        self._sha.update(content)
        position = self.end - self.begin + self.delta
        self.delta += len(content)
        return position

    def roll_back(self) -> None:
        """Forget what was written since the last commit."""
        if self.delta:
            assert self._committed_sha is not None
            self.delta = 0
            self._sha = self._committed_sha.copy()

    def commit(self, sum_: bytes, registers: LabelSet, now_ns: int) -> None:
        """Commit what was written: rule c for a proposer that made the proposal from `next` itself."""
        assert self._sha is not None
        self.end += self.delta
        self.delta = 0
        self.sum = sum_
        self.registers = registers
        self._committed_sha = self._sha.copy()
        if not self.first_append_time_ns:
            self.first_append_time_ns = now_ns

    def roll(self, offset: int, codec: CompressionCodec) -> CompletedSpool | None:
        """Complete the fragment and start an empty one at `offset`, registers kept."""
        completed = None
        if self.end > self.begin:
            completed = CompletedSpool(self.fragment, self.registers, self.first_append_time_ns)
        self.begin = self.end = offset
        self.sum = ZERO_SUM
        self.codec = codec
        self.delta = 0
        self.first_append_time_ns = 0
        self._sha = hashlib.sha1(usedforsecurity=False)
        self._committed_sha = self._sha.copy()
        return completed

    def propose(self, proposal: Fragment, registers: LabelSet, now_ns: int) -> ProposalResult:
        """Answer a proposal by the rules above."""
        completed = None
        rolled = False
        if proposal.end > self.end + self.delta or (
            proposal.end == self.end and proposal.begin == proposal.end
        ):
            adopted = registers if proposal.end > self.end else self.registers
            completed = self.roll(proposal.end, proposal.compression_codec)
            self.registers = adopted
            rolled = True

        if proposal == self.fragment and registers == self.registers:
            self.roll_back()
            return ProposalResult(Status.OK, completed, rolled) if rolled else _OK_SAME
        if self.delta and proposal == self.next():
            self.commit(proposal.sum, registers, now_ns)
            return _OK_COMMITTED
        return ProposalResult(Status.PROPOSAL_MISMATCH, completed, rolled)

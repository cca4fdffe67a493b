"""Damaged files: what was proven durable and cannot be read is refused and named; a torn end is kept aside.

Every bit that matters is flipped in turn, in files of an engine that stopped in the midst of its work: each flip must
be either refused, with the file named and nothing changed on the disk, or be without effect, or (behind the proven
position) cost the end of the log alone, which is kept in quarantine.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import trio

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.errors import BroadsheetError, CorruptData
from broadsheet.engine.journal.log_format import FILE_HEADER_BYTES, RECORD_HEADER_BYTES, LogFile, scan
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalSpec
from broadsheet.testing.simulation import SimulatedDisk, SimulatedRuntime, run_simulated

FOLDER = "/disk/engine"
LOG_HEADER_FIELDS = 44  # the rest of the 64 bytes is padding
PLAIN = JournalSpec("plain", 1, fragment=FragmentSpec(1 << 20, CompressionCodec.NONE, (), 10**9))
NONE, SNAPPY = CompressionCodec.NONE, CompressionCodec.SNAPPY
Content = dict[str, bytes]


def open_engine(
    disk: SimulatedDisk, durability: Durability = Durability.FSYNC, options: EngineOptions | None = None
) -> Engine:
    # No checkpoint unless a test wants one.
    options = options or EngineOptions(inline_bytes=300, log_file_bytes=700)
    return Engine.open(FOLDER, durability=durability, options=options, runtime=SimulatedRuntime(1, disk))


def files_of(disk: SimulatedDisk) -> Content:
    return {path: disk.content(path) for path in disk.walk() if not path.endswith("/LOCK")}


def reboot(disk: SimulatedDisk) -> SimulatedDisk:
    return disk.clone()


def base_of(path: str) -> int:
    return int(path.rpartition("/")[2][:16], 16)


@dataclass
class Stopped:
    """A machine that stopped, without a close: `disk`, and what the journal "plain" had acknowledged, by append."""

    disk: SimulatedDisk
    appends: list[bytes]

    @property
    def content(self) -> bytes:
        return b"".join(self.appends)

    def file(self, *parts: str) -> str:
        return next(path for path in self.disk.walk() if all(part in path for part in parts))

    def spool(self) -> str:
        """The file that holds all appends but the first: that one is a fragment of its own."""
        spools = [path for path in self.disk.walk() if path.endswith(".spool")]
        return max(spools, key=lambda path: len(self.disk.content(path)))

    def logs(self) -> list[LogFile]:
        """Those that count: a snapshot replaces the files before it, which wait for another use."""
        start = max((base_of(path) for path in self.disk.walk() if path.endswith(".snapshot")), default=0)
        found = [path for path in self.disk.walk() if path.endswith(".log") and base_of(path) >= start]
        return [scan(path, base_of(path), self.disk.content(path)) for path in found]


def stopped(durability: Durability, *, lengths: tuple[int, ...] = (100, 500, 40, 700, 64), lives: int = 1) -> Stopped:
    """After `lives` - 1 lives that ended well, and so with a snapshot, one that did not."""
    disk = SimulatedDisk(random.Random(1))
    appends: list[bytes] = []

    async def life(last: bool) -> SimulatedDisk:
        async with open_engine(disk, durability) as engine:
            journal = await engine.create_journal("plain", PLAIN)
            for length in lengths:
                content = random.Random(len(appends)).randbytes(length)
                await journal.append(content)
                appends.append(content)
            if last:
                return disk.clone()
        return disk.clone()

    for number in range(lives):
        kept = run_simulated(life, number == lives - 1)
        disk = disk.clone()
    return Stopped(kept, appends)


def reopen(disk: SimulatedDisk, durability: Durability = Durability.FSYNC) -> bytes:
    """The journal's content as the next engine finds it; it also goes on from there."""

    async def main() -> bytes:
        with trio.fail_after(1000):
            async with open_engine(disk, durability) as engine:
                journal = engine.journal("plain")
                found = await journal.read()
                commit = await journal.append(b"more")
                assert commit.begin == len(found)
                assert await journal.read(commit.begin) == b"more"
                return found

    return run_simulated(main)


def refused(disk: SimulatedDisk, path: str, durability: Durability = Durability.FSYNC) -> CorruptData:
    """It is not opened, the error names the file, and not a byte was changed."""
    before = files_of(disk)
    with pytest.raises(CorruptData) as raised:
        reopen(disk, durability)
    assert raised.value.path.endswith(path)
    assert raised.value.hint
    assert files_of(disk) == before
    return raised.value


def spoilt(machine: Stopped, spoil: Callable[[SimulatedDisk], None]) -> SimulatedDisk:
    disk = reboot(machine.disk)
    spoil(disk)
    return disk


def proven_in(logs: list[LogFile]) -> int:
    return max(log.proven for log in logs)


# --- The commit log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", [1, 2])
def test_every_damaged_byte_of_the_log_below_the_proven_position_is_refused(lives: int) -> None:
    machine = stopped(Durability.FSYNC, lives=lives)
    logs = machine.logs()
    assert len(logs) > 1
    proven = proven_in(logs)
    tried = 0
    for log in logs:
        for record in log.records:
            if record.position >= proven:
                continue
            begin = FILE_HEADER_BYTES + record.position - log.base
            end = begin + RECORD_HEADER_BYTES + len(record.payload)
            for offset in {*range(begin, end, 5), end - 1}:
                tried += 1
                disk = spoilt(machine, lambda it, at=offset, log=log: it.flip_bit(log.path, at, at % 8))
                error = refused(disk, log.path)
                assert str(record.position) in str(error)
    assert tried > 100


def test_a_damaged_header_of_a_log_file_below_the_proven_position_is_refused() -> None:
    machine = stopped(Durability.FSYNC)
    log = machine.logs()[0]
    assert log.base < proven_in(machine.logs())
    for offset in range(LOG_HEADER_FIELDS):
        refused(spoilt(machine, lambda it, at=offset: it.flip_bit(log.path, at)), log.path)


def test_a_log_file_cut_short_below_the_proven_position_is_refused() -> None:
    machine = stopped(Durability.FSYNC)
    first = machine.logs()[0]
    size = FILE_HEADER_BYTES + first.end - first.base
    for length in (0, 10, FILE_HEADER_BYTES, FILE_HEADER_BYTES + 20, size // 2, size - 8):  # the end may be padding
        refused(spoilt(machine, lambda it, to=length: it.truncate(first.path, to)), first.path)


def test_a_missing_log_file_below_the_proven_position_is_refused() -> None:
    machine = stopped(Durability.FSYNC)
    first = machine.logs()[0]
    disk = spoilt(machine, lambda it: it.unlink(it.absolute(first.path)))
    before = files_of(disk)
    with pytest.raises(CorruptData):
        reopen(disk)
    assert files_of(disk) == before


def test_damage_to_the_last_record_is_a_torn_end_that_is_kept_aside(caplog: pytest.LogCaptureFixture) -> None:
    machine = stopped(Durability.FSYNC)
    last = machine.logs()[-1]
    record = last.records[-1]
    assert record.position >= proven_in(machine.logs())
    begin = FILE_HEADER_BYTES + record.position - last.base
    expected = b"".join(machine.appends[:-1])
    for offset in range(begin, begin + RECORD_HEADER_BYTES + len(record.payload), 3):
        caplog.clear()
        disk = spoilt(machine, lambda it, at=offset: it.flip_bit(last.path, at, at % 8))
        damaged = disk.content(last.path)
        with caplog.at_level(logging.WARNING, "broadsheet.engine"):
            found = reopen(disk)
        if offset < begin + 8:  # its salt: it reads like bytes of an earlier use of the file
            assert found == expected
            continue
        assert found == expected
        quarantined = [path for path in disk.walk() if "/quarantine/" in path]
        assert damaged in [disk.content(path) for path in quarantined], "the damaged end was not kept"
        assert any("/quarantine/" in message for message in caplog.messages)
        assert reopen(reboot(disk)) == expected + b"more"


def test_a_last_record_cut_short_is_a_torn_end() -> None:
    machine = stopped(Durability.FSYNC)
    last = machine.logs()[-1]
    begin = FILE_HEADER_BYTES + last.records[-1].position - last.base
    for length in range(begin, begin + RECORD_HEADER_BYTES + len(last.records[-1].payload), 7):
        disk = spoilt(machine, lambda it, to=length: it.truncate(last.path, to))
        assert reopen(disk) == b"".join(machine.appends[:-1])


def test_in_mode_os_the_log_ends_at_the_first_damaged_record_and_the_rest_is_kept_aside() -> None:
    machine = stopped(Durability.OS)
    checked = 0
    records = [(log, record) for log in machine.logs() for record in log.records]
    for number, (log, record) in enumerate(records[1:]):  # the first one creates the journal
        begin = FILE_HEADER_BYTES + record.position - log.base
        disk = spoilt(machine, lambda it, at=begin + 30, log=log: it.flip_bit(log.path, at))
        damaged = disk.content(log.path)
        assert reopen(disk, Durability.OS) == b"".join(machine.appends[:number])
        quarantined = [disk.content(path) for path in disk.walk() if "/quarantine/" in path]
        assert damaged in quarantined
        checked += 1
    assert checked == len(machine.appends)


# --- Snapshot and identity --------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS], ids=lambda it: it.value)
def test_a_damaged_snapshot_is_refused(durability: Durability) -> None:
    machine = stopped(durability, lives=2)
    path = machine.file(".snapshot")
    size = len(machine.disk.content(path))
    refusals = 0
    for offset in range(0, size, 3):
        disk = spoilt(machine, lambda it, at=offset: it.flip_bit(path, at, at % 8))
        try:
            found = reopen(reboot(disk), durability)
        except CorruptData:
            refused(disk, path, durability)
            refusals += 1
        else:
            assert found == machine.content, f"byte {offset}"  # padding
    assert refusals > size // 3 * 0.8
    for length in range(0, size, 37):
        refused(spoilt(machine, lambda it, to=length: it.truncate(path, to)), path, durability)


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS], ids=lambda it: it.value)
def test_a_missing_snapshot_is_not_an_empty_engine(durability: Durability) -> None:
    machine = stopped(durability, lives=2)
    snapshot = machine.file(".snapshot")

    def spoil(disk: SimulatedDisk) -> None:
        disk.unlink(disk.absolute(snapshot))
        for path in list(disk.walk()):
            if path.endswith(".log") and base_of(path) < base_of(snapshot):  # spares: with them, the log alone would do
                disk.unlink(disk.absolute(path))

    disk = spoilt(machine, spoil)
    before = files_of(disk)
    with pytest.raises(CorruptData):
        reopen(disk, durability)
    assert files_of(disk) == before


def test_a_damaged_identity_is_refused() -> None:
    """A changed id would be another engine: clients compare it."""
    machine = stopped(Durability.FSYNC)
    path = machine.file("identity.json")

    async def identity(disk: SimulatedDisk) -> object:
        async with open_engine(disk) as engine:
            return engine.identity

    expected = run_simulated(identity, reboot(machine.disk))
    size = len(machine.disk.content(path))
    for offset in range(size):
        disk = spoilt(machine, lambda it, at=offset: it.flip_bit(path, at))
        before = files_of(disk)
        try:
            found = run_simulated(identity, disk)
        except CorruptData as error:
            assert error.path.endswith(path)
            assert files_of(disk) == before
        else:
            assert found == expected, f"a flipped bit of byte {offset} made it another engine"
    for length in range(0, size - 2, 5):
        refused(spoilt(machine, lambda it, to=length: it.truncate(path, to)), path)


def test_a_missing_identity_is_refused() -> None:
    machine = stopped(Durability.FSYNC)
    path = machine.file("identity.json")
    refused(spoilt(machine, lambda it: it.unlink(it.absolute(path))), path)


def test_an_unknown_format_version_is_refused() -> None:
    machine = stopped(Durability.FSYNC)
    path = machine.file("identity.json")
    document = json.loads(machine.disk.content(path))
    assert document["format"] == 1
    for later in ({**document, "format": 2}, {"format": 3, "all": "new"}):

        def spoil(disk: SimulatedDisk, later: dict[str, object] = later) -> None:
            disk.truncate(path, 0)
            disk.overwrite(path, 0, json.dumps(later).encode())

        error = refused(spoilt(machine, spoil), path)
        assert f"format {later['format']}" in str(error)
        assert "version" in error.hint


# --- Spools -----------------------------------------------------------------------------------------------


def test_a_spool_that_does_not_hold_what_a_proven_record_says_is_refused() -> None:
    machine = stopped(Durability.FSYNC)  # 500 and 700 bytes are in the spool alone
    path = machine.spool()
    for offset in (*range(0, 500, 11), *range(540, 1240, 13)):
        refused(spoilt(machine, lambda it, at=offset: it.flip_bit(path, at, at % 8)), path)
    for length in (0, 499, 500, 900, 1239):
        disk = spoilt(machine, lambda it, to=length: it.truncate(path, to))
        with pytest.raises(CorruptData) as raised:
            reopen(disk)
        assert raised.value.path.endswith(path)
    disk = spoilt(machine, lambda it: it.unlink(it.absolute(path)))
    with pytest.raises(CorruptData) as raised:
        reopen(disk)
    assert raised.value.path.endswith(path)


def test_bytes_of_a_spool_that_the_log_holds_are_mended() -> None:
    machine = stopped(Durability.FSYNC)
    path = machine.spool()
    for offset in range(500, 540, 3):
        assert reopen(spoilt(machine, lambda it, at=offset: it.flip_bit(path, at))) == machine.content


def test_a_damaged_spool_is_found_at_the_first_append_after_a_restart() -> None:
    disk = SimulatedDisk(random.Random(1))

    async def write() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", PLAIN)
            await journal.append(b"-")  # the first append is a fragment of its own
            await journal.append(b"a" * 1000)
            other = await engine.create_journal("other", PLAIN)
            await other.append(b"b" * 100)

    run_simulated(write)
    disk = disk.clone()
    path = next(path for path in disk.walk() if path.endswith(".spool") and len(disk.content(path)) == 1000)
    disk.flip_bit(path, 500)
    damaged = disk.content(path)

    async def append() -> None:
        async with open_engine(disk) as engine:
            for content in (b"c", b"d" * (2 << 20)):  # in a group, and streamed
                with pytest.raises(CorruptData) as raised, trio.fail_after(1000):
                    await engine.journal("plain").append(content)
                assert raised.value.path.endswith(path)
                assert raised.value.journal == "plain"
            assert (await engine.journal("other").append(b"e")).begin == 100
            assert await engine.journal("other").read() == b"b" * 100 + b"e"

    run_simulated(append)
    assert disk.content(path) == damaged


def test_a_spool_cut_short_is_found_when_it_is_read() -> None:
    disk = SimulatedDisk(random.Random(1))

    async def write() -> None:
        async with open_engine(disk) as engine:
            await (await engine.create_journal("plain", PLAIN)).append(b"a" * 1000)

    run_simulated(write)
    disk = disk.clone()
    path = next(path for path in disk.walk() if path.endswith(".spool"))
    disk.truncate(path, 999)

    async def read() -> None:
        async with open_engine(disk) as engine:
            with pytest.raises(CorruptData) as raised:
                await engine.journal("plain").read()
            assert raised.value.path.endswith(path)

    run_simulated(read)


def test_a_damaged_spool_is_not_persisted(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk(random.Random(1))
    stored = JournalSpec("plain", 1, fragment=FragmentSpec(1024, NONE, ("file:///",), 10**9))

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", stored)
            await journal.append(b"a" * 1000)
            path = next(path for path in disk.walk() if path.endswith(".spool"))
            disk.flip_bit(path, 7)
            await journal.append(b"b" * 1000)
            await journal.append(b"c" * 10)  # rolls the 2000 bytes before it
            with caplog.at_level(logging.WARNING, "broadsheet.engine"):
                await trio.sleep(1000)  # simulated
            problem = engine.ready_problem()
            assert problem is not None and "does not hold what was committed" in problem
            assert any("will retry" in message for message in caplog.messages)
            assert not [name for name in disk.walk() if "/fragments/" in name and name.endswith(".raw")]
            assert path in list(disk.walk())

    run_simulated(main)


# --- Fragments --------------------------------------------------------------------------------------------


def stored_machine(codec: CompressionCodec) -> tuple[SimulatedDisk, str, bytes]:
    """(disk after a close, the one object's path, the journal's content)."""
    disk = SimulatedDisk(random.Random(1))
    content = random.Random(2).randbytes(700) + b"z" * 400
    spec = JournalSpec("plain", 1, fragment=FragmentSpec(1024, codec, ("file:///",), 10**9))

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = await engine.create_journal("plain", spec)
            await journal.append(content)
            await journal.append(b"the next fragment")
            await trio.sleep(10)  # simulated: the first one is persisted

    run_simulated(main)
    disk = disk.clone()
    path = next(path for path in disk.walk() if "/fragments/" in path)
    return disk, path, content + b"the next fragment"


def read_plain(disk: SimulatedDisk, offset: int = 0) -> bytes:
    async def main() -> bytes:
        with trio.fail_after(1000):
            async with open_engine(disk) as engine:
                return await engine.journal("plain").read(offset)

    return run_simulated(main)


def refused_object(disk: SimulatedDisk, path: str, offset: int = 0) -> None:
    before = disk.content(path)
    with pytest.raises(CorruptData) as raised:
        read_plain(disk, offset)
    assert path.endswith(raised.value.path.rpartition("/fragments/")[2])
    assert raised.value.journal == "plain"
    assert disk.content(path) == before


def test_a_damaged_compressed_fragment_is_refused_and_named() -> None:
    disk, path, content = stored_machine(SNAPPY)
    assert read_plain(reboot(disk)) == content
    refusals = 0
    for at in range(len(disk.content(path))):
        damaged = reboot(disk)
        damaged.flip_bit(path, at, at % 8)
        try:
            found = read_plain(reboot(damaged))
        except CorruptData:
            refused_object(damaged, path)
            refusals += 1
        else:
            assert found == content, f"byte {at}"  # another way to say the same, by chance
    assert refusals > len(disk.content(path)) * 0.95


@pytest.mark.parametrize("codec", [NONE, SNAPPY], ids=lambda it: it.name)
def test_a_fragment_cut_short_is_refused_and_named(codec: CompressionCodec) -> None:
    disk, path, content = stored_machine(codec)
    assert read_plain(reboot(disk), 300) == content[300:]
    size = len(disk.content(path))
    for length in (0, 1, 9, 10, 11, size // 2, size - 1):
        for offset in (0, 1050):
            damaged = reboot(disk)
            damaged.truncate(path, length)
            refused_object(damaged, path, offset)


def test_a_fragment_that_has_grown_is_refused_and_named() -> None:
    disk, path, _ = stored_machine(NONE)
    disk.truncate(path, len(disk.content(path)) + 1)
    refused_object(disk, path)


def test_a_missing_fragment_is_a_typed_error_that_names_it() -> None:
    disk, path, _ = stored_machine(NONE)

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = engine.journal("plain")
            assert len(await journal.fragments()) == 2  # the store is listed
            disk.unlink(disk.absolute(path))
            with pytest.raises(BroadsheetError) as raised:
                await journal.read()
            assert path.rpartition("/")[2] in str(raised.value)

    run_simulated(main)


def test_what_a_put_left_behind_is_ignored() -> None:
    disk, path, content = stored_machine(NONE)
    folder = path.rpartition("/")[0]
    name = path.rpartition("/")[2]
    for leftover in (f".partial-{name}00c0ffee", "not-a-fragment", f"{name}.tmp"):
        disk.open(disk.absolute(f"{folder}/{leftover}"), create=True).pwrite([b"half"], 0)

    async def main() -> None:
        async with open_engine(disk) as engine:
            journal = engine.journal("plain")
            assert [it.begin for it in await journal.fragments()] == [0, 1100]
            assert await journal.read() == content
            assert (await journal.append(b"on")).begin == len(content)

    run_simulated(main)
    assert len([it for it in disk.walk() if it.startswith(folder)]) == 4, "only what is ours is deleted"

"""Completed fragments go to the journal's store, and are read from it after a restart."""

from __future__ import annotations

import hashlib
import logging
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from broadsheet.engine.engine import Engine
from broadsheet.engine.errors import BroadsheetError, CorruptData, Status
from broadsheet.engine.fragments.codecs import decompress
from broadsheet.engine.fragments.fragment import Fragment, parse_content_path
from broadsheet.engine.handles import Journal
from broadsheet.engine.journal.spec import CompressionCodec, FragmentSpec, JournalChange, JournalSpec
from broadsheet.engine.service import ApplyRequest, ReadRequest
from broadsheet.testing.simulation import SimulatedRuntime

NAME = "a/journal"
STORE = "file:///"
NONE, SNAPPY = CompressionCodec.NONE, CompressionCodec.SNAPPY


def spec_of(codec: CompressionCodec = NONE, store: str = STORE, length: int = 1024, **fields: int) -> JournalSpec:
    stores = (store,) if store else ()
    return JournalSpec(NAME, 1, fragment=FragmentSpec(length, codec, stores, refresh_interval_ns=300 * 10**9, **fields))


def part(number: int) -> bytes:
    return (b"%d-" % number * 700)[:1100]


async def fill(engine: Engine, journal: Journal, count: int = 5) -> bytes:
    """`count` fragments, the last of them the open one; the others are persisted."""
    content = b""
    for number in range(count):
        await journal.append(part(number))
        content += part(number)
    await engine._persister.settle()
    return content


def stored(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("codec", [NONE, SNAPPY])
@pytest.mark.parametrize("mode", ["fsync", "os"])
async def test_files_of_a_store(tmp_path: Path, codec: CompressionCodec, mode: str) -> None:
    async with Engine.open(tmp_path, durability=mode) as engine:
        content = await fill(engine, await engine.create_journal(NAME, spec_of(codec)))
        extension = {NONE: "raw", SNAPPY: "sz"}[codec]
        found = stored(tmp_path / "fragments")
        assert sorted(found) == [
            f"{NAME}/{at:016x}-{at + 1100:016x}-{hashlib.sha1(content[at : at + 1100]).hexdigest()}.{extension}"
            for at in range(0, 4400, 1100)
        ]
        for name, path in found.items():
            fragment = parse_content_path(NAME, name.removeprefix(f"{NAME}/"))
            data = path.read_bytes()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert b"".join(decompress(codec, [data])) == content[fragment.begin : fragment.end]
            assert (data == content[fragment.begin : fragment.end]) == (codec is NONE)
        assert engine._persister.pending == 0


@pytest.mark.parametrize("codec", [NONE, SNAPPY])
@pytest.mark.parametrize("mode", ["fsync", "os"])
async def test_read_through_the_store_after_a_restart(tmp_path: Path, codec: CompressionCodec, mode: str) -> None:
    async with Engine.open(tmp_path, durability=mode) as engine:
        content = await fill(engine, await engine.create_journal(NAME, spec_of(codec)))
    async with Engine.open(tmp_path, durability=mode) as engine:
        journal = engine.journal(NAME)
        fragments = await journal.fragments()
        assert [(it.begin, it.backing_store) for it in fragments] == [
            *((at, STORE) for at in range(0, 4400, 1100)),
            (4400, ""),
        ]
        for offset in (0, 1, 1099, 1100, 1101, 3000, 4399, 4400, 5500):
            assert await journal.read(offset) == content[offset:]
        assert await journal.read(1000, 2300) == content[1000:2300]
        # The spools that were persisted are given up: it is the store that was read.
        for path in stored(tmp_path / "fragments").values():
            path.unlink()
        with pytest.raises(BroadsheetError) as caught:
            await journal.read()
        assert caught.value.journal == NAME
        assert await journal.read(4400) == content[4400:]
        assert (await journal.append(b"more")).begin == 5500


async def test_spools_that_were_persisted_are_used_again(tmp_path: Path) -> None:
    async with Engine.open(tmp_path, durability="os") as engine:
        journal = await engine.create_journal(NAME, spec_of())
        for _ in range(6):
            await fill(engine, journal, 10)
            await engine._committer.checkpoint()
        assert len(list((tmp_path / "spools").iterdir())) < 20
        assert len(stored(tmp_path / "fragments")) == 59


async def test_a_reader_within_a_spool_is_not_disturbed(tmp_path: Path) -> None:
    """The spool it reads is persisted, given up and used again: what it reads stays what it was."""
    async with Engine.open(tmp_path, durability="os") as engine:
        journal = await engine.create_journal(NAME, spec_of(store=""))
        await journal.append(b"-")
        content = b"".join(b"%07d\n" % number for number in range(100_000))
        await journal.append(content)
        await journal.append(b"-")
        async with engine.read(ReadRequest(NAME, 1, end_offset=1 + len(content))) as stream:
            got = b""
            while not got:
                got = bytes((await anext(stream)).content or b"")
            await engine.apply(ApplyRequest((JournalChange(-1, spec_of()),)))
            await engine._persister.settle()
            assert len(stored(tmp_path / "fragments")) == 2
            for _ in range(3):
                await engine._committer.checkpoint()
                await fill(engine, journal, 6)
            async for response in stream:
                got += bytes(response.content or b"")
        assert got == content


async def test_what_a_restart_finds_completed_is_persisted(tmp_path: Path) -> None:
    async with Engine.open(tmp_path) as engine:
        content = await fill(engine, await engine.create_journal(NAME, spec_of(store="")))
        assert stored(tmp_path / "fragments") == {}
        await engine.apply(ApplyRequest((JournalChange(-1, spec_of(store="file:///gone/")),)))
        await engine._persister.settle()
        assert engine._persister.pending == 4
        assert engine.ready_problem()
    (tmp_path / "fragments" / "gone").mkdir()
    async with Engine.open(tmp_path) as engine:
        await trio.testing.wait_all_tasks_blocked()
        await engine._persister.settle()
        assert len(stored(tmp_path / "fragments" / "gone")) == 4
        assert engine.ready_problem() is None
        assert await engine.journal(NAME).read() == content


async def test_a_store_in_trouble_is_tried_again(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = SimulatedRuntime(1)
    async with Engine.in_memory(runtime=runtime) as engine:
        await engine.create_journal(NAME, spec_of(store=""))
        content = await fill(engine, engine.journal(NAME))
        with caplog.at_level(logging.WARNING):
            await engine.apply(ApplyRequest((JournalChange(-1, spec_of(store="file:///later/")),)))
            await trio.sleep(200)
        assert 4 * 5 < len([it for it in caplog.records if "failed to persist" in it.message]) < 4 * 20, "it backs off"
        runtime.files.make_dirs("/fragments/later")
        await trio.sleep(61)
        assert engine._persister.pending == 0
        assert engine.ready_problem() is None
        assert await engine.journal(NAME).read() == content
        assert [it.backing_store for it in await engine.journal(NAME).fragments()] == ["file:///later/"] * 4 + [""]


async def test_file_root_is_where_stores_begin(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "some where").mkdir(parents=True)
    async with Engine.open(tmp_path / "data", file_root=str(root)) as engine:
        journal = await engine.create_journal(NAME, spec_of(store="file:///some%20where/"))
        await fill(engine, journal)
        assert len(stored(root / "some where")) == 4
        assert stored(tmp_path / "data" / "fragments") == {}


async def test_flush_interval_rolls_by_the_clock(autojump_clock: trio.testing.MockClock) -> None:
    runtime = SimulatedRuntime(1)
    runtime.simulated_clock.set_ns(1_700_000_000 // 60 * 60 * 10**9)  # at the beginning of a minute
    async with Engine.in_memory(runtime=runtime) as engine:
        journal = await engine.create_journal(NAME, spec_of(length=1 << 20, flush_interval_ns=60 * 10**9))
        await journal.append(b"-")
        for _ in range(6):
            await journal.append(b"x")
            await trio.sleep(25)
        assert [(it.begin, it.end) for it in await journal.fragments()] == [(0, 1), (1, 4), (4, 6), (6, 7)]


async def test_a_deleted_journal_leaves_its_fragments_and_no_spools(tmp_path: Path) -> None:
    async with Engine.open(tmp_path, durability="os") as engine:
        await fill(engine, await engine.create_journal(NAME, spec_of()))
        await engine.apply(ApplyRequest((JournalChange(-1, delete=NAME),)))
        await engine._persister.settle()
        assert len(stored(tmp_path / "fragments")) == 4
    async with Engine.open(tmp_path, durability="os") as engine:
        journal = await engine.create_journal(NAME, spec_of())
        assert len(await journal.fragments()) == 4
        async with engine.read(ReadRequest(NAME, -1, metadata_only=True)) as stream:
            response = await anext(stream)
        assert (response.status, response.write_head) == (Status.OFFSET_NOT_YET_AVAILABLE, 4400)


async def test_a_damaged_object_is_refused(tmp_path: Path) -> None:
    for codec in (NONE, SNAPPY):
        folder = tmp_path / codec.name
        async with Engine.open(folder, durability="os") as engine:
            journal = await engine.create_journal(NAME, spec_of(codec))
            content = await fill(engine, journal)
            path = min(stored(folder / "fragments").items())[1]
            good = path.read_bytes()
            for damaged in (good[:-1], b"", good + good):
                path.write_bytes(damaged)
                with pytest.raises(CorruptData) as caught:
                    await journal.read()
                assert caught.value.journal == NAME
                assert str(path.name) in caught.value.path
            path.write_bytes(good)
            assert await journal.read() == content


async def test_a_damaged_spool_is_not_persisted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine.open(tmp_path, durability="os") as engine:
        journal = await engine.create_journal(NAME, spec_of(store=""))
        await fill(engine, journal, 3)
        spools = sorted((tmp_path / "spools").iterdir())
        with spools[0].open("r+b") as file:
            file.write(b"!")
        await engine.apply(ApplyRequest((JournalChange(-1, spec_of()),)))
        await engine._persister.settle()
        assert "does not hold what was committed" in caplog.text
        names = list(stored(tmp_path / "fragments"))
        assert len(names) == 1
        assert parse_content_path(NAME, names[0].removeprefix(f"{NAME}/")).begin == 1100
        assert spools[0].exists(), "it is kept"


async def test_objects_of_others_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "fragments" / NAME
    folder.mkdir(parents=True)
    content = b"hello"
    good = Fragment(NAME, 10, 15, hashlib.sha1(content).digest(), NONE, path_postfix="date=2026-11-21")
    (folder / "date=2026-11-21").mkdir()
    (folder / "date=2026-11-21" / good.content_name).write_bytes(content)
    for name in ("README.md", f".partial-{good.content_name}1234abcd", "x-y-z.raw", good.content_name + ".lzma"):
        (folder / name).write_bytes(b"something else")
    async with Engine.open(tmp_path) as engine:
        journal = await engine.create_journal(NAME, spec_of())
        (found,) = await journal.fragments()
        assert (found.begin, found.end, found.path_postfix) == (10, 15, "date=2026-11-21")
        assert await journal.read() == content

"""What the simulated disk promises: what survives, what may not, and how it fails."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broadsheet.testing.simulation import (
    SECTOR_BYTES,
    CrashKind,
    Moment,
    SimulatedCrash,
    SimulatedDisk,
    SimulatedFile,
    is_simulated_crash,
)

TRIES = 300


def outcomes(disk: SimulatedDisk, kind: CrashKind = "power", tries: int = TRIES) -> Iterator[SimulatedDisk]:
    """What may be found after a crash at this moment. The disk itself goes on."""
    twin = disk.clone()
    for seed in range(tries):
        yield twin.crash(random.Random(seed), kind)


def create(disk: SimulatedDisk, path: str, content: bytes = b"", *, durable: bool = True) -> SimulatedFile:
    file = disk.open(path, create=True)
    file.pwrite([content], 0)
    if durable:
        file.sync()
        disk.sync_dir(path.rpartition("/")[0])
    return file


def read(disk: SimulatedDisk, path: str) -> bytes:
    file = disk.open_read(path)
    return file.pread(file.size(), 0)


# --- Content ----------------------------------------------------------------------------------------------------


def test_synced_content_survives() -> None:
    disk = SimulatedDisk()
    content = random.Random(1).randbytes(5000)
    create(disk, "/disk/a", content)
    for boot in outcomes(disk):
        assert read(boot, "/disk/a") == content


def test_unsynced_writes_are_lost_kept_or_torn() -> None:
    disk = SimulatedDisk()
    old, new = b"o" * SECTOR_BYTES * 4, b"n" * SECTOR_BYTES * 4
    file = create(disk, "/disk/a", old)
    file.pwrite([new], 0)
    found = {read(boot, "/disk/a") for boot in outcomes(disk)}
    assert {old, new} < found
    sectors = {content[i : i + SECTOR_BYTES] for content in found for i in range(0, len(old), SECTOR_BYTES)}
    assert sectors == {old[:SECTOR_BYTES], new[:SECTOR_BYTES]}  # a sector is atomic
    assert any(content[0:1] == b"o" and content[-1:] == b"n" for content in found)  # a hole, then good records
    assert len(found) > 10
    assert disk.content("a", durable=True) == old
    assert disk.content("a") == new


def test_each_version_of_a_sector_may_be_found() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"0" * 100)
    for digit in b"123":
        file.pwrite([bytes([digit]) * 50], 20)
    found = {read(boot, "/disk/a")[20:70] for boot in outcomes(disk)}
    assert found == {b"%d" % digit * 50 for digit in range(4)}


def test_length_survives_or_not() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"x" * 100)
    file.pwrite([b"y" * 2000], 100)
    lengths = {len(read(boot, "/disk/a")) for boot in outcomes(disk)}
    assert lengths == {100, 2100}
    contents = {read(boot, "/disk/a") for boot in outcomes(disk)}
    assert any(len(content) == 2100 and not content.strip(b"x\0") for content in contents)  # length, no data
    file.truncate(10)
    lengths = {len(read(boot, "/disk/a")) for boot in outcomes(disk)}
    assert lengths == {10, 100, 2100}
    file.sync()
    assert {read(boot, "/disk/a") for boot in outcomes(disk)} == {b"x" * 10}


def test_truncated_bytes_may_come_back_but_not_once_synced() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"x" * 1000)
    file.truncate(0)
    file.truncate(1000)
    assert read(disk, "/disk/a") == bytes(1000)
    assert {read(boot, "/disk/a")[:1] for boot in outcomes(disk)} == {b"", b"x", b"\0"}
    file.sync()
    assert {read(boot, "/disk/a") for boot in outcomes(disk)} == {bytes(1000)}


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_find_only_what_was_there(seed: int) -> None:
    """Each sector found was that sector's content at some time since the last sync; so was the length."""
    rng = random.Random(seed)
    disk = SimulatedDisk(rng)
    file = create(disk, "/disk/a")
    versions = [b""]
    for _ in range(rng.randrange(60)):
        action = rng.random()
        size = file.size()
        if action < 0.7:
            offset = rng.choice((size, rng.randrange(size + 1), rng.randrange(4000)))
            file.pwrite([rng.randbytes(rng.choice((1, 30, 300, 1500)))], offset)
        elif action < 0.85:
            file.truncate(rng.randrange(4000))
        else:
            file.sync()
            versions = []
        versions.append(read(disk, "/disk/a"))
    for again in (disk, disk.clone()):
        for boot in outcomes(again, tries=40):
            found = read(boot, "/disk/a")
            assert len(found) in {len(version) for version in versions}
            for start in range(0, len(found), SECTOR_BYTES):
                sector = found[start : start + SECTOR_BYTES]
                zeros = bytes(SECTOR_BYTES)
                assert any(
                    sector == (version[start : start + SECTOR_BYTES] + zeros)[: len(sector)] for version in versions
                )
            assert boot.content("a", durable=True) == found  # what was found is on the disk
    assert all(read(boot, "/disk/a") == versions[-1] for boot in outcomes(disk, "process", tries=3))


# --- Names ------------------------------------------------------------------------------------------------------


def test_a_name_needs_its_folder_synced() -> None:
    disk = SimulatedDisk()
    create(disk, "/disk/a", b"content", durable=False).sync()
    found = {boot.exists("/disk/a") for boot in outcomes(disk)}
    assert found == {True, False}
    assert all(read(boot, "/disk/a") == b"content" for boot in outcomes(disk) if boot.exists("/disk/a"))
    disk = SimulatedDisk()
    create(disk, "/disk/a", b"content", durable=False)
    disk.sync_dir("/disk")
    assert {read(boot, "/disk/a") for boot in outcomes(disk)} == {b"content", b"", bytes(7)}


def test_a_folder_needs_its_parent_synced() -> None:
    disk = SimulatedDisk()
    disk.make_dirs("/disk/a/b")
    create(disk, "/disk/a/b/c", b"content")
    found = {(boot.exists("/disk/a"), boot.exists("/disk/a/b"), boot.exists("/disk/a/b/c")) for boot in outcomes(disk)}
    assert found == {(False, False, False), (True, False, False), (True, True, True)}
    disk.sync_dir("/disk/a")
    disk.sync_dir("/disk")
    assert {read(boot, "/disk/a/b/c") for boot in outcomes(disk)} == {b"content"}


def test_rename_is_atomic() -> None:
    disk = SimulatedDisk()
    disk.make_dirs("/disk/x")
    disk.sync_dir("/disk")
    create(disk, "/disk/cur", b"old")
    for target in ("/disk/cur", "/disk/x/cur"):
        trial = disk.clone()
        create(trial, "/disk/new", b"new")
        trial.rename("/disk/new", target)
        found = set()
        for boot in outcomes(trial):
            moved = boot.exists(target) and read(boot, target) == b"new"
            assert boot.exists("/disk/new") is not moved
            if target == "/disk/cur":
                assert read(boot, target) == (b"new" if moved else b"old")
            found.add(moved)
        assert found == {True, False}
        trial.sync_dir(target.rpartition("/")[0])
        assert all(read(boot, target) == b"new" for boot in outcomes(trial))
        assert not any(boot.exists("/disk/new") for boot in outcomes(trial))


def test_unlinked_files_may_come_back() -> None:
    disk = SimulatedDisk()
    create(disk, "/disk/a", b"content")
    disk.unlink("/disk/a")
    assert {boot.exists("/disk/a") for boot in outcomes(disk)} == {True, False}
    disk.sync_dir("/disk")
    assert {boot.exists("/disk/a") for boot in outcomes(disk)} == {False}


def test_names_survive_in_any_subset() -> None:
    disk = SimulatedDisk()
    names = [f"/disk/{name}" for name in "abc"]
    for name in names:
        create(disk, name, durable=False)
    found = {tuple(boot.exists(name) for name in names) for boot in outcomes(disk)}
    assert len(found) == 8


def test_a_synced_name_keeps_what_it_is_built_on() -> None:
    """A file moved away and replaced is never lost from both names."""
    disk = SimulatedDisk()
    disk.make_dirs("/disk/kept")
    disk.sync_dir("/disk")
    create(disk, "/disk/log", b"first")
    disk.rename("/disk/log", "/disk/kept/log")
    create(disk, "/disk/log", b"second", durable=False).sync()
    for boot in outcomes(disk):
        contents = [read(boot, name) for name in ("/disk/log", "/disk/kept/log") if boot.exists(name)]
        assert b"first" in contents
    disk.sync_dir("/disk")
    for boot in outcomes(disk):
        assert (read(boot, "/disk/log"), read(boot, "/disk/kept/log")) == (b"second", b"first")


# --- Kinds of crash ---------------------------------------------------------------------------------------------


def test_process_crash_keeps_all_but_handles_and_locks() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"written", durable=False)
    release = disk.lock("/disk/lock")
    boot = disk.crash(random.Random(1), "process")
    assert read(boot, "/disk/a") == b"written"
    boot.lock("/disk/lock")()
    calls: list[Callable[[], Any]] = [
        lambda: file.pread(1, 0), lambda: file.pwrite([b""], 0), file.sync, file.size, file.close,
        lambda: file.truncate(0), lambda: disk.open("/disk/b", create=True), lambda: disk.exists("/disk/a"),
        lambda: disk.list_dir("/disk"), lambda: disk.sync_dir("/disk"), release, lambda: disk.unlink("/disk/a"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()
    assert disk.crashed
    assert not boot.crashed
    assert {later.exists("/disk/a") for later in outcomes(boot)} == {True, False}  # still un-synced


def test_clones_are_apart() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"0123456789" * 100)
    twin = disk.clone()
    file.pwrite([b"disk"], 0)
    other = twin.open("/disk/a")
    other.pwrite([b"twin"], 600)
    disk.unlink("/disk/a")
    assert read(twin, "/disk/a") == b"0123456789" * 60 + b"twin" + b"456789" + b"0123456789" * 39
    assert file.pread(4, 0) == b"disk"
    assert file.pread(4, 600) == b"0123"
    assert {boot.exists("/disk/a") for boot in outcomes(twin)} == {True}


def test_a_crash_may_be_drawn_twice() -> None:
    disk = SimulatedDisk()
    create(disk, "/disk/a", bytes(10_000), durable=False)
    disk.sync_dir("/disk")
    for seed in range(20):
        one, two = (read(disk.crash(random.Random(seed), "power"), "/disk/a") for _ in range(2))
        assert one == two


# --- Faults -----------------------------------------------------------------------------------------------------


def program(disk: SimulatedDisk) -> None:
    """A bit of everything."""
    disk.make_dirs("/disk/log")
    disk.sync_dir("/disk")
    release = disk.lock("/disk/lock")
    file = disk.open("/disk/log/1.new", create=True)
    file.truncate(4096)
    file.pwrite([b"a" * 600, b"b" * 600], 0)
    file.sync()
    disk.rename("/disk/log/1.new", "/disk/log/1")
    disk.sync_dir("/disk/log")
    file.pread(100, 0)
    file.size()
    file.close()
    disk.open_read("/disk/log/1").close()
    disk.open("/disk/log/1").close()
    disk.exists("/disk/log/1")
    disk.list_dir("/disk/log")
    disk.unlink("/disk/log/1")
    release()


def test_trace_and_sites() -> None:
    disk = SimulatedDisk()
    program(disk)
    assert disk.trace == [
        "1 make_dirs log",
        "2 sync_dir .",
        "3 lock lock",
        "4 create log/1.new",
        "5 truncate log/1.new 4096",
        "6 pwrite log/1.new 0 1200 crc=440ddcba",
        "7 fdatasync log/1.new",
        "8 rename log/1.new log/1",
        "9 sync_dir log",
        "10 pread log/1.new 0 100",
        "11 size log/1.new",
        "12 close log/1.new",
        "13 open_read log/1",
        "14 close log/1",
        "15 open log/1",
        "16 close log/1",
        "17 exists log/1",
        "18 list_dir log",
        "19 unlink log/1",
        "20 unlock lock",
    ]
    assert disk.calls == 20
    assert disk.effects == [1, 2, 4, 5, 6, 7, 8, 9, 19]
    assert disk.sync_sites_seen == ["sync_dir:.", "fdatasync:log", "sync_dir:log"]
    assert disk.write_sites_seen == ["pwrite:log"]
    assert "rename:log" in disk.effect_sites_seen
    assert disk.sites_seen["close:log"] == 3
    quiet = SimulatedDisk(tracing=False, classify=lambda path: "all")
    program(quiet)
    assert (quiet.trace, quiet.calls) == ([], 20)
    assert quiet.sync_sites_seen == ["sync_dir:all", "fdatasync:all"]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("number", range(1, 22))
def test_fail_at_each_call(number: int, partial: bool) -> None:
    disk = SimulatedDisk()
    disk.fail_at(number, OSError(errno.EIO, "no"), partial=partial)
    if number > 20:
        program(disk)
        return
    with pytest.raises(OSError, match="no") as caught:
        program(disk)
    assert caught.value.errno == errno.EIO
    assert disk.calls == number
    assert disk.trace[-1].endswith(" !EIO")
    disk.exists("/disk")  # it struck once


@pytest.mark.parametrize("when", ["before", "partial", "after"])
@pytest.mark.parametrize("number", range(1, 21))
def test_crash_at_each_call(number: int, when: Moment) -> None:
    whole = SimulatedDisk()
    program(whole)
    disk = SimulatedDisk()
    disk.crash_at(number, when)
    with pytest.raises(SimulatedCrash):
        program(disk)
    with pytest.raises(SimulatedCrash):
        disk.exists("/disk")
    assert [line.split(" !")[0] for line in disk.trace] == whole.trace[:number]
    for kind in ("process", "power"):
        boot = disk.crash(random.Random(number), kind)
        assert boot.calls == 0
        program(boot)  # nothing is armed any more
    boot = disk.crash(random.Random(number), "process")
    if number == 8:
        assert boot.exists("/disk/log/1") is (when != "before")
    if number == 6:
        written = read(boot, "/disk/log/1.new").rstrip(b"\0")
        assert (b"a" * 600 + b"b" * 600).startswith(written)
        assert len(written) == {"before": 0, "after": 1200}.get(when, len(written))


def test_failed_calls_have_no_effect_unless_partial() -> None:
    for partial in (False, True):
        disk = SimulatedDisk(random.Random(5))
        create(disk, "/disk/a", b"x")
        disk.fail_at(disk.calls + 1, OSError(errno.EIO, "no"), partial=partial)
        with pytest.raises(OSError, match="no"):
            disk.rename("/disk/a", "/disk/b")
        assert disk.exists("/disk/b") is partial
        file = disk.open("/disk/c", create=True)
        disk.fail_at(disk.calls + 1, OSError(errno.ENOSPC, "full"), partial=partial)
        with pytest.raises(OSError, match="full"):
            file.pwrite([b"y" * 1000], 0)
        assert (0 < file.size() < 1000) if partial else file.size() == 0


def test_fail_matching() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"x")
    disk.fail_matching(lambda call: call.site == "pwrite:a" and call.length > 5, OSError(errno.EIO, "big"), times=2)
    file.pwrite([b"12345"], 0)
    for _ in range(2):
        with pytest.raises(OSError, match="big"):
            file.pwrite([b"123456"], 0)
    file.pwrite([b"123456"], 0)
    disk.fail_matching(lambda call: call.operation == "open_read", PermissionError(errno.EACCES, "x"), times=None)
    for _ in range(3):
        with pytest.raises(PermissionError):
            disk.open_read("/disk/a")
    disk.clear_faults()
    disk.open_read("/disk/a")


@pytest.mark.parametrize("partial", [False, True])
def test_failed_sync_then_success_is_not_durable(partial: bool) -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"old " * 256)
    file.pwrite([b"lost" * 128], 0)
    disk.fail_at(disk.calls + 1, OSError(errno.EIO, "no"), partial=partial)
    with pytest.raises(OSError, match="no"):
        file.sync()
    file.pwrite([b"kept" * 128], 512)
    file.sync()
    assert read(disk, "/disk/a") == b"lost" * 128 + b"kept" * 128
    found = {read(boot, "/disk/a") for boot in outcomes(disk)}
    assert {content[512:] for content in found} == {b"kept" * 128}
    assert {content[:4] for content in found} == {b"old ", b"lost"}
    twin = disk.clone()
    twin.evict("a")
    assert read(twin, "/disk/a") == b"old " * 128 + b"kept" * 128
    assert {read(boot, "/disk/a") for boot in outcomes(twin)} == {b"old " * 128 + b"kept" * 128}
    file.pwrite([b"done" * 128], 0)  # written again: dirty again
    file.sync()
    assert {read(boot, "/disk/a") for boot in outcomes(disk)} == {b"done" * 128 + b"kept" * 128}


def test_failed_sync_of_growth() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"12345")
    file.pwrite([b"x" * 2000], 5)
    disk.fail_at(disk.calls + 1, OSError(errno.EIO, "no"))
    with pytest.raises(OSError, match="no"):
        file.sync()
    file.sync()
    found = {read(boot, "/disk/a") for boot in outcomes(disk)}
    assert {len(content) for content in found} == {2005}
    assert b"12345" + bytes(2000) in found
    assert {content[:5] for content in found} == {b"12345"}


def test_failed_sync_dir_makes_no_name_durable() -> None:
    disk = SimulatedDisk()
    create(disk, "/disk/a", durable=False)
    disk.fail_at(disk.calls + 1, OSError(errno.EIO, "no"), partial=True)
    with pytest.raises(OSError, match="no"):
        disk.sync_dir("/disk")
    assert {boot.exists("/disk/a") for boot in outcomes(disk)} == {True, False}


def test_full_disk() -> None:
    disk = SimulatedDisk(capacity_bytes=1000)
    file = create(disk, "/disk/a", b"x" * 900)
    with pytest.raises(OSError) as caught:
        file.pwrite([b"y" * 200], 900)
    assert caught.value.errno == errno.ENOSPC
    assert file.size() == 1000  # as much as there was room for
    file.pwrite([b"z" * 1000], 0)  # no growth
    with pytest.raises(OSError) as caught:
        file.truncate(1001)
    assert caught.value.errno == errno.ENOSPC
    file.truncate(500)
    disk.open("/disk/b", create=True).pwrite([b"y" * 500], 0)
    disk.unlink("/disk/a")
    disk.open("/disk/c", create=True).pwrite([b"y" * 500], 0)


def test_misdirected_write() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"." * 20)
    disk.misdirect_at(disk.calls + 1, 7)
    file.pwrite([b"oops"], 3)
    assert read(disk, "/disk/a") == b"." * 10 + b"oops" + b"." * 6


def test_spoiling() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"abcdef")
    file.pwrite([b"A"], 0)
    calls = disk.calls
    disk.flip_bit("a", 5, 0)
    assert disk.content("a") == b"Abcdeg"
    assert disk.content("/disk/a", durable=True) == b"abcdeg"
    disk.truncate("a", 5)
    disk.overwrite("a", 1, b"BC")
    assert disk.content("a", durable=True) == b"ABCde"
    assert disk.calls == calls
    disk.make_dirs("/disk/folder")
    create(disk, "/disk/folder/b")
    assert list(disk.walk()) == ["a", "folder/b"]


def test_groups_of_crashes() -> None:
    crash = SimulatedCrash("x")
    assert is_simulated_crash(crash)
    assert is_simulated_crash(BaseExceptionGroup("", [crash, BaseExceptionGroup("", [crash])]))
    assert not is_simulated_crash(BaseExceptionGroup("", [crash, ValueError()]))
    assert not is_simulated_crash(KeyboardInterrupt())
    assert not isinstance(crash, Exception)


# --- Mutations --------------------------------------------------------------------------------------------------


def write_ahead(disk: SimulatedDisk) -> list[int]:
    """Data, then a record that vouches for it; two rounds. Returns what was acknowledged."""
    acknowledged: list[int] = []
    try:
        disk.make_dirs("/disk/data")
        disk.make_dirs("/disk/log")
        disk.sync_dir("/disk")
        data, log = disk.open("/disk/data/d", create=True), disk.open("/disk/log/l", create=True)
        disk.sync_dir("/disk/data")
        disk.sync_dir("/disk/log")
        for number in (1, 2):
            data.pwrite([bytes([number]) * 600], 600 * (number - 1))
            data.sync()
            log.pwrite([bytes([number])], number - 1)
            log.sync()
            acknowledged.append(number)
    except SimulatedCrash:
        pass
    return acknowledged


def sound(disk: SimulatedDisk, acknowledged: list[int]) -> bool:
    """Each acknowledged record is there, and each record's data."""
    records = read(disk, "/disk/log/l").rstrip(b"\0") if disk.exists("/disk/log/l") else b""
    if len(records) < len(acknowledged):
        return False
    data = read(disk, "/disk/data/d") if disk.exists("/disk/data/d") else b""
    return all(data[600 * at : 600 * (at + 1)] == bytes([at + 1]) * 600 for at, record in enumerate(records) if record)


def is_sound_at_all_crashes(prepare: Callable[[SimulatedDisk], None], kinds: tuple[CrashKind, ...]) -> bool:
    whole = SimulatedDisk()
    prepare(whole)
    write_ahead(whole)
    for number in [*whole.effects, whole.calls + 1]:
        for when in ("before", "after"):
            disk = SimulatedDisk()
            prepare(disk)
            disk.crash_at(number, when)
            acknowledged = write_ahead(disk)
            for kind in kinds:
                for boot in outcomes(disk, kind, tries=20 if kind == "power" else 1):
                    if not sound(boot, acknowledged):
                        return False
    return True


def test_each_sync_of_a_program_that_needs_all_is_found_missing() -> None:
    assert is_sound_at_all_crashes(lambda disk: None, ("power", "process"))
    disk = SimulatedDisk()
    write_ahead(disk)
    assert len(disk.sync_sites_seen) == 5
    for site in disk.sync_sites_seen:

        def prepare(disk: SimulatedDisk, site: str = site) -> None:
            disk.mutations.skip_sync(site)

        assert not is_sound_at_all_crashes(prepare, ("power",)), site
        assert is_sound_at_all_crashes(prepare, ("process",)), site


def test_swapped_writes_are_found() -> None:
    def swap(disk: SimulatedDisk) -> None:
        disk.mutations.delay_write("pwrite:data", until_after="pwrite:log")

    assert not is_sound_at_all_crashes(swap, ("power",))
    assert not is_sound_at_all_crashes(swap, ("process",))


def test_held_write_is_seen_by_the_process_and_lands_with_its_sync() -> None:
    disk = SimulatedDisk()
    a, b = create(disk, "/disk/a", b"old"), create(disk, "/disk/b", b"old")
    disk.mutations.delay_write("pwrite:a", until_after="fdatasync:b")
    a.pwrite([b"newer"], 0)
    a.sync()
    assert disk.trace[-2].endswith("!held")
    assert (a.size(), read(disk, "/disk/a"), disk.list_dir("/disk")[0].size) == (5, b"newer", 5)
    for kind in ("power", "process"):
        assert {read(boot, "/disk/a") for boot in outcomes(disk, kind, tries=5)} == {b"old"}
    disk = disk.crash(random.Random(1), "process")  # mutations outlive a crash
    a, b = disk.open("/disk/a"), disk.open("/disk/b")
    a.pwrite([b"newer"], 0)
    a.sync()
    b.sync()
    assert {read(boot, "/disk/a") for boot in outcomes(disk, tries=5)} == {b"old"}
    disk = disk.clone()
    a, b = disk.open("/disk/a"), disk.open("/disk/b")
    a.pwrite([b"newer"], 0)
    a.sync()
    b.sync()
    disk.exists("/disk")  # the next call: it lands, synced
    assert {read(boot, "/disk/a") for boot in outcomes(disk, tries=5)} == {b"newer"}


def test_two_writes_at_one_site_change_places() -> None:
    disk = SimulatedDisk()
    file = create(disk, "/disk/a", b"....")
    disk.mutations.delay_write("pwrite:a", until_after="pwrite:a")
    file.pwrite([b"1"], 0)
    assert disk.crash(random.Random(1), "process").content("a") == b"...."
    disk = SimulatedDisk(mutations=disk.mutations)
    file = create(disk, "/disk/a", durable=False)
    file.pwrite([b"1"], 0)
    file.pwrite([b"2"], 1)
    twin = disk.clone()
    assert twin.content("a")[1:] == b"2"
    assert file.pread(4, 0)[:2] == b"12"


def test_mutations_name_their_sites() -> None:
    disk = SimulatedDisk()
    with pytest.raises(ValueError, match="not the site of a sync"):
        disk.mutations.skip_sync("pwrite:log")
    with pytest.raises(ValueError, match="not the site of a write"):
        disk.mutations.delay_write("rename:log", until_after="pwrite:log")
    disk.mutations.skip_sync("fdatasync:a")
    disk.mutations.clear()
    create(disk, "/disk/a", b"x")
    assert {read(boot, "/disk/a") for boot in outcomes(disk, tries=5)} == {b"x"}

"""What every `Files` and every `Runtime` does: subclass `FilesSuite`, or `RuntimeSuite`, in a pytest module.

    class TestMine(RuntimeSuite):
        @pytest.fixture
        def runtime(self):
            return SimulatedRuntime(seed=1)

        @pytest.fixture
        def root(self):
            return "/disk"

`root` is an empty folder. Needs pytest-trio. Durability cannot be tested from inside a machine that stays up: that
`sync` means what it says is the disk's promise, and tested of the simulated one in tests/runtime.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from broadsheet.engine.runtime import DirEntry, File, Files, Runtime

__all__ = ["FilesSuite", "RuntimeSuite"]

_FEW_SECONDS_NS = 60 * 10**9


def _create(files: Files, path: str, content: bytes = b"") -> File:
    file = files.open(path, create=True)
    file.pwrite([content], 0)
    return file


def _content(files: Files, path: str) -> bytes:
    file = files.open_read(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def _names(files: Files, path: str) -> list[str]:
    return [entry.name for entry in files.list_dir(path)]


class FilesSuite:
    """See the module."""

    @pytest.fixture
    def files(self) -> Files:
        raise NotImplementedError("override the `files` fixture")

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError("override the `root` fixture")

    # --- Content --------------------------------------------------------------------------------------------

    def test_write_and_read(self, files: Files, root: str) -> None:
        file = files.open(f"{root}/a", create=True)
        assert file.path == f"{root}/a"
        assert file.size() == 0
        assert file.pread(10, 0) == b""
        file.pwrite([b"hello ", b"world"], 0)
        assert file.size() == 11
        assert file.pread(5, 6) == b"world"
        assert file.pread(100, 6) == b"world"
        assert file.pread(100, 11) == b""
        assert file.pread(100, 1_000_000) == b""
        assert file.pread(0, 3) == b""
        file.close()

    def test_overwrite(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a", b"0123456789")
        file.pwrite([b"xx"], 4)
        assert file.pread(20, 0) == b"0123xx6789"
        file.pwrite([b"yyyy"], 8)
        assert file.pread(20, 0) == b"0123xx67yyyy"
        file.close()

    def test_all_kinds_of_buffers(self, files: Files, root: str) -> None:
        file = files.open(f"{root}/a", create=True)
        source = bytearray(b"--abc--")
        file.pwrite([memoryview(source)[2:5], bytearray(b"def"), b"", memoryview(b"ghi")], 0)
        source[:] = b"changed"
        file.pwrite([memoryview(bytearray(b"jkl"))], 9)
        only = bytearray(b"mno")
        file.pwrite([only], 12)
        only[:] = b"???"
        assert file.pread(100, 0) == b"abcdefghijklmno"
        file.close()

    def test_empty_write_changes_nothing(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a", b"abc")
        file.pwrite([b""], 100)
        file.pwrite([b"", b""], 100)
        assert (file.size(), file.pread(100, 0)) == (3, b"abc")
        file.close()

    def test_many_buffers(self, files: Files, root: str) -> None:
        file = files.open(f"{root}/a", create=True)
        parts = [b"%d," % number for number in range(3000)]
        file.pwrite(parts, 7)
        assert file.pread(1_000_000, 0) == bytes(7) + b"".join(parts)
        file.close()

    def test_holes_are_zeros(self, files: Files, root: str) -> None:
        file = files.open(f"{root}/a", create=True)
        file.pwrite([b"end"], 100_000)
        assert file.size() == 100_003
        assert file.pread(100_003, 0) == bytes(100_000) + b"end"
        file.close()

    def test_truncate(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a", b"0123456789")
        file.truncate(4)
        assert (file.size(), file.pread(10, 0)) == (4, b"0123")
        file.truncate(8)
        assert file.pread(10, 0) == b"0123\0\0\0\0"
        file.truncate(8)
        file.truncate(0)
        assert file.size() == 0
        file.pwrite([b"x"], 2)
        assert file.pread(10, 0) == b"\0\0x"
        file.close()

    def test_large_file(self, files: Files, root: str) -> None:
        block = random.Random(1).randbytes(1 << 20)
        file = _create(files, f"{root}/a", block)
        file.pwrite([block, block], 1 << 20)
        assert file.size() == 3 << 20
        assert file.pread(1 << 20, 1 << 20) == block
        file.close()

    def test_sync_returns(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a", b"x")
        file.sync()
        files.sync_dir(root)
        file.sync()
        assert file.pread(1, 0) == b"x"
        file.close()

    def test_handles_see_each_other(self, files: Files, root: str) -> None:
        one = files.open(f"{root}/a", create=True)
        two = files.open(f"{root}/a")
        reader = files.open_read(f"{root}/a")
        one.pwrite([b"1"], 0)
        two.pwrite([b"2"], 1)
        assert reader.pread(10, 0) == b"12"
        one.close()
        assert two.pread(10, 0) == b"12"
        two.close()
        reader.close()
        reader.close()  # twice is once

    def test_create_keeps_what_is_there(self, files: Files, root: str) -> None:
        _create(files, f"{root}/a", b"kept").close()
        file = files.open(f"{root}/a", create=True)
        assert file.pread(10, 0) == b"kept"
        file.close()

    # --- Names ----------------------------------------------------------------------------------------------

    def test_missing_file(self, files: Files, root: str) -> None:
        path = f"{root}/missing"
        for call in (files.open, files.open_read, files.unlink, lambda path: files.rename(path, f"{root}/a")):
            with pytest.raises(FileNotFoundError):
                call(path)
        assert not files.exists(path)
        assert not files.exists(f"{root}/a")
        assert _names(files, root) == []

    def test_missing_folder(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a")
        file.close()
        with pytest.raises(FileNotFoundError):
            files.open(f"{root}/missing/a", create=True)
        with pytest.raises(FileNotFoundError):
            files.rename(f"{root}/a", f"{root}/missing/a")
        assert files.list_dir(f"{root}/missing") == []
        assert not files.exists(f"{root}/missing")
        assert _names(files, root) == ["a"]

    def test_rename(self, files: Files, root: str) -> None:
        files.make_dirs(f"{root}/folder")
        file = _create(files, f"{root}/a", b"content")
        files.rename(f"{root}/a", f"{root}/folder/b")
        assert not files.exists(f"{root}/a")
        assert _names(files, root) == ["folder"]
        assert _content(files, f"{root}/folder/b") == b"content"
        file.pwrite([b"C"], 0)  # the handle stays with the file
        assert _content(files, f"{root}/folder/b") == b"Content"
        file.close()

    def test_rename_over_another(self, files: Files, root: str) -> None:
        _create(files, f"{root}/new", b"new").close()
        old = _create(files, f"{root}/cur", b"old")
        files.rename(f"{root}/new", f"{root}/cur")
        assert _names(files, root) == ["cur"]
        assert _content(files, f"{root}/cur") == b"new"
        assert old.pread(10, 0) == b"old"
        old.pwrite([b"lost"], 0)
        old.close()
        assert _content(files, f"{root}/cur") == b"new"

    def test_rename_to_itself(self, files: Files, root: str) -> None:
        _create(files, f"{root}/a", b"content").close()
        files.rename(f"{root}/a", f"{root}/a")
        assert _names(files, root) == ["a"]
        assert _content(files, f"{root}/a") == b"content"

    def test_unlink_while_open(self, files: Files, root: str) -> None:
        file = _create(files, f"{root}/a", b"still")
        files.unlink(f"{root}/a")
        assert not files.exists(f"{root}/a")
        assert _names(files, root) == []
        file.pwrite([b" here"], 5)
        assert file.pread(20, 0) == b"still here"
        again = _create(files, f"{root}/a", b"another")
        assert file.pread(20, 0) == b"still here"
        file.close()
        assert _content(files, f"{root}/a") == b"another"
        again.close()

    def test_list_is_in_order(self, files: Files, root: str) -> None:
        for name in ("b", "a", "B", "10", "2", ".hidden", "a.b"):
            _create(files, f"{root}/{name}", name.encode()).close()
        files.make_dirs(f"{root}/ab/inner")
        entries = files.list_dir(root)
        names = [".hidden", "10", "2", "B", "a", "a.b", "ab", "b"]
        assert [entry.name for entry in entries] == names
        assert [entry.name for entry in entries if entry.is_dir] == ["ab"]
        assert {entry.name: entry.size for entry in entries if not entry.is_dir} == {
            name: len(name) for name in names if name != "ab"
        }
        assert _names(files, f"{root}/") == names
        assert all(isinstance(entry, DirEntry) for entry in entries)

    def test_modification_time_is_in_seconds(self, files: Files, root: str) -> None:
        _create(files, f"{root}/a", b"1").close()
        (entry,) = files.list_dir(root)
        assert isinstance(entry.mod_time, int)
        assert 1_500_000_000 < entry.mod_time < 5_000_000_000

    def test_make_dirs(self, files: Files, root: str) -> None:
        files.make_dirs(f"{root}/a/b/c")
        files.make_dirs(f"{root}/a/b/c")
        files.make_dirs(f"{root}/a/d", 0o700)
        assert _names(files, f"{root}/a") == ["b", "d"]
        assert files.exists(f"{root}/a/b")
        assert files.exists(f"{root}/a/b/")
        files.sync_dir(f"{root}/a/b")
        _create(files, f"{root}/a/b/c/file", b"x").close()
        with pytest.raises(FileExistsError):
            files.make_dirs(f"{root}/a/b/c/file")
        assert _content(files, f"{root}/a/b/c/file") == b"x"

    def test_exists(self, files: Files, root: str) -> None:
        assert files.exists(root)
        _create(files, f"{root}/a").close()
        assert files.exists(f"{root}/a")
        assert not files.exists(f"{root}/A")
        files.unlink(f"{root}/a")
        assert not files.exists(f"{root}/a")

    # --- Locks ----------------------------------------------------------------------------------------------

    def test_lock_is_exclusive(self, files: Files, root: str) -> None:
        release = files.lock(f"{root}/lock")
        with pytest.raises(BlockingIOError):
            files.lock(f"{root}/lock")
        other = files.lock(f"{root}/other")
        release()
        again = files.lock(f"{root}/lock")
        with pytest.raises(BlockingIOError):
            files.lock(f"{root}/lock")
        again()
        other()

    def test_lock_in_a_missing_folder(self, files: Files, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            files.lock(f"{root}/missing/lock")

    # --- All together ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(5))
    def test_random_programs(self, files: Files, root: str, seed: int) -> None:
        """A few hundred calls against a dictionary of bytes."""
        rng = random.Random(seed)
        names = [f"{root}/{name}" for name in "abcde"]
        model: dict[str, bytearray] = {}
        handles: dict[str, File] = {}
        for _ in range(300):
            name, other = rng.choice(names), rng.choice(names)
            kind = rng.choice(("write", "write", "write", "read", "truncate", "rename", "unlink", "sync"))
            if name not in model:
                handles[name] = files.open(name, create=True)
                model[name] = bytearray()
            data, file = model[name], handles[name]
            offset = rng.choice((len(data), rng.randrange(3000)))
            if kind == "write":
                payload = rng.randbytes(rng.choice((1, 100, 512, 1500)))
                file.pwrite([payload[:50], payload[50:]], offset)
                data.extend(bytes(max(0, offset - len(data))))
                data[offset : offset + len(payload)] = payload
            elif kind == "read":
                assert file.pread(700, offset) == bytes(data[offset : offset + 700])
            elif kind == "truncate":
                file.truncate(offset)
                data.extend(bytes(max(0, offset - len(data))))
                del data[offset:]
            elif kind == "rename" and name != other:
                files.rename(name, other)
                if other in handles:
                    handles.pop(other).close()
                model[other], handles[other] = model.pop(name), handles.pop(name)
            elif kind == "unlink":
                files.unlink(name)
                handles.pop(name).close()
                del model[name]
            elif kind == "sync":
                file.sync()
                files.sync_dir(root)
        assert [(entry.name, entry.size) for entry in files.list_dir(root)] == [
            (name[len(root) + 1 :], len(model[name])) for name in sorted(model)
        ]
        for name, data in model.items():
            assert _content(files, name) == bytes(data)
        for file in handles.values():
            file.close()


class RuntimeSuite(FilesSuite):
    """See the module. `files` is the runtime's."""

    @pytest.fixture
    def runtime(self) -> Runtime:
        raise NotImplementedError("override the `runtime` fixture")

    @pytest.fixture
    def files(self, runtime: Runtime) -> Iterator[Files]:
        yield runtime.files

    async def test_clock(self, runtime: Runtime) -> None:
        now_ns = runtime.clock.now_ns()
        assert isinstance(now_ns, int)
        assert 1_500_000_000 * 10**9 < now_ns < 5_000_000_000 * 10**9
        assert abs(runtime.clock.monotonic() - trio.current_time()) < 60
        assert abs(runtime.clock.now_ns() - now_ns) < _FEW_SECONDS_NS

    async def test_wall_clock_advances_with_sleep(
        self, runtime: Runtime, autojump_clock: trio.testing.MockClock
    ) -> None:
        before, before_ns = runtime.clock.monotonic(), runtime.clock.now_ns()
        await trio.sleep(0.01)
        assert runtime.clock.monotonic() - before >= 0.01
        assert runtime.clock.now_ns() >= before_ns

    async def test_threads_return_and_raise(self, runtime: Runtime) -> None:
        assert await runtime.threads.run(lambda: 6 * 7) == 42

        def fail() -> None:
            raise OSError("disk on fire")

        with pytest.raises(OSError, match="disk on fire"):
            await runtime.threads.run(fail)

    async def test_threads_let_others_run(self, runtime: Runtime) -> None:
        order: list[str] = []

        async def call() -> None:
            await runtime.threads.run(lambda: None)
            order.append("the thread's caller")

        async def other() -> None:
            order.append("another task")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(other)
        assert order == ["another task", "the thread's caller"]

    async def test_thread_that_has_begun_is_not_cancelled(self, runtime: Runtime) -> None:
        done = 0

        def call() -> None:
            nonlocal done
            done += 1

        with trio.CancelScope() as scope:
            scope.cancel()
            await runtime.threads.run(call)
        assert done == (0 if scope.cancelled_caught else 1)

        async def run() -> None:
            await runtime.threads.run(call)
            finished.append(True)

        done = 0
        finished: list[bool] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert done >= len(finished)

    def test_random(self, runtime: Runtime) -> None:
        assert 0 <= runtime.random.random() < 1
        assert len({runtime.random.getrandbits(64) for _ in range(100)}) == 100

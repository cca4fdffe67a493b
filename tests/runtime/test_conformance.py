"""The conformance suite of `Files` and `Runtime` on all that this repository has."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from broadsheet.engine.runtime import Files, MemoryFiles, OsFiles, RealRuntime, Runtime
from broadsheet.testing.conformance.runtime import FilesSuite, RuntimeSuite
from broadsheet.testing.simulation import SimulatedDisk, SimulatedRuntime


class TestRealRuntime(RuntimeSuite):
    @pytest.fixture
    def runtime(self) -> Runtime:
        return RealRuntime()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    def test_files_are_private(self, files: Files, root: str) -> None:
        files.open(f"{root}/a", create=True).close()
        files.lock(f"{root}/lock")()
        files.make_dirs(f"{root}/folder", 0o700)
        for name, mode in (("a", 0o600), ("lock", 0o600), ("folder", 0o700)):
            assert stat.S_IMODE(Path(root, name).stat().st_mode) == mode


class TestMemoryFiles(FilesSuite):
    @pytest.fixture
    def files(self) -> Files:
        return MemoryFiles()

    @pytest.fixture
    def root(self, files: Files) -> str:
        files.make_dirs("/root")
        return "/root"


class TestSimulatedRuntime(RuntimeSuite):
    @pytest.fixture
    def runtime(self) -> Runtime:
        return SimulatedRuntime(1)

    @pytest.fixture
    def root(self) -> str:
        return "/disk"


class TestSimulatedDiskWithMutations(FilesSuite):
    """A held write is the process's own business: it notices nothing."""

    @pytest.fixture
    def files(self) -> Files:
        disk = SimulatedDisk(capacity_bytes=1 << 30)
        for kind in "abcde":
            disk.mutations.delay_write(f"pwrite:{kind}", until_after="pwrite:b")
            disk.mutations.skip_sync(f"fdatasync:{kind}")
        return disk

    @pytest.fixture
    def root(self) -> str:
        return "/disk"


@pytest.mark.parametrize("kind", ["os", "simulated"])
def test_errors_that_memory_does_not_have(kind: str, tmp_path: Path) -> None:
    files: Files = OsFiles() if kind == "os" else SimulatedDisk(root=str(tmp_path))
    root = str(tmp_path)
    file = files.open(f"{root}/a", create=True)
    reader = files.open_read(f"{root}/a")
    with pytest.raises(OSError) as caught:
        reader.pwrite([b"x"], 0)
    assert caught.value.errno == errno.EBADF
    file.close()
    with pytest.raises(OSError) as caught:
        file.pread(1, 0)
    assert caught.value.errno == errno.EBADF
    reader.close()
    with pytest.raises(FileNotFoundError):
        files.sync_dir(f"{root}/missing")
    with pytest.raises(NotADirectoryError):
        files.sync_dir(f"{root}/a")
    with pytest.raises(NotADirectoryError):
        files.open(f"{root}/a/b", create=True)
    with pytest.raises(NotADirectoryError):
        files.make_dirs(f"{root}/a/b")
    with pytest.raises(NotADirectoryError):
        files.list_dir(f"{root}/a")
    with pytest.raises(IsADirectoryError):
        files.open(root, create=True)
    with pytest.raises(IsADirectoryError):
        files.unlink(root)

"""`SpoolFiles` between the event loop and two threads that sync: orders that the simulation, with one, never has."""

from __future__ import annotations

import errno

import pytest

from broadsheet.engine.journal.durable import WritesBroken
from broadsheet.engine.journal.spool_files import SpoolFiles
from broadsheet.engine.runtime import MemoryFile, MemoryFiles, RealRuntime


class WatchedFiles(MemoryFiles):
    """Counts syncs of folders, and lets "another thread" run just before a name is made."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile = lambda: None
        self.synced_names: set[str] = set()
        self.error: OSError | None = None

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        if create and not self.exists(path):
            self.meanwhile()
        return super().open(path, create=create)

    def sync_dir(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        self.synced_names = {entry.name for entry in self.list_dir(path)}


@pytest.fixture
def files() -> WatchedFiles:
    files = WatchedFiles()
    files.make_dirs("/spools")
    return files


def test_a_name_made_while_another_thread_syncs_the_folder_is_synced_later(files: WatchedFiles) -> None:
    spools = SpoolFiles(RealRuntime(files), "/spools", 1)
    files.meanwhile = lambda: spools.sync([])
    spool_id = spools.create()
    files.meanwhile = lambda: None
    spools.sync([spool_id])
    assert files.synced_names == {"0000000000000001.spool"}


def test_after_one_thread_could_not_sync_none_can(files: WatchedFiles) -> None:
    spools = SpoolFiles(RealRuntime(files), "/spools", 1)
    spool_id = spools.create()
    files.error = OSError(errno.EIO, "broken")
    with pytest.raises(WritesBroken, match="syncing /spools"):
        spools.sync([spool_id])
    files.error = None
    for call in (lambda: spools.sync([spool_id]), spools.refuse_if_broken):
        with pytest.raises(WritesBroken):
            call()

"""An engine's folder: names, identity, lock, quarantine (docs/format.md §1)."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from broadsheet.engine.errors import CorruptData, EngineLocked, StorageError
from broadsheet.engine.journal.durable import close_quietly, sync_dir, sync_file
from broadsheet.engine.runtime import Runtime
from broadsheet.engine.service import ProcessId

__all__ = ["FORMAT_VERSION", "Folder", "Identity", "new_identity"]

FORMAT_VERSION = 1

_ADJECTIVES = (
    "amber brisk calm daring eager fabled gentle hardy ideal jolly keen lively mellow noble open patient quick "
    "rustic steady tidy upbeat vivid warm young zesty"
).split()
_NOUNS = (
    "anchor beacon cedar delta ember fjord garnet harbor island juniper kestrel lantern meadow nickel otter "
    "pebble quarry raven sparrow thicket umber valley walrus yarrow zephyr"
).split()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is, for ever. Ids are non-zero 63-bit numbers."""

    cluster_id: int
    member_id: int
    process_id: ProcessId


def new_identity(runtime: Runtime) -> Identity:
    random = runtime.random
    return Identity(
        random.getrandbits(62) | 1 << 62,
        random.getrandbits(62) | 1 << 62,
        ProcessId("local", f"{random.choice(_ADJECTIVES)}-{random.choice(_NOUNS)}"),
    )


def _checksum(document: dict[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(document, sort_keys=True).encode()):08x}"


class Folder:
    """Paths below `root`, an absolute path without a trailing slash."""

    def __init__(self, runtime: Runtime, root: str) -> None:
        self._runtime = runtime
        self._files = runtime.files
        self.root = root
        self.log = f"{root}/log"
        self.spools = f"{root}/spools"
        self.fragments = f"{root}/fragments"
        self.quarantine = f"{root}/quarantine"
        self.identity_path = f"{root}/identity.json"

    def prepare(self) -> Callable[[], None]:
        """Make what is missing and take the writer's lock; returns its release. Raises `EngineLocked`,
        `StorageError`."""
        try:
            for path in (self.root, self.log, self.spools, self.fragments):
                self._files.make_dirs(path)
            # At each open: whoever made them may have died, or failed, before their names were durable.
            self._files.sync_dir(self.root)
            try:
                self._files.sync_dir(self.root.rpartition("/")[0] or "/")
            except PermissionError:
                pass  # a parent that may not be listed: it was there before this engine
            release = self._files.lock(f"{self.root}/LOCK")
        except BlockingIOError as error:
            raise EngineLocked(
                f"another process has {self.root} open for writing", hint="close it first, or use another folder"
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot use {self.root}: {error.strerror or error}", hint="give a folder this user may write to"
            ) from error
        return release

    def identity(self) -> Identity:
        """Read it, or make it at the first open."""
        try:
            file = self._files.open_read(self.identity_path)
        except FileNotFoundError:
            return self._make_identity()
        try:
            data = file.pread(file.size(), 0)
        finally:
            file.close()
        try:
            document = json.loads(data)
            version = document["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData(f"not an engine's identity: {error!r}", path=self.identity_path) from error
        if version != FORMAT_VERSION:
            raise CorruptData(
                f"the folder has format {version}, this program reads {FORMAT_VERSION}",
                path=self.identity_path,
                hint="use the version of the program that wrote it",
            )
        try:
            check = document.pop("check")
            if check != _checksum(document):
                raise ValueError("its checksum is wrong")
            identity = Identity(
                document["cluster_id"],
                document["member_id"],
                ProcessId(document["zone"], document["suffix"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData(f"not an engine's identity: {error}", path=self.identity_path) from error
        # Whoever made it may have died, or failed, before its name was durable.
        self._files.sync_dir(self.root)
        return identity

    def _make_identity(self) -> Identity:
        if any(entry.name.endswith(".log") for entry in self._files.list_dir(self.log)):
            raise CorruptData(
                "identity.json is missing beside a commit log that is there", path=self.identity_path
            )
        identity = new_identity(self._runtime)
        document: dict[str, object] = {
            "format": FORMAT_VERSION,
            "cluster_id": identity.cluster_id,
            "member_id": identity.member_id,
            "zone": identity.process_id.zone,
            "suffix": identity.process_id.suffix,
        }
        document["check"] = _checksum(document)
        self.write_synced(self.identity_path, [json.dumps(document, indent=1).encode() + b"\n"])
        return identity

    def write_synced(self, path: str, pieces: Iterable[bytes]) -> None:
        """Write a file that appears whole or not at all, and stays. Raises OSError, `WritesBroken`."""
        temporary = f"{path}.tmp"
        try:
            file = self._files.open(temporary, create=True)
            try:
                file.truncate(0)
                offset = 0
                for piece in pieces:
                    if piece:
                        file.pwrite([piece], offset)
                        offset += len(piece)
                sync_file(file)
            finally:
                close_quietly(file)
            self._files.rename(temporary, path)
        except OSError:
            if self._files.exists(temporary):  # it may have taken the last room there was
                self._files.unlink(temporary)
            raise
        sync_dir(self._files, path.rpartition("/")[0])

    def keep_aside(self, path: str) -> str:
        """Copy a file into quarantine, synced; returns the copy's path. An older copy is never overwritten."""
        self._files.make_dirs(self.quarantine)
        self._files.sync_dir(self.root)
        name = path.rpartition("/")[2]
        target = f"{self.quarantine}/{name}"
        number = 1
        while self._files.exists(target):
            number += 1
            target = f"{self.quarantine}/{name}.{number}"
        source = self._files.open_read(path)

        def content() -> Iterator[bytes]:
            offset = 0
            while piece := source.pread(1 << 20, offset):
                yield piece
                offset += len(piece)

        try:
            self.write_synced(target, content())
        finally:
            source.close()
        return target

    def read_file(self, path: str) -> bytes:
        file = self._files.open_read(path)
        try:
            size = file.size()
            data = file.pread(size, 0)
        finally:
            file.close()
        if len(data) != size:
            raise OSError(errno.EIO, f"{path} changed while it was read")
        return data

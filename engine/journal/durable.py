"""Making files durable, and knowing when that has failed for good.

After a failed sync nobody knows what reached the disk, and a later one that succeeds says nothing about what the first
one lost (Linux counts the pages as clean). So it is never tried again: `WritesBroken` ends the engine's writing.
"""

from __future__ import annotations

from broadsheet.engine.runtime import File, Files

__all__ = ["WritesBroken", "sync_dir", "sync_file"]


class WritesBroken(Exception):
    """What the engine's files hold beyond what was proven durable is no longer known."""


def sync_file(file: File) -> None:
    """Raises `WritesBroken`."""
    try:
        file.sync()
    except OSError as error:
        raise WritesBroken(f"syncing {file.path}: {error}") from error


def sync_dir(files: Files, path: str) -> None:
    """Raises `WritesBroken`."""
    try:
        files.sync_dir(path)
    except OSError as error:
        raise WritesBroken(f"syncing {path}: {error}") from error

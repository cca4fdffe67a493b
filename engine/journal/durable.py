"""Making files durable, and knowing when that has failed for good.

After a failed sync nobody knows what reached the disk, and a later one that succeeds says nothing about what the first
one lost (Linux counts the pages as clean). So it is never tried again: `WritesBroken` ends the engine's writing.
"""

from __future__ import annotations

import logging

from broadsheet.engine.runtime import File, Files

__all__ = ["WritesBroken", "close_quietly", "sync_dir", "sync_file"]

logger = logging.getLogger("broadsheet.engine")


class WritesBroken(Exception):
    """What the engine's files hold beyond what was proven durable is no longer known."""


def sync_file(file: File) -> None:
    """Raises `WritesBroken`."""
    try:
        file.sync()
    except OSError as error:
        raise WritesBroken(f"syncing {file.path}: {error}") from error


def close_quietly(file: File) -> None:
    """Close a file that nothing rests on any more: what is promised of it was synced (or, in mode `os`, written). An
    error here must not make that look undone."""
    try:
        file.close()
    except OSError as error:
        logger.warning("closing %s: %s", file.path, error)


def sync_dir(files: Files, path: str) -> None:
    """Raises `WritesBroken`."""
    try:
        files.sync_dir(path)
    except OSError as error:
        raise WritesBroken(f"syncing {path}: {error}") from error

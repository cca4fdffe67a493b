"""Fragment stores: for now folders, `file:///…` (spec/fragments.md §9).

Calls block and run in threads. A `file` URL's path is rooted below the file root, which is the engine's `fragments`
folder unless another one is given. What was put survives a power cut: content, name and folders are synced before
`put` returns (the reference does not sync).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, MutableSequence, Sequence
from contextlib import closing
from random import Random
from typing import Protocol
from urllib.parse import unquote, urlsplit

from broadsheet.engine.errors import BroadsheetError, CorruptData, ValidationError
from broadsheet.engine.fragments.codecs import BadCompression, decompress
from broadsheet.engine.fragments.fragment import Fragment, parse_content_path
from broadsheet.engine.runtime import Files

__all__ = ["FileStore", "FragmentStore", "StoreUnhealthy", "open_store"]

PIECE_BYTES = 256 << 10  # of the object: what it decompresses to may be twenty times as much


class StoreUnhealthy(BroadsheetError):
    """A store cannot be used; the text is that of the protocol's store_health_error."""


class FragmentStore(Protocol):
    url: str

    def check(self) -> None:
        """Raise `StoreUnhealthy` if the store cannot be used at all."""
        ...

    def list(self, journal: str) -> Sequence[Fragment]:
        """All of the journal's fragments in the store, in no order. Names that are none are passed over."""
        ...

    def put(self, fragment: Fragment, object_pieces: Iterable[bytes]) -> Fragment:
        """Store the object under the fragment's path, unless it is there; returns the fragment as listed."""
        ...

    def read(self, fragment: Fragment, offset: int) -> Iterator[bytes]:
        """The content from `offset` to the fragment's end. Raises `CorruptData` if it is not as long as that."""
        ...

    def url_of(self, fragment: Fragment) -> str:
        """Where a client may fetch the object."""
        ...


def open_store(url: str, files: Files, file_root: str, random: Random) -> FragmentStore:
    """Raises `StoreUnhealthy`, with the texts of spec/fragments.md §9."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise StoreUnhealthy(f"unsupported fragment store scheme: {parts.scheme}")
    if parts.query:
        key = parts.query.partition("&")[0].partition("=")[0]
        raise StoreUnhealthy(f'parsing store URL arguments: schema: invalid path "{key}"')
    return FileStore(url, files, file_root, unquote(parts.path), random)


class FileStore:
    """A folder. Objects are named with the fragment's path below it; they appear whole, with mode 0600."""

    def __init__(self, url: str, files: Files, file_root: str, path: str, random: Random) -> None:
        self.url = url
        self._files = files
        self._path = path
        self._folder = (file_root + path).rstrip("/")
        self._random = random
        self._durable_folders: set[str] = set()

    def check(self) -> None:
        if not self._files.exists(self._folder):
            raise StoreUnhealthy(
                f"invalid file store directory {self._folder}: no such file or directory",
                hint="make the folder",
            )

    def list(self, journal: str) -> Sequence[Fragment]:
        found: list[Fragment] = []
        self._list(journal, f"{self._folder}/{journal}", "", found)
        return found

    def _list(self, journal: str, folder: str, postfix: str, found: MutableSequence[Fragment]) -> None:
        for entry in self._files.list_dir(folder):
            if entry.is_dir:
                self._list(journal, f"{folder}/{entry.name}", f"{postfix}{entry.name}/", found)
                continue
            try:
                fragment = parse_content_path(journal, postfix + entry.name)
            except ValidationError:
                continue  # another program's file, or a put that was cut short
            found.append(_listed(fragment, self.url, entry.mod_time))

    def put(self, fragment: Fragment, object_pieces: Iterable[bytes]) -> Fragment:
        self.check()
        path = f"{self._folder}/{fragment.content_path}"
        folder, _, name = path.rpartition("/")
        if not self._files.exists(folder):
            self._durable_folders.clear()  # not made yet, or someone removed them
        self._make_folders(folder)
        if not self._files.exists(path):
            temporary = f"{folder}/.partial-{name}{self._random.getrandbits(32):08x}"
            try:
                file = self._files.open(temporary, create=True)
                try:
                    offset = 0
                    for piece in object_pieces:
                        if piece:
                            file.pwrite([piece], offset)
                            offset += len(piece)
                    file.sync()
                finally:
                    file.close()
                self._files.rename(temporary, path)
            except (OSError, BroadsheetError):
                if self._files.exists(temporary):
                    self._files.unlink(temporary)
                raise
        # Also where it was there already: whoever put it may not have come this far.
        self._files.sync_dir(folder)
        entry = next((entry for entry in self._files.list_dir(folder) if entry.name == name), None)
        if entry is None:
            raise CorruptData(
                "the object is not in the folder it was put in", path=path, journal=fragment.journal
            )
        return _listed(fragment, self.url, entry.mod_time)

    def _make_folders(self, folder: str) -> None:
        """Like make_dirs, and every folder's name is durable: also of those that are there, which whoever made them
        may not have synced. Each is synced once."""
        missing = []
        while folder not in self._durable_folders and len(folder) > len(self._folder):
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        for path in reversed(missing):
            self._files.make_dirs(path, 0o750)
            self._files.sync_dir(path.rpartition("/")[0])
            self._durable_folders.add(path)

    def read(self, fragment: Fragment, offset: int) -> Iterator[bytes]:
        path = f"{self._folder}/{fragment.content_path}"
        left = fragment.end - offset
        try:
            with closing(self._pieces(path)) as pieces:
                for piece in decompress(fragment.compression_codec, pieces, skip=offset - fragment.begin):
                    left -= len(piece)
                    if left < 0:
                        raise BadCompression("did not read EOF at expected Fragment.End")
                    yield piece
            if left:
                raise BadCompression(f"unexpected EOF: {left} bytes are missing")
        except BadCompression as error:
            raise CorruptData(str(error), path=path, journal=fragment.journal, offset=offset) from error

    def _pieces(self, path: str) -> Generator[bytes, None, None]:
        file = self._files.open_read(path)
        try:
            offset = 0
            while piece := file.pread(PIECE_BYTES, offset):
                yield piece
                offset += len(piece)
        finally:
            file.close()

    def url_of(self, fragment: Fragment) -> str:
        return f"file://{self._path}{fragment.content_path}"


def _listed(fragment: Fragment, url: str, mod_time: int) -> Fragment:
    return Fragment(
        fragment.journal,
        fragment.begin,
        fragment.end,
        fragment.sum,
        fragment.compression_codec,
        url,
        max(mod_time, 1),
        fragment.path_postfix,
    )



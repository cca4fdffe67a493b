"""Compression of fragments: NONE and SNAPPY (spec/fragments.md §5).

`compress` and `decompress` take and give streams of pieces, so that a fragment of any size needs little memory. They
are plain generators that run in a thread: the work is in C, outside the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.spec import CompressionCodec

__all__ = ["BadCompression", "compress", "decompress", "require_supported"]

PIECE_BYTES = 1 << 20
_SNAPPY_STREAM_ID = bytes.fromhex("ff060000734e61507059")
_SNAPPY_CHUNK_LIMIT = 1 << 24


class BadCompression(ValueError):
    """The object is not what its codec says."""


def require_supported(codec: CompressionCodec) -> None:
    """Raises `ValidationError` for a codec that this version cannot write yet."""
    if codec not in (CompressionCodec.NONE, CompressionCodec.SNAPPY):
        raise ValidationError(
            f"codec {codec.name} is not supported yet (use NONE or SNAPPY)", context="Fragment.CompressionCodec"
        )


def compress(codec: CompressionCodec, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The object's bytes for this content."""
    if codec is CompressionCodec.NONE:
        yield from pieces
        return
    require_supported(codec)
    import cramjam

    # cramjam and not python-snappy's framing: that one holds the GIL (stack.md §3).
    compressor = cramjam.snappy.Compressor()
    for piece in pieces:
        compressor.compress(piece)
        yield bytes(compressor.flush())
    yield bytes(compressor.finish())


def decompress(codec: CompressionCodec, pieces: Iterable[bytes], skip: int = 0) -> Iterator[bytes]:
    """The content of an object, without its first `skip` bytes. Raises `BadCompression`."""
    if codec is CompressionCodec.NONE:
        yield from _skipping(pieces, skip)
        return
    require_supported(codec)
    yield from _decompress_snappy(pieces, skip)


def _skipping(pieces: Iterable[bytes], skip: int) -> Iterator[bytes]:
    for piece in pieces:
        if skip >= len(piece):
            skip -= len(piece)
            continue
        yield piece[skip:] if skip else piece
        skip = 0


def _decompress_snappy(pieces: Iterable[bytes], skip: int) -> Iterator[bytes]:
    """Frame by frame: chunks that end before `skip` are passed over without being decompressed."""
    import cramjam

    buffer = bytearray()
    wanted = bytearray(_SNAPPY_STREAM_ID)
    first = True
    found = False
    for piece in pieces:
        buffer += piece
        at = 0
        while at + 4 <= len(buffer):
            kind = buffer[at]
            length = int.from_bytes(buffer[at + 1 : at + 4], "little")
            end = at + 4 + length
            if first and buffer[at : at + 10] != _SNAPPY_STREAM_ID[: len(buffer) - at]:
                raise BadCompression("no snappy stream identifier")
            if end > len(buffer):
                break
            first = False
            if kind in (0, 1):
                size = length - 4 if kind == 1 else _uvarint(buffer, at + 8)
                if size > 65536 or length < 4:
                    raise BadCompression(f"a snappy chunk of {size} bytes")
                if skip >= size and not found:
                    skip -= size
                else:
                    found = True  # from here on every chunk is wanted; what is left of skip is inside this one
                    wanted += buffer[at:end]
            elif 2 <= kind < 0x80:
                raise BadCompression(f"unskippable snappy chunk of type {kind}")
            at = end
        del buffer[:at]
        if len(wanted) > len(_SNAPPY_STREAM_ID):
            try:
                content = bytes(cramjam.snappy.decompress(bytes(wanted)))
            except cramjam.DecompressionError as error:
                raise BadCompression(str(error)) from error
            del wanted[len(_SNAPPY_STREAM_ID) :]
            yield content[skip:] if skip else content
            skip = 0
    if buffer or first:
        raise BadCompression("the object ends inside a snappy chunk")


def _uvarint(data: bytearray, at: int) -> int:
    value = shift = 0
    for byte in data[at : at + 5]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    raise BadCompression("no length in a snappy chunk")

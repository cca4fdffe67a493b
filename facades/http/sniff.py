"""The media type of content, from its first bytes: the WHATWG MIME Sniffing rules that Go's HTTP library applies.

A GET names this type and not the journal's `content-type` label (spec/http-gateway.md §3).
"""

from __future__ import annotations

__all__ = ["sniff_content_type"]

SNIFF_BYTES = 512

_TEXT = b"text/plain; charset=utf-8"
_BINARY = b"application/octet-stream"
_SPACE = b"\t\n\x0c\r "
_NOT_TEXT = bytes([*range(0x09), 0x0B, *range(0x0E, 0x1B), *range(0x1C, 0x20)])

_HTML_TAGS = (
    b"<!DOCTYPE HTML",
    b"<HTML",
    b"<HEAD",
    b"<SCRIPT",
    b"<IFRAME",
    b"<H1",
    b"<DIV",
    b"<FONT",
    b"<TABLE",
    b"<A",
    b"<STYLE",
    b"<TITLE",
    b"<B",
    b"<BODY",
    b"<BR",
    b"<P",
    b"<!--",
)

_PREFIXES = (
    (b"%PDF-", b"application/pdf"),
    (b"%!PS-Adobe-", b"application/postscript"),
    (b"\xfe\xff", b"text/plain; charset=utf-16be"),
    (b"\xff\xfe", b"text/plain; charset=utf-16le"),
    (b"\xef\xbb\xbf", _TEXT),
    (b"\x00\x00\x01\x00", b"image/x-icon"),
    (b"\x00\x00\x02\x00", b"image/x-icon"),
    (b"BM", b"image/bmp"),
    (b"GIF87a", b"image/gif"),
    (b"GIF89a", b"image/gif"),
    (b"\x89PNG\r\n\x1a\n", b"image/png"),
    (b"\xff\xd8\xff", b"image/jpeg"),
    (b"ID3", b"audio/mpeg"),
    (b"OggS\x00", b"application/ogg"),
    (b"MThd\x00\x00\x00\x06", b"audio/midi"),
    (b"\x1a\x45\xdf\xa3", b"video/webm"),
    (b"\x00\x01\x00\x00", b"font/ttf"),
    (b"OTTO", b"font/otf"),
    (b"ttcf", b"font/collection"),
    (b"wOFF", b"font/woff"),
    (b"wOF2", b"font/woff2"),
    (b"\x1f\x8b\x08", b"application/x-gzip"),
    (b"PK\x03\x04", b"application/zip"),
    (b"Rar!\x1a\x07\x00", b"application/x-rar-compressed"),
    (b"Rar!\x1a\x07\x01\x00", b"application/x-rar-compressed"),
    (b"\x00asm", b"application/wasm"),
)

_CONTAINERS = {  # four bytes, a length, and what is inside
    (b"RIFF", b"WEBP"): b"image/webp",
    (b"RIFF", b"WAVE"): b"audio/wave",
    (b"RIFF", b"AVI "): b"video/avi",
    (b"FORM", b"AIFF"): b"audio/aiff",
}


def sniff_content_type(content: bytes | bytearray | memoryview) -> bytes:
    """Media type of content by its first 512 bytes; `application/octet-stream` if nothing fits."""
    head = bytes(content[:SNIFF_BYTES])
    text = head.lstrip(_SPACE)
    if text[:1] == b"<":
        folded = text.upper()
        for tag in _HTML_TAGS:
            if folded.startswith(tag) and (tag == b"<!--" or folded[len(tag) : len(tag) + 1] in (b" ", b">")):
                return b"text/html; charset=utf-8"
        if text.startswith(b"<?xml"):
            return b"text/xml; charset=utf-8"
    for prefix, kind in _PREFIXES:
        if head.startswith(prefix):
            return kind
    container = _CONTAINERS.get((head[:4], head[8:12]))
    if container is not None:
        return container
    if head[34:36] == b"LP" and head[:34] == bytes(34):
        return b"application/vnd.ms-fontobject"
    if head[4:8] == b"ftyp" and _is_mp4(head):
        return b"video/mp4"
    return _BINARY if head.translate(None, _NOT_TEXT) != head else _TEXT


def _is_mp4(head: bytes) -> bool:
    size = int.from_bytes(head[:4], "big")
    if size % 4 or len(head) < size:
        return False
    return any(head[at : at + 3] == b"mp4" for at in range(8, size, 4) if at != 12)

"""`Fragment`: a byte range of a journal, its SHA-1 and its name (spec/fragments.md §1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.spec import CompressionCodec

__all__ = ["EMPTY_SHA1", "ZERO_SUM", "Fragment", "codec_extension", "parse_content_path"]

ZERO_SUM = bytes(20)
"""The sum of a fragment without content (not the SHA-1 of nothing)."""

EMPTY_SHA1 = bytes.fromhex("da39a3ee5e6b4b0d3255bfef95601890afd80709")

_EXTENSIONS = {
    CompressionCodec.NONE: ".raw",
    CompressionCodec.GZIP: ".gz",
    CompressionCodec.ZSTANDARD: ".zst",
    CompressionCodec.SNAPPY: ".sz",
    CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION: "",
    CompressionCodec.LZ4: ".lz4",
}

_CODECS = {
    ".raw": CompressionCodec.NONE,
    ".gz": CompressionCodec.GZIP,
    ".gzip": CompressionCodec.GZIP,
    ".zst": CompressionCodec.ZSTANDARD,
    ".zstandard": CompressionCodec.ZSTANDARD,
    ".sz": CompressionCodec.SNAPPY,
    ".snappy": CompressionCodec.SNAPPY,
    "": CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION,
    ".gzod": CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION,
    ".lz4": CompressionCodec.LZ4,
}


@dataclass(frozen=True, slots=True)
class Fragment:
    """Bytes [begin, end) of a journal. `sum` is 20 bytes: SHA-1 of the uncompressed content, zeros for none.

    backing_store: URL of the store that holds it, "" while it is local only. mod_time: unix seconds, 0 while local.
    """

    journal: str = ""
    begin: int = 0
    end: int = 0
    sum: bytes = ZERO_SUM
    compression_codec: CompressionCodec = CompressionCodec.INVALID
    backing_store: str = ""
    mod_time: int = 0
    path_postfix: str = ""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def content_name(self) -> str:
        extension = codec_extension(self.compression_codec)
        return f"{self.begin:016x}-{self.end:016x}-{self.sum.hex()}{extension}"

    @property
    def content_path(self) -> str:
        """Path below the store: journal, postfix if any, content name."""
        if self.path_postfix:
            return f"{self.journal}/{self.path_postfix}/{self.content_name}"
        return f"{self.journal}/{self.content_name}"

    def with_range(self, end: int, sum_: bytes) -> Fragment:
        return replace(self, end=end, sum=sum_)

    def validate(self) -> None:
        from broadsheet.engine.labels.tokens import validate_journal_name, validate_path_component

        try:
            validate_journal_name(self.journal)
        except ValidationError as error:
            raise error.within("Journal") from None
        if self.begin > self.end:
            raise ValidationError(f"expected Begin <= End (have {self.begin}, {self.end})")
        if self.compression_codec == CompressionCodec.INVALID:
            raise ValidationError("invalid value (INVALID)", context="CompressionCodec")
        if self.path_postfix:
            try:
                validate_path_component(self.path_postfix, 0, 512)
            except ValidationError as error:
                raise error.within("PathPostfix") from None


def codec_extension(codec: CompressionCodec) -> str:
    """File name extension a fragment of this codec is written with."""
    try:
        return _EXTENSIONS[codec]
    except KeyError:
        raise ValidationError(f"invalid value ({codec.name})", context="CompressionCodec") from None


def parse_content_path(journal: str, path: str, *, allow_lz4: bool = False) -> Fragment:
    """The fragment that a path below `<journal>/` names. Raises `ValidationError` with the exact texts."""
    postfix, _, name = path.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    if not dot:
        stem, extension = name, ""
    extension = dot + extension
    fields = stem.split("-")
    if len(fields) != 3:
        raise ValidationError(f"wrong Fragment format: {stem}")
    codec = _CODECS.get(extension.lower())
    if codec is None or (codec is CompressionCodec.LZ4 and not allow_lz4):
        raise ValidationError(f"unrecognized compression extension: {extension}")
    fragment = Fragment(
        journal,
        _parse_hex64(fields[0], "Begin"),
        _parse_hex64(fields[1], "End"),
        _parse_sum(fields[2]),
        codec,
        path_postfix=postfix,
    )
    fragment.validate()
    return fragment


def _parse_hex64(text: str, context: str) -> int:
    try:
        if not text or not all(c in "0123456789abcdefABCDEF" for c in text.removeprefix("+")):
            raise ValueError
        value = int(text, 16)
    except ValueError:
        raise ValidationError(
            f'strconv.ParseInt: parsing "{text}": invalid syntax', context=context
        ) from None
    if value >= 2**63:
        raise ValidationError(
            f'strconv.ParseInt: parsing "{text}": value out of range', context=context
        )
    return value


def _parse_sum(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text) if not any(c.isspace() for c in text) else None
    except ValueError:
        digest = None
    if digest is None:
        bad = next((c for c in text if c not in "0123456789abcdefABCDEF"), None)
        if bad is None:
            raise ValidationError("encoding/hex: odd length hex string", context="Sum")
        raise ValidationError(
            f"encoding/hex: invalid byte: U+{ord(bad):04X} '{bad}'", context="Sum"
        )
    if len(digest) != 20:
        raise ValidationError(f"invalid SHA1Sum length: {text}")
    return digest

"""Reads the character vectors of an R lazy-load database (`Rdata.rdx` and `Rdata.rdb`), without R.

The index is a compressed serialised list `{variables: {name: (offset, length)}, ...}`; each record of the database is
a 4-byte big-endian length and zlib data that holds one serialised value. The serialisation is R's version 2 or 3 in
XDR form (R Internals, section 1.8).
"""

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

NIL, GLOBAL, REFERENCE = 254, 253, 255
SYMBOL, PAIRLIST, CHARACTERS, LOGICALS, INTEGERS, REALS, STRINGS, GENERIC = 1, 2, 9, 10, 13, 14, 16, 19
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10
OPENERS = {b"\x1f\x8b": gzip.decompress, b"BZ": bz2.decompress, b"\xfd7": lzma.decompress, b"x\x9c": zlib.decompress}


def read_strings(stem: str | Path) -> dict[str, list[str]]:
    """Every character vector in `stem`.rdx / `stem`.rdb, by name."""
    index = Path(f"{stem}.rdx").read_bytes()
    if index[:2] not in OPENERS:
        raise ValueError(f"{stem}.rdx starts with {index[:2]!r}, which is no compression R uses for an index")
    variables = _Reader(OPENERS[index[:2]](index)).document()["variables"]
    records = Path(f"{stem}.rdb").read_bytes()
    values = {}
    for name, (offset, length) in variables.items():
        value = _Reader(zlib.decompress(records[offset + 4 : offset + length])).document()
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            values[name] = value
    return values


class _Reader:
    """One serialised R value; vectors become lists, named lists become dictionaries."""

    def __init__(self, data: bytes) -> None:
        self.data, self.offset, self.references = data, 0, []

    def document(self) -> Any:
        if self.take(2) != b"X\n":
            raise ValueError("only R's XDR serialisation can be read; this record is in another form")
        version = self.integers(3)[0]
        if version == 3:
            self.take(self.integers(1)[0])  # the name of the native encoding
        return self.value()

    def take(self, count: int) -> bytes:
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f">{count}i", self.take(4 * count))

    def value(self) -> Any:
        (flags,) = self.integers(1)
        kind = flags & 0xFF
        if kind in (NIL, GLOBAL):
            return None
        if kind == REFERENCE:
            return self.references[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.references.append(self.value())
            return self.references[-1]
        if kind == PAIRLIST:
            return self.pairs(flags)
        (count,) = self.integers(1)
        if kind == CHARACTERS:
            return None if count < 0 else self.take(count).decode("utf-8")
        if kind in (INTEGERS, LOGICALS):
            content: Any = list(self.integers(count))
        elif kind == REALS:
            content = list(struct.unpack(f">{count}d", self.take(8 * count)))
        elif kind in (STRINGS, GENERIC):
            content = [self.value() for _ in range(count)]
        else:
            raise ValueError(f"R value of type {kind} is not supported by this reader")
        names = (self.value() or {}).get("names") if flags & HAS_ATTRIBUTES else None
        return dict(zip(names, content, strict=True)) if names else content

    def pairs(self, flags: int) -> dict[str | None, Any]:
        content = {}
        while True:
            if flags & HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & HAS_TAG else None
            content[tag] = self.value()
            (flags,) = self.integers(1)
            if flags & 0xFF != PAIRLIST:
                return content

"""The headers of a tar file, and nothing else of it: what members there are, and where their bytes lie.

Forms that are read: ustar with its prefix, GNU's long names and sizes, and pax headers
(https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BLOCK = 512
FILES = b"0\x00" + b"7"  # the kinds of a plain file
LONG_NAME, PAX, PAX_FOR_ALL = b"L", b"x", b"g"
SPARSE = b"S"
EXTENDED = 1 << 20  # bytes that a long name or a pax header may have
OCTAL = re.compile(rb"[0-7]*").fullmatch
DECIMAL = re.compile(rb"[0-9]{1,18}").fullmatch  # an int() of more digits may take for ever, and of other ones mean anything
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class Damaged(ValueError):
    """No tar file, or not a whole one."""


def members(content: memoryview) -> Iterator[tuple[str, int, int]]:
    """(name, where the bytes begin, where they end) of the plain files, in order; links and folders are passed over.

    Raises:
        Damaged: what is wrong, to be read after the file's name.
    """
    if how := COMPRESSED.get(bytes(content[:2])):
        raise Damaged(f"is compressed with {how}, so that no sample can be found by number; unpack it to a plain tar file first")
    at, name, size = 0, None, None  # name and size that the header before gave to the next
    while at + BLOCK <= len(content):
        header = bytes(content[at : at + BLOCK])
        if not any(header):
            return  # two empty blocks end a tar file; one will do
        _check(header, at)
        kind, own = header[156:157], _number(header[124:136], at)
        begin, end = at + BLOCK, at + BLOCK + own
        if kind in (PAX, LONG_NAME) and own > EXTENDED:
            raise Damaged(f"is damaged: the extended header at byte {at} has {own} bytes")
        if kind == PAX:
            said = _pax(bytes(content[begin:end]), at)
            if any(key.startswith(b"GNU.sparse") for key in said):
                raise Damaged(f"has a sparse member at byte {at}; write it again without holes")
            name = said[b"path"].decode(errors="surrogateescape") if said.get(b"path") else name
            size = _decimal(said[b"size"], at) if said.get(b"size") else size
        elif kind == LONG_NAME:
            name = bytes(content[begin:end]).rstrip(b"\0").decode(errors="surrogateescape")
        elif kind == SPARSE:
            raise Damaged(f"has a sparse member at byte {at}; write it again without holes")
        elif kind != PAX_FOR_ALL:
            end = begin + (own if size is None else size)
            if kind in FILES and not _own_name(header).endswith("/"):
                if end > len(content):
                    raise Damaged(f"is cut off: {name or _own_name(header)} goes on after the end of the file")
                yield name or _own_name(header), begin, end
            name = size = None
        at = begin + -(-(end - begin) // BLOCK) * BLOCK
    raise Damaged("is cut off: it does not end as a tar file does" if at else "is no tar file")


def _check(header: bytes, at: int) -> None:
    told = _number(header[148:156], at)
    if told != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise Damaged(f"is damaged: the header at byte {at} does not fit its checksum" if at else "is no tar file")


def _number(field: bytes, at: int) -> int:
    """Octal digits, or GNU's binary numbers; never below zero, or the way through the file could lead back."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b"\0 ")
    if not OCTAL(digits):
        raise Damaged(f"is damaged: the header at byte {at} holds no number where one must be" if at else "is no tar file")
    return int(digits or b"0", 8)


def _own_name(header: bytes) -> str:
    """The name that a header gives by itself."""
    name, prefix = header[:100].split(b"\0", 1)[0], b""
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
    return (prefix + b"/" + name if prefix else name).decode(errors="surrogateescape")


def _pax(records: bytes, at: int) -> dict[bytes, bytes]:
    """``length key=value\\n`` each, the length in decimal digits."""
    said, begin = {}, 0
    while begin < len(records):
        digits = records[begin : begin + 20].partition(b" ")[0]
        end = begin + _decimal(digits, at)
        if not begin + len(digits) < end <= len(records):
            raise Damaged(f"is damaged: the extended header at byte {at} cannot be read")
        key, _, value = records[begin + len(digits) + 1 : end].rstrip(b"\n").partition(b"=")
        said[key], begin = value, end
    return said


def _decimal(digits: bytes, at: int) -> int:
    if not DECIMAL(digits):
        raise Damaged(f"is damaged: the extended header at byte {at} cannot be read")
    return int(digits)

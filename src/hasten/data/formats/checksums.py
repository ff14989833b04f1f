"""CRC-32C, the checksum of TFRecord files (Castagnoli; RFC 3720, appendix B.4), of many pieces of bytes at once.

``google-crc32c`` is used where it is installed. Without it the work is done in NumPy, by three properties of a CRC. It is
linear, so a piece is cut into lanes of 64 bytes whose checksums are joined afterwards, two by two: the lanes of all
pieces go through the table together. Zeros in front change nothing, so that unequal pieces can be laid into one rectangle.
And starting from all ones is the same as inverting the first four bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy

POLYNOMIAL = 0x82F63B78  # reflected: the highest bit is x^0
ONE = 1 << 31
LANE = 64  # bytes
AT_ONCE = 1 << 22  # bytes in one rectangle

try:
    import google_crc32c

    _installed = google_crc32c.value if google_crc32c.implementation == "c" else None  # in Python alone it is slower than NumPy
except ImportError:
    _installed = None


def crc32c(pieces: Sequence[bytes]) -> numpy.ndarray:
    """The checksums of some pieces, uint32, shape (pieces,)."""
    if _installed is not None:
        return numpy.fromiter(map(_installed, pieces), numpy.uint32, len(pieces))
    return computed(pieces)


def masked(checksums: numpy.ndarray) -> numpy.ndarray:
    """As TFRecord files store them: rotated right by 15 bits, plus a constant."""
    checksums = checksums.astype(numpy.uint32)
    return ((checksums >> numpy.uint32(15)) | (checksums << numpy.uint32(17))) + numpy.uint32(0xA282EAD8)


def crc32c_of_rows(rows: numpy.ndarray) -> numpy.ndarray:
    """The checksums of short rows of equal length: uint8, shape (rows, bytes), a multiple of four bytes."""
    rows = rows.copy()
    rows[:, :4] ^= 0xFF
    return ~_of_lanes(rows)


def computed(pieces: Sequence[bytes | memoryview]) -> numpy.ndarray:
    """``crc32c`` without help."""
    lengths = numpy.fromiter(map(len, pieces), numpy.int64, len(pieces))
    checksums = numpy.empty(len(pieces), numpy.uint32)
    for group in _alike(lengths):
        checksums[group] = _of_rectangle([pieces[i] for i in group])
    for i in numpy.flatnonzero(lengths < 4).tolist():
        checksums[i] = _one_by_one(pieces[i])
    return checksums


def _alike(lengths: numpy.ndarray):
    """Groups of pieces that are laid into one rectangle without much waste."""
    order = numpy.argsort(lengths, kind="stable")
    order = order[lengths[order] >= 4]
    while len(order):
        shortest = int(lengths[order[0]])
        width = max(LANE, shortest + shortest // 8)
        count = int(numpy.searchsorted(lengths[order], width, "right"))
        count = min(count, max(1, AT_ONCE // width))
        yield order[:count].tolist()
        order = order[count:]


def _of_rectangle(pieces: list) -> numpy.ndarray:
    lanes = -(-len(pieces[-1]) // LANE)  # the last is the longest
    width = lanes * LANE
    rectangle = numpy.zeros((len(pieces), width), numpy.uint8)
    flat = memoryview(rectangle).cast("B")
    for end, piece in zip(range(width, width * (len(pieces) + 1), width), pieces, strict=True):
        flat[end - len(piece) : end] = piece
    first = width - numpy.fromiter(map(len, pieces), numpy.int64, len(pieces))
    rectangle[numpy.arange(len(pieces))[:, None], first[:, None] + numpy.arange(4)] ^= 0xFF
    parts = _of_lanes(rectangle.reshape(-1, LANE)).reshape(len(pieces), lanes)
    return ~_joined(parts)


def _of_lanes(lanes: numpy.ndarray) -> numpy.ndarray:
    """The plain remainders of equally long lanes, four bytes of each at a time."""
    words = numpy.ascontiguousarray(lanes.view("<u4").T)
    remainders = numpy.zeros(len(lanes), numpy.uint32)
    for word in words:
        remainders = _advanced(remainders ^ word, 4)
    return remainders


def _joined(parts: numpy.ndarray) -> numpy.ndarray:
    """The remainders of the rows, from those of their lanes: neighbours are joined until one is left."""
    distance = LANE
    while parts.shape[1] > 1:
        if parts.shape[1] % 2:
            parts = numpy.concatenate([numpy.zeros((len(parts), 1), numpy.uint32), parts], axis=1)
        parts = _advanced(parts[:, 0::2], distance) ^ parts[:, 1::2]
        distance *= 2
    return parts[:, 0]


def _advanced(remainders: numpy.ndarray, distance: int) -> numpy.ndarray:
    """The remainders after ``distance`` more bytes of zeros."""
    low, high = _tables(distance)
    halves = numpy.empty((2, *remainders.shape), numpy.intp)
    numpy.bitwise_and(remainders, 0xFFFF, out=halves[0], casting="unsafe")
    numpy.right_shift(remainders, 16, out=halves[1], casting="unsafe")
    return low.take(halves[0], mode="clip") ^ high.take(halves[1], mode="clip")  # "clip" only leaves out a check


@lru_cache(maxsize=64)
def _tables(distance: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """What ``distance`` bytes of zeros make of every lower and every upper half of a remainder."""
    factor = _power(distance)
    images = [_product(factor, 1 << bit) for bit in range(32)]
    return _combinations(images[:16]), _combinations(images[16:])


def _combinations(images: list[int]) -> numpy.ndarray:
    table = numpy.zeros(1, numpy.uint32)
    for image in images:
        table = numpy.concatenate([table, table ^ numpy.uint32(image)])
    return table


def _power(distance: int) -> int:
    """x to the power of 8 * distance, modulo the polynomial."""
    result, square = ONE, ONE >> 8
    while distance:
        if distance & 1:
            result = _product(result, square)
        square, distance = _product(square, square), distance >> 1
    return result


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo the polynomial."""
    result = 0
    while a:
        if a & ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return result


def _one_by_one(piece: bytes | memoryview) -> int:
    remainder = 0xFFFFFFFF
    for byte in bytes(piece):
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (POLYNOMIAL if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF

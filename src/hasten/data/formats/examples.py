"""``tf.train.Example`` messages, without protobuf: whole batches of them become columns at once.

    Example { Features features = 1 }    Features { map<string, Feature> feature = 1 }
    Feature { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }    each list: repeated value = 1, numbers packed

(example.proto and feature.proto of TensorFlow.) The messages of a batch are walked through in step. One that is written in
another way than usual (unknown fields, numbers that are not packed) is parsed by itself and written again as usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import torch

from hasten.contract.errors import Refusal, nearest
from hasten.data.formats import settings
from hasten.data.formats.example_messages import Message, parsed, written
from hasten.data.formats.example_walk import FIRST, field_at, lists_of, windows
from hasten.data.memory import taken

LONG = 256  # bytes; from here on a piece is copied by itself rather than byte by byte in one operation
LARGE = 1 << 16  # bytes; from here on pieces of equal length are, too
STOPS = numpy.uint64(0x8080808080808080)  # the bits that are unset in the last byte of a number; cut to four bytes, those of four
PAIRS = numpy.array(
    [
        (1, 0x007F007F007F007F, 0x7F007F007F007F00),
        (2, 0x00003FFF00003FFF, 0x3FFF00003FFF0000),
        (4, 0x000000000FFFFFFF, 0x0FFFFFFF00000000),
    ],
    numpy.uint64,
)  # how far the upper half of a pair is from the lower one, and which bits are in each: of 7, 14, 28


class Malformed(ValueError):
    """A message that cannot be read: its place in the batch, and why."""

    def __init__(self, place: int, why: str):
        super().__init__(why)
        self.place, self.why = int(place), why


@dataclass(frozen=True)
class Feature:
    """What a column holds.

    Attributes:
        kind: "bytes", "float" or "int64".
        shape: of a sample; None where the samples have unequal numbers of values.
        raw: the type of the little-endian numbers in a byte string; None leaves it as it is.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    raw: torch.dtype | None = None


def schema(samples: list[Message], wanted: Sequence[str] | Mapping | None, target: str | None = None) -> list[Feature]:
    """The features that are wanted, from some parsed messages.

    Raises:
        Refusal: none of the messages has such a feature, or its kind changes from one to the other.
    """
    known = sorted({name for sample in samples for name in sample})
    names = [name for name in (known if wanted is None else wanted) if name != target] + ([target] if target in known else [])
    features = []
    for name in names:
        if name not in known:
            raise Refusal(f"there is no feature {name!r}{nearest(name, known)}")
        lists = [sample.get(name, (None, [])) for sample in samples]
        kinds = sorted({kind for kind, _ in lists if kind})
        if len(kinds) != 1:
            raise Refusal(
                f"feature {name!r} is {'in some records ' + ' and '.join(kinds) if kinds else 'empty'}; leave it out of features="
            )
        counts = {len(values) for _, values in lists}
        shape = None if len(counts) > 1 else () if counts == {1} else (counts.pop(),)
        said = wanted[name] if isinstance(wanted, Mapping) and name in wanted else shape
        features.append(Feature(name, kinds[0], *_form(name, kinds[0], said)))
    if not features:
        raise Refusal("features= names nothing to be read" if known else "the records hold no features")
    return features


def _form(name: str, kind: str, said) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """(shape of a sample, type of the numbers in its byte string) of what was said about a feature.

    Raises:
        Refusal: neither a shape nor (type, shape), or a type for what is no byte string.
    """
    raw = None
    if isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], torch.dtype):
        raw, said = said
        if kind != "bytes":
            raise Refusal(f"feature {name!r} holds {kind} values, no byte strings to be read as {raw}; say its shape alone")
    return None if said is None else settings.shape(f"features={{{name!r}: ...}}", said), raw


def columns_of(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, features: list[Feature]) -> dict:
    """The columns of a batch of messages.

    Args:
        data: uint8; the messages are its parts from ``begins`` to ``ends``.

    Raises:
        Malformed: a message is damaged, lacks a feature, or has more or fewer values than the others.
    """
    wanted = [feature.name for feature in features], [feature.kind for feature in features]
    at, stop, fits = lists_of(data, begins, ends, *wanted)
    if not fits.all():
        data, begins, ends = _rewritten(data, begins, ends, numpy.flatnonzero(~fits.all(axis=0)).tolist())
        at, stop, fits = lists_of(data, begins, ends, *wanted)
    if not fits.all():  # even when written as usual: another kind
        number, place = numpy.unravel_index(fits.argmin(), fits.shape)
        feature = features[number]
        raise Malformed(place, f"feature {feature.name!r} is no list of {feature.kind} values as in the other records")
    columns = {}
    for kind, values_of in VALUES.items():
        if chosen := [number for number, feature in enumerate(features) if feature.kind == kind]:
            try:
                values, counts = values_of(data, at[chosen].ravel(), stop[chosen].ravel())
            except Malformed as error:
                number, place = divmod(error.place, len(begins))
                raise Malformed(place, f"feature {features[chosen[number]].name!r}: {error.why}") from None
            counts = counts.reshape(len(chosen), -1)
            edges = numpy.concatenate([[0], numpy.cumsum(counts.sum(axis=1))]).tolist()
            for place, number in enumerate(chosen):
                part = values[edges[place] : edges[place + 1]]
                columns[features[number].name] = _column(data, part, counts[place], features[number])
    return {feature.name: columns[feature.name] for feature in features}


def _rewritten(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, places: list[int]):
    """The batch with some of its messages written in the usual way."""
    messages = [data[begin:end].tobytes() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    for place in places:
        try:
            messages[place] = written(parsed(messages[place]))
        except ValueError as error:
            raise Malformed(place, f"it is no tf.train.Example: {error}") from None
    edges = numpy.cumsum([0, *map(len, messages)])
    return numpy.frombuffer(b"".join(messages), numpy.uint8), edges[:-1], edges[1:]


# ---- values: all of a kind, those of one feature after those of another


def _floats(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> tuple[torch.Tensor, numpy.ndarray]:
    if (broken := (ends - begins) % 4 > 0).any():
        raise Malformed(broken.argmax(), "a list of floats is cut off")
    return torch.from_numpy(_flat(data, begins, ends).view("<f4")), (ends - begins) // 4


def _integers(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> tuple[torch.Tensor, numpy.ndarray]:
    payload = _flat(data, begins, ends)
    finals = numpy.flatnonzero(payload < 0x80)  # the last byte of each number
    edges = numpy.concatenate([[0], numpy.cumsum(ends - begins)])
    counts = numpy.diff(numpy.searchsorted(finals, edges))
    filled = numpy.flatnonzero(ends > begins)
    if (endless := payload[edges[filled + 1] - 1] > 0x7F).any():
        raise Malformed(filled[endless.argmax()], "a number has no end")
    if len(finals) == len(payload):
        return torch.from_numpy(payload.astype(numpy.int64)), counts
    starts = numpy.concatenate([[0], finals[:-1] + 1])
    lengths = finals - starts + 1
    if (longest := int(lengths.max())) > 10:
        raise Malformed(numpy.searchsorted(edges, starts[lengths.argmax()], "right") - 1, "a number is longer than 64 bits")
    return torch.from_numpy(_varints(payload, starts, longest)), counts


def _varints(payload: numpy.ndarray, starts: numpy.ndarray, longest: int) -> numpy.ndarray:
    """The numbers of up to ``longest`` bytes that begin at these places, int64: eight bytes of each, or four where that is enough, are
    taken as one word, and their bits pushed together in it."""
    padded = numpy.concatenate([payload, numpy.zeros(9, numpy.uint8)])
    pairs = PAIRS if longest > 4 else PAIRS[:2].astype(numpy.uint32)
    words = numpy.ndarray(len(payload), pairs.dtype, padded, strides=(1,))[starts]
    stops = ~words & STOPS.astype(pairs.dtype)
    words &= stops ^ (stops - pairs.dtype.type(1))  # nothing after the first byte that is a last one
    for apart, low, high in pairs:
        words = words & low | (words & high) >> apart
    if longest <= 4:
        return words.astype(numpy.int64)
    if len(longer := numpy.flatnonzero(stops == 0)):  # as negative numbers are
        ninth, tenth = (padded[starts[longer] + place].astype(numpy.uint64) for place in (8, 9))
        words[longer] |= (ninth & numpy.uint64(0x7F)) << numpy.uint64(56) | (ninth >> numpy.uint64(7) & tenth) << numpy.uint64(63)
    return words.view(numpy.int64)


def _strings(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(where each byte string begins and ends, shape (strings, 2); how many there are)."""
    left = numpy.flatnonzero(ends > begins)
    at, rows, places = begins[left], [left[:0]], [numpy.empty((0, 2), numpy.int64)]
    while len(left):
        first, last, fits = field_at(data, at, FIRST)
        if not (fits := fits & (last <= ends[left])).all():
            raise Malformed(left[fits.argmin()], "a byte string is damaged")
        rows.append(left)
        places.append(numpy.stack([first, last], axis=1))
        going = last < ends[left]
        left, at = left[going], last[going]
    row = numpy.concatenate(rows)
    places = numpy.concatenate(places)
    return places if len(rows) == 2 else places[numpy.argsort(row, kind="stable")], numpy.bincount(row, minlength=len(begins))


VALUES = {"bytes": _strings, "float": _floats, "int64": _integers}


# ---- columns


def _column(data: numpy.ndarray, values: torch.Tensor | numpy.ndarray, counts: numpy.ndarray, feature: Feature):
    """The values of one feature, one sample after the other, as a column."""
    if feature.kind == "bytes" and feature.raw is None:
        view = memoryview(data)
        values = [bytes(view[begin:end]) for begin, end in values.tolist()]
    elif feature.kind == "bytes":
        values, counts = _raw(data, values, counts, feature)
    if feature.shape is not None:
        _counted(counts, math.prod(feature.shape), feature.name, "values")
        if isinstance(values, torch.Tensor):
            return values.view(len(counts), *feature.shape)
        if not feature.shape:
            return values
    if isinstance(values, torch.Tensor):
        return list(values.split(counts.tolist()))
    edges = numpy.concatenate([[0], numpy.cumsum(counts)]).tolist()
    return [values[begin:end] for begin, end in pairwise(edges)]


def _raw(data: numpy.ndarray, places: numpy.ndarray, counts: numpy.ndarray, feature: Feature) -> tuple[torch.Tensor, numpy.ndarray]:
    """The numbers in byte strings, one string a sample."""
    _counted(counts, 1, feature.name, "byte strings")
    numbers, rest = numpy.divmod(places[:, 1] - places[:, 0], feature.raw.itemsize)
    if rest.any():
        raise Malformed((rest > 0).argmax(), f"the bytes of feature {feature.name!r} are no whole number of {feature.raw}")
    return torch.from_numpy(_flat(data, *places.T)).view(feature.raw), numbers


def _counted(counts: numpy.ndarray, right: int, name: str, what: str) -> None:
    if (wrong := counts != right).any():
        place = wrong.argmax()
        hint = f"; features={{{name!r}: None}} reads lists of unequal length" if what == "values" else ""
        raise Malformed(place, f"feature {name!r} has {counts[place]} {what}, not {right} as in the other records{hint}")


def _flat(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> numpy.ndarray:
    """The pieces one after the other, uint8."""
    lengths = ends - begins
    edges = numpy.concatenate([[0], numpy.cumsum(lengths)])
    if 0 < edges[-1] < LARGE * len(begins) and (lengths == lengths[0]).all():
        return _alike(data, begins, int(lengths[0]))
    if edges[-1] < LONG * len(begins):
        return data.take(numpy.arange(edges[-1]) + numpy.repeat(begins - edges[:-1], lengths), mode="clip")  # leaves out a check
    flat = taken((int(edges[-1]),), torch.uint8).numpy()
    target, source, places = memoryview(flat), memoryview(data), edges.tolist()
    for begin, end, first, last in zip(begins.tolist(), ends.tolist(), places, places[1:], strict=False):
        target[first:last] = source[begin:end]
    return flat


def _alike(data: numpy.ndarray, begins: numpy.ndarray, length: int) -> numpy.ndarray:
    """As ``_flat``, of pieces of one length: some at a time, few enough that the memory in between is not fresh."""
    flat, step = taken((len(begins) * length,), torch.uint8).numpy(), LARGE // length
    rows, pieces = flat.reshape(-1, length), windows(data, length)
    for first in range(0, len(begins), step):
        rows[first : first + step] = pieces[begins[first : first + step]]
    return flat

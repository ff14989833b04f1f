"""``tf.train.Example`` messages through ``protobuf``: encode and inspect single messages, choose the features to read.

Batches are parsed by ``tf_example_vectorized.py``, which turns to this module for a message in an unusual encoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, suggest
from hasten.data.validation import check_shape

# of one message: feature name -> ("bytes", "float", "int64" or None, number of values)
Summary = dict[str, tuple[str | None, int]]
FEATURE_LISTS = 2  # number of the field of a SequenceExample that holds its sequences

# example.proto and feature.proto of TensorFlow, as a FileDescriptorProto
# https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
DESCRIPTOR = """
name: "hasten/tf_example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
  oneof_decl { name: "kind" }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tensorflow.Features.FeatureEntry"
  }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
  }
}
message_type {
  name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.Features" }
}
"""


@dataclass(frozen=True)
class Feature:
    """One feature to read, and the form of its column."""

    name: str
    kind: str  # "bytes", "float" or "int64"
    shape: tuple[int, ...] | None  # shape of one sample; None if the samples hold different numbers of values
    # type of the little-endian numbers in a byte string; None leaves byte strings as they are
    raw: torch.dtype | None = None


def encode_example(features: Mapping) -> bytes:
    """Encodes one message; equal features give equal bytes. A value is a byte string, text or number, a list of them,
    an array or a tensor; ConfigurationError for another type, and for a number that does not fit into an int64. A list
    without values has no kind, and is read as no values of the kind that the feature has in other messages.
    """
    example = example_class()()
    for name, value in features.items():
        kind, values = _as_list(name, value)
        feature = example.features.feature[name]  # adds it to the message
        if kind is None:
            continue
        message = getattr(feature, f"{kind}_list")
        message.SetInParent()  # an empty array has a kind, too
        try:
            message.value.extend(values)
        except ValueError as error:
            raise ConfigurationError(f"feature {name!r} does not fit into int64 values: {error}") from None
    return example.SerializeToString(deterministic=True)


def summarize_example(message: bytes) -> Summary:
    """Returns the kind and the number of values of each feature of a message; ValueError if the bytes are not an
    Example.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    summary: Summary = {}
    example = _parse(message)
    if any(field.field_number == FEATURE_LISTS for field in UnknownFieldSet(example)):
        raise ValueError("it is a SequenceExample, whose feature lists are not supported; store them as features")
    for name, feature in sorted(example.features.feature.items()):
        field = feature.WhichOneof("kind")
        summary[name] = (field.removesuffix("_list"), len(getattr(feature, field).value)) if field else (None, 0)
    return summary


def normalize_example(message: bytes) -> bytes:
    """Encodes a message again as usual: packed numbers, one entry per feature, known fields; ValueError if damaged."""
    example = _parse(message)
    example.DiscardUnknownFields()
    return example.SerializeToString(deterministic=True)


def infer_features(
    samples: list[Summary], wanted: Sequence[str] | Mapping | None, target: str | None = None
) -> list[Feature]:
    """Chooses the features to read and their shapes from the summaries of some messages.

    ``wanted`` is ``features=`` of ``tfrecord``. The target comes last, and is read even if ``wanted`` does not name it.
    ConfigurationError if no message has such a feature, or its kind differs between messages.
    """
    kinds_of: dict[str, set[str]] = {}
    for sample in samples:
        for name, (kind, _) in sample.items():
            kinds_of.setdefault(name, set()).update([kind] if kind else [])
    known = sorted(kinds_of)
    holding = [name for name in known if kinds_of[name]]  # a feature that is always empty has no type
    names = [name for name in (holding if wanted is None else wanted) if name != target]
    if target in known:
        names.append(target)
    features = []
    for name in names:
        if name not in known:
            raise ConfigurationError(f"there is no feature {name!r}{suggest(name, known)}")
        kinds = sorted(kinds_of[name])
        if len(kinds) != 1:
            found = "of different types in the records: " + " and ".join(kinds) if kinds else "empty in all records"
            raise ConfigurationError(f"feature {name!r} is {found}; name only others in features=")
        counts = {sample.get(name, (None, 0))[1] for sample in samples}
        shape = None if len(counts) > 1 else () if counts == {1} else (counts.pop(),)
        form = wanted[name] if isinstance(wanted, Mapping) and name in wanted else shape
        features.append(Feature(name, kinds[0], *_parse_form(name, kinds[0], form)))
    if not features:
        raise ConfigurationError("features= is empty" if known else "the records hold no features")
    return features


@cache
def example_class() -> Any:
    """Returns the ``protobuf`` class of Example. The types live in a descriptor pool of their own: TensorFlow may
    register its types of the same names in the default pool.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
    except ImportError:
        raise ConfigurationError("TFRecord files of Examples require protobuf: pip install 'hasten[data]'") from None
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(DESCRIPTOR, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _parse(message: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return example_class().FromString(message)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def _as_list(name: str, value: Any) -> tuple[str | None, list]:
    """("bytes", "float" or "int64", None for a list without values; flat list of the values) of a feature;
    ConfigurationError for another type.
    """
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    is_list = isinstance(value, (list, tuple))
    texts = value if is_list else [value]
    if texts and isinstance(texts[0], (bytes, str)):
        if others := [type(text).__name__ for text in texts if not isinstance(text, (bytes, str))]:
            raise ConfigurationError(f"feature {name!r} holds a {others[0]} among strings; replace it by a string")
        return "bytes", [text.encode() if isinstance(text, str) else text for text in texts]
    try:
        numbers = numpy.asarray(value)
    except ValueError:
        advice = "an Example holds flat lists; flatten it, or leave it out"
        raise ConfigurationError(f"feature {name!r} holds lists of unequal lengths; {advice}") from None
    if is_list and not numbers.size:
        return None, []  # NumPy would call it floats, and strings in other messages would contradict that
    if numbers.dtype.kind not in "fiub":
        advice = "an Example holds byte strings, floats and integers"
        raise ConfigurationError(f"feature {name!r} is a {type(value).__name__}; {advice}")
    if numbers.dtype.kind == "b":
        numbers = numbers.astype(numpy.int64)  # protobuf refuses booleans
    return "float" if numbers.dtype.kind == "f" else "int64", numbers.ravel().tolist()


def _parse_form(name: str, kind: str, form: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """(shape or None, dtype inside byte strings or None) from a value of ``features=``; ConfigurationError if wrong."""
    raw = None
    if isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], torch.dtype):
        raw, form = form
        if kind != "bytes":
            why = f"feature {name!r} holds {kind} values, not byte strings that contain {raw}"
            raise ConfigurationError(f"{why}; pass only its shape")
    return None if form is None else check_shape(f"features={{{name!r}: ...}}", form), raw

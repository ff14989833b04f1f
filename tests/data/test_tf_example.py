"""Example messages: both parsers against handwritten wire format, and batches against ``protobuf`` one by one."""

import numpy
import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.formats.tf_example import encode_example, example_class, infer_features, summarize_example
from hasten.data.formats.tf_example_vectorized import MalformedExampleError, parse_examples

# example { features { feature { key: "a" value { int64_list { value: [1, 300] } } } } }, byte by byte after the
# format's document
BY_HAND = bytes([0x0A, 14, 0x0A, 12, 0x0A, 1, ord("a"), 0x12, 7, 0x1A, 5, 0x0A, 3, 1, 0xAC, 0x02])


def read(messages, wanted=None):
    ends = numpy.cumsum([len(message) for message in messages])
    data = numpy.frombuffer(b"".join(messages), numpy.uint8)
    features = infer_features([summarize_example(message) for message in messages], wanted)
    return parse_examples(data, ends - [len(message) for message in messages], ends, features)


def text(number, content):
    """A length-delimited field."""
    length, rest = [], len(content)
    while rest > 127:
        length, rest = [*length, rest & 127 | 128], rest >> 7
    return bytes([number << 3 | 2, *length, rest]) + content


def message(*entries):
    return text(1, b"".join(text(1, entry) for entry in entries))


def entry_length(size):
    """Returns the length of a message's only map entry, from that of the message: without two tags and two lengths."""
    return next(n for n in range(len(size), 0, -1) if message(size[-n:]) == size)


def test_handwritten_message_is_parsed():
    assert summarize_example(BY_HAND) == {"a": ("int64", 2)}
    assert encode_example({"a": [1, 300]}) == BY_HAND
    assert read([BY_HAND])["a"].tolist() == [[1, 300]]


def test_booleans_are_integers():
    assert (
        encode_example({"a": [True, False]})
        == encode_example({"a": torch.tensor([True, False])})
        == encode_example({"a": [1, 0]})
    )


def test_number_beyond_int64_is_refused():
    with pytest.raises(ConfigurationError, match="feature 'a' does not fit into int64"):
        encode_example({"a": numpy.array([1 << 63], numpy.uint64)})


def test_values_of_every_type_are_parsed():
    rng = numpy.random.default_rng(0)
    integers = rng.integers(-(2**63), 2**63 - 1, (50, 3))
    integers[0] = [-(2**63), 2**63 - 1, -1]
    parts = rng.normal(size=(50, 4)).astype("f4")
    pixels = rng.integers(0, 256, (50, 2, 3)).astype("u1")
    messages = [
        encode_example({"integers": w, "parts": p, "name": f"row {i}", "pixels": x.tobytes(), "one": i})
        for i, (w, p, x) in enumerate(zip(integers, parts, pixels, strict=True))
    ]
    columns = read(
        messages, {"integers": (3,), "parts": (2, 2), "name": (), "pixels": (torch.uint8, (2, 3)), "one": ()}
    )
    assert torch.equal(columns["integers"], torch.from_numpy(integers))
    assert torch.equal(columns["parts"], torch.from_numpy(parts.reshape(50, 2, 2)))
    assert torch.equal(columns["pixels"], torch.from_numpy(pixels))
    assert columns["name"] == [b"row %d" % i for i in range(50)] and columns["one"].tolist() == list(range(50))


def test_unequal_lengths_and_missing_features_become_lists():
    lists = [[], [1], [2, 300, 70000], [4, 5]]
    columns = read([encode_example({"a": a, "b": [b"x"] * len(a), "c": [0.5] * len(a)} if a else {}) for a in lists])
    assert [a.tolist() for a in columns["a"]] == lists
    assert columns["b"] == [[b"x"] * len(a) for a in lists]
    assert [len(c) for c in columns["c"]] == [0, 1, 3, 2] and columns["c"][0].dtype == torch.float32


def test_any_order_and_encoding_of_features_is_parsed():
    a, b = (
        text(1, b"a") + text(2, text(3, text(1, b"\x07"))),
        text(1, b"b") + text(2, text(2, text(1, b"\0\0\x80\x3f"))),
    )
    unpacked = text(1, b"a") + text(2, text(3, b"\x08\x07"))
    float_unpacked = text(1, b"b") + text(2, text(2, b"\x0d\0\0\x80\x3f"))
    value_first = text(2, text(3, text(1, b"\x07"))) + text(1, b"a")
    forms = [
        message(a, b),
        message(b, a),
        message(unpacked, b),
        message(a, float_unpacked),
        message(value_first, b),
        text(7, b"unknown") + message(a, b),
        text(1, text(1, a)) + text(1, text(1, b)),  # two fields that are merged
        message(text(1, b"a") + text(2, text(3, text(1, b"\x09"))), b, a),  # the last of two equal keys wins
    ]
    columns = read(forms)
    assert columns["a"].tolist() == [7] * len(forms) and columns["b"].tolist() == [1.0] * len(forms)


def test_batch_equals_its_messages_one_by_one():
    rng = numpy.random.default_rng(1)
    batch = []
    for _ in range(200):
        features = {
            f"key{k}": rng.integers(0, 10 ** rng.integers(1, 18), rng.integers(0, 4)).tolist() for k in range(6)
        }
        features["text"] = [rng.bytes(int(n)) for n in rng.integers(0, 300, rng.integers(0, 3))]
        features = {name: value for name, value in features.items() if value}
        entries = [encode_example({name: values}) for name, values in features.items()]
        batch.append(message(*(entries[i][-entry_length(entries[i]) :] for i in rng.permutation(len(entries)))))
    columns = read(batch)
    for i, one in enumerate(batch):
        for name, column in columns.items():
            got = column[i] if name == "text" else column[i].tolist()
            expected = example_class().FromString(one).features.feature[name]
            assert got == list(expected.bytes_list.value if name == "text" else expected.int64_list.value)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (encode_example({"a": [1, 2], "b": 1.0}), r"feature 'a' has 2 values, not 1"),
        (encode_example({"b": 1.0}), r"feature 'a' has 0 values"),
        (encode_example({"a": 0.5, "b": 1.0}), r"feature 'a' does not hold int64"),
        (b"\x0a\xff\x01", "not a tf.train.Example"),
        (b"\xff" * 20, "not a tf.train.Example"),
        (
            message(
                text(1, b"a") + text(2, text(3, text(1, b"\x81"))), text(1, b"b") + text(2, text(2, text(1, b"1234")))
            ),
            "'a': a number has no end",
        ),
    ],
)
def test_message_with_other_features_is_reported_by_its_index(wrong, reason):
    good = [encode_example({"a": 1, "b": 2.0})] * 3
    features = infer_features([summarize_example(good[0])], None)
    messages = [*good, wrong, *good]
    ends = numpy.cumsum([len(m) for m in messages])
    with pytest.raises(MalformedExampleError, match=reason) as caught:
        parse_examples(
            numpy.frombuffer(b"".join(messages), numpy.uint8), ends - [len(m) for m in messages], ends, features
        )
    assert caught.value.index == 3


def test_integers_of_every_length_are_parsed():
    edges = [1 << bits for bits in range(63)]
    numbers = [0, *edges, *(edge - 1 for edge in edges), *(-edge for edge in edges), -(1 << 63), (1 << 63) - 1]
    for seed in range(20):
        shuffled = numpy.random.default_rng(seed).permutation(numpy.array(numbers, numpy.int64))
        assert torch.equal(read([encode_example({"x": shuffled})] * 2)["x"], torch.from_numpy(shuffled).repeat(2, 1))


@pytest.mark.parametrize("length", [1, 255, 256, (1 << 16) - 1, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("more", [0, 1])
def test_byte_strings_of_every_length_are_parsed(length, more):
    """Of equal length, and one of them longer."""
    texts = [numpy.random.default_rng(seed).bytes(length + more * (seed == 3)) for seed in range(5)]
    features = {"x": (torch.uint8, None if more else (length,))}
    columns = read([encode_example({"x": text}) for text in texts], features)
    assert [bytes(row.numpy()) for row in columns["x"]] == texts


def test_damaged_messages_raise_only_malformed_example_error():
    """Any bytes give columns or MalformedExampleError."""
    rng = numpy.random.default_rng(2)
    good = encode_example({"a": [1, 300], "b": [0.5, 1.5], "c": b"text"})
    features = infer_features([summarize_example(good)], None)
    located = 0
    for _ in range(500):
        bad = numpy.frombuffer(good, numpy.uint8).copy()
        bad[rng.integers(0, len(bad), 2)] = rng.integers(0, 256, 2)
        cut = bad[: rng.integers(0, len(bad) + 1)]
        data = numpy.concatenate([numpy.frombuffer(good, numpy.uint8), cut])
        try:
            parse_examples(data, numpy.array([0, len(good)]), numpy.array([len(good), len(data)]), features)
        except MalformedExampleError as error:
            located += error.index == 1
    assert located > 300


def test_missing_feature_error_suggests_similar_names():
    with pytest.raises(ConfigurationError, match="did you mean label"):
        infer_features([{"label": ("int64", 1)}], ["labl"])
    with pytest.raises(ConfigurationError, match="'a' is of different types in the records: float and int64"):
        infer_features([{"a": ("int64", 1)}, {"a": ("float", 1)}], None)


@pytest.mark.parametrize(("values", "kind"), [([b"x", b"y"], "bytes"), ([1, 2], "int64"), ([0.5, 1.5], "float")])
def test_empty_list_is_of_the_kind_of_the_other_messages(values, kind):
    messages = [encode_example({"a": row}) for row in (values, [], values[:1], ())]
    assert [summarize_example(message)["a"] for message in messages] == [(kind, 2), (None, 0), (kind, 1), (None, 0)]
    assert [list(row) for row in read(messages)["a"]] == [values, [], values[:1], []]
    assert summarize_example(encode_example({"a": torch.zeros(0)}))["a"] == ("float", 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a", None], "feature 'a' holds a NoneType among strings; replace it"),
        ([b"a", 1], "feature 'a' holds a int among strings"),
        ([[1], [1, 2]], "feature 'a' holds lists of unequal lengths; an Example holds flat lists"),
    ],
)
def test_list_that_an_example_cannot_hold_is_refused(value, message):
    with pytest.raises(ConfigurationError, match=message):
        encode_example({"a": value})

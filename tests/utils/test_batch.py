"""Batches: their number of samples, and how they are split into microbatches."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hasten.core.errors import RunError
from hasten.core.run_context import TrainProgress
from hasten.engine.forward import accumulate_gradients
from hasten.utils.batch import batch_size, batch_tensors, chunk_batch, copy_to_device, map_tensors


@pytest.mark.parametrize(
    ("samples", "count", "sizes"), [(7, 3, [2, 2, 3]), (3, 10**12, [1, 1, 1]), (4, 1, [4]), (0, 2, [])]
)
def test_chunk_batch_gives_nearly_equal_nonempty_chunks(samples, count, sizes):
    batch = {"x": torch.arange(samples), "scale": torch.tensor(2.0)}
    cut = chunk_batch(batch, count)
    assert [len(piece["x"]) for piece in cut] == sizes
    assert all(piece["scale"] is batch["scale"] for piece in cut)
    assert torch.equal(torch.cat([torch.arange(0), *(piece["x"] for piece in cut)]), batch["x"])


IMAGES = [torch.zeros(3, 4 + index, 5) for index in range(6)]  # of different sizes, so they stay a list
BOXES = [{"boxes": torch.zeros(index, 4)} for index in range(6)]


def test_list_of_images_is_as_many_samples():
    batch = [IMAGES, torch.arange(6)]
    assert batch_size(batch) == 6
    assert [[len(images), len(labels)] for images, labels in chunk_batch(batch, 3)] == [[2, 2]] * 3
    first, second = chunk_batch({"labels": torch.arange(6), "images": IMAGES, "targets": BOXES}, 2)
    assert first["images"][0] is IMAGES[0] and second["images"][0] is IMAGES[3] and second["targets"] == BOXES[3:]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.zeros(7, 4, 2), torch.zeros(4)), 4),  # time comes first, as pad_sequence returns it
        ((torch.zeros(30), torch.zeros(4), torch.zeros(4)), 4),  # tokens, offsets and labels of an EmbeddingBag
        ((torch.zeros(20, 8), torch.zeros(160)), 20),  # the next letter of each letter
        ((torch.zeros(1, 8), torch.zeros(8)), 1),  # the same of one sample
        (((torch.zeros(3, 8, 8),) * 5, ({"boxes": torch.zeros(1, 4)},) * 5), 5),  # of detection
    ],
    ids=["time-first", "bag", "letters", "one-sample", "detection"],
)
def test_samples_are_counted_by_their_labels(batch, samples):
    assert batch_size(batch) == samples


def test_batch_whose_first_dimension_is_time_is_not_cut_into_microbatches():
    with pytest.raises(RunError, match="7 rows for 4 samples"):
        accumulate_gradients(lambda batch: batch[0].sum(), 2, TrainProgress())((torch.zeros(7, 4, 2), torch.zeros(4)))


def test_images_and_targets_in_tuples_are_cut_together():
    first, second = chunk_batch((tuple(IMAGES), tuple(BOXES)), 2)
    assert [len(part) for part in (*first, *second)] == [3, 3, 3, 3]
    assert first[0][0] is IMAGES[0] and second[0][0] is IMAGES[3] and second[1][0] is BOXES[3]


def test_inputs_of_a_model_with_several_are_cut_each():
    first, second = chunk_batch([[torch.arange(2), torch.arange(2)], torch.arange(2)], 2)
    assert [len(first[0]), len(second[0])] == [2, 2] and first[0][1].tolist() == [0]


def packed() -> PackedSequence:
    return pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)


def test_packed_sequence_is_a_leaf_that_holds_sequences():
    batch = (packed(), torch.arange(2))
    assert batch_size(batch) == batch_size({"x": packed()}) == batch_size(packed()) == 2
    doubled, target = map_tensors(lambda tensor: 2.0 * tensor, batch)
    assert isinstance(doubled, PackedSequence) and target.tolist() == [0, 2]
    assert doubled.data.unique().item() == 2 and doubled.batch_sizes.tolist() == [2, 2, 1, 1]
    assert [tuple(tensor.shape) for tensor in batch_tensors(batch)] == [(6, 3), (2,)]
    # as on a GPU, torch refuses other batch_sizes than the CPU's
    moved, _ = copy_to_device(batch, torch.device("meta"))
    assert moved.data.is_meta and moved.sorted_indices.is_meta and moved.batch_sizes.device.type == "cpu"


def test_packed_sequence_is_not_cut():
    batch = (packed(), torch.arange(2))
    assert chunk_batch(batch, 1)[0][0].batch_sizes.tolist() == [2, 2, 1, 1]
    with pytest.raises(RunError, match="cannot be cut into microbatches; pack them in the model"):
        chunk_batch(batch, 2)


def test_lists_of_samples_in_a_dict_beside_the_target_are_counted_and_cut():
    tokens = [torch.arange(length) for length in (5, 1, 2, 3)]
    batch = ({"tokens": tokens, "text": ["a", "b", "c", "d"]}, torch.arange(4))
    assert batch_size(batch) == 4
    first, second = chunk_batch(batch, 2)
    assert first[0]["text"] == ["a", "b"] and second[0]["tokens"] == tokens[2:] and second[1].tolist() == [2, 3]

"""Random numbers belong to positions in an epoch: a position draws the same numbers in any batch."""

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data.rng import SampleRng

KEY = 3, 0, 1


def test_position_draws_the_same_in_any_batch():
    positions = numpy.arange(100)
    together = SampleRng(positions, *KEY)
    shapes = [(), (5,), (2, 3)]
    drawn = [together.uniform(*shape) for shape in shapes] + [together.integers(-4, 9, 2)]
    assert [tuple(tensor.shape) for tensor in drawn] == [(100,), (100, 5), (100, 2, 3), (100, 2)]
    apart = SampleRng(positions[[3, 70]], *KEY)
    for tensor, again in zip(
        drawn, [apart.uniform(*shape) for shape in shapes] + [apart.integers(-4, 9, 2)], strict=True
    ):
        assert torch.equal(tensor[[3, 70]], again)


def test_changed_draws_do_not_affect_later_ones():
    first = SampleRng(numpy.arange(10), *KEY).uniform().clone()
    SampleRng(numpy.arange(10), *KEY).uniform().zero_()
    assert torch.equal(SampleRng(numpy.arange(10), *KEY).uniform(), first)


def test_single_position_has_no_batch_dimension():
    rngs = list(SampleRng(numpy.arange(5), *KEY))
    assert rngs[2].uniform().shape == () and rngs[2].integers(0, 9, 4).shape == (4,)
    assert torch.equal(
        torch.stack([rng.uniform(3) for rng in SampleRng(numpy.arange(5), *KEY)]),
        SampleRng(numpy.arange(5), *KEY).uniform(3),
    )


@pytest.mark.parametrize(
    "limits", [(3, 3), (3, 2), (0, 2**32 + 1), (-1, 2**32), (2**63, 2**63 + 1), (0, 2.5), (0, None)]
)
def test_integers_of_an_impossible_range_are_refused(limits):
    with pytest.raises(ConfigurationError, match=r"^integers\("):
        SampleRng(numpy.arange(5), *KEY).integers(*limits)


def test_integers_of_the_largest_range():
    drawn = SampleRng(numpy.arange(1000), *KEY).integers(-1, 2**32 - 1)
    assert drawn.min() < 2**26 and drawn.max() > 2**32 - 2**26


def test_different_keys_give_different_draws():
    drawn = [SampleRng(numpy.arange(50), *key).uniform() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_draws_pass_uniformity_checks():
    rng = SampleRng(numpy.arange(20_000), *KEY)
    uniform = rng.uniform(2)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.002
    assert (
        abs(torch.corrcoef(uniform.T)[0, 1]) < 0.02
        and abs(torch.corrcoef(torch.stack([uniform[1:, 0], uniform[:-1, 0]]))[0, 1]) < 0.02
    )
    counts = rng.integers(2, 12).bincount(minlength=12)
    assert counts[:2].sum() == 0 and counts[2:].min() > 1800 and counts[2:].max() < 2200
    assert abs(rng.bernoulli(0.3).float().mean() - 0.3) < 0.02

"""Random numbers belong to rows: whatever else is in the batch, a row draws the same."""

import numpy
import torch

from hasten.data.chance import Chance

KEY = 3, 0, 1


def test_a_row_draws_the_same_in_any_company():
    rows = numpy.arange(100)
    together = Chance(rows, *KEY)
    shapes = [(), (5,), (2, 3)]
    drawn = [together.uniform(*shape) for shape in shapes] + [together.integers(-4, 9, 2)]
    assert [tuple(tensor.shape) for tensor in drawn] == [(100,), (100, 5), (100, 2, 3), (100, 2)]
    apart = Chance(rows[[70, 3]], *KEY)
    for tensor, again in zip(drawn, [apart.uniform(*shape) for shape in shapes] + [apart.integers(-4, 9, 2)], strict=True):
        assert torch.equal(tensor[[70, 3]], again)


def test_one_row_alone_has_no_first_dimension():
    chances = list(Chance(numpy.arange(5), *KEY))
    assert chances[2].uniform().shape == () and chances[2].integers(0, 9, 4).shape == (4,)
    assert torch.equal(
        torch.stack([chance.uniform(3) for chance in Chance(numpy.arange(5), *KEY)]), Chance(numpy.arange(5), *KEY).uniform(3)
    )


def test_the_key_makes_all_the_difference():
    drawn = [Chance(numpy.arange(50), *key).uniform() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_numbers_look_random():
    chance = Chance(numpy.arange(20_000), *KEY)
    uniform = chance.uniform(2)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(uniform.T)[0, 1]) < 0.02 and abs(torch.corrcoef(torch.stack([uniform[1:, 0], uniform[:-1, 0]]))[0, 1]) < 0.02
    counts = chance.integers(2, 12).bincount(minlength=12)
    assert counts[:2].sum() == 0 and counts[2:].min() > 1800 and counts[2:].max() < 2200
    assert abs(chance.coins(0.3).float().mean() - 0.3) < 0.02

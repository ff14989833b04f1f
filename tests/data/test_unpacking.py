"""The one-pass kernel gives the bits of the two passes that it replaces, and is not used if it does not."""

import pytest
import torch

from hasten.data import unpacking
from hasten.data.transforms import scaled
from hasten.data.unpacking import FOOTER_BYTES, can_unpack, plane_footers, unpack_planes

MOMENTS = [((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), ((0.5,), (0.25,)), ((0.0, -3.0), (1e-3, 1e4))]


@pytest.fixture(autouse=True)
def detect_again():
    can_unpack.cache_clear()
    yield
    can_unpack.cache_clear()


@pytest.mark.parametrize(("means", "stds"), MOMENTS, ids=["cifar", "one", "odd"])
@pytest.mark.parametrize("values", [8, 24, 1000, 1024])
def test_one_pass_kernel_has_the_bits_of_two_passes(means, stds, values):
    if not can_unpack(means, stds):
        pytest.skip("this torch has no such kernel, or another one")
    pictures = torch.randint(
        0, 256, (33, 2 * len(means), 1, values), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    ends = plane_footers(means, stds, 2 * len(means)).view(torch.uint8).view(-1, FOOTER_BYTES).repeat(33, 1)
    made = unpack_planes(torch.cat([pictures.view(-1, values), ends], dim=1)).view(pictures.shape)
    assert torch.equal(made, scaled(pictures.view(33, len(means), 2, values), means, stds).view(pictures.shape))


def test_one_pass_kernel_with_a_different_bit_is_not_used(monkeypatch):
    monkeypatch.setattr(
        unpacking, "unpack_planes", lambda planes: torch.nextafter(unpack_planes(planes), torch.tensor(torch.inf))
    )
    assert not can_unpack(*MOMENTS[0])


def test_one_pass_kernel_with_a_different_tail_is_not_used(monkeypatch):
    def odd(planes):
        made = unpack_planes(planes)
        made[:, made.shape[1] // 16 * 16 :] += 1.0
        return made

    monkeypatch.setattr(unpacking, "unpack_planes", odd)
    assert not can_unpack(*MOMENTS[0])


def test_one_pass_kernel_that_is_missing_is_not_used(monkeypatch):
    monkeypatch.setattr(unpacking, "unpack_planes", lambda planes: torch.ops.quantized.no_such_kernel(planes))
    assert not can_unpack(*MOMENTS[0])

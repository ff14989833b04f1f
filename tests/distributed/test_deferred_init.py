"""A model initialized in parts equals one built at once bit for bit, and leaves the generators in the same state."""

import copy
from itertools import pairwise

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hasten.core.errors import ConfigurationError
from hasten.distributed.deferred_init import deferred_init, replace_tensors


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every tensor of the module, once."""
    found: dict[str, torch.Tensor] = {}
    for place, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            found |= {f"{place}.{name}": tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    return found


def at_once(make, seed: int = 3):
    torch.manual_seed(seed)
    return tensors_of(make()), torch.get_rng_state()


def part_by_part(make, wanted=lambda name: True, seed: int = 3):
    torch.manual_seed(seed)
    model, making = deferred_init(make)
    named = tensors_of(model)
    assert all(tensor.is_meta for tensor in named.values())
    names = [name for name in named if wanted(name)]
    made = {names[number]: tensor for number, tensor in making([named[name] for name in names])}
    return made, torch.get_rng_state()


def with_init(init, **named):
    """Two layers with an ``apply`` of an init function after construction, as in many programs."""

    def make():
        def again(module):
            if isinstance(module, nn.Linear):
                init(module.weight, **named)
                nn.init.zeros_(module.bias)

        return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7)).apply(again)

    return make


class Buffers(nn.Module):
    """The buffers of a transformer: sinusoids, a mask, rotary angles, and a tensor that is not a buffer."""

    def __init__(self):
        super().__init__()
        place, rate = torch.arange(12).unsqueeze(1), torch.exp(torch.arange(0, 8, 2) * (-numpy.log(1e4) / 8))
        sines = torch.zeros(12, 8)
        sines[:, 0::2], sines[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        self.register_buffer("sines", sines)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 12, 12).bool(), persistent=False)
        angles = torch.outer(torch.arange(12.0), rate)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles))
        self.scale = torch.full((3,), 0.5)
        self.table = nn.Embedding(12, 8)
        self.register_buffer("ids", torch.arange(12, device=self.table.weight.device))
        drops = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=drop) for drop in drops)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight


def from_numpy():
    model, numbers = nn.Linear(6, 5), numpy.empty((5, 6), dtype="float32")
    numbers[:] = 2.0
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(numbers))
    numbers[:] = 7.0  # the same memory for another parameter
    model.scale = nn.Parameter(torch.from_numpy(numpy.arange(4.0)))
    model.half_of_it = nn.Parameter(model.scale.detach()[2:])
    return model


def in_place():
    model = nn.Linear(6, 5)
    with torch.no_grad():
        model.weight[2].fill_(0.0)
        model.weight.t()[:, :2].mul_(3.0).clamp_(-0.1, 0.1)
        model.bias.data = model.weight.sum(1) / model.weight.norm()
        torch._foreach_mul_(list(model.parameters()), 0.5)
    return model


def drawn_otherwise():
    model, own = nn.Module(), torch.Generator().manual_seed(5)
    shape = torch.empty(40, 3)
    model.many = nn.ParameterList(
        [
            torch.randn(4, 5, generator=own),
            torch.rand(4, 5),
            torch.randn_like(shape),
            torch.normal(0.0, 2.0, (3, 3)),
            torch.normal(shape.fill_(1.0), 0.1),
            torch.bernoulli(torch.full((50,), 0.3)),
            torch.empty(50).bernoulli_(0.5),
            torch.empty(5, 30).t().normal_(generator=own),
            torch.empty(9).exponential_(),
            torch.empty(9).cauchy_(),
            torch.empty(9).log_normal_(),
            torch.randperm(10).double(),
            torch.randint(0, 9, (7,)).double(),
            torch.multinomial(torch.rand(30), 5).double(),
            torch.poisson(torch.rand(30) * 9),
        ]
    )
    return model


def beside_the_weights():
    model = nn.Linear(4, 2)
    model.register_buffer("mean", torch.tensor([1.0, 2.0], device=model.weight.device) * 2)
    model.register_buffer("both", model.mean.to(model.bias.device) + model.bias.detach())
    if model.weight.is_meta or model.weight.device.type != "cpu":  # as some programs do, without a fill
        return model
    nn.init.normal_(model.weight)
    return model


def seeded_within():
    torch.manual_seed(11)
    one = nn.Linear(5, 5)
    torch.manual_seed(11)
    model = nn.Sequential(one, nn.Linear(5, 5))
    torch.manual_seed(12)
    return model


def in_double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Linear(5, 5)
    finally:
        torch.set_default_dtype(torch.float32)


MODELS = {
    "linear": lambda: nn.Linear(5, 4),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 2, 3), nn.GroupNorm(2, 2)
    ),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(5, 6, 2, bidirectional=True), nn.GRU(5, 6)]),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 2, 1, 16),
    "embedding bag": lambda: nn.ModuleList([nn.EmbeddingBag(9, 4, padding_idx=0), nn.Bilinear(3, 4, 5), nn.PReLU()]),
    "instance norm": lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
    "places": Buffers,
    "tied": Tied,
    "copied": lambda: nn.ModuleList([copy.deepcopy(layer) for layer in [nn.Linear(4, 4)] * 3]),
    "double": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).bfloat16(),
    "half and back": lambda: nn.Linear(5, 4).half().float(),
    "double by default": in_double_by_default,
    "channels last": lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 4)),
    "dirac": lambda: nn.ParameterList([nn.init.dirac_(nn.Conv2d(4, 4, 3).weight)]),
    "numbers beside the weights": beside_the_weights,
    "constants": lambda: nn.ParameterList(
        [torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.eye(3), torch.Tensor(2, 3).zero_()]
    ),
    "from numpy": from_numpy,
    "in place": in_place,
    "drawn otherwise": drawn_otherwise,
    "seeded within": seeded_within,
} | {
    f"init {name}": with_init(getattr(nn.init, f"{name}_"), **named)
    for name, named in {
        "normal": {"std": 0.02},
        "uniform": {},
        "trunc_normal": {"std": 0.1},
        "xavier_uniform": {},
        "xavier_normal": {},
        "kaiming_uniform": {"a": 1.0},
        "kaiming_normal": {},
        "orthogonal": {},
        "sparse": {"sparsity": 0.4},
        "eye": {},
        "constant": {"val": 0.3},
    }.items()
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_materialized_model_equals_one_built_at_once(name):
    eager, after = at_once(MODELS[name])
    made, after_parts = part_by_part(MODELS[name])
    assert made.keys() == eager.keys()
    assert all(same(made[each], eager[each]) for each in eager)
    assert torch.equal(after, after_parts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0, 1])
def test_materialized_stage_equals_part_of_the_model(name, part):
    eager, after = at_once(MODELS[name])
    wanted = set(list(eager)[part::2])
    made, after_parts = part_by_part(MODELS[name], wanted.__contains__)
    assert made.keys() == wanted
    assert all(same(made[each], eager[each]) for each in made)
    assert torch.equal(after, after_parts)


def test_weight_is_materialized_as_soon_as_it_is_drawn():
    """Although the model is built, initialized again and converted as a whole: otherwise all weights are pending at
    once."""

    def make():
        made = nn.Sequential(*(nn.Linear(30, 30) for _ in range(7)))
        made.apply(lambda part: nn.init.orthogonal_(part.weight) if isinstance(part, nn.Linear) else None)
        return made.double()

    model, making = deferred_init(make)
    weights = [part.weight for part in model]
    torch.manual_seed(0)
    states = [torch.get_rng_state() for _, weight in making(weights)]
    assert len(states) == 7 and not any(torch.equal(one, other) for one, other in pairwise(states))


def test_tied_weights_stay_tied():
    model, making = deferred_init(Tied)
    assert model.out.weight is model.table.weight
    model.table.weight.kind = "table"
    made = dict(making([model.table.weight]))
    replace_tensors(model, lambda tensor: made[0])
    assert model.out.weight is model.table.weight and isinstance(model.out.weight, nn.Parameter)
    assert torch.equal(model.out.weight, made[0]) and model.out.weight.kind == "table"


def test_recurrent_layer_uses_its_materialized_weights():
    eager, _ = at_once(make := lambda: nn.LSTM(3, 4))
    torch.manual_seed(3)
    model, making = deferred_init(make)
    weights = list(model.parameters())
    made = {id(weights[number]): tensor for number, tensor in making(weights)}
    replace_tensors(model, lambda tensor: made[id(tensor)])
    reference = nn.LSTM(3, 4)
    reference.load_state_dict({name.removeprefix("."): tensor for name, tensor in eager.items()})
    given = torch.ones(2, 3)
    assert torch.equal(model(given)[0], reference(given)[0])


def looking():
    model = nn.Linear(4, 4)
    if model.weight.sum() > 0:
        nn.init.zeros_(model.weight)
    return model


def reading():
    return nn.Linear(4, int(nn.Linear(4, 4).weight.detach().numpy().shape[0]))


def listing():
    return nn.Linear(4, len(torch.rand(3).tolist()))


def going_back():
    first, state = nn.Linear(4, 4), torch.get_rng_state()
    second = nn.Linear(4, 4)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, nn.Linear(4, 4))


def drawing_into_numbers():
    return nn.ParameterList([torch.tensor([1.0, 2.0]).normal_()])


def on_another_device():
    return nn.Linear(4, 4, device="cuda")


def without_numbers():
    model = nn.Linear(4, 4)
    model.register_buffer("mean", torch.tensor([1.0, 2.0], device="meta"))
    return model


def by_a_mask():
    return parametrizations.orthogonal(nn.Linear(5, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (looking, "reads values while it is built"),
        (reading, "cannot be initialized in parts"),
        (listing, "cannot be initialized in parts"),
        (going_back, "resets the state of a random generator while it is built"),
        (drawing_into_numbers, "into a tensor of plain values (normal_)"),
        (on_another_device, "in parts"),
        (without_numbers, "tensors on the meta device, whose values are unknown"),
        (by_a_mask, "reads values while it is built"),
    ],
)
def test_unsupported_initialization_is_refused(make, message):
    with pytest.raises(ConfigurationError) as refused:
        deferred_init(make)
    assert (
        message in str(refused.value)
        and "leave init=meta or balance=memory out" in str(refused.value)
        and "\n" not in str(refused.value)
    )

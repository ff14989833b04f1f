"""The contract that every acceleration method signs.

A method is asked once, while a run is being built. Each hook takes the thing and returns a better
thing; a hook that is not overridden costs nothing. After building only plain functions are left.

The hooks, in the order in which the run is built::

    process    () -> context            around everything: thread counts, allocator; must undo itself
    loop       Loop                     how many samples a step, how many steps, when to stop
    data       Batches                  where batches come from (training and validation alike)
    model      module                   surgery, memory layout, compilation
    shard      module                   communication between processes
    optimizer  (model) -> optimizer     or (optimizer, schedule), just as the task's function returns it
    batch      (batch) -> batch         on the device
    loss       (output, target) -> loss
    forward    (batch) -> loss
    backward   (loss) -> None
    micro      (batch) -> loss          forward and backward together; whoever keeps the loss detaches it
    gradients  () -> None               between the last backward and the update
    update     () -> None               the optimizer's step
    clear      () -> None               zeroing the gradients
    export     module                   what evaluation and the saved model see
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from hasten.contract.card import Card, Exactness
from hasten.contract.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch

    from hasten.contract.data import Batches


@dataclass
class Clock:
    """Where the run stands. Step-dependent methods read it; only the loop writes it."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # passes over the training data completed
    batch: int = 0  # batches of this pass done
    samples: int = 0  # training samples seen, by all ranks
    share: float = 1.0  # the current micro-batch's share of its step's samples
    last_piece: bool = True  # it is the last of its step
    whole: int = 0  # samples that all ranks have in this step; 0: this process is alone
    weight: float = 1.0  # what this rank's part counts: its samples against an equal part of them


@dataclass
class Loop:
    """The plan of steps."""

    batch_size: int  # samples an optimizer step sees
    epochs: float  # passes over the training data
    steps: int | None = None  # optimizer steps in all; None where the data's length is unknown
    samples: int | None = None  # that a pass has, where it is known
    microbatches: int = 1  # pieces that a batch is cut into, each with its own forward and backward
    evaluate_every: int | None = None  # samples between evaluations; None: once a pass
    stop: Callable[[list[Evaluation]], bool] | None = None  # asked after every evaluation


@dataclass(frozen=True)
class Evaluation:
    """The metric at one moment of the run."""

    step: int
    samples: int
    metric: float


@dataclass
class Run:
    """What a method may look at while it is being built, and the few things that it may keep."""

    device: torch.device
    task: Any
    clock: Clock = field(default_factory=Clock)
    seed: int = 0
    loop: Loop | None = None
    model: torch.nn.Module | None = None
    module: torch.nn.Module | None = None  # the model before it was shared out among ranks: what a checkpoint keeps
    optimizer: torch.optim.Optimizer | None = None
    kept: dict[str, Any] = field(default_factory=dict)  # name -> object with state_dict(); travels in checkpoints
    idle: list[tuple[str, str]] = field(default_factory=list)  # (method, why it had nothing to act on)
    chosen: dict[str, dict] = field(default_factory=dict)  # method -> settings that it found while it ran, for the next run
    ranks: Ranks = ALONE  # the processes that train together
    replica: int = 1  # of them that hold one copy of the model between them, and read the same samples; ranks of one copy follow each other
    stages: int = 1  # that each copy is cut into, one after the other; the ranks of a stage follow each other
    holders: dict[str, Method] = field(default_factory=dict)  # dimension of the mesh -> the method whose degree says how many ranks it has
    mesh: Any = None  # the ranks by copy, stage and shard, once somebody has asked for it (``mesh_of``)
    joint: bool = False  # the model computes only where all ranks compute at once: they evaluate together
    owners: int = (
        1  # ranks of each copy, or rows of them, that have different weights of it; those that a rank has not are on the meta device there
    )
    common: frozenset = frozenset()  # weights of this rank that all owners have
    rhythm: int = 1  # steps after which what a step costs repeats itself: ranks that talk seldom do so in one of them
    prelude: int = 0  # steps at first that cost something else
    own: dict[str, Any] = field(default_factory=dict)  # as kept, of what every rank has another; taken up by as many ranks only
    mean: Callable[[dict], dict] = lambda state: state  # of what differs between ranks: what a checkpoint holds for any number of them
    whereabouts: str = (
        "device"  # of the model until the shard hook has it: there, on the "host", where tasks make it, or "nowhere", on the meta device
    )
    making: Callable = (
        enumerate  # (tensors of the model) -> (number, tensor with its numbers) of each; of one that is nowhere it makes them, once
    )
    sample: Callable[[], Any] | None = None  # reads the first batch, on the device, as if nobody had; for methods that look before they act
    higher_is_better: Callable[[], bool] = lambda: True  # the direction of the task's metric
    cores: Callable[[], int] = lambda: os.cpu_count() or 1  # that this process may use; the engine knows of containers and ranks
    free_memory: Callable[[], int] = lambda: 1 << 32  # bytes that this process may still take; the engine asks the system

    @property
    def shards(self) -> int:
        """Ranks of one stage: they compute the same layers between them, and draw alike."""
        return self.replica // self.stages

    @property
    def apart(self) -> bool:
        return self.owners > 1

    @property
    def twins(self) -> frozenset:
        """Weights of this rank that the first owner has as well, and counts."""
        return self.common if self.ranks.rank % self.replica else frozenset()

    def agree(self, yes: bool) -> bool:
        """Any rank's yes becomes every rank's yes."""
        return self.ranks.agree(yes)

    def whole_norm(self, own: torch.Tensor) -> torch.Tensor:
        """The norm of a vector, given that of what this rank has of it: all of it, unless the ranks hold other weights; without twins."""
        if not self.apart:
            return own
        squares = self.ranks.total([float(own) ** 2])[0] / (self.ranks.world / self.owners)  # all ranks of one owner have its norm
        return own.double().new_tensor(squares**0.5)

    def nothing_to_do(self, method: Method, why: str) -> None:
        """A method that found nothing to act on says so: a warning in ``train``, a refusal in ``tune``."""
        if (method.name, why) not in self.idle:
            self.idle.append((method.name, why))


BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def setting(default, *, one_of: tuple[str, ...] = (), **bounds: float):
    """A field of a method that states what it may be: one of some words, or a finite number within bounds (keys of BOUNDS)."""
    if strangers := bounds.keys() - BOUNDS.keys():
        raise TypeError(f"a setting has no bound {sorted(strangers)[0]!r}; there are {', '.join(BOUNDS)}")
    if not one_of and not bounds:
        raise TypeError("a setting states what it may be: give one_of or a bound")
    words = [f"one of {', '.join(one_of)}" if len(one_of) > 1 else one_of[0]] if one_of else []
    if bounds:
        words.append(" and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items()))
    return field(default=default, metadata={"one_of": one_of, "bounds": bounds, "range": " or ".join(words)})


def fits(value, one_of: tuple[str, ...], bounds: dict[str, float]) -> bool:
    """Whether a value is in the range that a setting states."""
    if not bounds or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value in one_of
    return (isinstance(value, int) or math.isfinite(value)) and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def check_settings(method) -> None:
    """Holds the settings of a method against what they may be.

    Raises:
        ValueError: the setting that lies outside.
    """
    for stated in fields(method):
        value, about = getattr(method, stated.name), stated.metadata
        if "range" in about and value is not stated.default and not fits(value, about["one_of"], about["bounds"]):
            finite = "finite and " if isinstance(value, float) and not math.isfinite(value) else ""
            raise ValueError(f"{stated.name} must be {finite}{about['range']}, not {value!r:.40}")


class Method:
    """Base of all methods: fifteen hooks that do nothing. Settings are dataclass fields: data, never callables."""

    card: ClassVar[Card]
    name: ClassVar[str] = "method"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.name = cls.__module__.rpartition(".")[2]  # the file name is the method's name: no registry

    def __post_init__(self):
        check_settings(self)

    def process(self, context: Callable[[], AbstractContextManager], run: Run):
        return context

    def loop(self, loop: Loop, run: Run) -> Loop:
        return loop

    def data(self, batches: Batches, run: Run):
        return batches

    def model(self, model: torch.nn.Module, run: Run) -> torch.nn.Module:
        return model

    def shard(self, model: torch.nn.Module, run: Run) -> torch.nn.Module:
        return model

    def optimizer(self, make: Callable, run: Run) -> Callable:
        return make

    def batch(self, move: Callable, run: Run) -> Callable:
        return move

    def loss(self, loss: Callable, run: Run) -> Callable:
        return loss

    def forward(self, forward: Callable, run: Run) -> Callable:
        return forward

    def backward(self, backward: Callable, run: Run) -> Callable:
        return backward

    def micro(self, micro: Callable, run: Run) -> Callable:
        return micro

    def gradients(self, gradients: Callable, run: Run) -> Callable:
        return gradients

    def update(self, update: Callable, run: Run) -> Callable:
        return update

    def clear(self, clear: Callable, run: Run) -> Callable:
        return clear

    def export(self, model: torch.nn.Module, run: Run) -> torch.nn.Module:
        return model


HOOKS = (
    "process", "loop", "data", "model", "shard", "optimizer", "batch", "loss",
    "forward", "backward", "micro", "gradients", "update", "clear", "export",
)  # fmt: skip


def hooks_of(method: Method | type[Method]) -> tuple[str, ...]:
    """The hooks that a method overrides."""
    cls = method if isinstance(method, type) else type(method)
    return tuple(hook for hook in HOOKS if getattr(cls, hook) is not getattr(Method, hook))


def needs_of(method: Method) -> frozenset[str]:
    """The traits that a method relies on: who changes what happens to a batch relies on its being done in one go, whatever the card says.

    Who changes no bit, as a watcher, may miss what is done otherwise.
    """
    changes_a_pass = method.card.exactness is not Exactness.BIT_EXACT and {"forward", "backward"}.intersection(hooks_of(method))
    return method.card.needs | ({"whole forward pass"} if changes_a_pass else frozenset())

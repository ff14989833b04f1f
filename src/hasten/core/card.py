"""A method's card: every fact about it, as data.

The command line, the documents, the diagnoser and the tuner read cards and nothing else; a method's
code is only ever run to train.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from hasten.core.errors import ConfigurationError


class Exactness(Enum):
    """How a method may change the numbers. The class selects the check that it must pass."""

    BIT_EXACT = "same bits"  # torch.equal on every weight after 30 steps
    EQUIVALENT_MATH = "same formula"  # the same run in float64, relative difference below 1e-10
    REDUCED_PRECISION = "lower precision"  # signal-to-noise of the gradients, then the metric over paired seeds
    CHANGES_TRAINING = "different training"  # time to equal quality over paired seeds


class WrapOrder(IntEnum):
    """Position of a method among those that wrap the same hook: later wraps earlier, LAST is outermost."""

    FIRST = 0
    EARLY = 1
    NORMAL = 2
    LATE = 3
    LAST = 4


PHASES = {
    "input": "waiting for the next batch",
    "copy": "moving the batch to the device",
    "forward": "model and loss",
    "backward": "gradients of the loss",
    "grad_transform": "work on the gradients before the optimizer step",
    "optimizer_step": "optimizer and schedule",
    "evaluation": "measuring the metric",
    "logging": "step log, progress, checkpoints",
    "steps": "how many steps the training needs at all",
}

FACTS = {
    "cuda": "the run is on an NVIDIA GPU",
    "cpu": "the run is on the CPU",
    "tf32_hardware": "matrix units that take TF32",
    "bfloat16_hardware": "matrix units that take bfloat16",
    "float16_hardware": "matrix units that take float16",
    "convolutions": "the model has convolutions",
    "indexed_samples": "training samples can be read by index",
    "workers": "others than the training process can compute the batches",
    "evaluations": "the metric is measured more than once",
    "distributed": "several processes train together",
    "multiple_epochs": "the data are seen more than once",
    "repeated_blocks": "the model has a sequence of like blocks",
    "matrix_weights": "some parameter has two or more dimensions",
}

TRAITS = {
    "python_between_kernels": "Python code runs inside every step",
    "gradient_norm": "the size of the gradients is meaningful",
    "reduced_gradients": "before an optimizer step the gradients are those of the whole batch: averaged over the ranks",
    "full_weights": "every rank holds all weights and their gradients",
    "replicated_weights": "all ranks hold the same weights after every step",
    "monolithic_forward": "every rank computes the output and the loss of its samples by itself",
    "uniform_precision": "one lower precision is chosen for the whole forward pass",
}

REMEDIES = {
    "out_of_memory": "a step does not fit into memory",
    "divergence": "the loss or the weights are no longer finite",
    "unused_parameters": "some parameters have no gradient in a step, and the ranks wait for all of them",
}

CEILINGS = {
    "system_time": "the operating system takes none of the processors' time",
    "larger_batch": "what a step costs whatever its size is paid less often",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts about one method.

    Attributes:
        summary: what it does, in a line.
        exactness: how it may change the numbers.
        source: paper or document it follows.
        gain: the claimed speed-up as (low, high), or None where nobody claims one. What was measured lives in records/.
        gain_when: the circumstances under which the claim holds.
        accelerates: the phases of the step that it shortens (keys of PHASES); the profiler turns them into a bound.
        applies_to: facts (keys of FACTS) that must all hold for it to be worth trying; other words are for people, and nothing
            checks them. The engine removes a method that applies to ``distributed`` runs only from a single process.
        requires: traits (keys of TRAITS) of the run that it relies on.
        invalidates: traits that it takes away from the others.
        order: its level among methods that wrap the same hook.
        after: names of methods that it must wrap (or follow, in a hook that edits).
        replaces: hooks whose inner thing it discards; two methods may not replace the same one, unless one continues ``after`` the other.
        high_setup_cost: building it takes seconds, which a short run does not earn back; the tuner tries it last.
        presets: options worth trying, mildest first; the tuner walks through them.
        default_for: facts under which the engine adds it to a recipe that replaces none of the same hooks.
        remedy_for: problem (key of REMEDIES) -> options with which it may help; error messages suggest them.
        strong_baseline: part of the strong baseline that the tuner measures beside the task as it is.
        trial_priority: the tuner tries methods with a high number first, such as those that shorten all later trials.
        not_searched: why the tuner never tries it by itself; empty: it may.
        gradient_bytes_saved: share of the bytes of float32 gradients that it does not send to other ranks, by rounding them.
        ceiling: the ceiling (key of CEILINGS) that bounds what it can give, where a phase of the step does not.
    """

    summary: str
    exactness: Exactness
    source: str = ""
    gain: tuple[float, float] | None = None
    gain_when: str = ""
    accelerates: frozenset[str] = frozenset()
    applies_to: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    invalidates: frozenset[str] = frozenset()
    order: WrapOrder = WrapOrder.NORMAL
    after: tuple[str, ...] = ()
    replaces: frozenset[str] = frozenset()
    high_setup_cost: bool = False
    presets: tuple[dict[str, Any], ...] = ({},)
    default_for: frozenset[str] = frozenset()
    remedy_for: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    strong_baseline: bool = False
    trial_priority: int = 0
    not_searched: str = ""
    gradient_bytes_saved: float = 0.0
    ceiling: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.exactness, Exactness):
            raise ConfigurationError(
                f"a card's exactness is one of {', '.join(map(str, Exactness))}, not {self.exactness!r}"
            )
        for name in ("accelerates", "applies_to", "requires", "invalidates", "replaces", "default_for"):
            if isinstance(words := getattr(self, name), str):
                raise ConfigurationError(f"the card says {name}={words!r}; it must be a set: {{{words!r}}}")
            object.__setattr__(self, name, frozenset(words))
        vocabularies = {
            "accelerates": PHASES,
            "requires": TRAITS,
            "invalidates": TRAITS,
            "default_for": FACTS,
            "remedy_for": REMEDIES,
        }
        for name, known in vocabularies.items():  # the engine and the tuner compute with these
            if unknown := set(getattr(self, name)) - known.keys():
                raise ConfigurationError(
                    f"the card says {name}={sorted(unknown)}, but the known words are {', '.join(known)}"
                )
        if self.ceiling and self.ceiling not in CEILINGS:
            raise ConfigurationError(
                f"the card says ceiling={self.ceiling!r}, but the known words are {', '.join(CEILINGS)}"
            )
        object.__setattr__(self, "after", tuple(self.after))

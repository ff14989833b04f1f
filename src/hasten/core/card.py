"""A method's card: every fact about it, as data, for command line, documentation, profiler and tuner."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from hasten.core.errors import ConfigurationError


class Exactness(Enum):
    """How far a method may change the numbers of a training run; the comments name the check of each member."""

    BIT_EXACT = "same bits"  # torch.equal on every weight after 30 steps
    EQUIVALENT_MATH = "same formula"  # the same run in float64, relative difference below 1e-10
    REDUCED_PRECISION = "lower precision"  # signal-to-noise ratio of the gradients, then the loss over measured steps
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
    "several_gpus": "this machine has several NVIDIA GPUs",
    "tf32_hardware": "matrix units that support TF32",
    "bfloat16_hardware": "matrix units that support bfloat16",
    "float16_hardware": "matrix units that support float16",
    "convolutions": "the model has convolutions",
    "indexed_samples": "training samples can be read by index",
    "workers": "threads or processes besides the training process can compute the batches",
    "evaluations": "the metric is measured more than once",
    "evaluation_gradients": "the training script evaluates its model with gradients recorded",
    "loss_nan_filter": "the training loop reads the loss of every step to see whether it is a number",
    "varied_arguments": "the training is a script of which --vary names arguments",
    "keras": "the model is a Keras model, trained by fit",
    "keras_rnn": "the Keras model has recurrent layers",
    "distributed": "several processes train together",
    "multiple_epochs": "the run has more than one epoch",
    "repeated_blocks": "the model has a sequence of blocks of one type",
    "graph_layers": "the model has layers of PyTorch Geometric",
    "idle_cores": "PyTorch computes with fewer threads than there are cores for it",
    "matrix_weights": "some parameter has two or more dimensions",
    "unfused_optimizer": "the optimizer has a fused step that it does not use",
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
    "denormals": "values of the training state are denormal numbers",
    "idle_cores": FACTS["idle_cores"],
    "unused_parameters": "some parameters have no gradient in a step, and the ranks wait for all of them",
}

CEILINGS = {
    "denormals": "no value is a denormal number",
    "system_time": "no CPU time is spent in the operating system",
    "larger_batch": "the part of a step's cost that is independent of its batch size is paid less often",
}

_TRAIT_WORDS = {"requires": TRAITS, "invalidates": TRAITS}
_KNOWN_WORDS = _TRAIT_WORDS | {"accelerates": PHASES, "default_for": FACTS, "remedy_for": REMEDIES, "ceiling": CEILINGS}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts about one method, called "it" below.

    Attributes:
        summary: What it does, in one line.
        exactness: How it may change the numbers.
        source: Paper or document that it follows.
        gain: The claimed speedup as factors (low, high), 2.0 for twice as fast; None if none is claimed.
        gain_when: The circumstances under which the claim holds.
        accelerates: Phases of the step that it shortens (keys of PHASES); the profiler computes a bound from them.
        applies_to: Facts (keys of FACTS) that must all hold for it to be worth trying; other words are not checked. The
            engine removes a method that applies to ``distributed`` runs only from a single process.
        requires: Traits (keys of TRAITS) of the run that it relies on.
        invalidates: Traits that do not hold in a run with it.
        order: Its ``WrapOrder`` among methods that wrap the same hook.
        after: Names of methods that it must wrap (or follow, in a hook that edits).
        replaces: Hooks whose argument it discards. Two methods may replace the same hook if one is ``after`` the other.
        high_setup_cost: Building it takes seconds, which a short run does not earn back; the tuner tries it last.
        presets: Options worth trying, mildest first; the tuner tries them in this order.
        search_space: Option -> SearchRange, or one value, for the joint search; empty: only the presets are tried.
        default_for: Facts under which the engine adds it to a recipe that replaces none of the same hooks.
        remedy_for: Problem (key of REMEDIES) -> options with which it may help; error messages suggest them.
        on_gpu: What differs on a GPU: "presets" (tried before the others), "baseline" (True: part of the strong
            baseline), "composition" (True: part of the recipe of several methods that the tuner tries early).
        strong_baseline: Part of the strong baseline that the tuner measures besides the task as it is.
        trial_priority: The tuner tries methods with a high number first, such as those that shorten all later trials.
        not_searched: Why the tuner never tries it unless asked; empty if it does.
        gradient_bytes_saved: Fraction of the bytes of float32 gradients that its rounding saves in communication.
        ceiling: The ceiling (key of CEILINGS) that bounds its gain where no phase of the step does.
        script_edit: Kind of site in a user's script -> the method as an edit there; see ``export/README.md``.
    """

    summary: str
    exactness: Exactness
    source: str = ""
    gain: tuple[float, float] | None = None
    gain_when: str = ""
    accelerates: Set[str] = frozenset()
    applies_to: Set[str] = frozenset()
    requires: Set[str] = frozenset()
    invalidates: Set[str] = frozenset()
    order: WrapOrder = WrapOrder.NORMAL
    after: tuple[str, ...] = ()
    replaces: Set[str] = frozenset()
    high_setup_cost: bool = False
    presets: tuple[dict[str, Any], ...] = ({},)
    search_space: Mapping[str, Any] = field(default_factory=dict[str, Any])
    default_for: Set[str] = frozenset()
    remedy_for: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    on_gpu: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strong_baseline: bool = False
    trial_priority: int = 0
    not_searched: str = ""
    gradient_bytes_saved: float = 0.0
    ceiling: str = ""
    script_edit: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.exactness not in tuple(Exactness):
            raise ConfigurationError(f"Card(exactness=) must be one of {[*Exactness]}, not {self.exactness!r}")
        for name in ("accelerates", "applies_to", "requires", "invalidates", "replaces", "default_for"):
            if isinstance(words := getattr(self, name), str):
                raise ConfigurationError(f"the card states {name}={words!r}; it must be a set: {{{words!r}}}")
            object.__setattr__(self, name, frozenset(words))
        for name, known in _KNOWN_WORDS.items():  # the engine and the tuner compute with these
            words = {self.ceiling} - {""} if name == "ceiling" else set(getattr(self, name))
            if unknown := sorted(words - known.keys()):
                raise ConfigurationError(f"the card states {name}={unknown}; the known words are {', '.join(known)}")
        object.__setattr__(self, "after", tuple(self.after))

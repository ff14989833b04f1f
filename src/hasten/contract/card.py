"""A method's card: every fact about it, as data.

The command line, the documents, the diagnoser and the tuner read cards and nothing else; a method's
code is only ever run to train.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from hasten.contract.errors import Refusal


class Exactness(Enum):
    """How a method may change the numbers. The class picks the proof that it must pass."""

    BIT_EXACT = "same bits"  # torch.equal on every weight after 30 steps
    SAME_MATHS = "same formula"  # the same run in float64, relative difference below 1e-10
    FEWER_BITS = "lower precision"  # signal-to-noise of the gradients, then the metric over paired seeds
    OTHER_MATHS = "different training"  # time to equal quality over paired seeds


class Order(IntEnum):
    """Where a method stands among those that wrap the same hook: later wraps earlier, LAST is outermost."""

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
    "gradients": "work on the gradients before the update",
    "update": "optimizer and schedule",
    "evaluation": "measuring the metric",
    "logging": "step log, progress, checkpoints",
    "steps": "how many steps the training needs at all",
}

FACTS = {
    "cuda": "the run is on an NVIDIA GPU",
    "cpu": "the run is on the CPU",
    "tf32 hardware": "matrix units that take TF32",
    "bfloat16 hardware": "matrix units that take bfloat16",
    "float16 hardware": "matrix units that take float16",
    "convolutions": "the model has convolutions",
    "indexed samples": "training samples can be read by index",
    "workers": "others than the training process can compute the batches",
    "evaluations": "the metric is measured more than once",
    "several processes": "several processes train together",
    "several epochs": "the data are seen more than once",
    "repeated blocks": "the model has a sequence of like blocks",
    "matrix weights": "some parameter has two or more dimensions",
}

TRAITS = {
    "python between kernels": "Python code runs inside every step",
    "gradient size": "how large the gradients are says something",
    "final gradients": "what the gradients are before an update is what it is made with: their mean, where processes share the batch",
    "whole weights": "every process has all weights and their gradients",
    "like weights": "all processes have the same weights after every step",
    "whole forward pass": "every process computes the output and the loss of its samples by itself",
    "one precision": "one lower precision is chosen for the whole forward pass",
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
        speeds: the phases of the step that it shortens (keys of PHASES); the diagnoser turns them into a bound.
        applies_to: facts (keys of FACTS) that must all hold for it to be worth trying; other words are for people, and nothing checks them.
        needs: traits (keys of TRAITS) of the run that it relies on.
        breaks: traits that it takes away from the others.
        order: its level among methods that wrap the same hook.
        after: names of methods that it must wrap (or follow, in a hook that edits).
        replaces: hooks whose inner thing it throws away; two methods may not replace the same one, unless one goes on ``after`` the other.
        slow_start: building it takes seconds, which a short run does not earn back; the tuner tries it last.
        tries: settings worth trying, mildest first; the tuner walks them.
    """

    summary: str
    exactness: Exactness
    source: str = ""
    gain: tuple[float, float] | None = None
    gain_when: str = ""
    speeds: frozenset[str] = frozenset()
    applies_to: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
    order: Order = Order.NORMAL
    after: tuple[str, ...] = ()
    replaces: frozenset[str] = frozenset()
    slow_start: bool = False
    tries: tuple[dict, ...] = field(default=({},))

    def __post_init__(self):
        if not isinstance(self.exactness, Exactness):
            raise Refusal(f"a card's exactness is one of {', '.join(map(str, Exactness))}, not {self.exactness!r}")
        for name in ("speeds", "applies_to", "needs", "breaks", "replaces"):
            if isinstance(words := getattr(self, name), str):
                raise Refusal(f"the card says {name}={words!r}; it must be a set: {{{words!r}}}")
            object.__setattr__(self, name, frozenset(words))
        for name, known in (("speeds", PHASES), ("needs", TRAITS), ("breaks", TRAITS)):  # they are computed with
            if unknown := getattr(self, name) - known.keys():
                raise Refusal(f"the card says {name}={sorted(unknown)}, but the known words are {', '.join(known)}")
        object.__setattr__(self, "after", tuple(self.after))

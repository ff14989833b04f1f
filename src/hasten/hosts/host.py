"""What a host offers: the hooks that it can call, and the refusal of a method that needs another one.

A host is where a training loop runs. hasten's engine owns its loop and calls every hook. In a script the loop belongs
to the user: what can be reached from outside is the process, the loaders, the model and its calls, the optimizer and
the gradients, but neither the number of steps nor the loss function.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of


@dataclass(frozen=True)
class Host:
    """A kind of training loop that others wrote.

    Attributes:
        name: How messages call it.
        hooks: Hooks of methods (see ``hasten.core.method``) that it calls.
        metric: Where the metric of a whole run comes from.
        seeds: How another seed reaches the training.
        isolation: What keeps a trial from writing into the user's directory.
        way_out: What to do if a method needs a hook that the host does not offer.
    """

    name: str
    hooks: Set[str]
    metric: str
    seeds: str
    isolation: str
    way_out: str


SCRIPT = Host(
    name="script",
    hooks=frozenset(
        {
            "process_context",
            "data",
            "model",
            "batch_transform",
            "optimizer",
            "forward",
            "backward",
            "grad_transform",
            "optimizer_step",
        }
    ),
    metric="named by --metric, logged, or printed",
    seeds="shifts what the script seeds itself",
    isolation="an overlay over the working directory",
    way_out="write the training as a hasten.Task, whose loop the engine runs",
)


def check_supported(host: Host, methods: Iterable[Method], owner: str) -> None:
    """Refuses methods that override a hook which the host does not call.

    ``export`` of a method that keeps the numbers only restores the plain module, which a host that saves nothing
    itself does not need.

    Args:
        host: The host.
        methods: The methods of a recipe.
        owner: Whose loop it is, such as the name of the script.

    Raises:
        ConfigurationError: Names host, method and hook, and the way out.
    """
    for method in methods:
        needless = set() if method.card.exactness is Exactness.CHANGES_TRAINING else {"export"}
        if "distributed" in method.card.applies_to:
            raise ConfigurationError(
                f"{method.name} is for several processes that hasten starts, but {owner} starts its own; {host.way_out}"
            )
        for hook in hooks_of(method):
            if hook not in host.hooks | needless:
                raise ConfigurationError(
                    f"{method.name} needs the hook {hook}, which the {host.name} host cannot offer: {owner} owns its "
                    f"training loop; {host.way_out}"
                )

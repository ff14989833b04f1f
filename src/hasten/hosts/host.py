"""What a script offers to methods: the hooks that it calls, and the refusal of one that needs another hook.

Hasten's engine owns its loop and calls every hook. In a script the loop belongs to the user: what can be reached from
outside is the process, the loaders, the model and its calls, the optimizer and the gradients, but neither the number of
steps nor the loss function.
"""

from collections.abc import Iterable

from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of

SCRIPT_HOOKS = {  # those of ``core.method.HOOKS`` that a script's own loop can call
    *("process_context", "data", "model", "batch_transform", "optimizer"),
    *("forward", "backward", "grad_transform", "optimizer_step"),
}
WAY_OUT = "write the training as a hasten.Task, whose loop the engine runs"


def check_supported(methods: Iterable[Method], owner: str) -> None:
    """Refuses methods that a script cannot run: for several processes, or with a hook not in SCRIPT_HOOKS.

    ``export`` is allowed to a method that does not change the training: it only restores the plain module, and hasten
    saves nothing of a script.

    Args:
        methods: The methods of a recipe.
        owner: Whose loop it is, such as the name of the script.

    Raises:
        ConfigurationError: Names method and hook, and the way out.
    """
    for method in methods:
        needless = set() if method.card.exactness is Exactness.CHANGES_TRAINING else {"export"}
        if "distributed" in method.card.applies_to:
            raise ConfigurationError(
                f"{method.name} is for several processes that hasten starts, but {owner} starts its own; {WAY_OUT}"
            )
        for hook in hooks_of(method):
            if hook not in SCRIPT_HOOKS | needless:
                raise ConfigurationError(
                    f"{method.name} needs the hook {hook}, which the script host cannot offer: {owner} owns its "
                    f"training loop; {WAY_OUT}"
                )

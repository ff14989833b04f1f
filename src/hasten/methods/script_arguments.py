"""Other values of the arguments that a training script itself takes, such as its learning rate or its epochs."""

import sys
from argparse import Namespace
from typing import Any

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.parsed_arguments import after_parsing
from hasten.utils.typed_arguments import typed_numbers


class ScriptArguments(Method):
    """Replaces arguments of the script by the options of this method.

    An option has the name of the attribute that the script reads: ``lr=0.01`` replaces ``args.lr``, once the script's
    ArgumentParser has parsed it. What the command gives as a number is replaced there before the script starts.
    """

    card = Card(
        summary="other values of the training script's own arguments",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://docs.python.org/3/library/argparse.html",
        gain_when="the script's own learning rate, number of epochs or batch size can be improved",
        accelerates={"steps"},
        applies_to={"varied_arguments"},
        script_edit={"by_hand": "start the script with other values of its arguments[: {values}]"},  # see script_patch
    )
    takes_any_option = True

    def __init__(self, **values: Any):
        self.values = values

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if not self.values:
            return run.report_no_effect(self, "no argument is given to it", context)
        before: dict[str, Any] = {}

        def replace(arguments: Namespace) -> None:
            for name in self.values.keys() & getattr(arguments, "__dict__", {}).keys():
                before[name] = getattr(arguments, name)
                setattr(arguments, name, self.values[name])

        def observe() -> str:
            typed = typed_numbers(sys.orig_argv) | typed_numbers(sys.argv)
            given = {name for name, value in self.values.items() if typed.get(name) == value}
            if missing := sorted(self.values.keys() - before.keys() - given):
                raise NoEffectError(f"the training has no argument {' and no argument '.join(missing)}")
            changed = {name for name in before if before[name] != self.values[name]}
            changes = {name: f" instead of {before[name]}" if name in changed else "" for name in self.values}
            return ", ".join(f"{name} {self.values[name]}{change}" for name, change in sorted(changes.items()))

        run.observe_effect(self, observe)
        after_parsing(replace)
        return context

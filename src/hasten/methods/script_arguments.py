"""Other values of the arguments that a training script itself declares, such as its learning rate or its epochs."""

from argparse import Namespace
from typing import Any

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.parsed_arguments import after_parsing


class ScriptArguments(Method):
    """Replaces arguments of the script by the options of this method, once the script's ArgumentParser has parsed them.

    An option has the name of the attribute that the script reads: ``lr=0.01`` replaces ``args.lr``. The command stays
    as it is typed.
    """

    card = Card(
        summary="other values of the training script's own arguments",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://docs.python.org/3/library/argparse.html",
        gain_when="the script's own learning rate, number of epochs or batch size can be improved",
        accelerates={"steps"},
        applies_to={"varied_arguments"},
        script_edit={"by_hand": "start the script with other values of its arguments[: {values}]"},
    )
    takes_any_option = True

    def __init__(self, **values: Any):
        self.values = values

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if not self.values:
            run.report_no_effect(self, "no argument is given to it")
            return context
        before: dict[str, Any] = {}

        def replace(arguments: Namespace) -> None:
            for name in self.values.keys() & getattr(arguments, "__dict__", {}).keys():
                before[name] = getattr(arguments, name)
                setattr(arguments, name, self.values[name])

        def observe() -> str:
            if missing := sorted(self.values.keys() - before.keys()):
                raise NoEffectError(f"the training declares no argument {' and no argument '.join(missing)}")
            changes = (f"{name} {value} instead of {before[name]}" for name, value in sorted(self.values.items()))
            return ", ".join(changes)

        run.observe_effect(self, observe)
        after_parsing(replace)
        return context

"""The numbers on a command line that have a name: ``--lr=0.1``, ``--lr 0.1``, ``lr=0.1`` or ``optim.lr=0.1``.

A program that reads its command line without argparse (click, Hydra, OmegaConf, nanoGPT's configurator) declares
nothing that could be seen from outside. The command line itself shows what can be changed, and is where it is changed.
"""

import re
from collections.abc import Mapping, Sequence

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_PAIR = re.compile(r"(?P<name>[-+]{0,2}[A-Za-z][\w.-]*)=(?P<value>.*)", re.DOTALL)

Number = int | float


def name_of_argument(text: str) -> str:
    """The name of an argument as the program's attribute would have it: ``batch_size`` for ``--batch-size``."""
    return text.lstrip("-+").replace("-", "_")


def typed_numbers(argv: Sequence[str]) -> dict[str, Number]:
    """The arguments of a command that are numbers, by name; of several with one name, the last one counts."""
    return {name: _number(text) for _, name, _, text in _found(argv)}


def with_typed(argv: Sequence[str], values: Mapping[str, Number]) -> list[str]:
    """The command with other values of those arguments that it gives as numbers; ignores the others of ``values``."""
    changed = list(argv)
    for index, name, before, _ in _found(argv):
        if name in values:
            changed[index] = f"{before}{values[name]}"
    return changed


def _found(argv: Sequence[str]) -> list[tuple[int, str, str, str]]:
    """(index, name, text before the value in that argument, text of the value) of each number that has a name."""
    found: list[tuple[int, str, str, str]] = []
    for index, argument in enumerate(argv):
        pair, following = _PAIR.fullmatch(argument), argv[index + 1 : index + 2]
        if pair and _NUMBER.fullmatch(pair["value"]):
            found.append((index, name_of_argument(pair["name"]), f"{pair['name']}=", pair["value"]))
        elif _OPTION.fullmatch(argument) and following and _NUMBER.fullmatch(following[0]):
            found.append((index + 1, name_of_argument(argument), "", following[0]))
    return found


def _number(text: str) -> Number:
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)

"""Another seed for the same script: the seeds that it sets for torch, random and numpy are shifted, and these three are
seeded where it does not seed them.

Generators of their own (``torch.Generator``, ``random.Random``, ``numpy.random.RandomState``) keep their seeds, so that
data which a script splits by one stay split alike.
"""

import os
import random
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from hasten.hosts.inside.sites import Sites

KEYWORDS = ("seed", "a")  # of the seed, the first parameter: torch and numpy, random.seed


def seed_process(shift: int, sites: Sites) -> None:
    """Seeds torch, random and numpy in this process with ``shift``, and adds ``shift`` to integer seeds set later.

    ``sites`` receives the first call of each function by which the script seeds; the seed in it is None where the
    system chooses one, which makes the script irreproducible.
    """
    records, seen = sites.records.setdefault("seeds", []), set[tuple[str, bool]]()
    inside: list[str] = []  # the function that runs: torch.manual_seed calls that of CUDA

    def on_seed(name: str, seed: int | None) -> None:
        if (name, seed is None) not in seen:
            seen.add((name, seed is None))
            records.append({"site": f"{sites.line()}#1", "type": name, "seed": seed})

    torch.manual_seed(shift)
    random.seed(shift)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # torch imports it where it is installed
        numpy.random.seed(shift % 2**32)
    places: list[tuple[Any, str]] = [(torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed")]
    places += [(torch.cuda, "manual_seed"), (torch.cuda, "manual_seed_all")]  # most scripts call them as well
    places += [(torch, "seed"), (torch.random, "seed")]  # these two take none
    if numpy is not None:
        places += [(numpy.random, "seed"), (numpy.random, "default_rng")]
    for owner, name in places:
        setattr(owner, name, _shifted(getattr(owner, name), shift, f"{owner.__name__}.{name}", on_seed, inside))


def _shifted(
    function: Any, shift: int, name: str, on_seed: Callable[[str, int | None], None], inside: list[str]
) -> Callable[..., Any]:
    owner = os.getpid()

    def outermost(*args: Any, **kwargs: Any) -> Any:
        inside.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            inside.pop()

    def shifted(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != owner or inside:  # loader workers seed themselves
            return function(*args, **kwargs)
        keyword = next(filter(kwargs.__contains__, KEYWORDS), None)
        if keyword is not None:
            args, kwargs = (kwargs[keyword], *args), {key: kwargs[key] for key in kwargs if key != keyword}
        if not args or args[0] is None:
            on_seed(name, None)
        if not args or not isinstance(args[0], Integral) or isinstance(args[0], bool):
            return outermost(*args, **kwargs)
        on_seed(name, int(args[0]))
        return outermost(int(args[0]) + shift, *args[1:], **kwargs)

    shifted.__name__ = getattr(function, "__name__", name)
    shifted.__doc__ = getattr(function, "__doc__", None)
    return shifted

"""Calls a function of a module: ``python -m hasten.hosts.call_function package.module:train``; see ``script.py``."""

import sys
from importlib import import_module


def main(place: str) -> None:
    """Imports the module of ``module:function`` and calls the function."""
    module, _, function = place.partition(":")
    getattr(import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1])

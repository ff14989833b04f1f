"""Isolation of trials: a stand-in that isolates nothing, until the sandbox with overlays takes its place."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class Sandbox:
    """Runs commands so that they write nothing into the user's directories."""

    @staticmethod
    @contextmanager
    def for_directory(cwd: str | Path, extra_writable: Iterable[str | Path] = ()) -> "Iterator[Sandbox]":
        """A sandbox around the working directory of a command and other directories that it writes to."""
        yield Sandbox()

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` inside."""
        return list(argv)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command inside."""
        return dict(variables)

"""The errors and warnings that hasten raises by intention.

The command line prints the message as one line (what is wrong, what to do) and returns an exit code. Any other
exception is a bug of hasten and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NAMED = 15  # words of a list in a message


class ConfigurationError(ValueError):
    """The request (options, recipe, task or data) is wrong. Mostly raised before training starts. Exit code 2."""


class RunError(RuntimeError):
    """A valid request that failed or cannot be resumed (NaN, a dataset that raises, a full disk). Exit code 1."""

    arm: int | None = None  # of a comparison, the arm that failed: 0 for a, 1 for b


class MemoryExhaustedError(RunError):
    """Memory of the host or a GPU ran out (or probably did: a killed process), or another process locks the GPU."""


class NoEffectError(RunError):
    """Raised by the check of a method's effect (``RunContext.observe_effect``): the method did not act in the step."""


class PeerFailure(RunError):  # noqa: N818  # another rank's error, not one of this rank
    """Raised on a rank that cannot continue because another rank failed. The failing rank reports the root cause."""


class RunInterrupted(PeerFailure):
    """A stop signal ended the run: after a checkpoint if it has a run directory; a second one ends it at once."""


class CollectiveTimeout(PeerFailure):
    """Raised on a rank that waited ``seconds`` for a collective. It does not know which rank is missing."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"another rank has not answered for {self.seconds:g} s"


class HastenWarning(UserWarning):
    """Something that the user should know although the run continues; the command line prints it as one line."""


class ProgressWarning(HastenWarning):
    """Warning category: the progress of an operation that takes long. ``--quiet`` suppresses these warnings."""


def format_error(error: BaseException, limit: int = 300) -> str:
    """``Type: message`` of an exception that is not hasten's, on one line of at most ``limit`` characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:limit] if text else type(error).__name__


def suggest(word: str, known: Iterable[str]) -> str:
    """End of an error message: `` (did you mean a, b?)``; if no known word is like ``word``, all of them if few."""
    words = sorted(known)
    if close := get_close_matches(word, words, n=3, cutoff=0.5):
        return f" (did you mean {', '.join(close)}?)"
    if len(words) > MAX_NAMED:
        return f" (there are {len(words)}, none like it: {', '.join(words[:3])}, ...)"
    return f" (there is: {', '.join(words)})"

"""What hasten says when it will not, or cannot, do what was asked.

Each message is one line that says what is wrong and what to do about it; the command line prints it
and turns it into an exit code. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from difflib import get_close_matches


class ConfigurationError(ValueError):
    """A wrong request: nothing was started, nothing was lost. Exit code 2."""


class RunError(RuntimeError):
    """A run that began and could not go on (a NaN, a dataset that raises, a full disk). Exit code 1."""


class PeerFailure(RunError):
    """What comes of the failure of another rank, which tells it itself."""


class RunInterrupted(PeerFailure):
    """This rank was asked to end, as all of them were, and has saved what there was to save."""


class CollectiveTimeout(PeerFailure):
    """Another rank was waited for in vain. It cannot tell so itself, and nobody here knows which it is."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"another rank has said nothing for {self.seconds:g} s"


class HastenWarning(UserWarning):
    """Something that the user ought to know although the run goes on; the command line shows it as one line."""


class ProgressWarning(HastenWarning):
    """How far something is that takes long. Of no use to who asked for quiet."""


def format_error(error: BaseException, limit: int = 300) -> str:
    """``Type: message`` of somebody else's error, on one line, shortened."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:limit] if text else type(error).__name__


def suggest(word: str, known) -> str:
    """`` (did you mean a, b?)`` for a misspelt word, or the list of what there is."""
    known = sorted(known)
    close = get_close_matches(word, known, n=3, cutoff=0.5)
    return f" (did you mean {', '.join(close)}?)" if close else f" (there is: {', '.join(known)})"

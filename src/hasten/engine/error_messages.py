"""Turns what went wrong inside a run into one clear line: what, where, and what to do about it."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten._torch_compat import autograd_error_kind, is_out_of_memory
from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.engine.registry import remedies

NOT_THE_USERS = (
    "/torch/",
    "/hasten/engine/",
    "/hasten/methods/",
    "/hasten/core/",
    "/hasten/distributed/",
    "/hasten/loading/",
    "/hasten/data/",
)
FULL = (errno.ENOSPC, errno.EDQUOT)


def explain_error(error: Exception, where: str, batch_size: int) -> RunError | ConfigurationError:
    """``error``, raised at ``where`` (as "step 12 (pass 1, batch 12)"), in one line; what is clear already stays as it is."""
    if isinstance(error, (RunError, ConfigurationError)):
        return error
    text = str(error)
    if is_out_of_memory(error):
        return RunError(
            f"out of memory at {where} with batches of {batch_size}; take smaller batches, or add {remedies('out_of_memory')}"
        )
    hint = ""
    mistake = autograd_error_kind(error)
    if mistake == "index_out_of_bounds":
        hint = "; most often a label outside 0 to (number of outputs - 1), or a model with too few outputs"
    if mistake == "no_gradient":
        hint = "; Task(loss=) must return a tensor that remembers how it was computed: no detach(), .item() or torch.tensor() on the way"
    if mistake == "unused_parameters":
        error = RuntimeError("in this step some parameters had no gradient, and the ranks wait for all of them")
        hint = f"; pass --with {remedies('unused_parameters')}"
    if mistake == "not_scalar":
        hint = "; Task(loss=) must return one number, such as the mean over the batch"
    if isinstance(error, TypeError) and "takes" in text and "positional argument" in text and ".forward()" in text:
        hint = "; a batch (a, b, ..., target) calls model(a, b, ...), and with loss=None, for a model that returns its own loss, all of it"
    return RunError(f"{where} failed: {format_error(error)}{_in_users_code(error)}{hint}")


def format_position(step: int, epoch: int, batch: int) -> str:
    """Where in a run something happened, as people count: from 1. ``epoch`` and ``batch`` as the progress does, from 0."""
    return f"step {step} (pass {epoch + 1}, batch {batch + 1})"


@contextmanager
def translate_disk_errors(path: Path, advice: str) -> Iterator[None]:
    """What the file system refuses inside becomes one line with ``advice``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error  # torch hides the operating system's error behind one of its own
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        full = "the disk is full" if cause.errno in FULL else cause.strerror or str(cause)
        raise RunError(f"cannot write {path}: {full}; {advice}") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Inside, something is written where the user said. That it cannot be is a wrong request; a full disk is not.

    Raises:
        Refusal, Failure.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise ConfigurationError(
                f"cannot write to {path}: {error.strerror or error}; choose another --out"
            ) from None
        with translate_disk_errors(path, "make room, and start again"):
            raise


def _in_users_code(error: Exception) -> str:
    line = line_in_users_code(error)
    return f" ({Path(line[0]).name} line {line[1]})" if line else ""


def line_in_users_code(error: BaseException) -> tuple[str, int] | None:
    """Returns (file, line) of the innermost frame that is neither in torch nor in hasten.

    An exception from a loader's worker process has lost its traceback; it carries the line in ``raised_at``.
    """
    if (line := getattr(error, "raised_at", None)) is not None:
        return line
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in NOT_THE_USERS) and Path(frame.filename).is_file():
            return frame.filename, frame.lineno or 0
    return None

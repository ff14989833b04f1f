"""Turns an exception inside a run into one line: what failed, where, and what to do about it."""

import errno
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hasten._torch_compat import autograd_error_kind, is_gpu_taken, is_out_of_memory
from hasten.core.errors import ConfigurationError, MemoryExhaustedError, RunError, format_error
from hasten.engine.registry import remedies

LIBRARY_PATHS = (
    "/torch/",
    "/hasten/_torch_compat",
    *(f"/hasten/{name}/" for name in ("core", "data", "distributed", "engine", "loading", "methods", "utils")),
    *(f"/hasten/{name}/" for name in ("benchmarking", "profiling", "tuning", "launch", "hosts", "deploy")),
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
HINTS = {
    "index_out_of_bounds": "most often a label outside 0 to (number of outputs - 1), or a model with too few outputs",
    "no_gradient": "Task(loss=) must return a tensor with a gradient, without detach(), .item() or torch.tensor()",
    "unsupported_gpu": "the installed PyTorch is not built for this GPU (torch.cuda.get_arch_list() names what it "
    "is built for); install a build for an older CUDA, or pass --device cpu",
    "one_value_per_channel": "batch normalization cannot normalize a single sample; use larger batches or fewer "
    "processes, or leave out a last batch that is too small (drop_last=True)",
    "not_scalar": "Task(loss=) must return one number, such as the mean over the batch",
}
GPU_TAKEN = (
    "another process has the GPU for itself (its compute mode is Exclusive Process); wait for it, or choose another GPU"
)


def explain_error(error: Exception, where: str, batch_size: int) -> RunError | ConfigurationError:
    """The error to raise instead of ``error``: one line with reason, line in the user's code and remedy.

    ``where`` names what failed, such as "step 3 (epoch 1, batch 3)"; ``batch_size``: samples of a batch, 0 if unknown.
    """
    if isinstance(error, (RunError, ConfigurationError)):
        return error
    if is_out_of_memory(error):
        advice = f"use smaller batches, or add {remedies('out_of_memory')}"
        place = f"{'at' if where.startswith('step') else 'in'} {where}"
        batches = f" with batches of {batch_size}" if batch_size else ""
        return MemoryExhaustedError(f"out of memory {place}{batches}; {advice}")
    if is_gpu_taken(error):  # as if its memory were full: two arms take turns as whole processes
        return MemoryExhaustedError(GPU_TAKEN)
    kind, text = autograd_error_kind(error), str(error)
    reason, hint = format_error(error), HINTS.get(kind or "", "")
    if kind == "unused_parameters":
        reason = "RuntimeError: in this step some parameters had no gradient, and the ranks wait for all of them"
        hint = f"pass --with {remedies('unused_parameters')}, in place of zero if the recipe has that"
    is_call = "takes" in text and "positional argument" in text and ".forward()" in text
    hook = getattr(error, "hook", "")
    if isinstance(error, TypeError) and is_call and not hook:
        hint = "a batch (a, b, ..., target) calls model(a, b, ...); with loss=None the model gets the whole batch"
    line = line_in_users_code(error)
    source = f" ({Path(line[0]).name} line {line[1]})" if line else ""
    return RunError(f"{hook or where} failed: {reason}{source}{'; ' if hint else ''}{hint}")


def format_position(step: int, epoch: int, batch: int) -> str:
    """``step 12 (epoch 1, batch 12)``. ``step`` counts from 1; ``epoch`` and ``batch`` from 0, in the text from 1."""
    return f"step {step} (epoch {epoch + 1}, batch {batch + 1})"


@contextmanager
def translate_disk_errors(path: Path, advice: str) -> Generator[None]:
    """Context manager: an OSError, also inside an error of torch, becomes RunError "cannot write PATH: why; ADVICE"."""
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error  # torch raises a RuntimeError in the context of the system's error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        reason = "the disk is full" if cause.errno in DISK_FULL else cause.strerror or str(cause)
        raise RunError(f"cannot write {path}: {reason}; {advice}") from error


@contextmanager
def writable(path: Path, option: str = "--out") -> Generator[None]:
    """Context manager: an OSError from writing to ``option`` becomes a RunError (disk full) or a ConfigurationError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            reason = error.strerror or error
            raise ConfigurationError(f"cannot write to {path}: {reason}; choose another {option}") from None
        with translate_disk_errors(path, "free space, and start again"):
            raise


def line_in_users_code(error: BaseException) -> tuple[str, int] | None:
    """(file, line) of the innermost frame outside torch and hasten, or the error's ``raised_at`` (set in workers)."""
    if (line := getattr(error, "raised_at", None)) is not None:
        return line
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in LIBRARY_PATHS) and Path(frame.filename).is_file():
            return frame.filename, frame.lineno or 0
    return None


def empty_data_error(epoch: int) -> RunError:
    """The error for an epoch, counted from 1, whose data gave no batch."""
    if epoch == 1:
        cause = "they are empty, or a generator that was read before; give a dataset or a function"
        return RunError(f"the training data gave no batch: {cause}")
    advice = "a generator can be read only once, give a dataset or a function"
    return RunError(f"the training data gave no batch in epoch {epoch}; {advice}")

"""Computes batches in the caller, in threads or in worker processes, and copies them to a device."""


def timeout_message(index: int, seconds: float, worker: str) -> str:
    """Returns the error message for a batch that exceeds the timeout."""
    hint = "check what it waits for, or raise .prefetch(timeout=)"
    return f"batch {index} of the epoch was not ready within {seconds:g} s: {worker} hangs; {hint}"

"""Reads every sample of a dataset once, into one tensor per field, with a process per core where that is faster.

A dataset that was only ever read in one process may not be ready for several: what it has opened is shared by all. So
processes are forked only where no connection is open and no other process was started, and what they read is read
again, in this process, if one of them has moved the position of a file that this one has open, too.
"""

import fcntl
import gc
import math
import mmap
import multiprocessing
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from hasten.core.data import LoaderSpec
from hasten.core.types import Batch
from hasten.loading.probe import probe_samples, probed
from hasten.utils.batch import batch_tensors, map_tensors
from hasten.utils.tree import bitwise_equal

MIN_SECONDS = 1.0  # that this process would take; for less the start of others does not pay
MAX_PROCESSES = 8  # each may come to need the memory of the dataset
SHARED_FILE = "the samples come from a file that is open already, whose position all workers would share"
CHUNK = 256  # samples that are collated together
PATIENCE, PATIENCE_S = 4.0, 20.0  # times the expected seconds, and more: processes that hang on a lock are given up
DESCRIPTORS = Path("/proc/self/fd")
SESSION = "HASTEN_HOST"  # environment variable: the directory of the connection to a search; see hosts/inside_files.py


def read_all(spec: LoaderSpec, cpus: int = 1) -> Batch:
    """All samples of a dataset in order, collated: every field a tensor of shape (samples, ...).

    ``cpus`` is the number of processes, where that is faster and the loader itself has none.

    Raises:
        RunError: The dataset raised.
        RuntimeError: Some samples differ from the others in shape, dtype or nesting.
    """
    total, began = len(spec.dataset), time.monotonic()
    first = range(min(CHUNK, total))
    ((indices, samples),) = _chunks(spec, first)
    seconds = (time.monotonic() - began) * (total - len(first)) / len(first)
    processes = min(cpus, MAX_PROCESSES)
    if processes > 1 and seconds > MIN_SECONDS and _may_fork(spec):
        with suppress(OSError):  # no memory, or no further process
            fields = empty_fields(samples, total, is_shared=True)
            if _read_in_processes(spec, range(total), fields, processes, PATIENCE * seconds / processes + PATIENCE_S):
                wanted = probed(range(total))
                if holds(fields, dict(zip(wanted, probe_samples(spec, wanted), strict=True))):
                    return fields
    fields = empty_fields(samples, total)
    write_rows(fields, indices, samples)
    for indices, samples in _chunks(spec, range(len(first), total)):
        write_rows(fields, indices, samples)
    return fields


def empty_fields(samples: Batch, total: int, is_shared: bool = False) -> Batch:
    """Fields for ``total`` samples, of the shapes and dtypes of the collated ``samples``.

    ``is_shared``: in memory that forked processes share, which is no file: containers often have 64 MB for those.
    """

    def new(part: torch.Tensor) -> torch.Tensor:
        shape = (total, *part.shape[1:])
        if not is_shared or not math.prod(shape):
            return part.new_empty(shape)
        memory = mmap.mmap(-1, math.prod(shape) * part.itemsize)
        return torch.frombuffer(memory, dtype=part.dtype).view(shape)

    return map_tensors(new, samples)


def write_rows(fields: Batch, indices: list[int], samples: Batch) -> None:
    """Writes the collated samples with these indices, in ascending order, into the fields; RuntimeError if one differs
    from them in shape or dtype.
    """
    first, last = indices[0], indices[-1]
    rows = slice(first, last + 1) if last - first + 1 == len(indices) else torch.tensor(indices)
    for field, part in zip(batch_tensors(fields), batch_tensors(samples), strict=True):
        if part.dtype != field.dtype or part.shape[1:] != field.shape[1:]:
            raise RuntimeError(f"samples {first} to {last} are {part.dtype} of shape {tuple(part.shape[1:])}")
        field[rows] = part


def holds(fields: Batch, samples: dict[int, Any]) -> bool:
    """Whether stacked fields hold these samples, at their indices."""
    index = torch.tensor([*samples])
    try:
        reread = default_collate([*samples.values()])
    except (RuntimeError, TypeError):  # they have other shapes, or hold something that is no tensor
        return False
    stacked = map_tensors(lambda field: field[index.to(field.device)], fields)
    return bitwise_equal(reread, stacked)


def _chunks(spec: LoaderSpec, indices: range) -> Iterator[tuple[list[int], Batch]]:
    """Yields (indices, collated samples), some at a time, in order."""
    groups = [list(indices[first : first + CHUNK]) for first in range(0, len(indices), CHUNK)]

    def in_order(epoch: int) -> Iterable[list[int]]:
        return groups

    reading = replace(spec, batch_sampler=in_order, length=len(groups), pin_memory=False, persistent_workers=False)
    yield from zip(groups, spec.build(reading).epoch(0, 0), strict=True)


# ---- several processes


def _read_in_processes(spec: LoaderSpec, indices: range, fields: Batch, processes: int, timeout: float) -> bool:
    """Reads samples into shared fields in forked processes; False if they failed, or may have mixed samples up."""
    size = -(-len(indices) // processes)
    parts = [indices[first : first + size] for first in range(0, len(indices), size)]
    context, before, end = multiprocessing.get_context("fork"), open_positions(), time.monotonic() + timeout
    forked = [context.Process(target=_read_part, args=(spec, part, fields, os.getpid()), daemon=True) for part in parts]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads; see PATIENCE
            for process in forked:
                process.start()
        for process in forked:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in forked:
            if process.is_alive():
                process.kill()
                process.join()
    return not _moved_back(before) and all(process.exitcode == 0 for process in forked)


def _read_part(spec: LoaderSpec, indices: range, fields: Batch, parent: int) -> None:
    """Reads some samples in a forked process, which then ends at once: nothing of the user's is to run in it twice."""
    try:
        gc.disable()  # it would write to, and so copy, the memory of the parent's objects
        torch.set_num_threads(1)  # the threads of the parent do not exist here
        for part, samples in _chunks(spec, indices):
            if os.getppid() != parent:
                os._exit(1)
            write_rows(fields, part, samples)
        os._exit(0)
    except BaseException:  # the parent reads the samples again, and states the reason
        os._exit(1)


def _may_fork(spec: LoaderSpec) -> bool:
    """Whether forked processes may read a dataset that its owner reads in this one."""
    usual = multiprocessing.get_start_method(allow_none=True) in (None, "fork")
    handler = signal.getsignal(signal.SIGCHLD)  # another one than torch's may take the end of our processes for its own
    usual = usual and (handler == signal.SIG_DFL or getattr(handler, "__module__", "").startswith("torch."))
    is_shared = multiprocessing.current_process().daemon or _has_children() or _is_connected()
    return usual and spec.num_workers == 0 and not is_shared


def _has_children() -> bool:
    """Whether this process has started others: a dataset may exchange requests and answers with one of them."""
    return bool(psutil.Process().children())


def shares_open_file(spec: LoaderSpec) -> bool:
    """Whether samples come from a file that this process has open: forked workers would share its position, and read
    each other's samples.
    """
    if before := open_positions():
        probe_samples(replace(spec, num_workers=1), in_worker=True)  # here it might open what workers then inherit
    return _moved_back(before)


def _moved_back(before: dict[tuple[int, str], int]) -> bool:
    """Whether positions have changed; moves them back, for this process, which may read on from where it was."""
    now = open_positions()
    moved = [descriptor for descriptor, at in before.items() if now.get(descriptor, at) != at]
    for descriptor in moved:
        os.lseek(descriptor[0], before[descriptor], os.SEEK_SET)
    return bool(moved)


def open_positions() -> dict[tuple[int, str], int]:
    """{(descriptor, path): position in bytes} of the files that this process has open for reading."""
    positions: dict[tuple[int, str], int] = {}
    for descriptor, target in _descriptors():
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            with suppress(OSError):  # closed meanwhile, or without a position
                if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                    positions[descriptor, target] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return positions


def _is_connected() -> bool:
    """Whether this process has a connection to another program, such as a database, which forked ones would share."""
    return any(_is_foreign(descriptor) for descriptor, target in _descriptors() if target.startswith("socket:"))


def _is_foreign(descriptor: int) -> bool:
    if descriptor <= 2:  # a standard stream
        return False
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family != socket.AF_UNIX:
            return True
        peer = os.fsdecode(opened.getpeername())  # empty for a pair of sockets within one program
        return bool(peer) and os.path.dirname(peer) != os.environ.get(SESSION)
    return False


def _descriptors() -> Iterator[tuple[int, str]]:
    """(number, what it is) of each open file descriptor."""
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # that of the listing itself is closed
            yield int(name), os.readlink(DESCRIPTORS / name)

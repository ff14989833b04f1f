"""Lets glibc keep the memory that a step frees, so that the next step has no page faults."""

import ctypes
import platform
from dataclasses import dataclass
from functools import partial

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.process_setting import with_setting

MIB = 1 << 20
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # <malloc.h>
TUNED = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 * MIB}  # everything on the heap, which never shrinks
DEFAULTS = {M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: MIB // 8, M_TOP_PAD: MIB // 8}


@dataclass(frozen=True)
class MallocTuning(Method):
    """Keeps all freed memory in the process by ``mallopt``.

    By default, glibc gets every large tensor as new memory from the kernel, with a page fault for every 4 KiB, and
    returns it when the tensor is freed. With this method peak memory may be half as high again. After the run glibc's
    defaults hold, except that glibc no longer adapts its thresholds.
    """

    card = Card(
        summary="keep freed memory in the process, without new page faults",
        exactness=Exactness.BIT_EXACT,
        source="https://man7.org/linux/man-pages/man3/mallopt.3.html",
        gain=(1.4, 1.8),
        gain_when="convolutions on the CPU with large activations; small models gain nothing",
        accelerates={"forward", "backward"},
        applies_to={"cpu"},
        ceiling="system_time",
        script_edit={
            "process": "import ctypes\n"
            "for parameter, value in ((-4, 0), (-1, -1), (-2, 64 << 20)):  # mallopt(3): keep freed memory\n"
            "    ctypes.CDLL(None).mallopt(parameter, value)"
        },
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cpu":
            return run.report_no_effect(self, f"the tensors of this run are on the GPU ({run.device})", context)
        if platform.libc_ver()[0] != "glibc":
            return run.report_no_effect(self, "the C library of this machine is not glibc", context)
        libc = ctypes.CDLL(None)
        run.observe_effect(self, partial(_describe, libc))
        return with_setting(context, partial(_set_parameters, libc), TUNED, lambda: DEFAULTS)


def _set_parameters(libc: ctypes.CDLL, parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        libc.mallopt(parameter, value)
    libc.malloc_trim(0)  # returns what was freed under other parameters


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def _describe(libc: ctypes.CDLL) -> str:
    """The effect as text, from a block of 64 MiB, which glibc serves by ``mmap`` unless ``mallopt`` has forbidden it.

    NoEffectError if glibc used ``mmap`` or the memory came from another allocator. Other threads may allocate and free
    memory meanwhile, so a change of ``mallinfo2`` by half of the block is enough to recognize it.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if not hasattr(libc, "mallinfo2"):  # before glibc 2.33
        return f"{NOT_CHECKED}: this glibc does not report where memory comes from"
    libc.mallinfo2.restype = _MallInfo
    before = libc.mallinfo2()
    block = libc.malloc(64 * MIB)
    after = libc.mallinfo2()
    libc.free(block)
    if not block:
        return f"{NOT_CHECKED}: there is not enough memory for a test block of 64 MiB"
    if after.hblkhd - before.hblkhd > 32 * MIB:
        raise NoEffectError("glibc still gets large blocks by mmap: something has reset its parameters")
    if after.uordblks - before.uordblks < 32 * MIB:
        raise NoEffectError("memory comes from another allocator than glibc's, such as a preloaded jemalloc")
    return "large blocks of memory come from the heap, which keeps them"

"""The private PyTorch APIs that hasten depends on, one documented name each.

Those of torch.compile are in ``_torch_compat_compile.py``; the steps of torchrun's agent are in
``_torch_compat_elastic.py``, because importing the agent takes 0.1 s of CPU time that only the launcher has to spend.

No file besides these may use an attribute of torch that begins with an underscore, or recognize an error by the
text of a torch message; ``tests/test_private_torch_use.py`` scans for both, and ``tests/test_torch_compat*.py`` has one
test per name below. ``make test-matrix`` runs those tests on every supported version of torch. The versions at the
message texts are those on which the text was seen.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["BatchNorm", "Convolution", "Dropout", "TorchDispatchMode"]  # the classes above, under public names

# ── modules and tensors ──────────────────────────────────────────────────────────────────────────

MODULE_STATE_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
"""The dictionaries of an ``nn.Module`` that hold its own parameters, buffers and submodules."""

LAZILY_IMPORTED_MODULES = ("torch._dynamo",)
"""Modules that torch imports at the first optimizer, which takes seconds; preloaded in processes that fork."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name -> parameter of the module itself; writing to this dictionary accepts tensors that ``setattr`` refuses."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> buffer of the module itself, without submodules; writing to this dictionary changes the module."""
    return module._buffers


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward hook or forward pre-hook is registered on the module itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_views(tensor: torch.Tensor) -> bool:
    """Whether another tensor or NumPy array shares the memory of this one."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # the tensor, and the storage object here


def in_place_version(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place. Inference tensors have no such count (RuntimeError)."""
    return tensor._version


def in_function_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) calls this code; its tensors have no memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats the tensor as a view of another one."""
    return tensor._is_view()


def storage_id(storage: torch.UntypedStorage) -> int:
    """Id of a storage, unique while the storage lives; on the meta device, too, where all data pointers are 0."""
    return storage._cdata


def is_view_op(op: torch._ops.OpOverload) -> bool:
    """Whether an operation only returns a view of its input, such as ``aten.t``."""
    return getattr(op, "is_view", False)


def inside_backward() -> bool:
    """Whether this thread runs the backward pass at the moment."""
    return torch._C._current_graph_task_id() != -1


# Arithmetic on lists of tensors, one kernel for all on a GPU. Aliases, not wrappers: they run in every step.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
amp_update_scale_ = torch._amp_update_scale_
foreach_sub = torch._foreach_sub
foreach_zero_ = torch._foreach_zero_


def chained_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers inside a ``SequentialLR`` or ``ChainedScheduler``; none for any other."""
    return list(getattr(scheduler, "_schedulers", ()))


def mark_updated(optimizer: Any) -> None:
    """Marks an optimizer as updated: torch warns if a schedule steps first, as where a resumed run ends an epoch."""
    for one in getattr(optimizer, "optimizers", [optimizer]):
        one._opt_called = True


# ── operators and modes ──────────────────────────────────────────────────────────────────────────


def host_read_op() -> torch._ops.OpOverload:
    """The operator behind ``Tensor.item()``: the host waits for the device and reads one number."""
    return torch.ops.aten._local_scalar_dense.default


def cpu_attention_ops() -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Forward and backward operator of scaled dot product attention on the CPU."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    return forward, aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def schema_arguments(operator: torch._ops.OpOverload) -> list[torch.Argument]:
    """The declared arguments of an operator, with their alias annotations."""
    return operator._schema.arguments


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """(leaves, specification) of nested tuples, lists and dictionaries."""
    return _pytree.tree_flatten(tree)


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with ``function(leaf)`` in place of each leaf of type ``kind``."""
    return _pytree.tree_map_only(kind, function, tree)


@contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: disables torch-function overrides and dispatch modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def without_torch_function() -> AbstractContextManager[None]:
    """Context manager: disables torch-function overrides (subclasses and modes)."""
    return torch._C.DisableTorchFunction()


@contextmanager
def patch_trunc_normal(make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Context manager: replaces the implementation of ``nn.init.trunc_normal_`` by ``make(original)``."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = make(original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


_OMP_PAUSE_HARD = 2  # <omp.h>; GNU's runtime treats a soft pause alike, others keep their threads after one


def end_intra_op_threads() -> bool:
    """Ends the threads that compute operations beside this one; the next operation starts them anew.

    They then inherit the floating-point mode of this thread, which running threads of GNU's OpenMP never read again.
    False if torch does not use OpenMP, or this thread is one of them.
    """
    pause = getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None)
    return pause is not None and pause(_OMP_PAUSE_HARD) == 0


# ── DataLoader ───────────────────────────────────────────────────────────────────────────────────


def workers_started(loader: torch.utils.data.DataLoader[Any]) -> bool:
    """Whether a DataLoader with ``persistent_workers`` has its workers already."""
    return loader._iterator is not None


def swap_persistent_iterator(loader: torch.utils.data.DataLoader[Any], iterator: Any) -> Any:
    """Stores an iterator, or None, as that of a DataLoader with ``persistent_workers``; returns the previous one."""
    previous, loader._iterator = loader._iterator, iterator
    return previous


def contains_worker_traceback(error: BaseException) -> bool:
    """Whether a DataLoader worker raised the error: then the message holds its traceback (torch 2.11 to 2.15)."""
    return "Original Traceback (most recent call last)" in str(error)


def worker_error_text(error: BaseException) -> str:
    """The worker's exception as Python prints it: ``KeyError: 'x'``. The message ends with the frames of the traceback,
    each two lines (file, indented source), and then the exception.
    """
    *_, last_frame = str(error).rpartition('\n  File "')
    lines = last_frame.splitlines()[1:]
    while lines and lines[0].startswith(" "):
        del lines[0]
    return " ".join(" ".join(lines).split())


# ── errors that have no type of their own ────────────────────────────────────────────────────────

_PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "pair closure", "remote process exited", "got 0 bytes")
_PEER_SILENT = (
    "Timed out waiting",
    "imeout caused pair closure",
    "ait timeout after",
    "Socket Timeout",
    "before timing out",
)
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory: you tried to allocate")


def peer_failure(error: BaseException | None) -> Literal["gone", "timeout"] | None:
    """Whether an error, or one that caused it, reports only that another rank has ended or does not answer.

    NCCL and the store raise subclasses of ``dist.DistError``. gloo raises a plain RuntimeError whose message names
    gloo's source file. No type distinguishes a rank that has ended from one that does not answer, but the text does
    (torch 2.11 to 2.15).
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:  # torch raises some errors from themselves
        chain.append(error)
        error = error.__cause__
    texts = [str(error) for error in chain if isinstance(error, dist.DistError) or _is_from_gloo(error)]
    if any(part in text for text in texts for part in _PEER_SILENT):
        return "timeout"
    return "gone" if any(part in text for text in texts for part in _PEER_GONE) else None


def _is_from_gloo(error: BaseException) -> bool:
    return type(error) is RuntimeError and "gloo" in str(error) and "DataLoader worker" not in str(error)


_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host.

    CUDA raises ``torch.OutOfMemoryError``. The CPU allocator raises a plain RuntimeError (text of torch 2.11 to 2.15);
    an out-of-memory error of a DataLoader worker or of a C++ extension reaches us as RuntimeError, too.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in (*_OUT_OF_MEMORY, *_CPU_OUT_OF_MEMORY))


def is_gpu_taken(error: BaseException) -> bool:
    """Whether another process has the GPU for itself: its compute mode is "Exclusive Process", usual on clusters."""
    return isinstance(error, RuntimeError) and "busy or unavailable" in str(error)


_AUTOGRAD_ERRORS = {
    "no_gradient": ("does not require grad",),
    "not_scalar": ("created only for scalar outputs",),
    "unused_parameters": ("`find_unused_parameters=True`",),
    "index_out_of_bounds": ("out of bounds", "device-side assert"),
    "unsupported_gpu": ("no kernel image is available",),
}


def autograd_error_kind(error: BaseException) -> str | None:
    """Which mistake a RuntimeError, IndexError or ValueError of torch reports; None where it is another one.

    Returns:
        "no_gradient": the loss does not depend on a parameter. "not_scalar": the loss has several elements.
        "unused_parameters": DDP misses gradients of some parameters. "index_out_of_bounds": a label or an index is too
        large; on the CPU an IndexError, on CUDA a device-side assertion. "unsupported_gpu": this build of PyTorch has
        no kernels for the GPU. "one_value_per_channel": batch normalization of a single sample. Texts of torch 2.11 to
        2.15.
    """
    text = str(error)
    if isinstance(error, ValueError):
        return "one_value_per_channel" if "Expected more than 1 value per channel" in text else None
    if not isinstance(error, (RuntimeError, IndexError)):
        return None
    return next((kind for kind, parts in _AUTOGRAD_ERRORS.items() if any(part in text for part in parts)), None)


# ── torch.distributed ────────────────────────────────────────────────────────────────────────────


@contextmanager
def default_process_group_timeout(seconds: float) -> Iterator[None]:
    """Context manager: sets the default timeout of process groups, which ``init_device_mesh`` uses, in seconds."""
    module = dist.distributed_c10d
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, timedelta(seconds=seconds))
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def ddp_bucket_sizes(model: nn.parallel.DistributedDataParallel) -> list[int] | None:
    """Bytes of each gradient bucket of a DDP model; None before the first step or with a communication hook."""
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")
    return [int(size) for size in sizes.split(",")] if sizes and not data.get("comm_hook") else None


# ── torch.compile ────────────────────────────────────────────────────────────────────────────────


def skips_overflows(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the optimizer reads a tensor ``found_inf`` and skips the update by itself: those that are fused.

    Except for SGD, whose momentum is memory that was never written if its first step is skipped.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)


def mark_fused(optimizer: torch.optim.Optimizer) -> None:
    """Lets a scaler leave overflows to an optimizer that became fused after its constructor, where torch notes it."""
    if isinstance(optimizer, torch.optim.Adam):  # SGD: see skips_overflows; torch's fused Adagrad is for the CPU
        vars(optimizer)["_step_supports_amp_scaling"] = True


def set_allocator_settings(settings: str) -> None:
    """Sets options of PyTorch's allocator of GPU memory, as PYTORCH_CUDA_ALLOC_CONF does at the start of a process."""
    torch._C._accelerator_setAllocatorSettings(settings)


# ── a training loop that is not ours ─────────────────────────────────────────────────────────────


def get_set_module_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that ``Module.compile()`` or ``set_module_call`` has set; None without one."""
    return module.__dict__.get("_compiled_call_impl")


def get_module_call(module: nn.Module) -> Callable[..., Any]:
    """What ``module(...)`` calls: the function that ``Module.compile()`` or ``set_module_call`` set, else torch's."""
    return get_set_module_call(module) or module._call_impl


def set_module_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes ``module(...)`` call a function, where ``Module.compile()`` puts its own; None removes it.

    No hook and no attribute of ``forward`` is touched, so compilation, pickling and ``deepcopy``, which drop the
    function, work as before. A wrapper such as ``torch.compile(module)`` passes ``setattr`` on to what it wraps.
    """
    module.__dict__["_compiled_call_impl"] = call


class _CallSlot:
    """Stands for ``nn.Module._compiled_call_impl`` of all modules, also of those with a slot of their own."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        # not in what Dynamo traces, such as a compiled function of the script that calls a model
        return None if module is None or torch.compiler.is_compiling() else partial(self.call, module)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["_compiled_call_impl"] = value


def intercept_module_calls(call: Callable[..., Any] | None) -> None:
    """Makes ``module(...)`` of every module in this process call ``call(module, ...)``; None ends that.

    ``nn.Module.__call__`` stays as it is: ``torch.compile(module)``, Dynamo and torch.fx keep what they find there.
    """
    nn.Module._compiled_call_impl = None if call is None else _CallSlot(call)  # pyright: ignore[reportAttributeAccessIssue]


def patch_next_batch(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``__next__`` of all DataLoader iterators in this process by ``make(original)``, without undoing it."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    _BaseDataLoaderIter.__next__ = make(_BaseDataLoaderIter.__next__)


def patch_loader_iterator(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the ``(loader) -> iterator`` of all DataLoaders in this process by ``make(original)``, for good."""
    from torch.utils.data import DataLoader

    DataLoader._get_iterator = make(DataLoader._get_iterator)


# ── kernels that torch.nn and torch.optim call ───────────────────────────────────────────────────


def lstm_kernel(
    inputs: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``nn.LSTM`` calls, of one layer in one direction: (outputs, last h, last c).

    Args:
        inputs: (batch, time, features).
        state: h and c, each (1, batch, units).
        weights: Of the input (4 units, features) and the state (4 units, units), two biases (4 units); gates i f g o.
    """
    return torch._VF.lstm(inputs, state, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)  # pyright: ignore


def gru_kernel(
    inputs: torch.Tensor, state: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``nn.GRU`` calls, as ``lstm_kernel``: (outputs, last h); gates r z n."""
    return torch._VF.gru(inputs, state, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)  # pyright: ignore


def fused_adam_step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentums: list[torch.Tensor],
    velocities: list[torch.Tensor],
    largest: list[torch.Tensor],
    steps: list[torch.Tensor],
    **options: Any,
) -> None:
    """The kernel of ``torch.optim.Adam(fused=True)``, in place; options are lr, beta1, beta2, eps and amsgrad.

    ``steps`` are float32 tensors that hold the number of this update; ``largest`` is empty without amsgrad.
    """
    torch._fused_adam_(
        params, grads, momentums, velocities, largest, steps, weight_decay=0.0, maximize=False, **options
    )

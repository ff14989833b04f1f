"""Builds a model without values and initializes only requested tensors, for models that no process can hold.

Inside ``deferred_init`` tensors are on the meta device, and every operation that would fill them is recorded. Replaying
the record gives the requested tensors the values that they have in a model built at once, bit for bit: random numbers
are drawn in the same order, and those of other tensors are discarded, one tensor at a time.

Why not the meta device, ``to_empty`` and ``reset_parameters``: hasten promises, and tests, that a run on several ranks
starts from the weights of a run in one process, and that way gives these weights for 8 of the 35 models in
tests/distributed/test_deferred_init.py; it misses buffers, weights that ``apply`` or ``__init__`` initializes, and tied
weights. torchdistX has the same idea (``deferred_init``, ``materialize_module``).

Tensors of plain values (``torch.tensor``, ``arange``, ``linspace``, from NumPy or a file) exist at once, in every
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hasten._torch_compat import (
    TorchDispatchMode,
    own_buffers,
    own_parameters,
    patch_trunc_normal,
    schema_arguments,
    storage_id,
    tree_flatten,
    tree_map_only,
    without_modes,
    without_torch_function,
)
from hasten.core.errors import ConfigurationError, RunError, format_error

PLAIN_VALUE_OPS = {"arange", "linspace", "logspace", "range"}  # programs read their results while they build a model
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # of operations that read values
RANDOM_TAG = torch.Tag.nondeterministic_seeded
CPU, META = torch.device("cpu"), torch.device("meta")
REMEDY = "leave init=meta or balance=memory out"
_TENSOR: Any = torch.Tensor  # its properties are not typed as such
CPU_ANSWERS = {_TENSOR.device.__get__: CPU, _TENSOR.is_meta.__get__: False, _TENSOR.is_cpu.__get__: True}
"""What ``ReportCpuDevice`` answers for a tensor on the meta device."""

Materialize = Callable[[Sequence[torch.Tensor]], Iterator[tuple[int, torch.Tensor]]]


def deferred_init(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Materialize]:
    """(model of ``make`` on meta, function that initializes given tensors of it); ConfigurationError if impossible."""
    recorder = InitRecorder()
    try:
        with recorder, ReportCpuDevice(), _record_trunc_normal(recorder):
            model = make()
    except (ConfigurationError, RunError):
        raise
    except Exception as error:
        reason = f"{format_error(error, 160)}; {REMEDY}, or fix the model where that does not help"
        raise ConfigurationError(f"the model cannot be initialized in parts: {reason}") from error
    recorder.finish()
    replace_tensors(model, recorder.to_meta)
    recorder.check_all_recorded(tensor for *_, tensor in module_tensors(model))
    return model, recorder.materialize


def module_tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(module, name, tensor) of all parameters, buffers and plain tensor attributes of a model's modules."""
    for module in model.modules():
        for attributes in (own_parameters(module), own_buffers(module), vars(module)):
            for name, tensor in list(attributes.items()):
                if isinstance(tensor, torch.Tensor):
                    yield module, name, tensor


def replace_tensors(model: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces all tensors of a model by ``replacement(tensor)``. Tied tensors stay tied, parameters parameters."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old tensor, so that its id is not used again
    for module, name, tensor in module_tensors(model):
        if id(tensor) not in done:
            done[id(tensor)] = tensor, _as_kind_of(tensor, replacement(tensor))
        if (new := done[id(tensor)][1]) is not tensor:
            setattr(module, name, new)  # not into the dictionary: recurrent layers keep lists of their weights


def _as_kind_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if new is old or not isinstance(old, torch.nn.Parameter):
        return new
    param = torch.nn.Parameter(new.detach(), old.requires_grad)
    vars(param).update(vars(old))
    return param


class ReportCpuDevice(TorchFunctionMode):
    """Reports the CPU as the device of meta tensors: torch and other libraries do not initialize meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return CPU_ANSWERS[func] if func in CPU_ANSWERS and args[0].is_meta else func(*args, **(kwargs or {}))


def _record_trunc_normal(recorder: InitRecorder) -> AbstractContextManager[None]:
    """Context manager: records ``trunc_normal_`` as one operation, as it reads its values to redraw some of them."""

    def recording(draw: Callable[..., Any]) -> Callable[..., Any]:
        def draw_or_record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            with without_modes():
                if tensor.is_meta:
                    recorder.record_draw(draw, tensor, *args, **kwargs)
                    return tensor
            return draw(tensor, *args, **kwargs)

        return draw_or_record

    return patch_trunc_normal(recording)


@dataclass(frozen=True)
class StorageView:
    """Stands for a meta tensor in a record: storage id, shape, strides and offset (in elements), and dtype."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        return cls(storage_of(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor with this layout in a real storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )

    def scratch(self) -> torch.Tensor:
        """A new uninitialized tensor of this layout, whose values will be discarded."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class RecordedOp:
    """A recorded call that created, changed or randomly filled tensors; StorageViews replace its meta tensors."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    new: tuple[StorageView | None, ...] = ()  # of the returned tensors that are in new storages
    changes: frozenset[int] = frozenset()  # storages that it writes into
    draws: bool = True
    reads_no_values: bool = True  # what it draws depends on no values

    @cached_property
    def storages(self) -> list[int]:
        """Ids of the storages that the call reads, writes or creates, each once; same order in every process."""
        leaves = tree_flatten((self.args, self.kwargs, self.new))[0]
        return list(dict.fromkeys(leaf.storage for leaf in leaves if isinstance(leaf, StorageView)))

    @torch.no_grad()
    def replay(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Repeats the call on real ``storages`` (id -> storage), and adds to them those that it creates."""
        args, kwargs = tree_map_only(
            StorageView, lambda view: view.view(storages[view.storage]), (self.args, self.kwargs)
        )
        for view, tensor in zip(self.new, _tensors(self.call(*args, **kwargs)), strict=False):
            if view is not None:
                storages[view.storage] = _storage_with_layout(tensor, view)

    @torch.no_grad()
    def draw(self) -> None:
        """Draws the random numbers of the call and discards them, so that the generator advances as if called."""
        args, kwargs = tree_map_only(StorageView, StorageView.scratch, (self.args, self.kwargs))
        self.call(*args, **kwargs)


class InitRecorder(TorchDispatchMode):
    """Records how tensors are initialized, and replays it for requested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.meta_storages: dict[int, torch.UntypedStorage] = {}  # while they live, no other storage has their id
        self.plain_storages: dict[int, torch.UntypedStorage] = {}  # id of a meta storage -> the real one it stands for
        self.generator_states: dict[torch.Generator, torch.Tensor] = {}  # after the last draw, unless seeded since

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            tensors = _tensors((args, kwargs))
            is_plain = not any(tensor.is_meta for tensor in tensors) if tensors else _name(func) in PLAIN_VALUE_OPS
            if is_plain and RANDOM_TAG not in func.tags:
                return func(*args, **_on_cpu(kwargs))
            return self._record(func, args, kwargs, tensors)

    def record_draw(self, call: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Records ``call(tensor, ...)``, which fills the tensor with random numbers, as one operation."""
        self.check_all_recorded([tensor])
        self._record_generator(kwargs.get("generator") or torch.default_generator)
        changes = frozenset([storage_of(tensor)])
        self.ops.append(RecordedOp(call, (StorageView.of(tensor), *args), kwargs, changes=changes))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        changed = _written_tensors(func, args, kwargs)
        self._check_recordable(func, kwargs, tensors, changed)
        recorded_args, recorded_kwargs = tree_map_only(
            torch.Tensor, lambda tensor: StorageView.of(tensor) if tensor.is_meta else tensor, (args, kwargs)
        )
        result = func(*_on_meta(args), **_on_meta(kwargs, set_device=not tensors))
        known = {storage_of(tensor) for tensor in tensors if tensor.is_meta}
        results = _tensors(result)
        new = tuple(None if storage_of(tensor) in known else StorageView.of(tensor) for tensor in results)
        if not tensors:
            if not result.numel():
                return func(*args, **_on_cpu(kwargs))  # takes no memory, and ``set_`` may give it a real storage
            recorded_kwargs["dtype"] = result.dtype
        if any(view and view.offset for view in new):
            problem = f"the model calls {_name(func)}, which returns views of a new tensor"
            raise ConfigurationError(f"{problem}, so it cannot be initialized in parts; {REMEDY}")
        if any(new) or (changed and torch.Tag.inplace_view not in func.tags):
            self._append(func, (recorded_args, _on_cpu(recorded_kwargs)), new, changed)
            self.meta_storages |= {storage_of(tensor): tensor.untyped_storage() for tensor in results}
        return result

    def _check_recordable(
        self, func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], changed: list[torch.Tensor]
    ) -> None:
        if READING_TAGS.intersection(func.tags):
            raise ConfigurationError(
                f"the model reads values while it is built ({_name(func)}), which do not exist if it is initialized "
                f"in parts; {REMEDY}"
            )
        device, generator = torch.device(kwargs.get("device") or CPU), kwargs.get("generator")
        if device.type not in ("cpu", "meta") or (generator is not None and generator.device.type != "cpu"):
            effect = f"it cannot be initialized in parts; leave the device out, or {REMEDY}"
            raise ConfigurationError(f"the model creates a tensor on {device} itself, so {effect}")
        if not all(tensor.is_meta for tensor in changed):
            problem = f"the model writes what it drew or computed into a tensor of plain values ({_name(func)})"
            remedy = f"make that tensor with torch.empty, or {REMEDY}"
            raise ConfigurationError(f"{problem}, so it cannot be initialized in parts; {remedy}")
        self.check_all_recorded(tensors)

    def _append(
        self, func: Any, arguments: tuple[Any, Any], new: tuple[StorageView | None, ...], changed: list[torch.Tensor]
    ) -> None:
        if draws := RANDOM_TAG in func.tags:
            self._record_generator(arguments[1].get("generator") or torch.default_generator)
        read = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, StorageView)]
        changes = frozenset(map(storage_of, changed))
        only_overwrites = len(read) <= 1 and all(view.storage in changes for view in read)
        reads_no_values = _name(func).endswith("_like") or only_overwrites
        # plain tensors are copied, because the model may write into them later
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), arguments)
        self.ops.append(RecordedOp(func, args, kwargs, new, changes, draws, reads_no_values))

    def _record_generator(self, generator: torch.Generator) -> None:
        """Records a seed that was set before a draw, and advances the generator so that the next seed is noticed."""
        self._record_seed(generator)
        torch.rand((), generator=generator)
        self.generator_states[generator] = generator.get_state()

    def _record_seed(self, generator: torch.Generator) -> None:
        state, last = generator.get_state(), self.generator_states.get(generator)
        if last is not None and torch.equal(state, last):
            return
        freshly_seeded = torch.Generator().manual_seed(generator.initial_seed()).get_state()
        if last is not None and not torch.equal(state, freshly_seeded):
            effect = f"it cannot be initialized in parts; {REMEDY}"
            raise ConfigurationError(f"the model resets the state of a random generator while it is built, so {effect}")
        self.ops.append(RecordedOp(generator.set_state, (state,), {}))

    def finish(self) -> None:
        """Records seeds that the model set after its last random operation. Call it once the model is built."""
        for generator in self.generator_states:
            self._record_seed(generator)

    def to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor in place of a tensor with known values, which is recorded; a meta tensor stays as it is."""
        if tensor.is_meta:
            return tensor
        real = tensor.untyped_storage()
        known = (id_ for id_, storage in self.plain_storages.items() if storage_id(storage) == storage_id(real))
        stand_in = next(known, None)
        if stand_in is None:
            meta = torch.empty(real.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
            stand_in = storage_id(meta)
            self.meta_storages[stand_in], self.plain_storages[stand_in] = meta, real
        return StorageView.of(tensor).view(self.meta_storages[stand_in])

    def check_all_recorded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises ``ConfigurationError`` for a meta tensor that was not recorded: its values are unknown."""
        if any(tensor.is_meta and storage_of(tensor) not in self.meta_storages for tensor in tensors):
            advice = f"make them on the CPU, or {REMEDY}"
            raise ConfigurationError(f"the model has tensors on the meta device, whose values are unknown; {advice}")

    def materialize(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index in ``tensors``, initialized tensor) for each requested tensor, as soon as it is final.

        Afterwards the generators are where initializing all tensors would leave them. Besides what the caller keeps,
        only unfinished tensors take memory, and one discarded tensor at a time.
        """
        yield from ((index, tensor) for index, tensor in enumerate(tensors) if not tensor.is_meta)  # graph constants
        views = {index: StorageView.of(tensor) for index, tensor in enumerate(tensors) if tensor.is_meta}
        of_storage: dict[int, list[int]] = {}
        for index, view in views.items():
            of_storage.setdefault(view.storage, []).append(index)
        self.check_all_recorded(tensors)
        for storage in (storage for storage in of_storage if storage in self.plain_storages):
            yield from ((index, views[index].view(self.plain_storages[storage])) for index in of_storage[storage])
        needed = self._needed_ops(set(of_storage))
        order = self._replay_order(needed)
        last_use = {storage: op for op in order if op in needed for storage in self.ops[op].storages}
        storages: dict[int, torch.UntypedStorage] = {}
        for op in order:
            if op not in needed:
                self.ops[op].draw()
                continue
            self.ops[op].replay(storages)
            for storage in (storage for storage in self.ops[op].storages if last_use[storage] == op):
                yield from ((index, views[index].view(storages[storage])) for index in of_storage.get(storage, ()))
                del storages[storage]

    def _needed_ops(self, requested: set[int]) -> set[int]:
        """Indices of the operations that ``requested`` storages depend on, and of random ones that read values."""
        needed: set[int] = set()
        for index, op in reversed(list(enumerate(self.ops))):
            created = {view.storage for view in op.new if view}
            if (op.draws and not op.reads_no_values) or requested & op.changes or requested & created:
                needed.add(index)
                requested.update(op.storages)
        return needed

    def _replay_order(self, needed: set[int]) -> list[int]:
        """Indices in replay order: random operations as recorded, ``needed`` others early, to free memory early."""
        ready_after: dict[int, int] = {}  # storage -> the random operation after which its operations so far are done
        when: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if index in needed:
                earliest = max((ready_after.get(storage, -1) for storage in op.storages), default=-1)
                when[index] = index if op.draws else earliest
                ready_after |= {storage: max(when[index], ready_after.get(storage, -1)) for storage in op.storages}
            elif op.draws:
                when[index] = index
        return sorted(when, key=lambda index: when[index])  # stable: those after one random operation stay in order


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies the tensor's storage; equal for views of it; also on the meta device."""
    return storage_id(tensor.untyped_storage())


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes into, according to its schema."""
    arguments = schema_arguments(func)
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return _tensors([by_name.get(name) for name in written])


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with ``device`` replaced by the CPU: models pass the device of weights, here meta."""
    return kwargs | {"device": CPU} if kwargs.get("device") == META else kwargs


def _on_meta(arguments: Any, set_device: bool = False) -> Any:
    """Nested arguments with tensors moved to meta, and generators removed; with ``set_device``, device=meta."""
    arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), arguments)
    if isinstance(arguments, dict):
        changes = {"device": META, "pin_memory": False, "generator": None}
        changes = {name: value for name, value in changes.items() if name in arguments}
        arguments |= changes | ({"device": META} if set_device else {})
    return arguments


def _storage_with_layout(tensor: torch.Tensor, view: StorageView) -> torch.UntypedStorage:
    """The storage of a tensor, which is first copied to the layout of ``view`` if its own differs."""
    if StorageView.of(tensor) != StorageView(storage_of(tensor), view.size, view.stride, view.offset, view.dtype):
        tensor = view.scratch().copy_(tensor)
    return tensor.untyped_storage()

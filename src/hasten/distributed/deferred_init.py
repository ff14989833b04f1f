"""A model that is made later, and of it only what somebody wants: for models that no process could hold whole.

Inside ``unmade`` the tensors of a model have shapes and no numbers, as on torch's meta device, and whatever would fill them is noted on a tape. The
tape makes those that are asked for. They have the numbers of a model that is made at once, to the bit: random numbers are drawn in the same order, and
those that belong to other tensors are thrown away, one tensor at a time. (torchdistX's deferred_init is the elder of this kind.)

Rows of plain numbers are there at once, in every process, and may be looked at: ``torch.tensor``, ``arange``, ``linspace``, what comes from NumPy or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

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

PLAIN = {"arange", "linspace", "logspace", "range"}  # which programs read while they make a model
LOOKS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}  # what such functions return depends on numbers
DRAWS = torch.Tag.nondeterministic_seeded
HOST, NOWHERE = torch.device("cpu"), torch.device("meta")
INSTEAD = "leave place=memory out"
TOLD = {torch.Tensor.device.__get__: HOST, torch.Tensor.is_meta.__get__: False, torch.Tensor.is_cpu.__get__: True}


def deferred_init(
    make: Callable[[], torch.nn.Module],
) -> tuple[torch.nn.Module, Callable[[Sequence[torch.Tensor]], Iterator]]:
    """The model that ``make`` returns, all of it on the meta device, and what makes its tensors: ``Tape.making``.

    Raises:
        Refusal: how it is made depends on its numbers, or cannot be noted.
    """
    tape = InitRecorder()
    try:
        with tape, ReportCpuDevice(), _truncated_as_one(tape):
            model = make()
    except (ConfigurationError, RunError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model cannot be made part by part: {format_error(error, 160)}; {INSTEAD}, or mend the model where that does not help"
        ) from error
    tape.end()
    replace_tensors(model, tape.without_numbers)
    tape.check_all_recorded(tensor for *_, tensor in module_tensors(model))
    return model, tape.materialize


def module_tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(module, name, tensor) of all that the modules of a model have: weights, buffers, and what is neither."""
    for module in model.modules():
        for held in (own_parameters(module), own_buffers(module), vars(module)):
            yield from (
                (module, name, tensor) for name, tensor in list(held.items()) if isinstance(tensor, torch.Tensor)
            )


def replace_tensors(model: torch.nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Puts ``new(tensor)`` in the place of every tensor that a model's modules have; what was one tensor stays one, and a weight a weight."""
    done: dict[int, tuple] = {}  # by id, with the tensor itself, or another could be given its id
    for module, name, tensor in module_tensors(model):
        if id(tensor) not in done:
            done[id(tensor)] = tensor, _in_place_of(tensor, new(tensor))
        if (other := done[id(tensor)][1]) is not tensor:
            setattr(module, name, other)  # and not into the dict: recurrent layers keep lists of their weights


def _in_place_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if new is old or not isinstance(old, torch.nn.Parameter):
        return new
    weight = torch.nn.Parameter(new.detach(), old.requires_grad)
    vars(weight).update(vars(old))
    return weight


class ReportCpuDevice(TorchFunctionMode):
    """Whoever asks is told that tensors without numbers are on the host: torch's and others' programs leave unfilled what is on the meta device."""

    def __torch_function__(self, function, types, given=(), named=None):
        return TOLD[function] if function in TOLD and given[0].is_meta else function(*given, **(named or {}))


@contextmanager
def _truncated_as_one(tape: InitRecorder) -> Iterator[None]:
    """Inside, ``trunc_normal_`` is one step of the tape: it draws again until all numbers are within its bounds, and looks at them for that."""

    def noting(draw: Callable) -> Callable:
        def noted(tensor, mean, std, a, b, generator=None):
            with without_modes():
                if tensor.is_meta:
                    tape.draws(draw, tensor, mean, std, a, b, generator=generator)
                    return tensor
            return draw(tensor, mean, std, a, b, generator=generator)

        return noted

    with patch_trunc_normal(noting):
        yield


@dataclass(frozen=True)
class StorageView:
    """Where a tensor lies, and in which storage: views of one storage are one thing on the tape."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        return cls(storage_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.first, self.size, self.stride)

    def elsewhere(self) -> torch.Tensor:
        """As large a tensor, laid out alike, that nobody has."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class RecordedOp:
    """One call that made, changed or drew something; tensors without numbers are places in it."""

    call: Callable
    given: tuple
    named: dict
    new: tuple[StorageView | None, ...] = ()  # of the tensors that it returns, in storages that were not there before
    changes: frozenset[int] = frozenset()
    draws: bool = True
    blindly: bool = True  # what it draws depends on no numbers

    @cached_property
    def storages(self) -> list[int]:
        """Each once, in the same order in every process."""
        return list(
            dict.fromkeys(
                place.storage
                for place in tree_flatten((self.given, self.named, self.new))[0]
                if isinstance(place, StorageView)
            )
        )

    @torch.no_grad()
    def play(self, there: dict[int, torch.UntypedStorage]) -> None:
        given, named = tree_map_only(
            StorageView, lambda place: place.on(there[place.storage]), (self.given, self.named)
        )
        result = _tensors(self.call(*given, **named))
        for place, tensor in zip(self.new, result, strict=False):
            if place is not None:
                there[place.storage] = _laid_out(tensor, place)

    @torch.no_grad()
    def draw(self) -> None:
        """Draws for nobody."""
        given, named = tree_map_only(StorageView, StorageView.elsewhere, (self.given, self.named))
        self.call(*given, **named)


class InitRecorder(TorchDispatchMode):
    """Notes how tensors are made, and makes them."""

    def __init__(self):
        super().__init__()
        self.steps: list[RecordedOp] = []
        self.held: dict[
            int, torch.UntypedStorage
        ] = {}  # without numbers; as long as they live no other has their number
        self.there: dict[int, torch.UntypedStorage] = {}  # what was made at once, by the storage that stands for it
        self.marks: dict[torch.Generator, torch.Tensor] = {}  # where each generator stands unless somebody seeds it

    def __torch_dispatch__(self, function, types, given=(), named=None):
        named = named or {}
        with without_torch_function():
            tensors = _tensors((given, named))
            made_at_once = not any(tensor.is_meta for tensor in tensors) if tensors else _name(function) in PLAIN
            if made_at_once and DRAWS not in function.tags:
                return function(*given, **_on_host(named))
            return self._noted(function, given, named, tensors)

    def draws(self, call: Callable, tensor: torch.Tensor, *given, **named) -> None:
        """Notes a call that fills a tensor with random numbers, whatever it does for that."""
        self.check_all_recorded([tensor])
        self._drawn_from(named.get("generator") or torch.default_generator)
        self.steps.append(
            RecordedOp(call, (StorageView.of(tensor), *given), named, changes=frozenset([storage_of(tensor)]))
        )

    def _noted(self, function, given: tuple, named: dict, tensors: list):
        changed = _changed(function, given, named)
        self._refuse_what_cannot_be_noted(function, named, tensors, changed)
        places = tree_map_only(
            torch.Tensor, lambda each: StorageView.of(each) if each.is_meta else each, (given, named)
        )
        result = function(*_without(given), **_without(named, device=not tensors))
        old = {storage_of(tensor) for tensor in tensors if tensor.is_meta}
        results = _tensors(result)
        new = tuple(None if storage_of(tensor) in old else StorageView.of(tensor) for tensor in results)
        if not tensors:
            if not result.numel():
                return function(*given, **_on_host(named))  # it takes no memory, and may be given some that is there
            places[1]["dtype"] = result.dtype
        places = places[0], _on_host(places[1])
        if any(place and place.first for place in new):
            raise NotImplementedError(f"{_name(function)} returns views of something new")
        if any(new) or (changed and torch.Tag.inplace_view not in function.tags):
            self._append(function, places, new, changed)
            self.held |= {storage_of(tensor): tensor.untyped_storage() for tensor in results}
        return result

    def _refuse_what_cannot_be_noted(self, function, named: dict, tensors: list, changed: list) -> None:
        if LOOKS.intersection(function.tags):
            raise ConfigurationError(
                f"the model looks at its numbers while it is made ({_name(function)}), which are not there part by part; {INSTEAD}"
            )
        device, generator = torch.device(named.get("device") or HOST), named.get("generator")
        if device.type not in ("cpu", "meta") or (generator is not None and generator.device.type != "cpu"):
            raise ConfigurationError(
                f"the model makes a tensor on {device} itself, which cannot be done part by part; leave the device out, or {INSTEAD}"
            )
        if not all(tensor.is_meta for tensor in changed):
            told = f"writes what it drew or computed into a tensor of plain numbers ({_name(function)})"
            raise ConfigurationError(
                f"the model {told}, which cannot be done part by part; make that tensor with torch.empty, or {INSTEAD}"
            )
        self.check_all_recorded(tensors)

    def _append(self, function, places: tuple, new: tuple, changed: list) -> None:
        if draws := DRAWS in function.tags:
            self._drawn_from(places[1].get("generator") or torch.default_generator)
        read = [each for each in tree_flatten(places)[0] if isinstance(each, StorageView)]
        changes = frozenset(map(storage_of, changed))
        blindly = _name(function).endswith("_like") or (
            len(read) <= 1 and all(place.storage in changes for place in read)
        )
        given, named = tree_map_only(
            torch.Tensor, lambda each: each.detach().clone(), places
        )  # others may write into them later
        self.steps.append(RecordedOp(function, given, named, new, changes, draws, blindly))

    def _drawn_from(self, generator: torch.Generator) -> None:
        """Notes a draw, and moves the generator, so that a seed that is set afterwards shows."""
        self._seen(generator)
        torch.rand((), generator=generator)
        self.marks[generator] = generator.get_state()

    def _seen(self, generator: torch.Generator) -> None:
        now, mark = generator.get_state(), self.marks.get(generator)
        if mark is not None and torch.equal(now, mark):
            return
        if mark is not None and not torch.equal(
            now, torch.Generator().manual_seed(generator.initial_seed()).get_state()
        ):
            raise ConfigurationError(
                f"the model sets random numbers back while it is made, which cannot be done part by part; {INSTEAD}"
            )
        self.steps.append(RecordedOp(generator.set_state, (now,), {}))

    def end(self) -> None:
        """Notes what was seeded after the last draw."""
        for generator in self.marks:
            self._seen(generator)

    def without_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor that was made at once; the others are that themselves."""
        if tensor.is_meta:
            return tensor
        own = tensor.untyped_storage()
        stands = next((number for number, there in self.there.items() if storage_id(there) == storage_id(own)), None)
        if stands is None:
            twin = torch.empty(own.nbytes(), dtype=torch.uint8, device=NOWHERE).untyped_storage()
            stands = storage_id(twin)
            self.held[stands], self.there[stands] = twin, own
        return StorageView.of(tensor).on(self.held[stands])

    def check_all_recorded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuses tensors on the meta device that are not on the tape: nobody knows their numbers."""
        if any(tensor.is_meta and storage_of(tensor) not in self.held for tensor in tensors):
            raise ConfigurationError(
                f"the model has tensors on the meta device, whose numbers nobody knows; make them elsewhere, or {INSTEAD}"
            )

    def materialize(self, wanted: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """(number among those wanted, the tensor with its numbers) of each, as soon as it is done, and forgotten at once.

        Afterwards random numbers go on as if all had been made. Beside what the caller keeps there is what is on its way, and one tensor that nobody wants.
        """
        yield from (
            (number, tensor) for number, tensor in enumerate(wanted) if not tensor.is_meta
        )  # constants that a graph has brought along
        places = {number: StorageView.of(tensor) for number, tensor in enumerate(wanted) if tensor.is_meta}
        of_storage: dict[int, list[int]] = {}
        for number, place in places.items():
            of_storage.setdefault(place.storage, []).append(number)
        self.check_all_recorded(wanted)
        for storage in (storage for storage in of_storage if storage in self.there):
            yield from ((number, places[number].on(self.there[storage])) for number in of_storage[storage])
        needed = self._behind(set(of_storage))
        order = self._early(needed)
        last = {storage: number for number in order if number in needed for storage in self.steps[number].storages}
        there: dict[int, torch.UntypedStorage] = {}
        for number in order:
            if number not in needed:
                self.steps[number].draw()
                continue
            self.steps[number].play(there)
            for storage in (storage for storage in self.steps[number].storages if last[storage] == number):
                yield from ((each, places[each].on(there[storage])) for each in of_storage.get(storage, ()))
                del there[storage]

    def _behind(self, wanted: set[int]) -> set[int]:
        """The steps that these storages come from, and those that have to know numbers in order to draw."""
        needed = set()
        for number, step in reversed(list(enumerate(self.steps))):
            if (
                (step.draws and not step.blindly)
                or wanted & step.changes
                or wanted & {place.storage for place in step.new if place}
            ):
                needed.add(number)
                wanted.update(step.storages)
        return needed

    def _early(self, needed: set[int]) -> list[int]:
        """The steps to take: draws in their order, and whatever else is needed as soon as it can be, so that little is on its way."""
        after: dict[int, int] = {}  # a storage: the draw after which all that was done to it is done
        when: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            if number in needed:
                when[number] = (
                    number if step.draws else max((after.get(storage, -1) for storage in step.storages), default=-1)
                )
                after |= {storage: max(when[number], after.get(storage, -1)) for storage in step.storages}
            elif step.draws:
                when[number] = number
        return sorted(when, key=when.get)  # those after one draw in the order of the tape


def storage_of(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _name(function) -> str:
    return function.overloadpacket.__name__


def _tensors(nested) -> list[torch.Tensor]:
    return [each for each in tree_flatten(nested)[0] if isinstance(each, torch.Tensor)]


def _changed(function, given: tuple, named: dict) -> list[torch.Tensor]:
    """The tensors that a function writes into, as its schema says."""
    arguments = schema_arguments(function)
    of_name = {argument.name: value for argument, value in zip(arguments, given, strict=False)} | named
    return _tensors(
        [of_name.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    )


def _on_host(named: dict) -> dict:
    """The same for a process that makes the tensor; torch itself asks for the device of its weights."""
    return named | {"device": HOST} if named.get("device") == NOWHERE else named


def _without(given, device: bool = False):
    """What a function is given, without numbers: tensors on the meta device, where nothing is drawn."""
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(NOWHERE), given)
    if isinstance(given, dict):
        changes = {"device": NOWHERE, "pin_memory": False, "generator": None}
        given |= {name: value for name, value in changes.items() if name in given or (device and name == "device")}
    return given


def _laid_out(tensor: torch.Tensor, place: StorageView) -> torch.UntypedStorage:
    """The storage of a tensor, which lies in it as the place says."""
    there = StorageView.of(tensor)
    if (there.size, there.stride, there.first, there.dtype) != (place.size, place.stride, place.first, place.dtype):
        tensor = place.elsewhere().copy_(tensor)
    return tensor.untyped_storage()

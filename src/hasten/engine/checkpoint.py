"""Checkpoints: the complete state of a run, from which it resumes to bit-identical weights.

The position is the state. Seekable sources start at the position. The others replay the epoch from the random state
that it began with, drop the batches already seen, and continue with the random state of the checkpoint. Files are
renamed into place, verified by their checksums, and loaded without executing code.
"""

import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save

from hasten._torch_compat import mark_updated
from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError, HastenWarning, RunError, format_error
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.run_context import ParallelContext, RunContext
from hasten.core.types import Batch
from hasten.distributed.dtensor_state import distribute_like, gather_full_state, local_shards, merge_shards, to_local
from hasten.engine.error_messages import translate_disk_errors
from hasten.engine.plan import Program
from hasten.engine.run_dir import FREE_THE_DISK, atomic_write
from hasten.utils.batch import batch_tensors
from hasten.utils.optimizers import align_state
from hasten.utils.rng import derive_seed, get_rng_state, preserve_rng_state, set_rng_state, set_seeds
from hasten.utils.tree import tree_map

State = dict[str, Any]  # nested dicts and lists of tensors and plain data

SHARDED_KEYS = ("model", "optimizer", "checkpoint_state")  # the parts of a state of which ranks may hold shards
RANK_SUFFIX = "-of-rank-"  # in the name of a file that holds another rank's shard
POSITION = ("step", "epoch", "batch", "samples")  # fields of TrainProgress; the others describe the step just done
NUM_CHECKPOINTS = 2  # the newest, and the one before it in case the newest is damaged


def _without_numpy(leaf: Any) -> Any:
    """A NumPy number as Python's: a learning rate that a schedule computes with NumPy would not load without code."""
    number: Any = leaf
    return number.item() if isinstance(leaf, numpy.generic) else leaf


class Checkpoints:
    """Writes, selects and removes the checkpoint files in the directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.good: list[Path] = []  # known to be complete, oldest first

    def save(self, state: State, rank: int = 0) -> None:
        """Writes a checkpoint, or one rank's shard of it; the first warns if it does not load without executing code.

        Rank 0 also removes the files of all ranks except those of the newest two checkpoints (three if in shards).
        """
        path = self.directory / _file_name(state["progress"]["step"], rank)
        plain = tree_map(_without_numpy, state)
        atomic_write(path, lambda file: torch.save(plain, file))
        if not self.good:  # warns at the first save, not after a crash
            try:
                load_checkpoint(path)
            except Exception as error:
                reason = f"its state does not load without executing code: {format_error(error, 160)}"
                warnings.warn(f"this run cannot be resumed: {reason}", HastenWarning, stacklevel=2)
        count = NUM_CHECKPOINTS + (state["parts"] > 1)  # other ranks may still be writing shards of the newest
        self.good = [*(known for known in self.good if known != path), path][-count:]
        if rank == 0:
            stems = {known.stem for known in self.good}
            for other in self.directory.glob("step-*.pt"):  # of every rank
                if other.stem.partition(RANK_SUFFIX)[0] not in stems:
                    with translate_disk_errors(other, FREE_THE_DISK):
                        other.unlink(missing_ok=True)

    def newest(self, matches: Callable[[State], bool]) -> State | None:
        """The newest complete checkpoint that ``matches``; warns of each newer one. None without files, RunError if no
        file can be used.
        """
        paths = sorted(self.directory.glob(_file_name("[0-9]" * 10, 0)), reverse=True)
        for path in paths:
            try:
                state = load_checkpoint(path)
                if not matches(state):
                    raise ValueError("it belongs to another run, or to a step after the end of log.jsonl")
                state = self._with_shards(state)
            except Exception as error:
                warnings.warn(f"{path.name} is passed over: {format_error(error, 120)}", HastenWarning, stacklevel=2)
                continue
            self.good = [path]
            return state
        if paths:
            raise RunError(f"no checkpoint in {self.directory} can be used; choose another --out to start anew")
        return None

    def _with_shards(self, state: State) -> State:
        """The state of rank 0, merged with the other ranks' shards; ValueError if one is missing or of another save."""
        paths = [self.directory / _file_name(state["progress"]["step"], rank) for rank in range(1, state["parts"])]
        if not paths:
            return state
        if missing := next((path.name for path in paths if not path.exists()), None):
            raise ValueError(f"the shard {missing} is missing")
        shards = [load_checkpoint(path) for path in paths]
        if any(shard["save"] != state["save"] for shard in shards):
            raise ValueError("the shards of its ranks were written by different saves")
        return state | merge_shards([{name: shard[name] for name in SHARDED_KEYS} for shard in (state, *shards)])


def _file_name(step: int | str, rank: int) -> str:
    return f"step-{step:0>10}{f'{RANK_SUFFIX}{rank}' if rank else ''}.pt"


def find_shared_directory(ranks: ProcessGroupInfo, directory: Path | None) -> Path | None:
    """``directory`` of rank 0, if it is the same directory on every rank (a shared file system); else None."""
    path, modified = ranks.broadcast(("", 0) if directory is None else (str(directory), os.stat(directory).st_mtime_ns))
    unseen = not path or not os.path.exists(path) or os.stat(path).st_mtime_ns != modified
    return None if ranks.any(unseen) else Path(path)


def load_checkpoint(path: Path) -> State:
    """Loads a checkpoint file to the CPU without executing code. Raises ``ValueError`` if a checksum is wrong."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the file is damaged at {damaged}")
    return torch.load(path, map_location="cpu", weights_only=True)


def get_state(program: Program, in_shards: bool = False) -> State:
    """The checkpoint state of a run, for any number of ranks to resume from. All ranks must call it.

    Keys: model, optimizer, checkpoint_state, schedule, progress, random, other_ranks, rank_state, parts, save. With
    ``in_shards`` every rank returns its own shard of each sharded tensor; otherwise rank 0 returns full tensors.
    """
    run, ranks = program.run, program.run.ranks
    parallel = run.parallel or ParallelContext(ranks)
    local = {"random": rng_state(program.train), "rank_state": _state_dicts(parallel.rank_state)}
    states = [local] if ranks.is_single_process else [deserialize(state) for state in ranks.gather(serialize(local))]
    sharded: State = {
        "model": parallel.merge_rank_states(run.unwrapped_model.state_dict()),
        "optimizer": parallel.merge_rank_states(_optimizer_state(run)),
        "checkpoint_state": _state_dicts(run.checkpoint_state),
    }
    if not ranks.is_single_process and in_shards:
        sharded = local_shards(sharded, keep=ranks.is_main_process or parallel.is_model_parallel)
    elif not ranks.is_single_process:
        sharded = gather_weights(sharded, run)
    return sharded | {
        "schedule": program.schedule.state_dict() if program.schedule is not None else None,
        "progress": {name: getattr(run.progress, name) for name in POSITION},
        "random": local["random"],
        "other_ranks": [state["random"] for state in states[1:]],
        "rank_state": [state["rank_state"] for state in states],
        "parts": ranks.world_size if in_shards else 1,
        "save": ranks.broadcast(os.urandom(8)).hex(),  # distinguishes its shards from those of another save
    }


def _state_dicts(objects: dict[str, Any]) -> State:
    return {name: stateful.state_dict() for name, stateful in objects.items()}


def _optimizer_state(run: RunContext) -> State:
    """The optimizer's state, without entries for parameters on the meta device, which other ranks own."""
    state = run.optimizer.state_dict()
    if _is_model_parallel(run):
        owned = {index for parameter, index in _indexed_parameters(run.optimizer, state) if not parameter.is_meta}
        state["state"] = {index: values for index, values in state["state"].items() if index in owned}
    return state


def _is_model_parallel(run: RunContext) -> bool:
    return run.parallel is not None and run.parallel.is_model_parallel


def is_sharded(run: RunContext) -> bool:
    """Whether this rank holds only a shard of some parameter or of its optimizer state."""
    parameters = (weight for group in run.optimizer.param_groups for weight in group["params"])
    held = [*run.unwrapped_model.parameters(), *parameters]
    return _is_model_parallel(run) or any(to_local(weight) is not weight for weight in held)


def update_only_tensors(run: RunContext) -> list[torch.Tensor]:
    """The tensors that change in the optimizer step only: not frozen weights, which a forward pass may change."""
    trained = (weight for weight in run.unwrapped_model.parameters() if weight.requires_grad)
    held = [*trained, *batch_tensors(dict(run.optimizer.state))]
    return [to_local(tensor).detach() for tensor in held if not tensor.is_meta]


def gather_weights(state: State, run: RunContext) -> State:
    """A nested state with full tensors on rank 0; other ranks' results are incomplete. All ranks must call it."""
    parallel = run.parallel
    if parallel is None or not parallel.is_model_parallel:
        return gather_full_state(state, run.ranks.is_main_process)
    in_first_replica = run.ranks.rank < parallel.model_parallel_size
    shards = run.ranks.gather(serialize(local_shards(state)) if in_first_replica else b"")
    states = [deserialize(shard) for shard in shards if shard]
    return merge_shards(states) if states else state


def restore(program: Program, state: State) -> None:
    """Loads what ``get_state`` returned into the program, except the random state. RunError if it does not fit it."""
    run, rank_states = program.run, state["rank_state"]
    same_world_size = len(rank_states) == run.ranks.world_size
    try:
        tensors = run.unwrapped_model.state_dict()
        model = {name: distribute_like(value, tensors.get(name, value)) for name, value in state["model"].items()}
        run.unwrapped_model.load_state_dict(model)
        optimizer = _distribute_optimizer_state(run.optimizer, state["optimizer"])
        run.optimizer.load_state_dict(optimizer)
        _restore_dtypes(run.optimizer, optimizer)
        mark_updated(run.optimizer)
        if program.schedule is not None:
            program.schedule.load_state_dict(state["schedule"])
        for name, stateful in run.checkpoint_state.items():
            if name in state["checkpoint_state"] or same_world_size:  # a strategy has no state in a single process
                stateful.load_state_dict(state["checkpoint_state"][name])
        _restore_rank_state(run, rank_states)
        for one in getattr(run.optimizer, "optimizers", [run.optimizer]):
            if isinstance(one, torch.optim.Optimizer):  # the checkpoint may be of another memory format
                align_state(one)
    except Exception as error:
        advice = "choose another --out to start anew"
        raise RunError(f"the checkpoint does not fit the task as it is now: {format_error(error)}; {advice}") from error
    for name in POSITION:
        setattr(run.progress, name, state["progress"][name])


def _restore_rank_state(run: RunContext, rank_states: list[State]) -> None:
    """Restores this rank's own state; with another number of ranks than saved, warns that it starts anew."""
    if run.parallel is None or not run.parallel.rank_state:
        return
    if len(rank_states) == run.ranks.world_size:
        for name, stateful in run.parallel.rank_state.items():
            stateful.load_state_dict(rank_states[run.ranks.rank][name])
    elif run.ranks.is_main_process:
        change = f"{len(rank_states)} processes trained this run and {run.ranks.world_size} resume it"
        names = ", ".join(run.parallel.rank_state)
        warnings.warn(f"{change}: the state of each process starts anew ({names})", HastenWarning, stacklevel=2)


def check_exportable(weights: State) -> None:
    """Raises ``ConfigurationError`` if safetensors cannot store one of the tensors: a sparse one, or complex128."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")
        if tensor.layout is not torch.strided or not _stores_dtype(tensor.dtype):
            advice = "keep it out of the state (register_buffer(..., persistent=False)), or train without --out"
            raise ConfigurationError(f"model.safetensors cannot store {name}, which is {kind}; {advice}")


def _stores_dtype(dtype: torch.dtype) -> bool:
    try:
        save({"empty": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError):  # safetensors does not know it, or torch has no such tensor without a scale
        return False
    return True


def to_safetensors(weights: State) -> bytes:
    """Name -> tensor as safetensors bytes; tied tensors once, as ``safetensors.torch.load_model`` expects."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if memory in names:
            aliases[name] = names[memory]
        else:
            names[memory] = name
            cpu_copy = tensor.detach().to("cpu", copy=True)  # one at a time: a GPU may not hold a second model
            stored[name] = cpu_copy.contiguous()
    return save(stored, metadata=aliases or None)


def rng_state(batches: BatchSource) -> State:
    """State of all random generators of this process, and of those that ``batches`` draw from."""
    return {"process": get_rng_state(), "generators": [generator.get_state() for generator in batches.generators]}


def restore_rng_state(batches: BatchSource, state: State) -> None:
    """Restores the generators to a state that ``rng_state`` returned."""
    set_rng_state(state["process"])
    for generator, generator_state in zip(batches.generators, state["generators"], strict=True):
        generator.set_state(generator_state)


def resume_epoch(
    batches: BatchSource, start_of_epoch: State | None, now: State
) -> Callable[[int, int], Iterator[Batch]]:
    """``(epoch, start) -> batches`` for the rest of an interrupted epoch, after restoring the random state ``now``.

    A source that is not seekable first replays the batches before ``start`` from its random state ``start_of_epoch``.
    """

    def epoch(index: int, start: int) -> Iterator[Batch]:
        if batches.seekable or start_of_epoch is None or not start:
            restore_rng_state(batches, now)
            return batches.epoch(index, start)
        restore_rng_state(batches, start_of_epoch)
        iterator = iter(batches.epoch(index, 0))
        for _ in range(start):
            next(iterator, None)
        restore_rng_state(batches, now)
        return iterator

    return epoch


def sync_rng(ranks: ProcessGroupInfo, batches: BatchSource) -> None:
    """Sets the CPU's random state of all ranks to that of rank 0, so that they draw the same order. A collective."""
    if not ranks.is_single_process:
        state = rng_state(batches)
        for name in ("cuda", "device"):  # a source draws on the CPU; the model draws on each rank's GPU
            state["process"].pop(name, None)
        restore_rng_state(batches, ranks.broadcast(state))


def rank_rng_state(run: RunContext, state: State) -> State:
    """This rank's random state in a checkpoint, or a new one. Ranks that share a pipeline stage get the same."""
    rank = run.ranks.rank - run.ranks.rank % (run.parallel.tp_size if run.parallel else 1)
    states = [state["random"], *state["other_ranks"]]
    if rank < len(states):
        return states[rank]
    if state["start_of_epoch"] is not None:  # the source is not seekable, so all ranks must draw the same from it
        return state["random"]
    with preserve_rng_state():
        set_seeds(derive_seed(run.seed, rank, state["progress"]["step"]))
        return {"process": get_rng_state(), "generators": state["random"]["generators"]}


def serialize(state: Any) -> bytes:
    """A nested state of tensors and plain data as bytes, by ``torch.save``."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def deserialize(content: bytes) -> Any:
    """The inverse of ``serialize``, with tensors on the CPU; executes no code."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_again(batches: BatchSource, start_of_epoch: State | None, epoch: int, start: int) -> Iterator[Batch]:
    """The batches of an epoch from index ``start``; LookupError if not seekable and another epoch has begun since."""
    if batches.seekable:
        return batches.epoch(epoch, start)
    if start_of_epoch is None or epoch != start_of_epoch["epoch"]:
        raise LookupError("this source cannot be read again: its epoch is over")
    return resume_epoch(batches, start_of_epoch, rng_state(batches))(epoch, start)


def _indexed_parameters(optimizer: torch.optim.Optimizer, saved: State) -> list[tuple[torch.Tensor, int]]:
    """(parameter, its index in ``saved``) of every parameter of an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return list(zip(parameters, indices, strict=True))


def _distribute_optimizer_state(optimizer: torch.optim.Optimizer, saved: State) -> State:
    """A copy of the full optimizer state ``saved``, whose tensors are sharded like the optimizer's parameters."""
    state = {
        index: {name: distribute_like(value, parameter) for name, value in saved["state"][index].items()}
        for parameter, index in _indexed_parameters(optimizer, saved)
        if index in saved["state"] and not parameter.is_meta
    }
    return saved | {"state": state}


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: State) -> None:
    """Casts the optimizer's state to the dtypes in ``saved``: torch loads it in the dtype of the parameters."""
    for parameter, index in _indexed_parameters(optimizer, saved):
        for name, value in saved["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device)

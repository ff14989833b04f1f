"""Checkpoints: everything that a run needs to go on as if it had never stopped.

The position is the state. Sources that can be sought start at the position; the others replay the pass
from the random state it began with, drop the batches already seen, and go on with the random state of
the moment. Files are renamed into place, proved by their checksums, and loaded without executing code.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from hasten.core.data import BatchSource
from hasten.core.errors import HastenWarning, RunError, format_error
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.run_context import ParallelContext, RunContext
from hasten.distributed.dtensor_state import distribute_like, gather_full_state, local_shards, merge_shards, to_local
from hasten.engine.error_messages import translate_disk_errors
from hasten.engine.plan import Program
from hasten.engine.run_dir import GO_ON, atomic_write
from hasten.utils.batch import batch_tensors
from hasten.utils.rng import derive_seed, get_rng_state, preserve_rng_state, set_rng_state, set_seeds

SHARED_OUT = ("model", "optimizer", "checkpoint_state")  # what of a state ranks may have parts of
OF_RANK = "-of-rank-"  # in the name of a file that holds another rank's part
PLACE = ("step", "epoch", "batch", "samples")  # of the progress; the rest belongs to the step that is done
KEPT = 2  # files: the newest, and the one before it in case the newest is damaged


class Checkpoints:
    """The folder of checkpoints of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.whole: list[Path] = []  # known to be good, oldest first

    def save(self, state: dict, rank: int = 0) -> None:
        """Writes a checkpoint, or a rank's part of it."""
        path = self.folder / _file_of(state["progress"]["step"], rank)
        atomic_write(path, lambda file: torch.save(state, file))
        if not self.whole:
            self._warn_if_unloadable(path)
        kept = KEPT if state["parts"] == 1 else KEPT + 1  # of the newest, other ranks may still be writing their parts
        self.whole = [*(known for known in self.whole if known != path), path][-kept:]
        if rank == 0:
            self._forget_all_but({known.stem for known in self.whole})

    def newest(self, fits: Callable[[dict], bool]) -> dict | None:
        """The newest checkpoint that is whole and ``fits``, with a notice about each that is passed over; None where none was made.

        Raises:
            Failure: there are some, but none can be used.
        """
        found = sorted(self.folder.glob(_file_of("[0-9]" * 10, 0)), reverse=True)
        for path in found:
            try:
                state = loaded(path)
                if not fits(state):
                    raise ValueError("it belongs to another run or to a longer log")
                state = self._with_parts(state)
            except Exception as error:
                warnings.warn(f"{path.name} is passed over: {format_error(error, 120)}", HastenWarning, stacklevel=2)
                continue
            self.whole = [path]
            return state
        if found:
            raise RunError(f"no checkpoint in {self.folder} can be used; choose another --out to start anew")
        return None

    def _with_parts(self, state: dict) -> dict:
        """The same with what the other ranks have written of it."""
        others = [self.folder / _file_of(state["progress"]["step"], rank) for rank in range(1, state.get("parts", 1))]
        if not others:
            return state
        if missing := next((path.name for path in others if not path.exists()), None):
            raise ValueError(f"{missing} is not there")
        parts = [loaded(path) for path in others]
        if any(part["save"] != state["save"] for part in parts):
            raise ValueError("its parts are of different saves")
        return state | merge_shards([{name: part[name] for name in SHARED_OUT} for part in (state, *parts)])

    def _forget_all_but(self, kept: set[str]) -> None:
        """Takes away the files of other steps, whichever rank wrote them."""
        for other in self.folder.glob("step-*.pt"):
            if other.stem.partition(OF_RANK)[0] not in kept:
                with translate_disk_errors(other, GO_ON):
                    other.unlink(missing_ok=True)

    def _warn_if_unloadable(self, path: Path) -> None:
        """Tells at once, not after the crash, where a state holds something that cannot be loaded safely."""
        try:
            loaded(path)
        except Exception as error:
            why = f"its state does not load without executing code: {format_error(error, 160)}"
            warnings.warn(f"this run cannot be resumed: {why}", HastenWarning, stacklevel=2)


def _file_of(step: int | str, rank: int) -> str:
    return f"step-{step:0>10}{f'{OF_RANK}{rank}' if rank else ''}.pt"


def find_shared_directory(ranks: ProcessGroupInfo, folder: Path | None) -> Path | None:
    """The first rank's folder, where every rank sees it on its own disk; None where one does not."""
    token = b"" if folder is None else json.dumps([str(folder), os.stat(folder).st_mtime_ns]).encode()
    place, changed = json.loads(ranks.broadcast(token) or b'["", 0]')
    unseen = not place or not os.path.exists(place) or os.stat(place).st_mtime_ns != changed
    return None if ranks.any(unseen) else Path(place)


def loaded(path: Path) -> dict:
    """A checkpoint, proved whole by its checksums. Nothing in it is ever executed."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"damaged at {damaged}")
    return torch.load(path, map_location="cpu", weights_only=True)


def get_state(program: Program, in_parts: bool = False) -> dict:
    """The part of a checkpoint that the program itself holds: as if one process had trained, and what each rank has of its own.

    All ranks have to ask at once. ``in_parts``: every rank gets what it has of tensors that are shared out; else the first one gets them whole.
    """
    run, ranks = program.run, program.run.ranks
    parallel = run.parallel or ParallelContext(ranks)
    own = {
        "random": rng_state(program.train),
        "rank_state": {name: thing.state_dict() for name, thing in parallel.rank_state.items()},
    }
    everybodys = [own] if ranks.is_single_process else [deserialize(state) for state in ranks.gather(serialize(own))]
    shared_out = {
        "model": parallel.merge_rank_states(run.unwrapped_model.state_dict()),
        "optimizer": parallel.merge_rank_states(_optimizer_state(run)),
        "checkpoint_state": {name: thing.state_dict() for name, thing in run.checkpoint_state.items()},
    }
    if not ranks.is_single_process:
        shared_out = (
            local_shards(shared_out, keep=ranks.is_main_process or parallel.is_model_parallel)
            if in_parts
            else gather_weights(shared_out, run)
        )
    return shared_out | {
        "schedule": program.schedule.state_dict() if program.schedule is not None else None,
        "progress": {name: getattr(run.progress, name) for name in PLACE},
        "random": own["random"],
        "other ranks": [state["random"] for state in everybodys[1:]],
        "rank_state": [state["rank_state"] for state in everybodys],
        "parts": ranks.world_size if in_parts else 1,
        "save": ranks.broadcast(os.urandom(8)).hex(),  # what tells its parts from those of another
    }


def _optimizer_state(run: RunContext) -> dict:
    """What this rank knows of the weights that it has."""
    state = run.optimizer.state_dict()
    if _is_model_parallel(run):
        own = {number for weight, number in _numbered(run.optimizer, state) if not weight.is_meta}
        state["state"] = {number: known for number, known in state["state"].items() if number in own}
    return state


def _is_model_parallel(run: RunContext) -> bool:
    return run.parallel is not None and run.parallel.is_model_parallel


def is_shared_out(run: RunContext) -> bool:
    """Whether any rank has but a part of some weight, or of what the optimizer knows of it."""
    held = [
        *run.unwrapped_model.parameters(),
        *(weight for group in run.optimizer.param_groups for weight in group["params"]),
    ]
    return _is_model_parallel(run) or any(to_local(weight) is not weight for weight in held)


def update_only_tensors(run: RunContext) -> list[torch.Tensor]:
    """What of a run's state nothing but the update changes. Weights that do not learn may follow others in the forward pass, unseen (``.data.mul_()``)."""
    held = [
        *(weight for weight in run.unwrapped_model.parameters() if weight.requires_grad),
        *batch_tensors(dict(run.optimizer.state)),
    ]
    return [to_local(tensor).detach() for tensor in held if not tensor.is_meta]


def gather_weights(state: dict, run: RunContext) -> dict:
    """A model's state, or anything of its weights, whole on the first rank; another has what it holds of it. All have to ask at once."""
    if not _is_model_parallel(run):
        return gather_full_state(state, run.ranks.is_main_process)
    told = (
        serialize(local_shards(state)) if run.ranks.rank < run.parallel.model_parallel_size else b""
    )  # the first copy is enough
    parts = [deserialize(part) for part in run.ranks.gather(told) if part]
    return merge_shards(parts) if parts else state


def restore(program: Program, state: dict) -> None:
    """Puts a program back to where ``state_of`` found it, all but the random state.

    Raises:
        Failure: the state does not fit the model, the optimizer or the methods.
    """
    run = program.run
    try:
        there = run.unwrapped_model.state_dict()
        run.unwrapped_model.load_state_dict(
            {name: distribute_like(value, there.get(name)) for name, value in state["model"].items()}
        )
        optimizer = _for_parameters_of(run.optimizer, state["optimizer"])
        run.optimizer.load_state_dict(optimizer)
        _keep_types(run.optimizer, optimizer)
        if program.schedule is not None:
            program.schedule.load_state_dict(state["schedule"])
        everybodys = state.get("rank_state", [])  # which earlier hastens did not have
        for name, thing in run.checkpoint_state.items():
            if (
                name in state["checkpoint_state"] or len(everybodys) == run.ranks.world_size
            ):  # a strategy keeps nothing where it is alone
                thing.load_state_dict(state["checkpoint_state"][name])
        _restore_own(run, everybodys)
    except Exception as error:
        raise RunError(
            f"the checkpoint does not fit the task as it is now: {format_error(error)}; choose another --out to start anew"
        ) from error
    for name in PLACE:
        setattr(run.progress, name, state["progress"][name])


def _restore_own(run: RunContext, everybodys: list[dict]) -> None:
    if run.parallel is None or not run.parallel.rank_state or not everybodys:
        return
    if len(everybodys) == run.ranks.world_size:
        for name, thing in run.parallel.rank_state.items():
            thing.load_state_dict(everybodys[run.ranks.rank][name])
    elif run.ranks.is_main_process:
        told = f"{len(everybodys)} processes trained this run and {run.ranks.world_size} go on with it: what each had of its own starts anew"
        warnings.warn(f"{told} ({', '.join(run.parallel.rank_state)})", HastenWarning, stacklevel=2)


def to_safetensors(weights: dict) -> bytes:
    """The state of a model in the safetensors format; tensors that are shared are stored once.

    ``safetensors.torch.load_model`` puts them back.
    """
    kept, twins, seen = {}, {}, {}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if same in seen:
            twins[name] = seen[same]
        else:
            seen[same] = name
            kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return save(kept, metadata=twins or None)


def rng_state(batches: BatchSource) -> dict:
    """Every random state that the run draws from, the task's own generators too."""
    return {"process": get_rng_state(), "generators": [generator.get_state() for generator in batches.generators]}


def restore_rng_state(batches: BatchSource, state: dict) -> None:
    set_rng_state(state["process"])
    for generator, own in zip(batches.generators, state["generators"], strict=True):
        generator.set_state(own)


def resume_epoch(batches: BatchSource, start_of_pass: dict | None, now: dict) -> Callable[[int, int], Iterator]:
    """``batches.epoch`` for the pass that was interrupted: its remaining batches, and every random state as it was."""

    def epoch(number: int, start: int) -> Iterator:
        if batches.seekable or start_of_pass is None or not start:
            restore_rng_state(batches, now)
            return batches.epoch(number, start)
        restore_rng_state(batches, start_of_pass)
        iterator = iter(batches.epoch(number, 0))
        for _ in range(start):
            next(iterator, None)
        restore_rng_state(batches, now)
        return iterator

    return epoch


def sync_rng(ranks: ProcessGroupInfo, batches: BatchSource) -> None:
    """From here on all ranks draw what rank 0 draws, so that they read a source that cannot be sought in the same order."""
    if not ranks.is_single_process:
        drawn = rng_state(batches)
        drawn["process"].pop(
            "cuda", None
        )  # a source draws on the host; each rank's GPU goes on with what the model draws
        restore_rng_state(batches, deserialize(ranks.broadcast(serialize(drawn))))


def rng_state_of(run: RunContext, state: dict) -> dict:
    """This rank's random state in a checkpoint; a rank that there was not then begins with one of its own. Those of one stage draw alike."""
    rank = run.ranks.rank - run.ranks.rank % (run.parallel.tp_size if run.parallel else 1)
    others = state.get("other ranks", [])
    if rank <= len(others):
        return [state["random"], *others][rank]
    if state["start of pass"] is not None:  # the source cannot be sought, and all draw alike from it
        return state["random"]
    with preserve_rng_state():
        set_seeds(derive_seed(run.seed, rank, state["progress"]["step"]))
        return {"process": get_rng_state(), "generators": state["random"]["generators"]}


def serialize(state) -> bytes:
    """A state as bytes, for another rank."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def deserialize(content: bytes):
    """What ``packed`` made; nothing in it is ever executed."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_again(batches: BatchSource, start_of_pass: dict | None, epoch: int, number: int) -> Iterator:
    """The batches of a pass once more, from one of them on.

    Raises:
        LookupError: they come from a source that cannot be sought, and another pass has begun since.
    """
    if batches.seekable:
        return batches.epoch(epoch, number)
    if start_of_pass is None or epoch != start_of_pass["epoch"]:
        raise LookupError("its pass is over")
    return resume_epoch(batches, start_of_pass, rng_state(batches))(epoch, number)


def _numbered(optimizer, saved: dict) -> list[tuple[torch.Tensor, int]]:
    """The parameters of an optimizer, with the numbers under which its saved state knows them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return list(zip(parameters, numbers, strict=True))


def _for_parameters_of(optimizer, saved: dict) -> dict:
    """The whole state of an optimizer, shared out as its parameters are now."""
    state = {
        number: {name: distribute_like(value, parameter) for name, value in saved["state"][number].items()}
        for parameter, number in _numbered(optimizer, saved)
        if number in saved["state"] and not parameter.is_meta
    }
    return saved | {"state": state}


def _keep_types(optimizer, saved: dict) -> None:
    """Torch casts an optimizer's state to the type of its parameter when loading; a wider state stays as wide as it was."""
    for parameter, number in _numbered(optimizer, saved):
        for name, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)

"""Saves a run to its directory and resumes it: checkpoints, the exported model, the skipped rows."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation
from hasten.core.types import Batch
from hasten.distributed.process_group import on_main_process
from hasten.engine import bad_rows, checkpoint, finite_checks
from hasten.engine.async_checkpoint import AsyncCheckpointer
from hasten.engine.plan import Program
from hasten.engine.run_dir import RunDirectory, atomic_write
from hasten.utils.optimizers import OptimizerList


@dataclass
class RunRecord:
    """The times and evaluations of a run so far; checkpoints include it."""

    began: float  # ``perf_counter()`` when ``train`` was called in this process
    earlier_seconds: float = 0.0  # those that the run took before it was resumed
    # seconds by part of the run
    split: dict[str, float] = field(default_factory=lambda: {"start": 0.0, "evaluation": 0.0, "checkpoints": 0.0})
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds_at: list[float] = field(default_factory=list)  # of the run, at each evaluation

    def seconds(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.earlier_seconds + perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores of this record: evaluations with their times, and the seconds so far by part."""
        history = [[e.step, e.samples, e.metric, s] for e, s in zip(self.evaluations, self.seconds_at, strict=True)]
        return {"history": history, "seconds": self.seconds(), "split": dict(self.split)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluations = [Evaluation(step, samples, metric) for step, samples, metric, _ in state["history"]]
        self.seconds_at = [seconds for *_, seconds in state["history"]]
        self.earlier_seconds, self.split = state["seconds"], state["split"]


class Persistence:
    """Saves and resumes one run. All ranks call every method; only rank 0 has the run directory.

    ``directory`` is None if nothing is written, and on all ranks but rank 0; ``out`` is its path, on all ranks. The run
    must train with ``program``: it has the batches of a resumed run, and an optimizer step that waits for checkpoints.
    """

    def __init__(self, program: Program, recipe: Recipe, directory: RunDirectory | None, record: RunRecord) -> None:
        self.run, self.ranks, self.recipe = program.run, program.run.ranks, recipe
        self.directory, self.record = directory, record
        self.out = self.ranks.broadcast("" if directory is None else str(directory.path))
        self.saves_checkpoints = bool(self.out)
        self.start_of_epoch: dict[str, Any] | None = None  # random state, for sources that are not seekable
        self.rest_of_interrupted_epoch: Callable[[int, int], Iterator[Batch]] | None = None
        self.train, self.source = program.train, program.source
        self.skipped: list[dict[str, Any]] = []  # the rows that the run directory lists
        self.saved_recipe = directory.written if directory else recipe
        self.writer = AsyncCheckpointer()
        self._choose_checkpoint_writers()
        # several optimizers update inside of the passes
        update = "forward_backward" if isinstance(self.run.optimizer, OptimizerList) else "optimizer_step"
        self.program = dataclasses.replace(
            program,
            train=dataclasses.replace(program.train, epoch=self._epoch),
            **{update: self._after_copy(getattr(program, update))},
        )
        bad_rows.restore_skipped_rows(program.task, [])  # another run with the same data may have skipped some
        if self.saves_checkpoints:
            self._resume()

    def save(self, wait: bool) -> float:
        """Begins to write a checkpoint in a thread; with ``wait``, returns only when it is on the disk.

        Returns the seconds of this call, plus the CPU seconds of the thread for the latest finished checkpoint; 0.0,
        without writing, if a weight is not finite.
        """
        self.list_skipped()
        began = perf_counter()
        self.writer.finish()  # on all ranks, before any begins the next
        if self.ranks.any(not finite_checks.weights_are_finite(self.run.model)):
            return 0.0  # the next loss will report it; the newest good checkpoint stays
        state = checkpoint.get_state(self.program, self.sharded)
        if self.directory:
            state |= self._main_process_state()
        if self.checkpoints:
            write = partial(self.checkpoints.save, rank=self.ranks.rank)
            self.writer.begin(state, checkpoint.update_only_tensors(self.run), write)
            if wait:
                self.writer.finish()
        stalled = perf_counter() - began
        self.record.split["checkpoints"] += stalled
        self.note_time("checkpoint")
        self.save_tuned_recipe()
        return stalled + self.writer.seconds

    def finish(self) -> None:
        """Waits for the last checkpoint, then writes the exported model to model.safetensors."""
        model = self.program.export()
        weights = checkpoint.gather_weights(model.state_dict(), self.run)
        names: dict[int, str] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(weight), name)
            if name in weights and first in weights:  # a shard that is used twice was gathered twice
                weights[name] = weights[first]
        self.writer.finish()
        if self.directory:
            path = self.directory.path / "model.safetensors"
            atomic_write(path, lambda file: file.write(checkpoint.to_safetensors(weights)))

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes result.json, which marks the run as finished."""
        if self.directory:
            self.directory.write("result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
            self.save_tuned_recipe()

    def close(self) -> None:
        """Ends the writing thread, lists the skipped rows and releases the data; also called after an error."""
        self.writer.close()
        self.list_skipped()
        del self.program, self.train, self.source  # breaks a reference cycle, so that worker processes end now

    def note_time(self, event: str) -> None:
        """Appends ``event``, the current step and the seconds of the run so far to times.jsonl."""
        if self.directory:
            self.directory.note_time(event, self.run.progress.step, self.record.seconds())

    def list_skipped(self) -> int:
        """Writes the skipped rows to skipped.jsonl, if there are new ones; returns the number of all of them."""
        rows = bad_rows.skipped_rows(self.program.task)
        if self.directory and rows != self.skipped:
            self.directory.write(bad_rows.FILE, "".join(f"{json.dumps(row)}\n" for row in rows))
            self.skipped = rows
        return len(rows)

    def save_tuned_recipe(self) -> None:
        """Writes the options that methods found while they ran to recipe.toml, for the next run."""
        tuned = self.run.tuned_settings
        recipe = Recipe({name: options | tuned.get(name, {}) for name, options in self.recipe.methods.items()})
        if self.directory and recipe != self.saved_recipe:
            self.directory.write("recipe.toml", recipe.to_toml())
            self.saved_recipe = recipe

    def read_again(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Reads the training batches of an epoch once more, from batch index ``batch`` on, to find a bad one."""
        return checkpoint.read_again(self.source, self.start_of_epoch, epoch, batch)

    def _choose_checkpoint_writers(self) -> None:
        """Selects rank 0, or every rank for its shard if weights are sharded and all ranks see the run directory."""
        directory = self.directory and self.directory.path / "checkpoints"
        self.sharded = False
        if self.saves_checkpoints and self.ranks.any(checkpoint.is_sharded(self.run)):
            shared = checkpoint.find_shared_directory(self.ranks, directory)
            directory, self.sharded = shared or directory, shared is not None
        self.checkpoints = checkpoint.Checkpoints(directory) if directory else None

    def _after_copy(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """``update``, preceded by waiting until the checkpoint thread has copied the weights."""
        if not self.checkpoints:
            return update
        before_update = self.writer.before_update

        def wait_and_update(*args: Any) -> Any:
            before_update()
            return update(*args)

        return wait_and_update

    def _epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """The training batches; first stores the random state if the source must be replayed to resume the epoch."""
        if self.rest_of_interrupted_epoch:
            rest, self.rest_of_interrupted_epoch = self.rest_of_interrupted_epoch, None
            return rest(epoch, start)
        if not self.train.seekable:
            checkpoint.sync_rng(self.ranks, self.train)
            self.start_of_epoch = {"epoch": epoch, **checkpoint.rng_state(self.train)}
        return self.train.epoch(epoch, start)

    def _main_process_state(self) -> dict[str, Any]:
        """The entries of a checkpoint that only rank 0 knows: evaluations, times, log length, skipped rows, ..."""
        assert self.directory is not None
        return self.record.state_dict() | {
            "identity": self.directory.identity,
            "start_of_epoch": self.start_of_epoch,
            "samples_per_epoch": self.run.plan.samples,
            "skipped_rows": self.skipped,
            "tuned_settings": self.run.tuned_settings,
            "log": self.directory.logged(),
        }

    def _resume(self) -> None:
        """Restores the run and its record from the newest complete checkpoint; without one the run starts at step 0."""
        state = self._to_all_ranks(on_main_process(self.ranks, self._newest))
        if not state:
            return
        checkpoint.restore(self.program, state)
        self.record.load_state_dict(state)
        bad_rows.restore_skipped_rows(self.program.task, state["skipped_rows"])
        self.list_skipped()
        tuned = {name: found for name, found in state["tuned_settings"].items() if name in self.recipe.methods}
        self.run.tuned_settings |= tuned | self.run.tuned_settings
        self.start_of_epoch = state["start_of_epoch"]
        random_state = checkpoint.rank_rng_state(self.run, state)
        self.rest_of_interrupted_epoch = checkpoint.resume_epoch(self.train, self.start_of_epoch, random_state)

    def _to_all_ranks(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The checkpoint of rank 0 on every rank: each loads it, if all see the run directory; else rank 0 sends it."""
        save = self.ranks.broadcast(state["save"] if state else "")
        if not save:
            return None
        directory = checkpoint.find_shared_directory(self.ranks, self.directory and self.directory.path / "checkpoints")
        if directory and state is None:
            with suppress(RunError):
                state = checkpoint.Checkpoints(directory).newest(lambda other: other["save"] == save)
        if self.ranks.any(state is None):  # a shared file system may show the directory before its files
            return checkpoint.deserialize(self.ranks.broadcast(checkpoint.serialize(state)))
        return state

    def _newest(self) -> dict[str, Any] | None:
        """The newest complete checkpoint or None, for rank 0; cuts log.jsonl to its step and removes skipped.jsonl.
        ConfigurationError if the number of training samples has changed.
        """
        assert self.directory is not None and self.checkpoints is not None
        length, identity = self.directory.logged(), self.directory.identity
        state = self.checkpoints.newest(lambda state: state["identity"] == identity and state["log"] <= length)
        self.directory.cut_log(state["log"] if state else 0)
        self.directory.remove(bad_rows.FILE)  # the checkpoint holds the rows skipped before it
        if not state and self.directory.begun:
            warnings.warn("no checkpoint was written yet; the run starts over at step 0", HastenWarning, stacklevel=2)
        before, now = state["samples_per_epoch"] if state else None, self.run.plan.samples
        if before is not None and now is not None and before != now:
            advice = f"give it the {before} samples again, or start anew in another --out"
            raise ConfigurationError(f"the data have {now} samples, the run in {self.out} had {before}; {advice}")
        return state

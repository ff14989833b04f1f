"""What a run leaves on the disk and resumes from: checkpoints, the run directory, the rows that were skipped."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation
from hasten.core.types import Batch, StepFn
from hasten.distributed.process_group import on_main_process
from hasten.engine import bad_rows, checkpoint, finite_checks
from hasten.engine.async_checkpoint import AsyncCheckpointer
from hasten.engine.plan import Program
from hasten.engine.run_dir import RunDirectory, atomic_write


@dataclass
class RunRecord:
    """What a run has measured so far; checkpoints include it.

    Attributes:
        began: the process's time, in seconds, when this process began.
        earlier_seconds: seconds that the run took before it was resumed.
        split: seconds by part of the run.
        evaluations: every evaluation so far.
        seconds_at: seconds of the run at each evaluation.
    """

    began: float
    earlier_seconds: float = 0.0
    split: dict[str, float] = field(default_factory=lambda: {"start": 0.0, "evaluation": 0.0, "checkpoints": 0.0})
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds_at: list[float] = field(default_factory=list)

    def seconds(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.earlier_seconds + perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        history = [[e.step, e.samples, e.metric, s] for e, s in zip(self.evaluations, self.seconds_at, strict=True)]
        return {"history": history, "seconds": self.seconds(), "split": dict(self.split)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluations = [Evaluation(step, samples, metric) for step, samples, metric, _ in state["history"]]
        self.seconds_at = [seconds for *_, seconds in state["history"]]
        self.earlier_seconds, self.split = state["seconds"], state["split"]


class Persistence:
    """Saves and resumes one run. Every method is called by all ranks; rank 0 alone has the run directory.

    Attributes:
        folder: the run directory; None where nothing is written, and on all ranks but the first.
        out: its path, on all ranks; empty where nothing is written.
        program: the program with training batches and an optimizer step that resuming and saving rely on.
    """

    def __init__(self, program: Program, recipe: Recipe, folder: RunDirectory | None, record: RunRecord) -> None:
        self.run, self.ranks, self.recipe, self.folder, self.record = (
            program.run,
            program.run.ranks,
            recipe,
            folder,
            record,
        )
        self.out = self.ranks.broadcast(b"" if folder is None else str(folder.path).encode()).decode()
        self.keeps_checkpoints = bool(self.out)
        self.start_of_epoch: dict[str, Any] | None = None  # random state, of sources that cannot be sought
        self.rest_of_interrupted_epoch: Callable[[int, int], Iterator[Batch]] | None = None
        self.train, self.source = program.train, program.source
        self.skipped: list[dict[str, Any]] = []  # rows that the run directory lists
        self.saved_recipe = folder.written if folder else recipe
        self.writer = AsyncCheckpointer()
        self._choose_checkpoint_writers()
        self.program = dataclasses.replace(
            program,
            train=dataclasses.replace(program.train, epoch=self._epoch),
            optimizer_step=self._after_copy(program.optimizer_step),
        )
        bad_rows.restore_skipped_rows(program.task, [])  # not the rows that another run with the same data skipped
        if self.keeps_checkpoints:
            self._resume()

    def save(self, wait: bool) -> float:
        """Begins a checkpoint; with ``wait``, returns when it is on the disk.

        Returns:
            The seconds of this process that it took, those of the writing thread included.
        """
        self.list_skipped()
        began = perf_counter()
        self.writer.finish()  # on all ranks, before any begins the next
        if self.ranks.any(not finite_checks.weights_are_finite(self.run.model)):
            return 0.0  # the next loss will report it; the newest good checkpoint stays
        state = checkpoint.get_state(self.program, self.sharded)
        if self.folder:
            state |= self._main_process_state()
        if self.checkpoints:
            self.writer.begin(
                state, checkpoint.update_only_tensors(self.run), partial(self.checkpoints.save, rank=self.ranks.rank)
            )
            if wait:
                self.writer.finish()
        stalled = perf_counter() - began
        self.record.split["checkpoints"] += stalled
        self.note_time("checkpoint")
        self.save_tuned_recipe()
        return stalled + self.writer.seconds

    def finish(self) -> None:
        """Writes the exported model, after the last checkpoint is on the disk."""
        weights = checkpoint.gather_weights(self.program.export().state_dict(), self.run)
        self.writer.finish()
        if self.folder:
            atomic_write(
                self.folder.path / "model.safetensors", lambda file: file.write(checkpoint.to_safetensors(weights))
            )

    def write_result(self, result: dict[str, Any]) -> None:
        if self.folder:
            self.folder.write("result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
            self.save_tuned_recipe()

    def close(self) -> None:
        """Ends the writing thread, lists the rows that were skipped, and releases the data; called after a failure, too."""
        self.writer.close()
        self.list_skipped()
        self.program = self.train = self.source = None  # opens a reference cycle, so that worker processes end now

    def note_time(self, event: str) -> None:
        """Writes the seconds of the run at the current step into the run directory."""
        if self.folder:
            self.folder.note_time(event, self.run.progress.step, self.record.seconds())

    def list_skipped(self) -> int:
        """Writes the rows that were skipped into the run directory, if there are new ones; returns how many there are."""
        now = bad_rows.skipped_rows(self.program.task)
        if self.folder and now != self.skipped:
            self.folder.write(bad_rows.FILE, "".join(f"{json.dumps(row)}\n" for row in now))
            self.skipped = now
        return len(now)

    def save_tuned_recipe(self) -> None:
        """Writes the settings that methods found while they ran into the recipe of the run directory, for the next run."""
        found = Recipe(
            {name: settings | self.run.tuned_settings.get(name, {}) for name, settings in self.recipe.methods.items()}
        )
        if self.folder and found != self.saved_recipe:
            self.folder.write("recipe.toml", found.to_toml())
            self.saved_recipe = found

    def read_again(self, epoch: int, batch: int) -> Iterator[Batch]:
        """The batches of an epoch from one on, once more; what else the run draws is not disturbed."""
        return checkpoint.read_again(self.source, self.start_of_epoch, epoch, batch)

    def _choose_checkpoint_writers(self) -> None:
        """Rank 0 alone writes checkpoints, or every rank its shard, where weights are sharded and all ranks see the directory."""
        folder = self.folder and self.folder.path / "checkpoints"
        self.sharded = False
        if self.keeps_checkpoints and self.ranks.any(checkpoint.is_shared_out(self.run)):
            seen = checkpoint.find_shared_directory(self.ranks, folder)
            folder, self.sharded = seen or folder, seen is not None
        self.checkpoints = checkpoint.Checkpoints(folder) if folder else None

    def _after_copy(self, optimizer_step: StepFn) -> StepFn:
        """The optimizer step, which waits for the weights to be copied where a checkpoint is being made of them."""
        if not self.checkpoints:
            return optimizer_step
        before_update = self.writer.before_update

        def step() -> None:
            before_update()
            optimizer_step()

        return step

    def _epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """The training batches; notes the random state at the start of an epoch, for sources that cannot be sought."""
        if self.rest_of_interrupted_epoch:
            rest, self.rest_of_interrupted_epoch = self.rest_of_interrupted_epoch, None
            return rest(epoch, start)
        if not self.train.seekable:
            checkpoint.sync_rng(self.ranks, self.train)
            self.start_of_epoch = {"epoch": epoch, **checkpoint.rng_state(self.train)}
        return self.train.epoch(epoch, start)

    def _main_process_state(self) -> dict[str, Any]:
        """What of a checkpoint only rank 0 knows."""
        return self.record.state_dict() | {
            "identity": self.folder.identity,
            "start of pass": self.start_of_epoch,
            "samples of a pass": self.run.plan.samples,
            "skipped_rows": self.skipped,
            "tuned_settings": self.run.tuned_settings,
            "log": self.folder.logged(),
        }

    def _resume(self) -> None:
        """Restores the newest whole checkpoint; the run starts at step 0 where there is none."""
        state = on_main_process(self.ranks, self._newest)
        if not self.ranks.is_single_process:
            state = checkpoint.deserialize(self.ranks.broadcast(checkpoint.serialize(state)))
        if not state:
            return
        checkpoint.restore(self.program, state)
        self.record.load_state_dict(state)
        bad_rows.restore_skipped_rows(self.program.task, state["skipped_rows"])
        self.list_skipped()
        tuned = {
            name: found for name, found in state["tuned_settings"].items() if name in self.recipe.methods
        }  # the strategy may differ
        self.run.tuned_settings |= tuned | self.run.tuned_settings
        self.start_of_epoch = state["start of pass"]
        random_state = checkpoint.rng_state_of(self.run, state)
        self.rest_of_interrupted_epoch = checkpoint.resume_epoch(self.train, self.start_of_epoch, random_state)

    def _newest(self) -> dict[str, Any] | None:
        """The newest whole checkpoint in the run directory, whose log is cut to the step of that checkpoint."""
        length, identity = self.folder.logged(), self.folder.identity
        state = self.checkpoints.newest(lambda state: state["identity"] == identity and state["log"] <= length)
        self.folder.cut_log(state["log"] if state else 0)
        self.folder.remove(bad_rows.FILE)  # the checkpoint knows the rows that were skipped before it
        if not state and self.folder.begun:
            warnings.warn("no checkpoint was written yet; the run starts over at step 0", HastenWarning, stacklevel=2)
        if state:
            self._refuse_other_data(state["samples of a pass"])
        return state

    def _refuse_other_data(self, before: int | None) -> None:
        """A position in other data means other samples; recognized by the number of samples, which any data have."""
        now = self.run.plan.samples
        if before is not None and now is not None and before != now:
            raise ConfigurationError(
                f"the training data have {now} samples, and the run in {self.folder.path} was training on {before}: "
                "give it those data again, or start anew in another --out"
            )

"""One run on its way: what happens between two steps.

The loop knows how to train; this file fetches the losses, tells observers, evaluates, saves and stops.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from hasten.contract.errors import Aftermath, Notice, Refusal, Stopped
from hasten.contract.ranks import ProcessGroupInfo
from hasten.contract.recipe import Recipe
from hasten.contract.run_context import Evaluation
from hasten.contract.watch import Watch
from hasten.engine import checkpoint, health, skipping
from hasten.engine.failures import explained, place
from hasten.engine.folder import RunFolder, write_whole
from hasten.engine.loop import evaluate, finished, no_batch, rest_of_pass
from hasten.engine.observers import number_or_none, numbers_of
from hasten.engine.observers import progress as progress_reporter
from hasten.engine.outcome import outcome
from hasten.engine.pauses import Pauses
from hasten.engine.plan import Program
from hasten.engine.ranks import by_the_first
from hasten.engine.saving import Saving


class Training:
    """One run on its way. ``to_the_end`` is the story; the rest are its sentences."""

    def __init__(
        self, program: Program, recipe: Recipe, folder: RunFolder | None, observers, watch: Watch, every: float, asked: list, began: float
    ):
        self.run, self.recipe, self.folder = program.run, recipe, folder
        self.ranks: ProcessGroupInfo = program.run.ranks
        self.out = self.ranks.broadcast(b"" if folder is None else str(folder.path).encode()).decode()
        self.keeps = bool(self.out)  # the first rank writes, and all have a part in it
        self.observers = [*([folder.log] if folder else []), *observers]
        self.began, self.earlier = began, 0.0  # seconds that runs before this resumption took
        self.split = {"start": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.history: list[Evaluation] = []
        self.seconds_at: list[float] = []  # of each evaluation
        self.pending: list[tuple] = []  # (loss on the device, epoch, batch, weight) since the last log point
        self.stopped = False
        self.start_of_pass: dict | None = None
        self.source, self.plain = program.train, program.source  # what the steps read, and the same without the other ranks
        self._decide_who_writes()
        self.saving = Saving()
        train, update = dataclasses.replace(program.train, epoch=self._epoch), self._updating(program.optimizer_step)
        self.program = dataclasses.replace(program, train=train, update=update)
        self.interrupted = None  # how to take up the pass that a checkpoint was made in
        self.skipped: list[dict] = []  # rows, as they stand in the folder
        self.written = folder.written if folder else recipe  # what the folder's recipe.toml says
        skipping.remember(program.task, [])  # not what another run with the same data met
        if self.keeps:
            self._take_up()
        self.tell = progress_reporter(watch, self._share)
        self.pauses = Pauses(self.run, asked, every, self.keeps)
        self.next_evaluation = self._next_evaluation()
        self.split["start"] += perf_counter() - began

    def _decide_who_writes(self) -> None:
        """The first rank alone, or all of them their parts of the checkpoints, where they see its folder."""
        folder = self.folder and self.folder.path / "checkpoints"
        self.in_parts = False
        if self.keeps and self.ranks.any(checkpoint.is_shared_out(self.run)):
            seen = checkpoint.seen_by_all(self.ranks, folder)
            folder, self.in_parts = seen or folder, seen is not None
        self.checkpoints = checkpoint.Checkpoints(folder) if folder else None

    def to_the_end(self) -> dict:
        if self.folder:
            self.folder.note_time("start", self.run.progress.step, self._seconds())
        while not finished(self.program) and not self.stopped:
            before = self.run.progress.step, self.run.progress.batch
            self._train_one_pass()
            self._fetch_losses()
            if before == (self.run.progress.step, 0):
                raise no_batch(self.run.progress.epoch)
            if not self.stopped and self.run.plan.evaluate_every is None:
                self._evaluate()
        health.refuse_bad_weights(self.run.model, self.run.progress.step)
        if not self.history or self.history[-1].step != self.run.progress.step:
            self._evaluate()
        return self._finish()

    def _updating(self, update: Callable[[], None]) -> Callable[[], None]:
        """The update, for which a checkpoint that is being copied has to be ready."""
        if not self.checkpoints:
            return update
        before_update = self.saving.before_update

        def updated():
            before_update()
            update()

        return updated

    def _train_one_pass(self) -> None:
        progress, pending, is_time = self.run.progress, self.pending, self.pauses.is_time
        advance = rest_of_pass(self.program).__next__
        while True:
            epoch, batch = progress.epoch, progress.batch
            try:
                loss = advance()
            except StopIteration:
                return
            except Exception as error:
                raise explained(error, self._place(epoch, batch), self.run.plan.batch_size) from error
            pending.append((loss, epoch, batch, progress.loss_weight))
            if progress.samples >= self.next_evaluation:
                self._evaluate()
                if self.stopped:
                    return
            if is_time(len(pending)):
                self._pause()

    def _pause(self) -> None:
        """Between two steps, a few times a second: progress, losses, checkpoint, a request to stop."""
        self.tell()
        wishes = self.pauses.wishes(len(self.pending))
        if wishes.log:
            self._fetch_losses()
        if wishes.save:
            self._save(now=wishes.stop or not self.pauses.every)
        if wishes.stop:
            raise Stopped(f"stopped at step {self.run.progress.step} of {self.run.plan.steps or 'an unknown number'}{self._how_to_go_on()}")
        self.pauses.over()

    def _fetch_losses(self) -> None:
        """Turns the losses since the last log point into numbers and tells the observers."""
        pending, self.pauses.logged = self.pending, perf_counter()
        if not pending:
            return
        _, epoch, batch, _ = pending[-1]
        try:
            own = numbers_of([loss for loss, *_ in pending])
        except Exception as error:  # CUDA tells of a failed kernel only when somebody waits for it
            raise explained(error, f"{self._place(epoch, batch)} or just before", self.run.plan.batch_size) from error
        first = self.run.progress.step - len(pending) + 1
        losses = own if self.ranks.is_single_process else self._mean_of_ranks(own)
        good = len(losses) if all(map(math.isfinite, losses)) else next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
        self._observe([{"step": first + i, "loss": loss} for i, loss in enumerate(losses[:good])])
        if good < len(losses):
            _, epoch, batch, _ = pending[good]
            if number_or_none(own[good]) is not None:
                raise Aftermath(f"the loss of another rank is {losses[good]} at {place(first + good, epoch, batch)}")
            again = partial(checkpoint.read_again, self.plain, self.start_of_pass, epoch, batch)
            raise health.bad_loss(own[good], place(first + good, epoch, batch), again)
        pending.clear()
        if self.folder:
            self.folder.note_time("steps", self.run.progress.step, self._seconds())

    def _mean_of_ranks(self, losses: list[float]) -> list[float]:
        """The losses of whole batches, from those of each rank's part."""
        shares = [loss * weight for loss, (*_, weight) in zip(losses, self.pending, strict=True)]
        return [share / self.ranks.world_size for share in self.ranks.all_reduce_sum(shares)]

    def _evaluate(self) -> None:
        self._fetch_losses()
        self.next_evaluation = self._next_evaluation()
        if self.program.validation is None:
            return
        began, progress = perf_counter(), self.run.progress
        try:
            measured = evaluate(self.program)
        except Exception as error:
            raise explained(error, f"the evaluation after step {progress.step}", self.run.plan.batch_size) from error
        if number_or_none(measured.metric) is None:
            health.refuse_bad_metric(measured.metric, progress.step, self.program.validation)
        self.split["evaluation"] += perf_counter() - began
        self.history.append(Evaluation(progress.step, progress.samples, measured.metric))
        self.seconds_at.append(self._seconds())
        record = {"step": progress.step, "samples": progress.samples, "metric": measured.metric, "validation_loss": measured.loss}
        self._observe([{name: number_or_none(value) for name, value in record.items()}])
        if self.folder:
            self.folder.note_time("evaluation", progress.step, self.seconds_at[-1])
        if self.run.plan.stop is not None and self.ranks.any(bool(self.run.plan.stop(self.history))):
            self.stopped = True

    def list_skipped(self) -> int:
        """Writes down which rows were left out, if there are new ones; how many there are."""
        now = skipping.left_out(self.program.task)
        if self.folder and now != self.skipped:
            self.folder.write(skipping.FILE, "".join(f"{json.dumps(row)}\n" for row in now))
            self.skipped = now
        return len(now)

    def _save(self, now: bool) -> None:
        """Begins a checkpoint, and waits for it where it has to be there ``now``."""
        self._fetch_losses()
        self.list_skipped()
        self.pauses.saved = began = perf_counter()
        self.saving.finish()  # on all ranks, before any begins the next
        if self.ranks.any(not health.weights_are_finite(self.run.model)):
            return  # the next loss will say so; the newest good checkpoint stays
        state = checkpoint.state_of(self.program, self.in_parts)
        if self.folder:
            state |= self._told_by_the_folder()
        if self.checkpoints:
            self.saving.begin(state, checkpoint.resting(self.run), partial(self.checkpoints.save, rank=self.ranks.rank))
            if now:
                self.saving.finish()
        self.pauses.saved = perf_counter()
        stalled = self.pauses.saved - began
        self.pauses.saving = stalled + self.saving.seconds
        self.split["checkpoints"] += stalled
        if self.folder:
            self.folder.note_time("checkpoint", self.run.progress.step, self._seconds())
            self._save_what_was_found()

    def _told_by_the_folder(self) -> dict:
        """What of a checkpoint only the first rank knows."""
        return {
            "identity": self.folder.identity,
            "start of pass": self.start_of_pass,
            "samples of a pass": self.run.plan.samples,
            "history": [[e.step, e.samples, e.metric, s] for e, s in zip(self.history, self.seconds_at, strict=True)],
            "skipped": self.skipped,
            "chosen": self.run.tuned_settings,
            "log": self.folder.logged(),
            "seconds": self._seconds(),
            "split": dict(self.split),
        }

    def _take_up(self) -> None:
        """Goes back to the newest whole checkpoint; to the start where none was made yet."""
        state = by_the_first(self.ranks, self._newest)
        if not self.ranks.is_single_process:
            state = checkpoint.unpacked(self.ranks.broadcast(checkpoint.packed(state)))
        if not state:
            return
        checkpoint.restore(self.program, state)
        self.history = [Evaluation(step, samples, metric) for step, samples, metric, _ in state["history"]]
        self.seconds_at = [seconds for *_, seconds in state["history"]]
        self.earlier, self.split = state["seconds"], state["split"]
        skipping.remember(self.program.task, state["skipped"])
        self.list_skipped()
        still = {name: found for name, found in state["chosen"].items() if name in self.recipe.methods}  # the strategy may be another
        self.run.tuned_settings |= still | self.run.tuned_settings
        self.start_of_pass = state["start of pass"]
        self.interrupted = checkpoint.taken_up(self.source, self.start_of_pass, checkpoint.random_of(self.run, state))

    def _newest(self) -> dict | None:
        """The newest whole checkpoint in the folder, whose log is cut to where that was made."""
        length = self.folder.logged()
        ours = self.folder.identity
        earlier = {"recipe": ours["recipe"]}  # what an earlier hasten left out of its checkpoints
        state = self.checkpoints.newest(lambda state: earlier | state["identity"] == ours and state["log"] <= length)
        self.folder.cut_log(state["log"] if state else 0)
        self.folder.forget(skipping.FILE)  # what holds of it stands in the checkpoint
        if not state and self.folder.begun:
            warnings.warn("no checkpoint was written yet; the run starts over at step 0", Notice, stacklevel=2)
        if state:
            self._refuse_other_data(state.get("samples of a pass"))  # an earlier hasten did not note them
        return state

    def _refuse_other_data(self, before: int | None) -> None:
        """A place in other data means other samples; told by how many there are, which alone is known of any data."""
        now = self.run.plan.samples
        if before is not None and now is not None and before != now:
            raise Refusal(
                f"the training data have {now} samples, and the run in {self.folder.path} was training on {before}: "
                "give it those data again, or start anew in another --out"
            )

    def _epoch(self, number: int, start: int) -> Iterator:
        """The task's batches; notes the random state at the start of a pass, for sources that cannot be sought."""
        if self.interrupted:
            take_up, self.interrupted = self.interrupted, None
            return take_up(number, start)
        if not self.source.seekable:
            checkpoint.draw_alike(self.ranks, self.source)
            self.start_of_pass = {"epoch": number, **checkpoint.random_now(self.source)}
        return self.source.epoch(number, start)

    def _finish(self) -> dict:
        weights = checkpoint.gathered(self.program.export().state_dict(), self.run)
        self.saving.finish()
        if self.folder:
            write_whole(self.folder.path / "model.safetensors", lambda file: file.write(checkpoint.exported(weights)))
        seconds = self._seconds()
        result = outcome(self.program.task, self.run, self.history, self.seconds_at) | {
            "seconds": seconds,
            "split": {**self.split, "training": seconds - sum(self.split.values())},
            "stopped": self.stopped,
            "skipped": self.list_skipped(),
            "recipe": str(self.recipe),
            "chosen": self.run.tuned_settings,
            "out": str(self.folder.path) if self.folder else None,
        }
        if self.folder:
            self.folder.write("result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
            self._save_what_was_found()
        return result

    def _save_what_was_found(self) -> None:
        """Puts the settings that methods found while they ran into the folder's recipe, for the next run."""
        found = Recipe({name: settings | self.run.tuned_settings.get(name, {}) for name, settings in self.recipe.methods.items()})
        if found != self.written:
            self.folder.write("recipe.toml", found.to_toml())
            self.written = found

    def _observe(self, records: list[dict]) -> None:
        for observer in self.observers:
            observer(records)

    def _next_evaluation(self) -> float:
        """The sample count at which the next evaluation is due; with none asked for, the end of a pass is the time."""
        every = self.run.plan.evaluate_every
        return float("inf") if every is None else (self.run.progress.samples // every + 1) * every

    def _seconds(self) -> float:
        return self.earlier + perf_counter() - self.began

    def _share(self) -> float:
        progress, plan = self.run.progress, self.run.plan
        return progress.step / plan.steps if plan.steps else progress.epoch / plan.epochs

    def _place(self, epoch: int, batch: int) -> str:
        return place(self.run.progress.step + 1, epoch, batch)

    def _how_to_go_on(self) -> str:
        if not self.keeps:
            return "; nothing was kept, give --out to be able to go on"
        return f"; go on with --out {self.out} --resume"

"""The loop around the training steps: logs losses, calls observers, evaluates, pauses for checkpoints, stops.

A step is in ``loop.py``; what is written to the disk, and how a run resumes, in ``persistence.py``.
"""

import math
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from hasten.core.errors import PeerFailure, RunInterrupted
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation
from hasten.engine import finite_checks
from hasten.engine.cadence import PauseSchedule
from hasten.engine.error_messages import empty_data_error, explain_error, format_position
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import is_finished, train_epoch
from hasten.engine.memory import memory_peaks
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.observers import Observer, finite_or_none, losses_to_host, progress_reporter
from hasten.engine.persistence import Persistence, RunRecord
from hasten.engine.plan import Program
from hasten.engine.resources import local_world_size
from hasten.engine.run_dir import RunDirectory
from hasten.utils.targets import first_sustained_target


class Trainer:
    """Trains the program that ``build`` returned to the end of its plan; the other arguments are those of ``train``.

    The list ``stop_signals`` grows when this process is asked to stop; the run began at ``began`` (``perf_counter()``).
    """

    def __init__(
        self,
        program: Program,
        recipe: Recipe,
        directory: RunDirectory | None,
        observers: Sequence[Observer],
        on_progress: ProgressCallback,
        checkpoint_seconds: float,
        stop_signals: list[int],
        began: float,
    ) -> None:
        self.context, self.ranks, self.recipe = program.run, program.run.ranks, recipe
        self.observers = [*([directory.log] if directory else []), *observers]
        self.record = RunRecord(began)
        self.persistence = Persistence(program, recipe, directory, self.record)
        self.program = self.persistence.program
        # (loss on the device, epoch, batch, weight) not yet logged
        self.pending: list[tuple[Any, int, int, float]] = []
        self.stopped = False
        self.report_progress = progress_reporter(on_progress, self._fraction_done)
        self.pauses = PauseSchedule(self.context, stop_signals, checkpoint_seconds, self.persistence.saves_checkpoints)
        self.next_evaluation = self._next_evaluation()
        self.record.split["start"] += perf_counter() - began

    def run(self) -> dict[str, Any]:
        """Trains to the end of the plan and returns the result; RunError if an epoch is empty."""
        progress = self.context.progress
        self.persistence.note_time("start")
        self.program.effects.check()
        while not is_finished(self.program) and not self.stopped:
            before = progress.step, progress.batch
            self._train_epoch()
            self._fetch_losses()
            if before == (progress.step, 0):
                raise empty_data_error(progress.epoch)
            if not self.stopped and self.context.plan.evaluate_every is None:
                self._evaluate()
        finite_checks.check_weights_finite(self.context.model, progress.step)
        if not self.record.evaluations or self.record.evaluations[-1].step != progress.step:
            self._evaluate()
        return self._finish()

    def close(self) -> None:
        """Ends the checkpoint thread and releases program and data; also called after an error."""
        self.persistence.close()
        del self.program

    def _train_epoch(self) -> None:
        progress, pending, is_due = self.context.progress, self.pending, self.pauses.is_due
        advance = self.program.effects.observed(train_epoch(self.program)).__next__
        while True:
            epoch, batch = progress.epoch, progress.batch
            try:
                loss = advance()
            except StopIteration:
                return
            except Exception as error:
                where = format_position(progress.step + 1, epoch, batch)
                raise explain_error(error, where, self.context.plan.batch_size) from error
            pending.append((loss, epoch, batch, progress.loss_weight))
            if progress.samples >= self.next_evaluation:
                self._evaluate()
                if self.stopped:
                    return
            if is_due(len(pending)):
                self._pause()

    def _pause(self) -> None:
        """Reports progress between two steps, logs losses, saves a checkpoint, or stops by RunInterrupted, as due."""
        self.report_progress()
        actions = self.pauses.actions(len(self.pending))
        if actions.log:
            self._fetch_losses()
        if actions.save:
            self._fetch_losses()
            self.pauses.saved_at = perf_counter()
            seconds = self.persistence.save(wait=actions.stop or not self.pauses.checkpoint_seconds)
            if seconds:
                self.pauses.saved_at, self.pauses.save_seconds = perf_counter(), seconds
        if actions.stop:
            steps = self.context.plan.steps or "an unknown number"
            raise RunInterrupted(f"stopped at step {self.context.progress.step} of {steps}{self._how_to_resume()}")
        self.pauses.end()

    def _fetch_losses(self) -> None:
        """Copies losses since the last log point to the host for the observers; RunError if one is not finite."""
        pending, self.pauses.logged_at = self.pending, perf_counter()
        if not pending:
            return
        step, batch_size = self.context.progress.step, self.context.plan.batch_size
        _, epoch, batch, _ = pending[-1]
        try:
            local = losses_to_host([loss for loss, *_ in pending])
        except Exception as error:  # CUDA reports a failed kernel only when the host waits for it
            where = f"{format_position(step + 1, epoch, batch)} or just before"
            raise explain_error(error, where, batch_size) from error
        first = step - len(pending) + 1
        losses = local
        if not self.ranks.is_single_process:  # the losses of the global batches, from those of the ranks' shards
            weighted = [loss * weight for loss, (*_, weight) in zip(local, pending, strict=True)]
            losses = [total / self.ranks.world_size for total in self.ranks.all_reduce_sum(weighted)]
        finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))  # losses before NaN
        self._observe([{"step": first + i, "loss": loss} for i, loss in enumerate(losses[:finite])])
        if finite < len(losses):
            _, epoch, batch, _ = pending[finite]
            where = format_position(first + finite, epoch, batch)
            if math.isfinite(local[finite]):
                raise PeerFailure(f"the loss of another rank is {losses[finite]} at {where}")
            read_again = partial(self.persistence.read_again, epoch, batch)
            raise finite_checks.non_finite_loss_error(local[finite], where, read_again)
        pending.clear()
        self.persistence.note_time("steps")

    def _evaluate(self) -> None:
        self._fetch_losses()
        self.next_evaluation = self._next_evaluation()
        if self.program.validation is None:
            return
        progress, plan, record = self.context.progress, self.context.plan, self.record
        began = perf_counter()
        try:
            result = evaluate(self.program)
        except Exception as error:
            raise explain_error(error, f"the evaluation after step {progress.step}", plan.batch_size) from error
        if finite_or_none(result.metric) is None:
            finite_checks.check_metric_finite(result.metric, progress.step, self.program.validation)
        record.split["evaluation"] += perf_counter() - began
        record.evaluations.append(Evaluation(progress.step, progress.samples, result.metric))
        record.seconds_at.append(record.seconds())
        metric, loss = finite_or_none(result.metric), finite_or_none(result.loss)
        self._observe([{"step": progress.step, "samples": progress.samples, "metric": metric, "validation_loss": loss}])
        self.persistence.note_time("evaluation")
        if plan.schedule_interval == "evaluation":
            self.program.schedule.step(result.metric)
        if plan.stop is not None and self.ranks.any(bool(plan.stop(record.evaluations))):
            self.stopped = True

    def _finish(self) -> dict[str, Any]:
        """Writes model.safetensors and result.json; returns the result."""
        self.persistence.finish()
        seconds, split = self.record.seconds(), self.record.split
        result = self._outcome() | {
            "seconds": seconds,
            "split": {**split, "training": seconds - sum(split.values())},
            "stopped": self.stopped,
            "skipped_rows": self.persistence.list_skipped(),
            "recipe": str(self.recipe),
            "tuned_settings": self.context.tuned_settings,
            "effects": self.program.effects.evidence,
            "processes": self.ranks.world_size if self.ranks.world_size == local_world_size() else None,
            "peak_memory_bytes": memory_peaks(self.ranks, self.context.device),
            "out": str(self.persistence.directory.path) if self.persistence.directory else None,
        }
        self.persistence.write_result(result)
        return result

    def _outcome(self) -> dict[str, Any]:
        """The metrics of the run, and when its target was reached."""
        task, run = self.program.task, self.context  # a method may have changed ``run.task``
        history, seconds_at = self.record.evaluations, self.record.seconds_at
        higher = higher_is_better(task)
        metrics = [finite_or_none(evaluation.metric) for evaluation in history]
        finite = [metric for metric in metrics if metric is not None]
        reached = first_sustained_target(metrics, task.target, higher)
        return {
            "metric": metrics[-1] if metrics else None,
            "metric_name": name_of(task),
            "best_metric": (max if higher else min)(finite, default=None),
            "higher_is_better": higher,
            "target": task.target,
            "reached": reached is not None,
            "seconds_to_target": None if reached is None else seconds_at[reached],
            "samples_to_target": None if reached is None else history[reached].samples,
            "steps": run.progress.step,
            "samples": run.progress.samples,
            "evaluations": [
                {"step": evaluation.step, "samples": evaluation.samples, "metric": metric, "seconds": seconds}
                for evaluation, metric, seconds in zip(history, metrics, seconds_at, strict=True)
            ],
            "no_effect": [list(pair) for pair in run.no_effect],
            "task": task.name,
            "seed": run.seed,
            "device": str(run.device),
        }

    def _observe(self, records: list[dict[str, Any]]) -> None:
        for observer in self.observers:
            try:
                observer(records)
            except Exception as error:  # stays as it is: an observer may end a run by an error of its own
                name = getattr(observer, "__qualname__", type(observer).__qualname__)
                error.add_note(f"raised by the observer {name}")
                raise

    def _next_evaluation(self) -> float:
        """The number of samples at which the next evaluation is due; infinite if evaluations follow epochs."""
        every = self.context.plan.evaluate_every
        return math.inf if every is None else (self.context.progress.samples // every + 1) * every

    def _fraction_done(self) -> float:
        progress, plan = self.context.progress, self.context.plan
        return progress.step / plan.steps if plan.steps else progress.epoch / plan.epochs

    def _how_to_resume(self) -> str:
        if not self.persistence.saves_checkpoints:
            return "; nothing was saved, pass --out to be able to resume"
        return f"; resume with --out {self.persistence.out} --resume"

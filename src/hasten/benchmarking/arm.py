"""One arm of a comparison, in a worker process or as one rank of a group: built once, then trained block by block."""

import dataclasses
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import torch

from hasten._torch_compat import is_gpu_taken, is_out_of_memory
from hasten._torch_compat_compile import cached_compile_seconds
from hasten.benchmarking.gpu_state import gpu_state
from hasten.benchmarking.worker_group import COLLECTIVE_TIMEOUT_S, start_workers
from hasten.core.errors import PeerFailure, RunError
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.distributed.process_group import init_process_group
from hasten.engine import checkpoint
from hasten.engine.cadence import LOG_EVERY_STEPS
from hasten.engine.devices import synchronize
from hasten.engine.error_messages import explain_error, format_position
from hasten.engine.evaluation import evaluate, evaluated_batches
from hasten.engine.finite_checks import non_finite_loss_error
from hasten.engine.loop import train_steps
from hasten.engine.memory import MemoryPeak, memory_peaks
from hasten.engine.observers import losses_to_host
from hasten.engine.optimizer import check_schedule_state
from hasten.engine.plan import Program, build
from hasten.engine.registry import make_methods
from hasten.engine.tasks import TaskRef
from hasten.engine.train import device_of, with_strategy

WARM_UP_STEPS, WARM_UP_ROUNDS = 3, 4
WARM_UP_S = 3.0  # of steady steps, after which no further round begins
LONG_STEP_S = 1.0  # seconds; if the second step takes longer, one step is a round
LONG_EVALUATION_S = 10.0  # seconds; a longer one is timed once
WORKERS_EVALUATION_S = 3.0  # so long, or little longer, is such a slice of batches that workers compute ahead
EVALUATION_S = 1.0  # a timed evaluation is a slice of about this length, scaled up


def warm_up_steps(step: float) -> int:
    """Number of steps in the warm-up of an arm whose steps take ``step`` seconds."""
    if step <= LONG_STEP_S:
        return 3 + WARM_UP_ROUNDS * WARM_UP_STEPS
    return 1 + min(WARM_UP_ROUNDS, math.ceil(WARM_UP_S / step))


class Arm:
    """A run without end that is trained in blocks of steps. All times are in seconds.

    The task is a TaskRef or its JSON. Without ``ranks`` the arm joins the process group of the environment when it is
    built.
    """

    def __init__(
        self,
        task: str | TaskRef,
        methods: dict[str, Any],
        device: str,
        seed: int,
        ranks: ProcessGroupInfo | None = None,
    ):
        self.task = task if isinstance(task, TaskRef) else TaskRef.from_json(task)
        self.recipe, self.device, self.seed = Recipe(methods), device, seed
        self.joins_group, self.ranks = ranks is None, ranks or SINGLE_PROCESS
        self.unread: list[tuple[torch.Tensor, int, int]] = []  # (loss on the device, epoch, batch)
        self.losses: list[float] = []  # of the steps of the current block
        self.epoch_start: dict[str, Any] | None = None  # random state at the start of the epoch

    def build(self, with_evaluation: bool = True) -> dict[str, Any]:
        """Builds the run and warms it up. Loading the task is not timed: it takes the same time under every recipe.

        The warm-up has up to 15 steps, and 2 to 4 if each takes more than a second. Without ``with_evaluation`` there
        are no evaluations, as if the task had no validation data.

        Returns:
            The plan: ``start`` (seconds beyond steady steps), ``step`` and ``evaluation`` (seconds), ``sync_period``
            and ``warmup_steps`` of the strategy, ``samples_per_epoch``, ``batch_size``, ``steps``, ``epochs``,
            ``evaluate_every`` (training samples), ``effects`` (text by method), ``peak_memory`` (of each rank).
            ``samples``: trained on in the warm-up; ``samples_per_step``: their mean.

        Raises:
            RunError: a method has no effect, or a loss is not finite.
        """
        with self._explain_out_of_memory():
            task = self.task.load()
            self.context = ExitStack()  # never closed: the process ends with the arm
            if self.joins_group:
                self.ranks = self.context.enter_context(init_process_group(self.device, COLLECTIVE_TIMEOUT_S))
                self.device = device_of(self.ranks, self.device)
            self._barrier()
            began = time.perf_counter()
            program = self.build_program(task)
            program.effects.require_effect = True
            program.effects.check()
            self.context.enter_context(program.process_context())
            self.source = program.train
            self.program = _endless(program, self._epoch)
            self.steps = program.effects.observed(train_steps(self.program))
            built = time.perf_counter() - began
            first, step = self._warm_up(program)
            evaluation = None
            if with_evaluation and program.validation is not None:
                first_evaluation, evaluation = self._warm_up_evaluation()
                first += first_evaluation
        start = built + first + cached_compile_seconds()  # as with an empty cache, whatever was tried before
        plan, parallel, progress = program.plan, program.run.parallel, program.run.progress
        samples_per_step = progress.samples / progress.step
        return {
            "start": start,
            "step": step,
            "sync_period": parallel.sync_period if parallel else 1,
            "warmup_steps": parallel.warmup_steps if parallel else 0,
            "evaluation": evaluation,
            "samples_per_epoch": plan.samples or (program.train.length and program.train.length * samples_per_step),
            "batch_size": max(plan.batch_size, round(samples_per_step)),  # that of ready batches is not known before
            "samples": progress.samples,
            "samples_per_step": samples_per_step,
            "steps": plan.steps,
            "epochs": plan.epochs,
            "evaluate_every": plan.evaluate_every,
            "effects": program.effects.evidence,
            "peak_memory": self.peak_memory(),
        }

    def peak_memory(self) -> list[MemoryPeak]:
        """The peak of the memory of every rank since it was started, see ``engine/memory.py``."""
        return memory_peaks(self.ranks, self.program.run.device)

    @contextmanager
    def _explain_out_of_memory(self) -> Iterator[None]:
        """Context manager: raises MemoryExhaustedError, with the position and the batch size, if memory runs out.

        Also if another process has the GPU for itself.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, RunError) or not (is_out_of_memory(error) or is_gpu_taken(error)):
                raise
            program = getattr(self, "program", None)
            if program is None:
                raise explain_error(error, "building the run", 0) from error
            progress = program.run.progress
            where = format_position(progress.step + 1, progress.epoch, progress.batch)
            raise explain_error(error, where, program.plan.batch_size) from error

    def build_program(self, task: Task) -> Program:
        methods = with_strategy(make_methods(self.recipe), self.ranks)
        return build(task, methods, device=self.device, seed=self.seed, ranks=self.ranks)

    def _warm_up(self, program: Program) -> tuple[float, float]:
        """Trains the first steps: (seconds that they took beyond steady ones, seconds of a steady step).

        The effects are observed in the third step, or in the second one if the first was long; the time of the checks
        counts nowhere. Every rank trains as many steps, since the longest time of all ranks decides.
        """
        early = [self._seconds_of_steps(1)]
        if early[0] > LONG_STEP_S:
            program.effects.warmup_steps = 1
        early.append(self._seconds_of_steps(1))
        is_long = early[-1] > LONG_STEP_S
        steady = [early.pop()] if is_long else []
        if not is_long:
            early.append(self._seconds_of_steps(1))
        count = 1 if is_long else WARM_UP_STEPS
        while not steady or (len(steady) < WARM_UP_ROUNDS and count * sum(steady) < WARM_UP_S):
            steady.append(self._seconds_of_steps(count) / count)
        return max(0.0, sum(early) - len(early) * min(steady)), min(steady)

    def _warm_up_evaluation(self) -> tuple[float, float]:
        """(seconds that the first evaluation takes beyond another one, seconds of an evaluation).

        Sets ``evaluated_batches``, the number that ``evaluate`` times: all (None) unless an evaluation is long. Where
        workers compute batches ahead of time, the first ones show their start only: then it is at least about two
        times as many as they compute ahead, or one more than there are workers if the batches take long.
        """
        assert self.program.validation is not None
        workers = self.program.validation.workers
        self.validation_batches = batches = evaluated_batches(self.program)
        self.evaluated_batches = None
        if not batches:  # unknown
            first = self._evaluate(None)
            second = first if first > LONG_EVALUATION_S else self._evaluate(None)
            return max(0.0, first - second), second
        first = self._evaluate(1) / batches
        least = 1
        if workers.num_workers and first <= LONG_EVALUATION_S:
            enough = 2 * (workers.num_workers + workers.prefetch) + 2
            affordable = int(WORKERS_EVALUATION_S / first * workers.num_workers)
            least = min(batches, enough, max(workers.num_workers + 1, affordable))
        if first > LONG_STEP_S:
            self.evaluated_batches = least
            return 0.0, first * batches if least == 1 else self._evaluate(least)
        second = self._evaluate(1) / batches
        if second * batches > EVALUATION_S:
            self.evaluated_batches = min(batches, max(least, round(EVALUATION_S / second)))
        return max(0.0, first - second), self._evaluate(self.evaluated_batches)

    def _seconds_of_steps(self, count: int) -> float:
        """Seconds of ``count`` steps without the checks of effects, the same on all ranks."""
        checks = self.program.effects.check_seconds
        before = sum(checks.values())
        seconds = self.train(count)["seconds"]
        return self.ranks.all_reduce_max([seconds + before - sum(checks.values())])[0]

    def train(self, count: int) -> dict[str, float]:
        """Trains a block of ``count`` steps, synchronized at its ends only.

        Returns:
            seconds, ``issue_seconds`` (until the host had queued all work of the device), samples, ``position``
            (samples since the start of the run), ``loss`` (mean over the steps and the ranks; NaN if the losses are
            not read) and, summed over all ranks: cpu and system (CPU seconds), faults (minor page faults) and switches
            (involuntary context switches). On a GPU also the figures of ``gpu_state``, of this rank's GPU.

        Raises:
            RunError: a loss is not finite, or an earlier step failed.
        """
        progress, self.losses = self.program.run.progress, []
        with self._explain_out_of_memory():
            self._synchronize()
            samples, before, began = progress.samples, resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            for _ in range(count):
                loss = next(self.steps, None)  # may call _read_losses, between two epochs
                if loss is None:
                    raise RunError("the run cannot continue: an earlier step of it failed")
                self.unread.append((loss, progress.epoch, progress.batch - 1))
                if len(self.unread) >= LOG_EVERY_STEPS:  # as a run does
                    self._read_losses()
            issued = time.perf_counter()
            self._synchronize()
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            self._read_losses()
        usage = {
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "system": after.ru_stime - before.ru_stime,
            "faults": after.ru_minflt - before.ru_minflt,
            "switches": after.ru_nivcsw - before.ru_nivcsw,
            "loss": fmean(self.losses) / self.ranks.world_size if self.losses else math.nan,
        }
        sums = self.ranks.all_reduce_sum(list(usage.values()))
        block = {"seconds": seconds, "issue_seconds": issued - began, "samples": progress.samples - samples}
        block |= {"position": progress.samples, **dict(zip(usage, sums, strict=True))}
        return block | gpu_state(self.program.run.device)

    def evaluate(self) -> float:
        """Seconds of one evaluation, extrapolated from some of its batches if it is long."""
        return self._evaluate(self.evaluated_batches)

    def _evaluate(self, batches: int | None) -> float:
        """Seconds of one evaluation of ``batches`` batches, and of the others as in its second half.

        The second half has as many batches as each worker computes equally many of, for workers finish together. Where
        no workers are known it may be the rest of what workers have computed at once, in no time: there the others take
        as long as the mean of all ``batches``.
        """
        program, marks = self.program, list[float]()
        if batches is None or program.validation is None:
            batches, steady = 0, 1
        else:
            workers = program.validation.workers.num_workers
            steady = min(batches, max(1, batches // 2 // workers) * workers) if workers else batches
            part = program.validation.map_iterator(partial(self._timed_part, batches - steady, steady, marks))
            program = dataclasses.replace(program, validation=part)
        self._synchronize()
        began = time.perf_counter()
        evaluate(program)
        self._synchronize()
        seconds = time.perf_counter() - began
        if len(marks) == 3:  # on a rank that evaluates, and unless the task stops reading by itself
            seconds += (marks[1] - marks[0]) / steady * ((self.validation_batches or 0) - batches)
            seconds -= marks[2] - marks[1]
        # the same on all ranks, because it decides what they do next
        return self.ranks.all_reduce_max([seconds])[0]

    def _timed_part(self, first: int, steady: int, marks: list[float], iterator: Iterator[Any]) -> Iterator[Any]:
        """The first batches of ``iterator``. Appends to ``marks`` the times before and after the ``steady`` ones, and
        after the end of the workers, which are interrupted in their work here.
        """
        yield from islice(iterator, first)
        marks.append(self._time_of_device())
        yield from islice(iterator, steady)
        marks.append(self._time_of_device())
        del iterator  # ends the workers
        marks.append(time.perf_counter())

    def _time_of_device(self) -> float:
        """The time at which the device has computed all that was queued; other ranks are not waited for."""
        synchronize(self.program.run.device)
        return time.perf_counter()

    def _read_losses(self) -> list[float]:
        """Adds the losses since the last call to ``losses`` and returns them.

        Raises:
            RunError: one is not finite.
            PeerFailure: another rank's is not finite.
        """
        unread, self.unread = self.unread, []
        if not unread:
            return []
        losses = losses_to_host([loss for loss, _, _ in unread])
        finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        first = -int(self.ranks.all_reduce_max([-finite])[0])  # on any rank: a NaN reaches all ranks a step later
        if first < len(losses):
            _, epoch, batch = unread[first]
            where = format_position(self.program.run.progress.step - len(unread) + 1 + first, epoch, batch)
            if first < finite:
                raise PeerFailure(f"the loss of another rank is not finite at {where}")
            read_again = partial(checkpoint.read_again, self.program.source, self.epoch_start, epoch, batch)
            raise non_finite_loss_error(losses[finite], where, read_again)
        self.losses += losses
        return losses

    def _epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The training batches of an epoch; reads the losses at its start, as a run does.

        Stores the random state for ``read_again`` if the source can only read an epoch from its start.
        """
        self._read_losses()
        if not self.source.seekable:
            checkpoint.sync_rng(self.ranks, self.source)
            self.epoch_start = {"epoch": epoch, **checkpoint.rng_state(self.source)}
        return self.source.epoch(epoch, start)

    def _synchronize(self) -> None:
        synchronize(self.program.run.device)
        self._barrier()

    def _barrier(self) -> None:
        if not self.ranks.is_single_process:
            self.ranks.any(False)


def estimate(
    task: TaskRef,
    device: str,
    seed: int = 0,
    processes: int = 1,
    timeout: float | None = None,
    deadline: float | None = None,
    service: str = "hasten.benchmarking.arm:Arm",
) -> dict[str, Any]:
    """Estimates how long the unchanged training takes, from a few steps and one evaluation.

    ``timeout`` and ``deadline`` are those of ``start_workers``, ``service`` is the ``module:Class`` of the arm. Returns
    ``seconds`` (None if the training data has no length), and the ``plan`` of ``Arm.build``.
    """
    arguments = {"task": task, "methods": {}, "device": device, "seed": seed}
    with start_workers(processes, service, timeout, deadline, **arguments) as worker:
        plan = worker.call("build")
        if 0.0 < (plan["evaluation"] or 0.0) < LONG_STEP_S:  # a single one may have been disturbed
            plan["evaluation"] = min(plan["evaluation"], *(worker.call("evaluate") for _ in range(WARM_UP_ROUNDS)))
    if plan["samples_per_epoch"] is None:
        return {"seconds": None, "plan": plan}
    samples = plan["samples_per_epoch"] * plan["epochs"]
    evaluations = samples / (plan["evaluate_every"] or plan["samples_per_epoch"])
    steps = samples / plan["samples_per_step"]
    seconds = plan["start"] + plan["step"] * steps + (plan["evaluation"] or 0.0) * evaluations
    return {"seconds": seconds, "plan": plan}


class _RestartingSchedule:
    """A learning rate schedule that restarts after ``length`` of its steps, the end of the plan."""

    def __init__(self, schedule: Any, length: int):
        self.schedule, self.length, self.count = schedule, length, 0
        self.initial_state = dict(schedule.state_dict())

    def step(self) -> None:
        self.count += 1
        if self.count >= self.length:
            self.schedule.load_state_dict(dict(self.initial_state))
            self.count = 0
        else:
            self.schedule.step()


def _endless(program: Program, epoch: Callable[[int, int], Iterator[Any]]) -> Program:
    schedule, plan = program.schedule, program.plan
    lengths = {"step": plan.steps, "epoch": math.ceil(plan.epochs)}  # an arm steps no schedule that needs a metric
    if schedule is not None and (length := lengths.get(plan.schedule_interval)) is not None:
        check_schedule_state(program.schedule)
        schedule = _RestartingSchedule(schedule, length)
    plan = dataclasses.replace(program.plan, steps=None, epochs=float("inf"))
    train = dataclasses.replace(program.train, epoch=epoch)
    return dataclasses.replace(program, train=train, plan=plan, schedule=schedule)

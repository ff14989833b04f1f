"""Arms and probes of a comparison, used like ``benchmarking.arm.Arm``, of a script that runs its own loop.

The script runs in an operating-system process group of its own and waits between two calls. A script that ends is
started again; no time of a step or an evaluation includes the restart.
"""

from __future__ import annotations

import math
import time
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from hasten.benchmarking.fork_server import seconds_to_wait
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.engine.effects import NO_EFFECT
from hasten.engine.memory import MemoryPeak
from hasten.hosts.exactness import CHECK_RUNS, LATER_RUNS, seconds_of_check
from hasten.hosts.inside.sites import missing_sites
from hasten.hosts.process import ScriptProcess
from hasten.hosts.site_map import changed_numbers, known_sites, remember
from hasten.hosts.whole_run import seen_metric

if TYPE_CHECKING:
    from hasten.hosts.script_ref import ScriptRef

WARM_UP_STEPS, WARM_UP_ROUNDS = 3, 4
SLOW_STEP_S = 1.0  # from which one round is enough
MIN_BLOCK_STEPS = 5  # of a block that the end of the script cuts short
NEAR_S = 2.0  # of training, within which an evaluation has to come to be timed
OBSERVED_S = 1.0  # of training, in which the script's own code is observed
HANGING_S = 600.0  # without a step, after which a script hangs, where nothing else limits its time


def start_seconds(elapsed: float, ready: dict[str, Any], described: dict[str, Any]) -> float:
    """Seconds from the start of a script to the end of its first step, as on an idle machine with an empty cache.

    The CPU seconds of the process and of its workers plus those of torch.compile, but no more than the clock's
    ``elapsed``, since a busy machine delays imports and data; then adds what the compilations that were read from a
    cache had taken. ``ready`` is the session's first message (``process_cpu``), ``described`` its answer to "describe".
    """
    seconds = min(elapsed, ready["process_cpu"] + described["compile_seconds"])
    return seconds + described["cached_compile_seconds"]


class OwnLoopError(RunError):
    """Raised for a measurement that needs hasten's own training loop. The script is not asked, and not killed."""


class ScriptWorker:
    """Runs a script under a recipe. It is used like a ``fork_server.Worker``, but its methods run in this process.

    Args:
        script: The command.
        methods: Method -> options.
        device: Name of the device to assume until the model is seen.
        seed: Added to the script's own seeds.
        timeout: Seconds of silence after which the script counts as hanging; None: 600, or no limit with a deadline.
        deadline: Time of ``time.monotonic`` at which it is killed.
    """

    def __init__(
        self,
        script: ScriptRef,
        *,
        methods: dict[str, Any] | None = None,
        device: str = "cpu",
        seed: int = 0,
        timeout: float | None = None,
        deadline: float | None = None,
    ):
        self.script, self.methods, self.device, self.seed = script, methods or {}, device, seed
        self.timeout, self.deadline = timeout or (None if deadline else HANGING_S), deadline
        self.process: ScriptProcess | None = None
        self.on_progress: ProgressCallback = no_progress

    def call(
        self,
        method: str,
        *,
        timeout: float | None = None,
        on_progress: ProgressCallback = no_progress,
        **arguments: Any,
    ) -> Any:
        """Calls the method of this object that is named ``method``; ``timeout`` holds for this call.

        Any error but OwnLoopError kills the script. ``on_progress`` is called by methods that take long.
        """
        before, self.on_progress = self.timeout, on_progress
        self.timeout = self.timeout if timeout is None else timeout
        try:
            seconds_to_wait(self.timeout, self.deadline)
            return getattr(self, method)(**arguments)
        except OwnLoopError:
            raise
        except BaseException:
            self.kill()
            raise
        finally:
            self.timeout = before

    def suspend(self) -> None:
        if self.process is not None:
            self.process.suspend()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


class ScriptArm(ScriptWorker):
    """A script under a recipe, trained in blocks; its calls are those of ``Arm``. Times are in seconds."""

    needs_one_process = True  # several would have to be suspended together

    def __init__(self, script: ScriptRef, **arguments: Any):
        super().__init__(script, **arguments)
        self.samples_per_step, self.position, self.steps = 1, 0, 0
        self.total: int | None = None  # steps of the whole script, once one run of it has ended
        self.has_ended = False
        self.has_left = False  # a run that had ended, and not in error

    def build(self, with_evaluation: bool = True) -> dict[str, Any]:
        """Starts the script and warms it up. Returns the plan of ``Arm.build`` and ``facts``; RunError if a site of the
        watched run is missing or a method has no effect. A step counts as one sample if the batch size is unknown.
        """
        began = time.monotonic()
        ready = self._start()
        assert self.process is not None
        if self.needs_one_process:
            self.process.check_one_process()
        elapsed, described = time.monotonic() - began, self._ask("describe")
        seconds = start_seconds(elapsed, ready, described)
        known = known_sites(self.script) or {}
        if missing := missing_sites(known, described["sites"]):
            raise RunError(f"{missing}: this run of {self.script.name} is not the one that was watched")
        self.samples_per_step = described["samples_per_step"] or 1
        is_changed = "arguments" in known and changed_numbers(known["arguments"], described["arguments"])
        self.total = None if is_changed else known.get("total_steps")
        self._warm_up()
        effects = self._observe() if self.methods else {}
        rounds = [self.train(WARM_UP_STEPS)]
        while len(rounds) < WARM_UP_ROUNDS and rounds[0]["seconds"] < SLOW_STEP_S * WARM_UP_STEPS:
            rounds.append(self.train(WARM_UP_STEPS))
        step = min(block["seconds"] / block["samples"] for block in rounds) * self.samples_per_step
        known = remember(self.script, self._ask("describe")) if not self.methods and not self.has_ended else known
        length = self.total if is_changed else self.total or self._expected_steps(known)
        plan = self._plan(known, max(0.0, seconds - step), step, length)
        plan |= {} if with_evaluation else {"evaluation": None}
        return plan | {"effects": effects, "facts": described["facts"], "peak_memory": self.peak_memory()}

    def _expected_steps(self, known: dict[str, Any]) -> int | None:
        """Steps of a whole run by its arguments or code; None if unknown, or of a part: it has trained longer."""
        expected, seen = known.get("expected_steps"), max(self.steps, known.get("watched_steps") or 0)
        return expected if expected and expected >= seen else None

    def _plan(self, known: dict[str, Any], start: float, step: float, length: int | None) -> dict[str, Any]:
        """The part of the plan that follows from the site map ``known``, the seconds of the start and of a step, and
        the number of steps of a whole run (``length``; None if unknown).
        """
        every = known.get("evaluation_every")
        return {
            "start": start,
            "step": step,
            "sync_period": 1,
            "warmup_steps": 0,
            "evaluation": known.get("evaluation_seconds") if every and every * step < NEAR_S else None,
            "evaluation_seen": known.get("evaluation_seconds") if every else None,
            "check_seconds": [seconds_of_check(start, step, runs, known) for runs in (CHECK_RUNS, LATER_RUNS)],
            "samples_per_epoch": length and length * self.samples_per_step,
            "batch_size": self.samples_per_step,
            "samples": self.position,
            "samples_per_step": self.samples_per_step,
            "steps": length,
            "epochs": 1,
            "evaluate_every": every and every * self.samples_per_step,
        }

    def peak_memory(self) -> list[MemoryPeak]:
        """The peak memory of the script's process, a list of one; see ``Arm.peak_memory``."""
        return [self._ask("memory")]

    def train(self, count: int, timed: bool = False) -> dict[str, Any]:
        """Trains a block of ``count`` steps, at the end of the script as few as MIN_BLOCK_STEPS; see ``Arm.train``.

        The result also has ``evaluations``, the seconds of each evaluation meanwhile, ``untimed``, the seconds of all
        of them and of the restart of a script that had ended, and, if ``timed``, ``phases``: seconds by phase.
        RunError if the whole script has too few steps.
        """
        untimed, evaluations, enough = 0.0, list[float](), min(count, MIN_BLOCK_STEPS)
        for _ in range(2):
            if self.has_ended or (self.total is not None and self.total - self.steps < enough):
                began = time.monotonic()
                self._restart()
                untimed += time.monotonic() - began
            began = time.monotonic()
            block = self._ask("train", count=count, timed=timed)
            self._note_end(block)
            evaluations += block["evaluations"]
            if block["count"] >= enough:
                samples = block["count"] * self.samples_per_step
                self.position += samples
                losses = block.pop("losses")
                loss = fmean(losses) if losses else math.nan  # nan: the script makes its gradients without a loss
                if losses and self.methods and not math.isfinite(loss):
                    raise RunError(f"the loss of {self.script.name} is not finite after {self.steps} steps")
                block["untimed"] += untimed
                of_block = {"samples": samples, "position": self.position, "loss": loss, "evaluations": evaluations}
                return {**block, **of_block}
            untimed += time.monotonic() - began
        raise RunError(f"{self.script.name} trains only {self.total} steps, too few to be measured; train longer")

    def evaluate(self) -> float:
        """Trains on until an evaluation of the script has ended. Returns its seconds."""
        for _ in range(2):
            if self.has_ended:
                self._restart()
            before = self.steps
            answer = self._ask("evaluate")
            self._note_end(answer)
            self.position += (self.steps - before) * self.samples_per_step
            if answer["evaluation"] is not None:
                return answer["evaluation"]
        raise RunError(f"{self.script.name} did not evaluate again in two runs to its end")

    def _start(self) -> dict[str, Any]:
        if self.process is not None:
            if self.has_ended and not self.has_left:  # once: a command with further stages takes long to leave
                self.process.check_end()  # one that catches its errors ends as any other
                self.has_left = True
            self.process.close()
        sites = known_sites(self.script)
        self.process = ScriptProcess(self.script, self.methods, self.device, self.seed, sites, self.deadline)
        limit = None if self.deadline is not None else self.timeout
        self.has_ended = False
        ready = self.process.wait_until_trained(limit, self.deadline)
        self._note_end(ready)
        return ready

    def _restart(self) -> None:
        if self.total is not None and self.total < 1 + WARM_UP_STEPS + MIN_BLOCK_STEPS:
            raise RunError(f"{self.script.name} trains only {self.total} steps, too few to be measured; train longer")
        self._start()
        self._warm_up()

    def _warm_up(self) -> None:
        self._note_end(self._ask("train", count=WARM_UP_STEPS))

    def _observe(self) -> dict[str, str]:
        """Method -> evidence of its effect, observed in the second step from here; RunError if a method has none."""
        if self.has_ended:
            self._restart()
        answer = self._ask("observe")
        self._note_end(answer)
        if answer["no_effect"]:
            raise RunError("; ".join(f"{method} {NO_EFFECT}: {why}" for method, why in answer["no_effect"]))
        return answer["effects"]

    def _note_end(self, answer: dict[str, Any]) -> None:
        self.steps = answer["steps"]
        if answer.pop("ended", False):
            self.has_ended, self.total = True, self.steps

    def _ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        assert self.process is not None
        return self.process.ask(call, self.timeout, self.deadline, **arguments)


class WatchedArm(ScriptArm):
    """A ScriptArm whose plan comes from the watched run, without another start, if that timed enough steps."""

    def build(self, with_evaluation: bool = True) -> dict[str, Any]:
        """As ``ScriptArm.build``; from the site map if that has ``first_steps``."""
        known = known_sites(self.script) or {}
        first = known.get("first_steps")
        if not first:
            return super().build(with_evaluation)
        self.samples_per_step = known["samples_per_step"] or 1
        length = known.get("total_steps") or self._expected_steps(known)
        plan = self._plan(known, first["start"], first["step"], length)
        return plan | {"effects": {}, "facts": known["facts"], "peak_memory": [known["memory"]]}

    def evaluate(self) -> float:
        """Seconds of a new evaluation if the script is running; else those of an evaluation of the watched run."""
        return super().evaluate() if self.process else (known_sites(self.script) or {})["evaluation_seconds"]


class ScriptProbe(ScriptArm):
    """A ScriptArm with the calls of ``profiling.probe.Probe``; those that need hasten's loop raise OwnLoopError.

    Of several processes that train together, only the one with the first backward pass is measured; while it stands
    still, the others wait for it in their collectives.
    """

    needs_one_process = False

    def __init__(self, script: ScriptRef, *, methods: dict[str, Any], **arguments: Any):
        # the phases are timed at the seams: the methods that time or disable them are the engine's
        own = {name: options for name, options in methods.items() if not name.startswith("hasten.profiling")}
        super().__init__(script, methods=own, **arguments)
        self.step, self.seen = 1.0, dict[str, Any]()

    def build(self, with_evaluation: bool = True) -> dict[str, Any]:
        """As ``ScriptArm.build``, but ``evaluation`` in the plan is set however seldom the script evaluates."""
        plan = super().build(with_evaluation)
        self.step = plan["step"]
        return plan | self.evaluations()

    def evaluations(self) -> dict[str, Any]:
        """``evaluation`` and ``evaluate_every`` of the plan, as this run has shown them by now, else an earlier one."""
        seen = self._ask("describe")
        known = seen if seen["evaluation_every"] else known_sites(self.script) or {}
        every = known.get("evaluation_every")
        return {
            "evaluation": known.get("evaluation_seconds") if every else None,
            "evaluate_every": every and every * self.samples_per_step,
        }

    def _note_end(self, answer: dict[str, Any]) -> None:
        if answer.get("ended") and not self.has_ended:
            self._see_metric()
        super()._note_end(answer)

    def _see_metric(self) -> bool:
        """Reads the metric of this run into ``seen``, unless an earlier run has shown more values.

        Returns whether ``seen`` holds a metric or candidates.
        """
        assert self.process is not None
        seen = seen_metric(self.script, self.process, self._ask("describe"))
        self.seen = max(seen, self.seen, key=lambda one: [len(one.get(key, ())) for key in ("values", "candidates")])
        return bool(self.seen["name"] or self.seen["candidates"])

    def evaluate(self) -> float:
        """Seconds of an evaluation that was seen before; runs nothing."""
        return self.evaluations()["evaluation"]

    def timed_block(self, count: int) -> dict[str, Any]:
        """Trains ``count`` steps: the result of ``train``, and ``phases``: seconds by phase."""
        return self.train(count, timed=True)

    def block(self, count: int, disabled: str | None = None) -> dict[str, Any]:
        """Trains ``count`` steps; OwnLoopError if a phase is to be disabled, which only hasten's loop can do."""
        if disabled is not None:
            raise OwnLoopError(f"{self.script.name} owns its training loop, where no phase can be disabled")
        return self.train(count)

    def facts(self) -> list[str]:
        """The facts (keys of FACTS) that hold for the run."""
        described = self._ask("describe")
        return (described if self.methods else remember(self.script, described))["facts"]

    def operations(self, count: int) -> dict[str, Any]:
        """Trains at least ``count`` steps and OBSERVED_S: ``host_reads_per_step``, values that the host reads, and what
        the script's own code costs, ``synchronizations`` and ``functions``; see ``inside/code.py``.
        """
        if self.has_ended:
            self._restart()
        answer = self._ask("train", count=max(count, int(OBSERVED_S / self.step)), observes_code=True)
        self._note_end(answer)
        code = {name: answer[name] for name in ("synchronizations", "functions")}
        return code | {"host_reads_per_step": sum(read["per_step"] for read in code["synchronizations"])}

    def metric(self, seconds: float) -> dict[str, Any]:
        """The result of ``seen_metric``; trains on for up to ``seconds`` until there is a metric or a candidate."""
        until = time.monotonic() + seconds
        while not self._see_metric() and not self.has_ended and time.monotonic() < until:
            self._note_end(self._ask("train", count=max(1, int(seconds / 10 / self.step))))
        return self.seen

    def flops(self, dtype: str) -> dict[str, Any]:
        raise OwnLoopError(f"{self.script.name} owns its training loop, whose operations are not counted")

    def input(self, budget: float) -> dict[str, Any]:
        raise OwnLoopError("the loaders of a script are timed within its steps only: see the share of input above")

"""The session: hasten inside the process of a script, from ``import torch`` to the end.

Control is inverted. The script runs its own loop; at the end of a step that hasten asked for, the session answers, and
waits on its socket for what to do next, while the whole process stands still. Between two such steps it only counts.
The process that makes the first backward pass claims the session; in every other process it does nothing more.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import stat
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import torch

from hasten.core.errors import ConfigurationError
from hasten.hosts.inside.answers import ANSWERS, evaluation_seconds
from hasten.hosts.inside.block import TrainingBlock
from hasten.hosts.inside.checkpoints import CheckpointSeam
from hasten.hosts.inside.frameworks import WATCHED as FRAMEWORKS
from hasten.hosts.inside.frameworks import FrameworkLoop
from hasten.hosts.inside.loaders import LoaderSeam
from hasten.hosts.inside.metric_loggers import WATCHED as TRACKERS
from hasten.hosts.inside.models import ModelSeam, devices_of
from hasten.hosts.inside.offline import WATCHED as OFFLINE
from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside.seeds import seed_process
from hasten.hosts.inside.sites import Sites, missing_sites
from hasten.hosts.inside.steps import StepSeam
from hasten.hosts.inside.threads import threads_of, watch_threads
from hasten.hosts.inside_files import BEGUN, CHECKED, CLAIM, COPY, FAILURE, OUTPUT, RESUMED, RIVAL, SOCKET, SPEC
from hasten.utils.parsed_arguments import after_parsing
from hasten.utils.phase_timer import PhaseTimer

current: Session | None = None  # of this process; ``hasten.attach`` looks for it
ROOT_SEARCH_STEPS = 2  # in which the roots, the models that the script calls itself, are found by their first calls
MAX_SEARCHES = 20  # for roots of later folds: a script may make a model in every step


def start(directory: str, import_finder: Callable[[dict[str, list[Callable[[Any], None]]]], Any]) -> None:
    """Begins a session as ``spec.json`` in ``directory`` describes it; see ``write_spec`` in ``hosts/process.py``."""
    global current
    Path(directory, BEGUN).touch()
    current = Session(Path(directory), json.loads(Path(directory, SPEC).read_text(encoding="utf-8")))
    import_finder(current.watchers())


class Session:
    """One session: installs the seams, then answers the requests of the parent. ``spec``: see ``write_spec``."""

    def __init__(self, directory: Path, spec: dict[str, Any]):
        self.directory, self.spec = directory, spec
        self.is_real = spec["mode"] == "train"  # a training for real, no trial
        copy: str = os.environ.get(COPY) or spec["directory"]
        self.sites, self.phases = Sites(copy), PhaseTimer(torch.device(spec["device"]))
        self.began, self.imported = spec["began"], time.perf_counter()  # the command, and torch by its script
        self.logged = list[tuple[float, str, float, bool]]()
        self.connection: Any = None
        self.block: TrainingBlock | None = None  # that is running
        self.wants_evaluation, self.observer = False, None
        self.batches = Counter[str]()  # that were trained on, by the line of their loader
        self.epochs = dict[str, int]()  # numbers of epochs in the script's code, as they were seen first
        self.warned: set[str] = set()  # what was printed once
        self.searches, self.search_until = 1, ROOT_SEARCH_STEPS  # for roots; the step at which the last one ends
        self.arguments: dict[str, Any] = dict(spec["typed"])  # of the command, and those that the script parses
        self.composition: Any = None
        self.trains_without = ""  # reason why the recipe is not for this process
        if self.is_real and spec["sites"]:
            self.trains_without = self._other_main(spec["sites"].get("main"))
        try:
            if spec["methods"] and not self.trains_without:
                self.composition = self._compose()
        except Exception as error:
            self._fail(error)
        self.checkpoints: CheckpointSeam | None = None
        if not self.is_real:
            after_parsing(self._note_arguments)  # after those that methods change
            self.checkpoints = CheckpointSeam(directory / RESUMED, copy, spec["directory"])
        if spec["seed"] is not None:
            seed_process(spec["seed"], self.sites)
        self._install(spec["sites"] or {})
        self.declared: dict[str, str] = {}  # name of a metric that ``hasten.attach`` was given -> "min", "max" or ""
        self.loop = FrameworkLoop(self.steps, self.models)
        self.loop.new_model = self._after_new_model
        if self.composition:
            self.loop.in_float64 = self.composition.in_float64
            self.loop.no_torch_optimizer = self.composition.note_no_torch_optimizer
            self.composition.run.services.trainer = lambda: self.loop.trainer
        atexit.register(self._finish)

    def watchers(self) -> dict[str, list[Callable[[Any], None]]]:
        """By the name of a module: what is called with it once the script has imported it."""
        watchers = defaultdict[str, list[Callable[[Any], None]]](list)
        for name, watch in FRAMEWORKS.items():
            watchers[name].append(self._guarded(partial(watch, loop=self.loop)))
        if not self.is_real:
            for name, watch in TRACKERS.items():
                watchers[name].append(self._guarded(partial(watch, report=self._note_logged)))
            for name, watch in OFFLINE.items():
                if name not in sys.modules:  # else the injected file has called it
                    watchers[name].append(self._guarded(watch))
        return watchers

    def _other_main(self, known: str | None) -> str:
        """Why the recipe is not for this process: it runs another file of the command than the one of the search.

        Empty if it does not, if the command names the file, or if this program was given the file to run it.
        """
        main, given = self.sites.main(), [self.sites.relative(os.path.abspath(one)) for one in sys.argv]
        own = self.sites.relative(os.path.abspath(self.spec["file"])) if self.spec["file"] else None
        is_other = None not in (main, known) and known not in (main, *given) and main != own
        return f"the recipe was found with {known}; {main} trains without it" if is_other else ""

    def _compose(self) -> Any:
        from hasten.core.recipe import Recipe  # a watched script needs none of these
        from hasten.engine.registry import make_methods
        from hasten.hosts.inside.composition import Composition

        spec = self.spec
        evaluations = (spec["sites"] or {}).get("evaluations") or [{"no_grad": False}]  # none was seen yet
        records_gradients, seed = not all(entry["no_grad"] for entry in evaluations), spec["seed"] or 0
        methods = make_methods(Recipe(spec["methods"]))
        composition = Composition(methods, spec["device"], seed, records_gradients, spec["name"], spec["steps"])
        composition.enter_process(threads_of(spec["sites"]))
        return composition

    def _install(self, known: dict[str, Any]) -> None:
        composition = self.composition
        watch_threads(self.sites, bool(composition) and composition.sets_threads)
        acts_on = composition.hooks if composition else set()
        self.steps = StepSeam(self.sites, self.phases)
        wrap_call = None
        if composition:
            wrap_call = self._guarded(composition.wrap_call, lambda _, call_of_root: call_of_root())
        self.models = ModelSeam(self.sites, self.phases, self.steps, wrap_call)
        self.models.waits_for_gpu = not self.is_real
        if not self.is_real and not stat.S_ISREG(os.fstat(1).st_mode):  # a pipe, as to tee
            self.models.printed = lambda: os.stat(self.directory / OUTPUT).st_size
        roles = {entry["site"]: entry["role"] for entry in known.get("loaders", ())}
        source_of = self._guarded(composition.source_of) if "data" in acts_on else None
        self.loaders = LoaderSeam(self.sites, self.phases, source_of, roles)
        self.loaders.is_evaluating = lambda: self.models.began is not None
        steps = self.steps
        steps.on_first_backward, steps.on_backward = self._claim, self._after_backward
        steps.on_step, steps.on_stop = self._after_step, self._stop
        steps.on_optimizer = self._after_new_optimizer
        if composition:
            composition.refuse = self._refuse_gradients
            steps.on_foreign_closure = self._refuse_closure
            steps.wrap_backward = composition.wrap_backward
            if "backward" in acts_on:
                for name in ("clip_grad_norm_", "clip_grad_value_"):
                    replaces(torch.nn.utils, name)(self._refuse_clipping)
            if {"optimizer", "model"} & acts_on:
                steps.before_first_update(self._guarded(composition.first_step))
            if composition.wraps_updates:
                steps.wrap_update = composition.update_with

    def _guarded(self, function: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A function that catches the errors of ``function``: they are hasten's or a method's, and end the process.

        A training for real that has made steps continues: the error is printed, and the result is that of ``instead``,
        or None; both leave what the script has made as it is.
        """

        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:
                if not self.is_real or not self.steps.count:
                    self._fail(error)
                self._warn_once(f"{_text(error)}; {self.sites.line()} continues without this method")
                return instead(*args) if instead else None

        return guarded

    def _warn_once(self, text: str) -> None:
        """Prints one line on standard error, once for each text; only in a training for real."""
        if text not in self.warned:
            self.warned.add(text)
            print(f"hasten: {' '.join(text.split())}", file=sys.stderr, flush=True)

    def _fail(self, error: Exception) -> NoReturn:
        """Ends the process; the reason goes to the parent, or to standard error in a training for real."""
        if self.is_real:
            self._fail_with(_text(error))
        failure = {"text": _text(error), "refused": type(error).__name__ == "ConfigurationError"}
        (self.directory / FAILURE).write_text(json.dumps(failure))
        os._exit(2)

    def _note_arguments(self, parsed: Any) -> None:
        for name, value in getattr(parsed, "__dict__", {}).items():
            is_data = isinstance(value, (int, float, str, type(None)))
            self.arguments[name] = value if is_data else type(value).__name__

    def _note_logged(self, name: str, value: float) -> None:
        evaluates = self.models.began is not None
        self.logged.append((time.perf_counter() - self.began, name, value, evaluates))
        self.models.has_logged |= evaluates

    # ── what the script calls through ``hasten.attach`` ──────────────────────────────────────────

    def attach(self, model: Any, optimizer: Any, loader: Any) -> Any:
        """Notes the parts of the script's own loop; returns what it must iterate over in place of ``loader``."""
        for one in model if isinstance(model, (list, tuple)) else [model]:
            self.models.attach(one)
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        inner = [getattr(one, "optimizer", one) for one in optimizers]  # of a wrapper, as accelerate and Fabric make
        self.steps.leading |= {id(one) for one in (*optimizers, *inner) if one is not None}
        return self.loaders.attach(loader)

    def report(self, name: str, value: Any, higher_is_better: bool | None) -> None:
        """Notes the value of a metric that the script has measured on held-out data."""
        self.declared[name] = "" if higher_is_better is None else "max" if higher_is_better else "min"
        self.loop.report(name, value)

    def monitor(self) -> tuple[str, str] | None:
        """The metric that the script names, by a framework or as the only one by ``hasten.attach``."""
        with_direction = {name: direction for name, direction in self.declared.items() if direction}
        declared = list((with_direction or self.declared).items())
        return declared[0] if len(declared) == 1 else self.loop.monitor

    # ── at the seams ─────────────────────────────────────────────────────────────────────────────

    def _claim(self) -> None:
        """At the first backward pass of a process in a trial: connects to the parent, unless another one was first."""
        if self.is_real:
            return
        try:
            os.close(os.open(self.directory / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            self.connection = Client(str(self.directory / SOCKET), family="AF_UNIX")
            self._finish_before_exit()
        except OSError:
            (self.directory / f"{RIVAL}-{os.getpid()}").touch()
            self.steps.active = False
            self.models.stop_searching()

    def _after_backward(self) -> None:
        if (line := self.loaders.on_backward()) is not None:
            self.batches[line] += 1
        if self.models.began is not None:
            self.models.on_backward()

    def _after_step(self) -> None:
        models, count = self.models, self.steps.count
        if count == 1:
            self.sites.early = False
            models.find_uncalled()
            if self.checkpoints is not None:
                self.checkpoints.end_loading()
        if count == self.search_until:
            models.stop_searching()
            if count == ROOT_SEARCH_STEPS and not self.is_real:
                self._forget_teachers()
                models.watch_copies()
            if self.composition:
                self.composition.has_trained = True
        if self.wants_evaluation and len(models.evaluations) > self.evaluations_before:
            self.steps.remaining = 1
        if count >= self.search_until and not self.wants_evaluation:
            self.steps.on_step = None

    def _forget_teachers(self) -> None:
        self.models.forget_teachers()
        seen = len(self.models.evaluations)
        self.evaluations_before = min(self.evaluations_before, seen)
        if self.block:
            self.block.evaluations = min(self.block.evaluations, seen)

    def _after_new_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Searches for the root of an optimizer made after the first steps, as in each fold; MAX_SEARCHES times."""
        if not self._is_in_training():
            return
        if self.composition:
            self.composition.expected = optimizer
        if not self.models.adopted:
            self._search_again({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})

    def _after_new_model(self) -> None:
        """Searches for the root that a framework trains from here on, as in each fold."""
        if self._is_in_training():
            self._search_again(None)

    def _is_in_training(self) -> bool:
        is_watched = self.composition is not None or not self.is_real
        return self.steps.active and self.steps.count >= ROOT_SEARCH_STEPS and is_watched

    def _search_again(self, parameters: set[int] | None) -> None:
        if self.searches < MAX_SEARCHES:
            self.searches += 1
            self.search_until, self.steps.on_step = self.steps.count + ROOT_SEARCH_STEPS, self._after_step
            self.models.search_again(parameters)

    def _refuse_closure(self, optimizer: torch.optim.Optimizer) -> None:
        self.composition.gave_up = True
        what = f"{type(optimizer).__name__}.step(closure) computes gradients at other weights"
        self._refuse_gradients(ConfigurationError(f"{what}: leave out methods that change gradients"))

    def _refuse_clipping(self, *_: Any, **__: Any) -> NoReturn:
        """Ends the process where the script clips gradients that hold the scale of the loss until the update."""
        what = f"{self.spec['name']} clips its gradients before the update, where float16 has them scaled"
        ended = "; train without it from the last checkpoint" if self.is_real and self.steps.count else ""
        self._fail(ConfigurationError(f"{what}; leave float16 out{ended}"))

    def _refuse_gradients(self, error: Exception) -> None:
        """Ends a trial, or warns, where methods that change gradients cannot know which ones they should change."""
        if not self.is_real:
            self._fail(error)
        self._warn_once(f"{_text(error)}; it does not act from here on")

    def _stop(self) -> None:
        """At the end of a step that the parent asked for: answers, and waits for the next request."""
        if self.is_real and self.observer is None:
            self._check_sites()
            return self._begin_observe() if self.composition else None
        if self.observer is not None and not self.observer.running and self.observer.checks:
            self.observer.begin()
            self.steps.remaining = 1
            return None
        if self.is_real:
            return self._report_no_effect()
        self._answer(self._result())
        return self._serve()

    def _finish(self) -> None:
        """At the end of the script: answers the request that it did not finish. A crash is left to the exit code."""
        if self.connection is None or not self.steps.active or getattr(sys, "last_value", None) is not None:
            return
        self.models.end_evaluation()
        self._answer(self._result() | {"ended": True})
        self._serve()

    def _finish_before_exit(self) -> None:
        """Lets a script that ends by ``os._exit``, as a forked process does, answer as any other at its end."""
        own, owner = os._exit, os.getpid()

        def exit_after_finish(status: int) -> NoReturn:
            os._exit = own
            if status == 0 and os.getpid() == owner:
                self._finish()
            own(status)

        os._exit = exit_after_finish

    # ── requests of the parent ───────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        """Answers requests until one lets the script continue. Ends the process if the parent is gone."""
        while True:
            try:
                request = json.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            name = request.pop("call")
            if name == "end":
                return
            if name in ("train", "observe", "evaluate"):
                getattr(self, f"_begin_{name}")(**request)
                return
            try:
                self._answer(ANSWERS[name](self, **request))
            except Exception as error:
                self._answer({"error": f"{type(error).__name__}: {error}"})

    def _answer(self, result: dict[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(result).encode())
        except OSError:  # the parent is gone
            os._exit(0)

    def _begin_train(self, count: int, timed: bool = False, observes_code: bool = False) -> None:
        self.steps.remaining, self.evaluations_before = count, len(self.models.evaluations)
        self.block = TrainingBlock(self, timed, observes_code)

    def _begin_observe(self) -> None:
        """Observes the effects of the methods in the second step from here; the first one is another warm-up."""
        self.observer = self.composition.observer(*self.seen()) if self.composition else None
        self.steps.remaining = 1

    def seen(self) -> tuple[bool, bool]:
        """Whether the script has read a DataLoader, and whether an optimizer has updated."""
        return self.loaders.has_loader, bool(self.steps.optimizers) or self.loop.has_optimizer

    def _begin_evaluate(self) -> None:
        self.wants_evaluation, self.evaluations_before = True, len(self.models.evaluations)
        self.steps.remaining, self.steps.on_step = -1, self._after_step  # until an evaluation has ended

    def _result(self) -> dict[str, Any]:
        """The answer to the request that is running: the block, the evaluation or what was observed."""
        usage, of_children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        # workers that have ended, such as those that have read all samples, ran side by side at best
        of_workers = (of_children.ru_utime + of_children.ru_stime) / len(os.sched_getaffinity(0))
        seconds = usage.ru_utime + usage.ru_stime + of_workers
        result: dict[str, Any] = {"steps": self.steps.count, "process_cpu": seconds}
        result["group"] = os.getpgrp()  # torchrun starts each rank in a session of its own
        result["world_size"] = _world_size()
        if self.block is not None:
            result |= self.block.end()
            self.block = None
        if self.observer is not None:
            if self.observer.running:
                self.observer.end()
            result |= {"effects": self.observer.evidence, "no_effect": self.observer.run.no_effect}
            self.observer = None
        if self.wants_evaluation:
            self.wants_evaluation = False
            result["evaluation"] = next(iter(evaluation_seconds(self, self.evaluations_before)), None)
        return result

    def device(self) -> torch.device:
        """The device of the script's first parameter; the assumed one before there is one."""
        return next(iter(devices_of(self.models.roots)), self.phases.device)

    def synchronize(self) -> None:
        """Waits for the current GPU and for all that hold parameters."""
        if torch.cuda.is_initialized():
            for device in {torch.device("cuda", torch.cuda.current_device()), *devices_of(self.models.roots)}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    def _check_sites(self) -> None:
        """In a training for real, after its first step: ends the process if a site of the recipe is missing.

        A process that comes after one with all sites is another stage of the command, and continues.
        """
        if self.trains_without:
            return self._warn_once(self.trains_without)
        missing, checked = missing_sites(self.spec["sites"] or {}, self.sites.records), self.directory / CHECKED
        if not missing:
            checked.touch()
        elif checked.exists():
            self._warn_once(f"{missing}; {self.sites.main()} trains with a recipe that was not tuned for it")
        else:
            remedy = "tune this script, or give the recipe without the sites.json beside it"
            self._fail_with(f"the recipe is for another script: {missing}; {remedy}")

    def _report_no_effect(self) -> None:
        """In a training for real: prints the methods that had no effect in the step that was observed."""
        assert self.observer is not None, "only a training for real has it"
        if self.observer.running:
            self.observer.end()
        for name, why in self.observer.run.no_effect:
            print(f"hasten: {name} has no effect: {why}", file=sys.stderr)

    def _fail_with(self, text: str) -> NoReturn:
        print(f"hasten: {text}", file=sys.stderr, flush=True)
        os._exit(2)


def _text(error: Exception) -> str:
    """What an error says; those of hasten are complete sentences."""
    name = type(error).__name__
    hook = getattr(error, "hook", "")
    own = name in ("ConfigurationError", "RunError")
    return str(error) if own else f"{hook} failed: {name}: {error}" if hook else f"{name}: {error}"


def _world_size() -> int:
    """The number of processes that train together, as torch.distributed knows it."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

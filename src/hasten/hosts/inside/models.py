"""The model seam: finds the models that a script trains, wraps their calls, and tells evaluation from training.

A root is a module that the script calls and that is part of no other module. Its call goes through the slot that
``Module.compile()`` uses: outermost calls only, no hook, nothing on submodules, and nothing that is pickled or copied.
"""

import functools
import gc
import os
import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hasten._torch_compat import get_module_call, get_set_module_call, intercept_module_calls, set_module_call
from hasten.hosts.inside.sites import Sites
from hasten.hosts.inside.steps import StepSeam
from hasten.utils.phase_timer import PhaseTimer

STDOUT = 1  # file descriptor; a file, in a trial
# (root, function that returns its call) -> the call under methods, which may set another one
WrapCall = Callable[[nn.Module, Callable[[], Callable[..., Any]]], Callable[..., Any]]


class ModelSeam:
    """Finds the roots at their first calls; intercepts the calls of all modules until ``stop_searching``.

    Args:
        sites: Receives each root with the line that called it first.
        phases: Receives the time of the calls in training.
        steps: Counts the steps; an evaluation counts from the end of the last one.
        wrap: Asked once for each root, before its first call.

    Attributes:
        roots: The roots so far, in the order of their first calls.
        evaluated_seconds: Seconds of all evaluations so far.
        evaluations: (step, seconds) of each evaluation.
        records_gradients: Whether an evaluation recorded gradients.
        trained_in_eval_mode: Ids of roots that steps call in eval mode, such as the network of a perceptual loss or
            the teacher of a distillation; that mode is then no sign of evaluation.
    """

    def __init__(self, sites: Sites, phases: PhaseTimer, steps: StepSeam, wrap: WrapCall | None = None):
        self.sites, self.phases, self.steps, self.wrap = sites, phases, steps, wrap
        self.roots: list[nn.Module] = []
        self.known: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by id
        self.attached: set[int] = set()  # ids of the roots that the script has named
        self.adopted: dict[int, Callable[..., Any]] = {}  # what a framework calls in place of a root
        self.evaluated_seconds, self.evaluations = 0.0, list[tuple[int, float]]()
        self.records_gradients, self.trained_in_eval_mode = False, set[int]()
        self.marks: list[tuple[float, int, int, bool]] = []  # (time, step, bytes printed, an evaluation begins)
        self.printed: Callable[[], int] = lambda: os.fstat(STDOUT).st_size  # bytes so far
        self.has_logged = False  # to a tracker, in the last evaluation
        self.began: float | None = None  # of the evaluation that is running
        self.ended = 0.0  # of its last call
        self.recording: list[nn.Module] = []  # the models that it has called with gradients
        self.on_gpu: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # the same two moments of the GPU's work
        self.device = torch.device("cpu")  # of the model that is evaluated
        self.waits_for_gpu = True  # at the begin and the end of an evaluation, to know its time
        self.is_symbolic: Callable[[Any, Any], bool] = lambda args, kwargs: False  # of a call that computes nothing
        self.wanted: set[int] | None = None  # ids of the parameters of which a later root must have some
        self.replaces_roots = False  # whether the next root takes the place of those so far
        self._search(True)

    def _search(self, searches: bool) -> None:
        self.searches = searches
        intercept_module_calls(self._outermost_call if searches else None)

    def stop_searching(self) -> None:
        """Ends the search: from here on, no further root is found by its calls."""
        self._search(False)
        self.wanted = set()

    def search_again(self, parameters: set[int] | None) -> None:
        """Looks for a model that is made in the middle of a training, as for each fold of several.

        It takes the place of the roots so far, which must not be kept alive. ``parameters``: ids of those of its
        optimizer, of which it must have some; None if they are not known yet.
        """
        self.wanted = None if parameters is None else (self.wanted or set()) | parameters
        self.replaces_roots = True
        self._search(True)

    def on_backward(self) -> None:
        """Called after an outermost backward pass during an evaluation.

        The training continues: what was evaluated was the teacher of a distillation, or is itself trained in eval mode.
        """
        trained = {id(model) for model in self.recording if any(p.grad is not None for p in model.parameters())}
        if not trained:
            return self.end_evaluation()
        self.trained_in_eval_mode |= trained
        self.began = self.on_gpu = None
        self.recording.clear()
        if self.marks and self.marks[-1][-1]:
            self.marks.pop()  # of what was no evaluation

    def watch_copies(self) -> None:
        """Notes evaluations of copies of a root, such as moving averages of its weights, that no step has called."""

        def shapes(module: nn.Module) -> list[Any]:
            return [None if is_lazy(parameter) else parameter.shape for parameter in module.parameters()]

        parts = {id(part) for root in self.roots for part in root.modules()}
        of_roots = [shapes(root) for root in self.roots]
        for outer in _outermost_modules():
            inner: Any = getattr(outer, "module", None)  # of an AveragedModel
            for module in (outer, inner) if isinstance(inner, nn.Module) else (outer,):
                if id(module) not in {*self.known, *parts} and shapes(module) in of_roots:
                    call = self._with_evaluation_timing(module, get_module_call(module))
                    vars(call)["of_copy"] = get_set_module_call(module)
                    set_module_call(module, call)

    def forget_teachers(self) -> None:
        """Takes a root in eval mode that each step so far has called, and none has trained, for a part of the step."""
        frozen = [root for root in self.roots if not root.training and all(p.grad is None for p in root.parameters())]
        if frozen and {0, 1} <= {step for step, _ in self.evaluations}:
            self.trained_in_eval_mode |= {id(root) for root in frozen}
            self.evaluations.clear()
            self.marks.clear()
            self.sites.records.pop("evaluations", None)

    @property
    def trains_in_eval_mode(self) -> bool:
        """Whether no root is left whose calls in eval mode are evaluations."""
        return bool(self.roots) and all(id(root) in self.trained_in_eval_mode for root in self.roots)

    def find_uncalled(self) -> None:
        """Adds the models that are trained but were not called as a whole: some parameter has a gradient."""
        outermost = [part for module in _outermost_modules() for part in self._without_roots(module)]
        for module in outermost:
            if id(module) not in self.known and any(p.grad is not None for p in module.parameters()):
                self.known[id(module)] = module
                self.roots.append(module)
                self.sites.note("models", module, called=False)

    def _without_roots(self, module: nn.Module) -> list[nn.Module]:
        """The module; of a container of attached ones, those and the parts that hold none."""
        if id(module) in self.attached or not self._contains_attached(module):
            return [module]
        return [part for child in module.children() for part in self._without_roots(child)]

    def _contains_attached(self, module: nn.Module) -> bool:
        return bool(self.attached) and any(id(part) in self.attached for part in module.modules())

    def _outermost_call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        intercept_module_calls(None)  # the calls inside are of parts, and compilation must trace nothing of hasten
        try:
            if id(module) not in self.known and not self.is_symbolic(args, kwargs):
                self._add_if_root(module)
            return get_module_call(module)(*args, **kwargs)
        finally:
            if self.searches:
                intercept_module_calls(self._outermost_call)

    def adopt(self, root: nn.Module, step: str) -> None:
        """Records a root of which the framework calls ``step`` for a training step, and wraps that method of it."""
        self.stop_searching()
        if id(root) not in self.adopted:  # though a search for a learning rate may have trained it before
            if self.steps.count:  # those of an earlier fold must not be kept alive
                self.adopted.clear()
                self.roots = [one for one in self.roots if one is root]
            self._drop_parts(root)
            self.known[id(root)] = root
            if all(root is not one for one in self.roots):
                self.roots.append(root)
                self.sites.note("models", root, called=True)
            call = getattr(root, step)
            under_methods = self.wrap(root, lambda: getattr(root, step)) if self.wrap else call
            adopted: Any = functools.wraps(call)(self._with_evaluation_timing(root, under_methods))
            adopted.__wrapped__ = getattr(call, "__wrapped__", call)  # Lightning looks through one decorator
            self.adopted[id(root)] = adopted
        root.__dict__[step] = self.adopted[id(root)]

    def _add_if_root(self, module: nn.Module) -> None:
        if self.wanted is not None and not any(id(parameter) in self.wanted for parameter in module.parameters()):
            return
        self.known[id(module)] = module
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if any(module is root for root in _outermost_modules()) and not self._contains_attached(module):
            self._add_root(module)

    def attach(self, module: nn.Module) -> None:
        """Records a module that the script names by ``hasten.attach`` as a root, even if it is a part of another."""
        self.attached.add(id(module))
        if not any(module is root for root in self.roots):  # known are also those that were called and rejected
            self.known[id(module)] = module
            self._add_root(module)

    def _add_root(self, module: nn.Module) -> None:
        if self.replaces_roots:
            self.roots.clear()
            self.replaces_roots = False
        elif not self.steps.count:
            self._drop_parts(module)
        self.roots.append(module)
        lines = [entry["site"].rpartition("#")[0] for entry in self.sites.records.get("models", ())]
        if self.sites.early or self.sites.line() not in lines:  # the models of all folds are one in the code
            self.sites.note("models", module, called=True)
        own: Any = get_set_module_call(module)
        before = getattr(own, "of_copy", own)  # it was taken for a copy, such as the model of a later fold
        set_module_call(module, before)
        call = self.wrap(module, lambda: get_module_call(module)) if self.wrap else get_module_call(module)
        under_methods = self._with_evaluation_timing(module, call)
        vars(under_methods)["before"] = before
        set_module_call(module, under_methods)

    def _drop_parts(self, module: nn.Module) -> None:
        """Drops the roots that are parts of a later one, or that one itself, such as a backbone that the script has
        called to see its shapes.
        """
        parts = {id(part) for part in module.modules()} - self.attached
        for root in [root for root in self.roots if id(root) in parts]:
            self.roots = [other for other in self.roots if other is not root]
            self.sites.forget("models", root)
            call: Any = get_set_module_call(root)
            if hasattr(call, "before"):  # else the script has compiled it since
                set_module_call(root, call.before)

    def _with_evaluation_timing(self, root: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        phases = self.phases

        def forward(*args: Any, **kwargs: Any) -> Any:
            trains = root.training or kwargs.get("training") is True  # Keras trains single batches in eval mode
            if not trains and id(root) not in self.trained_in_eval_mode:
                return self._evaluate(root, call, args, kwargs)
            if self.began is not None and trains and torch.is_grad_enabled():  # else it takes part in the evaluation
                self.end_evaluation()
            if not phases.running:
                return call(*args, **kwargs)
            began = phases.now()
            result = call(*args, **kwargs)
            phases.record("forward", began)
            return result

        return forward

    def _evaluate(self, root: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.began is None:
            self.begin_evaluation()
        if torch.is_grad_enabled():
            self.records_gradients = True
            if all(model is not root for model in self.recording):
                self.recording.append(root)
        result = call(*args, **kwargs)
        if self.on_gpu:
            self.on_gpu[1].record(torch.cuda.current_stream(self.device))
        self.ended = time.perf_counter()
        return result

    def begin_evaluation(self) -> None:
        """Notes that an evaluation has begun, at the end of the last step; on a GPU, when that has computed it."""
        now = time.perf_counter()
        self.began = self.steps.last_ended or now
        is_frequent = bool(self.evaluations) and self.steps.count <= self.evaluations[-1][0] + 1
        self.device = next((p.device for root in self.roots for p in root.parameters()), torch.device("cpu"))
        if self.waits_for_gpu and self.device.type == "cuda" and not is_frequent:  # such as a teacher in eval mode
            torch.cuda.synchronize(self.device)
            self.began += time.perf_counter() - now
            with torch.cuda.device(self.device):
                self.on_gpu = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for event in self.on_gpu:
                event.record(torch.cuda.current_stream(self.device))
        if not is_frequent:
            site = {"site": f"{self.sites.line()}#1", "no_grad": not torch.is_grad_enabled()}
            sites = self.sites.records.setdefault("evaluations", [])
            if site["site"] not in [one["site"] for one in sites]:
                sites.append(site)
        self._mark(begins=True)

    def end_evaluation(self, now: bool = False) -> None:
        """Counts the evaluation that is running, if there is one, as ended with its last call, or ``now``."""
        if self.began is None:
            return
        if now:
            self.ended = time.perf_counter()
            if self.on_gpu:
                self.on_gpu[1].record(torch.cuda.current_stream(self.device))
        self.steps.last_ended = self.ended  # another one before the next step begins here
        seconds = self.ended - self.began
        if self.on_gpu:
            begin, end = self.on_gpu
            end.synchronize()
            seconds, self.on_gpu = max(seconds, begin.elapsed_time(end) / 1000), None
        self.began = None
        self.recording.clear()
        self.evaluated_seconds += seconds
        self.evaluations.append((self.steps.count, seconds))
        self._mark(begins=False)

    def _mark(self, begins: bool) -> None:
        """Notes how much the script had printed when an evaluation began, or ended: its metric is printed between."""
        printed = self.printed()
        was_silent = [mark[2:] for mark in self.marks[-2:]] == [(printed, True), (printed, False)]
        if begins and was_silent and not self.has_logged:
            del self.marks[-2:]  # of an evaluation without a metric, such as that of a teacher in each step
        self.has_logged = self.has_logged and not begins
        self.marks.append((time.perf_counter(), self.steps.count, printed, begins))


def devices_of(roots: Iterable[nn.Module]) -> list[torch.device]:
    """The devices that hold parameters, each once, that of the first parameter first."""
    return list(dict.fromkeys(parameter.device for root in roots for parameter in root.parameters()))


def _outermost_modules() -> list[nn.Module]:
    """All modules of the process that are part of no other one."""
    # not isinstance, which would run the properties of objects that are made lazily
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    children = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in children]


def _children(module: nn.Module) -> list[nn.Module]:
    try:
        layers_of_keras = getattr(type(module), "_flatten_layers", None)  # torch does not register them as children
        return [*module.children(), *(layers_of_keras(module, include_self=False) if layers_of_keras else ())]
    except AttributeError:  # its constructor has not run yet
        return []

"""``torch.compile``: the forward and backward pass as fused kernels."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext, WrapOrder, option
from hasten._torch_compat_compile import (
    cached_compile_seconds,
    compile_in_place,
    compile_seconds,
    compiler_backend,
    graph_break_of,
    graph_break_reasons,
)
from hasten.core.errors import format_error
from hasten.utils.blocks import repeated_blocks
from hasten.utils.copy_model import copy_model

MODES = ("default", "max-autotune-no-cudagraphs")  # the others record CUDA graphs, which the method cuda_graph does
# torch sets its cache directories in the environment while compiling
COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")
MAX_LISTED_BREAKS = 3  # graph breaks that the evidence lists
SCRIPT_EDIT = """\
torch.compiler.config.wrap_top_frame = True  # else Module.compile skips nn.Sequential (before PyTorch 2.15)
{model}.compile([mode={mode}][, backend={backend}])"""


@dataclass(frozen=True)
class Compile(Method):
    """Compiles the model in place, so that the names of its parameters stay the same.

    ``nn.Module.compile`` would compile nothing where the outermost ``forward`` is torch's own, as in ``nn.Sequential``
    (before PyTorch 2.15). Compiling takes seconds to minutes at the first step; a short run never earns them back. The
    exported model is the original, uncompiled module.
    """

    card = Card(
        summary="the model compiled into fused kernels by torch.compile",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Ansel et al. 2024, PyTorch 2 (ASPLOS); https://docs.pytorch.org/docs/stable/torch.compiler.html",
        gain=(1.0, 1.3),
        gain_when="GPU runs, or long ones on a CPU, that earn back the seconds of compiling; small models get slower",
        accelerates={"forward", "backward"},
        on_gpu={"composition": True},
        requires={"monolithic_forward"},
        order=WrapOrder.LATE,
        high_setup_cost=True,
        presets=({}, {"scope": "blocks"}, {"mode": "max-autotune-no-cudagraphs"}),
        script_edit={"model": SCRIPT_EDIT},
    )

    scope: str = option("model", one_of=("model", "blocks"))  # what is compiled: all of it, or each repeated block
    mode: str = option("default", one_of=MODES)  # as in torch.compile
    backend: str = "inductor"  # as in torch.compile

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        @contextmanager
        def without_compiler_variables() -> Generator[None]:
            before = set(os.environ)
            try:
                with context():
                    yield
            finally:
                for name in [name for name in os.environ if name.startswith(COMPILER_VARIABLES) and name not in before]:
                    del os.environ[name]

        return without_compiler_variables

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        parts = [model] if self.scope == "model" else repeated_blocks(model)
        if not parts:
            return run.report_no_effect(self, "the model has no sequence of blocks of one type; use scope=model", model)
        recorder = GraphRecorder(compiler_backend(self.backend, self.mode))
        compile_in_place(parts, recorder.compile)
        run.observe_effect(self, recorder.observe)
        return model

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if self.scope == "model":
            return copy.copy(model)  # shares the parameters; copying a module drops its compiled call
        return copy_model(model, shared=[*model.parameters(), *model.buffers()])  # of blocks inside, too


class GraphRecorder:
    """A compiler backend that records the graphs that ``backend`` compiles, and why each of them ends."""

    def __init__(self, backend: Callable[[torch.fx.GraphModule, list[Any]], Any]):
        self.backend, self.graphs = backend, 0
        self.seconds_before, self.cached_before = compile_seconds(), cached_compile_seconds()
        self.reasons_before = graph_break_reasons()
        self.breaks: dict[str, None] = {}  # in order, without repetition
        self.failures: dict[str, None] = {}

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compiles one graph. One that the backend cannot compile runs as it is, as in eager mode."""
        try:
            compiled = self.backend(graph, inputs)
        except Exception as error:
            self.failures[format_error(error)] = None
            return graph.forward
        self.graphs += 1
        if found := graph_break_of(graph):
            reason, file, line = found
            self.breaks[f"{Path(file).name}:{line}: {reason}"] = None
        return compiled

    def observe(self) -> Generator[None, None, str]:
        """The effect check: how many graphs there are once the step is done."""
        yield
        if not self.graphs:
            unknown = "it was given no call, as under torch.compiler.disable, or states no reason"
            why = "; ".join(self.failures or graph_break_reasons() - self.reasons_before) or unknown
            raise NoEffectError(f"torch.compile {torch.__version__} compiled no graph of this model: {why}")
        breaks = [*self.breaks, *(f"a graph that is not compiled: {failure}" for failure in self.failures)]
        spent, cached = compile_seconds() - self.seconds_before, cached_compile_seconds() - self.cached_before
        text = f"{self.graphs} graph{'s' * (self.graphs > 1)} compiled in {spent + cached:.1f} s"
        if cached:  # by an earlier run on this machine; a run on another one starts with an empty cache
            text += f" ({spent:.1f} s with the graphs that were in the cache)"
        if not breaks:
            return f"{text}, no graph break"
        listed = breaks[:MAX_LISTED_BREAKS]
        if len(breaks) > len(listed):
            listed = [*listed, f"{len(breaks) - len(listed)} more"]
        return f"{text}, {len(breaks)} graph break{'s' * (len(breaks) > 1)} ({'; '.join(listed)})"

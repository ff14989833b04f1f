"""``torch.compile``: the forward and backward pass as fused kernels."""

import copy
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import ContextFactory

MODES = ("default", "max-autotune-no-cudagraphs")  # the others record CUDA graphs, which the method cuda_graph does
COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")  # torch sets its cache folders in the environment while compiling


@dataclass(frozen=True)
class Compile(Method):
    """Compiles the model in place, so that the names of its parameters stay the same.

    Compiling takes seconds to minutes at the first step; a short run never earns them back. The exported model is the
    original, uncompiled module.
    """

    card = Card(
        summary="the model compiled into fused kernels by torch.compile",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Ansel et al. 2024, PyTorch 2 (ASPLOS); https://docs.pytorch.org/docs/stable/torch.compiler.html",
        gain=(1.0, 1.16),
        gain_when="GPU runs long enough to pay for compiling (20 to 35 seconds on two cores); on a CPU often nothing",
        accelerates={"forward", "backward"},
        requires={"monolithic_forward"},
        order=WrapOrder.LATE,
        high_setup_cost=True,
        presets=({}, {"mode": "max-autotune-no-cudagraphs"}),
    )

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
        model.compile(mode=self.mode, backend=self.backend)  # pyright: ignore[reportUnknownMemberType]
        return model

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return copy.copy(model)  # shares the parameters; copying a module drops its compiled call

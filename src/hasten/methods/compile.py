"""torch.compile: the model's forward and backward pass as fused kernels.

The module is compiled in place, so that the names of its weights stay the same; ``export`` hands out the
plain module. Compiling takes seconds to minutes, once for training: a short run never earns it back.
"""

import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass

from hasten.contract.card import Card, Exactness, Order
from hasten.contract.method import Method, setting

MODES = ("default", "max-autotune-no-cudagraphs")  # torch's others record CUDA graphs of their own; that is what cuda_graph is for
COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")  # torch sets its cache folders in the environment while compiling


@dataclass(frozen=True)
class Compile(Method):
    card = Card(
        summary="the model compiled into fused kernels by torch.compile",
        exactness=Exactness.SAME_MATHS,
        source="Ansel et al. 2024, PyTorch 2 (ASPLOS); https://docs.pytorch.org/docs/stable/torch.compiler.html",
        gain=(1.0, 1.16),
        gain_when="GPU runs long enough to pay for compiling (20 to 35 seconds on two cores); on a CPU often nothing",
        speeds={"forward", "backward"},
        needs={"whole forward pass"},
        order=Order.LATE,
        slow_start=True,
        tries=({}, {"mode": "max-autotune-no-cudagraphs"}),
    )
    mode: str = setting("default", one_of=MODES)
    backend: str = "inductor"

    def process(self, context, run):
        @contextmanager
        def tidied():
            before = dict(os.environ)
            try:
                with context():
                    yield
            finally:
                for name in [name for name in os.environ if name.startswith(COMPILER_VARIABLES) and name not in before]:
                    del os.environ[name]

        return tidied

    def model(self, model, run):
        model.compile(mode=self.mode, backend=self.backend)
        return model

    def export(self, model, run):
        return copy.copy(model)  # shares the weights; a copied module leaves the compiled call behind

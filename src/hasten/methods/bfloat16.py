"""Mixed precision with bfloat16 by ``torch.autocast``."""

from dataclasses import dataclass
from functools import partial

import torch

from hasten import Batch, Card, Exactness, ForwardFn, Method, RunContext, WrapOrder
from hasten.utils.autocast import autocast_obstacle
from hasten.utils.observe_step import observe_precision


@dataclass(frozen=True)
class BFloat16(Method):
    """Runs matrix products and convolutions in bfloat16; losses and other sensitive reductions stay in float32.

    ``torch.autocast`` chooses the precision of each operation by its own lists, which differ between devices
    (https://docs.pytorch.org/docs/stable/amp.html): batch normalization runs in bfloat16 on the CPU. ``hasten diagnose
    --ops`` shows what ran in which precision. The parameters stay in float32, and the optimizer updates them as
    such: they are the master weights. bfloat16 has the exponent range of float32, so no loss scaling is needed.
    """

    card = Card(
        summary="matrix products and convolutions in bfloat16, parameters and reductions in float32",
        exactness=Exactness.REDUCED_PRECISION,
        source="Kalamkar et al. 2019, arXiv 1905.12322; torch.autocast",
        gain=(1.0, 1.6),
        gain_when="large matrix products on hardware with bfloat16 units (1.4 to 1.6 on CPUs); no gain if narrow",
        accelerates={"forward", "backward"},
        on_gpu={"baseline": True, "composition": True},
        applies_to={"matrix_weights", "bfloat16_hardware"},
        requires={"uniform_precision", "monolithic_forward"},
        invalidates={"uniform_precision"},
        order=WrapOrder.EARLY,
        remedy_for={"out_of_memory": {}},
        script_edit={
            "by_hand": "call model and loss under torch.autocast(device_type, dtype=torch.bfloat16)",
        },
    )

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        if obstacle := autocast_obstacle(run.model, run.device, torch.bfloat16):
            return run.report_no_effect(self, obstacle, forward)
        device = run.device.type
        run.observe_effect(self, partial(observe_precision, run, torch.bfloat16))

        def forward_in_bfloat16(batch: Batch) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16):
                return forward(batch)

        return forward_in_bfloat16

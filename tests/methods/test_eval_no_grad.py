"""eval_no_grad: no gradients are recorded in an evaluation, unless the model itself needs them."""

import torch

from hasten.core.run_context import EngineServices, RunContext
from hasten.engine.registry import make_method


def test_eval_no_grad_spares_a_model_that_differentiates_in_its_forward_pass():
    class Forces(torch.nn.Linear):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).square().sum(), x)[0]

    run = RunContext(torch.device("cpu"), None, services=EngineServices(eval_records_gradients=lambda: True))
    run.model = Forces(3, 1).eval()
    forward = make_method("eval_no_grad").forward(run.model, run)
    assert forward(torch.ones(2, 3)).shape == (2, 3)

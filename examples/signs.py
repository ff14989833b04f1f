"""A method of your own: update with the sign of each gradient. Compares it with the original training."""

from dataclasses import dataclass
from pathlib import Path

import hasten
from hasten import Card, Exactness, Method, RunContext, StepFn


@dataclass(frozen=True)
class Signs(Method):
    card = Card(
        summary="updates with the sign of each gradient",
        exactness=Exactness.CHANGES_TRAINING,
        source="Bernstein et al. 2018, arXiv 1802.04434",
        gain_when="the sizes of gradients differ much between layers",
    )

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        def signs() -> None:
            grad_transform()
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.sign_()

        return signs


if __name__ == "__main__":
    here = Path(__file__).parent
    comparison = hasten.compare(f"{here}/spiral.py:task", "baseline", f"{here}/signs.py:Signs", budget=20)
    print("speed of the step:", comparison["verdict"], comparison["ratio"])

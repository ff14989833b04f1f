"""Forward and backward recorded once as a CUDA graph and replayed: one launch instead of thousands.

What follows from the rules of https://docs.pytorch.org/docs/stable/notes/cuda.html (CUDA graphs):

* A graph reads and writes fixed addresses. Each batch is copied into input buffers of its own, the loss is
  copied out, and the gradients are zeroed in place instead of freed: this method owns ``clear``.
* Capture comes after a few warm-up passes on a side stream. They would move running statistics, random numbers
  and gradients, so all three are put back: the first replay is the first pass of the run.
* Shapes are part of the graph. There is one graph for each share of a whole step (pieces of a cut batch weigh
  differently), for the shapes it has first; other shapes, and the shorter batch that ends a pass, run as usual.
"""

from dataclasses import dataclass

import torch

from hasten._torch_compat import foreach_zero_
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError, format_error
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import ForwardFn, StepFn
from hasten.utils.batch import batch_size, batch_tensors, map_tensors

WARM_UP = 3  # passes; torch's documents ask for a few, so that libraries have chosen their kernels


@dataclass(frozen=True)
class CudaGraph(Method):
    card = Card(
        summary="forward and backward replayed as one CUDA graph",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs",
        gain_when="steps of a few milliseconds on a GPU, where launching kernels takes longer than running them",
        accelerates={"forward", "backward"},
        applies_to={"cuda"},
        invalidates={"python_between_kernels"},
        order=WrapOrder.LAST,
        replaces={"zero_grad"},
    )

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        if run.device.type != "cuda" or run.parallel is not None:
            who = run.device if run.parallel is None else "several processes, whose parts of a batch weigh differently"
            run.report_no_effect(self, f"CUDA graphs need an NVIDIA GPU; this run is on {who}")
            return forward_backward
        graphs = {}

        def replayed(batch):
            share = run.progress.microbatch_fraction
            if share not in graphs:
                if (
                    round(batch_size(batch) / share) < run.plan.batch_size
                ):  # a resumed run may begin with the short batch
                    return forward_backward(
                        batch
                    ).detach()  # a graph that is alive would be in the way of the recording
                graphs[share] = _shapes(batch), _recorded(forward_backward, batch, run)
            shapes, replay = graphs[share]
            return replay(batch) if _shapes(batch) == shapes else forward_backward(batch).detach()

        return replayed

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        if run.device.type != "cuda" or run.parallel is not None:
            return zero_grad
        parameters = list(run.model.parameters())

        def zeroed():
            foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

        return zeroed


def _recorded(micro, batch, run: RunContext):
    """``micro`` for batches shaped like this one, as a replay.

    Gradients are there before the capture, so the recorded backward pass adds to them: pieces of a step sum up,
    and passes outside the graph use the same buffers.
    """
    buffers = map_tensors(torch.clone, batch)
    state = list(run.model.buffers())
    before = [value.clone() for value in state]
    gradients = {
        parameter: parameter.grad.clone() for parameter in run.model.parameters() if parameter.grad is not None
    }
    random_state = torch.cuda.get_rng_state(run.device)

    side = torch.cuda.Stream(run.device)
    side.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            micro(buffers)
    torch.cuda.current_stream(run.device).wait_stream(side)

    with torch.no_grad():
        for value, old in zip(state, before, strict=True):
            value.copy_(old)
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(gradients[parameter]) if parameter in gradients else parameter.grad.zero_()
    torch.cuda.set_rng_state(random_state, run.device)

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loss = micro(buffers).detach()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RunError(
            f"cuda_graph: the step cannot be recorded, a .item() or a copy to the CPU in the model is the usual cause ({format_error(error)})"
        ) from error

    def replay(batch):
        for buffer, value in zip(batch_tensors(buffers), batch_tensors(batch), strict=True):
            buffer.copy_(value, non_blocking=True)
        graph.replay()
        return loss.clone()  # the next replay writes over it

    return replay


def _shapes(batch) -> tuple:
    return tuple((tensor.shape, tensor.dtype) for tensor in batch_tensors(batch))

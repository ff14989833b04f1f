"""CUDA graphs: forward and backward pass recorded once and replayed, one launch instead of thousands.

How the rules of https://docs.pytorch.org/docs/stable/notes/cuda.html (CUDA graphs) are kept:

* A graph reads and writes fixed addresses. Each batch is copied into static input buffers, the loss is copied out, and
  the gradients are zeroed in place instead of freed: this method replaces ``zero_grad``.
* Capture follows a few warm-up passes on a side stream. They change buffers of the model, random state and gradients,
  so all three are restored: the first replay is the first pass of the run.
* Shapes are part of a graph, and so is everything in a batch that is no tensor, such as a number or a text. There is
  one graph per ``microbatch_fraction`` (microbatches of unequal size have unequal weights), for the first batch seen.
  Batches of other shapes or values, such as the last one of an epoch, run without a graph.
* Only calls of this thread may disturb a capture: the thread that pins the batches of a loader allocates meanwhile.

What Python decides in a step, such as a random number of the module ``random`` that skips a layer, is decided once: at
the capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hasten import (
    Batch,
    Card,
    Exactness,
    ForwardFn,
    MemoryExhaustedError,
    Method,
    NoEffectError,
    RunContext,
    RunError,
    StepFn,
    WrapOrder,
)
from hasten._torch_compat import foreach_zero_
from hasten.core.errors import format_error
from hasten.utils.batch import batch_size, batch_tensors, map_tensors
from hasten.utils.optimizers import parameters_outside
from hasten.utils.tree import bitwise_equal, tree_leaves

OUT_OF_MEMORY = (
    "out of memory: the step does not fit as a CUDA graph (a CUDA graph keeps the activations of a step in memory of "
    "its own)"
)
WARMUP_PASSES = 3  # the PyTorch documentation asks for a few, so that libraries have chosen their kernels


@dataclass(frozen=True)
class CudaGraph(Method):
    """Records the forward and backward pass as a CUDA graph and replays it for every batch of the same shapes."""

    card = Card(
        summary="forward and backward pass replayed as one CUDA graph",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs",
        gain_when="steps of a few milliseconds on a GPU, where launching kernels takes longer than running them",
        accelerates={"forward", "backward"},
        on_gpu={"composition": True},
        applies_to={"cuda"},
        invalidates={"python_between_kernels"},
        order=WrapOrder.LAST,
        replaces={"zero_grad"},
    )

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        if run.device.type != "cuda":
            run.report_no_effect(self, f"CUDA graphs need an NVIDIA GPU; this run is on {run.device}")
            return forward_backward
        if run.parallel is not None:
            run.report_no_effect(self, "the ranks weight their shards of a batch, and a graph cannot change a weight")
            return forward_backward
        graphs: dict[float, tuple[Any, ForwardFn]] = {}  # microbatch_fraction -> signature of its batches, its replay
        passes = {"replayed": 0, "eager": 0}

        def replay_graph(batch: Batch) -> torch.Tensor:
            fraction = run.progress.microbatch_fraction
            if fraction not in graphs:
                # a resumed run may start with a short batch
                if round(batch_size(batch) / fraction) < run.plan.batch_size:
                    return forward_backward(batch).detach()  # a live autograd graph would prevent the capture
                graphs[fraction] = signature_of(batch), _capture(forward_backward, batch, run)
            expected, replay = graphs[fraction]
            fits = bitwise_equal(signature_of(batch), expected)
            passes["replayed" if fits else "eager"] += 1
            return replay(batch) if fits else forward_backward(batch).detach()

        def describe() -> str:
            if not graphs:
                raise NoEffectError("no graph was captured: no batch has been as large as the plan says")
            if passes["eager"] > passes["replayed"]:
                what = "batches have other shapes than the captured one, or other values that are no tensors"
                raise NoEffectError(f"{passes['eager']} of {sum(passes.values())} {what}")
            return f"{len(graphs)} CUDA graph{'s' * (len(graphs) > 1)} captured"

        run.observe_effect(self, describe)
        return replay_graph

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        if run.device.type != "cuda" or run.parallel is not None:
            return zero_grad
        parameters = _trained_parameters(run)

        def zero_in_place() -> None:
            foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

        return zero_in_place


def _capture(forward_backward: ForwardFn, batch: Batch, run: RunContext) -> ForwardFn:
    """Records ``forward_backward`` on a batch; the result replays it for other batches of the same shapes.

    Gradients exist before the capture, so the recorded backward pass adds to them: the microbatches of a step sum up,
    and passes outside the graph use the same buffers.
    """
    inputs = map_tensors(torch.clone, batch)
    restore = _save_state(run)
    side = torch.cuda.Stream(run.device)
    side.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(side):
        for _ in range(WARMUP_PASSES):
            forward_backward(inputs)
    torch.cuda.current_stream(run.device).wait_stream(side)
    restore()

    graph = torch.cuda.CUDAGraph()
    try:
        # a stream of its own: torch's default for captures belongs to the first GPU that the process used
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            loss = forward_backward(inputs).detach()
    except RuntimeError as error:
        # where memory ran out, the end of the capture may fail as well and hide it
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
            raise MemoryExhaustedError(OUT_OF_MEMORY) from error
        raise RunError(
            "cuda_graph cannot record the step; the usual cause is a .item() or a copy to the CPU in the model "
            f"({format_error(error)})"
        ) from error

    def replay(batch: Batch) -> torch.Tensor:
        for buffer, value in zip(batch_tensors(inputs), batch_tensors(batch), strict=True):
            buffer.copy_(value, non_blocking=True)
        graph.replay()
        return loss.clone()  # the next replay overwrites it

    return replay


def _save_state(run: RunContext) -> Callable[[], None]:
    """Saves buffers, gradients and random state; returns the function that restores them."""
    buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
    parameters = _trained_parameters(run)
    gradients = {parameter: parameter.grad.clone() for parameter in parameters if parameter.grad is not None}
    random_state = torch.cuda.get_rng_state(run.device)

    @torch.no_grad()
    def restore() -> None:
        for buffer, value in buffers:
            buffer.copy_(value)
        for parameter in parameters:
            if parameter in gradients:
                assert parameter.grad is not None
                parameter.grad.copy_(gradients[parameter])
            elif parameter.grad is not None:  # allocated by the warm-up
                parameter.grad.zero_()
        torch.cuda.set_rng_state(random_state, run.device)

    return restore


def _trained_parameters(run: RunContext) -> list[torch.nn.Parameter]:
    return [*run.model.parameters(), *parameters_outside(run.model, run.optimizer)]


def signature_of(batch: Batch) -> list[Any]:
    """What a graph cannot change: shape and dtype of every tensor, and the value of every other leaf of the batch."""
    leaves = tree_leaves(batch)
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

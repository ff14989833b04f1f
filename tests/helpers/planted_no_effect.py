"""Methods that have no effect, each for a reason that occurs in practice, and two whose effect is not known.

Each states its effect as the methods of hasten do. The bug is in what the hooks do, not in the check.
"""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from hasten import Card, Exactness, Method
from hasten._torch_compat_compile import compiler_backend
from hasten.core.errors import NoEffectError
from hasten.methods.compile import GraphRecorder
from hasten.utils.observe_step import observe_gradients, observe_precision, observe_workers
from hasten.utils.op_recorder import OpRecorder


class Planted(Method):
    card = Card(summary="has no effect", exactness=Exactness.EQUIVALENT_MATH)


class FlagSetTooLate(Planted):
    """Lowers the precision of float32 products around the export, which runs after training."""

    def process_context(self, context, run):
        def describe():
            if (precision := torch.get_float32_matmul_precision()) != "medium":
                raise NoEffectError(f"the step ran with precision {precision}")
            return "precision medium"

        run.observe_effect(self, describe)
        return context

    def export(self, model, run):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        exported = copy.deepcopy(model)
        torch.set_float32_matmul_precision(before)
        return exported


class WrapperNeverCalled(Planted):
    """Wraps ``model.forward_features``, which this model's ``forward`` does not call."""

    def model(self, model, run):
        calls = []

        def forward_features(*arguments):
            calls.append(arguments)
            return model(*arguments)

        def describe():
            if not calls:
                raise NoEffectError("the wrapped function was never called")
            return f"{len(calls)} calls"

        model.forward_features = forward_features
        run.observe_effect(self, describe)
        return model


class CopyThrownAway(Planted):
    """Converts a copy of the model to bfloat16, and trains the original."""

    def model(self, model, run):
        copy.deepcopy(model).to(torch.bfloat16)
        run.observe_effect(self, partial(observe_precision, run, torch.bfloat16))
        return model


class AutocastAroundNothing(Planted):
    """Closes the autocast context before the forward pass runs."""

    def forward(self, forward, run):
        run.observe_effect(self, partial(observe_precision, run, torch.bfloat16))

        def lower(batch):
            with torch.autocast("cpu", torch.bfloat16):
                later = partial(forward, batch)
            return later()

        return lower


class FusedFlagOnACopy(Planted):
    """Sets ``fused`` on copies of the parameter groups."""

    def optimizer(self, make, run):
        def make_fused(model):
            optimizer = make(model)
            for group in copy.copy(optimizer.param_groups):
                dict(group).update(fused=True, foreach=False)
            return optimizer

        run.observe_effect(self, _observe_fused)
        return make_fused


class ClonesScaled(Planted):
    """Clips clones of the gradients."""

    def grad_transform(self, grad_transform, run):
        def inspect(gradients, _):
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if norm > 1e-3:
                raise NoEffectError(f"the optimizer used gradients of norm {norm:.3g}")
            return f"norm {norm:.3g}"

        def clip():
            grad_transform()
            for parameter in run.model.parameters():
                parameter.grad.clone().mul_(1e-6)

        run.observe_effect(self, partial(observe_gradients, run, list(run.model.parameters()), inspect))
        return clip


class WorkersOfAnotherLoader(Planted):
    """Configures workers, and returns the batches without them."""

    def data(self, batches, run):
        if batches.training:
            batches.spec.build(replace(batches.spec, num_workers=2, persistent_workers=True))
            run.observe_effect(self, partial(observe_workers, 2))
        return batches


class ThreadsReset(Planted):
    """Sets the threads, which another part of the run sets back."""

    def process_context(self, context, run):
        before = torch.get_num_threads()

        @contextmanager
        def with_threads():
            with context():
                torch.set_num_threads(before + 1)
                try:
                    yield
                finally:
                    torch.set_num_threads(before)

        def describe():
            if torch.get_num_threads() != before + 1:
                raise NoEffectError(f"torch computes with {torch.get_num_threads()} threads")
            return f"{before + 1} threads"

        run.observe_effect(self, describe)
        return with_threads

    def batch_transform(self, to_device, run):
        def as_a_library_would(batch):
            torch.set_num_threads(1)
            return to_device(batch)

        return as_a_library_would


class CompiledModuleNotCalled(Planted):
    """Compiles the model and drops the compiled one."""

    def model(self, model, run):
        recorder = GraphRecorder(compiler_backend("eager", "default"))
        torch.compile(model, backend=recorder.compile)
        run.observe_effect(self, recorder.observe)
        return model


class CheckpointOfAnUnusedModule(Planted):
    """Checkpoints a block that the model holds and does not use."""

    def model(self, model, run):
        block, recomputed = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.ReLU()), []
        forward = block.forward
        block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        block[0].register_forward_hook(lambda *_: recomputed.append(True))

        def describe():
            if not recomputed:
                raise NoEffectError("no block was recomputed in the backward pass")
            return "recomputed"

        object.__setattr__(model, "unused", block)  # not a submodule: the weights keep their names
        run.observe_effect(self, describe)
        return model


class CacheNeverRead(Planted):
    """Fills a cache of batches and reads all of them anew."""

    def data(self, batches, run):
        cache, hits = {}, []

        def remember(iterator):
            for index, batch in enumerate(iterator):
                key = run.progress.step, index  # of another step each time
                hits.extend([key] * (key in cache))
                cache[key] = batch
                yield batch

        def describe():
            if not hits:
                raise NoEffectError(f"none of {len(cache)} cached batches was read")
            return f"{len(hits)} batches came from the cache"

        if batches.training:
            run.observe_effect(self, describe)
        return batches.map_iterator(remember)


class CheckFails(Planted):
    """Acts, but its check has a bug."""

    def optimizer_step(self, optimizer_step, run):
        def describe():
            return f"{run.progress.steps} steps"  # the attribute is called step

        run.observe_effect(self, describe)
        return optimizer_step


class StatesNoEffect(Planted):
    """A method of a user that registers no check."""

    def grad_transform(self, grad_transform, run):
        return grad_transform


def _observe_fused():
    with OpRecorder() as recorder:
        yield
    if not recorder.count("_fused_"):
        raise NoEffectError("the optimizer updated the parameters without a fused kernel")
    return "fused"

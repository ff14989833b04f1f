"""prefetch_to_device: the same batches, one ahead; no effect on the CPU."""

import pytest
import torch

from hasten.core.run_context import RunContext
from hasten.loading.cuda_prefetcher import prefetch_to_cuda
from hasten.methods.prefetch_to_device import PrefetchToDevice


def test_run_on_the_cpu_has_no_effect(perceptron, trained):
    task = perceptron()
    run = trained(task, "prefetch_to_device")
    assert [(name, "nothing to copy" in why) for name, why in run.run.no_effect] == [("prefetch_to_device", True)]
    assert run.same_bits(trained(task))


needs_gpu = pytest.mark.gpu


@needs_gpu
def test_batches_are_the_same_and_one_ahead():
    taken = []

    def batches():
        buffer = torch.empty(1 << 20)  # reused, as in_memory_batches does
        for number in range(20):
            taken.append(number)
            yield {"x": buffer.fill_(number), "n": torch.tensor(number)}

    for number, batch in enumerate(prefetch_to_cuda(batches(), torch.device("cuda"))):
        assert batch["x"].is_cuda and int(batch["n"]) == number
        assert len(taken) == min(number + 2, 20)
        assert (batch["x"] == number).all()


@needs_gpu
def test_training_on_the_gpu_gives_the_same_bits(perceptron):
    from hasten.engine.loop import train_steps
    from hasten.engine.plan import build

    def weights(*methods):
        program = build(perceptron(epochs=5), list(methods), device="cuda")
        list(train_steps(program))
        return [value.clone() for value in program.run.model.parameters()]

    assert all(map(torch.equal, weights(), weights(PrefetchToDevice())))


def test_run_without_data_to_wrap_reports_once():
    run = RunContext(torch.device("cpu"), None)
    from hasten.core.data import BatchSource

    batches = BatchSource(epoch=lambda epoch, start: iter(()))
    assert PrefetchToDevice().data(batches, run) is batches
    PrefetchToDevice().data(batches, run)
    assert len(run.no_effect) == 1

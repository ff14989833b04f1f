"""num_threads: the count applies during the run and is restored afterwards."""

import os
from contextlib import nullcontext

import pytest
import torch

from hasten.core.run_context import RunContext
from hasten.engine.plan import build
from hasten.methods.num_threads import NumThreads

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is no other count to choose")


@two_cores
def test_count_applies_during_the_run_only(perceptron):
    program = build(perceptron(), [NumThreads(2)])
    assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), program.process_context():
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("count", "reason"), [(1, "already"), (4096, "cores")])
def test_no_effect_states_its_reason(count, reason):
    run = RunContext(torch.device("cpu"), None)
    assert NumThreads(count).process_context(nullcontext, run) is nullcontext
    assert reason in run.no_effect[0][1]

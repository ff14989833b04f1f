"""The probe after a step that failed: its blocks give the reason, and no phase stays switched off."""

import dataclasses

import pytest
import torch

from hasten.core.errors import RunError
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import disabled_phases
from hasten.profiling.probe import Probe
from hasten.testing import tasks


class Failing(torch.nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("this step needs its update")
        return x


def test_block_after_a_failed_one_names_the_failure():
    failing, usual = Failing(), tasks.perceptron()
    task = dataclasses.replace(usual, model=lambda: torch.nn.Sequential(*usual.model(), failing))
    probe = Probe(TaskRef.of(task), {}, "cpu", 0)
    probe.build(with_evaluation=False)
    failing.fails = True
    with pytest.raises(ValueError, match="needs its update"):
        probe.block(1, "optimizer_step")
    assert not disabled_phases(probe.program.run)
    with pytest.raises(RunError, match="the run cannot continue: an earlier step of it failed"):
        probe.block(1)
    probe.log.close()

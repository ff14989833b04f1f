"""The verdict of a diagnosis is a function of measured figures."""

import pytest

from hasten.profiling import diagnose as diagnosis
from hasten.profiling.ablations import LARGER_BATCH
from hasten.profiling.ceilings import Ceilings
from hasten.profiling.drift import Drift, Stretch
from hasten.profiling.step_profile import StepProfile
from hasten.profiling.verdict import describe_diagnosis, is_launch_bound, possible_gains
from hasten.testing.tasks import perceptron

PHASES = {"input": 0.02, "copy": 0.01, "forward": 0.35, "backward": 0.5, "grad_transform": 0.0}
PHASES |= {"optimizer_step": 0.05, "evaluation": 0.02, "logging": 0.05}
FLOPS = {"share": 0.7, "peak_gflops": 67e3, "format": "float32", "best_format": "bfloat16", "best_peak_gflops": 790e3}


def profile(*facts: str, **changes) -> StepProfile:
    usual = {
        "plan": {"batch_size": 8},
        "phases": PHASES,
        "ceilings": Ceilings(),
        "step": 0.01,
        "sample": 0.001,
        "evaluation": None,
        "timing_cost": 0.0,
        "faults_per_step": 0.0,
        "system_share": 0.0,
        "issue_share": 0.5,
        "queued_steps": 2.0,
        "host_reads_per_step": 0.0,
        "metric": {},
        "code": {"functions": [], "synchronizations": []},
        "input": None,
        "flops": None,
        "facts": frozenset(facts),
        "system_noise": {},
    }
    return StepProfile(**(usual | changes))


def verdict(measured: StepProfile, **ceilings: float) -> str:
    return describe_diagnosis(measured, possible_gains(measured, ceilings))


@pytest.mark.parametrize(
    ("facts", "queued_steps", "input_share", "host_reads", "expected"),
    [
        ({"cuda"}, 0.02, 0.0, 0, True),
        ({"cuda"}, 30.0, 0.0, 0, False),  # the GPU is the slower one
        # so it is here, where the queue holds a fifth of a step: 1,000 operations, of 5,000 in a step of a large model
        ({"cuda"}, 0.2, 0.0, 0, False),
        ({"cuda"}, 0.02, 0.6, 0, False),  # the host waits for batches
        ({"cuda"}, 0.02, 0.0, 1, False),  # the host waits for the GPU
        ({"cuda"}, 0.02, 0.0, None, True),
        ({"cpu"}, 0.0, 0.0, 0, False),
    ],
)
def test_run_is_launch_bound_if_a_gpu_waits_for_the_host_and_the_host_for_nothing(
    facts, queued_steps, input_share, host_reads, expected
):
    assert is_launch_bound(frozenset(facts), queued_steps, input_share, host_reads) is expected


@pytest.mark.parametrize(("waited", "is_named"), [(0.1, True), (0.5, False)])
def test_script_that_reads_its_loss_is_launch_bound_if_it_hardly_waits_for_the_gpu(waited, is_named):
    reads = [{"site": "train.py:7", "call": ".item()", "per_step": 1.0, "seconds_per_step": waited * 0.02}]
    found = profile(
        "cuda", host_reads_per_step=1.0, issue_share=0.97, queued_steps=0.03, step=0.02,
        code={"synchronizations": reads, "functions": []},
    )  # fmt: skip
    assert ("waits for Python: the host needs 87%" in verdict(found)) is is_named


def test_script_code_that_a_gpu_hides_is_not_the_cause():
    hidden = {"function": "get_batch", "site": "train.py:3", "phase": "logging", "share": 0.6}
    code = {"synchronizations": [], "functions": [hidden]}
    assert "get_batch" in verdict(profile("cpu", code=code))
    assert "get_batch" not in verdict(profile("cuda", code=code, queued_steps=2.0))


def test_launch_bound_run_is_named_also_where_a_larger_batch_would_help():
    found = verdict(profile("cuda", issue_share=0.97, queued_steps=0.03), larger_batch=6.0)
    assert found.startswith("The GPU waits for Python: the host needs 97% of the time")
    assert "waits for Python" not in verdict(profile("cpu", issue_share=1.0, queued_steps=0.0), larger_batch=6.0)


def test_launch_bound_run_with_a_dominant_phase_has_that_phase_as_its_verdict():
    found = verdict(profile("cuda", issue_share=0.97, queued_steps=0.03), optimizer_step=2.5)
    assert found.startswith("The optimizer's update")


def test_arithmetic_is_compared_with_the_peak_of_the_used_and_of_the_fastest_format():
    assert "70% of the machine's peak in float32, 6% of that in bfloat16" in verdict(profile("cuda", flops=FLOPS))
    only = FLOPS | {"best_format": "float32", "best_peak_gflops": 67e3}
    assert "70% of the machine's peak; only" in verdict(profile("cuda", flops=only))


@pytest.mark.parametrize(("device", "gain"), [("cpu", 1 / 0.85), ("cuda", 1.0)])
def test_system_time_beside_a_gpu_is_no_gain_of_an_allocator(device, gain):
    measured = profile(device, faults_per_step=400.0, system_share=0.15)
    assert possible_gains(measured, {})["system_time"] == pytest.approx(gain)


@pytest.mark.parametrize(("of_steps", "seconds"), [(None, 2.0 + 0.8 + 0.5), (7.0, 2.0 + 7.0 + 0.5)])
def test_seconds_per_run_with_seconds_of_all_steps_adds_start_and_evaluations(of_steps, seconds):
    plan = {"steps": 100, "epochs": 1, "samples_per_epoch": 800, "batch_size": 8, "start": 2.0, "evaluate_every": None}
    assert profile(plan=plan, evaluation=0.5).seconds_per_run(of_steps) == pytest.approx(seconds)


def test_diagnose_of_a_training_that_slows_down_predicts_the_seconds_of_all_stretches(monkeypatch):
    plan = {"steps": 100, "epochs": 1, "samples_per_epoch": 800, "batch_size": 8, "start": 2.0, "evaluate_every": None}
    plan |= {"step": 0.01, "peak_memory": [{"resident": 1}]}
    row = {"denormal": {}, "values": {}, "rss": 0}
    rows = [Stretch(step=10, seconds_per_step=0.01, **row), Stretch(step=20, seconds_per_step=0.05, **row)]
    monkeypatch.setattr(diagnosis, "profile_steps", lambda *_, **__: profile("cpu", plan=plan))
    monkeypatch.setattr(diagnosis, "measure_drift", lambda *_, **__: Drift(rows, not_measured="out of memory"))
    found = diagnosis.diagnose(perceptron(), budget=1.0, device="cpu")
    assert found["seconds_per_run"] == pytest.approx(2.0 + 10 * 0.01 + 90 * 0.05)
    assert found["not_measured"] == {"drift": "out of memory"} and len(found["drift"]["rows"]) == 2


def test_every_ceiling_that_can_be_the_largest_cause_has_a_sentence():
    ceilings = ["input", "copy", LARGER_BATCH, "logging", "optimizer_step", "evaluation"]
    for cause in {*ceilings, *possible_gains(profile("cuda"), {})}:
        measured = profile("cuda")
        gains = dict.fromkeys(possible_gains(measured, {}), 1.0) | {cause: 3.0}
        assert "3.00x" in describe_diagnosis(measured, gains)


def test_lines_that_read_equally_often_are_named_both():
    read = {"call": ".item()", "per_step": 1.0, "seconds_per_step": 0.0}
    reads = [read | {"site": f"train.py:{line}"} for line in (41, 42)]
    found = verdict(profile("cpu", host_reads_per_step=2.0, code={"synchronizations": reads, "functions": []}))
    assert "(2 a step, at train.py:41 and train.py:42)" in found and "most of them" not in found


def test_loop_around_the_model_is_the_cause_where_it_takes_most():
    phases = PHASES | {"forward": 0.2, "backward": 0.27, "logging": 0.43}
    assert verdict(profile("cpu", phases=phases)).startswith("What the loop does besides the model")

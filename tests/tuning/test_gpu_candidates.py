"""What a search tries on an NVIDIA GPU, and never on a CPU: functions of the facts about a run. No GPU is needed."""

import pytest

from hasten.engine.registry import method_class, method_names
from hasten.profiling.advise import advise_without_profile
from hasten.tuning.candidates import MethodSelection, candidates_for, strong_baselines
from hasten.tuning.experience import exact_part, gpu_compositions

CPU = frozenset(
    {"cpu", "bfloat16_hardware", "convolutions", "matrix_weights", "indexed_samples", "workers", "unfused_optimizer"}
)
AMPERE = (CPU - {"cpu"}) | {"cuda", "tf32_hardware", "float16_hardware"}
TURING = AMPERE - {"bfloat16_hardware", "tf32_hardware"}
FOR_GPUS = (
    "cudnn_benchmark",
    "expandable_segments",
    "sdpa",
    "cuda_graph",
    "prefetch_to_device",
    "tf32",
    "data_parallel",
)


def offered(facts: frozenset[str]) -> dict[str, tuple[dict, ...]]:
    """Method -> presets that a search with these facts would try."""
    cards = {name: method_class(name).card for name in method_names()}
    advice, not_advised = advise_without_profile(facts, cards)
    diagnosis = {"advice": advice, "not_advised": not_advised, "facts": sorted(facts)}
    found = candidates_for(diagnosis, MethodSelection.of(None, ()))
    return {item.name: item.presets for item in (*found.systems, *found.training, *found.communication)}


@pytest.mark.parametrize("name", FOR_GPUS)
def test_method_for_gpus_is_never_offered_on_a_cpu(name):
    assert name not in offered(CPU)


@pytest.mark.parametrize("name", [name for name in FOR_GPUS if name != "data_parallel"])
def test_method_for_gpus_is_offered_on_one(name):
    assert name in offered(AMPERE)


def test_samples_on_the_device_are_tried_first_on_a_gpu_and_never_on_a_cpu():
    assert offered(AMPERE)["in_memory_batches"] == ({"place": "device"}, {})
    assert offered(CPU)["in_memory_batches"] == ({},)


def test_input_methods_come_first_where_a_gpu_waits_for_its_data():
    """Although their bound is unknown there: what a copy waits for shows in other phases."""
    names = ("compile", "cudnn_benchmark", "in_memory_batches", "channels_last")
    advice = [{"method": name, "bound": None if name == "in_memory_batches" else 1.2, "why": ""} for name in names]
    waits = {"advice": advice, "facts": sorted(AMPERE), "phases": {"input": 0.8, "copy": 0.0}}
    assert candidates_for(waits, MethodSelection.of(None, ())).systems[0].name == "in_memory_batches"
    computes = waits | {"phases": {"input": 0.01, "copy": 0.0}}
    assert candidates_for(computes, MethodSelection.of(None, ())).systems[0].name != "in_memory_batches"


def test_all_gpus_of_a_machine_are_taken_by_name_only():
    several = AMPERE | {"several_gpus"}
    assert "data_parallel" not in offered(several)
    cards = {"data_parallel": method_class("data_parallel").card}
    _, not_advised = advise_without_profile(AMPERE, cards)
    assert [entry["why"] for entry in not_advised] == [
        "it needs what does not hold here: this machine has several NVIDIA GPUs"
    ]
    named = MethodSelection.of(["data_parallel"], ())
    advice, not_advised = advise_without_profile(several, cards)
    diagnosis = {"advice": advice, "not_advised": not_advised, "facts": sorted(several)}
    assert [name for name, _ in candidates_for(diagnosis, named).not_tried] == ["data_parallel"]


def test_strong_baseline_of_a_gpu_is_what_its_owner_would_set():
    *usual, alone, best = strong_baselines("cuda", 8, AMPERE)
    assert usual == strong_baselines("cuda", 8)
    more = best.drop(*usual[-1].methods)
    assert more == alone.drop(*usual[0].methods)  # without loader workers as well: they may lose
    assert {"bfloat16", "channels_last", "cudnn_benchmark"} == set(more.methods)
    assert {"cudnn_benchmark", "channels_last"} == set(
        strong_baselines("cuda", 8, TURING)[-1].drop(*usual[-1].methods).methods
    )


def test_strong_baseline_of_a_cpu_has_no_method_of_gpus():
    assert strong_baselines("cpu", 8, CPU) == strong_baselines("cpu", 8)


def test_strong_baseline_has_no_fused_optimizer_where_torch_has_none():
    assert [set(form.methods) for form in strong_baselines("cpu", 8, CPU - {"unfused_optimizer"})] == [
        set(),
        {"loader_workers"},
    ]


def test_composition_of_a_gpu_is_tried_as_a_whole():
    together, eager = gpu_compositions(AMPERE)
    assert set(eager.methods) == {"bfloat16", "compile"}, "for a step that cannot be recorded"
    assert set(together.methods) == {"bfloat16", "compile", "cuda_graph"}
    assert set(exact_part(together).methods) == {"compile", "cuda_graph"}
    assert set(gpu_compositions(TURING)[0].methods) == {"compile", "cuda_graph"}, "no units for bfloat16"
    assert gpu_compositions(CPU) == []

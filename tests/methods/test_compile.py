"""compile: the compiled model trains; the exported model is not compiled and shares its weights."""

import copy
import time
from dataclasses import replace

import pytest
import torch

from hasten._torch_compat_compile import cached_compile_seconds, compile_in_place
from hasten.benchmarking.arm import Arm
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_epoch
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.tasks import TaskRef


class OwnForward(torch.nn.Module):
    """A perceptron whose forward breaks the graph once."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 24), torch.nn.Linear(24, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Subclass(torch.nn.Sequential):
    """As users write it: a constructor and no forward."""

    def __init__(self):
        super().__init__(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4))


class Recurrent(torch.nn.Module):
    """torch.compile skips recurrent layers, and this model is nothing else."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(12, 4, batch_first=True)

    @torch.compiler.disable
    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0][:, 0]


def evidence(trained, task, recipe="compile:backend=eager"):
    torch._dynamo.reset()
    program = trained(task, recipe, 4).program
    return program.effects.evidence.get("compile"), dict(program.run.no_effect).get("compile")


@pytest.mark.parametrize("model", [None, Subclass], ids=["Sequential", "subclass"])
def test_compile_whole_model_whatever_its_class(model, perceptron, trained):
    seen, _ = evidence(trained, perceptron(**({"model": model} if model else {})))
    assert seen.startswith("1 graph compiled in ") and seen.endswith("no graph break")


def test_compile_graph_break_is_listed_with_file_and_line(perceptron, trained):
    seen, _ = evidence(trained, perceptron(model=OwnForward))
    line = OwnForward.forward.__code__.co_firstlineno + 2
    assert seen.startswith("2 graphs compiled in ") and f"1 graph break (test_compile.py:{line}: " in seen


def test_compile_without_a_graph_has_no_effect(perceptron, trained):
    seen, reason = evidence(trained, perceptron(model=Recurrent))
    assert seen is None and "compiled no graph of this model" in reason


def test_compile_with_a_backend_that_fails_trains_on_and_has_no_effect(perceptron, trained, monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr("hasten.methods.compile.compiler_backend", lambda *_: fails)
    seen, reason = evidence(trained, perceptron())
    assert seen is None and reason.endswith("of this model: RuntimeError: no working C++ compiler")


def test_compile_blocks_of_one_class_share_a_graph_and_keep_names(transformer, trained):
    torch._dynamo.reset()
    run = trained(transformer(), "compile:backend=eager,scope=blocks", 4)
    assert run.program.effects.evidence["compile"].startswith("1 graph compiled in ")
    exported = run.program.export()
    assert all(module._compiled_call_impl is None for module in exported.modules())
    assert exported.state_dict().keys() == transformer().model().state_dict().keys()
    assert all(a is b for a, b in zip(exported.parameters(), run.run.model.parameters(), strict=True))


def test_compile_blocks_of_a_model_without_blocks_has_no_effect(perceptron, trained):
    _, reason = evidence(trained, perceptron(), "compile:backend=eager,scope=blocks")
    assert "no sequence of blocks" in reason and "scope=model" in reason


def test_trained_model_is_compiled_and_the_exported_one_is_not(transformer, trained):
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run = trained(transformer(), "compile:backend=eager", 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
    exported = run.program.export()
    assert exported._compiled_call_impl is None and run.run.model._compiled_call_impl is not None
    assert exported.state_dict().keys() == transformer().model().state_dict().keys()
    assert all(a is b for a, b in zip(exported.parameters(), run.run.model.parameters(), strict=True))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    evaluate(run.program)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "the evaluation compiled something"


@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("accumulation", ["", "gradient_accumulation:accumulation_steps=3 + "])
def test_short_last_batch_leaves_every_graph_static(scope, accumulation, transformer, trained, monkeypatch):
    """With symbolic shapes, the kernels of the short batch would serve all batches from the second epoch on."""
    torch._dynamo.reset()
    graphs, symbolic = [], []

    def backend(graph, inputs):
        symbolic.extend(value for value in inputs if isinstance(value, torch.SymInt))
        graphs.append(0)
        index = len(graphs) - 1

        def run(*args):
            graphs[index] += 1
            return graph.forward(*args)

        return run

    monkeypatch.setattr("hasten.methods.compile.compiler_backend", lambda *_: backend)
    task = transformer(epochs=5)
    data, size = task.train_data, task.batch_size
    short = torch.utils.data.Subset(data, range(2 * size + size // 2))
    trained(replace(task, train_data=short), f"{accumulation}compile:scope={scope}", 15)
    assert not symbolic and graphs[-1] < graphs[0], (graphs, symbolic)


def test_compile_inputs_of_many_lengths_share_a_symbolic_graph():
    """One graph per size would end at torch's limit, eight, and then run without compilation."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    compile_in_place([model], backend)
    for size in range(4, 24):
        model(torch.ones(size, 3))
    assert graphs[-1] and len(graphs) <= 6, graphs


def test_compiled_model_can_be_copied_for_averaging(perceptron, trained):
    run = trained(perceptron(), "compile:backend=eager", 2).run
    copied = copy.deepcopy(run.model)
    assert copied._compiled_call_impl is None


@pytest.mark.slow
def test_start_of_an_arm_is_that_with_an_empty_cache(perceptron, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    starts, seen = [], []
    for _ in range(2):
        before = cached_compile_seconds()
        torch.compiler.reset()
        arm = Arm(TaskRef.of(perceptron), {"compile": {}}, "cpu", 0)
        plan = arm.build()
        starts.append(plan["start"] - before)
        seen.append(plan["effects"]["compile"])
        arm.context.close()
    assert "in the cache" not in seen[0] and "with the graphs that were in the cache" in seen[1]
    assert 0.6 < starts[1] / starts[0] < 1.6


@pytest.mark.slow
def test_inductor_backend_gives_the_same_gradients(transformer):
    from hasten.benchmarking.exactness import check_exactness
    from hasten.core.card import Exactness
    from hasten.core.recipe import Recipe

    proof = check_exactness(transformer(), Recipe(), Recipe.parse("compile"), Exactness.EQUIVALENT_MATH, device="cpu")
    assert proof.passed, proof.why


@pytest.mark.slow
@pytest.mark.timing
def test_later_epochs_with_a_short_batch_are_as_fast_as_the_first_ones(transformer):
    """10.5 batches an epoch, under inductor. The first epoch compiles, so the second is the first to compare with.

    In CPU seconds of one thread, which other processes hardly change.
    """
    torch.compiler.reset()
    task = transformer(epochs=12, batch_size=64)
    short = torch.utils.data.Subset(task.train_data, [index % 96 for index in range(672)])
    program, rates = build(replace(task, train_data=short), [make_method("compile")]), []
    for _ in range(12):
        began = time.process_time()
        for _ in train_epoch(program):
            pass
        rates.append(672 / (time.process_time() - began))
    assert max(rates[4:]) >= 0.97 * max(rates[1:4]), rates

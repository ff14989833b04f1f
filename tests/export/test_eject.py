"""An ejected script trains to the same bits as ``train`` and does not import hasten."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.engine.registry import method_names

TASKS = '''
import dataclasses
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
import hasten
import hasten.data
from hasten import Task, Method, Card, Exactness
from hasten.data import arrays

LENGTH = 50
torch.set_num_threads(1)


class Noisy(Dataset):
    """Samples drawn at every read: the position must seed them in the same way."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.full((6,), index / LENGTH) + 0.1 * torch.randn(6), index % 3


class Fixed(Noisy):
    def __getitem__(self, index):
        return torch.arange(6) / 6 + index / LENGTH, index % 3


class EpochAware(Fixed):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * self.epoch, y


class Stream(IterableDataset):
    def __iter__(self):
        return (Noisy()[index] for index in range(LENGTH))


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, labels):
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def scheduled(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def usual(**changes):
    fields = dict(
        model=net, train_data=Noisy(), validation_data=Fixed(), loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01), metric="accuracy", batch_size=8,
        epochs=3,
    )
    return Task(**(fields | changes))


def plain():
    return usual()


def fixed():
    return usual(train_data=Fixed())


def with_schedule():
    return usual(optimizer=scheduled, metric="perplexity")


def with_loader():
    return usual(train_data=lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True))


def with_set_epoch():
    return usual(train_data=EpochAware())


def with_sampler():
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(LENGTH), 16)
    return usual(train_data=DataLoader(Fixed(), batch_size=8, sampler=sampler))


def with_stream():
    others = {f.name: getattr(usual(), f.name) for f in dataclasses.fields(Task) if f.name != "train_data"}
    return hasten.Task(**others, train_data=Stream())


def often_evaluated():
    return usual(evaluate_every=20, target=0.2)


def rows(samples):
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


def own_loss():
    loader = DataLoader(Fixed(), batch_size=8, collate_fn=rows)
    return usual(model=OwnLoss, loss=None, train_data=loader, validation_data=loader, batch_size=None)


def drawn():
    """Its data are drawn where the task is made."""
    return usual(train_data=[(torch.randn(6), int(torch.randint(3, ()))) for _ in range(LENGTH)])


def shaken(sample, rng):
    numbers, label = sample
    return numbers + 0.1 * rng.uniform(6), label


def noisy(batch):
    return batch[0] + 0.1 * torch.randn(6), batch[1]


def numbers():
    return torch.linspace(-1, 1, LENGTH * 6).view(LENGTH, 6), torch.arange(LENGTH) % 3


def piped():
    train = arrays(*numbers()).shuffle(seed=2).map(shaken).batch(8).map(noisy)
    return usual(train_data=train, validation_data=arrays(*numbers()), batch_size=None)


def piped_later():
    from hasten.data import arrays as rows

    return usual(train_data=lambda: rows(*numbers()).shuffle().map(noisy), validation_data=lambda: rows(*numbers()))


def piped_by_dots():
    return usual(train_data=hasten.data.arrays(*numbers()).batch(8, drop_last=True).prefetch(threads=2))


def of_unknown_metric():
    return usual(metric="acuracy", higher_is_better=True)


def of_a_missing_file():
    return usual(train_data=lambda: open("no such file"))


def without_batch_size():
    return usual(batch_size=None)


def on_a_plateau():
    def plateau(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    return usual(optimizer=plateau)


def by_epoch():
    def stepped(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)

    return usual(optimizer=stepped, schedule_interval="epoch")


def clipped_on_a_plateau():
    def plateau(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0)

    return usual(optimizer=plateau, clip_grad_norm=0.1)


def with_step():
    def step(model, batch, context):
        last = context.state.get("mean", 0.0)
        output = model(batch[0])
        context.state["mean"] = output.mean()
        return nn.functional.cross_entropy(output - 0.1 * last, batch[1])

    def largest(model, batches):
        return max(float(model(x).max()) for x, _ in batches)

    return usual(step=step, evaluate=largest, metric="largest", higher_is_better=True)


def with_two_optimizers():
    def step(model, batch, context):
        yield nn.functional.cross_entropy(model(batch[0]), batch[1])
        yield model(batch[0] + torch.randn(6)).square().mean()

    def optimizers(model):
        return [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[3].parameters(), lr=0.1)]

    return usual(step=step, optimizer=optimizers, clip_grad_norm=0.1)


def without_validation():
    return usual(validation_data=None, metric="loss")


def size(batch):
    """Has the name of a part of the engine."""
    return 0.5


class Shrunk(Method):
    card = Card(summary="shrinks the gradients", exactness=Exactness.CHANGES_TRAINING, source="", gain=None,
        gain_when="never")

    def grad_transform(self, grad_transform, run):
        def shrunk():
            grad_transform()
            for parameter in run.model.parameters():
                parameter.grad.mul_(size(None))

        return shrunk


class Halving(Method):
    def halve(self, plan):
        plan.microbatches, plan.evaluate_every = 2, 16
        plan.stop = lambda evaluations: len(evaluations) == 4
        return plan


class InHalves(Halving):
    """Its change of the plan is in its base class."""

    card = Card(summary="each batch in two pieces, until the fourth look", exactness=Exactness.CHANGES_TRAINING)

    def plan(self, plan, run):
        return self.halve(plan)


class EveryOther(Method):
    """Its batches are a plain generator."""

    card = Card(summary="takes every other batch", exactness=Exactness.CHANGES_TRAINING)

    def data(self, batches, run):
        for number, batch in enumerate(batches):
            if number % 2 == 0 or not batches.training:
                yield batch



def full_graph():
    from torch_geometric.data import Data
    from torch_geometric.nn import GCN

    from hasten.graph.full_graph import FullGraph

    x, edges = torch.randn(40, 4), torch.randint(40, (2, 160))
    data = Data(x=x, y=(x[:, 0] > 0).long(), edge_index=edges)
    return Task(
        model=lambda: GCN(4, 8, num_layers=2, out_channels=2),
        train_data=FullGraph(data, torch.arange(20)),
        validation_data=FullGraph(data, torch.arange(20, 40)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        metric="accuracy",
        epochs=3,
    )


if __name__ == "__main__":
    raise SystemExit("must not run in the script")
'''

CASES = [
    ("plain", []),
    ("with_schedule", []),
    ("with_loader", []),
    ("with_stream", []),
    ("with_set_epoch", []),
    ("with_sampler", []),
    ("own_loss", []),
    ("without_validation", []),
    ("by_epoch", []),
    ("by_epoch", ["budgeted_schedule:factor=0.5"]),
    ("clipped_on_a_plateau", ["ema"]),
    ("with_step", []),
    ("with_two_optimizers", []),
    ("with_two_optimizers", ["budgeted_schedule:factor=0.5", "fused_optimizer"]),
    ("often_evaluated", []),
    ("often_evaluated", ["early_stopping:target_patience=2"]),
    ("plain", ["early_stopping:patience=1,min_delta=0.5"]),
    ("with_schedule", ["early_stopping:patience=1"]),  # a metric that is to fall
    ("plain", ["ema:decay=0.9", "gradient_clipping"]),
    ("plain", ["ema:decay=0.9", "znorm"]),
    ("plain", ["gradient_accumulation:accumulation_steps=3"]),
    ("plain", ["num_threads:count=1", "malloc_tuning", "fused_optimizer"]),
    ("fixed", ["in_memory_batches"]),
    ("fixed", ["cache_dataset", "gradient_centralization"]),
    ("with_schedule", ["budgeted_schedule:factor=0.5"]),
    ("plain", ["budgeted_schedule:factor=0.5", "batch_size:factor=2", "ema"]),
    ("plain", ["FILE:Shrunk", "ema"]),
    ("plain", ["FILE:EveryOther"]),
    ("often_evaluated", ["FILE:InHalves"]),
    ("drawn", []),
    ("full_graph", ["ema:decay=0.9"]),
    ("piped", []),
    ("piped", ["ema:decay=0.9", "gradient_accumulation:accumulation_steps=2", "batch_size:factor=2"]),
    ("piped_later", []),
    ("piped_by_dots", ["FILE:EveryOther"]),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("eject") / "mine.py"
    file.write_text(TASKS)
    return file


@pytest.mark.parametrize(
    ("name", "methods"), CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value) or "baseline"
)
def test_ejected_script_gives_the_weights_of_train(name, methods, file, tmp_path, monkeypatch, capsys):
    methods = [method.replace("FILE", str(file)) for method in methods]
    result = hasten.train(f"{file}:{name}", methods, out=tmp_path / "run", device="cpu", seed=3)
    script = tmp_path / "script.py"
    script.write_text(hasten.eject(f"{file}:{name}", methods, device="cpu"))
    assert of_hasten_in(script.read_text()) == ({"hasten.data"} if "piped" in name else set())

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["script.py", "--seed", "3", "--out", str(tmp_path / "model.pt")])
    runpy.run_path(str(script), run_name="__main__")
    trained, ejected = (
        load_file(tmp_path / "run" / "model.safetensors"),
        torch.load(tmp_path / "model.pt", weights_only=True),
    )
    assert trained.keys() == ejected.keys()
    assert all(torch.equal(trained[key], ejected[key]) for key in trained), "the script trains to other weights"
    assert result["steps"] > 0
    if result["metric"] is not None:
        evaluations = [line for line in capsys.readouterr().out.splitlines() if f": {result['metric_name']} " in line]
        assert evaluations[-1].endswith(f" {result['metric']:.4g}")


@pytest.mark.slow
def test_ejected_script_runs_without_hasten(file, tmp_path):
    (tmp_path / "script.py").write_text(hasten.eject(f"{file}:plain", "ema"))
    without = (
        "import sys, runpy; sys.modules['hasten'] = None; sys.argv = ['script.py']; "
        "runpy.run_path('script.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", without],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and (tmp_path / "model.pt").exists()


@pytest.mark.slow
def test_eject_warns_about_data_that_are_read_by_the_script(file):
    messages = {
        name: ast.get_docstring(ast.parse(hasten.eject(f"{file}:{name}")))
        for name in ("plain", "piped", "piped_later", "piped_by_dots")
    }
    assert "hasten is not" in messages.pop("plain")
    assert all(
        "besides PyTorch it needs hasten.data, which reads its data, and nothing else of hasten" in message
        for message in messages.values()
    )


@pytest.mark.parametrize("method", ["loader_workers", "autotune_loader"])
@pytest.mark.parametrize("name", ["piped", "piped_later"])
def test_ejected_pipeline_states_its_own_workers(file, name, method):
    with pytest.raises(
        hasten.ConfigurationError, match=rf"{method} cannot be written out for a pipeline .*prefetch\(processes=2\)"
    ):
        hasten.eject(f"{file}:{name}", method)


def test_ejected_script_contains_only_used_code(file):
    script = hasten.eject(f"{file}:plain", None)
    assert "EveryOther" not in script and "class Ema" not in script and "must not run" not in script
    assert "def from_iterable_dataset" not in script and "def accumulated" not in script
    assert "class LoaderAutotuner" not in script
    assert "class Ema" in hasten.eject(f"{file}:plain", "ema")


@pytest.mark.parametrize("name", method_names())
def test_every_method_can_be_ejected(name, file):
    script = hasten.eject(f"{file}:fixed", name)
    assert "hasten" not in imported_by(script)
    assert not undefined_in(script)


def test_eject_without_source_code_is_refused():
    task = hasten.Task(model=torch.nn.Identity, train_data=[1], loss=None, optimizer=torch.optim.SGD)
    with pytest.raises(hasten.ConfigurationError, match="object without source"):
        hasten.eject(task)
    with pytest.raises(hasten.ConfigurationError, match="top level"):
        hasten.eject(lambda: task)


def test_eject_of_conflicting_methods_is_refused(file):
    with pytest.raises(hasten.ConfigurationError):
        hasten.eject(f"{file}:plain", "nonesuch")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("of_unknown_metric", hasten.ConfigurationError, "did you mean accuracy"),
        ("of_a_missing_file", hasten.RunError, "building the run failed: FileNotFoundError.*no such file"),
        ("without_batch_size", hasten.ConfigurationError, r"Task\(batch_size=\) is missing"),
        (
            "on_a_plateau",
            hasten.ConfigurationError,
            "ReduceLROnPlateau waits for the metric of the task, accuracy; give it mode",
        ),
    ],
)
def test_eject_of_an_untrainable_task_is_refused(name, kind, message, file):
    with pytest.raises(kind, match=message):
        hasten.eject(f"{file}:{name}")


def imported_by(script: str) -> set[str]:
    """Returns the top-level packages that a script imports anywhere."""
    roots = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    return roots


def of_hasten_in(script: str) -> set[str]:
    """Returns the modules of hasten that a script imports anywhere."""
    nodes = [*ast.walk(ast.parse(script))]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name for name in named if name.partition(".")[0] == "hasten"}


def undefined_in(script: str) -> str:
    """Returns the names that ruff reports as undefined or unused in a script."""
    check = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821,F811,F401",
        "--output-format",
        "concise",
        "-",
    ]
    done = subprocess.run(check, input=script, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr

"""Models of scripts under ``hasten train``: compiled by the script, called before they are complete, or scaled."""

import sys

import pytest

from hasten.core.recipe import Recipe
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef

pytestmark = pytest.mark.slow


def train(directory, text: str, recipe: str) -> int:
    """Writes a script and trains it with a recipe. Returns the exit code."""
    (directory / "train.py").write_text(text)
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))
    return train_script(script, Recipe.coerce(recipe), "cpu", None)


COMPILES = """
import torch
from torch import nn
from torch._dynamo.utils import counters

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def forward(self, x):
        return self.layers(x)

def compile_model(model):
    return torch.compile(model, backend="eager", fullgraph=True)

def compile_in_place(model):
    model.compile(backend="eager")
    return model

def compile_after_call(model):
    model(torch.ones(2, 4))
    return compile_model(model)

def compile_step(model):
    return torch.compile(lambda x: model(x), backend="eager")

for make in (compile_model, compile_in_place, compile_after_call, compile_step):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = make(model)
    for step in range(6):
        call(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(make.__name__, counters["stats"]["unique_graphs"], "graphs")
"""
MAKERS = ("compile_model", "compile_in_place", "compile_after_call", "compile_step")


@pytest.mark.parametrize("make", MAKERS)
def test_model_that_the_script_compiles_is_compiled_as_often_as_alone(make, tmp_path, capfd):
    text = COMPILES.replace(", ".join(MAKERS), f"{make},")
    assert train(tmp_path, text, "bfloat16") == 0
    assert f"{make} 1 graphs\n" in capfd.readouterr().out


NESTED = """
import torch
from torch import nn
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
features = backbone(torch.zeros(1, 4)).shape[1]
model = nn.Sequential(backbone, nn.Linear(features, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(4):
    optimizer.zero_grad()
    model(torch.full((2, 4), 9.0)).sum().backward()
    optimizer.step()
    print("norm", round(torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item(), 4))
"""


def test_backbone_that_is_called_to_see_its_shapes_is_no_model_of_its_own(tmp_path, capfd):
    assert train(tmp_path, NESTED, "gradient_clipping:max_norm=0.5") == 0
    output = capfd.readouterr()
    assert output.out.splitlines() == ["norm 0.5"] * 4 and not output.err


SCALED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cpu")
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), float("inf") if step == 3 else 9.0)).sum()
    before = model.weight.clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
    print("skipped" if torch.equal(before, model.weight) else f"norm {norm:.4f}")
"""


def test_gradients_that_a_fused_optimizer_unscales_itself_are_clipped_as_unscaled_ones(tmp_path, capfd):
    assert train(tmp_path, SCALED, "gradient_clipping:max_norm=0.5") == 0
    assert capfd.readouterr().out.splitlines() == ["norm 0.5000"] * 3 + ["skipped", "norm 0.5000"]


CLIPS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


def test_float16_is_refused_where_the_script_clips_scaled_gradients(tmp_path, capfd):
    assert train(tmp_path, CLIPS, "float16") != 0
    assert "clips its gradients before the update, where float16 has them scaled" in capfd.readouterr().err


SKIPS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.full((2, 4), 9.0 if step else float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
print("fused", optimizer.param_groups[0]["fused"])
"""


def test_optimizer_whose_first_update_is_skipped_is_changed_before_its_next(tmp_path, capfd):
    assert train(tmp_path, SKIPS, "fused_optimizer") == 0
    assert capfd.readouterr().out == "fused True\n"


CLOSURE = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    (loss := model(torch.ones(2, 4)).square().sum()).backward()
    return loss
print(all(optimizer.step(closure).item() >= 0 for step in range(4)))
"""


def test_update_under_methods_returns_the_loss_of_its_closure(tmp_path, capfd):
    assert train(tmp_path, CLOSURE, "gradient_clipping") == 0
    assert capfd.readouterr().out == "True\n"

"""Scripts that resume from a checkpoint start at step 0 in every trial; the user's checkpoint stays as it is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.hosts import sandbox
from hasten.hosts.arm import ScriptArm
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import watch_script

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 20
RESUMING = f"""
import os, sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
first, path = 0, sys.argv[1] if len(sys.argv) > 1 else "last.pt"
if len(sys.argv) > 1 or os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); first = state["step"]
for step in range(first, {STEPS}):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": {STEPS}}}, "last.pt")
"""


def script(directory: Path, text: str, *arguments: str) -> ScriptRef:
    (directory / "train.py").write_text(text)
    return ScriptRef.of_command([sys.executable, "train.py", *arguments], directory=str(directory))


def write_checkpoint(path: Path, step: int) -> bytes:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    return path.read_bytes()


@pytest.mark.parametrize("step", [STEPS // 2, STEPS], ids=["in the middle", "at the end"])
def test_script_with_a_checkpoint_of_its_own_starts_at_step_0(step, tmp_path):
    before = write_checkpoint(tmp_path / "last.pt", step)
    ref = script(tmp_path, RESUMING)
    with pytest.warns(HastenWarning, match=r"^train resumes from .*last\.pt; its trials start without, at step 0$"):
        assert watch_script(ref)["total_steps"] == STEPS
    assert watch_script(ref)["total_steps"] == STEPS
    assert (tmp_path / "last.pt").read_bytes() == before


def test_script_that_saves_over_the_weights_it_loaded_starts_at_step_0(tmp_path):
    text = RESUMING.replace('optimizer.load_state_dict(state["optimizer"]); ', "")
    write_checkpoint(tmp_path / "last.pt", STEPS // 2)
    with pytest.warns(HastenWarning, match="resumes from"):
        assert watch_script(script(tmp_path, text))["total_steps"] == STEPS


def test_checkpoint_that_the_command_names_is_asked_to_be_left_out(tmp_path):
    write_checkpoint(tmp_path / "best.pt", 5)
    ref = script(tmp_path, RESUMING, "best.pt")
    with pytest.warns(HastenWarning), pytest.raises(ConfigurationError, match=r"from which it resumes: leave that"):
        watch_script(ref)


def test_weights_that_are_only_loaded_stay(tmp_path):
    text = RESUMING.replace('optimizer.load_state_dict(state["optimizer"]); first = state["step"]', "pass")
    write_checkpoint(tmp_path / "pretrained.pt", 5)
    assert watch_script(script(tmp_path, text, "pretrained.pt"))["total_steps"] == STEPS


@pytest.mark.parametrize(
    ("before", "backward"),
    [
        ("optimizer.step()", "loss.backward()"),
        ("", "torch.autograd.backward(loss)"),
        ("", "torch.autograd.backward([loss / 2, loss / 2])"),
        ("", "for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))): p.grad = g"),
    ],
    ids=["an update before", "functional", "functional of two", "gradients"],
)
def test_training_that_begins_in_any_way_is_counted_from_its_first_gradient(before, backward, tmp_path):
    text = f"""
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
{before}
for step in range({STEPS}):
    loss = model(torch.ones(2, 4)).mean()
    {backward}
    optimizer.step()
"""
    ref = script(tmp_path, text)
    assert watch_script(ref)["total_steps"] == STEPS
    with ScriptArm(ref, methods={}, device="cpu", seed=0, timeout=60.0) as arm:
        assert arm.build()["steps"] == STEPS


def test_process_of_a_script_without_checkpoint_hides_nothing(tmp_path):
    ref = script(tmp_path, RESUMING)
    with ScriptProcess(ref, {}) as process:
        process.wait_until_trained(60.0, None)
        assert not process.found_checkpoints()


@pytest.fixture
def in_a_copy(monkeypatch):
    """No namespaces, as in a container: each trial runs in a copy of its directory, at another path."""
    monkeypatch.setattr(sandbox, "_overlay_obstacle", lambda box: "namespaces are not permitted")


@pytest.mark.usefixtures("in_a_copy")
@pytest.mark.filterwarnings("ignore:what trials write")
def test_script_in_a_copy_has_its_sites_and_starts_at_step_0(tmp_path):
    before = write_checkpoint(tmp_path / "last.pt", STEPS // 2)
    ref = script(tmp_path, RESUMING)
    with pytest.warns(HastenWarning, match=rf"resumes from {tmp_path}/last\.pt; its trials start without"):
        assert watch_script(ref)["total_steps"] == STEPS
    sites = ref.sites()
    assert sites is not None and sites["optimizers"][0]["site"].startswith("train.py:")
    with ScriptArm(ref, methods={"flush_denormals": {}}, device="cpu", seed=0, timeout=60.0) as arm:
        assert arm.build()["steps"] == STEPS
    assert (tmp_path / "last.pt").read_bytes() == before


def test_checkpoint_that_no_sandbox_covers_is_refused_and_stays(tmp_path, monkeypatch):
    """Such as one on a disk below /run: what a trial removes there is the user's own."""
    outside = tmp_path / "disk" / "last.pt"
    outside.parent.mkdir()
    before = write_checkpoint(outside, STEPS // 2)
    project = tmp_path / "project"
    project.mkdir()
    text = RESUMING.replace('"last.pt"', repr(str(outside)))
    monkeypatch.setattr("hasten.hosts.process.writable_places", lambda: [])
    with pytest.warns(HastenWarning), pytest.raises(ConfigurationError, match=r"last\.pt, which cannot be hidden from"):
        watch_script(script(project, text))
    assert outside.read_bytes() == before


TRAINER = """
import os, torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}
last = get_last_checkpoint("out") if os.path.isdir("out") else None
options = dict(save_steps=2, max_steps=6, report_to="none", use_cpu=True, disable_tqdm=True)
data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 64
Trainer(Model(), TrainingArguments("out", **options), train_dataset=data).train(resume_from_checkpoint=last)
"""


def test_all_checkpoints_beside_the_one_that_transformers_resumes_from_are_hidden_at_once(tmp_path):
    pytest.importorskip("transformers")
    ref = script(tmp_path, TRAINER)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)
    names = ", ".join(f"{tmp_path}/out/checkpoint-{step}" for step in (2, 4, 6))
    with pytest.warns(HastenWarning) as caught, ScriptProcess(ref, {}) as process:
        assert process.wait_until_trained(120.0, None)["steps"] == 1
        assert process.ask("train", 120.0, None, count=100)["steps"] == 6
    messages = [str(one.message) for one in caught if "resumes from" in str(one.message)]
    assert messages == [f"train resumes from {names}; its trials start without, at step 0"]

"""Damaged, hostile and incomplete checkpoints, full disks and read-only directories."""

import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil
import zipfile

import pytest
import torch

import hasten
from hasten import ConfigurationError, RunError
from hasten.core.errors import HastenWarning
from hasten.core.run_context import ParallelContext
from hasten.distributed.collectives import LocalReplicaState
from hasten.engine.checkpoint import get_state, load_checkpoint, restore, update_only_tensors
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.engine.run_dir import RunDirectory
from hasten.testing.tasks import Labeled, convolutional
from hasten.utils.rng import get_rng_state, set_rng_state
from helpers import engine_tasks


@pytest.fixture
def broken_off(tmp_path):
    """Returns the directory of a run interrupted after some steps, and that of the uninterrupted run."""
    uninterrupted, off = tmp_path / "uninterrupted", tmp_path / "off"

    def copy(records):
        if records[-1].get("step") == 9 and not off.exists():
            shutil.copytree(uninterrupted, off)

    hasten.train(engine_tasks.map_style(), out=uninterrupted, checkpoint_seconds=0, observers=[copy], device="cpu")
    assert len(list((off / "checkpoints").iterdir())) == 2
    return off, uninterrupted


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def _half(path, mark):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flipped(path, mark):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _garbage(path, mark):
    path.write_bytes(os.urandom(5000))


def _empty(path, mark):
    path.write_bytes(b"")


def _hostile(path, mark):
    torch.save({"model": Hostile(mark)}, path)


def _hostile_old_format(path, mark):
    path.write_bytes(pickle.dumps(Hostile(mark)))


def _of_another_run(path, mark):
    state = load_checkpoint(path)
    state["identity"]["seed"] = 99
    torch.save(state, path)


@pytest.mark.parametrize("damage", [_half, _flipped, _garbage, _empty, _hostile, _hostile_old_format, _of_another_run])
def test_resume_uses_the_newest_intact_checkpoint(damage, broken_off):
    off, uninterrupted = broken_off
    mark = off.parent / "executed"
    _, newest = sorted((off / "checkpoints").iterdir())
    damage(newest, mark)
    with pytest.warns(HastenWarning, match=rf"{newest.name} is passed over"):
        hasten.train(engine_tasks.map_style(), out=off, resume=True, device="cpu")
    assert not mark.exists()
    assert start_steps(off) == [0, 7]  # the newest was of step 8
    assert (off / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
    assert (off / "log.jsonl").read_bytes() == (uninterrupted / "log.jsonl").read_bytes()


def start_steps(directory) -> list[int]:
    """Returns the steps at which the run in a directory was started and resumed."""
    times = [json.loads(line) for line in (directory / "times.jsonl").read_text().splitlines()]
    return [time["step"] for time in times if time["what"] == "start"]


def test_resume_without_an_intact_checkpoint_keeps_the_log(broken_off):
    off, _ = broken_off
    for path in (off / "checkpoints").iterdir():
        _garbage(path, None)
    log = (off / "log.jsonl").read_bytes()
    with (
        pytest.warns(HastenWarning, match="passed over"),
        pytest.raises(RunError, match=r"no checkpoint in .* can be used; choose another --out"),
    ):
        hasten.train(engine_tasks.map_style(), out=off, resume=True, device="cpu")
    assert log and (off / "log.jsonl").read_bytes() == log


def test_resume_before_the_first_checkpoint_starts_again(broken_off):
    off, uninterrupted = broken_off
    for path in (off / "checkpoints").iterdir():
        path.unlink()
    hasten.train(engine_tasks.map_style(), out=off, resume=True, device="cpu")
    assert (off / "log.jsonl").read_bytes() == (uninterrupted / "log.jsonl").read_bytes()


def test_resume_removes_a_partial_file(broken_off):
    off, _ = broken_off
    stale = off / "checkpoints" / "step-0000000099.pt.part"
    stale.write_bytes(b"half")
    hasten.train(engine_tasks.map_style(), out=off, resume=True, device="cpu")
    assert not stale.exists()


def test_run_keeps_two_checkpoints_of_plain_data(broken_off):
    _, uninterrupted = broken_off
    checkpoints = sorted((uninterrupted / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-0000000011.pt", "step-0000000012.pt"]
    with zipfile.ZipFile(checkpoints[-1]) as archive:
        assert archive.testzip() is None
    assert load_checkpoint(checkpoints[-1])["progress"]["step"] == 12


def test_full_disk_keeps_the_newest_whole_checkpoint(tmp_path):
    """A limit on file sizes stands in for the full disk: the system refuses the write at the same place."""
    out, limit = tmp_path / "r", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(records):
        if records[-1]["step"] == 5:
            size = max(path.stat().st_size for path in (out / "checkpoints").iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limit[1]))

    try:
        with pytest.raises(RunError, match=r"cannot write .*step-0000000005.pt.*--resume"):
            hasten.train(engine_tasks.map_style(), out=out, checkpoint_seconds=0, observers=[fill], device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-0000000003.pt", "step-0000000004.pt"]
    assert hasten.train(engine_tasks.map_style(), out=out, resume=True, device="cpu")["steps"] == 12


def test_log_on_a_failing_disk_is_one_error_line(tmp_path):
    directory = RunDirectory(tmp_path / "r", {}, None, resume=False, resume_key=lambda recipe: recipe)
    directory.begin({})
    directory._log.close()
    directory._log = open(tmp_path / "r" / "log.jsonl", "rb")  # a file that may not be written stands in for the disk  # noqa: SIM115
    with pytest.raises(RunError, match=r"cannot write .*log.jsonl: .*--resume"):
        directory.cut_log(0)
    directory.close()


def test_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="choose another --out"):
            hasten.train(engine_tasks.map_style(), out=out, device="cpu")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only directory")
def test_read_only_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigurationError, match="cannot write to"):
            hasten.train(engine_tasks.map_style(), out=tmp_path / "r", device="cpu")
    finally:
        tmp_path.chmod(0o700)


def test_state_wider_than_its_parameter_keeps_its_width(tmp_path):
    """torch casts an optimizer's state to the parameter's type when it loads it."""
    program = build(engine_tasks.map_style())
    weight = next(program.run.model.parameters())
    wide = torch.full(weight.shape, 1 / 3, dtype=torch.float64)
    program.run.optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": wide, "exp_avg_sq": wide}
    path = tmp_path / "state.pt"
    torch.save(get_state(program), path)
    again = build(engine_tasks.map_style())
    restore(again, load_checkpoint(path))
    assert torch.equal(again.run.optimizer.state[next(again.run.model.parameters())]["exp_avg"], wide)


def test_resume_random_state_of_a_machine_with_more_gpus_is_accepted():
    """States of devices that do not exist here are ignored."""
    state = get_rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 2)}
    if torch.cuda.is_available():
        state["cuda"][: torch.cuda.device_count()] = torch.cuda.get_rng_state_all()
    drawn = torch.rand(3)
    set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_random_state_of_the_device_of_a_gpu_run_is_ignored_on_a_cpu():
    """A run may resume on a GPU with another number; on a CPU its dropout begins a stream of its own."""
    state, drawn = get_rng_state() | {"device": torch.zeros(16, dtype=torch.uint8)}, torch.rand(3)
    set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


class Following(torch.nn.Module):
    """A student, and a teacher that follows it in the forward pass by a write that PyTorch's version counter does not
    see."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, inputs):
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return self.student(inputs) - self.teacher(inputs)


def test_checkpoint_copies_weights_changed_in_the_forward_pass_before_it():
    task = engine_tasks.map_style()
    run = build(dataclasses.replace(task, model=Following)).run
    address = {weight.data_ptr() for weight in update_only_tensors(run)}
    assert address == {weight.data_ptr() for weight in run.unwrapped_model.student.parameters()}


class WithTensor(torch.nn.Sequential):
    """A model with one tensor that safetensors does not know."""

    def __init__(self, tensor):
        super().__init__(*engine_tasks.model())
        self.register_buffer("adjacency", tensor)


@pytest.mark.parametrize(
    ("tensor", "kind"), [(torch.eye(3).to_sparse(), "sparse_coo"), (torch.eye(3, dtype=torch.complex128), "complex128")]
)
def test_tensor_that_cannot_be_saved_is_refused_before_the_first_step(tensor, kind, tmp_path):
    task, steps = dataclasses.replace(engine_tasks.map_style(), model=lambda: WithTensor(tensor)), []
    with pytest.raises(ConfigurationError, match=f"cannot store adjacency, which is {kind}; .*without --out"):
        hasten.train(task, out=tmp_path / "r", observers=[steps.append], device="cpu")
    assert not steps
    assert hasten.train(dataclasses.replace(task, epochs=0.2), device="cpu")["steps"] == 1


def test_state_of_a_rank_is_restored_in_the_memory_format_of_the_weights(tmp_path):
    """Fused kernels on the CPU read it in the order of memory, and what is saved is contiguous."""
    recipe = make_methods(hasten.Recipe.coerce("channels_last + fused_optimizer"))
    images = Labeled((3, 4, 4))
    task = convolutional(model=lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 4), torch.nn.Flatten()))
    program, again = (build(dataclasses.replace(task, train_data=images), recipe) for _ in range(2))
    for each in (program, again):
        each.run.parallel = ParallelContext(each.run.ranks)
        each.run.parallel.rank_state["replica"] = LocalReplicaState(each.run)
    next(train_steps(program))
    torch.save(get_state(program), tmp_path / "state.pt")
    restore(again, load_checkpoint(tmp_path / "state.pt"))
    (weight, state), _ = again.run.optimizer.state.items()
    assert state["momentum_buffer"].stride() == weight.stride() and not weight.is_contiguous()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("hasten.engine.run_dir.fcntl.lockf", refuse)
    directory = RunDirectory(tmp_path / "r", {}, None, resume=False, resume_key=lambda recipe: recipe)
    with pytest.warns(HastenWarning, match="has no locks"):
        directory.begin({})
    directory.close()

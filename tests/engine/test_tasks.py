"""References to tasks: every form that is accepted, and one clear line for every form that is not."""

import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

from hasten import ConfigurationError, Task
from hasten.engine.tasks import TaskRef, hash_of_loaded_code, load_task, workload_names

MINE = """
import torch
from torch import nn
from hasten import Task

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor([float(i)]), torch.tensor([float(i * i)])

def small():
    return Task(model=lambda: nn.Linear(1, 1), train_data=Squares(), loss=nn.functional.mse_loss,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch_size=4)

def number(): return 3
def nothing(): pass
def named(width): return None
def falls():
    raise KeyError("no such column")
def refuses():
    from hasten import ConfigurationError
    raise ConfigurationError("the disk with the data is not there")
def leaves():
    raise SystemExit("bye")
wide = 7
"""


SIBLING = """
def task():
    from mine import small
    return small()
"""
DRAWN = """
import torch
from mine import small
import dataclasses

x = torch.randn(4).tolist()

def task():
    return dataclasses.replace(small(), train_data=[*x, *torch.randn(4).tolist()])
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import torch\nimport no_such_package_at_all\n")
    (tmp_path / "unreadable.py").write_text("def task(:\n")
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def task_with(data) -> Task:
    return Task(
        model=lambda: nn.Linear(1, 1),
        train_data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=1,
    )


INVALID_REFERENCES = {
    "digit": ["no workload is called 'digit'", "did you mean digits?", "path/to/file.py:function"],
    "": ["no workload is called ''", "digits"],
    "_data": ["no workload is called '_data'"],
    "os:system": ["no workload is called 'os:system'"],
    "{dir}/gone.py:task": ["there is no file", "gone.py"],
    "{dir}/gone.py": ["there is no file", "gone.py"],
    "{dir}/broken.py:task": ["broken.py does not import", "no_such_package_at_all", "line 2"],
    "{dir}/unreadable.py:task": ["unreadable.py does not import", "SyntaxError", "line 1"],
    "{dir}/mine.py:smal": ["mine.py has no function 'smal'", "did you mean small"],
    "{dir}/mine.py:wide": ["mine.py has no function 'wide'"],
    "{dir}/mine.py": ["name the function of mine.py", "mine.py:small or mine.py:number"],
    "{dir}/mine.py:": ["mine.py:function", "mine.py:small"],
    "{dir}/empty.py": ["name the function of empty.py", "no function without arguments"],
    "{dir}/mine.py:number": ["mine.py:number must return a hasten.Task", "int"],
    "{dir}/mine.py:nothing": ["mine.py:nothing must return a hasten.Task", "nothing"],
    "{dir}/mine.py:named": ["mine.py:named raised TypeError", "width"],
    "{dir}/mine.py:falls": ["mine.py:falls raised KeyError", "no such column", "line 18"],
    "{dir}/mine.py:refuses": ["the disk with the data is not there"],
    "{dir}/mine.py:leaves": ["mine.py:leaves raised SystemExit: bye"],
}


@pytest.mark.parametrize("what", INVALID_REFERENCES)
def test_invalid_task_is_one_clear_line(what, mine):
    with pytest.raises(ConfigurationError) as refused:
        load_task(what.format(dir=mine))
    message = str(refused.value)
    assert "\n" not in message
    for expected in INVALID_REFERENCES[what]:
        assert expected in message


def test_task_function_may_import_a_file_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sibling_of_late_import.py").write_text(MINE)
    text = SIBLING.replace("mine", "sibling_of_late_import")
    (tmp_path / "imports_late.py").write_text(text)
    assert isinstance(load_task(f"{tmp_path}/imports_late.py:task"), Task)


def test_file_of_many_functions_lists_only_some(tmp_path):
    (tmp_path / "many.py").write_text("".join(f"def task_{number}(): pass\n" for number in range(30)))
    with pytest.raises(
        ConfigurationError, match=r"many\.py:task_0 or .*many\.py:task_7 or another of its 30 functions$"
    ):
        load_task(tmp_path / "many.py")


@pytest.mark.parametrize("what", [None, 3, ["digits"]])
def test_invalid_reference_is_refused(what):
    with pytest.raises(ConfigurationError, match="a task is a workload's name"):
        TaskRef.of(what)


def test_workload_names_are_their_files():
    names = workload_names()
    assert names[0] == min(names) and {"digits", "fashion_mnist", "cifar10", "tiny_shakespeare", "adult", "imdb"} <= {
        *names
    }
    assert not [name for name in names if name.startswith("_")]


def test_task_loads_from_workload_file_function_and_object(mine):
    task = load_task("digits")
    assert (task.name, load_task(task), str(TaskRef.of("digits"))) == ("digits", task, "digits")
    assert load_task(f"{mine}/mine.py:small").name == "mine.py:small"
    assert load_task(f"{mine}/mine.py:small").train_data[3][1].item() == 9.0

    def made_here():
        return task_with([(torch.zeros(1), torch.zeros(1))])

    assert (load_task(made_here).name, str(TaskRef.of(made_here))) == ("made_here", "made_here")


def test_data_drawn_while_loading_are_constant(mine):
    (mine / "drawn.py").write_text(DRAWN)
    before = torch.get_rng_state()
    first, again = (load_task(f"{mine}/drawn.py:task").train_data for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    del sys.modules[next(name for name in sys.modules if "_drawn_" in name)]  # as in another process
    elsewhere = load_task(f"{mine}/drawn.py:task").train_data
    assert first == again == elsewhere


def test_reference_to_a_file_is_independent_of_the_current_directory(mine, monkeypatch):
    monkeypatch.chdir(mine)
    text = TaskRef.of("mine.py:small").to_json()
    monkeypatch.chdir("/")
    assert TaskRef.from_json(text).load().name == "mine.py:small"


def test_edited_module_is_other_code_wherever_it_lies(tmp_path, monkeypatch):
    """So that no search continues with the trials of another model."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "network_elsewhere.py").write_text("WIDTH = 1\n")
    import_module("network_elsewhere")
    before = hash_of_loaded_code()
    assert hash_of_loaded_code() == before
    (tmp_path / "network_elsewhere.py").write_text("WIDTH = 2\n")
    assert hash_of_loaded_code() != before
    monkeypatch.delitem(sys.modules, "network_elsewhere")


READER = """
import sys
from hasten.engine.tasks import TaskRef
for line in sys.stdin:
    task = TaskRef.from_json(line).load()
    print(task.name, len(task.train_data), float(task.train_data[1][1]))
"""


@pytest.mark.slow
def test_objects_are_sent_to_another_process(mine):
    height = torch.tensor([5.0])
    closure = lambda: task_with([(torch.zeros(1), torch.zeros(1)), (torch.ones(1), height)])  # noqa: E731
    # its dataset's class is in a file that no other process can import
    from_a_file = load_task(f"{mine}/mine.py:small")
    references = [TaskRef.of(closure), TaskRef.of(closure().named("shown")), TaskRef.of(from_a_file)]
    lines = "\n".join(reference.to_json() for reference in references)
    read = subprocess.run([sys.executable, "-c", READER], input=lines, capture_output=True, text=True, cwd=mine)
    assert read.stdout.splitlines() == ["<lambda> 2 5.0", "shown 2 5.0", "mine.py:small 8 1.0"], read.stderr


def test_unpicklable_objects_are_refused(tmp_path):
    with (
        open(tmp_path / "open", "w") as handle,
        pytest.raises(ConfigurationError, match=r"cannot be passed to another process.*file\.py:function"),
    ):
        TaskRef.of(task_with([handle])).to_json()


def test_pickled_task_leaves_out_entries_of_the_path_that_are_no_text(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert TaskRef.from_json(TaskRef.of(lambda: None).to_json()).obj() is None


def test_edited_file_is_read_again(mine):
    assert len(load_task(f"{mine}/mine.py:small").train_data) == 8
    (mine / "mine.py").write_text(MINE.replace("return 8", "return 12"))
    assert len(load_task(f"{mine}/mine.py:small").train_data) == 12


OF_MAIN = """
import sys, torch
from torch import nn
from hasten import Task
from hasten.engine.tasks import TaskRef

class Net(nn.Linear):
    kinds = {"a", "b", "c"}

data = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.full((8, 1), float(sys.argv[1])))
task = Task(model=lambda: Net(1, 1), train_data=data, loss=nn.functional.mse_loss, batch_size=4,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
print(TaskRef.from_json(TaskRef.of(task).to_json()).fingerprint())
"""


@pytest.mark.slow
def test_fingerprint_of_an_object_depends_on_its_content_only(tmp_path):
    (tmp_path / "main.py").write_text(OF_MAIN)
    argv = [sys.executable, "main.py"]
    runs = [subprocess.run([*argv, y], capture_output=True, text=True, cwd=tmp_path, check=False) for y in "112"]
    first, again, other = (run.stdout for run in runs)
    assert first and first == again != other, runs[0].stderr


def test_fingerprint_of_an_object_tells_frozen_weights_apart():
    net = nn.Linear(1, 1)
    reference = TaskRef.of(lambda: net)
    before = reference.fingerprint()
    net.requires_grad_(False)
    assert reference.fingerprint() != before


def test_fingerprint_of_an_object_tells_texts_that_look_like_numbers_of_classes_apart():
    first, other = (TaskRef.of(partial(load_task, digit * 32)).fingerprint() for digit in "ab")
    assert first != other

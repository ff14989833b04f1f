"""Every invalid request: exit code 2 (1 for a run that cannot continue), exactly one line on standard error, no
traceback."""

import json
import os

import pytest
import torch

import hasten
from hasten.cli.main import _misplaced_option, main

MINE = """
import dataclasses, typing

import torch
from torch import nn
from hasten import Task, Method, Card, Exactness

def good(**changes):
    fields = dict(
        model=lambda: nn.Linear(2, 2), train_data=[(torch.zeros(2), 0)] * 4,
        validation_data=[(torch.zeros(2), 0)] * 4, loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), metric="accuracy", batch_size=2, epochs=1,
    )
    return Task(**(fields | changes))

def nothing(): pass
def raises(): raise KeyError("my own mistake")
def leaves(): raise SystemExit(3)
def wrong_type(): return good(batch_size="many")
def unknown_field(): return good(bach_size=3)
def unknown_metric(): return good(metric="acuracy")
def text_metric(): return good(metric=lambda output, target: "high", higher_is_better=True)
def empty(): return good(train_data=[])
def negative(): return good(train_data=Negative())
def negative_in_a_loader(): return good(train_data=torch.utils.data.DataLoader(Negative(), batch_size=2))
def endless(): return good(validation_data=Endless())
def no_parameters(): return good(model=lambda: nn.ReLU())
def no_module(): return good(model=lambda: 3)
def label_out_of_range(): return good(train_data=[(torch.zeros(2), 7)] * 4)
def not_a_number(): return good(train_data=[(torch.full((2,), float("nan")), 0)] * 4)
def infinite(): return good(train_data=[(torch.full((2,), float("inf")), 0)] * 4)
def nan_validation(): return good(validation_data=[(torch.full((2,), float("nan")), 0)] * 4, metric="loss")
def changing_shape(): return good(train_data=[(torch.zeros(2), 0), (torch.zeros(3), 0)] * 4, batch_size=8)
def raises_at_a_sample(): return good(train_data=Raising())
def changing_output(): return good(model=Changing)
def longer(): return good(epochs=3)
def number_as_metric(): return good(metric=3)
def number_as_data(): return good(train_data=3)
def half_a_sample(): return good(batch_size=2.5)
def direction_in_words(): return good(higher_is_better="lower")
def empty_validation(): return good(validation_data=[])
def empty_validation_stream(): return good(validation_data=NoSamples())
def a_loss_for_each_sample(): return good(loss=lambda output, target: nn.functional.cross_entropy(output, target,
    reduction="none"))
def raises_in_a_worker(): return good(train_data=torch.utils.data.DataLoader(Raising(), batch_size=2, shuffle=True,
    num_workers=2))
def no_length(): return good(train_data=Stream())
def plain_number(): return good(loss=lambda output, target: nn.functional.cross_entropy(output, target).item())
def no_number(): return good(loss=lambda output, target: None)
def no_schedule(): return good(optimizer=lambda model, steps: (torch.optim.SGD(model.parameters(), lr=0.1), 3))
def no_own_loss(): return good(loss=None)
def gives_up(): raise GeneratorExit
def commands_the_terminal(): raise ValueError("red \x1b[31m letters")
def no_loss_of_its_own(): return good(loss=None, model=Silent, train_data=[{"x": torch.zeros(2)}] * 4)

class Silent(nn.Linear):
    def __init__(self): super().__init__(2, 2)
    def forward(self, x): return {"loss": None, "logits": super().forward(x)}

class Changing(nn.Linear):
    calls = 0
    def __init__(self): super().__init__(2, 2)
    def forward(self, x):
        self.calls += 1
        return super().forward(x)[: 2 if self.calls == 1 else 1]

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([(torch.zeros(2), 0)] * 4)

class NoSamples(Stream):
    def __iter__(self): return iter([])

class Raising(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5: raise OSError("a file is gone")
        return torch.zeros(2), 0

class Negative(torch.utils.data.Dataset):
    def __len__(self): return -3
    def __getitem__(self, index): return torch.zeros(2), 0

class Endless(Negative):
    def __len__(self): return 10**30

class Bad:
    pass

class NoCard(Method):
    pass

@dataclasses.dataclass(frozen=True)
class Fine(Method):
    card = Card(summary="", exactness=Exactness.CHANGES_TRAINING)
    times: int = 2
    def batches(self): return "a helper that is no hook"
    def plan(self, plan, run):
        plan.epochs *= self.times
        return plan

@dataclasses.dataclass(frozen=True)
class NoDefault(Method):
    card = Card(summary="", exactness=Exactness.CHANGES_TRAINING)
    amount: int

@dataclasses.dataclass(frozen=True)
class OneOf(Method):
    card = Card(summary="", exactness=Exactness.CHANGES_TRAINING)
    rule: typing.Literal["linear", "root"] = "linear"
    several: list = ()

class Misspelt(Method):
    card = Card(summary="", exactness=Exactness.BIT_EXACT)
    def optimiser(self, make, run): return make
"""

FILES = {
    "mine.py": MINE,
    "broken.py": "def task(:\n",
    "unimportable.py": "import nonesuch_package\n",
    "stumbling_module.py": "1 / 0\n",
    "file": "",
    "broken.toml": "[methods.ema\n",
    "binary.toml": "\udcff\udcfe",
    "unrelated.toml": "[tasks.x]\n",
    "no_table.toml": "methods = 3\n",
    "not_tables.toml": "[methods]\nema = 3\n",
    "list_value.toml": "[methods.ema]\ndecay = [1, 2]\n",
    "wrong_type.toml": "[methods.ema]\ndecay = 'much'\n",
    "out_of_range.toml": "[methods.ema]\ndecay = 7.0\n",
    "not_installed.toml": "[methods.warp_drive]\n",
    "outside.toml": '[methods."./gone.py:Faster"]\n',
    "with_code.toml": '[methods."mine.py:Fine"]\ntimes = 3\n',
    "digits.toml": f"[methods.ema]\nstart = {'9' * 5000}\n",
    "deep.toml": "x = " + "[" * 20_000,
    "twice.toml": "[methods.ema]\n[methods.ema]\n",
    "dotted.toml": "[methods]\n__class__.__init__ = 1\n",
    "huge.toml": "#" * (1 << 20) + "\n",
}

# arguments of `hasten`, required content of the error line
INVALID_REQUESTS = [
    ("tune python train.py", "unexpected argument 'train.py'; a command of yours comes after --: hasten tune --"),
    ("tune --budget 2 minutes -- python train.py", "unexpected argument 'minutes' before --; see hasten tune --help"),
    ("trian digits", "did you mean train?"),
    ("train", "TASK"),
    ("train digits extra", "extra"),
    ("train digits --recipie r.toml", "--recipe"),
    ("train digits --with", "--with"),
    ("train digit", "digits"),
    ("train gone.py:task", "no file"),
    ("train mine.py", "name the function of mine.py that returns the task"),
    ("train mine.py:goud", "good"),
    ("train mine.py:good()", "cannot read"),
    ("train broken.py:task", "SyntaxError"),
    ("train unimportable.py:task", "nonesuch_package"),
    ("train mine.py:nothing", "must return a hasten.Task"),
    ("train mine.py:raises", "my own mistake"),
    ("train mine.py:leaves", "SystemExit"),
    ("train mine.py:wrong_type", "batch_size"),
    ("train mine.py:unknown_field", "bach_size"),
    ("train mine.py:unknown_metric", "accuracy"),
    ("train mine.py:empty", "empty"),
    ("train mine.py:number_as_metric", "Task(metric=) must be one of accuracy"),
    ("train mine.py:number_as_data", "Task(train_data=) must be a dataset"),
    ("train mine.py:half_a_sample", "Task(batch_size=) must be a positive whole number, not 2.5"),
    ("train mine.py:direction_in_words", "Task(higher_is_better=) must be True, False or None, not 'lower'"),
    ("train mine.py:empty_validation", "Task(validation_data=) is empty"),
    ("train mine.py:negative", "the length of the Negative cannot be read"),
    ("train mine.py:negative_in_a_loader", "the length of the DataLoader cannot be read"),
    ("train mine.py:endless", "the length of the Endless cannot be read"),
    ("train mine.py:text_metric --quiet", "number"),
    ("compare mine.py:text_metric --a baseline --b ema --quiet", "number"),
    ("tune mine.py:text_metric --quiet", "number"),
    ("train mine.py:no_parameters", "no parameters"),
    ("train mine.py:no_schedule", "it returned a int as the schedule"),
    ("train mine.py:commands_the_terminal", r"red \x1b[31m letters"),
    ("train pipe.py:task", "pipe.py is no regular file"),
    ("train mine.py:good --recipe pipe.toml", "pipe.toml is no regular file"),
    ("train mine.py:good --recipe mine.py", "mine.py is no recipe"),
    ("train mine.py:good --max-bad-rows 9999999999", "from 1 to 999999999"),
    ("data inspect pipe.csv", "pipe.csv is not a regular file"),
    ("train mine.py:no_module", "nn.Module"),
    ("train mine.py:good --with bfloat61", "bfloat16"),
    ("train mine.py:good --with ema:dekay=0.9", "decay"),
    ("train mine.py:good --with ema:decay=fast", "number"),
    ("train mine.py:good --with ema:decay", "key=value"),
    ("train mine.py:good --with ema:decay=2", "decay"),
    ("train mine.py:good --with ema:start=-3", "start must be at least 0"),
    ("train mine.py:good --with ema:start=1e23", "whole number"),
    ("train mine.py:good --with num_threads:count=-2", "count must be at least 1"),
    ("train mine.py:good --with budgeted_schedule:factor=0", "factor must be above 0 and below 1"),
    ("train mine.py:good --with gradient_clipping:max_norm=nan", "max_norm must be finite and above 0"),
    ("train mine.py:good --with early_stopping:patience=-1", "patience must be at least 1"),
    ("train mine.py:good --with batch_size:rule=cubic", "linear, sqrt, none"),
    ("train mine.py:good --with ema --with ema", "twice"),
    ("train mine.py:good --with ema+ema:decay=0.9", "twice"),
    ("train mine.py:good --with ema:decay=0.9,decay=0.99", "decay is given twice"),
    (
        "train mine.py:good --with in_memory_batches --with cache_dataset",
        "cache_dataset and in_memory_batches both replace data",
    ),
    ("train mine.py:good --with mine.py:Bad", "hasten.Method"),
    ("train mine.py:good --with mine.py:NoCard", "card"),
    ("train mine.py:good --with mine.py:Misspelt", "optimizer"),
    ("train mine.py:good --with mine.py:Gone", "no class"),
    ("train mine.py:good --with mine.py:NoDefault", "amount"),
    ("train mine.py:good --with mine.py:OneOf:rule=square", "linear, root"),
    ("train mine.py:good --with mine.py:OneOf:several=3", "several"),
    ("train mine.py:good --with stumbling_module:Faster", "ZeroDivisionError"),
    ("train mine.py:good --with gone.py:Faster", "no file"),
    ("train mine.py:good --recipe gone.toml", "gone.toml"),
    ("train mine.py:good --recipe broken.toml", "TOML"),
    ("train mine.py:good --recipe binary.toml", "UTF-8"),
    ("train mine.py:good --recipe unrelated.toml", "tasks"),
    ("train mine.py:good --recipe no_table.toml", "table"),
    ("train mine.py:good --recipe not_tables.toml", "table"),
    ("train mine.py:good --recipe list_value.toml", "decay"),
    ("train mine.py:good --recipe wrong_type.toml", "decay"),
    ("train mine.py:good --recipe out_of_range.toml", "decay"),
    ("train mine.py:good --recipe not_installed.toml", "warp_drive"),
    ("train mine.py:good --recipe outside.toml", "gone.py"),
    ("train mine.py:good --recipe with_code.toml", "--with"),
    ("compare mine.py:good --a baseline --b with_code.toml", "--with"),
    ("eject mine.py:good --recipe with_code.toml --with mine.py:Bad", "--with"),
    ("train mine.py:good --recipe digits.toml", "TOML"),
    ("train mine.py:good --recipe deep.toml", "TOML"),
    ("train mine.py:good --recipe twice.toml", "TOML"),
    ("train mine.py:good --recipe dotted.toml", "__class__"),
    ("train mine.py:good --recipe huge.toml", "larger"),
    ("train mine.py:good --device warp", "warp"),
    ("train mine.py:good --device cuda:99", "cuda:99"),
    ("train mine.py:good --seed -1", "--seed"),
    ("train mine.py:good --seed one", "--seed"),
    ("train mine.py:good --out file", "file"),
    ("train mine.py:good --out . --with bfloat61", "bfloat16"),
    ("train mine.py:good --resume", "--out"),
    ("train mine.py:good --out fresh --resume", "no directory fresh"),
    ("compare mine.py:good --a baseline", "--b"),
    ("compare mine.py:good --a baseline --b bfloat61", "bfloat16"),
    ("compare mine.py:good --a baseline --b ema --budget 0", "--budget"),
    ("tune mine.py:good --budget soon", "--budget"),
    ("tune mine.py:good --budget -5m", "--budget must be a time"),
    ("tune mine.py:good --budget -.5h", "--budget must be a time"),
    ("tune mine.py:good --budget inf", "--budget"),
    ("tune mine.py:good --budget +", "--budget must be a time"),
    ("tune mine.py:good --budget +0m", "--budget must be a time"),
    ("tune mine.py:good --margin nan", "--margin"),
    ("tune mine.py:good --evidence certain", "--evidence"),
    ("tune mine.py:good --price-per-hour free", "--price-per-hour must be an amount of money"),
    ("tune mine.py:good --price-per-hour 0", "--price-per-hour must be an amount of money"),
    ("tune mine.py:good --runs 0", "--runs"),
    ("tune mine.py:good --methods ,", "--methods"),
    ("tune mine.py:good --methods ema,znrom", "znorm"),
    ("tune mine.py:good --with gone.py:Faster", "no file"),
    ("tune mine.py:good --out file", "file"),
    ("diagnose digit", "digits"),
    ("diagnose mine.py:good --with bfloat61", "bfloat16"),
    ("diagnose mine.py:good --budget never", "--budget"),
    ("methods emma", "ema"),
    ("methods gone.py:Faster", "no file"),
    ("report gone", "gone"),
    ("report file", "file"),
    ("eject mine.py:good --with bfloat61", "bfloat16"),
    ("eject digit", "digits"),
    ("eject mine.py:unknown_metric", "accuracy"),
    ("eject mine.py:good --out nowhere/script.py", "nowhere"),
]

UNRESUMABLE = [
    ("train mine.py:plain_number", "Task(loss=) must return a tensor"),
    ("train mine.py:no_number", "not None"),
    ("train mine.py:no_loss_of_its_own", "returns its own loss; this one returned None"),
    ("train mine.py:label_out_of_range", "label"),
    ("compare mine.py:label_out_of_range --a baseline --b ema", "label outside"),
    ("diagnose mine.py:label_out_of_range", "label outside"),
    ("train mine.py:no_own_loss", "with loss=None the model gets the whole batch"),
    ("train mine.py:gives_up", "the task's own code raised GeneratorExit"),
    ("train mine.py:not_a_number", "nan"),
    ("train mine.py:infinite", "infinity"),
    ("train mine.py:nan_validation", "validation data holds NaN"),
    ("train mine.py:changing_shape", "equal size"),
    ("train mine.py:changing_output", "step 2 (epoch 1, batch 2) failed: ValueError: Expected input batch_size (1)"),
    ("train mine.py:empty_validation_stream", "the validation data gave no batch"),
    ("train mine.py:a_loss_for_each_sample", "Task(loss=) must return one number"),
    ("train mine.py:raises_in_a_worker", "of the epoch, sample 5: OSError: a file is gone"),
    ("train mine.py:raises_at_a_sample", "a file is gone"),
    ("train mine.py:raises_at_a_sample --with loader_workers:num_workers=1", "a file is gone"),
    ("train mine.py:good --with compile:backend=warp", "warp"),
]

WARNINGS = [("train mine.py:no_length", "no length")]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with valid and invalid files."""
    directory = tmp_path_factory.mktemp("bad_input")
    for name, text in FILES.items():
        (directory / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    for name in ("pipe.py", "pipe.toml", "pipe.csv"):
        os.mkfifo(directory / name)
    return directory


@pytest.mark.parametrize(("argv", "message"), INVALID_REQUESTS, ids=lambda value: value[:60])
def test_command_invalid_request_exits_2_with_one_line(argv, message, here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    assert_one_line(argv, message, main(argv.split()), 2, capfd)


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "mine.py:good", "--recipe", ""],
        ["compare", "mine.py:good", "--a", "", "--b", "ema"],
        ["methods", ""],
        ["report", ""],
    ],
    ids=" ".join,
)
def test_command_empty_name_is_refused(argv, here, monkeypatch, capfd):
    """An unset variable of a shell script gives an empty name."""
    monkeypatch.chdir(here)
    assert_one_line(" ".join(argv), "", main(argv), 2, capfd)


@pytest.mark.parametrize(("argv", "message"), UNRESUMABLE, ids=lambda value: value[:60])
def test_command_unresumable_run_exits_1_with_one_line(argv, message, here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    assert_one_line(argv, message, main([*argv.split(), "--quiet"]), 1, capfd)


@pytest.mark.parametrize(("argv", "message"), WARNINGS, ids=lambda value: value[:60])
def test_command_probable_mistake_warns(argv, message, here, monkeypatch, capfd):
    """The run continues; one line warns of a probable mistake."""
    monkeypatch.chdir(here)
    assert main([*argv.split(), "--json"]) == 0
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("hasten: ") and message in err


@pytest.mark.parametrize(
    "argv",
    ["--recipe with_code.toml --with mine.py:Fine", "--recipe elsewhere/with_code.toml --with elsewhere/mine.py:Fine"],
)
def test_recipe_code_also_named_on_command_line_keeps_its_options(argv, here, monkeypatch, capfd):
    """The recipe's ``mine.py`` lies beside it, whatever the current directory is; its options apply."""
    monkeypatch.chdir(here)
    (here / "elsewhere").mkdir(exist_ok=True)
    for name in ("mine.py", "with_code.toml"):
        (here / "elsewhere" / name).write_text(FILES[name])
    assert main(["train", "mine.py:good", "--json", *argv.split()]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 3 * 2


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.fixture
def broken_off(here, tmp_path, monkeypatch):
    """Returns the checkpoints, oldest first, of an interrupted mine.py:longer, and the arguments that resume it."""
    monkeypatch.chdir(here)

    def break_off(records):
        if records[-1].get("step") == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        hasten.train("mine.py:longer", out=tmp_path / "run", checkpoint_seconds=0, observers=[break_off], device="cpu")
    argv = ["train", "mine.py:longer", "--out", str(tmp_path / "run"), "--resume", "--device", "cpu", "--quiet"]
    return sorted((tmp_path / "run" / "checkpoints").iterdir()), argv


def test_resume_damaged_checkpoint_is_skipped_and_named(broken_off, capfd):
    (_, newest), argv = broken_off
    newest.write_bytes(newest.read_bytes()[:100])
    assert main(argv) == 0
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"hasten: {newest.name} is passed over")


def test_resume_foreign_checkpoint_is_not_executed(broken_off, here, capfd):
    checkpoints, argv = broken_off
    for path in checkpoints:
        torch.save({"model": Hostile()}, path)
    assert main(argv) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line.startswith("hasten: step-") for line in lines] == [
        True,
        True,
        False,
    ] and "choose another --out" in lines[-1]
    assert not (here / "executed").exists()


def assert_one_line(argv: str, message: str, code: int, expected: int, capfd) -> None:
    out, err = capfd.readouterr()
    assert code == expected, f"hasten {argv}: exit code {code}, stderr {err!r}"
    assert err.count("\n") == 1 and err.startswith("hasten: "), f"hasten {argv}: not one line but {err!r}"
    assert message.lower() in err.lower(), f"hasten {argv}: {err!r} does not contain {message!r}"
    assert "Traceback" not in err and "internal error" not in err and len(err) < 500
    assert out == ""


@pytest.mark.parametrize(
    ("message", "argument", "found"),
    [
        ("error: unrecognized arguments: --budget 2m", "--budget", "--budget"),
        ("No such option: --budget", "--budget=2m", "--budget"),
        ("error: unrecognized arguments: --budget-of-mine 2", "--budget", ""),  # another option
        ("error: unrecognized arguments: --epoch 2", "--epoch", ""),  # hasten has none of this name
        ("KeyError: 'labels'", "--seed", ""),  # it took the option, and failed for another reason
    ],
)
def test_option_of_hasten_that_the_command_refuses_is_found(message, argument, found):
    message = f"train.py failed by itself with exit code 2: {message}"
    assert _misplaced_option(message, "tune", ["python", "train.py", argument, "2m"]) == found


def test_error_of_hasten_about_its_own_option_blames_no_option_of_the_command():
    message = "runs/a holds a search of another task; choose another --out"
    assert _misplaced_option(message, "tune", ["python", "train.py", "--out", "models"]) == ""

"""``hasten train --resume``: finds the requested run and its recipe; a mistyped directory does not start a new run."""

import dataclasses
import json

import pytest

import hasten
from hasten.cli.main import main
from hasten.engine.tasks import load_task

FILE = """
import torch
from hasten import Card, Exactness, Method, Task

def task():
    data = [(torch.zeros(2), 0)] * 8
    return Task(
        model=lambda: torch.nn.Linear(2, 2), train_data=data, validation_data=data,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), metric="accuracy", batch_size=2, epochs=2,
    )

class Own(Method):
    card = Card(summary="does nothing", exactness=Exactness.BIT_EXACT)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*argv: str) -> int:
    return main(["train", "mine.py:task", "--device", "cpu", "--json", *argv])


def break_off(out: str, *methods: str) -> None:
    """Leaves a run that was stopped in its second half."""

    def stop(records):
        if records[-1].get("step") == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        hasten.train("mine.py:task", list(methods), out=out, checkpoint_seconds=0, observers=[stop], device="cpu")


def test_resume_mistyped_directory_is_refused_with_the_nearest_runs(here, capfd):
    break_off("runs/first-try")
    (here / "runs" / "first-tray").mkdir()
    assert train("--out", "runs/fisrt-try", "--resume") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        "no directory runs/fisrt-try" in line and "did you mean runs/first-try?" in line and "remove --resume" in line
    )
    assert (
        train("--out", "nowhere/run", "--resume") == 2
        and "no directory nowhere/run to resume; for a new run" in capfd.readouterr().err
    )
    assert not (here / "runs" / "fisrt-try").exists() and not (here / "nowhere").exists()


def test_resume_empty_directory_starts_a_run(here, capfd):
    (here / "run").mkdir()
    assert train("--out", "run", "--resume") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["steps"] == 8 and "no run in run to resume" in err


def test_resume_without_methods_uses_the_run_s_recipe(here, capfd):
    break_off("run", "ema:decay=0.5")
    assert train("--out", "run", "--resume") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["recipe"] == "ema:decay=0.5" and result["steps"] == 8
    uninterrupted = hasten.train("mine.py:task", "ema:decay=0.5", out="uninterrupted", device="cpu")
    assert uninterrupted["evaluations"][-1]["metric"] == result["evaluations"][-1]["metric"]
    assert (here / "run" / "log.jsonl").read_bytes() == (here / "uninterrupted" / "log.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("argv", "here_"),
    [(["--with", "ema:decay=0.9"], "ema:decay=0.9"), (["--recipe", "baseline"], "baseline")],
    ids=["method", "baseline"],
)
def test_resume_another_recipe_error_quotes_the_typed_recipe(argv, here_, here, capfd):
    break_off("run", "ema:decay=0.5")
    assert train("--out", "run", "--resume", *argv) == 2
    assert f"another recipe: ema:decay=0.5 there, {here_} here" in capfd.readouterr().err


def test_resume_external_code_must_be_named_again(here, capfd):
    break_off("run", "./mine.py:Own", "ema")
    assert train("--out", "run", "--resume") == 2
    assert "--with './mine.py:Own + ema'" in capfd.readouterr().err
    assert train("--out", "run", "--resume", "--with", "./mine.py:Own + ema") == 0


def test_resume_with_a_fixed_metric_loses_no_step(here):
    """The missing number is found at the first evaluation; the training up to it is kept."""
    unfit = dataclasses.replace(load_task("mine.py:task"), metric=lambda output, target: "high", higher_is_better=True)
    with pytest.raises(hasten.ConfigurationError, match="must return one number; it returned 'high'"):
        hasten.train(unfit, out="run", checkpoint_seconds=0, device="cpu")
    trained = []
    result = hasten.train("mine.py:task", out="run", resume=True, device="cpu", observers=[trained.extend])
    assert [record["step"] for record in trained if "loss" in record] == [5, 6, 7, 8] and result["steps"] == 8


def read_json(here, name: str = "environment.json"):
    return json.loads((here / "run" / name).read_text())


def write_json(here, content) -> None:
    (here / "run" / "environment.json").write_text(json.dumps(content))


@pytest.mark.parametrize("argv", [[], ["--recipe", "baseline"]], ids=["nothing", "baseline"])
def test_resume_code_named_only_in_environment_json_is_not_run(argv, here, capfd):
    break_off("run")
    (here / "evil.py").write_text("open('executed', 'w')\n" + FILE)
    write_json(here, read_json(here) | {"recipe": {"./evil.py:Own": {}}})
    assert train("--out", "run", "--resume", *argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "methods from outside hasten" in line and "--with './evil.py:Own'" in line
    assert not (here / "executed").exists()


def test_resume_restores_option_types(here):
    fields = "    text: str | int = ''\n    other: str = ''\n    number: float = 1.0\n"
    (here / "mine.py").write_text(
        FILE.replace("class Own", "from dataclasses import dataclass\n\n@dataclass\nclass Own") + fields
    )
    recipe = hasten.Recipe({"./mine.py:Own": {"text": "3", "other": "a,b + c=d", "number": 0.1}})

    def stop(records):
        if records[-1].get("step") == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        hasten.train("mine.py:task", recipe, out="run", checkpoint_seconds=0, observers=[stop], device="cpu")
    assert read_json(here)["recipe"] == recipe.methods
    with pytest.raises(hasten.ConfigurationError, match="another recipe"):
        hasten.train(
            "mine.py:task",
            recipe.with_method("./mine.py:Own", text=3, other="a,b + c=d", number=0.1),
            out="run",
            resume=True,
        )
    assert hasten.train("mine.py:task", recipe, out="run", resume=True, device="cpu")["steps"] == 8


@pytest.mark.parametrize(
    "odd", [None, 3, "ema", ["ema"], {"ema": 3}, {"ema": {"decay": None}}, {"ema": {"decay": [0.5]}}], ids=str
)
def test_resume_invalid_recipe_is_one_error_line(odd, here, capfd):
    break_off("run")
    write_json(here, read_json(here) | {"recipe": odd})
    assert train("--out", "run", "--resume") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "the run in run cannot be read" in line and "environment.json" in line


def test_resume_unknown_recipe_without_methods_is_refused(here, capfd):
    """recipe.toml holds settings that methods found while they ran, so it does not replace the requested recipe."""
    break_off("run", "ema:decay=0.5")
    before = read_json(here)
    del before["recipe"]
    write_json(here, before)
    files = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    assert train("--out", "run", "--resume") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "the run in run cannot be read: the recipe in environment.json: every method is a table" in line
    assert files == {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}

"""The measuring commands, each run to its end on a tiny task: JSON keys, exit codes that agree with the verdict,
exactly one JSON object on standard output; and the HTML report of a real search."""

import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from hasten import Recipe
from hasten.benchmarking.blocks import MIN_PAIRS
from hasten.cli.main import main
from hasten.core.card import PHASES
from hasten.reporting.terminal import diagnose_answer
from hasten.reporting.validation import MAX_TEXT, SCHEMAS
from hasten.tuning import study, tune
from hasten.tuning.tune import BUDGET_RUNS, MIN_BUDGET_S
from helpers.process import run_hasten

PRINTED = "a task file that prints"
BLOBS = f"""
import torch
from torch import nn
from hasten import Task

print({PRINTED!r})

class Blobs(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (count,), generator=generator)
        self.x = torch.randn(count, 8, generator=generator) + 1.5 * self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return (self.x[index] - 0.75) / 1.25, int(self.y[index])

def task():
    return Task(
        model=lambda: nn.Linear(8, 2), train_data=Blobs(1024, 0), validation_data=Blobs(256, 1),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3), metric="accuracy", target=0.95,
        batch_size=32, epochs=12,
    )
"""
INTERVAL = {"median", "low", "high"}
SEARCHES = {
    "no improvement": ("tf32", 150.0),  # has no effect on a CPU
    "something may help": ("in_memory_batches", 150.0),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("answers")
    (directory / "blobs.py").write_text(BLOBS)
    return directory


@pytest.fixture
def here(directory, monkeypatch):
    monkeypatch.chdir(directory)
    return directory


class Search(NamedTuple):
    """The request of a search, its finished process, and its result."""

    method: str
    seconds: float
    done: subprocess.CompletedProcess
    result: dict


def brief_measurements() -> None:
    diagnosed, paced = tune.diagnose, study.Study.compare_speed
    tune.diagnose = lambda task, **given: diagnosed(task, **(given | {"budget": 1.0}))
    study.Study.compare_speed = lambda *recipes, **given: paced(*recipes, **(given | {"seconds": 1.0}))


def search_in_a_process(method: str, seconds: float, directory: Path) -> Search:
    """A complete search by the program in a process of its own.

    If there is nothing to find, measurements are short.
    """
    argv = [
        "tune",
        "blobs.py:task",
        "--methods",
        method,
        "--budget",
        f"{seconds}s",
        "--out",
        method,
        "--json",
        "--device",
        "cpu",
    ]
    done = run_hasten(*argv, cwd=directory, prepare=brief_measurements if method == "tf32" else bool)
    assert done.stdout, done.stderr
    return Search(method, seconds, done, only_object(done.stdout))


def only_object(out: str) -> dict:
    """Returns the one JSON object that standard output must contain."""
    assert out.count("\n") == 1 and out.endswith("\n")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def run_quietly(capfd, *argv: str) -> tuple[int, dict]:
    """Returns the exit code and the JSON result. Standard error may only contain output of the task's own file."""
    code = main([*argv, "--json", "--quiet", "--device", "cpu"])
    out, err = capfd.readouterr()
    assert set(err.splitlines()) <= {PRINTED}
    return code, only_object(out)


def assert_interval(ratio: dict) -> None:
    assert ratio.keys() == INTERVAL and 0 < ratio["low"] <= ratio["median"] <= ratio["high"]


@pytest.mark.slow
def test_diagnose_json_has_documented_keys(here, capfd):
    code, result = run_quietly(capfd, "diagnose", "blobs.py:task", "--budget", "1s")
    assert code == 0 and result["input"]["stages"]["read"] > 0
    console = Console(file=io.StringIO(), width=100)
    console.print(diagnose_answer(result))
    assert all(text in console.file.getvalue() for text in ("training step", "end to end", "waits for data"))
    assert result.keys() <= SCHEMAS["diagnose"].__annotations__.keys(), "what is written can be read"
    assert isinstance(result["verdict"], str) and result["verdict"]
    assert result["operations"] is None, "only with --ops"
    assert result["phases"].keys() <= PHASES.keys() and sum(result["phases"].values()) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in result["phases"].values())
    assert result["ceilings"] and all(ratio["median"] > 0 for ratio in result["ceilings"].values())
    assert result["advice"], "samples made one by one: whole batches at least are worth a trial"
    for advice in result["advice"]:
        assert advice.keys() >= {"method", "bound", "why"} and advice["why"]
        assert advice["bound"] is None or advice["bound"] > 1, "what saves whole steps has no bound"


def test_compare_json_has_documented_keys(here, capfd):
    code, result = run_quietly(
        capfd, "compare", "blobs.py:task", "--a", "baseline", "--b", "in_memory_batches", "--budget", "1s"
    )
    verdict, ratio = result["verdict"], result["ratio"]
    assert_interval(ratio)
    assert verdict in ("faster", "slower", "no difference", "unsure")
    assert code == (0 if verdict == "faster" else 1)
    assert (verdict == "faster") <= (ratio["low"] > 1) and (verdict == "slower") <= (ratio["high"] < 1)
    assert isinstance(result["blocks"], int) and result["blocks"] >= MIN_PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_tune_json_page_and_recipe_agree(name, directory, here, capfd):
    """One search for all checks of it."""
    search = search_in_a_process(*SEARCHES[name], directory)
    check_tune_json_has_documented_keys(search)
    check_tune_json_states_the_budget_given_or_default(search, capfd)
    check_tune_recipe_file_trains(search, capfd)
    check_report_shows_its_values(search, capfd)


def check_tune_json_has_documented_keys(search):
    result, won = search.result, search.result["verdict"] == "faster"
    assert result["verdict"] in ("faster", "no improvement") and search.done.returncode == (0 if won else 1)
    assert "%" in search.done.stderr, "progress goes to standard error"
    assert result == json.loads(Path(result["out"], "result.json").read_text())
    assert Recipe.load(result["recipe_file"]).methods == result["recipe"] and bool(result["recipe"]) is won
    quality = result["quality"]
    assert quality.keys() >= {"baseline", "tuned", "margin", "passed"}
    if result["evidence"] == "proven":
        assert quality["tuned"] >= quality["baseline"] - quality["margin"] and quality["baseline"] >= 0.95
        assert quality["margin"] > 0 and result["speedup_over_strong_baseline"]["median"] > 0
    else:  # exact methods need no whole training and no margin
        assert quality["baseline"] is quality["tuned"] is quality["margin"] is None
    assert result["trials"] and all(
        trial.keys() >= {"what", "verdict", "why", "ratio", "seconds"} for trial in result["trials"]
    )
    assert result["search_seconds"] > 0
    if won:
        assert quality["passed"] and result["evidence"] in ("exact", "proven")
        assert_interval(result["speedup"])
        assert result["speedup"]["low"] > 1 and result["break_even_runs"] > 0
    else:
        assert result["speedup"] is result["speedup_over_strong_baseline"] is result["break_even_runs"] is None


def check_tune_json_states_the_budget_given_or_default(search, capfd):
    """The second search finds the measurements of the first in a copy of its directory."""
    assert search.result["budget_seconds"] == search.seconds
    shutil.copytree(search.result["out"], again := f"{search.method}-again")
    code, result = run_quietly(capfd, "tune", "blobs.py:task", "--methods", search.method, "--out", again)
    assert result["budget_seconds"] == pytest.approx(max(MIN_BUDGET_S, BUDGET_RUNS * result["baseline_seconds"]))
    assert result["remembered_trials"] > 0
    assert code == (0 if result["verdict"] == "faster" else 1)


def check_tune_recipe_file_trains(search, capfd):
    result, out = search.result, f"{search.method}-run"
    code, trained = run_quietly(capfd, "train", "blobs.py:task", "--recipe", result["recipe_file"], "--out", out)
    assert trained["recipe"] == str(Recipe(result["recipe"])) and trained["out"] == out
    assert code == 0 and trained["reached"] and 0 < trained["seconds_to_target"] <= trained["seconds"]
    assert trained["best_metric"] >= trained["metric"] > 0.9 and trained["steps"] == 12 * 1024 // 32


class Page(HTMLParser):
    """An HTML page as a browser reads it: its text, and the resources that it would fetch.

    A tag that is not closed, or closed twice, is an error.
    """

    VOID = {"meta", "link", "br", "wbr", "img", "hr", "input", "col", "source"}
    FETCHED = {
        "src",
        "srcset",
        "href",
        "xlink:href",
        "action",
        "formaction",
        "poster",
        "data",
        "background",
        "ping",
        "manifest",
    }

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.style, self.fetched, self.rows = set(), [], [], [], 0
        self.text_parts, self.heading = [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.text, self.heading, self.style = (
            plain("".join(parts)) for parts in (self.text_parts, self.heading, self.style)
        )

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.fetched += [
            value for name, value in attributes if name in self.FETCHED and not value.startswith(("#", "data:"))
        ]
        self.style += [value for name, value in attributes if name == "style"]
        self.rows += tag == "tr" and dict(attributes).get("class") in ("kept", "lost")

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self.open += [tag] if tag not in self.VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.style if "style" in self.open else self.text_parts).append(data)
        self.heading += [data] if "h1" in self.open else []


def plain(text: str) -> str:
    return " ".join(text.split())


def check_report_shows_its_values(search, capfd):
    result = search.result
    assert main(["report", result["out"], "--json"]) == 0
    path = only_object(capfd.readouterr().out)["report"]
    page = Page(Path(path).read_text(encoding="utf-8"))
    assert page.fetched == [] and not page.tags & {"script", "iframe", "object", "embed", "base"}
    assert not any(word in page.style for word in ("url(", "@import", "@font-face"))
    assert SCHEMAS["tune"].__annotations__.keys() == result.keys(), "what the search writes is what the report reads"
    if result["verdict"] == "faster":
        assert "instead of" in page.heading and all(name in page.text for name in result["recipe"])
    else:
        assert page.heading in ("No improvement", "Nothing was compared") and plain(result["why"]) in page.text
    recommended = int(result["verdict"] == "faster")  # its row in the frontier
    assert page.rows == len(result["trials"]) + recommended
    for trial in result["trials"]:
        assert all(plain(trial[key])[: MAX_TEXT - 1] in page.text for key in ("what", "verdict", "why")), trial
    named = [value for value in (result["machine"] | result["versions"]).values() if isinstance(value, str)]
    assert len(named) >= 5 and all(plain(value) in page.text for value in named)

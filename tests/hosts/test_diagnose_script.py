"""What a diagnosis says about a script: metric, ceilings, tensors that are read, slow functions, loaders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.hosts.inside.code import CodeObserver, _places
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.whole_run import has_named_metric, lines_of, seen_metric
from hasten.reporting import view_model
from hasten.reporting.terminal import diagnose_answer

SCRIPTS = Path(__file__).with_name("scripts")
DESCRIBED = {"logged": [], "marks": [], "seconds": 1.0, "monitor": None}


class Printed:
    """Stands for a process that has printed a text; only ``printed`` is asked."""

    def __init__(self, text: str):
        self.text = text

    def printed(self) -> tuple[int, bytes]:
        return 0, self.text.encode()


def script_with(metric: str | None) -> ScriptRef:
    return ScriptRef.of_command([sys.executable, "slow_code.py"], metric=metric, directory=str(SCRIPTS))


def seen(text: str, metric: str | None = None) -> dict:
    return seen_metric(script_with(metric), Printed(text), DESCRIBED)


def test_metric_that_is_clear_has_name_direction_and_values():
    found = seen("epoch 1: val loss 0.5\nepoch 2: val loss 0.4\nepoch 3: val loss 0.3\n")
    assert (found["name"], found["direction"], found["values"]) == ("val loss", "min", [0.5, 0.4, 0.3])
    assert found["candidates"] == [] and found["why"] == ""
    assert view_model.metric_text(found) == "val loss, lower is better; 0.5, 0.4, 0.3"


def test_metric_that_is_ambiguous_has_candidates_and_the_question():
    lines = (f"epoch {n}: val f1 {0.5 + n / 10}, val auc {0.6 + n / 10}" for n in range(3))
    found = seen("\n".join(lines))
    assert found["name"] == "" and {one["name"] for one in found["candidates"]} == {"val f1", "val auc"}
    assert all(one["direction"] == "max" and len(one["values"]) == 3 for one in found["candidates"])
    assert '--metric "val f1:max"' in found["why"]


def test_metric_that_is_not_there_has_the_reason():
    assert "no number that looks like a metric" in seen("hello\n")["why"]
    assert "did you mean val loss" in seen("a: val loss 0.5\na: val loss 0.4\n", "val los")["why"]


def test_misspelled_metric_is_refused_once_the_right_one_has_come_often_enough():
    def has_come(metric: str, values: int) -> bool:
        lines = [f"step {n}: loss {1 / (n + 1):.3f}\nval loss {2 / (n + 1):.3f}" for n in range(values)]
        return has_named_metric(script_with(metric), Printed("\n".join(lines)), DESCRIBED)

    assert has_come("val loss", 2) and not has_come("val los", 2), "it may come later"
    with pytest.raises(ConfigurationError, match=r"no metric 'val los' .*did you mean val loss"):
        has_come("val los", 3)
    assert not has_come("test accuracy", 3), "a script may print it at its end only"


@pytest.fixture(scope="module")
def slow_code() -> dict:
    command = [sys.executable, "-m", "hasten", "diagnose", "--budget", "8s", "--quiet", "--json", "--"]
    argv = [*command, sys.executable, "slow_code.py"]
    done = subprocess.run(argv, cwd=SCRIPTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def site(text: str) -> str:
    """The line of slow_code.py with a text."""
    lines = (SCRIPTS / "slow_code.py").read_text().splitlines()
    return f"slow_code.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tensor_that_is_read_in_every_step_is_named_with_line_count_and_cost(slow_code):
    reads = {(one["site"], one["call"]): one for one in slow_code["synchronizations"]}
    read = reads[site("loss.item()"), ".item()"]
    assert read["per_step"] == 1.0 and 0 < read["seconds_per_step"] < 1e-3
    assert site(".mean().item()") not in {place for place, _ in reads}, "an evaluation is no part of a step"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_hot_function_of_a_script_is_named_and_is_the_verdict(slow_code):
    hottest = slow_code["functions"][0]
    assert hottest["function"].startswith("get_batch") and hottest["share"] > 0.3 and hottest["phase"] == "logging"
    assert hottest["site"].startswith("slow_code.py:")
    assert "the script's own get_batch" in slow_code["verdict"].lower()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_metric_and_ceilings_of_a_script(slow_code):
    metric = slow_code["metric"]
    assert (metric["name"], metric["direction"]) == ("val loss", "min") and len(metric["values"]) >= 1
    for phase in ("forward", "backward", "optimizer_step", "logging"):
        ceiling = slow_code["ceilings"][phase]
        assert ceiling["median"] == pytest.approx(1 / (1 - slow_code["phases"][phase]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_terminal_shows_what_was_found_in_a_script(slow_code):
    from rich.console import Console

    console = Console(width=100, record=True)
    with console.capture() as capture:
        console.print(diagnose_answer(slow_code))
    text = capture.get()
    assert "val loss, lower is better" in text and "get_batch" in text and ".item()" in text
    assert "Adam" in text and "on a GPU, the CPU would wait there" in text


def test_methods_of_tensors_that_a_script_has_replaced_are_there_after_it_was_observed(monkeypatch):
    own = {"item": lambda tensor: 7, "__repr__": lambda tensor: "mine"}
    for name, function in own.items():
        monkeypatch.setattr(torch.Tensor, name, function)
    observer = CodeObserver(lambda frame: None, lambda: False)
    during = torch.ones(1).item()
    observer.stop(1)
    assert during == 7 and all(vars(torch.Tensor)[name] is function for name, function in own.items())
    assert "tolist" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("name", "arguments", "places"),
    [
        ("to", ("cuda",), ("cpu", "cuda")),
        ("to", (torch.device("cuda", 1), torch.float16), ("cpu", "cuda")),
        ("to", (0,), ("cpu", "cuda")),
        ("to", (torch.float16,), ("cpu", "cpu")),
        ("to", (torch.ones(1), True), ("cpu", "cpu")),
        ("cuda", (), ("cpu", "cuda")),
        ("copy_", (torch.ones(1, device="meta"), True), ("meta", "cpu")),
    ],
)
def test_copy_between_host_and_gpu_is_known_by_its_arguments(name, arguments, places):
    assert _places(name, torch.ones(1), *arguments) == places


def test_metric_is_found_at_the_end_of_a_long_output_with_long_lines():
    text = "".join(f"val loss {1 / n:.3f}\n{'9.5 ' * 250_000}\n" for n in range(1, 40))
    found = seen_metric(script_with(None), Printed(text), DESCRIBED)
    assert found["name"] == "val loss" and found["values"][-1] == pytest.approx(1 / 39, abs=1e-3)


def test_lines_of_the_end_of_an_output_have_their_times():
    marks = [[1.0, 1, 10, True], [2.0, 2, 20, False]]
    lines = lines_of(8, b"0123\nabcdefg 5\nend\n", marks, 3.0)
    assert lines == [
        (1.0, "01", False),
        (2.0, "23", True),
        (2.0, "abcdefg", True),
        (3.0, " 5", False),
        (3.0, "end", False),
    ]

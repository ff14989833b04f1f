"""What the README shows is true: its example runs as it stands, its commands and options exist."""

import re
from pathlib import Path

import pytest

import hasten
from hasten.cli.main import VERBS, _parser

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The files that the README tells to save, saved: {name: text}."""
    named = dict(re.findall(r"[Ss]ave (?:it|this) as `(\S+)`.*?```python\n(.*?)```", README, re.DOTALL))
    for name, text in named.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return named


def test_the_example_trains_to_its_target(examples):
    assert len(examples["spiral.py"].splitlines()) <= 35
    result = hasten.train("spiral.py:task", device="cpu")
    assert result["best_metric"] >= result["target"], f"the example reaches {result['best_metric']:.3f} only"


def test_the_method_of_the_example_acts(examples):
    for recipe, out in (None, "plain"), ("./signs.py:Signs", "signs"):
        hasten.train("spiral.py:task", recipe, device="cpu", out=out)
    plain, signs = ((Path(out) / "model.safetensors").read_bytes() for out in ("plain", "signs"))
    assert plain != signs


def test_every_command_is_named():
    assert set(re.findall(r"^\| `hasten (\w+)", README, re.MULTILINE)) == set(VERBS)


@pytest.mark.parametrize("line", re.findall(r"^\| `hasten (.+?)` \|", README, re.MULTILINE))
def test_options_shown_exist(line):
    parser, words = _parser(), iter(line.split())
    while parser._subparsers:  # a verb may have verbs of its own
        parser = parser._subparsers._group_actions[0].choices[next(words)]
    options = re.findall(r"--[\w-]+", line)
    assert set(options) <= set(parser._option_string_actions), (
        f"{parser.prog} has no {set(options) - set(parser._option_string_actions)}"
    )


def test_the_commands_of_make_exist():
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"

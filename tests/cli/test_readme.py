"""README.md and docs/*.md are correct: their code runs, their commands parse, their make targets and links exist."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import hasten
from hasten import Task
from hasten.cli.main import build_parser, split_command

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"methods.md", "effects.md", "benchmarks.md", "cli.md", "contributing.md"}  # by docs/hooks.py
SAVED_FILE = r"[Ss]ave (?:it|this) as `(\S+)`.*?```python\n(.*?)```"
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(name, block) for name, text in TEXTS.items() for found, block in fence.findall(text) if found == language]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a plain block that begins with ``hasten``, without its comment."""
    lines = [(name, line.partition("  #")[0].strip()) for name, block in blocks("") for line in block.splitlines()]
    return [(name, line) for name, line in dict.fromkeys(lines) if line.startswith("hasten ")]


def mentions() -> list[tuple[str, str]]:
    """(page, text) of every `hasten ...` in running text, where required arguments may be missing."""
    texts = [(name, re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)) for name, text in TEXTS.items()]
    return list(dict.fromkeys((name, code) for name, text in texts for code in re.findall(r"`(hasten [^`]+)`", text)))


def parse(command: str) -> None:
    """Parse a command with the real parser; parts in brackets are optional, and placeholders get a value.

    A part within a word, as in ``NAME[:min|max]``, gets its first alternative.

    Raises:
        ConfigurationError: a wrong option or value.
    """
    values = {"N": "2", "M": "0.5"}
    command = re.sub(r"(?<=\w)\[(:\w+)[^\]]*\]", r"\1", command)
    argv = shlex.split(command.replace("[", " ").replace("]", " "))[1:]
    argv, script = split_command(values.get(word, word) for word in argv)
    options, unknown = build_parser().parse_known_args(argv + ["digits"] * (script is not None))
    assert not unknown, f"unknown arguments {unknown}"
    if options.verb == "launch":
        parse(command.partition("-- ")[2].join(("hasten ", "")))


@pytest.fixture
def saved_files(tmp_path, monkeypatch):
    """The current directory contains the files that the pages ask the reader to save."""
    monkeypatch.chdir(tmp_path)
    files = {name: code for text in TEXTS.values() for name, code in re.findall(SAVED_FILE, text, re.DOTALL)}
    for name, code in files.items():
        Path(name).write_text(code, encoding="utf-8")
    return files


def test_saved_file_is_the_same_on_every_page(saved_files):
    assert {"spiral.py", "signs.py"} <= saved_files.keys()
    for text in TEXTS.values():
        for name, code in re.findall(SAVED_FILE, text, re.DOTALL):
            assert code == saved_files[name]


def test_spiral_task_reaches_its_target(saved_files):
    result = hasten.train("spiral.py:task", device="cpu")
    assert result["best_metric"] >= result["target"]


@pytest.mark.slow
def test_signs_method_changes_the_weights(saved_files):
    for recipe, out in (None, "plain"), ("./signs.py:Signs", "signs"):
        hasten.train("spiral.py:task", recipe, device="cpu", out=out)
    assert Path("plain/model.safetensors").read_bytes() != Path("signs/model.safetensors").read_bytes()


@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value[:40].replace("\n", " "))
def test_python_block_runs_and_its_tasks_train(page, code, saved_files):
    names = {"__name__": f"block of {page}"}
    exec(compile(code, page, "exec"), names)
    made = [function for function in names.values() if getattr(function, "__annotations__", {}).get("return") is Task]
    for function in made:
        result = hasten.train(replace(function(), epochs=1), device="cpu", out=f"runs/{function.__name__}")
        assert result["evaluations"]


def test_commands_are_found():
    assert {line.split()[1] for _, line in commands()} >= {"tune", "train", "diagnose", "compare", "launch", "data"}


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value[:60])
def test_command_parses(page, command):
    parse(command)


@pytest.mark.parametrize(("page", "text"), mentions(), ids=lambda value: value[:60])
def test_mentioned_command_and_options_exist(page, text):
    parser, (argv, _) = build_parser(), split_command(text.split()[1:])
    while argv and parser._subparsers:
        assert isinstance(parser._subparsers._group_actions[0].choices, dict)
        parser = parser._subparsers._group_actions[0].choices[argv.pop(0)]
    assert {word.partition("=")[0] for word in argv if word.startswith("--")} <= set(parser._option_string_actions)


@pytest.mark.parametrize("name", TEXTS)
def test_options_in_backticks_exist(name):
    options = set(re.findall(r"`(--[a-z][\w-]+)", TEXTS[name])) - {"--strict"}  # of mkdocs
    assert options <= set(re.findall(r"--[\w-]+", all_help(build_parser())))


def all_help(parser) -> str:
    text = parser.format_help()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            text += "".join(map(all_help, action.choices.values()))
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_exist(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", TEXTS[name], re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), f"make {''.join(target)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", link):
            generated = link in GENERATED or link.removeprefix("docs/") in GENERATED
            assert generated or (page.parent / link).exists(), link


def test_readme_has_at_most_150_lines():
    assert len(TEXTS["README.md"].splitlines()) <= 150

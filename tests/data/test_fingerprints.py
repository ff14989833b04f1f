"""A fingerprint changes when what a function does may change, and only then."""

import functools
import importlib
import math
import os
import random
import re
import subprocess
import sys
import textwrap
import threading

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data.cache.fingerprints import fingerprint

BASE = """
import dataclasses
import enum
import functools
import math
import re
import torch
import helpers
import package.inside

SCALE = 2
SIZE, SAME_SIZE = (3, "three sides"), (3, "three sides")
NAMES = {"cat", "dog", "owl", "fox", "bee"}
PATTERN = re.compile("a+")

class Shift:
    by = 1
    def __init__(self, start): self.start = start
    def __call__(self, x): return x + self.start * self.by

@dataclasses.dataclass
class Crop:
    top: int = 4
    def __call__(self, x): return x[self.top :], SIZE, SAME_SIZE

class Mode(enum.Enum):
    NEAR = 1
    FAR = 2

def by_mode(x, mode=Mode.NEAR): return x if mode is Mode.FAR else {x, (3, "three sides")}

def guarded(x):
    try:
        return int(x)
    except ValueError:
        return 0

def named(first, second): return first - second

def by_name(x): return named(first=x, second=1)

def inner(x): return x * SCALE

@functools.cache
def remembered(n): return n * 7

def made(n):
    def closed(x): return x + n
    return closed

def f(x, power=1):
    "What it does."
    import package.later as later
    from package import parts
    x = package.inside.turned(x) + later.late(x) + parts.part(x) + remembered(4)
    values = [inner(v) for v in range(3)]
    return helpers.add(x, sum(values)) ** power + math.sqrt(len(NAMES)) + len(PATTERN.sub("", "b"))
"""
FILES = {
    "user_code.py": BASE,
    "helpers.py": "def add(a, b): return a + b\ndef unused(a): return a\n",
    "package/__init__.py": "",
    "package/inside.py": "def turned(a): return a // 5\n",
    "package/later.py": "def late(a): return a % 9\n",
    "package/parts.py": "def part(a): return a | 4\ndef unused(a): return a ^ 4\n",
}


def write(directory, old="", new=""):
    """Writes the user's modules with some text replaced."""
    assert any(old in text for text in FILES.values())
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text.replace(old, new))


def of(directory, old="", new="", what="f"):
    """Returns the fingerprint of an expression over modules written now."""
    write(directory, old, new)
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(directory)
        patched.setattr(sys, "dont_write_bytecode", True)  # a cached module would be taken for the next text
        try:
            return fingerprint(eval(what, vars(importlib.import_module("user_code"))))
        finally:
            for name in (
                "user_code",
                "helpers",
                *(name for name in sys.modules if name.partition(".")[0] == "package"),
            ):
                sys.modules.pop(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2", "SCALE = 3"),
        ("x * SCALE", "x + SCALE"),
        ("power=1", "power=2"),
        ("range(3)", "range(4)"),
        ('"owl"', '"elk"'),
        ('"a+"', '"b+"'),
        ("math.sqrt", "math.log"),
        ("return a + b", "return a - b"),
        ("a // 5", "a // 6"),  # through a chain of the user's own modules
        ("a % 9", "a % 8"),  # imported inside the function
        ("a | 4", "a | 3"),  # imported from another module there
        ("n * 7", "n * 6"),  # behind functools.cache
    ],
)
def test_fingerprint_changes_with_dependencies(tmp_path, old, new):
    assert of(tmp_path) != of(tmp_path, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def inner", "\n\n# a comment\ndef inner"),
        ("return a\n", "return -a\n"),
        ("a ^ 4", "a ^ 3"),
        ("class Shift", "UNUSED = 3\nclass Shift"),
    ],
)
def test_fingerprint_ignores_unrelated_changes(tmp_path, old, new):
    assert of(tmp_path) == of(tmp_path, old, new)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("made(1)", "made(2)"),
        ("Shift(1)", "Shift(2)"),
        ("Shift(1).__call__", "Shift(2).__call__"),
        ("lambda x: x + 1", "lambda x: x + 2"),
        ("lambda x: x + 1", "lambda x: x + 1.0"),
        ("lambda x: x == 'a'", "lambda x: x == b'a'"),
        ("math.sqrt", "math.log"),
        ("str.upper", "str.lower"),
    ],
)
def test_fingerprint_of_different_functions_differs(tmp_path, one, other):
    assert of(tmp_path, what=one) == of(tmp_path, what=one) != of(tmp_path, what=other)


def test_fingerprint_of_user_class_includes_its_methods(tmp_path):
    assert of(tmp_path, what="Shift(1)") != of(tmp_path, "by = 1", "by = 2", what="Shift(1)")
    assert of(tmp_path, what="Shift(1)") != of(tmp_path, "x + self", "x - self", what="Shift(1)")


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("Crop()", "top: int = 4", "top: int = 5"),
        ("Crop()", "x[self.top :]", "x[: self.top]"),
        ("by_mode", "mode=Mode.NEAR", "mode=Mode.FAR"),
        ("by_mode", "FAR = 2", "FAR = 3"),
        ("guarded", "ValueError", "TypeError"),
        # same bytecode
        ("by_name", "named(first, second): return first - second", "named(second, first): return second - first"),
    ],
)
def test_fingerprint_follows_changes_of_classes_and_functions(tmp_path, what, old, new):
    assert of(tmp_path, what=what) == of(tmp_path, what=what) != of(tmp_path, old, new, what=what)


def test_fingerprint_of_arrays_and_modules_is_by_content():
    def adding(values):
        return lambda x: x + values

    for a, b in [
        (torch.ones(3), torch.zeros(3)),
        (numpy.ones(3), numpy.ones(3, numpy.float32)),
        (torch.ones(3), torch.ones(1, 3)),
    ]:
        assert fingerprint(adding(a)) != fingerprint(adding(b))
    layer = torch.nn.Linear(2, 2)
    before = fingerprint(layer)
    torch.nn.init.zeros_(layer.weight)
    assert fingerprint(layer) != before
    assert fingerprint(functools.partial(math.pow, 2)) != fingerprint(functools.partial(math.pow, 3))


def test_fingerprint_of_cyclic_references_ends():
    def again(x):
        return again(x - 1) if x else other(x)

    def other(x):
        return again(x)

    assert fingerprint(again) == fingerprint(again)


@pytest.mark.slow
def test_fingerprint_is_equal_in_every_process(tmp_path):
    write(tmp_path)
    ask = """
from user_code import *
from hasten.data.cache.fingerprints import fingerprint
torch.manual_seed(0)
class Here:
    names = {"cat", "dog", "owl"}
    def __call__(self, x): return x in self.names, NAMES, SIZE
layer = torch.nn.Linear(2, 2)
for each in (f, Here(), Here().__call__, Shift(3).__call__, Crop(), by_mode, lambda x: layer(x),
    functools.partial(f, power=2)):
    print(fingerprint(each))
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", ask],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1 and len(set(answers.pop().split())) == 8


class Named:
    def __reduce__(self):
        return "an ambiguous name"


@pytest.mark.parametrize(
    "what",
    [threading.Lock(), sys.stdout, (x for x in [1]), Named()],
    ids=["lock", "file", "generator", "known by name"],
)
def test_fingerprint_of_unknown_objects_raises(what):
    def using(x):
        return x, what

    with pytest.raises(
        ConfigurationError, match=f"cannot detect changes of .*using, because it depends on a {type(what).__name__}"
    ):
        fingerprint(using)


def test_fingerprint_of_library_functions_is_name_and_version():
    assert (
        len(
            {
                fingerprint(each)
                for each in (torch.relu, torch.sigmoid, numpy.sqrt, re.sub, random.random, textwrap.dedent, sorted)
            }
        )
        == 7
    )

"""Every wrong request: exit code 2 (1 for a run that cannot go on), exactly one line on standard error, no traceback."""

import pytest

from hasten.cli.main import main

MINE = """
import torch
from torch import nn
from hasten import Task, Method, Card, Exactness

def good(**changes):
    fields = dict(
        model=lambda: nn.Linear(2, 2), train_data=[(torch.zeros(2), 0)] * 4, validation_data=[(torch.zeros(2), 0)] * 4, loss=nn.functional.cross_entropy,
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
def no_parameters(): return good(model=lambda: nn.ReLU())
def no_module(): return good(model=lambda: 3)
def label_out_of_range(): return good(train_data=[(torch.zeros(2), 7)] * 4)
def not_a_number(): return good(train_data=[(torch.full((2,), float("nan")), 0)] * 4)

class Bad:
    pass

class NoCard(Method):
    pass

class Misspelt(Method):
    card = Card(summary="", exactness=Exactness.BIT_EXACT)
    def optimiser(self, make, run): return make
"""

FILES = {
    "mine.py": MINE,
    "broken.py": "def task(:\n",
    "unimportable.py": "import nonesuch_package\n",
    "file": "",
    "broken.toml": "[methods.ema\n",
    "binary.toml": "\udcff\udcfe",
    "stranger.toml": "[tasks.x]\n",
    "no_table.toml": "methods = 3\n",
    "not_tables.toml": "[methods]\nema = 3\n",
    "list_value.toml": "[methods.ema]\ndecay = [1, 2]\n",
    "wrong_type.toml": "[methods.ema]\ndecay = 'much'\n",
    "out_of_range.toml": "[methods.ema]\ndecay = 7.0\n",
    "not_installed.toml": "[methods.warp_drive]\n",
    "outside.toml": '[methods."./gone.py:Faster"]\n',
    "deep.toml": "x = " + "[" * 20_000,
    "twice.toml": "[methods.ema]\n[methods.ema]\n",
    "dotted.toml": "[methods]\n__class__.__init__ = 1\n",
    "huge.toml": "#" * (1 << 20) + "\n",
}

# words after `hasten`, what the line has to say
WRONG = [
    ("trian digits", "did you mean train?"),
    ("train", "TASK"),
    ("train digits extra", "extra"),
    ("train digits --recipie r.toml", "--recipe"),
    ("train digits --with", "--with"),
    ("train digit", "digits"),
    ("train gone.py:task", "no file"),
    ("train mine.py", "which function"),
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
    ("train mine.py:text_metric --quiet", "number"),
    ("train mine.py:no_parameters", "no parameters"),
    ("train mine.py:no_module", "nn.Module"),
    ("train mine.py:good --with bfloat61", "bfloat16"),
    ("train mine.py:good --with ema:dekay=0.9", "decay"),
    ("train mine.py:good --with ema:decay=fast", "number"),
    ("train mine.py:good --with ema:decay", "key=value"),
    ("train mine.py:good --with ema:decay=2", "decay"),
    ("train mine.py:good --with ema --with ema", "twice"),
    ("train mine.py:good --with batched_fetch --with cache_dataset", "batched_fetch and cache_dataset both replace data"),
    ("train mine.py:good --with mine.py:Bad", "hasten.Method"),
    ("train mine.py:good --with mine.py:NoCard", "card"),
    ("train mine.py:good --with mine.py:Misspelt", "optimizer"),
    ("train mine.py:good --with mine.py:Gone", "no class"),
    ("train mine.py:good --with gone.py:Faster", "no file"),
    ("train mine.py:good --recipe gone.toml", "gone.toml"),
    ("train mine.py:good --recipe broken.toml", "TOML"),
    ("train mine.py:good --recipe binary.toml", "UTF-8"),
    ("train mine.py:good --recipe stranger.toml", "tasks"),
    ("train mine.py:good --recipe no_table.toml", "table"),
    ("train mine.py:good --recipe not_tables.toml", "table"),
    ("train mine.py:good --recipe list_value.toml", "decay"),
    ("train mine.py:good --recipe wrong_type.toml", "decay"),
    ("train mine.py:good --recipe out_of_range.toml", "decay"),
    ("train mine.py:good --recipe not_installed.toml", "warp_drive"),
    ("train mine.py:good --recipe outside.toml", "gone.py"),
    ("train mine.py:good --recipe deep.toml", "TOML"),
    ("train mine.py:good --recipe twice.toml", "TOML"),
    ("train mine.py:good --recipe dotted.toml", "__class__"),
    ("train mine.py:good --recipe huge.toml", "larger"),
    ("train mine.py:good --device warp", "warp"),
    ("train mine.py:good --device cuda:99", "cuda:99"),
    ("train mine.py:good --seed -1", "--seed"),
    ("train mine.py:good --seed one", "--seed"),
    ("train mine.py:good --out file", "file"),
    ("train mine.py:good --resume", "--out"),
    ("compare mine.py:good --a baseline", "--b"),
    ("compare mine.py:good --a baseline --b bfloat61", "bfloat16"),
    ("compare mine.py:good --a baseline --b ema --budget 0", "--budget"),
    ("tune mine.py:good --budget soon", "--budget"),
    ("tune mine.py:good --budget -5m", "--budget"),
    ("tune mine.py:good --budget inf", "--budget"),
    ("tune mine.py:good --margin nan", "--margin"),
    ("tune mine.py:good --runs 0", "--runs"),
    ("tune mine.py:good --consider ,", "--consider"),
    ("tune mine.py:good --consider ema,znrom", "znorm"),
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
]  # fmt: skip

CANNOT_GO_ON = [
    ("train mine.py:label_out_of_range", "label"),
    ("train mine.py:not_a_number", "nan"),
    ("eject mine.py:good --out nowhere/script.py", "nowhere"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with good and bad files."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in FILES.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder


@pytest.mark.parametrize(("words", "says"), WRONG, ids=lambda value: value[:60])
def test_wrong_request(words, says, here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    assert_one_line(words, says, main(words.split()), 2, capfd)


@pytest.mark.parametrize(("words", "says"), CANNOT_GO_ON, ids=lambda value: value[:60])
def test_run_that_cannot_go_on(words, says, here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    assert_one_line(words, says, main([*words.split(), "--quiet"]), 1, capfd)


def assert_one_line(words: str, says: str, code: int, expected: int, capfd) -> None:
    out, err = capfd.readouterr()
    assert code == expected, f"hasten {words}: exit code {code}, said {err!r}"
    assert err.count("\n") == 1 and err.startswith("hasten: "), f"hasten {words}: not one line but {err!r}"
    assert says.lower() in err.lower(), f"hasten {words}: {err!r} does not say {says!r}"
    assert "Traceback" not in err and "internal error" not in err and len(err) < 700
    assert out == ""

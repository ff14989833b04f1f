"""A recipe as a patch of a script: it applies, keeps the formatting, trains to the same bits, and hides nothing."""

import subprocess
import sys

import pytest

from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_methods, method_class, method_names
from hasten.export.patch import ScriptEdit, edit_of, line_of_model, write_patch

KINDS = {"loader", "dataset", "optimizer", "model", "process", "evaluation", "step", "by_hand"}


def apply(directory, files: dict[str, str], patch: str) -> dict[str, str]:
    """Writes the files, applies the patch with ``patch -p1``, returns the files."""
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(text.encode())
    result = subprocess.run(["patch", "-p1", "--fuzz=0"], input=patch.encode(), cwd=directory, capture_output=True)
    assert result.returncode == 0, (result.stdout + result.stderr).decode() + patch
    return {name: (directory / name).read_bytes().decode() for name in files}


def edits_of(recipe: str) -> list[ScriptEdit]:
    return [edit_of(method) for method in make_methods(Recipe.parse(recipe))]


def patched(directory, text: str, *edits: tuple[str, int, str], type_: str = "") -> str:
    """The text after edits, each (kind of site, line, text), and what is left to do by hand."""
    (directory / "train.py").write_bytes(text.encode())
    sites = [{"kind": kind, "file": "train.py", "line": line, "index": 1, "type": type_} for kind, line, _ in edits]
    as_edits = [ScriptEdit(f"method {i}", "does it", {kind: edit}, "") for i, (kind, _, edit) in enumerate(edits)]
    patch = write_patch(as_edits, sites, directory, "train.py")
    assert "Not in this patch" not in patch, patch
    return apply(directory, {"train.py": text}, patch)["train.py"]


def refused(directory, text: str, kind: str, line: int, edit: str, type_: str = "") -> str:
    (directory / "train.py").write_text(text)
    site = {"kind": kind, "file": "train.py", "line": line, "index": 1, "type": type_}
    patch = write_patch([ScriptEdit("method", "does it", {kind: edit}, "do it")], [site], directory, "train.py")
    assert "---" not in patch
    assert patch.startswith("# Not in this patch:\n#   method: does it\n") and patch.endswith("#     by hand: do it\n")
    return patch


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("DataLoader(data)", "DataLoader(data, num_workers=2)"),
        ("DataLoader()", "DataLoader(num_workers=2)"),
        ("DataLoader(data,)", "DataLoader(data, num_workers=2)"),
        ("DataLoader((data), (64))", "DataLoader((data), (64), num_workers=2)"),
        ("DataLoader(data, num_workers=0, shuffle=True)", "DataLoader(data, num_workers=2, shuffle=True)"),
        ("DataLoader('\u00e4\u00f6\u00fc', 64)", "DataLoader('\u00e4\u00f6\u00fc', 64, num_workers=2)"),
        ("utils.data.DataLoader(data)", "utils.data.DataLoader(data, num_workers=2)"),
        ("DataLoader(\n    data,\n    64,\n)", "DataLoader(\n    data,\n    64,\n    num_workers=2,\n)"),
        ("DataLoader(\n    data,\n    64\n)", "DataLoader(\n    data,\n    64,\n    num_workers=2\n)"),
        (
            "DataLoader(\n    data,\n    64,  # small\n    # more\n)",
            "DataLoader(\n    data,\n    64,  # small\n    num_workers=2,\n    # more\n)",
        ),
        (
            "DataLoader(\n    data,\n    64  # small\n)",
            "DataLoader(\n    data,\n    64,  # small\n    num_workers=2\n)",
        ),
        ("DataLoader(data,\n           64)", "DataLoader(data,\n           64, num_workers=2)"),
        (
            "DataLoader(data,\n           x=" + "a" * 90 + ")",
            "DataLoader(data,\n           x=" + "a" * 90 + ",\n           num_workers=2)",
        ),
        (
            "make(DataLoader(data, collate_fn=lambda rows: stack(rows)), other(1))",
            "make(DataLoader(data, collate_fn=lambda rows: stack(rows), num_workers=2), other(1))",
        ),
        ("OPTIONS(data)", "OPTIONS(data, num_workers=2)"),  # another name of the class
    ],
)
def test_keyword_is_added_in_the_style_of_the_call(tmp_path, call, expected):
    text = f"import torch\nloader = {call}  # the data\nprint(loader)\n"
    assert patched(tmp_path, text, ("loader", 2, "num_workers=2")) == text.replace(call, expected)


@pytest.mark.parametrize("text", ["DataLoader(data)\n", "import data\nDataLoader(data, 64)\n"])
def test_file_with_a_byte_order_mark_is_edited(tmp_path, text):
    text = "\ufeff" + text
    result = patched(tmp_path, text, ("loader", text.count("\n"), "num_workers=2"))
    assert result == text.replace(")\n", ", num_workers=2)\n")


def test_two_loaders_of_one_line_and_two_objects_of_one_call_are_edited_once_each(tmp_path):
    text = "a, b = DataLoader(x), DataLoader(y)\n"
    edits = [("loader", 1, "num_workers=2"), ("loader", 1, "prefetch_factor=4")]
    expected = (
        "a, b = DataLoader(x, num_workers=2, prefetch_factor=4), DataLoader(y, num_workers=2, prefetch_factor=4)\n"
    )
    assert patched(tmp_path, text, *edits) == expected


def test_optimizer_is_found_by_its_class_on_a_line_with_other_calls(tmp_path):
    text = "opt = wrap(optim.AdamW(model.parameters(), lr=float('1e-3')), 3)\n"
    expected = "opt = wrap(optim.AdamW(model.parameters(), lr=float('1e-3'), fused=True), 3)\n"
    assert patched(tmp_path, text, ("optimizer", 1, "fused=True"), type_="AdamW") == expected


def test_model_is_edited_after_its_assignment_in_the_order_of_the_methods(tmp_path):
    text = "import torch\n\ndef main():\n    self.model = Net(\n        3,\n    ).to(device)  # the net\n    train()\n"
    edits = [("model", 4, "{model}.to(memory_format=torch.channels_last)"), ("model", 4, "{model}.compile()")]
    added = "    self.model.to(memory_format=torch.channels_last)\n    self.model.compile()\n"
    assert patched(tmp_path, text, *edits, type_="Net") == text.replace("    train()", f"{added}    train()")


def test_line_of_the_process_follows_the_imports_and_torch_is_imported_once(tmp_path):
    text = '"""Doc."""\nimport os\nfrom torch import nn\nimport sys\n\nprint(1)\n'
    edits = [("process", 0, "torch.set_num_threads(2)"), ("process", 0, "torch.set_flush_denormal(True)")]
    added = "import sys\nimport torch\ntorch.set_num_threads(2)\ntorch.set_flush_denormal(True)\n"
    assert patched(tmp_path, text, *edits) == text.replace("import sys\n", added)


def test_line_of_the_process_precedes_the_code_of_a_file_that_does_not_import_torch(tmp_path):
    """An import of ``package/__main__.py`` may train."""
    before = '"""Doc."""\nfrom __future__ import annotations\n\n'
    edits = [("process", 0, "torch.set_num_threads(2)"), ("process", 0, "torch.set_flush_denormal(True)")]
    added = "import torch\ntorch.set_num_threads(2)\ntorch.set_flush_denormal(True)\n"
    assert patched(tmp_path, f"{before}from . import train\n", *edits) == f"{before}{added}from . import train\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_newlines_of_the_file_stay(tmp_path, newline, end):
    text = newline.join(["import torch", "x = DataLoader(a)", "model = Net()"]) + (newline if end else "")
    result = patched(tmp_path, text, ("loader", 2, "num_workers=2"), ("model", 3, "{model}.compile()"))
    lines = ["import torch", "x = DataLoader(a, num_workers=2)", "model = Net()", "model.compile()", ""]
    assert result == newline.join(lines)


EVALUATION = """import torch

def train():
    model.train()
    loss.backward()

@timed
def test(loader):
    model.eval()
    for x in loader:
        out = model(x)
    model.train()

for epoch in range(3):
    train()
    for x in loader:
        text = f"{x}"

        out = model(x)
    print(out)
"""


def test_evaluation_runs_without_gradients_by_a_decorator_or_around_its_loop(tmp_path):
    edits = [("evaluation", line, "torch.no_grad()") for line in (11, 19, 17)]
    result = patched(tmp_path, EVALUATION, *edits)
    expected = EVALUATION.replace("@timed", "@torch.no_grad()\n@timed")
    block = ["    for x in loader:", '        text = f"{x}"', "", "        out = model(x)", "    print"]
    wrapped = ["    with torch.no_grad():", *(f"    {line}" if line else "" for line in block[:-1]), "    print"]
    assert result == expected.replace("\n".join(block), "\n".join(wrapped))


GRAPH = """import torch

for epoch in range(3):
    model.train()
    loss(model(x)).backward()
    model.eval()
    correct = (model(x).argmax(1) == y)[
        test
    ]
    model.train()
    again = model(x)
"""


def test_evaluation_of_one_statement_after_eval_runs_without_gradients(tmp_path):
    result = patched(tmp_path, GRAPH, ("evaluation", 7, "torch.no_grad()"))
    block = GRAPH.split("\n")[6:9]
    wrapped = ["    with torch.no_grad():", *(f"    {line}" for line in block)]
    assert result == GRAPH.replace("\n".join(block), "\n".join(wrapped))
    for line in (5, 11):  # it trains there, or in another mode
        assert "no function" in refused(tmp_path, GRAPH, "evaluation", line, "torch.no_grad()")


@pytest.mark.parametrize(
    "body",
    [
        ["m.eval()", "out = m(x)", "g = grad(loss(out), x)"],  # a saliency map
        ["t.eval()", "loss = f(t(x), m(x))", "loss.backward()"],  # a teacher
        ["other.eval()", "out = m(x)", "m.train()"],
        ["m.eval()", "a = 1; out = m(x)", "m.train()"],
    ],
)
def test_evaluation_of_a_statement_that_may_need_gradients_is_not_edited(tmp_path, body):
    text = "import torch\nfor x in d:\n" + "".join(f"    {line}\n" for line in [*body, "opt.step()"])
    assert "no function" in refused(tmp_path, text, "evaluation", 4, "torch.no_grad()")


@pytest.mark.parametrize(
    ("text", "kind", "line", "edit", "reason"),
    [
        ("x = DataLoader(a, **options)\n", "loader", 1, "num_workers=2", "** arguments"),
        ("opt = SGD(p, foreach=True)\n", "optimizer", 1, "fused=True", "foreach="),
        ("x = 3\n", "loader", 1, "num_workers=2", "there is no call"),
        ("x = f(a(1), b(2))\n", "loader", 1, "num_workers=2", "is not the only one on the line"),
        ("a = [Net(), Net()]\n", "model", 1, "{model}.compile()", "is not assigned to one name"),
        ("def make():\n    return Net()\n", "model", 2, "{model}.compile()", "not assigned to one name"),
        ("a = b = Net()\n", "model", 1, "{model}.compile()", "not assigned to one name"),
        ("if x: model = Net()\n", "model", 1, "{model}.compile()", "another statement is on the same line"),
        ("model = Net(); y = 2\n", "model", 1, "{model}.compile()", "another statement is on the same line"),
        ("# nothing\n", "process", 0, "torch.set_num_threads(2)", "does not import torch"),
        (
            "import torch\nfor x in d:\n    m(x)\n    loss.backward()\n",
            "evaluation",
            3,
            "torch.no_grad()",
            "no function",
        ),
        ("import torch\ndef f():\n    yield m(x)\n", "evaluation", 3, "torch.no_grad()", "no function"),
        (
            "import torch\ndef f():\n    for x in y:\n        yield m(x)\n",
            "evaluation",
            4,
            "torch.no_grad()",
            "yields inside",
        ),
        ("def broken(:\n", "loader", 1, "num_workers=2", "cannot be read as Python"),
    ],
)
def test_edit_that_cannot_be_made_is_listed_with_the_reason(tmp_path, text, kind, line, edit, reason):
    message = refused(tmp_path, text, kind, line, edit)
    assert reason in message and edit in message


def test_file_outside_of_the_directory_and_missing_kind_are_listed(tmp_path):
    site = {"kind": "loader", "file": "/usr/lib/x.py", "line": 3, "index": 1}
    edits = [
        ScriptEdit("a", "x", {"loader": "num_workers=2"}, ""),
        ScriptEdit("b", "y", {"optimizer": "fused=True"}, ""),
    ]
    patch = write_patch(edits, [site], tmp_path)
    assert "/usr/lib/x.py:3: lies outside of" in patch and "has no known optimizer for the edit: fused=True" in patch
    assert "---" not in patch


def test_several_files_are_one_patch(tmp_path):
    files = {"train.py": "import torch\nx = DataLoader(a)\n", "lib/net.py": "opt = SGD(p)\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sites = [{"kind": "loader", "file": "train.py", "line": 2, "index": 1}]
    sites += [{"kind": "optimizer", "file": "lib/net.py", "line": 1, "index": 1, "type": "SGD"}]
    recipe = "fused_optimizer + loader_workers:num_workers=3,prefetch_factor=4"
    patch = write_patch(edits_of(recipe), sites, tmp_path)
    assert "#   loader_workers: read samples in worker processes" in patch  # what it says about a GPU
    assert "hasten" not in patch
    result = apply(tmp_path, files, patch)
    assert result["train.py"].endswith("DataLoader(a, num_workers=3, prefetch_factor=4)\n")
    assert result["lib/net.py"] == "opt = SGD(p, fused=True)\n"


def test_cards_state_edits_of_known_kinds_with_existing_options():
    stating = [name for name in method_names() if ":" not in name and method_class(name).card.script_edit]
    assert len(stating) > 10
    for name in stating:
        assert method_class(name).card.script_edit.keys() <= KINDS
        edit = edit_of(method_class(name)())
        assert "{" not in " ".join([*edit.at.values(), edit.by_hand]).replace("{model}", ""), name


def test_option_that_the_edit_does_not_state_is_left_to_the_user():
    edit = edit_of(method_class("compile")(scope="blocks"))
    assert edit.at == {} and "default of scope only" in edit.by_hand
    assert edit_of(method_class("compile")()).at["model"].endswith("\n{model}.compile()")
    tuned = edit_of(method_class("compile")(mode="max-autotune-no-cudagraphs"))
    assert tuned.at["model"].endswith("\n{model}.compile(mode='max-autotune-no-cudagraphs')")


def test_method_without_an_edit_is_listed(tmp_path):
    class Other(Method):
        card = method_class("ema").card

    Other.name = "other"
    patch = write_patch([edit_of(Other())], [], tmp_path)
    assert "#   other: " in patch and "there is no edit for it" in patch


SCRIPT = """import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(0, 3, (96,)))
loader = DataLoader(
    data,
    batch_size=8,
    shuffle=True,  # as always
)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(hashlib.sha256(weights.numpy().tobytes()).hexdigest(), weights.double().norm().item())
"""
SITES = [
    {"kind": "loader", "file": "train.py", "line": 9, "index": 1, "type": "DataLoader"},
    {"kind": "dataset", "file": "train.py", "line": 9, "index": 1, "type": "DataLoader"},
    {"kind": "model", "file": "train.py", "line": 14, "index": 1, "type": "Sequential"},
    {"kind": "optimizer", "file": "train.py", "line": 15, "index": 1, "type": "Adam"},
]


def train(directory) -> tuple[str, float]:
    done = subprocess.run([sys.executable, "train.py"], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digest, norm = done.stdout.split()
    return digest, float(norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "same_bits"),
    [
        ("loader_workers:num_workers=2", True),
        ("in_memory_batches", True),
        ("num_threads:count=1 + fused_optimizer + channels_last", False),
    ],
)
def test_patched_script_trains_as_before(tmp_path, recipe, same_bits):
    (tmp_path / "train.py").write_text(SCRIPT)
    digest, norm = train(tmp_path)
    patch = write_patch(edits_of(recipe), SITES, tmp_path, "train.py")
    result = apply(tmp_path, {"train.py": SCRIPT}, patch)["train.py"]
    assert result != SCRIPT and "hasten" not in result
    new_digest, new_norm = train(tmp_path)
    assert (new_digest == digest) is same_bits and new_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
def test_patched_script_compiles_a_sequential_model(tmp_path):
    count = "import sys\nprint(torch._dynamo.utils.counters['stats']['unique_graphs'], file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(SCRIPT + count)
    patch = write_patch(edits_of("compile:backend=aot_eager"), SITES, tmp_path, "train.py")
    apply(tmp_path, {"train.py": SCRIPT + count}, patch)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.split()[-1] == "1", done.stderr


def test_dataset_is_stacked_once_for_all_its_loaders(tmp_path):
    sites = [{"kind": "dataset", "file": "train.py", "line": line, "index": 1, "type": "DataLoader"} for line in (3, 4)]
    lines = ["import torch", "from data import DataLoader, a, b", "", ""]
    lines[2:] = "x = DataLoader(a.train, 8)", "y = DataLoader(dataset=b, batch_size=8)"
    (tmp_path / "train.py").write_text("\n".join(lines) + "\n")
    patch = write_patch(edits_of("in_memory_batches"), sites, tmp_path)
    result = apply(tmp_path, {"train.py": "\n".join(lines) + "\n"}, patch)["train.py"]
    assert result.count("class InMemory(") == 1 and "Not in this patch" not in patch
    assert result.splitlines()[-2:] == [
        "x = DataLoader(InMemory(a.train), 8, collate_fn=InMemory.collate)",
        "y = DataLoader(dataset=InMemory(b), batch_size=8, collate_fn=InMemory.collate)",
    ]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("DataLoader(*arguments)", "does not show the dataset"),
        ("DataLoader(data, collate_fn=pad)", "passes a collate_fn"),
        ("DataLoader(data, **options)", "which may hold the same keyword"),
        ("make_loader()", "does not show the dataset"),
    ],
)
def test_dataset_that_cannot_be_wrapped_is_left_to_the_user(tmp_path, call, reason):
    class_text = "class InMemory(Dataset):\n    pass\n"
    assert reason in refused(tmp_path, f"import torch\nloader = {call}\n", "dataset", 2, class_text)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("model = Net()\nmodel = model.to(device)\nloss = f(model(x))\n", 3, 2),
        ("def train(net):\n    out = net(x)\nmodel = Net()\n", 2, 0),
        ("def a():\n    model = Net()\ndef b():\n    model = Net()\n    model(x)\n", 5, 0),
        (
            "class A:\n    def __init__(self):\n        self.net = Net()\n    def step(self):\n        self.net(x)\n",
            5,
            3,
        ),
    ],
)
def test_line_of_model_is_the_last_assignment_of_the_name_that_is_called(tmp_path, text, line, expected):
    (tmp_path / "train.py").write_text(text)
    assert line_of_model(tmp_path, "train.py", line) == expected


def test_installed_package_in_the_project_is_not_edited(tmp_path):
    name = ".venv/lib/python3.11/site-packages/engine.py"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("import torch\noptimizer = torch.optim.SGD([], lr=0.1)\n")
    site = {"kind": "optimizer", "file": name, "line": 2, "index": 1, "type": "SGD"}
    patch = write_patch(edits_of("fused_optimizer"), [site], tmp_path, "train.py")
    assert "+++" not in patch and f"{name}:2: belongs to an installed package" in patch

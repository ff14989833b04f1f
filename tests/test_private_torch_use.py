"""A scan of the source: private PyTorch APIs and torch messages appear only in ``hasten._torch_compat``."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.utils.data import DataLoader

from hasten import _torch_compat as compat

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = sorted(path for path in SOURCE.rglob("*.py") if not path.name.startswith("_torch_compat"))
LAYER = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters())
TORCH_OBJECTS = (
    LAYER,
    LAYER.weight,
    LAYER.weight.untyped_storage(),
    DataLoader([1]),
    OPTIMIZER,
    SequentialLR(OPTIMIZER, [ConstantLR(OPTIMIZER), ConstantLR(OPTIMIZER)], [1]),
    torch.fx.Graph(),
    torch.fx.GraphModule,
    torch.fx.Tracer(),
    torch.ops.aten.add.default,
    torch.Generator(),
    dist.TCPStore,
    dist.ProcessGroup,
    nn.parallel.DistributedDataParallel,
    LocalElasticAgent,
)
PRIVATE = {
    name
    for thing in TORCH_OBJECTS
    for name in (*dir(thing), *getattr(thing, "__dict__", ()))
    if re.match("_[^_]", name)
} | {"_pcontext", "_remaining_restarts", "_worker_group"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_torch_uses(text: str) -> list[str]:
    """``line: expression`` of each use of a private attribute of torch in a source file."""
    tree = ast.parse(text)
    own, from_torch, found = set(), set(), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Import):
            from_torch |= {
                (a.asname or a.name).partition(".")[0] for a in node.names if a.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            from_torch |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_self = _root(node) in ("self", "cls") and node.attr in own
            if _root(node) in from_torch or (node.attr in PRIVATE and node.attr not in own and not of_self):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            found += [(node.lineno, name) for name in names if name.split(".")[0] == "torch" and "._" in name]
        elif isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
            if text in PRIVATE - own or re.match(r"torch(\.\w+)*\._[a-z]\w*$", text):
                found.append((node.lineno, repr(text)))
    return [f"{line}: {text}" for line, text in sorted(found)]


TREES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_source_uses_no_private_torch_api():
    uses = {str(path.relative_to(SOURCE)): private_torch_uses(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(uses) > 150 and not {file: found for file, found in uses.items() if found}, "move it to _torch_compat.py"


def test_source_recognizes_no_torch_message():
    texts = {part for parts in (compat._PEER_GONE, compat._PEER_SILENT, compat._CPU_OUT_OF_MEMORY) for part in parts}
    texts |= {part for parts in compat._AUTOGRAD_ERRORS.values() for part in parts}
    for file, tree in TREES.items():
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not texts & constants, f"{file}: torch messages are recognized in hasten/_torch_compat.py"


def test_source_forges_no_stack_frame():
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                forged = [keyword.arg for keyword in node.keywords if (keyword.arg or "").startswith("co_")]
                assert not forged and name not in ("CodeType", "TracebackType", "_getframe", "exec"), (
                    file,
                    node.lineno,
                )


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", ["2: torch._foreach_add_"]),
        ("from torch.utils import _pytree", ["1: torch.utils._pytree"]),
        ("import torch.utils._pytree as trees", ["1: torch.utils._pytree"]),
        ("from torch.nn.modules.conv import _ConvNd", ["1: torch.nn.modules.conv._ConvNd"]),
        ("def f(module):\n    return module._parameters", ["2: module._parameters"]),
        ("getattr(scheduler, '_schedulers', ())", ["1: '_schedulers'"]),
        ("import_module('torch._dynamo')", ["1: 'torch._dynamo'"]),
        ("class A(B):\n    def f(self):\n        self._pcontext.close()", ["3: self._pcontext"]),
        ("class A:\n    def f(self):\n        self._modules = 1\n        return self._modules", []),
    ],
)
def test_scan_finds_private_uses(text, uses):
    assert private_torch_uses(text) == uses

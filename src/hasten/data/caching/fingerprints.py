"""Whether a function is still the same one: a hash of all that its result depends on.

Its bytecode and constants, defaults, the values that it closes over, the globals that it names and the modules that it imports,
functions and classes of the user's own followed to the end. What comes from an installed package or from Python itself counts by
name and version. What a function reads at run time (a file, the clock, a network) is not seen.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.contract.errors import Refusal

INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
PLAIN = (type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range, slice)


def fingerprint(function: Callable) -> str:
    """A hash that changes when the function does: 32 hexadecimal digits, the same in every process with this Python.

    Raises:
        Refusal: it depends on something that cannot be hashed (an open file, a lock, a generator).
    """
    return _Walk(getattr(function, "__qualname__", type(function).__qualname__)).digest(function).hex()


class _Walk:
    """One walk through all that a function depends on."""

    def __init__(self, name: str):
        self.name = name
        self.met: dict[int, tuple[int, Any]] = {}  # id -> (number, the thing itself, so that its id stays its own)

    def digest(self, value) -> bytes:
        """The hash of a value by its kind and its parts."""
        if isinstance(value, PLAIN) and not isinstance(value, enum.Enum):
            return _hash(type(value).__name__, repr(value))
        if not isinstance(value, (tuple, frozenset, types.CodeType)):  # which Python shares or copies as it likes
            if id(value) in self.met:
                return _hash("met before", str(self.met[id(value)][0]))
            self.met[id(value)] = len(self.met), value
        kind, *parts = self._parts(value)
        return _hash(kind, *[part if isinstance(part, bytes) else self.digest(part) for part in parts])

    def _parts(self, value) -> list:
        """What kind of thing it is, and what it is made of; parts that are bytes are hashes already."""
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return [type(value).__name__, *map(self.digest, value)]
        if type(value) is dict:
            return ["dict", *(self.digest(part) for item in value.items() for part in item)]
        if isinstance(value, (set, frozenset)):
            return ["set", *sorted(_Walk(self.name).digest(item) for item in value)]
        if isinstance(value, types.CodeType):
            return ["code", _hash(value.co_code), _hash(*value.co_names), list(value.co_consts), value.co_flags, value.co_argcount]
        if isinstance(value, types.ModuleType):
            return ["module", _named(value.__name__)]
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, numpy.ufunc)):
            return self._builtin(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ["method", value.__func__, value.__self__]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, functools.partial):
            return ["partial", value.func, value.args, value.keywords]
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            return ["array", str(value.dtype), list(value.shape), _hash(numpy.ascontiguousarray(value).tobytes())]
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return ["tensor", str(value.dtype), list(value.shape), _hash(flat.numpy().tobytes())]
        return self._object(value)

    def _builtin(self, value) -> list:
        of = getattr(value, "__self__", None)
        bound = [] if of is None or isinstance(of, (types.ModuleType, type)) else [of]
        return ["builtin", _named(getattr(value, "__module__", None) or "builtins"), getattr(value, "__qualname__", value.__name__), *bound]

    def _function(self, function: types.FunctionType) -> list:
        if _is_installed(function.__module__) and not function.__closure__ and "<locals>" not in function.__qualname__:
            return ["function", _named(function.__module__), function.__qualname__]
        names = _names(function.__code__)
        there = [("", _content(cell)) for cell in function.__closure__ or ()]
        there += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        there += [("", module) for module in _imported(function)]
        used = [part for name, value in there for part in (name, *_within(value, names))]
        return ["function", function.__code__, function.__defaults__, function.__kwdefaults__, used]

    def _class(self, value: type) -> list:
        if _is_installed(value.__module__):
            return ["class", _named(value.__module__), value.__qualname__]
        passed_over = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__"}
        content = {name: _unwrapped(part) for name, part in vars(value).items() if name not in passed_over and not name.startswith("_abc_")}
        return ["class", value.__qualname__, list(value.__bases__), content]

    def _object(self, value) -> list:
        """An instance by its class and its state, as pickle would take it apart."""
        try:
            reduced = copyreg.dispatch_table[type(value)](value) if type(value) in copyreg.dispatch_table else value.__reduce_ex__(2)
        except Exception:
            raise self._untold(value) from None
        if isinstance(reduced, str):
            if hasattr(value, "__wrapped__"):  # a function of the user's own behind functools.cache
                return ["around", type(value), value.__wrapped__]
            if not _is_installed(getattr(value, "__module__", None) or type(value).__module__):
                raise self._untold(value)
            return ["named", type(value), reduced]
        make, args, *rest = reduced
        rest = [list(part) if isinstance(part, types.GeneratorType) or hasattr(part, "__next__") else part for part in rest]
        return ["object", type(value), make, args, rest]

    def _untold(self, value) -> Refusal:
        untold = f"whether {self.name} has changed cannot be told, as it depends on a {type(value).__name__}"
        return Refusal(f"{untold}; make that inside the function, or leave the cache out")


def _within(value, names: list[str], around: tuple = ()) -> list:
    """A value; of a module of the user's own also what code names of it, and of the modules in it."""
    if not isinstance(value, types.ModuleType) or _is_installed(value.__name__) or value in around:
        return [value]
    inner = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return [value, *(part for name, found in inner for part in (name, *_within(found, names, (*around, value))))]


def _imported(function: types.FunctionType) -> Iterator[types.ModuleType | str]:
    """What a function imports when it is called; of installed packages, and of what is not there, the names."""
    for name, parts, level in _imports(function.__code__):
        if not level and _is_installed(name):
            yield _named(name)
            continue
        try:
            yield __import__(name, function.__globals__, None, parts, level)
        except ImportError:
            yield name


def _imports(code: types.CodeType) -> Iterator[tuple[str, tuple | None, int]]:
    """(module, names taken from it, folders up) of each import in code, and in the functions inside it."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, parts, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            yield step.argval, parts.argval, level.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imports(inner)


def _names(code: types.CodeType) -> list[str]:
    """The global names and attributes that code names, that of the functions inside it too."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _content(cell: types.CellType):
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


def _unwrapped(part):
    """The function inside a descriptor of a class."""
    if isinstance(part, (staticmethod, classmethod)):
        return part.__func__
    if isinstance(part, property):
        return [part.fget, part.fset, part.fdel]
    return part.__name__ if isinstance(part, (types.MemberDescriptorType, types.GetSetDescriptorType)) else part


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is Python's own or an installed package's, which its version tells apart."""
    if module is None or module == "builtins" or module.partition(".")[0] in sys.stdlib_module_names:
        return module != "__main__"
    package = module.partition(".")[0]
    file = getattr(sys.modules[package], "__file__", None) if package in sys.modules else getattr(find_spec(package), "origin", None)
    if file is None:
        return False
    return any(Path(file).is_relative_to(folder) for folder in INSTALLED)


@functools.cache
def _named(module: str) -> str:
    """A module's name with its version."""
    package = module.partition(".")[0]
    try:
        return f"{module} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{module} {getattr(sys.modules.get(package), '__version__', sys.version_info[:3])}"


def _hash(*parts: str | bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()

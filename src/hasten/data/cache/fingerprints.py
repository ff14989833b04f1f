"""Fingerprints of functions: a hash of everything that the result of a function depends on.

Hashed are the bytecode and constants, the defaults, the values of the closure, the globals that the code refers to and
the modules that it imports; the user's own functions and classes are followed recursively. An installed package and
Python itself count by name and version. What a function reads at run time (a file, the clock, a network) is not hashed.

``pickle`` decomposes values; this file defines what represents functions, classes, modules, tensors and sets.
``cloudpickle`` 3.1 and ``joblib.hash`` 1.6 do not suffice: they store functions of importable modules by name only, so
an edit goes unnoticed, as does an edit of the functions that they call (17 and 23 of the 33 tests of this file fail).
"""

import copyreg
import dis
import functools
import hashlib
import io
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hasten.core.errors import ConfigurationError

INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
ANY_CALLABLE = pickle.Pickler  # pickle requires a callable where a value is decomposed; it is never called
NOT_BEHAVIOR = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}
NOT_BEHAVIOR |= {"__firstlineno__", "__static_attributes__"}


def fingerprint(function: Callable) -> str:
    """Returns 32 hexadecimal digits that change when the function does, equal in every process with the same Python.
    ConfigurationError if the function depends on what cannot be hashed (an open file, a lock, a generator).
    """
    return _digest(function, getattr(function, "__qualname__", type(function).__qualname__)).hex()


def _digest(value: Any, name: str) -> bytes:
    stream = io.BytesIO()
    _FingerprintPickler(stream, name).dump(value)
    return _hash(stream.getbuffer())


class _FingerprintPickler(pickle.Pickler):
    """Pickles what a function depends on, the same way in every process.

    ``persistent_id`` returns bytes that represent a value. ``reducer_override`` returns the parts of a value as state,
    which ``pickle`` saves after it has memoized the value, so that circular references end.
    """

    def __init__(self, stream: io.BytesIO, name: str):
        super().__init__(stream, protocol=5)
        self.name = name

    def persistent_id(self, obj: Any) -> bytes | None:
        value = obj
        if type(value) in (str, bytes):  # pickle would record which are one object, which differs between processes
            return _hash(type(value).__name__, value)
        if type(value) in (set, frozenset):
            return _hash(type(value).__name__, *sorted(_digest(item, self.name) for item in value))
        if isinstance(value, types.ModuleType):
            return _hash("module", _versioned(value.__name__))
        if isinstance(value, type) and _is_installed(value.__module__):
            return _hash("class", _versioned(value.__module__), value.__qualname__)
        if isinstance(value, types.FunctionType) and _is_importable(value):
            return _hash("function", _versioned(value.__module__), value.__qualname__)
        return None

    def reducer_override(self, obj: Any) -> Any:
        value = obj
        if isinstance(value, types.FunctionType):
            return ANY_CALLABLE, ("function",), _function_parts(value)
        if isinstance(value, types.CodeType):
            return ANY_CALLABLE, ("code",), _code_parts(value)
        if isinstance(value, type):
            members = ((name, part) for name, part in vars(value).items() if name not in NOT_BEHAVIOR)
            content = {name: _unwrap(part) for name, part in members if name[:5] != "_abc_"}
            return ANY_CALLABLE, ("class",), [value.__qualname__, value.__bases__, content]
        if isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return ANY_CALLABLE, ("tensor",), [type(value), str(value.dtype), tuple(value.shape), content]
        if isinstance(value, types.MappingProxyType):  # a dataclass holds some
            return ANY_CALLABLE, ("mapping",), dict(value)
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(5)
        except Exception:
            raise self._error(value) from None
        if not isinstance(reduced, str):
            return reduced
        if hasattr(value, "__wrapped__"):  # the user's function behind functools.cache
            return ANY_CALLABLE, ("wrapper",), [type(value), value.__wrapped__]
        module = getattr(value, "__module__", None) or type(value).__module__
        if not _is_installed(module):
            raise self._error(value)
        return ANY_CALLABLE, ("named",), [type(value), _versioned(module), reduced]

    def _error(self, value: Any) -> ConfigurationError:
        reason = f"cannot detect changes of {self.name}, because it depends on a {type(value).__name__}"
        return ConfigurationError(f"{reason}; create that inside the function, or remove the cache")


def _function_parts(function: types.FunctionType) -> list:
    names = _names(function.__code__)
    used = [("", _content(cell)) for cell in function.__closure__ or ()]
    used += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    used += [("", module) for module in _imported(function.__code__, function.__globals__)]
    used = [(name, _with_attributes(value, names)) for name, value in used]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, used]


def _code_parts(code: types.CodeType) -> list:
    """The parts of a code object to hash: all except file names, line numbers and names of local variables."""
    arguments = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount]
    names = [*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    return [code.co_code, code.co_exceptiontable, code.co_flags, arguments, names, list(code.co_consts)]


def _with_attributes(value: Any, names: list[str], around: tuple = ()) -> list:
    """Returns [value]; of a module of the user also (name, such a list) for each attribute that is in ``names``."""
    if not isinstance(value, types.ModuleType) or _is_installed(value.__name__) or value in around:
        return [value]
    attributes = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return [value, *((name, _with_attributes(part, names, (*around, value))) for name, part in attributes)]


def _imported(code: types.CodeType, namespace: dict) -> Iterator[types.ModuleType | str]:
    """Yields what code imports: the user's modules as such, installed and missing ones by name."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, parts, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and not level.argval and _is_installed(step.argval):
            yield _versioned(step.argval)
        elif step.opname == "IMPORT_NAME":
            try:
                yield __import__(step.argval, namespace, None, parts.argval, level.argval)
            except ImportError:
                yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imported(inner, namespace)


def _names(code: types.CodeType) -> list[str]:
    """Names of the globals and attributes that code, and functions defined inside it, refer to."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


def _unwrap(part: Any) -> Any:
    """The functions in a property, classmethod or the like; any other class attribute as it is."""
    if isinstance(part, (staticmethod, classmethod)):
        return part.__func__
    if isinstance(part, property):
        return [part.fget, part.fset, part.fdel]
    return part.__name__ if isinstance(part, (types.MemberDescriptorType, types.GetSetDescriptorType)) else part


def _is_importable(function: types.FunctionType) -> bool:
    """Whether a function is found by name in an installed module, so that name and version identify it."""
    return _is_installed(function.__module__) and not function.__closure__ and "<locals>" not in function.__qualname__


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python or to an installed package, where a change of code is a change of version."""
    package = (module or "builtins").partition(".")[0]
    if package == "builtins" or package in sys.stdlib_module_names:
        return package != "__main__"
    if package in sys.modules:
        file = getattr(sys.modules[package], "__file__", None)
    else:
        file = getattr(find_spec(package), "origin", None)
    return file is not None and any(Path(file).is_relative_to(directory) for directory in INSTALLED)


@functools.cache
def _versioned(module: str) -> str:
    """A module's name with the version of its package or of Python."""
    package = module.partition(".")[0]
    try:
        return f"{module} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{module} {getattr(sys.modules.get(package), '__version__', sys.version_info[:3])}"


def _hash(*parts: str | bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()

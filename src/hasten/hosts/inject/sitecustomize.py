"""Imported by Python at its start where hasten put this directory into PYTHONPATH; prepares a training script for
hasten.

It imports the standard library only, never raises, and does nothing until torch is imported. Then
``hasten.hosts.inside.session`` takes over, before the script has seen torch. The user's own ``sitecustomize`` still
runs.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
SESSION = "HASTEN_HOST"  # environment variable: the directory of the session, which hasten made


def run_users_sitecustomize():
    """Imports the sitecustomize that this file hides, if any, and takes this directory out of the search path."""
    sys.path[:] = [directory for directory in sys.path if os.path.abspath(directory or ".") != FOLDER]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


class ImportFinder:
    """Calls each function of ``watchers[name]`` with the module of that name whenever it has been executed.

    Asking for a spec is not enough: a package may do so only to see whether torch is installed.
    """

    def __init__(self, watchers):
        self.watchers = watchers
        sys.meta_path.insert(0, self)
        for name in watchers.keys() & sys.modules.keys():
            self.imported(name, sys.modules[name])

    def find_spec(self, name, path=None, target=None):
        """The spec of a module of interest, with a loader that calls ``imported`` at its end; None for any other."""
        if name not in self.watchers:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = WatchingLoader(spec.loader, self)  # pyright: ignore[reportAttributeAccessIssue]
                return spec
        return None

    def imported(self, name, module):
        for watch in self.watchers[name]:
            watch(module)


class WatchingLoader:
    """Loads a module with its own ``loader``, makes that the module's loader again, and calls ``finder.imported``."""

    def __init__(self, loader, finder):
        self.loader, self.finder = loader, finder

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.finder.imported(module.__spec__.name, module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def start_session(torch):
    """Starts a session of hasten. If that fails, the file ``error`` of the session's directory holds the reason, and
    the script runs without hasten.
    """
    directory = os.environ[SESSION]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ImportFinder)]
    try:
        try:
            import hasten  # noqa: F401
        except ImportError:  # the script runs in another environment; ours comes last, so that it hides nothing there
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))
        from hasten.hosts.inside import session

        session.start(directory, ImportFinder)
    except Exception as error:
        try:
            with open(os.path.join(directory, "error"), "w") as file:
                file.write(f"{type(error).__name__}: {error}")
        except OSError:
            pass


if SESSION in os.environ:
    try:
        open(os.path.join(os.environ[SESSION], "started"), "a").close()
        ImportFinder({"torch": [start_session]})
    except Exception:
        pass
run_users_sitecustomize()

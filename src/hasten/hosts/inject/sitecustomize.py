"""Imported by Python at its start where hasten put this directory into PYTHONPATH; prepares a training script for
hasten.

It imports the standard library only, never raises, and does nothing until torch or a tracker is imported. With torch
``hasten.hosts.inside.session`` takes over, before the script has seen it; in a trial, ``hasten.hosts.inside.offline``
keeps trackers offline. The user's own ``sitecustomize`` still runs.
"""

import os
import sys

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
SESSION = "HASTEN_HOST"  # environment variable: the directory of the session, which hasten made
TRACKERS = (  # the modules of hasten.hosts.inside.offline.WATCHED
    *("wandb.sdk.wandb_init", "trackio", "transformers.training_args", "huggingface_hub.hf_api"),
    *("mlflow.tracking._tracking_service.utils", "mlflow.tracking._model_registry.utils", "mlflow.tracking.client"),
    *("swanlab", "comet_ml"),
)


def run_users_sitecustomize():
    """Imports the sitecustomize that this file hides, if any, and takes this directory out of the search path."""
    sys.path[:] = [directory for directory in sys.path if os.path.abspath(directory or ".") != DIRECTORY]
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
            spec = getattr(sys.modules[name], "__spec__", None)
            if getattr(spec, "_initializing", False):  # its code is importing torch just now
                self.call_at_end(name, spec)
            else:
                self.imported(name, sys.modules[name])

    def call_at_end(self, name, spec):
        """Calls ``imported`` once Python marks a module, of which this is the spec, as executed."""
        finder, kind = self, type(spec)

        class WatchedSpec(kind):
            def __setattr__(self, attribute, value):
                super().__setattr__(attribute, value)
                if attribute == "_initializing" and not value:
                    self.__class__ = kind
                    if name in sys.modules:  # the import has not failed
                        finder.imported(name, sys.modules[name])

        spec.__class__ = WatchedSpec

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
    """Starts a session of hasten. If that fails in the first process of a trial, the trial ends, as in
    ``keep_offline``. Other processes, and a training for real, run without hasten; the file ``error`` of the session's
    directory holds the reason.
    """
    directory = os.environ[SESSION]
    running = os.path.join(directory, "running")  # exists once a session has started in some process

    def watch_instead(watchers):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ImportFinder)]
        ImportFinder(watchers)

    try:
        find_hasten()
        from hasten.hosts.inside import session

        session.start(directory, watch_instead)
        open(running, "w").close()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if is_trial() and not os.path.exists(running):
            end_trial(f"hasten cannot run in the Python of the script ({sys.executable}): {why}; install hasten there")
        try:
            with open(os.path.join(directory, "error"), "w") as file:
                file.write(why)
        except OSError:
            pass


def keep_offline(tracker):
    """Keeps what a trial passes to a tracker, one of TRACKERS, on this machine. If that fails, the trial ends, and the
    file ``failure`` holds the reason: the script would write to the user's server.
    """
    if not is_trial():
        return
    try:
        find_hasten()
        from hasten.hosts.inside.offline import WATCHED

        WATCHED[tracker.__name__](tracker)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        end_trial(f"cannot keep {tracker.__name__} offline: {why}; run the script without it")


def is_trial():
    """Whether the session of this process is a trial; False where the session is over, and left this process behind."""
    import json

    try:
        with open(os.path.join(os.environ.get(SESSION, ""), "spec.json")) as file:
            return json.load(file)["mode"] == "trial"
    except (OSError, ValueError, KeyError):
        return False


def end_trial(text):
    """Ends this process; hasten reports the text, on one line."""
    import json

    with open(os.path.join(os.environ[SESSION], "failure"), "w") as file:
        json.dump({"text": " ".join(text.split()), "refused": True}, file)
    os._exit(2)


def find_hasten():
    """Makes hasten importable where the script runs in another environment; last, so that it hides nothing there."""
    try:
        import hasten  # noqa: F401
    except ImportError:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(DIRECTORY))))


if SESSION in os.environ:
    try:
        open(os.path.join(os.environ[SESSION], "started"), "a").close()
        ImportFinder({"torch": [start_session], **{name: [keep_offline] for name in TRACKERS}})
    except Exception:
        pass
run_users_sitecustomize()

"""Imported by Python at its start, from PYTHONPATH: counts the steps of a training and hashes its weights.

An observer that shares no code with hasten, for ``public_scripts.py``. It seeds all generators once torch is imported,
since some scripts do not, and sends what it sees to a socket: a file would end in the sandbox of a trial.
"""

import hashlib
import importlib.abc
import json
import os
import random
import socket
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls ``observe`` once torch is imported, and then is gone."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = next(spec for finder in sys.meta_path if (spec := finder.find_spec(name, path, target)))
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            observe(module)

        spec.loader.exec_module = exec_module
        return spec


def observe(torch):
    """Counts updates and backward passes, and sends both after each; from ``RECORDER_STEP`` on with a hash."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seed_all(torch)
    receiver, at = os.environ["RECORDER"], int(os.environ["RECORDER_STEP"])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    updates, seen = {}, {"backwards": 0, "updates": 0, "hash": ""}
    original = torch.autograd.backward

    def send():
        connection.sendto(json.dumps(seen | {"pid": os.getpid()}).encode(), "\0" + receiver)

    def backward(*args, **kwargs):
        original(*args, **kwargs)
        seen["backwards"] += 1
        if seen["backwards"] == at:
            seen["hash"] = hash_of_weights(torch)
        send()

    def after_update(optimizer, args, kwargs):
        updates[id(optimizer)] = updates.get(id(optimizer), 0) + 1
        seen["updates"] = max(updates.values())  # of several optimizers, as torch's profiler counts steps
        send()

    torch.autograd.backward = backward
    register_optimizer_step_post_hook(after_update)


def hash_of_weights(torch):
    """SHA-256 of all parameters of this process, in an order that does not depend on where they lie in memory."""
    import gc

    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Parameter)]
    digests = (hashlib.sha256(one.detach().cpu().contiguous().numpy().tobytes()).hexdigest() for one in found)
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def seed_all(torch):
    """Seeds the generators that scripts use."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


if "RECORDER" in os.environ:
    sys.meta_path.insert(0, AfterTorch())

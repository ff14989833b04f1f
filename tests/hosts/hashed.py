"""Runs a script as if by itself, then prints the SHA-256 of the weights of every model that exists at its end."""

import gc
import hashlib
import runpy
import sys

sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")  # keeps what the script made alive

from torch import nn  # noqa: E402  # after the script, which may need to set something first

modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
children = {id(child) for module in modules for child in module.children()}
digests = []
for module in modules:
    if id(module) not in children and any(parameter.requires_grad for parameter in module.parameters()):
        digest = hashlib.sha256()
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        digests.append(digest.hexdigest())
print("weights", *sorted(digests))

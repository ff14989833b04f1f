"""``hasten serve --write DIR``: a Dockerfile and a Kubernetes manifest for a model."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hasten import __version__
from hasten.core.errors import ConfigurationError
from hasten.deploy.onnx_model import MODEL
from hasten.deploy.signature import SIGNATURE, read_signature
from hasten.engine.error_messages import writable
from hasten.serving.server import model_directory

FILES = ("Dockerfile", "kubernetes.yaml")
TAG_DIGITS = 12
BASE_MEMORY_MB = 1024  # of a server with its batches, besides the weights


def write_container(model: str | Path, out: str | Path, report: Callable[[str], None] = print) -> list[str]:
    """Writes ``Dockerfile``, ``kubernetes.yaml`` and a copy of the model to ``out``; returns their paths.

    The tag of the image follows from the model and the version of hasten: a node that has an image with that tag does
    not pull it again.

    Args:
        model: As for ``serve``: a directory with ``model.onnx`` and ``signature.json``, that ``model.onnx``, or the run
            directory of a workload, which is exported first.
        out: Directory of the files. Other files in it stay; an older ``model`` in it is replaced.
        report: Called with a line for people about an export.

    Raises:
        ConfigurationError: There is no such model, one of ``FILES`` exists already, or ``out`` cannot be written.
    """
    directory = Path(out)
    if existing := [name for name in FILES if (directory / name).exists()]:
        raise ConfigurationError(f"{directory / existing[0]} already exists; choose another --write")
    source = model_directory(Path(model), report)
    signature = read_signature(source)
    if not (source / MODEL).is_file():
        raise ConfigurationError(f"{source} has no {MODEL}; make it with: hasten export RUN --onnx")
    loader = PackageLoader("hasten.serving", ".")
    templates = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    name = "model-" + (re.sub(r"[^a-z0-9]+", "-", signature.task.lower())[:40].strip("-") or "0")
    content = hashlib.sha256(__version__.encode())
    for part in (MODEL, SIGNATURE):
        content.update((source / part).read_bytes())
    memory = BASE_MEMORY_MB + 3 * (source / MODEL).stat().st_size // 2**20  # the weights while they are read, too
    image = f"{name}:{content.hexdigest()[:TAG_DIGITS]}"
    with writable(directory, "--write"):
        (directory / "model").mkdir(parents=True, exist_ok=True)
        for part in (MODEL, SIGNATURE):
            shutil.copyfile(source / part, directory / "model" / part)
        for part in FILES:
            text = templates.get_template(f"{part}.j2").render(
                name=name, image=image, version=__version__, memory=f"{memory}Mi"
            )
            (directory / part).write_text(text, encoding="utf-8")
    return [str(directory / name) for name in (*FILES, f"model/{MODEL}", f"model/{SIGNATURE}")]

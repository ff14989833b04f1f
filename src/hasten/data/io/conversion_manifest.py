"""The note that ``hasten data convert`` writes beside the data, ``conversion.json``, with the names of the classes."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "conversion.json"


def load_manifest(directory: str) -> dict:
    """The manifest of the conversion that wrote a directory; empty if there is none."""
    try:
        manifest = json.loads((Path(directory) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def stored_classes(files: Sequence[str]) -> list[str] | None:
    """The names of the classes that became indices when ``files`` were written, by index; None if there are none."""
    stored = load_manifest(os.path.dirname(files[0])).get("classes") if files else None
    return [str(name) for name in stored] if isinstance(stored, list) else None

"""The folder of everything that hasten caches: samples, indexes, file lists."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def default_folder() -> Path:
    """Returns the environment variable HASTEN_CACHE, or hasten's folder in the user's cache directory.

    RuntimeError if the user has no home directory.
    """
    if os.environ.get("HASTEN_CACHE"):
        return Path(os.environ["HASTEN_CACHE"])
    return user_cache_path("hasten", appauthor=False).expanduser()

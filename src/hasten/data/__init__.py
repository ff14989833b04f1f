"""Data pipelines: from files to batches on the device, the same for any number of workers and ranks.

    from hasten.data import parquet
    train = parquet("train/*.parquet", target="label").shuffle(seed=0).batch(512)

The names are imported on first use, so that ``import hasten.data`` is fast. Type checkers and editors read the imports
under ``TYPE_CHECKING``; ``tests/data/test_pipeline.py`` compares the two lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.data.formats.arrays import arrays, augmented_images
    from hasten.data.formats.images import images
    from hasten.data.formats.tables import csv, feather, parquet
    from hasten.data.formats.tfrecord import tfrecord
    from hasten.data.formats.token_files import tokens
    from hasten.data.formats.webdataset import webdataset
    from hasten.data.pipeline import Pipeline
    from hasten.data.rng import SampleRng
    from hasten.data.source import BadRow, Source
    from hasten.data.transforms import normalize, random_crop, random_horizontal_flip
    from hasten.datatools.conversion import convert
    from hasten.datatools.inspection import inspect

__all__ = [
    "BadRow",
    "Pipeline",
    "SampleRng",
    "Source",
    "arrays",
    "augmented_images",
    "convert",
    "csv",
    "feather",
    "images",
    "inspect",
    "normalize",
    "parquet",
    "random_crop",
    "random_horizontal_flip",
    "tfrecord",
    "tokens",
    "webdataset",
]

_PUBLIC = {  # module: its public names
    "data.formats.arrays": "arrays augmented_images",
    "data.formats.images": "images",
    "data.formats.tables": "csv feather parquet",
    "data.formats.tfrecord": "tfrecord",
    "data.formats.token_files": "tokens",
    "data.formats.webdataset": "webdataset",
    "data.pipeline": "Pipeline",
    "data.rng": "SampleRng",
    "data.source": "BadRow Source",
    "data.transforms": "normalize random_crop random_horizontal_flip",
    "datatools.conversion": "convert",
    "datatools.inspection": "inspect",
}
_MODULES = {name: f"hasten.{module}" for module, names in _PUBLIC.items() for name in names.split()}


if not TYPE_CHECKING:  # otherwise every misspelled name would have the type Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__

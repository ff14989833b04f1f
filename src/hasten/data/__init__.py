"""Data pipelines: from files to batches on the device, the same for any number of workers and ranks.

    from hasten.data import parquet
    train = parquet("train/*.parquet", target="label").shuffle(seed=0).batch(512)

The names are imported on first use, so that ``import hasten.data`` is fast. Type checkers and editors read the imports
under ``TYPE_CHECKING``; ``tests/test_public_api.py`` compares the two lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" makes a name public
    from hasten.data.formats.arrays import arrays as arrays
    from hasten.data.formats.arrays import augmented_images as augmented_images
    from hasten.data.formats.images import images as images
    from hasten.data.formats.tables import csv as csv
    from hasten.data.formats.tables import feather as feather
    from hasten.data.formats.tables import parquet as parquet
    from hasten.data.formats.tfrecord import tfrecord as tfrecord
    from hasten.data.formats.token_files import tokens as tokens
    from hasten.data.formats.webdataset import webdataset as webdataset
    from hasten.data.pipeline import Pipeline as Pipeline
    from hasten.data.rng import SampleRng as SampleRng
    from hasten.data.source import BadRow as BadRow
    from hasten.data.source import Source as Source
    from hasten.data.transforms import normalize as normalize
    from hasten.data.transforms import random_crop as random_crop
    from hasten.data.transforms import random_horizontal_flip as random_horizontal_flip
    from hasten.datatools.conversion import convert as convert
    from hasten.datatools.inspection import inspect as inspect

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
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return __all__

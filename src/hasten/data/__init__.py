"""From files to batches: fast by construction, the same whoever computes them, resumable by three integers.

    from hasten.data import parquet
    train = parquet("train/*.parquet", target="label").shuffle(seed=0).batch(512)

Each name below makes a ``Pipeline``; the rooms behind them are loaded when they are first used.
"""

from importlib import import_module

_WHERE = {
    "arrays": "hasten.data.formats.arrays",
    "images": "hasten.data.formats.images",
    "webdataset": "hasten.data.formats.webdataset",
    "tfrecord": "hasten.data.formats.tfrecord",
    "csv": "hasten.data.formats.tables",
    "feather": "hasten.data.formats.tables",
    "parquet": "hasten.data.formats.tables",
    "tokens": "hasten.data.formats.token_files",
    "inspect": "hasten.datatools.inspection",
    "convert": "hasten.datatools.conversion",
    "augmented_images": "hasten.data.formats.augmented_images",
    "random_crop": "hasten.data.transforms",
    "random_horizontal_flip": "hasten.data.transforms",
    "normalize": "hasten.data.transforms",
    "Pipeline": "hasten.data.pipeline",
    "Source": "hasten.data.source",
}

__all__ = list(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__():
    return sorted(__all__)

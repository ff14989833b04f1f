"""Rows in memory or in ``.npy`` files: tensors, NumPy arrays, and nestings of them."""

from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import Arrays
from hasten.data.pipeline import Pipeline


def arrays(*columns: Any) -> Pipeline:
    """Samples from arrays whose first dimension is the sample.

    Arrays are referenced, not copied. A cache of them notices what torch changes in them between epochs, not what
    NumPy changes.

    Args:
        columns: Tensors, NumPy arrays or paths of local ``.npy`` files (memory-mapped), all of the same length. Several
            columns make a batch a tuple; a single dict or tuple of columns is also accepted.

    Raises:
        ConfigurationError: No column, a remote file, different lengths, or an array of Python objects (reading it
            would execute code).
    """
    if not columns:
        raise ConfigurationError("arrays() requires at least one array")
    return Pipeline(Arrays(columns[0] if len(columns) == 1 else tuple(columns)))

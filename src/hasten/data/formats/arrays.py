"""Rows in memory or in ``.npy`` files: tensors, NumPy arrays, nestings of them; images that are augmented per batch."""

from collections.abc import Sequence
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import Arrays
from hasten.data.batch_builder import Map
from hasten.data.pipeline import Pipeline
from hasten.data.transforms import images_of, normalize, random_crop


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


def augmented_images(
    images: Any,
    labels: Any = None,
    *,
    padding: int = 4,
    mirror: bool = True,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> Pipeline:
    """Images in memory, randomly cropped, flipped and normalized in every batch, before other maps after ``batch``.

    ``images`` is a tensor, NumPy array or path of a ``.npy`` file, shape (n, ..., height, width); ``labels`` one per
    image, as for ``arrays``; ``padding`` and ``mirror`` are those of ``random_crop``, ``mean`` and ``std`` those of
    ``normalize``. A batch is float32, shape (rows, ..., height, width), or with labels the tuple (images, labels).

    Raises:
        ConfigurationError: The images have fewer than three dimensions, or an argument is one that ``arrays``,
            ``random_crop`` or ``normalize`` refuses.
    """
    source = Arrays(images if labels is None else (images, labels))
    images_of(source.columns)  # reports a wrong shape now, not at the first batch
    return Pipeline(source, batch_maps=(Map(random_crop(padding, mirror), stage=0), Map(normalize(mean, std))))

"""Data in files, for tests of inspection and conversion."""

import numpy
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image

ROWS = 3000


def mixed_table(rows=ROWS):
    """Numbers of all types, text and lists; some text and numbers are missing."""
    random = numpy.random.default_rng(0)
    texts = numpy.array(["alpha", "beta", "gamma", ""], dtype=object)[random.integers(0, 4, rows)]
    texts[::97] = None
    lists = [random.integers(0, 9, length).tolist() for length in random.integers(0, 4, rows)]
    return pa.table(
        {
            "number": random.normal(size=rows).astype("float32"),
            "small": pa.array(random.integers(0, 100, rows), pa.int8()),
            "missing": pa.array([None if row % 50 == 3 else row / 7 for row in range(rows)]),
            "word": pa.array(texts).dictionary_encode(),
            "list": lists,
            "flag": random.integers(0, 2, rows).astype(bool),
            "inner": pa.array([{"a": row, "b": str(row)} for row in range(rows)]),
        }
    )


def numeric_table(rows=ROWS):
    """A table of numbers only, with a label."""
    random = numpy.random.default_rng(0)
    columns = {f"x{number}": random.normal(size=rows).astype("float32") for number in range(4)}
    return pa.table(columns | {"label": pa.array(random.integers(0, 10, rows), pa.int64())})


def write_table(directory, name="train.parquet", content=None, runs=500):
    directory.mkdir(exist_ok=True)
    pa.parquet.write_table(numeric_table() if content is None else content, directory / name, row_group_size=runs)
    return directory


def write_images(directory, count=12, sizes=((300, 400), (320, 280)), ending="jpg"):
    """Writes images of two classes."""
    for number in range(count):
        height, width = sizes[number % len(sizes)]
        x, y = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        colours = torch.stack([x + number, y, x + y], dim=-1).remainder(256).to(torch.uint8)
        place = directory / ("cat" if number % 2 else "dog") / f"{number}.{ending}"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colours.numpy()).save(place)
    return directory


def read_all(pipeline):
    """Returns all rows of a pipeline's source, as columns."""
    return pipeline.source.read(numpy.arange(len(pipeline.source)))


def damage(path, run):
    """Overwrites the pages of a row group of a Parquet file with wrong bytes."""
    column = pyarrow.parquet.read_metadata(path).row_group(run).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(content)

"""Tables in files of every format. Import it only if pyarrow is installed."""

import datetime
from decimal import Decimal

import numpy
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

from hasten.data import csv, feather, parquet

ROWS, RUN = 1000, 128
WHOLE, BY_RUN = None, 0  # gigabytes
READERS = {"parquet": parquet, "csv": csv, "uncompressed": feather, "lz4": feather, "zstd": feather}
ANY_ORDER = numpy.random.default_rng(0).permutation(ROWS)[:300]


def numbers(rows: int = ROWS, first: int = 0):
    count = numpy.arange(first, first + rows)
    return pa.table({"a": count.astype("f4"), "b": count * 10, "yes": count % 3 == 0, "label": count % 7})


def nested():
    count = range(ROWS)
    return pa.table(
        {
            "id": pa.array(count, pa.int32()),
            "pair": pa.array([[i, -i] for i in count], pa.list_(pa.float32(), 2)),
            "grid": pa.array([[[i] * 3] * 2 for i in count], pa.list_(pa.list_(pa.int16(), 3), 2)),
            "words": [f"word {i}" for i in count],
            "raw": [bytes([i % 256]) for i in count],
            "some": pa.array([list(range(i % 4)) for i in count], pa.list_(pa.int64())),
            "names": [["x"] * (i % 3) for i in count],
            "point": [{"x": float(i), "tag": str(i)} for i in count],
            "when": pa.array(
                [datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=i) for i in count], pa.timestamp("ms")
            ),
            "price": pa.array([Decimal(i) / 4 for i in count], pa.decimal128(8, 2)),
            "kind": pa.array([f"k{i % 5}" for i in count]).dictionary_encode(),
        }
    )


def write(table, path, form: str) -> str:
    if form == "parquet":
        pa.parquet.write_table(table, path, row_group_size=RUN)
    elif form == "csv":
        pa.csv.write_csv(table, path)
    else:
        pa.feather.write_feather(table, path, compression=form, chunksize=RUN)
    return str(path)

"""What is kept, what lies in the folder of a cache, and how much is read for it, for the tests of caches."""

import torch

from helpers.pipelines import ROWS

KINDS = ["memory", "disk"]
NUMBERS = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


def files(tmp_path):
    return sorted(
        str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


def counting(pipeline):
    """The pipeline's source, counting the rows that are read from it."""
    source, pipeline.source.rows_read = pipeline.source, 0
    read = source.read

    def counted(rows):
        source.rows_read += len(rows)
        return read(rows)

    source.read = counted
    return pipeline

"""For the tests of caches: sources to cache, the files of a cache directory, and the rows read to fill it."""

import torch

from helpers.pipelines import ROWS

KINDS = ["memory", "disk"]
NUMBERS = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


def files(tmp_path):
    return sorted(
        str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


def counting(pipeline):
    """Replaces the pipeline's source by one that counts the rows read from it."""
    source, pipeline.source.rows_read = pipeline.source, 0
    read = source.read

    def counted(rows):
        source.rows_read += len(rows)
        return read(rows)

    source.read = counted
    return pipeline

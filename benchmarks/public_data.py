"""The data that public training scripts expect: small, from HASTEN_DATA or made up.

Every function prepares the copy of one script's directory. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

DATA = Path(os.environ.get("HASTEN_DATA", Path(__file__).parents[2] / "shared/data"))


def shakespeare(directory: Path) -> None:
    """nanoGPT: the text, prepared by its own script."""
    place = directory / "data/shakespeare_char"
    shutil.copy(DATA / "tinyshakespeare/input.txt", place)
    subprocess.run([sys.executable, "prepare.py"], cwd=place, check=True, stdout=subprocess.DEVNULL)


def corpus(directory: Path) -> None:
    """word_language_model: three parts of a text."""
    text = (DATA / "tinyshakespeare/input.txt").read_text()
    (directory / "data/tiny").mkdir(parents=True)
    for name, begin, end in (("train", 0, 200_000), ("valid", 200_000, 220_000), ("test", 220_000, 240_000)):
        (directory / f"data/tiny/{name}.txt").write_text(text[begin:end])


def wikitext(directory: Path) -> None:
    """The language model of Lightning: a text of any kind, where it would download one."""
    (directory / "data").mkdir()
    shutil.copy(DATA / "tinyshakespeare/input.txt", directory / "data/wikitext-2.txt")


def mnist_at(place: str, train: int = 6_000, test: int = 1_000) -> Callable[[Path], None]:
    """The first images of Fashion-MNIST, as the files of MNIST below ``place``."""

    def prepare(directory: Path) -> None:
        raw = directory / place / "MNIST/raw"
        raw.mkdir(parents=True)
        for part, count in (("train", train), ("t10k", test)):
            for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
                data = gzip.decompress((DATA / f"fashion-mnist/{part}-{kind}-ubyte.gz").read_bytes())
                short = data[:4] + count.to_bytes(4, "big") + data[8 : header + count * size]
                (raw / f"{part}-{kind}-ubyte").write_bytes(short)

    return prepare


REQUESTS = """
class get:
    def __init__(self, url, stream=True): self.raw = open("cora.tgz", "rb")
    def __enter__(self): return self
    def __exit__(self, *_): self.raw.close()
"""


def cora(directory: Path) -> None:
    """A made-up graph in the format of Cora, and a module ``requests`` that finds it beside the script."""
    import numpy

    rng = numpy.random.default_rng(0)
    labels = rng.integers(0, 5, 2_000)
    words = rng.random((2_000, 40)) < 0.1 + 0.3 * (rng.integers(0, 5, 40) == labels[:, None])
    rows = (
        f"{node}\t" + "\t".join(map(str, words[node].astype(int))) + f"\tclass{labels[node]}" for node in range(2_000)
    )
    pairs = (f"{a}\t{b}" for a, b in rng.integers(0, 2_000, (4_000, 2)))
    with tarfile.open(directory / "cora.tgz", "w:gz") as archive:
        for name, lines in (("cora.content", rows), ("cora.cites", dict.fromkeys(pairs))):
            data = ("\n".join(lines) + "\n").encode()
            info = tarfile.TarInfo(f"cora/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (directory / "requests.py").write_text(REQUESTS)


WANDB = """
class Histogram:
    def __init__(self, *_): pass
Image = Histogram
class Run:
    config = {}
    def log(self, values): pass
def init(**_): return Run()
"""


def blobs(directory: Path) -> None:
    """U-Net: pictures of a bright square and their masks; and a module ``wandb`` that logs nowhere."""
    import numpy
    from PIL import Image

    rng = numpy.random.default_rng(0)
    for kind in ("imgs", "masks"):
        (directory / "data" / kind).mkdir(parents=True, exist_ok=True)
    for number in range(40):
        mask = numpy.zeros((32, 32), numpy.uint8)
        top, left = rng.integers(0, 16, 2)
        mask[top : top + 16, left : left + 16] = 1
        image = (mask[..., None] * 120 + rng.integers(0, 120, (32, 32, 3))).astype(numpy.uint8)
        Image.fromarray(image).save(directory / f"data/imgs/{number}.png")
        Image.fromarray(mask).save(directory / f"data/masks/{number}_mask.png")
    (directory / "wandb.py").write_text(WANDB)

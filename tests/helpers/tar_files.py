"""Tar files for tests of their readers."""

import io
import json
import tarfile

import numpy
from PIL import Image

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def npy(array):
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def png(seed, size=(20, 30)):
    file = io.BytesIO()
    pixels = numpy.random.default_rng(seed).integers(0, 256, (*size, 3), numpy.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), pixels.transpose(2, 0, 1)


def pack(path, files, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(number):
    return [
        (f"set/{number:04}.cls", str(number % 10).encode()),
        (f"set/{number:04}.json", json.dumps({"number": number}).encode()),
        (f"set/{number:04}.txt", f"text {number} é".encode()),
        (f"set/{number:04}.npy", npy(numpy.full((2, 3), number, numpy.float32))),
        (f"set/{number:04}.bin", bytes([number])),
    ]

"""Malicious and damaged tar headers: invalid numbers, and random damage."""

import signal
import tarfile
from contextlib import contextmanager, suppress

import numpy
import pytest

from hasten.core.errors import ConfigurationError
from hasten.data import webdataset
from hasten.data.source import BadRow
from helpers.tar_files import FORMS, pack, png, sample


@contextmanager
def time_limit(seconds):
    """Fails if the block takes longer."""

    def fail(*_):
        pytest.fail(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def summed(header):
    """Returns a header with a matching checksum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


def with_size(path, size, kind=b"0"):
    """Returns a tar file whose first member states this size and type."""
    content = bytearray(pack(path, [("a.txt", b"x"), ("b.txt", b"x")], tarfile.USTAR_FORMAT).read_bytes())
    content[124:136], content[156:157] = size, kind
    content[:512] = summed(content[:512])
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", [b"0", b"5", b"x", b"L"])
@pytest.mark.parametrize("size", [b"-0000001000\0", b"-0000002000\0", b"\xff" * 12])
def test_negative_size_is_refused(tmp_path, kind, size):
    with time_limit(60), pytest.raises(ConfigurationError, match=r"a\.tar is (not a tar file|cut off|damaged)"):
        webdataset(with_size(tmp_path / "a.tar", size, kind))


@pytest.mark.parametrize("size", ["²", "٣", "-512", "+1", "1_0", " 1", "9" * 5000, "9" * 18])
def test_pax_size_that_is_not_a_number_is_refused(tmp_path, size):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {"size": size}
        tar.addfile(info)
    with pytest.raises(
        ConfigurationError, match=r"a\.tar is (damaged: the extended header at byte 0 cannot be read|cut off)"
    ):
        webdataset(tmp_path / "a.tar")


def test_extended_header_of_many_records_is_read_once(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {f"{number:x}": "" for number in range(5_000)}
        tar.addfile(info)
    with time_limit(60):
        assert webdataset(tmp_path / "a.tar").source.read(numpy.array([0])) == {"txt": [""]}
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[: 1 << 14])
    with pytest.raises(ConfigurationError, match=r"b\.tar is cut off"):
        webdataset(tmp_path / "b.tar")
    with pytest.raises(ConfigurationError, match=r"extended header at byte 0 has \d+ bytes"):
        webdataset(with_size(tmp_path / "c.tar", b"%011o\0" % (1 << 21), b"x"))


INVALID_SIZES = (b"-0000001000\0", b"77777777777\0", b"\xff" * 12, b"00000000777\0")  # size fields


def damaged(content, random):
    """Changes some bytes, corrects the checksums as an attacker would, and may truncate the file."""
    content = bytearray(content)
    for _ in range(random.integers(1, 6)):
        block = 512 * random.integers(0, len(content) // 512)
        place = block + random.choice([random.integers(0, 512), random.integers(124, 136), 124, 156])
        content[place] = random.choice([random.integers(0, 256), *b"07--++ _\0\xffLKgxS55"])
        if random.random() < 0.1:
            content[block + 124 : block + 136] = INVALID_SIZES[random.integers(len(INVALID_SIZES))]
    for begin in range(0, len(content) - 511, 512):
        if content[begin + 257 : begin + 262] == b"ustar" and random.random() < 0.9:
            content[begin : begin + 512] = summed(content[begin : begin + 512])
    return content[: random.integers(0, len(content))] if random.random() < 0.2 else content


@pytest.mark.parametrize("form", FORMS)
def test_any_damage_raises_an_error_of_hasten(tmp_path, form):
    long = [] if form == "ustar" else [(f"{'y' * 200}/0001.json", b"{}")]
    content = pack(
        tmp_path / "a.tar", [*sample(0), *long, *sample(2), ("0003.png", png(0)[0])], FORMS[form]
    ).read_bytes()
    random, read = numpy.random.default_rng(0), 0
    for _ in range(250):
        (tmp_path / "a.tar").write_bytes(damaged(content, random))
        with time_limit(60), suppress(ConfigurationError):
            source = webdataset(tmp_path / "a.tar").source
            for row in range(len(source)):
                with suppress(BadRow):
                    source.read(numpy.array([row]))
                    read += 1
    assert read  # part of it was intact

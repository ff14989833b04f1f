"""A glob of many files: each is found once, in order, in the time of listing the directories; the list is cached."""

import os
import shutil
import time

import pytest

from hasten.data.io import file_list
from hasten.data.io.file_list import list_directory
from hasten.data.io.paths import resolve_paths
from helpers.markers import slow


def filled(root, directories, files):
    """Creates names of empty files, ``directories`` times ``files`` of them, and one of another kind each."""
    for directory in range(directories):
        path = root / f"{directory:04}"
        path.mkdir(parents=True)
        (path / "notes.txt").touch()
        for file in range(files):
            os.link(f"{path}/notes.txt", f"{path}/{file:06}.jpg")  # faster than creating a new file
    return root


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory of its own, so that caches of other tests do not apply."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "set"
    shutil.rmtree(tmp_path / "set")


def within(seconds, do):
    """Returns the function's result; fails above that many CPU seconds in the best of three calls."""
    for _ in range(3):
        began = time.process_time()
        done = do()
        if (took := time.process_time() - began) < seconds:
            return done
    pytest.fail(f"it takes {took:.2f} s, not {seconds:.2f} s")


@pytest.mark.parametrize(
    ("directories", "files"),
    [(20, 1000), slow(100, 1000)],
    ids=["20 thousand", "a hundred thousand"],
)
def test_glob_takes_the_time_of_listing_the_directories(place, directories, files):
    filled(place, directories, files)
    began = time.process_time()
    names = sorted(
        entry.path for directory in os.scandir(place) for entry in os.scandir(directory) if entry.name.endswith(".jpg")
    )
    looked = time.process_time() - began
    globbed = within(6 * looked + 0.2, lambda: resolve_paths(f"{place}/*/*.jpg", (".jpg",)))
    assert globbed == names and len(names) == directories * files
    assert resolve_paths(place, (".jpg",)) == names

    for directory in (place, *place.iterdir()):
        os.utime(directory, ns=(1, 1))  # long ago: the directory does not change any more
    first = list_directory(place, (".jpg",))
    # the cached list is read, and no directory
    again = within(0.05 + looked / 10, lambda: list_directory(place, (".jpg",)))
    assert len(again) == len(first) == len(names) and again.path(len(names) - 1) == names[-1]
    assert len(names) > file_list.MIN_FILES

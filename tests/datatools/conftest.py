"""Settings for the tests of conversions."""

import pytest


@pytest.fixture
def brief_measurements(tmp_path, monkeypatch):
    """An empty cache folder, and short measurements of reading speed."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    for name in ("stage_throughput.COPY_SECONDS", "stage_throughput.ENOUGH_S"):
        monkeypatch.setattr(f"hasten.datatools.{name}", 0.02)
    for name in ("MAX_TURNS", "MIN_TURNS"):
        monkeypatch.setattr(f"hasten.datatools.advice.{name}", 2)


@pytest.fixture
def brief_gain(brief_measurements, monkeypatch):
    """Short measurements of the gain of a conversion, too."""
    monkeypatch.setattr("hasten.datatools.conversion.GAIN_SECONDS", 0.02)

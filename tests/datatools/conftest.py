"""Settings for the tests of conversions."""

import pytest


@pytest.fixture
def brief_measurements(tmp_path, monkeypatch):
    """An empty cache directory, and short measurements of reading speed."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    for name in ("stage_throughput.COPY_SECONDS", "stage_throughput.ENOUGH_S"):
        monkeypatch.setattr(f"hasten.datatools.{name}", 0.02)

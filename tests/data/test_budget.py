"""Memory and cores that one of several ranks may use: the limits of the container's control groups."""

import psutil
import pytest

from hasten.engine import resources

RESERVE = {
    "": "inactive_file 100000\nactive_file 50000\n",
    "memory": "total_inactive_file 100000\ntotal_active_file 50000\n",
}


@pytest.fixture(params=["", "memory"], ids=["version 2", "version 1"])
def control_groups(request, tmp_path, monkeypatch):
    """A group with a limit, around one without."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "control_groups")
    monkeypatch.setattr(resources, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(
        f"1:name=systemd:/init\n{5 if request.param else 0}:{request.param}:/job/step\n"
    )
    limit, use, _ = resources.MEMORY_FILES[request.param]
    for directory, most in {"job": "1000000", "job/step": "max" if not request.param else str(2**63 - 4096)}.items():
        group = tmp_path / "control_groups" / request.param / directory
        group.mkdir(parents=True)
        for name, content in {limit: most, use: "600000", "memory.stat": RESERVE[request.param]}.items():
            (group / name).write_text(content)
    return tmp_path


def test_free_memory_in_a_group_is_divided_among_ranks(control_groups, monkeypatch):
    assert resources.free_memory() == 1_000_000 - 600_000 + 150_000  # memory of the system's file cache is free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resources.free_memory() == 550_000 // 4


def test_table_stays_within_the_memory_of_its_rank(control_groups):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    from pyarrow.parquet import write_table

    from hasten.data import parquet

    write_table(pa.table({"a": range(100_000), "label": range(100_000)}), control_groups / "t.parquet")
    assert not parquet(control_groups / "t.parquet", target="label").source._fits()
    assert parquet(control_groups / "t.parquet", target="label", gigabytes=1).source._fits()


def test_free_memory_without_groups_is_that_of_the_machine(control_groups, monkeypatch):
    (control_groups / "membership").unlink()
    before, reported, after = (
        psutil.virtual_memory().available,
        resources.free_memory(),
        psutil.virtual_memory().available,
    )
    assert 0.5 * min(before, after) < reported < 2 * max(before, after)


@pytest.mark.parametrize("version", [1, 2])
def test_available_cpus_in_a_container_are_divided_among_ranks(version, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(resources, "GROUPS", tmp_path)
    monkeypatch.setattr(resources, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(resources, "cores", lambda: 16)
    assert resources.available_cpus() == 16
    (tmp_path / "membership").write_text("0::/job/step\n" if version == 2 else "3:cpu,cpuacct:/job/step\n")
    job = tmp_path / "job" if version == 2 else tmp_path / "cpu" / "job"
    (job / "step").mkdir(parents=True)
    for directory, quota in ((job, "350000"), (job / "step", "max" if version == 2 else "-1")):
        group_files = (
            {"cpu.max": f"{quota} 100000"}
            if version == 2
            else {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}
        )
        for name, content in group_files.items():
            (directory / name).write_text(content + "\n")
    assert resources.available_cpus() == 3
    (tmp_path / "active").write_text("1\n")
    monkeypatch.setattr(resources, "HARDWARE_THREADS", tmp_path / "active")
    assert resources.available_cores() == 3, "of 8 cores: a quota is time, whatever the hardware threads"
    monkeypatch.setattr(resources, "cores", lambda: 4)
    assert resources.available_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert resources.available_cpus() == 1

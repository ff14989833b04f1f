"""prefetch("auto"): the same batches for any worker configuration, few workers for a fast source, enough for a slow
one, and its cache."""

import dataclasses
import itertools
import math
import random
import threading
import time
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.core.data import WorkerConfig
from hasten.core.errors import HastenWarning
from hasten.data import Pipeline, Source, arrays
from hasten.data.cache.cache import Cache
from hasten.data.cache.cache_disk import _ColumnWriter, free_disk
from hasten.data.workers import autotuned
from hasten.data.workers.autotuned import AutotunedRunner, is_cacheable, is_repeatable
from hasten.loading import autotuner as autotuner_module
from hasten.loading import loader_stats
from hasten.loading.autotuner import LoaderAutotuner
from helpers.markers import slow
from helpers.pipelines import BATCH, ROWS, equal, random_pipeline
from helpers.process import live_children

TIMEOUT_S = 60.0  # seconds, for a busy machine; mostly unused


class NeverConverges(LoaderAutotuner):
    """An autotuner that never converges: it tries one configuration after the other."""

    configurations = (
        WorkerConfig(),
        WorkerConfig(processes=1),
        WorkerConfig(processes=2, prefetch=3),
        WorkerConfig(threads=1, prefetch=2),
        WorkerConfig(threads=3),
    )

    def search(self, choices, seen=None):
        kinds = {"threads": "threads" in choices.kinds, "processes": "processes" in choices.kinds}
        for workers in itertools.cycle(self.configurations):
            if not workers.num_workers or kinds["threads" if workers.threads else "processes"]:
                yield workers


@pytest.fixture
def short_measurements(monkeypatch):
    """One batch makes a measurement, however short."""
    for name, value in {"MIN_BATCHES": 1, "MIN_SECONDS": 0.0, "BATCHES_PER_WORKER": 0, "WARMUP_BATCHES": 0}.items():
        monkeypatch.setattr(loader_stats, name, value)


def changing_workers(pipeline):
    """The pipeline, whose worker configuration changes every few batches, and the configurations used."""
    autotuner = NeverConverges(cores=3, memory_budget=lambda: math.inf)
    return dataclasses.replace(pipeline, runner=AutotunedRunner(autotuner, timeout=60.0))


def nothing_left(before: list[threading.Thread]) -> bool:
    return not live_children() and set(threading.enumerate()) <= set(before)


def plain(rows=ROWS):
    """A pipeline without user functions, so that threads may run it."""
    from hasten.data import normalize, random_horizontal_flip

    pictures = torch.arange(rows * 3 * 4 * 4).remainder(251).to(torch.uint8).view(rows, 3, 4, 4)
    return (
        arrays(pictures, torch.arange(rows))
        .shuffle(seed=3)
        .batch(8)
        .map(random_horizontal_flip())
        .map(normalize(mean=0.5, std=0.25))
    )


@pytest.mark.parametrize("made", [random_pipeline, plain], ids=["own functions", "ours"])
def test_autotuned_any_change_of_workers_keeps_every_bit(made, short_measurements):
    threads = threading.enumerate()
    constant, changing = made(), changing_workers(made())
    for number in range(4):
        assert equal(list(changing), list(constant)), f"pass {number}"
    assert nothing_left(threads)


def test_autotuned_position_resumes_while_workers_change(short_measurements):
    threads, expected, changing = threading.enumerate(), list(random_pipeline()), changing_workers(random_pipeline())
    list(itertools.islice(changing, 3))
    resumed = changing_workers(random_pipeline())
    resumed.load_state_dict(changing.state_dict())
    assert equal(list(resumed), expected[3:])
    assert nothing_left(threads)


def noise(sample):
    return torch.cat(
        [torch.rand(1, dtype=torch.float64), torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)]
    )


def test_autotuned_maps_with_process_generators_use_no_threads(short_measurements):
    def numbers():
        return arrays(torch.arange(ROWS)).map(noise).batch(BATCH)

    assert equal(list(changing_workers(numbers())), list(numbers()))
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = torch.rand(2).tolist(), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    list(changing_workers(numbers()))
    assert (torch.rand(2).tolist(), random.random(), numpy.random.rand()) == before
    with pytest.raises(ConfigurationError, match="which threads share with training"):
        numbers().batches(BATCH, 0, True).with_workers(WorkerConfig(threads=2, prefetch=2))


# ---- real sources and real steps


def napping(batch):
    time.sleep(0.06)  # sleeps, so that workers help on any machine
    return batch


def until_settled(pipeline, step):
    """Runs epochs with steps of that many seconds until the autotuner has converged."""
    end = time.perf_counter() + TIMEOUT_S
    while not pipeline.runner.autotuner.converged:
        for _ in pipeline:
            time.sleep(step)
        assert time.perf_counter() < end, f"not settled after {TIMEOUT_S} s; at {pipeline.runner.tuned_settings}"
    return pipeline.runner.autotuner


def test_autotuned_fast_source_uses_no_workers(monkeypatch):
    threads, napped = threading.enumerate(), 0.0
    # a busy machine is not a slow source
    monkeypatch.setattr(autotuner_module, "perf_counter", lambda: time.thread_time() + napped)
    pipeline = arrays(torch.arange(400)).batch(10).prefetch("auto")
    for _ in pipeline:
        napped += 0.05
    autotuner = pipeline.runner.autotuner
    assert (
        autotuner.workers.num_workers == 0
        and autotuner.tuned_settings == {"processes": 0}
        and autotuner.wait_fraction < 0.1
    )
    assert nothing_left(threads)


@pytest.mark.timing
@pytest.mark.slow
def test_autotuned_slow_source_uses_workers_up_to_the_cores():
    threads = threading.enumerate()
    pipeline = arrays(torch.arange(1200)).batch(10).map(napping).prefetch("auto", cores=2)
    autotuner = until_settled(pipeline, step=0.04)
    assert 1 <= autotuner.workers.processes <= 2 and not autotuner.workers.threads
    assert autotuner.wait_fraction < autotuner.initial_wait_fraction / 2, "steps wait much less than they did"
    assert pipeline.runner.tuned_settings == {
        "processes": autotuner.workers.processes,
        "prefetch": autotuner.workers.prefetch,
    }
    for _ in itertools.islice(pipeline, 3):
        assert len(live_children()) == autotuner.workers.processes, "it uses what it chose"
    assert nothing_left(threads)


def test_autotuned_without_memory_uses_no_workers():
    pipeline = arrays(torch.zeros(400, 1000)).batch(10).map(napping).prefetch("auto", cores=4, gigabytes=1e-6)
    assert until_settled(pipeline, step=0.01).workers.num_workers == 0


@pytest.mark.slow
def test_autotuned_initial_workers_are_those_given():
    pipeline = arrays(torch.arange(400)).batch(10).map(napping).prefetch("auto", processes=3)
    assert pipeline.runner.tuned_settings == {"processes": 3, "prefetch": 2} and pipeline.num_workers == 3
    assert until_settled(pipeline, step=0.05).workers.processes == 3, "no step waited"


def test_autotuned_without_user_functions_tries_threads():
    def kinds(pipeline):
        seen = set()

        class Noting(LoaderAutotuner):
            def iterate(self, enter, choices):
                seen.update(choices.kinds)
                return enter(WorkerConfig(), 0)

        list(dataclasses.replace(pipeline, runner=AutotunedRunner(Noting(cores=2, memory_budget=lambda: math.inf))))
        return seen

    numbers = arrays(torch.arange(32.0))
    assert kinds(plain()) == kinds(numbers.cache().batch(8)) == {"threads", "processes"}
    assert kinds(numbers.batch(8).map(napping)) == kinds(numbers.map(slowly).batch(8)) == {"processes"}
    assert kinds(numbers.map(slowly).cache().batch(8)) == {"processes"}, (
        "its cache is filled by a function of the user's"
    )


def test_autotuned_other_batch_size_searches_again():
    base = arrays(torch.arange(400)).prefetch("auto")
    one, other = base.batch(10), base.batch(20)
    assert one.runner.autotuner is not other.runner.autotuner
    assert one.to("cpu").runner is one.runner and one.shard(1, 0).runner is one.runner


def test_autotuned_engine_gets_workers_and_may_replace_them():
    pipeline = random_pipeline().prefetch(4, processes=2)
    batches = pipeline.batches(BATCH, 0, True)
    expected = list(batches.epoch(0, 0))
    assert batches.workers == WorkerConfig(processes=2, prefetch=4)
    for workers in (WorkerConfig(), WorkerConfig(processes=1, prefetch=1)):
        other = batches.with_workers(workers)
        assert other.workers == workers and equal(list(other.epoch(0, 0)), expected) and other.length == batches.length
    assert equal(
        list(batches.with_workers(LoaderAutotuner(cores=2, memory_budget=lambda: math.inf)).epoch(0, 2)), expected[2:]
    )
    assert batches.map_iterator(iter).with_workers is None


# ---- caching the samples


def slowly(sample):
    time.sleep(0.002)
    return sample * 2.0


def drawing(sample):
    return sample + (random.random() < 1e-9)


class OwnGenerator:
    """Draws from a generator that hasten cannot know."""

    def __init__(self):
        self.generator = random.Random(1)

    def __call__(self, sample):
        return sample + self.generator.random()


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.mark.parametrize(("where", "gigabytes"), [("memory", None), slow("disk", 600e-9)])
def test_autotuned_slow_samples_are_cached(where, gigabytes, caches):
    """In memory, or on disk if their 640 bytes exceed the memory budget."""
    numbers = torch.arange(160.0)
    auto = arrays(numbers).shuffle(seed=1).map(slowly).batch(8).prefetch("auto", cores=1, gigabytes=gigabytes)
    uncached = arrays(numbers).shuffle(seed=1).batch(8)
    autotuner, end, passes = auto.runner.autotuner, time.perf_counter() + TIMEOUT_S, 0
    while not (autotuner.converged and autotuner.cache == where):
        for batch, expected in zip(auto, uncached, strict=True):
            assert torch.equal(batch, 2 * expected)
            time.sleep(0.004)
        passes += 1
        assert time.perf_counter() < end and autotuner.cache != "no", (
            f"after {passes} passes: {auto.runner.tuned_settings}, {autotuner.wait_fraction}"
        )
    assert passes > 1 and isinstance(auto.runner.active_cache["source"], Cache)
    assert autotuner.wait_fraction < autotuner.initial_wait_fraction and auto.runner.tuned_settings["cache"] == where
    assert len([*caches.glob("*/cache.json")]) == (where == "disk")


def waiting(pipeline):
    """A pipeline whose autotuner has converged while steps still wait, so that a cache is tried next."""
    pipeline.runner.autotuner.wait_fraction, pipeline.runner.autotuner.seconds_per_batch = 0.5, 1e-9
    return pipeline


def test_autotuned_disk_cache_is_reported_and_removed_if_not_faster(caches, short_measurements):
    pipeline = waiting(arrays(torch.arange(64.0)).map(slowly).batch(8).prefetch("auto", cores=1, gigabytes=1e-9))
    with pytest.warns(HastenWarning, match="a cache on disk: 2.56e-07 GB in .*until you delete them") as caught:
        first = list(pipeline)
    (manifest,) = caches.glob("*/cache.json")
    assert any(str(manifest.parent) in str(each.message) for each in caught)
    assert pipeline.runner.autotuner.converged and pipeline.runner.autotuner.cache == "no", "it was a nanosecond before"
    assert equal(list(pipeline), first) and not pipeline.runner.active_cache and manifest.is_file()


def assert_not_cached(reason):
    """Asserts that a HastenWarning gives the reason why samples are not cached on disk, and nothing else changes."""
    pipeline = waiting(arrays(torch.arange(64.0)).map(slowly).batch(8).prefetch("auto", cores=1, gigabytes=1e-9))
    with pytest.warns(HastenWarning, match=f"not cached .disk.*{reason}"):
        assert torch.equal(torch.cat(list(pipeline)), 2 * torch.arange(64.0))
    assert pipeline.runner.autotuner.cache == "no" and not pipeline.runner.active_cache


def test_autotuned_samples_beyond_the_disk_are_not_cached(caches, monkeypatch):
    monkeypatch.setattr(autotuned, "MAX_DISK_FRACTION", 128 / free_disk(caches))
    assert_not_cached("needs 2.56e-07 GB, and 1.* were allowed")
    assert not [*caches.iterdir()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_autotuned_full_disk_caches_nothing(caches, monkeypatch):
    new = _ColumnWriter._new
    monkeypatch.setattr(_ColumnWriter, "_new", lambda written, name: new(written, "/dev/full"))
    assert_not_cached("the disk is full")
    assert not [*caches.iterdir()]


def test_autotuned_read_only_directory_caches_nothing(caches):
    caches.touch()
    assert_not_cached("cannot write")


def test_autotuned_random_samples_are_never_cached():
    numbers = arrays(torch.arange(64.0))
    assert is_repeatable(numbers.source, numbers.map(slowly).sample_maps)
    for random_one in (drawing, noise, OwnGenerator()):
        pipeline = numbers.map(random_one).batch(8).prefetch("auto")
        assert not is_repeatable(pipeline.source, pipeline.sample_maps), random_one
        pipeline.runner.autotuner.cache = "memory"
        with pytest.warns(HastenWarning, match="not cached .memory."):
            list(pipeline)
        assert pipeline.runner.autotuner.cache == "no" and not pipeline.runner.active_cache


class Versioned(Source):
    """Rows whose values depend on their version."""

    def __init__(self):
        self.version = 1

    def __len__(self):
        return 32

    def read(self, rows):
        return torch.full((len(rows),), self.version)

    def fingerprint(self):
        return {"version": self.version}


def test_autotuned_cached_samples_are_rebuilt_after_a_change():
    pipeline = Pipeline(Versioned()).map(lambda sample: sample * 10).batch(8).prefetch("auto", cores=1)
    pipeline.runner.autotuner.cache = "memory"
    assert torch.cat(list(pipeline)).unique().tolist() == [10] and isinstance(
        pipeline.runner.active_cache["source"], Cache
    )
    pipeline.source.version = 2
    assert torch.cat(list(pipeline)).unique().tolist() == [20]


def test_autotuned_cache_without_gain_is_not_used():
    numbers = arrays(torch.arange(64.0))

    def worth(pipeline):
        return is_cacheable(pipeline.source, pipeline.sample_maps, pipeline.faults)

    assert worth(numbers.map(slowly))
    assert not worth(numbers) and not worth(numbers.map(slowly).cache()), "they are in memory"
    assert not worth(numbers.map(slowly).skip_bad_rows(3)), "not all are read before they are met"
    assert not worth(numbers.map(lambda sample, rng: sample + rng.uniform()))


def test_autotuned_cache_beyond_the_budget_is_reported_and_dropped():
    pipeline = arrays(torch.zeros(64, 1000)).map(slowly).batch(8).prefetch("auto", gigabytes=1e-6)
    pipeline.runner.autotuner.cache = "memory"
    with pytest.warns(HastenWarning, match="not cached .memory.*allowed"):
        assert len(list(pipeline)) == 8
    assert pipeline.runner.autotuner.cache == "no"
    with warnings.catch_warnings():
        # warned about once; the tuned settings may be reported now
        warnings.filterwarnings("error", message=".*not cached")
        assert len(list(pipeline)) == 8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batches": "fast"}, "batches"),
        ({"batches": "auto", "threads": 1, "processes": 1}, "not both"),
        ({"batches": "auto", "cores": 0}, "cores"),
        ({"batches": "auto", "gigabytes": 0}, "gigabytes"),
        ({"batches": "auto", "gigabytes": math.inf}, "gigabytes"),
        ({"batches": 2, "cores": 2}, 'require prefetch."auto"'),
    ],
    ids=str,
)
def test_autotuned_invalid_request_is_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        arrays(torch.arange(8)).prefetch(**wrong)

"""Several ranks train like one process: the same samples in the same order, weights equal except for rounding."""

import pytest
import torch
import torch.distributed as dist

from hasten.core.errors import ConfigurationError, PeerFailure, RunError
from hasten.distributed.process_group import init_process_group
from hasten.engine import checkpoint
from hasten.engine.plan import build
from hasten.engine.train import train
from helpers import drawing_tasks, rank_tasks
from helpers.assertions import CLOSE, farthest, losses
from helpers.markers import first_quick, slow
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training, training_as_rank, training_of


@pytest.mark.parametrize("world", [2, slow(3)])
@pytest.mark.parametrize(
    "name",
    [
        "samples",
        "loader",
        "own_sampler",
        "stream",
        "pipeline",
        "drawn_with_replacement",
        "uneven_batches",
        "ready_batches",
        "rates_by_name",
    ],
)
def test_two_ranks_train_like_one_process(tmp_path, name, world):
    make = getattr(rank_tasks, name)
    single = train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, make, None, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=CLOSE)
    for what in ("steps", "samples", "metric", "evaluations"):
        lines = [
            [{k: v for k, v in look.items() if k != "seconds"} for look in each[what]]
            if what == "evaluations"
            else each[what]
            for each in (single, *answers)
        ]
        assert all(each == lines[0] for each in lines), what


@pytest.mark.parametrize(
    "recipe",
    [
        "gradient_accumulation:accumulation_steps=3",
        "in_memory_batches",
        "ema",
        "gradient_clipping:max_norm=0.1",
        "ddp:static_graph=true",
    ],
)
def test_methods_combine_with_ddp(tmp_path, recipe):
    train(rank_tasks.samples(), recipe, device="cpu", out=tmp_path / "single") if "ddp" not in recipe else train(
        rank_tasks.samples(), device="cpu", out=tmp_path / "single"
    )
    answers = run_ranks(2, training_of, rank_tasks.samples, recipe, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("name", first_quick(["dropping_loader", "dropping"]))
def test_interrupted_run_resumes_bit_for_bit(tmp_path, name):
    make = getattr(rank_tasks, name)
    run_ranks(2, training_of, make, None, tmp_path / "whole")
    broken = run_ranks(2, interrupted_run, make, tmp_path / "broken")
    assert all(isinstance(answer, Exception) for answer in broken)
    answers = run_ranks(2, resumed_run, make, tmp_path / "broken")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "broken", tmp_path / "whole") == 0
    assert (tmp_path / "broken/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()


def resumed_with_records(rank: int, make, out) -> list[str]:
    """What this rank serialized while it resumed: the keys of every state."""
    plain, keys = checkpoint.serialize, list[str]()
    checkpoint.serialize = lambda state: (keys.append(",".join(sorted(state or ()))), plain(state))[1]
    try:
        resumed_run(rank, make, out)
    finally:
        checkpoint.serialize = plain
    return keys


def test_ranks_that_see_the_run_directory_load_the_checkpoint_themselves(tmp_path):
    """Sent by rank 0, a large model would be in the host's memory several times for each rank."""
    run_ranks(2, interrupted_run, rank_tasks.samples, tmp_path / "run")
    answers = run_ranks(2, resumed_with_records, rank_tasks.samples, tmp_path / "run")
    assert all(isinstance(answer, list) for answer in answers), answers
    assert not [keys for keys in answers[0] if "model" in keys], "rank 0 sent the state"


@pytest.mark.parametrize(
    ("name", "world"),
    first_quick([("samples", 1), ("loader", 3), ("samples", 3), ("loader", 1), ("own_sampler", 3)], 2),
)
def test_run_resumes_with_another_number_of_ranks(tmp_path, name, world):
    make = getattr(rank_tasks, name)
    train(make(), device="cpu", out=tmp_path / "single")
    run_ranks(2, interrupted_run, make, tmp_path / "shared")
    answers = (
        run_ranks(world, resumed_run, make, tmp_path / "shared")
        if world > 1
        else [resumed_run(0, make, tmp_path / "shared")]
    )
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("name", ["few_in_the_last_batch", "few_in_the_last_batch_of_a_stream"])
def test_batch_of_fewer_samples_than_ranks_is_read_by_all(tmp_path, name):
    make = getattr(rank_tasks, name)
    single = train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(4, training_of, make, None, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 4, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert {answer["samples"] for answer in answers} == {single["samples"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream_that_divides_itself", "the ranks read different data as batch 1 of epoch 1: "),
        ("shorter_on_the_second", "the ranks read epoch 1 in different orders: "),
        ("shorter_stream_on_the_second", "the ranks read different data as batch 20 of epoch 1: "),
        ("stream_that_ends_early_on_the_second", "rank 1 has no batch 21 of epoch 1, but others have: "),
    ],
)
def test_ranks_with_different_data_are_detected(name, message):
    """No rank waits for a missing batch, and every sample is read exactly once."""
    answers = run_ranks(2, training_as_rank, getattr(rank_tasks, name))
    assert all(isinstance(answer, RunError) and str(answer).startswith(message) for answer in answers), answers


def test_ranks_draw_different_noise():
    """Draws of a dataset belong to the position in the global batch: rank 0 draws what a single process would."""
    one, other = run_ranks(2, first_batch)
    (single,) = [first_batch(0)]
    assert one == single[: len(one)] and one[0] != other[0]


def test_ranks_draw_different_dropout_masks():
    one, other = run_ranks(2, drawn_after_training, rank_tasks.dropping)
    assert one != other


def test_unequal_shards_draw_different_masks_and_read_the_same():
    """A batch that all ranks read whole has equal draws, even if dropout advances their generators differently."""
    answers = run_ranks(3, training_of, drawing_tasks.with_a_sampler, None, None)
    assert [type(answer) for answer in answers] == [dict] * 3, answers


def test_rank_with_another_seed_is_detected():
    answers = run_ranks(2, with_seed_of_rank)
    assert [str(answer) for answer in answers] == [
        "rank 1 has another seed than rank 0: 1 instead of 0; start all ranks alike"
    ] * 2
    assert all(isinstance(answer, ConfigurationError) for answer in answers)


def test_more_processes_than_samples_per_batch_are_refused():
    answers = run_ranks(2, training, rank_tasks.task(batch_size=1))
    assert [str(answer) for answer in answers] == [
        "2 processes cannot share a batch of 1 samples; take fewer, or larger batches"
    ] * 2


def test_nan_loss_is_reported_by_its_rank():
    answers = [str(answer) for answer in run_ranks(2, training, rank_tasks.not_a_number())]
    assert sum("the batch itself holds NaN" in each for each in answers) == 1
    assert sum("the loss of another rank is nan at" in each for each in answers) == 1


def test_nan_in_a_stream_names_the_batch():
    answers = [str(answer) for answer in run_ranks(2, training, rank_tasks.task(rank_tasks.PoisonedStream()))]
    assert sum("the batch itself holds NaN" in each for each in answers) == 1, answers


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rank_tasks.Unplugged, "sample 226: ConnectionResetError"),
        (rank_tasks.UnpluggedByALibrary, "sample 226: RuntimeError: the store of the pictures"),
    ],
)
def test_connection_error_of_a_dataset_is_not_a_peer_failure(data, message):
    answers = run_ranks(2, training, rank_tasks.task(data()))
    assert sorted(type(answer).__name__ for answer in answers) == ["PeerFailure", "RunError"]
    assert sum(message in str(answer) for answer in answers) == 1, answers


def test_ranks_with_different_fields_are_detected():
    answers = run_ranks(2, with_epochs_of_rank)
    assert [str(answer) for answer in answers] == [
        "rank 1 has another epochs than rank 0: 3 instead of 2; start all ranks alike"
    ] * 2


def test_directory_given_on_rank_0_only_is_accepted(tmp_path):
    answers = run_ranks(2, training_into_a_directory_of_rank_0, tmp_path / "run")
    assert [type(answer) for answer in answers] == [dict] * 2 and (tmp_path / "run/model.safetensors").exists()


def test_static_graph_with_microbatches_is_refused():
    answers = run_ranks(2, training, rank_tasks.samples(), "ddp:static_graph=true + gradient_accumulation")
    assert all(isinstance(answer, ConfigurationError) and "static_graph" in str(answer) for answer in answers), answers


def test_existing_process_group_is_kept():
    assert run_ranks(2, groups_of_a_user) == [1, 1]


def test_refusal_on_rank_0_ends_all_ranks_at_once(tmp_path):
    (tmp_path / "file").touch()
    first, second = run_ranks(2, training_of, rank_tasks.samples, None, tmp_path / "file")
    assert isinstance(first, ConfigurationError) and isinstance(second, PeerFailure) and str(first) == str(second)


def test_max_bad_rows_with_several_processes_is_refused():
    answers = run_ranks(2, skipping)
    assert all(
        isinstance(answer, ConfigurationError) and "--max-bad-rows is for a single process" in str(answer)
        for answer in answers
    )


def test_incomplete_job_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is above 1, but RANK is not set"):
        train(rank_tasks.samples(), device="cpu")


def with_epochs_of_rank(rank: int) -> dict:
    return training(rank, rank_tasks.task(epochs=2 + rank))


def training_into_a_directory_of_rank_0(rank: int, out) -> dict:
    return training(rank, rank_tasks.samples(), out=out if rank == 0 else None)


def first_batch(rank: int) -> list:
    with init_process_group("cpu") as ranks:
        program = build(rank_tasks.task(rank_tasks.Noisy()), ranks=ranks)
        return next(program.train.epoch(0, 0))[0].tolist()


def groups_of_a_user(rank: int) -> int:
    dist.init_process_group("gloo")
    for _ in range(2):
        training(rank, rank_tasks.samples())
    left = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    return left


def drawn_after_training(rank: int, make) -> list[float]:
    training(rank, make())
    return torch.rand(4).tolist()


def with_seed_of_rank(rank: int) -> dict:
    return training(rank, rank_tasks.samples(), seed=rank)


def skipping(rank: int) -> dict:
    return training(rank, rank_tasks.samples(), max_bad_rows=3)

"""Values that the report and the terminal show."""

from itertools import pairwise

import pytest

from hasten.reporting import operations, view_model
from hasten.reporting.validation import validate
from hasten.reporting.view_model import frontier_rows
from helpers import sample_results as samples


def points(*metrics):
    return [{"seconds": float(second), "metric": metric} for second, metric in enumerate(metrics, 1)]


def share(name, median, low=None, high=None):
    return {"method": name, "speedup": {"median": median, "low": low, "high": high}}


def test_target_must_be_reached_by_most_seeds():
    curves = {"baseline": [{"points": points(0.5, 0.9)}, {"points": points(0.5, 0.6)}, {"points": points(0.5, 0.6)}]}
    (arm,) = view_model.arms(curves, 0.85, True, {})
    assert arm["time"] is None and arm["target_points"] == [(2.0, 0.9)]


@pytest.mark.parametrize("medians", [(2.0, 1.5), (6.0, 3.0), (1.1, 1.05), (1.0, 0.9), ()])
def test_contributions_lead_from_one_time_to_the_other(medians):
    stairs = view_model.staircase(12.0, 3.0, [share(f"m{index}", median) for index, median in enumerate(medians)])
    assert stairs[0]["from"] == 12.0 and stairs[-1]["to"] == pytest.approx(3.0)
    assert all(above["to"] == below["from"] for above, below in pairwise(stairs))
    assert all(stair["to"] < stair["from"] for stair in stairs)


def test_contributions_that_fall_short_have_a_common_remainder():
    assert [stair["name"] for stair in view_model.staircase(12.0, 3.0, [share("a", 1.5), share("b", 2.0)])] == [
        "b",
        "a",
        "combination",
    ]
    assert [stair["name"] for stair in view_model.staircase(12.0, 3.0, [share("a", 5.0), share("b", 6.0)])] == [
        "b",
        "a",
    ]


def test_contribution_of_a_single_method_is_the_whole_gain():
    result = validate(samples.faster() | {"recipe": {"ema": {}}, "contributions": []})
    assert view_model.contributions(result) == [{"method": "ema", "speedup": result["speedup"]}]


def test_samples_saved_are_listed_as_source_of_the_gain():
    speed = view_model.sources_of_speed(validate(samples.faster()))
    assert speed["step"] == pytest.approx(sum(samples.BASELINE.values()) / sum(samples.TUNED.values()))
    assert speed["samples"] == pytest.approx(24000 / 17000)


def test_break_even_counts_the_trainings_to_come():
    result = validate(samples.faster())
    assert view_model.break_even(result) == "It pays after 23 trainings, but only 10 are expected."
    assert view_model.break_even(result | {"expected_runs": 40}) == "It pays after 23 trainings."
    assert view_model.break_even(result | {"break_even_runs": 0.2}) == "It pays after 1 training."
    assert view_model.break_even(result | {"break_even_runs": 2.1}) == "It pays after 3 trainings."
    assert "is not known" in view_model.break_even(result | {"break_even_runs": None})
    assert "does not pay" in view_model.break_even(validate(samples.no_improvement()))
    assert view_model.break_even(validate(samples.only_estimates())) == "", (
        "a search that runs may still find something"
    )


@pytest.mark.parametrize(
    ("evidence", "passed", "expected"),
    [
        ("", True, True),
        ("", None, False),
        ("proven", None, False),
        ("proven", True, True),
        ("exact", None, True),
        ("precision checked", False, True),
        ("estimated", False, True),
        ("a new level", None, False),
    ],
)
def test_recipe_is_recommended_with_the_evidence_of_its_level(evidence, passed, expected):
    result = validate(samples.faster() | {"evidence": evidence})
    result["quality"]["passed"] = passed
    assert view_model.is_recommended(result) is expected
    assert not view_model.is_recommended(result | {"verdict": "no improvement"})


def test_headline_states_the_times_of_a_training():
    result = validate(samples.exact_only())
    assert view_model.tune_headline(result) == "5 h 20 min instead of 12 h 4 min"
    assert view_model.tune_headline(result | {"is_partial": True}).endswith("12 h 4 min, so far")
    assert view_model.tune_headline(result | {"evidence": "estimated"}).endswith("12 h 4 min, estimated")
    assert view_model.tune_headline(validate({"kind": "tune", "is_partial": True})) == "No answer yet"


def test_frontier_goes_from_the_slowest_to_the_fastest():
    result = validate(samples.proven())
    rows = frontier_rows(result | {"frontier": result["frontier"][::-1]})
    assert [row["number"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["role"] for row in rows] == ["baseline", "strong baseline", "", "", "recommended", ""]
    assert [row["height"] for row in rows] == [0.0, 0.0, 0.0, -0.0004, 0.0021, -0.0018]
    assert rows[0]["text"] == "the task as it is" and rows[2]["text"] == "channels_last + in_memory_batches"


def test_quality_that_nobody_measured_has_no_height():
    rows = frontier_rows(validate(samples.exact_only()))
    assert [row["change"] for row in rows] == ["\u2013", "unchanged", "unchanged", "\u2013"]
    assert not any(row["change_interval"] for row in rows)
    assert rows[-1]["height"] is None, "an estimated recipe may change the quality"


def test_measured_trials_come_before_excluded_ones():
    unsuccessful = view_model.unsuccessful(validate(samples.faster())["trials"])
    names = [
        "cache_dataset",
        "znorm",
        "loader_workers:num_workers=2",
        "bfloat16",
        "batch_size:factor=4",
        "channels_last",
    ]
    assert [trial["what"] for trial in unsuccessful] == names, (
        "the fastest first, then those that were refused, then those that did not run"
    )
    assert not any(view_model.is_success(trial) for trial in unsuccessful)
    ruled_out = [samples.trial("tf32", "diagnosis", "not tried", None)]
    assert (
        view_model.stages(validate(samples.faster() | {"trials": ruled_out + samples.faster()["trials"]})["trials"])[
            -1
        ][0]
        == "diagnosis"
    )


def test_operations_are_grouped_by_precision_and_the_short_ones_summed_up():
    rows = samples.operations()["rows"]
    groups = {group["name"]: group for group in operations.operation_groups(rows)}
    assert [*groups] == ["bfloat16", "float32", "conversions", "no floating-point input"]
    assert sum(group["time_share"] for group in groups.values()) == pytest.approx(1)
    assert [row["op"] for row in groups["bfloat16"]["rows"]] == ["addmm", "mm", "gelu"]
    assert [row["op"] for row in groups["conversions"]["rows"]] == ["float32 to bfloat16", "bfloat16 to float32"]
    assert groups["bfloat16"]["flops_share"] == 1 and groups["conversions"]["calls_per_step"] == 74
    listed = [row["op"] for group in groups.values() for row in group["rows"]]
    others = [name for name in listed if "other" in name]
    assert (
        len(listed) - len(others) == operations.MAX_OPERATIONS
        and not groups["no floating-point input"]["rows"]
        and others == ["3 others"]
    )


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([], ""),
        ([(65536.0, False)] * 3, "65536 after step 1; 0 steps of 3 overflowed"),
        (
            [(32768.0, True), (32768.0, False), (16384.0, True)],
            "32768 after step 1, 16384 after step 3; 2 steps of 3 overflowed",
        ),
        (
            [(2.0**-step, True) for step in range(9)],
            "1 after step 1, 0.5 after step 2, 0.25 after step 3, 0.125 after step 4, 0.0625 after step 5, \u2026, "
            "0.00390625 after step 9; 9 steps of 9 overflowed",
        ),
    ],
)
def test_the_loss_scale_in_a_sentence(steps, sentence):
    history = [{"value": value, "overflow": overflow} for value, overflow in steps]
    assert operations.loss_scale_sentence(history) == sentence


def test_frontier_shows_the_surer_of_both_gains():
    longer = {"recipe": {"ema": {}}, "text": "ema", "role": "", "evidence": "proven", "why": "", "to_prove": ""}
    noisy, whole = {"median": 2.2, "low": 0.9, "high": 4.5}, {"median": 3.9, "low": 3.4, "high": 4.4}
    result = validate({"kind": "tune", "frontier": [longer | {"speedup": noisy, "training_speedup": whole}]})
    assert frontier_rows(result)[0]["speedup"] == whole
    result = validate({"kind": "tune", "frontier": [longer | {"speedup": whole, "training_speedup": noisy}]})
    assert frontier_rows(result)[0]["speedup"] == whole


def test_headline_of_a_search_that_compared_nothing_says_so():
    result = samples.no_improvement()
    assert view_model.tune_headline(validate(result)) == "No improvement"
    trials = [{**trial, "ratio": None} for trial in result["trials"]]
    trials = [trial for trial in trials if trial["stage"] not in ("training", "confirmation")]
    assert view_model.tune_headline(validate({**result, "trials": trials})) == "Nothing was compared"
    refused = {**trials[0], "stage": "training", "verdict": "refused"}  # after a whole training
    assert view_model.tune_headline(validate({**result, "trials": [*trials, refused]})) == "No improvement"


def test_recipe_that_reaches_the_target_sooner_in_a_training_of_the_same_length_is_not_called_slower():
    seconds = {"baseline": 100.0, "tuned": 103.0, "low": 98.0, "high": 108.0}
    result = validate(samples.faster() | {"training_seconds": seconds})
    headline, sentence = view_model.tune_headline(result), view_model.tune_sentence(result)
    assert "instead of" not in headline and headline.endswith("faster to the target")
    assert "0.97\u00d7" not in sentence and "about as long as without the recipe" in sentence

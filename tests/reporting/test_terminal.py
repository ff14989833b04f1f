"""Terminal output: complete, at most 80 columns wide, without control characters unless it is a terminal."""

# ruff: noqa: RUF001 (true multiplication signs and dashes are what is tested)

import io
import shlex

import pytest
from rich.console import Console, Group

from hasten.cli.output import CommandResult, show
from hasten.core.errors import ConfigurationError
from hasten.reporting import terminal, terminal_deploy, terminal_methods, view_model
from hasten.reporting.validation import validate
from helpers import sample_results as samples

ANSWERS = {
    "faster": (terminal.tune_answer, samples.faster),
    "no improvement": (terminal.tune_answer, samples.no_improvement),
    "exact": (terminal.tune_answer, samples.exact_only),
    "proven": (terminal.tune_answer, samples.proven),
    "only estimates": (terminal.tune_answer, samples.only_estimates),
    "searched": (terminal.tune_answer, samples.searched),
    "compare": (terminal.compare_answer, samples.compared),
    "diagnose": (terminal.diagnose_answer, samples.diagnosed),
    "train": (terminal.train_answer, samples.trained),
    "quantize": (terminal_deploy.quantize_answer, samples.quantized),
    "nothing quantized": (terminal_deploy.quantize_answer, samples.nothing_quantized),
}


def printed(renderable, width=80, **console) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(renderable)
    return out.getvalue()


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("width", [80, 60])
def test_answer_fits_the_width_and_has_no_control_characters(kind, width):
    answer, sample = ANSWERS[kind]
    text = printed(answer(sample()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (
            "faster",
            [
                "5.1× faster",
                "1.6 s instead of 8.2 s",
                "5.1× (4.6 to 5.7×) +0.0021 (−0.0011 to +0.0053) proven recommended: budgeted_schedule:factor=0.35",
                "0.9752",
                "1.16× – strong baseline: fused_optimizer",
                "pays after 23 trainings, but only 10 are expected",
                "device cpu peak memory 1.31 GB, 420 MB without the recipe",
                "in_memory_batches 2.6×",
                "znorm",
                "Run directory: runs/tune-digits; report: hasten report runs/tune-digits hasten train digits",
            ],
        ),
        (
            "no improvement",
            [
                "No improvement",
                "consists of arithmetic",
                "2 min 31 s",
                "Run directory: runs/tune-digits; report: hasten report runs/tune-digits",
            ],
        ),
        (
            "compare",
            [
                "b is 2.7× faster",
                "2.6 to 2.8×",
                "24 blocks, each arm alone, in turns, in 4 rounds",
                "memory of a 41 GB (44 GB reserved) memory of b 45 GB (49.5 GB reserved), the most of 2 ranks",
                "from step 2,900 1.50× (1.35 to 1.65×)",
                "730 ms",
                "270 ms",
            ],
        ),
        (
            "exact",
            [
                "5 h 20 min instead of 12 h 4 min long.py:task with channels_last + in_memory_batches + malloc_tuning",
                "takes 4 h 50 min to 5 h 40 min, predicted from measured steps: 2.3× faster (2.1 to 2.5×)",
                "Evidence: exact (the same bits, or the same formula",
                "1.00× – baseline: the task as it is",
                "2.3× (2.1 to 2.4×) unchanged exact recommended: channels_last",
                "3.1× (2.9 to 3.3×) – estimated bfloat16 + channels_last",
                "to prove it: no metric is known",
                "price 13.33 instead of 30.17 for a training, at 2.50 an hour",
                "search took 2 min 1 s; blocks differ by 3.1 %. It pays after 1 training.",
            ],
        ),
        (
            "proven",
            [
                "29 s instead of 1 min 22 s",
                "takes 27 s to 30 s, measured",
                "2.3× (2.2 to 2.4×) −0.0004 (−0.0031 to +0.0023) precision checked",
                "recommended: budgeted_schedule:factor=0.5,peak=5.0 + channels_last + in_memory_batches",
                "to prove it: 5 more seeds, about 12 min: --budget +12m",
                "margin 0.005, one standard deviation between seeds",
                "It pays after 3 trainings.",
            ],
        ),
        (
            "only estimates",
            [
                "No improvement, so far",
                "4.4× (4.1 to 4.7×) −0.0018 (−0.0102 to +0.0066) estimated",
                "to prove it: 3 more seeds, about 4 min: --budget +4m",
                "a training takes 1 min 22 s",
                "It has not ended; this is the best answer so far.",
            ],
        ),
        (
            "diagnose",
            [
                "waits for its data",
                "71 %",
                "3.4×",
                "23 ms",
                "in_memory_batches 3.4× samples can be read by index",
                "bfloat16 42 100 % 58 %",
                "float32 to bfloat16 40 8 %",
                "device cuda peak memory 41 GB (44 GB reserved); a batch of about 640 fits instead of 64",
                "loss scale 65536 after step 1, 32768 after step 2; 1 step of 2 overflowed",
            ],
        ),
        (
            "train",
            [
                "0.9778",
                "0.9791",
                "680 steps",
                "1.6 s",
                "device cpu peak memory 412 MB",
                "autotuned autotune_loader:prefetch=4,processes=2; stored in recipe.toml",
                "runs/digits",
            ],
        ),
        (
            "quantize",
            [
                "2.3× as fast in int8 (accuracy may lose 1.00 %) clothes",
                "float accuracy 0.9000, 203 kB",
                "1 layers in float: accuracy 0.8964, 60 kB (30%)",
                "14 MB in float, 11 MB in int8",
                "costly layers conv1: 30.00 %",
                "refused 31.00 % 52 kB",
                "not tried: dynamic per channel: the budget is spent",
                "Result: runs/clothes/int8",
            ],
        ),
        (
            "nothing quantized",
            ["No int8 model passes", "integer per channel, minmax loses 2.00 % of the accuracy", "--max-loss"],
        ),
    ],
)
def test_answer_contains_the_main_values(kind, needed):
    answer, sample = ANSWERS[kind]
    text = words_of(printed(answer(sample())))
    assert [phrase for phrase in needed if phrase not in text] == []


def test_unsuccessful_trials_that_ran_are_listed_first():
    result = samples.faster()
    for what in ("num_threads:count=2", "num_threads:count=1", "tf32"):
        why = f"{what.partition(':')[0]} has no effect: nothing there"
        result["trials"].insert(0, samples.trial(what, "systems", "no effect", None, why))
    result["trials"] += [
        samples.trial("x.py:X", "training", "no effect", None, "it has no effect: 0 of 4 weights differ")
    ]
    result["trials"] += [samples.trial("compile", "systems", "failed", None, "it raised")]
    text = words_of(printed(terminal.tune_answer(result)))
    listed = text[text.index("tried without success") :]
    ran = ["cache_dataset", "znorm", "loader_workers", "bfloat16", "batch_size", "compile"]
    no_effect = [f"not measured: {name} has no effect: nothing there" for name in ("tf32", "num_threads")]
    no_effect.append("not measured: x.py:X: it has no effect: 0 of 4 weights differ")
    positions = [listed.index(entry) for entry in (*ran, *no_effect, "and 1 more")]
    assert positions == sorted(positions) and listed.count("nothing there") == 2, "the reason, once for each method"
    assert "channels_last" not in listed, "methods that were not tried are only counted"


def test_method_that_the_user_offered_is_answered_for():
    why = "the budget ended before it was tried"
    offered = [
        {"method": "./signs.py:Signs", "accepted": False, "why": why},
        {"method": "znorm", "accepted": True, "why": ""},
    ]
    text = words_of(printed(terminal.tune_answer(samples.no_improvement() | {"offered": offered})))
    assert f"offered ./signs.py:Signs, not adopted: {why}" in text and "offered znorm" not in text


def test_diagnosis_that_was_not_made_is_no_method_that_was_tried():
    result = samples.faster()
    result["trials"].append(samples.trial("diagnosis", "diagnosis", "not made", None, "its steps are too long"))
    text = words_of(printed(terminal.tune_answer(result)))
    assert text.count("its steps are too long") == 1
    assert text.index("diagnosis not made: its steps are too long") < text.index("tried without success")


def test_bound_of_an_advice_is_explained():
    advice = [{"method": "tf32", "bound": 4.3, "why": "of the time, forward 76%"}]
    text = words_of(printed(Group(*terminal.advice_table(advice))))
    assert "tf32 4.3×" in text and "at most: if what it works on cost nothing" in text


def test_effects_of_both_arms_are_shown():
    effects = {"a": {"compile": "2 graphs"}, "b": {"compile": "9 graphs", "ema": "effect not checked"}}
    text = words_of(printed(terminal.compare_answer(samples.compared() | {"effects": effects})))
    assert "effect in a compile: 2 graphs effect in b compile: 9 graphs ema: effect not checked" in text


def test_training_shows_which_methods_acted_and_which_did_not():
    seen = {"no_effect": [["tf32", "there is no GPU"]], "effects": {"ema": "the step changed the averages"}}
    text = words_of(printed(terminal.train_answer(samples.trained() | seen)))
    assert "no effect tf32: there is no GPU effect ema: the step changed the averages" in text


def test_values_of_the_frontier_are_aligned():
    lines = printed(terminal.tune_answer(samples.proven())).splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().startswith("speed-up"))
    values = [line for line in lines[start : start + 20] if "×" in line]
    assert len(values) == 6 and len({line.index("×") for line in values}) == 1
    assert len({line.index("(") for line in values if "(" in line}) == 1
    assert len({line.index("(−") for line in values if "(−" in line}) == 1


def test_unproven_recipe_is_not_recommended():
    result = samples.proven() | {"quality": samples.proven()["quality"] | {"passed": False}}
    text = printed(terminal.tune_answer(result))
    assert "Faster, but worse quality" in text and "instead of" not in text and "hasten train" not in text
    assert "4.4×" in text, "the frontier is shown all the same"


def test_hostile_names_are_printed_unchanged():
    result = samples.faster()
    result["task"] = "[bold red]task[/]\x1b[2J"
    result["trials"][2]["what"] = "[link=x]\x1b]0;title\x07"
    text = printed(terminal.tune_answer(result), force_terminal=True)
    assert "[bold red]task[/]" in text and "\x1b[2J" not in text and "\x07" not in text


def test_unfinished_result_is_printed():
    for make in ({"kind": "tune", "verdict": "faster"}, {"kind": "compare"}, {"kind": "diagnose"}, {"kind": "train"}):
        assert printed(ANSWERS["faster" if make["kind"] == "tune" else make["kind"]][0](make)).strip()


METHODS = [
    {
        "name": "in_memory_batches",
        "summary": "stack the samples once",
        "exactness": "same bits",
        "gain": (1.0, 21.0),
        "not_here": None,
    },
    {
        "name": "tf32",
        "summary": "products in TF32 [fast]",
        "exactness": "lower precision",
        "gain": None,
        "not_here": "for an NVIDIA GPU",
    },
]


def test_catalogue_lists_every_method_under_its_class():
    text = words_of(printed(terminal_methods.methods_table(METHODS)))
    assert "Same bits" in text and "in_memory_batches up to 21× stack the samples once" in text
    assert "tf32 – products in TF32 [fast] (for an NVIDIA GPU)" in text


def test_method_page_shows_its_whole_card():
    card = {
        "source": "https://arxiv.org/abs/1",
        "gain_when": "samples lie in memory",
        "accelerates": frozenset({"input"}),
        "applies_to": {"indexed_samples"},
        "presets": ({}, {"gigabytes": 4.0}),
        "text": "First ``line``,\n    wrapped.\n\nSecond.",
        "hooks": ("data",),
        "replaces": {"data"},
        "options": [{"name": "gigabytes", "type": "float", "default": 2.0, "range": "above 0"}],
        "conflicts": [{"method": "cache_dataset", "why": "both replace data"}],
        "records": [{"task": "digits", "what": "in_memory_batches", "verdict": "kept", "ratio": {"median": 1.52}}],
        "wraps": [],
        "wrapped_by": ["ema"],
    }
    text = words_of(printed(terminal_methods.method_page(METHODS[0] | card)))
    for needed in (
        "First line, wrapped.",
        "waiting for the next batch",
        "gigabytes = 2.0 (float, above 0)",
        "in_memory_batches:gigabytes=4.0",
        "cache_dataset: both replace data",
        "digits: in_memory_batches kept, 1.52x",
        "wrapped by ema",
    ):
        assert needed in text


def test_speed_up_of_steps_alone_is_not_called_that_of_the_training():
    result = validate(samples.faster() | {"evidence": "exact", "time_to_target": {}, "training_seconds": {}})
    assert view_model.tune_headline(result).startswith("Steps 5.1× faster")
    assert "A whole training also starts and evaluates, so it gains less." in view_model.tune_sentence(result)
    result |= {"speedup": {"median": 3.0, "low": 2.8, "high": 3.2}, "start_seconds": {"baseline": 6.0, "tuned": 6.0}}
    sentence = "With its start of 6 s, a training of 1 min is 2.5× faster, one of 10 min 2.9×."
    assert sentence in view_model.tune_sentence(result)


LONG_COMMAND = shlex.join(
    ["python", "train.py", "--prompt", "two  spaces,\na\x1b[2Jnew line", *("--layer", "512") * 60]
)


def test_command_to_train_is_printed_as_it_must_be_typed(capsys):
    """One line for the shell however long it is, with the white space of its arguments; without control characters."""
    recipe_file = "runs/my  search/recipe.toml"
    result = samples.faster() | {"command": LONG_COMMAND, "recipe_file": recipe_file, "out": "runs/my  search"}
    show(CommandResult(result, terminal.tune_answer))
    text, shown = capsys.readouterr().out, LONG_COMMAND.replace("\x1b", " ")
    assert f"hasten train --recipe '{recipe_file}' -- {shown}\n" in text
    assert len(shown) > 700 and "hasten report 'runs/my  search'" in text.replace("\n", "")


def test_path_of_a_wrong_type_is_refused():
    with pytest.raises(ConfigurationError, match="recipe_file must be a command or a path, not a number"):
        validate(samples.faster() | {"recipe_file": 3})
    assert validate(samples.faster() | {"out": None})["out"] == ""

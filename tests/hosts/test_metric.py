"""The metric of a script, from what public training scripts print."""

import math

import pytest

from hasten.core.errors import ConfigurationError
from hasten.hosts.metric import (
    Ambiguous,
    Found,
    choose_metric,
    parse_request,
    question,
    select_metric,
    series_of_logged,
)
from hasten.hosts.metric_lines import series_of
from hasten.hosts.metric_names import meaning_of
from helpers.printed_outputs import (
    ASK,
    CORRECT,
    EPOCHS,
    HELD_OUT,
    LOSSES,
    RIGHT,
    cifar_tutorial,
    gcn,
    mnist,
    run_glue_mrpc,
    word_language_model,
)


def find_metric(lines):
    return choose_metric(series_of(lines))


def timed(output, evaluating=False):
    return [(float(i), line, evaluating) for i, line in enumerate(output)]


@pytest.mark.parametrize("script", RIGHT, ids=lambda script: script.__name__)
def test_metric_of_a_public_script_is_found(script):
    name, direction, last, resolution = RIGHT[script]
    found = find_metric(timed(script()))
    assert isinstance(found, Found), found
    assert (found.name, found.direction) == (name, direction)
    assert found.values[-1] == pytest.approx(last, abs=1e-9)
    assert len(found.values) == len(EPOCHS) == len(found.seconds)
    assert resolution is None or found.resolution == pytest.approx(resolution)


@pytest.mark.parametrize("script", ASK, ids=lambda script: script.__name__)
def test_output_without_a_clear_metric_asks(script):
    found = find_metric(timed(script()))
    assert isinstance(found, Ambiguous), found
    assert ASK[script] in found.reason


COUNTED = {  # lines of four epochs that differ in more than the number of the epoch
    "epoch{e}: val_loss 0.{r}": "val_loss",
    "[Epoch{e}/4] val_loss 0.{r}": "val_loss",
    "epoch_{e} val_loss=0.{r}": "val_loss",
    "Epoch {e} [{e}m{s}s] val loss 0.{r}": "val loss",
    "[{e:2d}/12] train loss 0.7 val loss 0.{r}": "val loss",
    "step {thousands:,}: val loss 0.{r}": "val loss",
}


@pytest.mark.parametrize("form", COUNTED)
def test_metric_of_each_epoch_is_read_however_the_line_counts(form):
    epochs = [e if "12" not in form else e + 7 for e in EPOCHS]  # from one digit to two
    lines = [form.format(e=e, r=60 - e, s=7 * e + 3, thousands=400 * e) for e in epochs]
    found = find_metric(timed(lines, evaluating=True))
    assert isinstance(found, Found) and found.name == COUNTED[form]
    assert found.values == [pytest.approx((60 - e) / 100) for e in epochs]


@pytest.mark.parametrize("metric", ["val_acc", "val_loss"])
def test_first_of_several_validation_loaders_is_judged_by(metric):
    records = [(float(e), f"{metric}/dataloader_idx_{i}", 0.5 + e / 100 + i, True) for e in EPOCHS for i in (1, 0)]
    found = choose_metric(series_of_logged(records))
    assert isinstance(found, Found) and found.name == f"{metric}/dataloader_idx_0"


def test_description_of_a_progress_bar_is_no_evaluation():
    """``bar.set_description(f"val acc {correct / total}")`` shows the mean of the batches so far."""
    lines = []
    for e in EPOCHS:
        lines += [f"val acc {p}:  50%|###  | {i}/4 [00:00<00:00, 9.1it/s]" for p, i in ((1.0, 1), (0.8, 2), (0.7, 4))]
        lines.append(f"Epoch {e} val acc: 0.7{e}")
    found = find_metric(timed(lines, evaluating=True))
    assert isinstance(found, Found) and found.values == [pytest.approx(0.7 + e / 100) for e in EPOCHS]


def test_metric_with_a_unit_is_read():
    found = find_metric(timed([f"Epoch {e} val PSNR: {30 + e / 10:.2f}dB in {e}.5s" for e in EPOCHS]))
    assert isinstance(found, Found) and (found.name, found.direction) == ("val PSNR", "max")


def both(training, held_out):
    return [line for e in EPOCHS for line in (training(e), held_out(e))]


TRAPS = {  # output that looks like a metric of held-out data, and is none
    "options of the script": ["Namespace(lr=0.01, val_loss_weight=0.5, eval_error=3)"],
    "an option": ["early_stop_val_loss: 0.5"],
    "what it does": ["Loading test data"],
    "a heading that does not end": ["Testing model"],
    "sizes": ["Training samples: 50000, validation samples: 10000"],
    "time": ["validation took 21.5 s"],
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_output_before_a_training_without_evaluation_is_not_its_metric(trap):
    training = [f"epoch {e} loss {LOSSES[e]:.3f}" for e in EPOCHS]
    for output in (training, training[:1]):
        found = find_metric(timed([*trap, *output]))
        assert isinstance(found, Ambiguous) and "held-out data" in found.reason
        assert "loss" in [one.name for one in found.candidates]


@pytest.mark.parametrize(
    "output",
    [
        [f"iter {100 * e}: loss {LOSSES[e]:.4f}, time 12.{e}ms" for e in EPOCHS],
        [f"Epoch {e} train loss {LOSSES[e]} train acc {CORRECT[e] / 1e4}" for e in EPOCHS],
        [f"val accuracy dropped from {0.9 - e / 50:.3f} to {0.88 - e / 50:.3f}" for e in EPOCHS],
        [f"epoch {e} test accuracy: {CORRECT[e]}" for e in EPOCHS],
        both(lambda e: f"  test batch time {e / 7:.2f}", lambda e: f" epoch {e} loss {LOSSES[e]}"),
        [f"Accuracy: {71.59 + e}% ({9332 + 131 * e}/13036)" for e in EPOCHS],
        [f"best val acc {0.8 + e / 50:.3f}, loss {LOSSES[e]}" for e in EPOCHS],
    ],
)
def test_numbers_of_training_data_and_of_unknown_data_are_never_chosen(output):
    assert not isinstance(find_metric(timed(output)), Found)


@pytest.mark.parametrize(
    "output", [[], ["hello", "Using cpu device"], ["epoch 1 took 3.2 s, lr 0.1", "epoch 2 took 3.3 s, lr 0.2"]]
)
def test_output_without_metrics_has_none(output):
    assert find_metric(timed(output)) is None


def test_mode_of_the_model_tells_lines_apart_that_training_and_evaluation_print_alike():
    lines = []
    for e in EPOCHS:
        lines += timed([f" Loss: {LOSSES[e]:.3f} | Acc: {70 + e}.5% (3525{e}/50000)"], evaluating=False)
        lines += timed([f" Loss: {HELD_OUT[e]:.3f} | Acc: {80 + e}.5% (805{e}/10000)"], evaluating=True)
    found = find_metric(lines)
    assert isinstance(found, Found) and found.name == "Acc"
    assert found.values == pytest.approx([0.8050, 0.8051, 0.8052, 0.8053])
    assert select_metric(series_of(lines), "Acc").values == found.values, "later runs are judged by the same numbers"


@pytest.mark.parametrize(
    "line",
    [
        "Epoch {e} - loss: 0.3{e} - acc: 0.9{e} - val_loss: 0.4{e} - val_acc: 0.8{e}",
        "Epoch {e}: train loss 0.3{e} acc 0.9{e} | val loss 0.4{e} val acc 0.8{e}",
        "| {e} | acc 0.9{e} | test acc: 0.8{e} |",
        "Epoch {e} | Loss 0.5{e} | Acc 0.8{e} | Test time 3.2s",
    ],
)
def test_accuracy_of_the_training_that_is_printed_after_the_evaluation_is_not_chosen(line):
    found = find_metric(timed([line.format(e=e) for e in EPOCHS], evaluating=True))
    assert isinstance(found, Found) and found.values == pytest.approx([0.8 + e / 100 for e in EPOCHS])


def test_accuracy_without_a_word_for_its_data_beside_that_of_the_training_is_not_chosen():
    lines = [f"Epoch {e}: train loss 0.5{e} acc 0.8{e} | val loss 0.4{e} acc 0.7{e}" for e in EPOCHS]
    found = find_metric(timed(lines, evaluating=True))
    assert not isinstance(found, Found) or found.values[0] != 0.8


def test_logged_accuracy_of_the_training_is_not_chosen_before_that_of_the_validation():
    records = [(float(e), name, e / 10 + part, True) for e in EPOCHS for name, part in (("acc", 0.5), ("val_acc", 0.4))]
    found = choose_metric(series_of_logged(records))
    assert isinstance(found, Found) and found.name == "val_acc"


def test_loss_of_the_training_that_is_printed_in_evaluation_mode_is_not_chosen():
    output = [f"epoch {e}: loss {LOSSES[e]:.3f}" for e in EPOCHS]
    assert isinstance(find_metric(timed(output, evaluating=True)), Ambiguous)


@pytest.mark.parametrize(
    ("output", "values", "resolution"),
    [
        (["val loss: 2.30", "val loss: nan", "val loss: inf"], [2.3, math.nan, math.inf], 0.01),
        (["validation-loss=1.25e-05", "validation-loss=9.5e-06"], [1.25e-5, 9.5e-6], 1e-7),
        (["val loss=888", "val loss=-8"], [888, -8], 1),
        (["{'val_loss': tensor(0.51, device='cuda:0')}", "{'val_loss': tensor(0.4)}"], [0.51, 0.4], 0.01),
        (
            [
                "{metricName: Validation-accuracy, metricValue: 0.5}",
                "{metricName: Validation-accuracy, metricValue: 1.0}",
            ],
            [0.5, 1],
            0.1,
        ),
        (["val acc 98%", "val acc 99%"], [0.98, 0.99], 0.01),
        (["Test accuracy after 10 epochs: 91.20%", "Test accuracy after 20 epochs: 92.20%"], [0.912, 0.922], 1e-4),
        (["Validation loss after 1000 steps: 2.31", "Validation loss after 2000 steps: 2.11"], [2.31, 2.11], 0.01),
        (["val ppl: 1,365.40", "val ppl: 987.65"], [1365.4, 987.65], 0.01),
        (["eval reward: 200 steps: 200", "eval reward: 180 steps: 180"], [200, 180], 1),
        (["  epoch    val loss    n", "-------  --------  ---", "  1  0.31  7", "  2  0.28  7"], [0.31, 0.28], 0.01),
        (["Acc on 9,984 test images: 0.5", "Acc on 10,000 test images: 0.6"], [0.5, 0.6], 0.1),
        (["val acc 87 samples 10000", "val acc 88 samples 10000"], [87, 88], 1),
        (["Validation", "  1000 samples", "  acc 0.5", "Validation", "  1000 samples", "  acc 0.6"], [0.5, 0.6], 0.1),
        (["val loss at 900 images/s 0.5, took 3 s", "val loss at 870 images/s 0.4, took 3 s"], [900, 870], 1),
        (["val Top-1: 71.5, Top-5: 90.2", "val Top-1: 72.5, Top-5: 90.4"], [71.5, 72.5], 0.1),
        (["\x1b[32mval_loss\x1b[0m: 0.5 (best 0.4)", "\x1b[32mval_loss\x1b[0m: 0.3 (best 0.3)"], [0.5, 0.3], 0.1),
    ],
)
def test_numbers_are_read_as_they_are_printed(output, values, resolution):
    found = find_metric(timed(output))
    assert isinstance(found, Found)
    assert found.values == pytest.approx(values, nan_ok=True) and found.resolution == pytest.approx(resolution)


def test_accuracy_whose_name_holds_the_number_of_images_is_found():
    found = find_metric(timed(cifar_tutorial()))
    assert isinstance(found, Found) and (found.name, found.direction) == ("test accuracy of the network", "max")
    assert found.values == [0.98] and found.resolution == pytest.approx(0.01)


def test_bar_of_an_evaluation_is_no_metric():
    bars = [f"Validation:  50%|\u2588\u2588\u2588     | 20/40 [00:0{e}<00:01, 18.5it/s]" for e in EPOCHS]
    assert find_metric(timed([*bars, "Epoch 3: 0.31 0.35"], evaluating=True)) is None


def test_threshold_of_the_coco_summary_is_no_metric():
    line = " Average {} @[ IoU={:<9} | area={:>6} | maxDets={:>3} ] = {:.3f}"
    output = []
    for e in EPOCHS:
        output += [line.format("Precision  (AP)", "0.50:0.95", "all", 100, 0.3 + e / 10)]
        output += [
            line.format("Precision  (AP)", "0.50", "all", 100, 0.5),
            line.format("Recall     (AR)", "0.50:0.95", "all", 1, 0.2),
        ]
    found = find_metric(timed(output, evaluating=True))
    assert isinstance(found, Found) and found.direction == "max"
    assert found.values == pytest.approx([0.3 + e / 10 for e in EPOCHS])


def test_names_in_another_script_are_asked_for_and_can_be_given():
    output = [f"epoch {e} \u9a8c\u8bc1\u96c6\u51c6\u786e\u7387\uff1a0.8{e}" for e in EPOCHS]
    found = select_metric(series_of(timed(output, evaluating=True)), "\u9a8c\u8bc1\u96c6\u51c6\u786e\u7387:max")
    assert found.direction == "max" and found.values == pytest.approx([0.8 + e / 100 for e in EPOCHS])


def test_training_of_one_epoch_has_the_metric_that_it_prints_once():
    found = find_metric(timed(list(mnist())[:13]))
    assert isinstance(found, Found) and found.name == "test accuracy" and found.values == [0.8123]


@pytest.mark.parametrize(
    ("request_", "name", "direction"),
    [
        ("valid ppl", "valid ppl", "min"),
        ("valid_loss", "valid loss", "min"),
        ("valid loss:max", "valid loss", "max"),
        ("ms/batch:min", "ms/batch", "min"),
    ],
)
def test_named_metric_is_selected(request_, name, direction):
    found = select_metric(series_of(timed(word_language_model())), request_)
    assert (found.name, found.direction) == (name, direction)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("valid los", "did you mean valid loss"),
        ("accuracy", "printed no metric 'accuracy'"),
        ("ms/batch", 'pass --metric "ms/batch:min|max" ('),
        (":max", "needs the name of a value"),
    ],
)
def test_wrong_request_is_refused_in_one_line(request_, message):
    with pytest.raises(ConfigurationError) as refused:
        select_metric(series_of(timed(word_language_model())), request_)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_question_names_each_candidate_as_it_is_typed_with_three_values():
    found = find_metric(timed(run_glue_mrpc()))
    assert isinstance(found, Ambiguous)
    message = str(question(found))
    assert message.startswith("cannot choose the metric: several metrics of held-out data are equally likely; pass ")
    assert '--metric "eval_accuracy:max" (0.8117, 0.96, 0.9838) or --metric "eval_f1:max" (' in message


def test_request_that_fits_several_metrics_asks():
    with pytest.raises(
        ConfigurationError, match=r'fits several values; pass --metric "loss_val:min" .* or --metric .* or --metric'
    ):
        select_metric(series_of(timed(gcn())), "loss")


def test_request_with_a_colon_in_the_name_keeps_it():
    assert parse_request("val: loss") == ("val: loss", "") and parse_request("a:max") == ("a", "max")


@pytest.mark.parametrize(
    ("name", "phase", "direction", "kind"),
    [
        ("val_loss", "validation", "min", 2),
        ("valLoss", "validation", "min", 2),
        ("Validation Accuracy", "validation", "max", 3),
        ("testacc", "test", "max", 3),
        ("eval/f1", "validation", "max", 3),
        ("mIoU", "", "max", 3),
        ("val accuracy error", "validation", "min", 3),
        ("val accuracy per class", "validation", "max", 3),
        ("eval reward per game", "validation", "max", 3),
        ("val per", "validation", "min", 3),
        ("valid nll_loss", "validation", "min", 1),
        ("train loss", "train", "min", 2),
        ("eval_runtime", "validation", "", 0),
        ("eval_samples_per_second", "validation", "", 0),
        ("Val", "validation", "", 0),
        ("device", "", "", 0),
        ("val_loss_dice", "validation", "min", 1),
        ("val/loss_iou", "validation", "min", 1),
        ("Val loss/acc", "validation", "", 1),
    ],
)
def test_name_says_on_which_data_and_which_direction_is_better(name, phase, direction, kind):
    meaning = meaning_of(name)
    assert (meaning.phase, meaning.direction, meaning.kind) == (phase, direction, kind)


def test_logged_numbers_are_chosen_like_printed_ones():
    records = []
    for e in EPOCHS:
        values = {"train/loss": LOSSES[e], "val/loss": HELD_OUT[e], "lr": 0.1, "iter": e, "val/loss_best": 0.1}
        records += [(float(e), name, value, False) for name, value in values.items()]
    found = choose_metric(series_of_logged(records))
    assert isinstance(found, Found)
    assert (found.name, found.direction, found.resolution, found.values) == ("val/loss", "min", 0.0, HELD_OUT)


def test_values_of_held_out_data_that_came_once_are_proposed_before_those_of_training():
    lines = ["Epoch: 0 recon loss: 355.4 kld loss: 11.1", "Test recon loss: 296.1 test kld loss: 12.1"]
    found = find_metric([(float(at), line, False) for at, line in enumerate(lines)])
    assert isinstance(found, Ambiguous)
    assert found.reason.startswith("the numbers of held-out data were printed only once")
    assert [one.name for one in found.candidates][:2] == ["Test recon loss", "test kld loss"]


def test_value_that_came_once_after_the_first_evaluation_had_begun_is_no_option():
    once = series_of([(1.0, "val_loss_weight=0.5", False), (9.0, "train loss 0.7 val loss 0.4", True)])
    assert isinstance(choose_metric(once), Ambiguous)
    found = choose_metric(once, evaluating=8.0)
    assert isinstance(found, Found) and (found.name, found.values) == ("val loss", [0.4])


def test_direction_that_is_neither_min_nor_max_is_refused():
    for request in ("val acc:up", "val loss: lower"):
        with pytest.raises(ConfigurationError, match="the direction is min or max"):
            parse_request(request)


def test_metric_printed_behind_an_open_bar_is_read_each_time():
    lines = []
    for e in EPOCHS:
        for i in (100, 200, 300):
            bar = f"\r {i // 3}%|\u2588\u2588   | {i}/300 [00:0{i // 100}<00:02, 98.1it/s]"
            lines.append(f"{bar}step {i} val_loss 0.{e + 1}{i}")
    found = find_metric(timed(lines))
    assert isinstance(found, Found) and found.name == "val_loss" and len(found.values) == 12


def test_progress_that_a_script_prints_itself_is_read_at_its_end():
    lines = [f"Valid {i}/40 [00:0{i // 20}<00:02] acc 0.{8 if i == 40 else 9}{e}" for e in EPOCHS for i in (20, 40)]
    found = find_metric(timed(lines))
    assert isinstance(found, Found) and found.name == "valid acc" and len(found.values) == len(EPOCHS)

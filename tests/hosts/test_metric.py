"""The metric of a script, from what public training scripts print. Each output follows the format of its source."""

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

LOSSES = [1.4821, 0.9153, 0.6642, 0.5127]  # of the training, falling
HELD_OUT = [1.5204, 1.0512, 0.8833, 0.9041]  # the last is not the best
CORRECT = [8123, 9312, 9607, 9845]
EPOCHS = range(4)


def mnist():
    for e in EPOCHS:
        for i in range(0, 938, 100):
            done, share = i * 64, 100 * i / 938
            yield f"Train Epoch: {e + 1} [{done}/60000 ({share:.0f}%)]\tLoss: {LOSSES[e] + i / 9e3:.6f}"
        yield ""
        share = CORRECT[e] / 100
        yield f"Test set: Average loss: {HELD_OUT[e] / 9:.4f}, Accuracy: {CORRECT[e]}/10000 ({share:.0f}%)"
        yield ""


def imagenet():
    for e in EPOCHS:
        for i in range(0, 50, 10):
            meters = f"Time  0.12{i} ( 0.2{i}0)\tData  0.01{i} ( 0.011)\tLoss {LOSSES[e]:.4e} ({LOSSES[e] + 0.1:.4e})"
            accuracy = f"Acc@1   {e + i / 9:6.2f} ({e + 1:6.2f})\tAcc@5   {e:6.2f} (  9.00)"
            yield f"Epoch: [{e}][{i + 1:>4}/  50]\t{meters}\t{accuracy}"
        for i in range(0, 20, 10):
            meters = f"Time  0.1{i} ( 0.1{i})\tLoss {HELD_OUT[e]:.4e} ({HELD_OUT[e] + 0.1:.4e})"
            accuracy = f"Acc@1  {11.5 + e + i / 9:6.2f} ({12 + e:6.2f})\tAcc@5   {e + 40:6.2f} ( 41.00)"
            yield f"Test: [{i + 1:>2}/20]\t{meters}\t{accuracy}"
        yield f" *   Acc@1 {CORRECT[e] / 100:.3f} Acc@5 {CORRECT[e] / 100 + 1:.3f}"


def word_language_model():
    for e in EPOCHS:
        for i in (200, 400):
            loss = LOSSES[e] + i / 1e4
            speed = f"lr {20 / 4**e:02.2f} | ms/batch {12.5 + i / 99:5.2f}"
            yield f"| epoch {e + 1:3d} | {i:5d}/ 2983 batches | {speed} | loss {loss:5.2f} | ppl {math.exp(loss):8.2f}"
        yield "-" * 89
        held_out = HELD_OUT[e]
        line = f"| end of epoch {e + 1:3d} | time: {41.1 + e / 9:5.2f}s | valid loss {held_out:5.2f} | "
        yield line + f"valid ppl {math.exp(held_out):8.2f}"
        yield "-" * 89
    yield "=" * 89
    yield f"| End of training | test loss {0.91:5.2f} | test ppl {2.48:8.2f}"


def vae():
    for e in EPOCHS:
        for i in range(0, 469, 100):
            yield f"Train Epoch: {e + 1} [{i * 128}/60000 ({i / 4.69:.0f}%)]\tLoss: {LOSSES[e] * 100:.6f}"
        yield f"====> Epoch: {e + 1} Average loss: {LOSSES[e] * 100:.4f}"
        yield f"====> Test set loss: {HELD_OUT[e] * 100:.4f}"


def dcgan():
    for e in EPOCHS:
        for i in range(0, 500, 100):
            d = f"Loss_D: {LOSSES[e] + i / 999:.4f} Loss_G: {2 - LOSSES[e]:.4f} D(x): {0.5 + i / 999:.4f}"
            yield f"[{e}/4][{i}/500] {d} D(G(z)): {0.3 + e / 99:.4f} / {0.2 + e / 77:.4f}"


def gcn():
    yield "Using cpu device"
    yield "Loading dataset..."
    for e in EPOCHS:
        train = f"loss_train: {LOSSES[e]:.4f} acc_train: {0.7 + e / 17:.4f}"
        held_out = f"loss_val: {HELD_OUT[e]:.4f} acc_val: {CORRECT[e] / 1e4:.4f}"
        yield f"Epoch: {20 * (e + 1):04d} ({0.0123 + e / 1e3:.4f}s) {train} {held_out}"
    yield f"Test set results: loss {0.9112:.4f} accuracy {0.811:.4f}"


def nanogpt():
    yield "tokens per iteration will be: 16,384"
    yield "number of parameters: 10.65M"
    for e in EPOCHS:
        yield f"step {e * 250}: train loss {LOSSES[e]:.4f}, val loss {HELD_OUT[e]:.4f}"
        yield "saving checkpoint to out-shakespeare-char"
        for i in range(0, 250, 50):
            speed = f"time {25.12 + i / 7:.2f}ms, mfu {17.63 + e / 9:.2f}%"
            yield f"iter {e * 250 + i}: loss {LOSSES[e] - i / 1e4:.4f}, {speed}"


def timm():
    for e in EPOCHS:
        for i in (0, 50, 99):
            rate = f"Time: {0.5 + i / 999:.3f}s, {255.9 - i:>7.2f}/s  ({0.512:.3f}s, {250.1:>7.2f}/s)"
            yield (
                f"Train: {e} [{i:>4d}/{100} ({i:>3.0f}%)]  Loss: {LOSSES[e] + i / 999:#.4g} ({LOSSES[e]:#.3g})  {rate}"
                f"  LR: {0.1 / (e + 1):.3e}  Data: {0.01 + i / 9999:.3f} ({0.011:.3f})"
            )
        for i in (0, 50, 78):
            top1 = CORRECT[e] / 100 - (78 - i) / 100
            yield (
                f"Test: [{i:>4d}/{78}]  Time: {0.2 + i / 999:.3f} ({0.21:.3f})  Loss: {HELD_OUT[e] + i / 99:>7.4f} "
                f"({HELD_OUT[e]:>6.4f})  Acc@1: {50 + i:>7.4f} ({top1:>7.4f})  Acc@5: {90 + e:>7.4f} ({95 + e:>7.4f})"
            )
        yield "Current checkpoints:"
        yield f" ('./output/train/checkpoint-{e}.pth.tar', {CORRECT[e] / 100})"
    yield f"*** Best metric: {98.45} (epoch 3)"


def trainer(metrics):
    for e in EPOCHS:
        for i in (0.5, 1.0):
            log = {
                "loss": LOSSES[e] + i / 9,
                "grad_norm": 1.5 + i / 7 + e,
                "learning_rate": 5e-05 / (e + 1),
                "epoch": e + i,
            }
            yield str(log)
        held_out = {"eval_loss": HELD_OUT[e], **{name: of(e) for name, of in metrics.items()}}
        speed = {"eval_runtime": 1.21 + e / 99, "eval_samples_per_second": 337.1 - e, "eval_steps_per_second": 42.1 + e}
        yield str({**held_out, **speed, "epoch": e + 1.0})
    yield str({"train_runtime": 93.1, "train_samples_per_second": 118.2, "train_loss": 0.41, "epoch": 4.0})


def run_glue():
    yield from trainer({"eval_accuracy": lambda e: CORRECT[e] / 10007})
    yield "***** train metrics *****"
    yield from ("  epoch                    =        4.0", "  train_loss               =      0.413")
    yield "***** eval metrics *****"
    yield from ("  epoch                    =        4.0", "  eval_accuracy            =     0.9838")
    yield from ("  eval_loss                =     0.9041", "  eval_runtime             = 0:00:01.24")


def run_glue_mrpc():
    yield from trainer({"eval_accuracy": lambda e: CORRECT[e] / 10007, "eval_f1": lambda e: CORRECT[e] / 9999})


def lightning():
    for e in EPOCHS:
        for i in (0, 10, 20):
            bar = "\u2588" * i + " " * (20 - i)
            held_out = f", val_loss={HELD_OUT[e - 1]:.3f}, val_acc={CORRECT[e - 1] / 1e4:.3f}" if e else ""
            held_out += f", train_loss_epoch={LOSSES[e - 1]:.3f}" if e else ""
            metrics = f"v_num=0, train_loss={LOSSES[e]:.3f}{held_out}"
            yield f"\rEpoch {e}: {5 * i}%|{bar}| {i}/20 [00:0{i // 10}<00:00, 92.{i}it/s, {metrics}]"
        held_out = f", val_loss={HELD_OUT[e]:.3f}, val_acc={CORRECT[e] / 1e4:.3f}, train_loss_epoch={LOSSES[e]:.3f}"
        yield f"\rEpoch {e}: 100%|{bar}| 20/20 [00:02<00:00, 91.1it/s, v_num=0, train_loss={LOSSES[e]:.3f}{held_out}]"


def keras():
    for e in EPOCHS:
        yield f"Epoch {e + 1}/4"
        for i in (1, 900):
            bar = "\x1b[32m" + "\u2501" * 10 + "\x1b[0m\x1b[37m" + "\u2501" * 10 + "\x1b[0m"
            metrics = f"accuracy: {0.5 + i / 1e4:.4f} - loss: {LOSSES[e] + i / 1e4:.4f}"
            yield f"\x1b[1m{i:4d}/1875\x1b[0m {bar} \x1b[1m{i // 99}s\x1b[0m 2ms/step - {metrics}\r"
        metrics = f"accuracy: {0.7 + e / 19:.4f} - loss: {LOSSES[e]:.4f}"
        held_out = f"val_accuracy: {CORRECT[e] / 1e4:.4f} - val_loss: {HELD_OUT[e]:.4f}"
        yield f"\x1b[1m1875/1875\x1b[0m {bar} \x1b[1m5s\x1b[0m {2 + e}ms/step - {metrics} - {held_out}"


def fairseq():
    for e in EPOCHS:
        stamp = f"2026-03-0{e + 1} 10:2{e}:31"
        speed = f"wps {3521.1 + e} | ups 1.2{e} | wpb 3585.5 | bsz 154.{e} | num_updates {1131 * (e + 1)}"
        log = f"loss {LOSSES[e] + 3:.3f} | nll_loss {LOSSES[e] + 2:.3f} | ppl {2 ** (LOSSES[e] + 2):.2f} | {speed}"
        yield f"{stamp} | INFO | train_inner | epoch {e + 1:03d}:    100 / 1131 {log.replace(' | ', ', ')}, lr=1.25e-05"
        log = (
            f"loss {HELD_OUT[e] + 3:.3f} | nll_loss {HELD_OUT[e] + 2:.3f} | ppl {2 ** (HELD_OUT[e] + 2):.2f} | {speed}"
        )
        best = f" | best_loss {HELD_OUT[e] + 3:.3f}" if e else ""
        yield f"{stamp} | INFO | valid | epoch {e + 1:03d} | valid on 'valid' subset | {log}{best}"
        log = f"loss {LOSSES[e] + 3:.3f} | ppl {LOSSES[e] + 9:.2f} | {speed} | gnorm 1.8{e}"
        yield f"{stamp} | INFO | train | epoch {e + 1:03d} | {log}"


def detectron2():
    for e in EPOCHS:
        stamp = f"[03/0{e + 1} 10:2{e}:31 d2"
        losses = f"total_loss: {LOSSES[e]:.4g}  loss_cls: {LOSSES[e] / 2:.4g}  loss_box_reg: {LOSSES[e] / 3:.4g}"
        speed = f"time: 0.31{e}1  data_time: 0.01{e}1  lr: 0.00{e}25  max_mem: 2571M"
        yield f"{stamp}.utils.events]:  eta: 0:1{e}:21  iter: {20 * e + 19}  {losses}  {speed}"
        yield f"{stamp}.evaluation.testing]: copypaste: Task: bbox"
        yield f"{stamp}.evaluation.testing]: copypaste: AP,AP50,AP75,APs,APm,APl"
        values = [CORRECT[e] / 250 + shift for shift in (0, 20.1, 2.2, -19.3, 4.4, 12.5)]
        yield f"{stamp}.evaluation.testing]: copypaste: {','.join(f'{value:.4f}' for value in values)}"


def xgboost():
    for e in EPOCHS:
        yield f"[{e}]\ttrain-rmse:{LOSSES[e]:.5f}\teval-rmse:{HELD_OUT[e]:.5f}"


def quickstart():
    for e in EPOCHS:
        yield f"Epoch {e + 1}"
        yield "-------------------------------"
        for i in range(0, 938, 300):
            yield f"loss: {LOSSES[e] + i / 9e3:>7f}  [{i * 64 + 64:>5d}/60000]"
        yield "Test Error: "
        yield f" Accuracy: {CORRECT[e] / 100:>0.1f}%, Avg loss: {HELD_OUT[e]:>8f} "
        yield ""
    yield "Done!"


def ignite():
    for e in EPOCHS:
        yield f"Training Results - Epoch: {e + 1} Avg accuracy: {0.7 + e / 19:.2f} Avg loss: {LOSSES[e]:.2f}"
        yield f"Validation Results - Epoch: {e + 1} Avg accuracy: {CORRECT[e] / 1e4:.2f} Avg loss: {HELD_OUT[e]:.2f}"


def fastai():
    yield "epoch     train_loss  valid_loss  accuracy  time    "
    for e in EPOCHS:
        yield f"{e}         {LOSSES[e]:.6f}    {HELD_OUT[e]:.6f}    {CORRECT[e] / 1e4:.6f}  00:0{e + 3}     "


def geometric():
    for e in EPOCHS:
        held_out = f"Val: {CORRECT[e] / 1e4:.4f}, Test: {0.7 + e / 40:.4f}"
        yield f"Epoch: {e + 1:03d}, Loss: {LOSSES[e]:.4f}, Train: {0.8 + e / 30:.4f}, {held_out}"


def nanochat():
    for e in EPOCHS:
        yield f"Step {e * 250:05d} | Validation bpb: {HELD_OUT[e]:.4f}"
        for i in range(3):
            speed = f"dt: {312.1 + i:.2f}ms | tok/sec: {167_321 + i:,} | mfu: {47.3 + i / 9:.2f}"
            loss = f"loss: {LOSSES[e] - i / 1e4:.6f} | lrm: 1.00"
            yield f"step {e * 250 + i:05d}/21400 ({i / 2.14:.2f}%) | {loss} | {speed} | total time: {i:.2f}m"


def super_resolution():
    for e in EPOCHS:
        for i in range(1, 4):
            yield f"===> Epoch[{e + 1}]({i}/50): Loss: {LOSSES[e] / i:.4f}"
        yield f"===> Epoch {e + 1} Complete: Avg. Loss: {LOSSES[e]:.4f}"
        yield f"===> Avg. PSNR: {20 + CORRECT[e] / 1e3:.4f} dB"


def katib_mxnet():
    for e in EPOCHS:
        yield f"2026-03-02T10:11:3{e}Z INFO     Epoch[{e}] Train-accuracy={0.7 + e / 19:.6f}"
        yield f"2026-03-02T10:11:3{e}Z INFO     Epoch[{e}] Time cost={4.21 + e / 99:.3f}"
        yield f"2026-03-02T10:11:3{e}Z INFO     Epoch[{e}] Validation-accuracy={CORRECT[e] / 1e4:.6f}"


def cifar_tutorial():
    for e in EPOCHS:
        for i in range(2000, 12001, 2000):
            yield f"[{e + 1}, {i:5d}] loss: {LOSSES[e] - i / 1e5:.3f}"
    yield "Finished Training"
    yield f"Accuracy of the network on the 10000 test images: {CORRECT[-1] // 100} %"
    yield from (f"Accuracy for class: {name:5s} is {50 + i:.1f} %" for i, name in enumerate(("plane", "car", "bird")))


RIGHT = {
    mnist: ("test accuracy", "max", 0.9845, 1e-4),
    imagenet: ("test acc@1", "max", 98.45, 1e-3),
    word_language_model: ("valid loss", "min", 0.90, 0.01),
    vae: ("Test set loss", "min", 90.41, 1e-4),
    gcn: ("acc_val", "max", 0.9845, 1e-4),
    nanogpt: ("val loss", "min", 0.9041, 1e-4),
    timm: ("test acc@1", "max", 98.45, 1e-4),
    run_glue: ("eval_accuracy", "max", 9845 / 10007, None),
    lightning: ("val_acc", "max", 0.985, 1e-3),
    keras: ("val_accuracy", "max", 0.9845, 1e-4),
    fairseq: ("valid loss", "min", 3.904, 1e-3),
    xgboost: ("eval-rmse", "min", 0.9041, 1e-5),
    quickstart: ("test accuracy", "max", 0.985, 1e-3),
    ignite: ("validation avg accuracy", "max", 0.98, 0.01),
    nanochat: ("Validation bpb", "min", 0.9041, 1e-4),
    fastai: ("valid_loss", "min", 0.9041, 1e-6),
    katib_mxnet: ("Validation-accuracy", "max", 0.9845, 1e-6),
}
ASK = {
    dcgan: "held-out data",
    detectron2: "held-out data",
    geometric: "higher or lower",
    run_glue_mrpc: "equally likely",
    super_resolution: "held-out data",
}


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
        ConfigurationError, match=r'fits several values; pass .* or --metric "loss_val:min" .* or --metric'
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

"""What public training scripts print, each in the format of its source, and the metric that is found in it."""

import math

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

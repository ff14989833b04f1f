"""Data-parallel training on two processes against one, one thread each: a small CNN, 128 samples per process and step.

This batch size makes a step of a few tenths of a second. With 32 samples up to a tenth of a step on virtual cores is
spent waiting for a process that was interrupted, in any training loop; over longer steps that averages out. All arms
live in the same two processes and take turns, a leg of some steps each, timed by the slowest rank:

* *one process*: rank 0 trains without communication, rank 1 sleeps. Efficiency is its time per step divided by that of
  two processes, which process twice as many samples.
* *both, no communication*: each process trains by itself. This bound contains the time that two processes on this
  machine cost each other anyway.
* *hasten*: ``ddp`` as the engine builds it. *torch*: DistributedDataParallel in a hand-written loop. *accelerate*,
  *lightning* (Fabric) and *deepspeed* (stage 0): their own loops.
* *ray*: Ray Train starts two processes of its own, which sleep until a file signals their turn.

Figure: efficiency of at least 0.93, and at most 1 % slower than torch's own DDP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep

import torch
from _common import finish, in_turns, installed, interval, parser, print_line, show
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, SAMPLES, CLASSES = 128, 2048, 10
WANTED, BEHIND = 0.93, 0.01
ONE, BOUND, OURS, THEIRS = "one process", "both, without a word", "hasten", "torch"
RAY, POLLED = "ray", 0.01  # seconds between two checks of whose turn it is
ANSWER = "DDP_SCALING_ANSWER"  # environment variable: the file into which rank 0 writes the exit code


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, CLASSES),
    )


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 32, 32, generator=chance), torch.randint(0, CLASSES, (SAMPLES,), generator=chance)
    )


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def by_hand(
    net: nn.Module, loader, backward: Callable = torch.Tensor.backward, updated: Callable = optimizer
) -> Iterator[float]:
    """A hand-written loop; yields after each step."""
    update = updated(net)
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = cross_entropy(net(inputs), labels)
            backward(loss)
            update.step()
            update.zero_grad()
            yield loss.detach()


def torch_ddp() -> Iterator:
    dataset = data()
    return by_hand(
        DistributedDataParallel(model()), DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
    )


def single_process() -> Iterator:
    return by_hand(model(), DataLoader(data(), batch_size=BATCH, shuffle=True))


def hasten(ranks) -> Iterator:
    from hasten import Task
    from hasten.engine.loop import train_steps
    from hasten.engine.plan import build
    from hasten.engine.registry import make_method

    task = Task(
        model=model,
        train_data=data(),
        loss=cross_entropy,
        optimizer=optimizer,
        metric="accuracy",
        batch_size=BATCH * ranks.world_size,
        epochs=10**6,
    )
    return train_steps(build(task, [make_method("ddp")], ranks=ranks))


def accelerate() -> Iterator:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    net, update, loader = accelerator.prepare(net, optimizer(net), DataLoader(data(), batch_size=BATCH, shuffle=True))
    return by_hand(net, loader, accelerator.backward, lambda _: update)


def lightning() -> Iterator:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    net = model()
    net, update = fabric.setup(net, optimizer(net))
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH, shuffle=True))
    return by_hand(net, loader, lambda loss: fabric.backward(loss), lambda _: update)


def deepspeed() -> Iterator:
    import deepspeed

    net, dataset = model(), data()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer(net), config=config, dist_init_required=False)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
    return by_hand(engine, loader, engine.backward, lambda _: _Steps(engine))


class _Steps:
    """DeepSpeed's engine as an optimizer; it zeroes the gradients itself."""

    def __init__(self, engine):
        self.step = engine.step

    def zero_grad(self) -> None:
        pass


PEERS = {"accelerate": accelerate, "lightning": lightning, "deepspeed": deepspeed}


class Ray:
    """Two workers of Ray Train, and a directory through which rank 0 signals their turns."""

    def __init__(self, directory: str, steps: int):
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        self.directory, self.turn = Path(directory), 0
        here = {
            "env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
        }
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]  # this process has joined its own job; Ray would take torchrun's store for its store
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=here)
        trainer = TorchTrainer(
            _in_rays_worker,
            train_loop_config={"directory": directory, "steps": steps},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{directory}/results"),
        )
        Thread(target=trainer.fit, daemon=True).start()

    def leg(self) -> float:
        """Returns seconds per step on the slower worker."""
        (self.directory / f"go-{self.turn}").touch()
        answers = [self.directory / f"{self.turn}-of-{rank}" for rank in range(2)]
        while not all(answer.exists() for answer in answers):
            sleep(POLLED)
        self.turn += 1
        return max(float(answer.read_text()) for answer in answers)


def _in_rays_worker(config: dict) -> None:
    import ray.train.torch

    torch.set_num_threads(1)
    net = ray.train.torch.prepare_model(model())
    loader = ray.train.torch.prepare_data_loader(DataLoader(data(), batch_size=BATCH, shuffle=True))
    steps, rank = by_hand(net, loader), ray.train.get_context().get_world_rank()
    for turn in count():
        while not Path(config["directory"], f"go-{turn}").exists():
            sleep(POLLED)
        began = perf_counter()
        for _ in islice(steps, config["steps"]):
            pass
        unfinished = Path(config["directory"], f"unfinished-{rank}")
        unfinished.write_text(str((perf_counter() - began) / config["steps"]))
        unfinished.rename(Path(config["directory"], f"{turn}-of-{rank}"))


def main() -> int:
    if "RANK" not in os.environ:
        return both()
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=6, help="of a leg")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    from hasten.distributed.process_group import init_process_group

    with init_process_group("cpu") as ranks, tempfile.TemporaryDirectory() as directory:
        arms = {ONE: single_process(), BOUND: single_process(), OURS: hasten(ranks), THEIRS: torch_ddp()}
        missing = {name: why for name in PEERS if (why := installed(name)) is not None}
        for name in (name for name in PEERS if name not in missing):  # in the same order on all ranks
            arms[name] = PEERS[name]()
        ways = {
            name: lambda name=name: leg(
                arms[name], options.steps, ranks, idle=name == ONE and not ranks.is_main_process
            )
            for name in arms
        }
        if (why := installed(RAY)) is None:
            ray = Ray(directory, options.steps) if ranks.is_main_process else None
            ways[RAY] = lambda: ranks.all_reduce_max([ray.leg() if ray else 0.0])[0]
        else:
            missing[RAY] = why
        for way in ways.values():
            way()
        if not ranks.is_main_process:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  only rank 0 prints
        taken = in_turns(ways, options.rounds)
        if ranks.is_main_process:
            Path(os.environ[ANSWER]).write_text(str(print_result(options, taken, missing, ranks.world_size)))
    return 0


def leg(arm: Iterator, steps: int, ranks, idle: bool) -> float:
    """Returns seconds per step on the slowest rank."""
    ranks.any(False)
    began = perf_counter()
    if not idle:
        for _ in islice(arm, steps):
            pass
    return ranks.all_reduce_max([0.0 if idle else (perf_counter() - began) / steps])[0]


def print_result(options, taken: dict[str, list[float]], missing: dict[str, str], world: int) -> int:
    efficiency = {
        name: interval(one / many for one, many in zip(taken[ONE], legs, strict=True)) for name, legs in taken.items()
    }
    behind = interval(ours / theirs - 1 for ours, theirs in zip(taken[OURS], taken[THEIRS], strict=True))
    rows = [
        (name, f"{1e3 * interval(legs).median:.1f}", f"{efficiency[name]:.3f}" if name != ONE else "")
        for name, legs in taken.items()
    ]
    show(
        ("arm", "ms a step", f"efficiency of {world} processes"),
        [*rows, *((name, why, "") for name, why in missing.items())],
    )
    print_line(
        f"\nhasten against torch's own: {100 * behind.median:+.2f} % ({100 * behind.low:+.2f} to "
        f""
        f"{100 * behind.high:+.2f})"
    )
    figure = (
        f"efficiency of at least {WANTED:g} and at most {100 * BEHIND:g} % behind torch; it is "
        f""
        f"{efficiency[OURS]:.3f} (bound: {efficiency[BOUND]:.3f}), {100 * behind.median:+.2f} %"
    )
    reached = efficiency[OURS].median >= WANTED and behind.median <= BEHIND
    return finish(options, figure, reached, {"seconds a step": taken, "efficiency": efficiency, "behind torch": behind})


def both() -> int:
    """Starts this script in two processes with torchrun."""
    with tempfile.NamedTemporaryFile("r") as answer:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*agent, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1", ANSWER: answer.name})
        return done.returncode or int(answer.read() or 1)


if __name__ == "__main__":
    sys.exit(main())

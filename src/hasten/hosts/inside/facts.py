"""Facts of a script's run that method cards refer to."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten.hosts.inside.loaders import batch_size_of
from hasten.hosts.inside.models import ModelSeam
from hasten.hosts.inside.steps import StepSeam
from hasten.utils.parsed_arguments import names_length
from hasten.utils.run_facts import hardware_facts, model_facts


def describe(
    models: ModelSeam, training: Iterable[Any], steps: StepSeam, device: torch.device, of_framework: Iterable[str] = ()
) -> dict[str, Any]:
    """``facts`` (keys of ``hasten.core.card.FACTS``), ``samples_per_step`` (None if unknown) and ``device``."""
    from hasten.engine.loaders import from_loader  # a script that is only watched needs it at the end

    roots = models.roots
    device = next(iter(devices_of(roots)), device)
    training = list(training)
    found = {*hardware_facts(device), *of_framework}
    for root in roots:
        found |= model_facts(root)
    if models.evaluations and not models.trains_in_eval_mode:
        found |= {"evaluations"} | ({"evaluation_gradients"} if models.records_gradients else set())
    of_torch = [loader for loader in training if isinstance(loader, DataLoader)]
    specs = [from_loader(loader, None, loader.batch_size or 1, 0, True).spec for loader in of_torch]
    if any(spec is not None for spec in specs):
        found |= {"indexed_samples", "workers", "multiple_epochs"}
    sizes = [size for loader in training if (size := batch_size_of(loader))]
    samples = max(sizes) * max(1, steps.backwards) if sizes else None
    if len(roots) > 1 and sizes:  # several backward passes of a step read the same batch
        samples = max(sizes)
    return {"facts": sorted(found), "samples_per_step": samples, "device": str(device)}


def devices_of(roots: Iterable[torch.nn.Module]) -> list[torch.device]:
    """The devices that hold parameters, each once, that of the first parameter first."""
    return list(dict.fromkeys(parameter.device for root in roots for parameter in root.parameters()))


def expected_steps(arguments: Mapping[str, Any], training: Iterable[Any], steps: StepSeam) -> int | None:
    """The steps of the whole training by the script's own arguments, such as ``--epochs``; None if they do not say it.

    Args:
        arguments: That the script has parsed.
        training: Its loaders for training, whose lengths are those of an epoch.
        steps: Knows how many batches are a step.
    """
    lengths: list[int] = []
    for loader in training:
        if not isinstance(getattr(loader, "dataset", None), IterableDataset):  # torch warns later of a length asked for
            with suppress(Exception):  # a sampler of the user's
                lengths.append(len(loader))
    found: list[float] = []
    for name, value in arguments.items():
        if names_length(name) and type(value) in (int, float) and value > 0:
            if "epoch" not in name.lower():
                found.append(value)
            elif lengths:
                found.append(value * max(lengths) / max(1, steps.backwards))
    return int(max(found)) if found else None

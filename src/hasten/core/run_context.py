"""What a method may read while a run is built: plan, progress, objects, and the other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.types import Batch, EffectCheck

if TYPE_CHECKING:
    import torch

    from hasten.core.method import Method


@dataclass
class TrainProgress:
    """How far the training is. Step-dependent methods read it; only the training loop writes it.

    Attributes:
        step: Optimizer steps done.
        epoch: Epochs completed.
        batch: Batches of the current epoch done.
        samples: Training samples seen, summed over all ranks.
        microbatch_fraction: Samples of the current microbatch, divided by those of this rank in the step.
        is_last_microbatch: Whether the current microbatch is the last of its step.
        global_batch_size: Samples of the current step, summed over all ranks; 0 in a single process.
        loss_weight: Samples of this rank's shard, divided by an equal share of the global batch.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    microbatch_fraction: float = 1.0
    is_last_microbatch: bool = True
    global_batch_size: int = 0
    loss_weight: float = 1.0


@dataclass
class TrainPlan:
    """How long the run trains, and in which portions.

    Attributes:
        batch_size: Samples of an optimizer step, summed over all ranks; 1 where they are unknown.
        epochs: Epochs to train.
        steps: Optimizer steps of the whole run; None where the length of the data is unknown.
        samples: Samples of an epoch; None where unknown.
        microbatches: Pieces that a batch is cut into, each with its own forward and backward pass.
        evaluate_every: Training samples between two evaluations; None for once an epoch.
        schedule_interval: The schedule steps after each "step", "epoch" or "evaluation" (with the metric).
        stop: ``(evaluations so far) -> bool``, called after each evaluation; True ends the run.
        is_batch_size_known: False for ready batches of a size that neither the task nor its data state.
    """

    batch_size: int
    epochs: float
    steps: int | None = None
    samples: int | None = None
    microbatches: int = 1
    evaluate_every: int | None = None
    schedule_interval: str = "step"
    stop: Callable[[list[Evaluation]], bool] | None = None
    is_batch_size_known: bool = True


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the validation data, after ``step`` optimizer steps and ``samples`` training samples."""

    step: int
    samples: int
    metric: float


@dataclass
class EngineServices:
    """What the engine looks up on behalf of methods, which must not import it.

    Attributes:
        higher_is_better: ``() -> bool``: the direction of the task's metric.
        available_cpus: ``() -> int``: CPUs that this process may use; considers containers and other ranks.
        free_memory: ``() -> int``: bytes of host memory that this process may still allocate.
        eval_records_gradients: ``() -> bool``: whether evaluations record gradients; those of the engine never do.
        trainer: ``() -> object``: the ``Trainer`` of the framework that runs the loop; None where there is none.
        peek_batch: ``() -> batch``: the first batch, on the device, without consuming it; None once the run is built.
        in_script: Whether a script runs the loop: it may change datasets between epochs, and read batches on the host.
    """

    higher_is_better: Callable[[], bool] = lambda: True
    available_cpus: Callable[[], int] = lambda: os.cpu_count() or 1
    free_memory: Callable[[], int] = lambda: 1 << 32
    eval_records_gradients: Callable[[], bool] = lambda: False
    trainer: Callable[[], Any] = lambda: None
    peek_batch: Callable[[], Batch] = None  # pyright: ignore[reportAssignmentType]  # the engine sets it
    in_script: bool = False


@dataclass
class ParallelContext:
    """The run as one of several processes. The mesh has the dimensions data parallel, pipeline stage and tensor shard.

    Attributes:
        ranks: Rank, world size and the collectives of the job.
        mesh_dim_owner: Mesh dimension -> the method whose ``degree`` option sets its size.
        model_parallel_size: Ranks (consecutive) that hold one model replica and read the same samples.
        pp_size: Pipeline stages of each replica. The ranks of a stage are consecutive.
        device_mesh: The ``DeviceMesh``, once a method called ``get_device_mesh``.
        eval_needs_all_ranks: Whether the model computes only if all ranks call it; then all of them evaluate.
        num_parameter_owners: Ranks per replica that hold disjoint sets of parameters; other sets are on meta there.
        replicated_params: Parameters of this rank that all owners hold.
        sync_period: Steps after which the cost of a step repeats; above 1 if ranks communicate only every few steps.
        warmup_steps: Number of steps at the start of the run that cost more or less time than later ones.
        init_device: Where the model is built before the ``parallelize`` hooks: "device" (of the run), "cpu" or "meta".
        materialize: ``(tensors) -> (index, tensor)`` pairs with initialized values, in one pass; for a model on meta.
        rank_state: As ``RunContext.checkpoint_state``, for state that differs between ranks; restored only at the same
            world size, else it starts anew.
        merge_rank_states: ``(state of this rank) -> state``: merges weights that differ between ranks. All call it.
    """

    ranks: ProcessGroupInfo
    mesh_dim_owner: dict[str, Method] = field(default_factory=dict)
    model_parallel_size: int = 1
    pp_size: int = 1
    device_mesh: Any = None
    eval_needs_all_ranks: bool = False
    num_parameter_owners: int = 1
    replicated_params: frozenset[torch.nn.Parameter] = frozenset()
    sync_period: int = 1
    warmup_steps: int = 0
    init_device: str = "device"
    materialize: Callable[[Sequence[torch.Tensor]], Iterable[tuple[int, torch.Tensor]]] = enumerate
    rank_state: dict[str, Any] = field(default_factory=dict)
    merge_rank_states: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state

    @property
    def tp_size(self) -> int:
        """Ranks per pipeline stage: they compute shards of the same layers and draw the same random numbers."""
        return self.model_parallel_size // self.pp_size

    @property
    def is_model_parallel(self) -> bool:
        """Whether the ranks of a model replica hold different parameters (not merely shards of the same ones)."""
        return self.num_parameter_owners > 1

    @property
    def duplicate_params(self) -> frozenset[torch.nn.Parameter]:
        """Parameters of this rank that rank 0 of its replica holds, too; sums over all parameters must skip them."""
        return self.replicated_params if self.ranks.rank % self.model_parallel_size else frozenset()


@dataclass
class RunContext:
    """What a method may read while it is built, and the few fields that it may write.

    Attributes:
        device: Device of this process.
        task: The task as the user gave it.
        progress: How far the training is.
        seed: Seed of the run.
        plan: How long the run trains; set after the ``plan`` hooks.
        model: The model after the ``parallelize`` hooks.
        unwrapped_model: The model before the ``parallelize`` hooks; checkpoints store it.
        optimizer: The optimizer; set before the hooks of the step functions.
        checkpoint_state: Name -> object with ``state_dict()`` and ``load_state_dict()`` that checkpoints include.
        no_effect: (method, reason) of each method that found nothing to act on.
        effect_checks: Method -> check of its effect; see ``observe_effect``.
        tuned_settings: Method -> options that it found while it ran, for the next run.
        parallel: The run as one of several processes; None in a single process.
        services: What the engine looks up for methods.
    """

    device: torch.device
    task: Any
    progress: TrainProgress = field(default_factory=TrainProgress)
    seed: int = 0
    plan: TrainPlan = None  # pyright: ignore[reportAssignmentType]  # set before the hooks that read it, as below
    model: torch.nn.Module = None  # pyright: ignore[reportAssignmentType]
    unwrapped_model: torch.nn.Module = None  # pyright: ignore[reportAssignmentType]
    optimizer: torch.optim.Optimizer = None  # pyright: ignore[reportAssignmentType]
    checkpoint_state: dict[str, Any] = field(default_factory=dict)
    no_effect: list[tuple[str, str]] = field(default_factory=list)
    effect_checks: dict[str, EffectCheck] = field(default_factory=dict[str, EffectCheck])
    tuned_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel: ParallelContext | None = None
    services: EngineServices = field(default_factory=lambda: EngineServices())

    @property
    def ranks(self) -> ProcessGroupInfo:
        """Rank, world size and collectives; those of a single process where ``parallel`` is None."""
        return SINGLE_PROCESS if self.parallel is None else self.parallel.ranks

    def observe_effect(self, method: Method, check: EffectCheck) -> None:
        """Registers the check of a method's effect; the engine calls it once per run, after the warm-up.

        ``check`` is a function that is called after a training step, or a generator function that yields around one. It
        returns what shows that the method acted, in one line, or raises ``NoEffectError`` with the reason.
        """
        self.effect_checks[method.name] = check

    def report_no_effect(self, method: Method, reason: str, unchanged: Any = None) -> Any:
        """Records why a method cannot act: a warning in ``train``, an error in ``tune``. Returns ``unchanged``."""
        if (method.name, reason) not in self.no_effect:
            self.no_effect.append((method.name, reason))
        return unchanged

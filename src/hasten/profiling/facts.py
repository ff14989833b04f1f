"""Facts about a run that cards refer to: its hardware, model, data and plan."""

from hasten.engine.plan import Program
from hasten.utils.run_facts import hardware_facts, model_facts


def facts_of(program: Program) -> frozenset[str]:
    """The facts (keys of ``hasten.core.card.FACTS``) that hold for a built run."""
    run, plan, source = program.run, program.plan, program.train
    has_samples = source.spec is not None and not isinstance(source.spec.dataset, range)  # numbers hold no data
    facts = {
        "indexed_samples": has_samples or (run.device.type == "cuda" and source.on_device is not None),
        "workers": source.spec is not None or source.with_workers is not None,
        "multiple_epochs": plan.epochs > 1,
        "distributed": not run.ranks.is_single_process,
        "evaluations": program.validation is not None and _evaluation_count(program) > 1,
    }
    return hardware_facts(run.device) | model_facts(run.model) | {fact for fact, holds in facts.items() if holds}


def _evaluation_count(program: Program) -> float:
    """Number of evaluations in a whole run: one per epoch, or one per ``evaluate_every`` training samples."""
    plan, length = program.plan, program.train.length
    if plan.evaluate_every is None or length is None:
        return plan.epochs
    return plan.epochs * length * plan.batch_size / plan.evaluate_every

"""What the name of a number says: on which data it was measured, and whether more or less of it is better."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


VALIDATION = _set("val valid validation validating dev eval evaluation evaluating heldout")
TEST = _set("test tests testing")
TRAIN = _set("train training trn")
PHASES = {
    word: phase for phase, words in (("validation", VALIDATION), ("test", TEST), ("train", TRAIN)) for word in words
}

# Fractions of correct answers: between 0 and 1, or 0 and 100.
RATES = _set(
    "acc accuracy accuracies top prec precision recall f1 fscore auc auroc roc auprc dice iou miou map ap ar kappa hit"
    " hits mrr ndcg correct"
)
HIGHER = RATES | _set(
    "bleu sacrebleu rouge rougel chrf meteor cider r2 mcc matthews pearson spearman pearsonr spearmanr psnr ssim em"
    " reward return elo"
)
LOSSES = _set("loss losses")
LOWER = LOSSES | _set(
    "ppl perplexity err error errors merror mae mse rmse rmsle mape nll logloss mlogloss wer cer per ter fid kid lpips"
    " bpc bpb bpd xent crossentropy epe"
)
FUNCTIONS_OF_A_LOSS = _set("ppl perplexity nll xent crossentropy bpc bpb")
# Numbers that are printed beside metrics and describe the run, not the model.
NO_METRIC = _set(
    "time times sec secs second seconds s ms min minutes hour hours eta elapsed duration runtime lr learning epoch"
    " epochs step steps iter iters iteration iterations batch batches it speed throughput rate mem memory gpu"
    " samples examples images tokens norm gnorm wps ups wpb bsz wall updates seed size params parameters num count"
    " total mfu flops patience scale version id rank date port pid momentum decay temperature beta progress"
)
DERIVED = _set(
    "best record highest lowest max previous prev target delta improvement last from improved dropped increased"
    " decreased threshold early weight split"
)
FILLERS = _set("average avg averaged mean overall set final on the of is at score net")
WITHOUT_MEANING = _set("value metric name tensor np float float16 float32 float64 array item")

_WORDS = PHASES.keys() | HIGHER | LOWER | NO_METRIC | DERIVED
_FUSED = re.compile(r"(train|valid|val|test|eval|dev)(.+)")


@dataclass(frozen=True)
class Meaning:
    """What a name says.

    Attributes:
        phase: "validation", "test", "train", or "" if the name does not say.
        direction: "max", "min", or "" if unknown.
        kind: 3 a metric of the task, 2 a loss, 1 a part or a function of a loss, 0 unknown.
        identity: The words that are left without phase and fillers; equal for two names of one metric.
        secondary: A variant such as top-5 accuracy or AP at one threshold.
        derived: Best so far, a target, a difference or an option: no measurement of its own.
        beside: Time, counts and other numbers of the run, not of the model.
        rate: A fraction of correct answers.
    """

    phase: str
    direction: str
    kind: int
    identity: tuple[str, ...]
    secondary: bool
    derived: bool
    beside: bool
    rate: bool


@lru_cache(maxsize=10_000)
def words_of(text: str) -> tuple[str, ...]:
    """The words of a name in lower case: ``val_loss``, ``valLoss``, ``Val-Loss`` and ``valloss`` are val, loss."""
    words: list[str] = []
    for word in re.findall(r"[A-Za-z0-9]+|(?:(?![A-Za-z])[^\W\d_])+", text):  # or in another script
        low = word.lower()
        stem = low.rstrip("0123456789")
        if low in _WORDS or low in WITHOUT_MEANING:
            words.append(low)
        elif stem in _WORDS and stem != low:
            words += [stem, low[len(stem) :]]
        elif (fused := _FUSED.fullmatch(stem)) and fused[2] in _WORDS:
            words += [fused[1], fused[2], *filter(None, [low[len(stem) :]])]
        else:
            words += [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", word)] or [low]
    return tuple(words)


def phase_of(words: Sequence[str]) -> str:
    """The data, "validation", "test" or "train", by the last of the words that names one of them; "" if none does."""
    return next((PHASES[word.lower()] for word in reversed(words) if word.lower() in PHASES), "")


def _names_both(name: str) -> bool:
    """Whether the parts of a name such as "acc/loss", of two numbers, are better in different directions."""
    known = [{word for word in words_of(part) if word in HIGHER or word in LOWER} for part in name.split("/")]
    known = [words for words in known if words]
    return len(known) > 1 and any(words & HIGHER for words in known) and any(words & LOWER for words in known)


@lru_cache(maxsize=10_000)
def meaning_of(name: str) -> Meaning:
    """Reads a name, such as ``val_loss``, ``Acc@5`` or ``Validation accuracy``."""
    name, _, loader = name.partition("/dataloader_idx_")  # as Lightning names the values of several loaders
    words = words_of(name)
    known = [word for word in words if word in HIGHER or word in LOWER]
    if set(known) != {"per"}:  # "accuracy per class"; alone, it is the phoneme error rate
        known = [word for word in known if word != "per"]
    identity = tuple(word for word in words if word not in PHASES and word not in FILLERS and word != "1")
    beside = bool(set(words) & NO_METRIC) and not (
        known and set(words) & NO_METRIC <= {"rate", "total", "min", "scale"}
    )
    direction, kind = "", 0
    if known and not beside:
        is_lower = bool(({"error", "err"} | LOSSES) & set(known))  # accuracy error, dice loss
        direction = "max" if known[-1] in HIGHER and not is_lower else "min"
        if "/" in name and _names_both(name):
            direction = ""
        if not set(known) & (LOSSES | FUNCTIONS_OF_A_LOSS):
            kind = 3
        else:
            kind = 2 if set(identity) <= LOSSES | {"total"} else 1
    return Meaning(
        phase=phase_of(words),
        direction=direction,
        kind=kind,
        identity=identity,
        secondary=loader not in ("", "0") or any(word.isdigit() and word != "1" for word in words),
        derived=bool(set(words) & DERIVED),
        beside=beside,
        rate=bool(known) and known[-1] in RATES,
    )

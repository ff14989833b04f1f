"""A comparison while it is measured: the samples of both arms, round by round, and the decision when it is over.

A round is a fresh pair of processes with its blocks. Two processes of the same recipe keep different speeds, so the
spread of the rounds decides how much is known, and not only that of the blocks.
"""

import math
import time
from dataclasses import dataclass, field
from statistics import fmean, median_high, median_low
from typing import Any

from hasten.benchmarking.blocks import (
    BLOCK_SECONDS,
    MIN_PAIRS,
    block_samples,
    check_blocks_are_fair,
    evaluation_seconds_per_sample,
)
from hasten.benchmarking.pair import Pair, SequentialPair
from hasten.benchmarking.ratio import (
    ALPHA,
    PROCESS_SPREAD,
    ROUND_LOOKS,
    SAME,
    UNSURE,
    Ratio,
    degrees_of_rounds,
    ratio_of_rounds,
    spread,
    verdict_of,
    with_evaluations,
)
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.engine.memory import MemoryPeak, held_bytes

MIN_ROUNDS, MAX_ROUNDS = 3, ROUND_LOOKS[-1]  # of a comparison, unless the caller wants others
FIRST_EVALUATIONS = 2  # of each arm, before the first block
BEYOND_DOUBT = 1.25  # a ratio surely beyond this, or its inverse, needs no further rounds ...
NARROW = 1.5  # ... if the ends of its interval differ by a smaller factor
KNOWN_SPREAD = 4  # evaluations whose spread says how certain their mean is
WAITING_SHARE = 0.25  # of the timed training, that arms may train untimed until their next evaluation
SLACK = 1.2  # by which blocks may take longer than the first steps, for the fewest rounds to fit into the budget
CHUNK_BLOCKS = 4  # blocks between two looks at the clock while both arms train on to a later position


@dataclass
class ArmSamples:
    """One arm: its recipe, its plan (the dict of ``Arm.build`` plus "evaluation_seen"), and what was measured: blocks,
    seconds of evaluations, peak memory of each rank.
    """

    recipe: Recipe
    plan: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    blocks: list[dict[str, float]] = field(default_factory=list)  # as ``Arm.train`` returns them, and their "round"
    evaluations: list[float] = field(default_factory=list)
    peak_memory: list[MemoryPeak] = field(default_factory=list)  # of each rank, the highest of all rounds

    def add_block(self, block: dict[str, Any], number: int) -> None:
        """Adds a block of round ``number``, and the evaluations that an arm which runs its own loop made meanwhile."""
        evaluations = block.pop("evaluations", [])
        self.evaluations += evaluations if self.plan["evaluation"] is not None else []
        self.blocks.append({**block, "round": number})

    def note_peak_memory(self, peaks: list[MemoryPeak]) -> None:
        """Raises ``peak_memory`` to ``peaks``, rank by rank, where these are higher."""
        before = self.peak_memory or peaks
        self.peak_memory = [max(pair, key=held_bytes) for pair in zip(before, peaks, strict=True)]

    def seconds_per_sample(self, number: int | None = None) -> list[float]:
        """Seconds per training sample of each block, or of each block of one round, without evaluations."""
        return [block["seconds"] / block["samples"] for block in self.blocks if number in (None, block["round"])]

    def cpu_seconds_per_sample(self) -> list[float]:
        return [block["cpu"] / block["samples"] for block in self.blocks]

    def evaluation_seconds_per_sample(self) -> float:
        # the first evaluation of a process may be slower than the others: of two, the faster one counts
        seconds = median_low(self.evaluations) if self.evaluations else self.plan.get("evaluation_seen")
        return evaluation_seconds_per_sample(self.plan, seconds)

    def evaluation_error(self) -> float:
        """Standard error of the logarithm of the seconds of an evaluation. The spread of few is hardly known."""
        least = spread(self.seconds_per_sample()) if len(self.evaluations) < KNOWN_SPREAD else 0.0
        return max(least, spread(self.evaluations)) / math.sqrt(max(1, len(self.evaluations)))

    def evaluation_ratio(self) -> float:
        """Seconds of evaluation per second of training steps, for this arm in a whole run."""
        return self.evaluation_seconds_per_sample() / fmean(self.seconds_per_sample())

    def seconds_per_1000_samples(self) -> float:
        """Seconds per 1000 training samples: median over the blocks, plus the share of evaluations."""
        return 1000 * (median_high(self.seconds_per_sample()) + self.evaluation_seconds_per_sample())


@dataclass
class Measurement:
    """Measures two arms round by round until ``is_over``; see ``run_interleaved`` for the meaning of the fields."""

    arms: tuple[ArmSamples, ArmSamples]
    budget: float
    min_rounds: int
    max_rounds: int
    looks: list[int]
    longest: float
    start_step: int
    later_seconds: float
    on_progress: ProgressCallback
    rounds: int = 0
    is_sequential: bool = False  # whether the arms do not fit into memory together
    is_over: bool = False
    out_of_budget: bool = False
    evaluating: float = 0.0  # seconds that evaluations have taken, with what an arm trains until they come
    verdict: str = UNSURE
    ratio: Ratio = field(init=False)
    began: float = field(init=False)  # time of the first block
    by_position: list[tuple[int, Ratio]] = field(default_factory=list)  # (step of the first arm, ratio of the steps)
    later_failure: str = ""  # why there is no later stretch in ``by_position``
    # known from the plans of the first pair
    block_samples: float = field(init=False)  # training samples of a block, the same in both arms
    start: float = field(init=False)  # training samples at which the blocks of each round begin
    training_samples: float = field(init=False)  # of the whole training; 0 if its length is unknown
    pair_seconds: float = field(init=False)  # of one block in each arm: expected, then as last measured
    # known before the first block
    build_seconds: float = field(init=False)  # until an arm is at the start of its blocks
    is_single: bool = field(init=False)  # there is one round only, with as many blocks as the budget allows
    most_pairs: int = field(init=False)  # of blocks in a round
    look_count: int = field(init=False)  # looks at the interval, among which the error is divided
    last_round: int = field(init=False)  # number of rounds that the budget allows

    def run_round(self, pair: Pair) -> None:
        """Times the blocks of a fresh pair of processes, and decides whether this was the last round."""
        if not self.rounds:
            self._inspect(pair)
        built = time.monotonic()
        pair.run_to(self.start)
        setup = pair.build_seconds + time.monotonic() - built
        if not self.rounds:
            self._plan_blocks(setup)
        self.rounds += 1
        if isinstance(pair, SequentialPair):
            self._time_sequentially(pair)
        else:
            self._time_blocks(pair)
            can_extend = not (self.is_single or self.out_of_budget) and self.rounds == 1
            if can_extend and self._left() < self._shortest_round(setup):
                self._extend_first_round(pair)
        for arm, peaks in zip(self.arms, pair.peak_memory(), strict=True):
            arm.note_peak_memory(peaks)
        if self.rounds == 1 and not self.is_single:
            self._plan_rounds(setup)
        self._decide(setup)
        if self.is_over and self.later_seconds:
            try:
                self._look_later(pair)
            except RunError as error:  # also at the deadline, or if memory ends: the verdict is known
                self.later_failure = str(error)

    def run_sequentially(self) -> None:
        """Drops all samples and begins anew, one arm at a time: blocks of arms that lack memory show no true speed."""
        if self.rounds:
            self.budget = max(1.0, self.budget - (time.monotonic() - self.began))
        self.is_sequential, self.rounds, self.later_seconds, self.evaluating = True, 0, 0.0, 0.0
        for arm in self.arms:
            arm.plan, arm.blocks, arm.evaluations = {}, [], []

    def needs_evaluations(self) -> bool:
        """Whether the next round times evaluations: the first does, others if they take less than BLOCK_SECONDS."""
        return not self.rounds or max(arm.plan["evaluation"] or 0.0 for arm in self.arms) < BLOCK_SECONDS

    def end_now(self) -> bool:
        """Ends the measurement with the blocks that it has; False if they are fewer than MIN_PAIRS pairs."""
        if self.rounds > 1 and len(self.arms[0].seconds_per_sample(self.rounds)) < MIN_PAIRS:
            for arm in self.arms:
                arm.blocks = [block for block in arm.blocks if block["round"] < self.rounds]
            self.rounds -= 1
        if len(self.arms[0].blocks) < MIN_PAIRS:
            return False
        self.is_over = self.out_of_budget = True
        self._judge()
        return True

    def why(self) -> str:
        """The verdict in a sentence."""
        low, high = f"{self.ratio.low:.3f}", f"{self.ratio.high:.3f}"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        measured = f"after {len(self.arms[0].blocks)} pairs of blocks in {rounds} of fresh processes"
        if self.verdict == UNSURE:
            end = ", and the budget is spent" if self.out_of_budget else ""
            reason = "is too wide" if self.ratio.low <= 1 <= self.ratio.high else "comes too close to 1"
            why = f"the interval {low} to {high} {reason} for a verdict {measured}{end}"
        elif self.verdict == SAME:
            why = f"{measured} the ratio is known to lie between {low} and {high}"
        else:
            why = f"{measured} the whole interval {low} to {high} lies on one side of 1"
        if self.rounds < MIN_ROUNDS:
            why += (
                f"; with so few rounds it assumes that processes of one recipe differ by {100 * PROCESS_SPREAD:.0f} %"
            )
        if self.is_sequential:
            a, b = (sum(map(held_bytes, arm.peak_memory)) / 1e9 for arm in self.arms)
            why += f"; memory does not suffice for both arms at once ({a:.1f} and {b:.1f} GB): each ran alone, in turns"
        return why + self._change()

    def _inspect(self, pair: Pair) -> None:
        """Sets from the plans of the arms how long blocks are, where they begin, and whether later ones are possible.

        RunError if blocks cannot represent a run.
        """
        self.block_samples = block_samples(pair.plans)
        seen = pair.plans[0].get("evaluation_seen")
        for arm, plan in zip(self.arms, pair.plans, strict=True):
            arm.plan = {**plan, "evaluation_seen": seen}  # the same for both, where no evaluation is timed
            check_blocks_are_fair(arm.recipe, plan, round(self.block_samples / plan["samples_per_step"]), self.longest)
        plan = self.arms[0].plan
        self.start = max(self.start_step * plan["samples_per_step"], *pair.positions)
        self.training_samples = (plan["steps"] or 0) * plan["samples_per_step"]
        self.pair_seconds = self.block_samples * sum(each["step"] / each["samples_per_step"] for each in pair.plans)
        if self.training_samples < 2 * (self.start + self.looks[0] * self.block_samples):
            self.later_seconds = 0.0

    def _time_blocks(self, pair: Pair) -> None:
        """Times the blocks of a round: as many as a round has, or until a single round is sure."""
        began, before = time.monotonic(), len(self.arms[0].seconds_per_sample(self.rounds))
        pairs = before
        while pairs < self.most_pairs:
            while pair.plans[0]["evaluation"] is not None and self._evaluation_is_due():
                evaluating = time.monotonic()
                seconds = pair.time_evaluations(order_of(len(self.arms[0].evaluations)))
                self.evaluating += time.monotonic() - evaluating
                for arm, each in zip(self.arms, seconds, strict=True):
                    arm.evaluations.append(each)
            for arm, block in zip(self.arms, pair.time_blocks(self.block_samples, order_of(pairs)), strict=True):
                arm.add_block(block, self.rounds)
            pairs += 1
            self.pair_seconds = (time.monotonic() - began) / (pairs - before)
            self._report()
            self.out_of_budget = pairs >= MIN_PAIRS and self._left() < self.pair_seconds
            if self.out_of_budget or (self.is_single and pairs in self.looks and self._is_decided()):
                return

    def _extend_first_round(self, pair: Pair) -> None:
        """Spends the rest of the budget on the first round, since no other one fits into it."""
        self.is_single, self.most_pairs = True, self.looks[-1]
        pairs = len(self.arms[0].blocks)
        seconds = sum(block["seconds"] for arm in self.arms for block in arm.blocks) / pairs  # without evaluations
        self.look_count = self._count_looks(pairs, pairs + self._left() / seconds)
        if pairs not in self.looks or not self._is_decided():
            self._time_blocks(pair)

    def _count_looks(self, pairs: int, affordable: float) -> int:
        """Number of looks among which a single round divides its error: it has ``pairs`` pairs of blocks, and the
        budget allows ``affordable``.

        In a comparison of a search (``max_rounds`` 1) each sure look ends it, so that each counts. In one that is
        reported only a ratio beyond doubt ends it early; hardly an error comes from there, so these count as one.
        """
        early = sum(pairs <= look < affordable for look in self.looks[:-1])
        return 1 + (early if self.max_rounds == 1 else min(1, early))

    def _is_decided(self) -> bool:
        """Whether a look at a single round ends it.

        In a comparison of a search any verdict does. A ratio that is reported must be beyond doubt: taken at the first
        sure look it would be too large on average.
        """
        return self._judge() != UNSURE and (self.max_rounds == 1 or self._is_beyond_doubt())

    def _is_beyond_doubt(self) -> bool:
        low, high = self.ratio.low, self.ratio.high
        return max(low, 1 / high) > BEYOND_DOUBT and high / low < NARROW

    def _time_sequentially(self, pair: SequentialPair) -> None:
        """Times the blocks of a round of arms that are built one after the other; their evaluations while building."""
        began = time.monotonic()
        left = self._left() - self.build_seconds  # of the second arm
        pairs = min(self.most_pairs, max(MIN_PAIRS, int(left / self.pair_seconds)))
        for arm, plan, blocks in zip(self.arms, pair.plans, pair.time_round(self.block_samples, pairs), strict=True):
            for block in blocks:
                arm.add_block(block, self.rounds)
            if plan["evaluation"] is not None:
                arm.evaluations.append(plan["evaluation"])
        self.pair_seconds = (time.monotonic() - began) / pairs
        self._report()

    def _plan_blocks(self, setup: float) -> None:
        """Before the first block: how many pairs a round has, and whether the budget allows more than one round."""
        self.began, self.build_seconds = time.monotonic(), setup / 2
        left = self._left()
        affordable = int((left / self.min_rounds / SLACK - setup) / self.pair_seconds)
        # two short rounds would know less than a single one: the spread of two is hardly known. But where one arm runs
        # after the other, a drift of the machine cancels only in a second round, in which the other one is first
        needs_two = self.is_sequential and left >= MIN_PAIRS * self.pair_seconds + self._shortest_round(setup)
        self.is_single = self.max_rounds == 1 or (affordable < MIN_PAIRS and not needs_two)
        if self.is_single:
            self.most_pairs = self.looks[-1]
            self.look_count = self._count_looks(0, left / self.pair_seconds)
        else:
            self.look_count = 1  # until it is known how many rounds there are
            self.most_pairs = min(self.looks[0], max(MIN_PAIRS, affordable))

    def _plan_rounds(self, setup: float) -> None:
        """After the first round it is known how many the budget should allow; the error is divided among their looks.

        There may be more in the end, but not more looks.
        """
        further, rest = divmod(self._left(), setup + self.most_pairs * self.pair_seconds)
        further += rest > self._shortest_round(setup)
        self.last_round = min(self.max_rounds, 1 + max(0, int(further)))
        self.look_count = 1 + sum(rounds < self.last_round for rounds in ROUND_LOOKS)  # the last is at the end

    def _shortest_round(self, setup: float) -> float:
        return setup + MIN_PAIRS * self.pair_seconds

    def _decide(self, setup: float) -> None:
        """After a round: sets ``is_over`` if it was the last one; judges the ratio then, and at ROUND_LOOKS."""
        if self.rounds >= self.max_rounds or self.is_single or self._left() < self._shortest_round(setup):
            self.is_over = True
            self.out_of_budget |= self.rounds < self.max_rounds
            self._judge()
        elif self.rounds in ROUND_LOOKS and self.rounds < self.last_round and self._judge() != UNSURE:
            self.is_over = self._is_beyond_doubt() or self.rounds >= self.min_rounds

    def _judge(self) -> str:
        """Sets and returns the verdict from all rounds, with the error of one look."""
        self.ratio = self._with_evaluations(self._ratio_of_steps())
        self.verdict = verdict_of(self.ratio)
        return self.verdict

    def _error(self) -> float:
        """The probability of error of one look, so that all looks together have ``ALPHA`` (Bonferroni)."""
        return ALPHA / self.look_count

    def _ratio_of_steps(self) -> Ratio:
        times = [[arm.seconds_per_sample(number + 1) for arm in self.arms] for number in range(self.rounds)]
        return ratio_of_rounds([(a, b) for a, b in times], self._error())

    def _with_evaluations(self, steps: Ratio) -> Ratio:
        """The ratio of whole runs, from that of the training steps and the timed evaluations."""
        a, b = self.arms
        if not (a.evaluations or a.plan.get("evaluation_seen")):
            return steps
        errors = [math.hypot(arm.evaluation_error(), PROCESS_SPREAD / math.sqrt(2)) for arm in (a, b)]
        shares = a.evaluation_ratio(), b.evaluation_ratio()
        return with_evaluations(steps, shares, errors, degrees_of_rounds(self.rounds), self._error())

    def _evaluation_is_due(self) -> bool:
        """Whether to time evaluations now: as often as a run has them; two before all blocks if they are cheap.

        A script trains on until its next evaluation: then few are timed, and most of the time goes to the blocks.
        """
        if len(self.arms[0].evaluations) < FIRST_EVALUATIONS:
            return self.evaluating <= self.budget / 8
        evaluated = sum(sum(arm.evaluations) for arm in self.arms)
        trained = sum(block["seconds"] for arm in self.arms for block in arm.blocks)
        if self.evaluating > 2 * evaluated + WAITING_SHARE * trained:
            return False
        return trained > 0 and evaluated < fmean(arm.evaluation_ratio() for arm in self.arms) * trained

    def _look_later(self, pair: Pair) -> None:
        """Trains both arms on and times blocks there: the ratio may depend on the position in the training."""
        if self.later_seconds < 2 * MIN_PAIRS * self.pair_seconds:
            return
        pairs = min(self.looks[0], max(MIN_PAIRS, int(self.later_seconds / 3 / self.pair_seconds)))
        began = time.monotonic()
        last = self.training_samples - pairs * self.block_samples
        while time.monotonic() < began + self.later_seconds - pairs * self.pair_seconds:
            position = max(pair.positions) + CHUNK_BLOCKS * self.block_samples
            if position > last:
                break
            self.on_progress("training on, to compare later in the training", 1.0, None)
            pair.run_to(position)
        position = max(pair.positions)
        blocks = [pair.time_blocks(self.block_samples, order_of(number)) for number in range(pairs)]
        a, b = ([block["seconds"] / block["samples"] for block in arm] for arm in zip(*blocks, strict=True))
        ratios = {self.start: self._ratio_of_steps(), position: ratio_of_rounds([(a, b)], self._error())}
        samples_per_step = self.arms[0].plan["samples_per_step"]
        self.by_position = [(round(each / samples_per_step), ratio) for each, ratio in ratios.items()]

    def _change(self) -> str:
        """The end of the sentence ``why``: whether the ratio depends on the position, or why that is unknown."""
        if self.later_failure:
            return f"; later in the training it was not measured: {self.later_failure}"
        if not self.by_position:
            return ""
        (first, early), (later, late) = self.by_position
        if early.low <= late.high and late.low <= early.high:
            return ""
        return f"; the ratio depends on the position: {early.median:.2f} at step {first}, {late.median:.2f} at {later}"

    def _left(self) -> float:
        """Seconds left for rounds."""
        return self.began + self.budget - self.later_seconds - time.monotonic()

    def _report(self) -> None:
        left, (a, b) = max(0.0, self._left()), self.arms
        self.on_progress(f"{a.recipe} against {b.recipe}", 1 - left / (self.budget - self.later_seconds), left)


def order_of(done: int) -> tuple[int, int]:
    """(first arm, second arm), 0 for a, 1 for b, of the pair after ``done`` pairs: ab, ba, ab, ..."""
    return (0, 1) if done % 2 == 0 else (1, 0)

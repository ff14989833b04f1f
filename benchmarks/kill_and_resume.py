"""``kill -9`` at random moments of a run that saves after every step, so that most kills hit a checkpoint; then
``resume``.

Runs ``tests/helpers/killing.py`` as often as requested. The other side is the undisturbed run: weights and log must be
equal to it byte for byte.

Figure: 20 of 20 bit-identical.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from _common import finish, parser, print_progress, show

import hasten

TESTS = Path(__file__).parent.parent / "tests"
FILES = ("model.safetensors", "log.jsonl")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=20)
    options = options.parse_args()
    sys.path.insert(0, str(TESTS))
    from helpers.killing import METHOD, TASK, kill_and_resume

    torch.set_num_threads(1)  # as in the process that resumes the run: sums in another order have other bits
    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = Path(directory) / "undisturbed"
        hasten.train(TASK, METHOD, out=undisturbed, device="cpu")
        for seed in range(options.kills):
            place = Path(directory) / f"run-{seed}"
            place.mkdir()
            kill_and_resume(place, kills=1, seed=seed)
            same = {name: (place / "killed" / name).read_bytes() == (undisturbed / name).read_bytes() for name in FILES}
            outcomes.append({"seed": seed, **same})
            print_progress(
                f"kill {len(outcomes)} of {options.kills}: {'identical' if all(same.values()) else 'DIFFERENT'}"
            )
    identical = {name: sum(outcome[name] for outcome in outcomes) for name in FILES}
    show(("file", "identical", "kills"), [(name, count, len(outcomes)) for name, count in identical.items()])
    reached = all(count == options.kills for count in identical.values())
    return finish(
        options,
        f"{options.kills} of {options.kills} bit-identical; it is {min(identical.values())} of {len(outcomes)}",
        reached,
        {"kills": outcomes},
    )


if __name__ == "__main__":
    sys.exit(main())

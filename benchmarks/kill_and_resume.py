"""``kill -9`` at random moments of a run that saves after every step, so most kills fall into a checkpoint; then ``resume``.

A front to ``tests/engine/test_kill.py``: the same run, killed once and taken up again, as often as is asked for. The
undisturbed run is the other side: weights and log have to be the same, byte for byte.

Figure: 20 of 20 bit-identical.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from _common import finish, parser, show, tell

TESTS = Path(__file__).parent.parent / "tests" / "engine"
FILES = ("model.safetensors", "log.jsonl")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=20)
    options = options.parse_args()
    sys.path.insert(0, str(TESTS))
    from test_kill import killed_and_taken_up, start

    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        if start(undisturbed).wait() != 0:
            raise SystemExit("the undisturbed run failed")
        seed = 0
        while len(outcomes) < options.kills and seed < 2 * options.kills:  # a run that was over before the kill does not count
            place = Path(folder) / f"run-{seed}"
            place.mkdir()
            if killed_and_taken_up(place, kills=1, seed=seed):
                same = {name: (place / "killed" / name).read_bytes() == (undisturbed / name).read_bytes() for name in FILES}
                outcomes.append({"seed": seed, **same})
                tell(f"kill {len(outcomes)} of {options.kills}: {'identical' if all(same.values()) else 'DIFFERENT'}")
            seed += 1
    identical = {name: sum(outcome[name] for outcome in outcomes) for name in FILES}
    show(("file", "identical", "kills"), [(name, count, len(outcomes)) for name, count in identical.items()])
    reached = len(outcomes) == options.kills and all(count == len(outcomes) for count in identical.values())
    return finish(
        options,
        f"{options.kills} of {options.kills} bit-identical; it is {min(identical.values())} of {len(outcomes)}",
        reached,
        {"kills": outcomes},
    )


if __name__ == "__main__":
    sys.exit(main())

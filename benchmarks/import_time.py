"""Start-up time: ``import hasten`` and ``hasten --help``, each in a new process.

The other side: an empty Python process (the bound), ``import torch``, and the help of peers.

Figure: both below 0.3 s, and torch is not imported.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from _common import finish, in_turns, interval, parser, show

FIGURE = 0.3  # seconds
PYTHON = [sys.executable, "-c"]
PROGRAMS = Path(sys.executable).parent
ARMS = {
    "python, no import": [*PYTHON, "pass"],
    "import hasten": [*PYTHON, "import hasten"],
    "hasten --help": [PROGRAMS / "hasten", "--help"],
    "import torch": [*PYTHON, "import torch"],
    "accelerate --help": [PROGRAMS / "accelerate", "--help"],
    "fabric --help": [PROGRAMS / "fabric", "--help"],  # lightning's command line
}
OURS = ("import hasten", "hasten --help")
HEAVY = (
    "import sys, hasten, hasten.cli.main; sys.exit(any(name.partition('.')[0] in ('torch', 'numpy', 'rich') "
    "for name in sys.modules))"
)


def seconds(argv: list) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=12, help="starts of each")
    options = options.parse_args()
    missing = {name: "not installed" for name, argv in ARMS.items() if not Path(argv[0]).exists()}
    arms = {name: (lambda argv=argv: seconds(argv)) for name, argv in ARMS.items() if name not in missing}
    for arm in arms.values():
        arm()  # the first start fills the disk cache
    taken = in_turns(arms, options.rounds)
    found = {name: interval(times) for name, times in taken.items()}
    bound = found["python, no import"].median
    show(
        ("start", "seconds", "times an empty Python"),
        [(name, f"{each:.3f}", f"{each.median / bound:.1f}") for name, each in found.items()]
        + [(name, why, "") for name, why in missing.items()],
    )
    light = subprocess.run([*PYTHON, HEAVY], check=False).returncode == 0
    print(f"\nneither torch nor numpy nor rich is imported by hasten and its command line: {light}")
    reached = light and all(found[name].median < FIGURE for name in OURS)
    worst = max((found[name] for name in OURS), key=lambda each: each.median)
    return finish(
        options,
        f"both below {FIGURE} s; the slower takes {worst:.3f} s (bound: {bound:.3f} s)",
        reached,
        {"seconds": taken, "light": light},
    )


if __name__ == "__main__":
    sys.exit(main())

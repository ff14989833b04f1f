"""Runs the tests in two halves side by side: those across processes, which wait for each other much of the time, and all others.

``python tests/halves.py -m "not slow"``: the words are pytest's. What the second half says comes when the first one is over.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ACROSS = HERE / "launch"
NOTHING_CHOSEN = 5  # pytest's exit code


def main(words: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *words]
    with tempfile.TemporaryFile() as said:
        others = subprocess.Popen([*pytest, HERE, f"--ignore={ACROSS}"], stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.run([*pytest, ACROSS]).returncode, others.wait()]
        finally:
            others.kill()  # where we were stopped
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return max((code for code in codes if code != NOTHING_CHOSEN), default=NOTHING_CHOSEN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

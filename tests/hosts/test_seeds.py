"""Seeds of a script are shifted however it passes them."""

import random
import subprocess
import sys

import pytest

# each line prints a random number after it has seeded in some way
PROGRAM = """
import random, sys
import numpy, torch
from hasten.hosts.inside.seeds import seed_process
from hasten.hosts.inside.sites import Sites
sites = Sites(".")
shift = int(sys.argv[1])
if shift:
    seed_process(shift, sites)
{seeding}
print(torch.rand(1).item(), random.random(), numpy.random.rand())
print(numpy.random.default_rng(seed={seed}).random(), numpy.random.default_rng({seed}).random())
print([(one["type"], one["seed"]) for one in sites.records.get("seeds", [])])
"""
POSITIONAL = "torch.manual_seed({0}); random.seed({0}); numpy.random.seed({0})"
BY_KEYWORD = "torch.manual_seed(seed={0}); random.seed(a={0}); numpy.random.seed(seed={0})"
OF_NUMPY = "torch.manual_seed(numpy.int64({0})); random.seed({0}); numpy.random.seed(numpy.uint8({0}))"


def outcome(shift: int, seeding: str, seed: int) -> list[str]:
    program = PROGRAM.format(seeding=seeding.format(seed), seed=seed)
    done = subprocess.run([sys.executable, "-c", program, str(shift)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("seeding", [POSITIONAL, BY_KEYWORD, OF_NUMPY])
def test_seed_is_shifted_and_noted(seeding):
    shifted, plain = outcome(100_000, seeding, 5), outcome(0, POSITIONAL, 100_005)
    assert shifted[:2] == plain[:2]
    for name in ("torch.manual_seed", "random.seed", "numpy.random.seed", "numpy.random.default_rng"):
        assert f"('{name}', 5)" in shifted[2]


def test_seed_of_the_system_is_noted():
    found = outcome(2, "random.seed(a=None); numpy.random.seed()", 5)[2]
    assert "('random.seed', None)" in found and "('numpy.random.seed', None)" in found


def test_text_as_a_seed_stays():
    random.seed("words")
    assert str(random.random()) in outcome(2, "random.seed(a='words')", 5)[0]

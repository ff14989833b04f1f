# make demo         sets up, tunes the digits task, prints where the report is
# make test         sets up, checks the style, runs the quick tests
# make test-slow    the slow tests but those that measure time and the soak tests
# make test-timing  the slow tests that measure time, one after the other
# make test-all     the quick and the slow tests; everything but soak tests
# make test-matrix  the quick tests on supported pairs of PyTorch and Python that can be installed
# make lint         the style and the order of imports
# make types        pyright
# make chaos        kills ranks and nodes of a training, 30 times each
# make soak         the tests and the benchmark that run for a long time
# make bench        the measurements on the CPU; takes hours
# make test-gpu     the tests that take an NVIDIA GPU; without one it says so and does nothing
# make bench-gpu    the measurements on an NVIDIA GPU, with records; without one it says so and does nothing
# make docs         the documentation site, in build/site
# make slowest      the 50 slowest quick tests
# make wheel        the wheel, in dist
# make clean        removes .venv, build and dist
#
# Everything is installed into .venv; a second call finds it done. PYTHON=python3.12 selects another Python.

PYTHON ?= python3
# Test processes. Two are what the suite is measured with; more help where there are more cores.
WORKERS ?= 2
BIN    := .venv/bin
# The default package index offers PyTorch with CUDA, several GB of it. A machine without an NVIDIA driver gets the small CPU build.
CPU_INDEX := https://download.pytorch.org/whl/cpu

# Left out, to be run by themselves: public_scripts, tuned_public, repeated_claims (need checkouts of public scripts), budget_kept (90 minutes), long_trainings (20 minutes a workload), tuned_scripts (50 minutes), planted_harms (hours with --real).
BENCHMARKS := import_time engine_overhead recording_overhead denormals effect_check a_against_a planted seeds_needed harmful_methods kill_and_resume watching time_to_target against_loadtune int8 serving graph_sampling graph_epoch maxk maxk_accuracy graph_partition ddp_scaling zero_memory checkpoint_stall slow_network parameter_server \
  data_images_in_memory data_tables data_jpeg data_tfrecord data_tokens data_resume data_place data_wait data_soak

# Tests start hundreds of interpreters, and each would compile hasten anew.
unexport PYTHONDONTWRITEBYTECODE

# Each step is a command of its own and takes at most 10 minutes; docs/gpu.md says what they show.
GPU_STEPS := environment self_comparison planted suspended memory largest_batch hand_over launch_bound gpt copies short_batch checkpoint tune_digits tune_text tune_gpt_script tune_cnn_script tune_small_script
HAS_GPU   := nvidia-smi >/dev/null 2>&1 || { echo "there is no NVIDIA GPU here: nothing was run"; exit 0; }; \
  $(MAKE) .venv/ready-dev && $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
  { echo "the PyTorch in .venv cannot use the NVIDIA GPU of this machine"; exit 1; }

.PHONY: demo test test-all test-slow test-timing test-gpu test-matrix slowest chaos soak lint types docs bench bench-gpu wheel clean

demo: .venv/ready
	$(BIN)/hasten tune digits --out runs/demo || [ $$? -eq 1 ]  # 1: an honest "no improvement"; there is a report about that too
	@page=$$($(BIN)/hasten report runs/demo) && echo "report: $$page"

# Tests that fail run once more with nothing beside them: what fails then has failed.
AGAIN := --last-failed --last-failed-no-failures=none

test: .venv/ready-dev lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" --durations=10 \
	  || $(BIN)/python -m pytest -m "not slow" $(AGAIN)

# Slow tests that measure time run alone from the start: what they measure would be the other tests' load.
test-all: test test-slow test-timing

# PART=1/3 runs a third of them; 1/3, 2/3 and 3/3 together are all.
PART ?= 1/1

test-slow: .venv/ready-dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not soak and not timing" --part $(PART) --durations=10 \
	  || $(BIN)/python -m pytest -m "slow and not soak and not timing" --part $(PART) $(AGAIN)

test-timing: .venv/ready-dev
	$(BIN)/python -m pytest -m "timing and slow and not soak" --durations=10 \
	  || $(BIN)/python -m pytest -m "timing and slow and not soak" $(AGAIN)

test-gpu:
	@$(HAS_GPU); for part in "gpu and not slow" "gpu and slow"; do \
	    HASTEN_GPU_TESTS=1 timeout 600 $(BIN)/python -m pytest -m "$$part" --durations=10 || exit 1; done

bench-gpu:
	@$(HAS_GPU); for step in $(GPU_STEPS); do echo "== $$step"; \
	    timeout 600 $(BIN)/python benchmarks/gpu_steps.py $$step --json records || missed="$$missed $$step"; done; \
	  [ -z "$$missed" ] || { echo "figures not reached:$$missed"; exit 1; }

slowest: .venv/ready-dev
	$(BIN)/python -m pytest -m "not slow" -q -r "" --durations=50 --durations-min=1

# Installs up to 5 GB for each pair whose torch has no CPU build at the package index, in .matrix. MATRIX='--cpu-only'
# leaves these pairs out, MATRIX='--remove' removes each environment after its tests, MATRIX='--pairs 2.15/3.13' selects.
test-matrix:
	$(PYTHON) tests/matrix.py $(MATRIX)

chaos: .venv/ready-dev
	PYTHONPATH=tests $(BIN)/python -m helpers.chaos --kills 30
	PYTHONPATH=tests $(BIN)/python -m helpers.chaos --kills 30 --machines

soak: .venv/ready-dev
	$(BIN)/python -m pytest -m soak
	$(BIN)/python benchmarks/data_soak.py

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/ready-dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: .venv/ready-dev
	$(BIN)/mkdocs build --strict

bench: .venv/ready-bench
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python "benchmarks/$$name.py" || missed="$$missed $$name"; done; \
	  [ -z "$$missed" ] || { echo "figures not reached:$$missed"; exit 1; }

wheel: .venv/ready-dev
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

clean:
	rm -rf .venv build dist src/*.egg-info

.venv/ready: constraints.txt pyproject.toml | .venv/torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/ready-dev: constraints.txt pyproject.toml | .venv/torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ .venv/ready

.venv/ready-bench: constraints.txt pyproject.toml | .venv/torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	@touch $@ .venv/ready .venv/ready-dev

# Without a driver, and unless pip is told where wheels lie (PIP_FIND_LINKS, or find-links in its configuration), the CPU
# build is tried once and quickly; where that fails, the ordinary installation that follows gets PyTorch from the package index.
.venv/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "hasten needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -1); try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@if ! $(BIN)/pip config list | grep find-links >/dev/null && ! nvidia-smi >/dev/null 2>&1; then \
	  echo "no NVIDIA driver: trying PyTorch's CPU build"; \
	  $(BIN)/pip install --quiet --no-deps --retries 0 --timeout 10 --index-url $(CPU_INDEX) -c constraints.txt torch 2>/dev/null \
	    || echo "not there; the package index will do"; \
	fi
	@touch $@

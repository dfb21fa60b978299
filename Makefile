# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
APT := $(shell command -v apt-get 2>/dev/null)

# Images for containers forbid bytecode; then each of hundreds of processes would compile all of our modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all check docs bench clean kernels lane-ranks lane-commands lane-labs lane-trainers lane-computes lane-computes_early lane-crews lane-laws lane-judges lane-types

# On a terminal pip shows its own progress; elsewhere a line for each of the long things has to do.
QUIET := $(shell test -t 2 || echo -q)

# The CPU build of torch is a fifth of the size of the default one; where pip has no such build of this version at hand,
# PyTorch's own index of CPU builds can be given: make test PIP_EXTRA="--index-url URL-OF-THE-CPU-INDEX".
$(VENV)/.installed: pyproject.toml requirements-dev.txt
	@echo "Preparing $(VENV): PyTorch and some tools are installed with pip. That takes minutes, and is done once."
	@test -x $(BIN)/pip || ! command -v $(PYTHON) >/dev/null || $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "gossamer needs Python 3.11 or later, and $(PYTHON) is older: name another one, as in make demo PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || (test -n "$(APT)" && apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV))
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "Installing $(TORCH), the largest of them"; $(BIN)/pip install $(QUIET) --disable-pip-version-check $(PIP_EXTRA) $(TORCH); }
	@echo "Installing the tools of requirements-dev.txt"
	@$(BIN)/pip install $(QUIET) --disable-pip-version-check -r requirements-dev.txt
	@echo "Installing gossamer"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The demo shapes a network with ip and tc; without them it still runs, and says what that means.
.network-tools:
	@command -v tc >/dev/null && command -v ip >/dev/null || (test -n "$(APT)" && test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq iproute2) || true
	@touch $@

demo: $(VENV)/.installed .network-tools
	@echo "Nine recipes train in turns, on four hosts with links of 200 Mbit/s, until they are as good as DDP. That takes minutes."
	$(BIN)/gossamer compare ddp bf16 qsgd eden "terngrad(last='qsgd')" topk powersgd 'scatter(qsgd()) + local_sgd(8)' 'scatter(qsgd()) + local_sgd(16)' --hosts 4 --rate 200mbit --steps 50 --out runs/demo

# Kinds of tests (see tests/conftest.py), five at a time, also on two cores: ranks, commands and labs wait for a fifth of
# their time, and what only computes takes what they leave. So it gives way to them: ranks with a deadline should not be
# late because of it. Who is through with one takes the next. Of those that wait and of those that compute the longest come
# first, so that no long one is left alone with one core at the end. The first shows its dots, and what the others say comes
# when they are through.
LANES := ranks commands labs computes laws computes_early crews judges trainers types
GIVES_WAY := nice -n 5

test: $(VENV)/.installed .network-tools
	$(BIN)/ruff check -q src tests benchmarks campaigns examples
	$(BIN)/ruff format -q --check src tests benchmarks campaigns examples
	$(BIN)/lint-imports --no-cache
	@$(MAKE) --no-print-directory -k -j5 $(LANES:%=lane-%)

# Compiled by one process, where they are not yet: or every lane, and every rank that a test starts, would compile them too.
kernels:
	@$(BIN)/python -c "import gossamer; gossamer.warmup()"

lane-ranks lane-commands lane-labs lane-trainers lane-computes lane-computes_early lane-crews lane-laws lane-judges: kernels

lane-ranks:
	@$(BIN)/python -m pytest -m "ranks and not slow"

lane-computes lane-computes_early lane-laws: NICE := $(GIVES_WAY)
lane-commands lane-labs lane-trainers lane-computes lane-computes_early lane-crews lane-laws lane-judges: lane-%:
	@$(NICE) $(BIN)/python -m pytest -m "$* and not slow" >$(VENV)/$*.log 2>&1; code=$$?; cat $(VENV)/$*.log; exit $$code

lane-types:
	@$(GIVES_WAY) $(BIN)/pyright

# What takes long: full products of parts, statistics; more examples where they are drawn; and all kinds of arguments for the
# programs for GPUs, with the Triton of torch 2.13, which is installed, with those of torch 2.6 and 2.11, and with the newest:
# each is a compiler of its own.
DRAWN := tests/kernels tests/core tests/data tests/codecs tests/recipe tests/costs tests/bench/workloads tests/bench/lab/test_rates.py tests/laws/test_codec_laws.py
OTHERS := 3.2.0 3.6.0 3.9.0
test-all: test
	$(BIN)/python -m pytest -m slow
	GOSSAMER_WIDE=1 $(BIN)/python -m pytest -m "not slow" $(DRAWN)
	@for v in $(OTHERS); do \
	  test -d $(VENV)/triton-$$v || $(BIN)/pip install -q --disable-pip-version-check --no-deps --target $(VENV)/triton-$$v triton==$$v || exit 1; \
	  GOSSAMER_WIDE=1 PYTHONPATH=$(VENV)/triton-$$v $(BIN)/python -m pytest tests/kernels/test_compiled.py || exit 1; \
	done

docs: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check sphinx myst-parser furo
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html

bench: $(VENV)/.installed
	$(BIN)/gossamer bench kernels

clean:
	rm -rf $(VENV) .network-tools docs/_build

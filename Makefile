# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
APT := $(shell command -v apt-get 2>/dev/null)

.PHONY: demo test test-all check docs bench clean

# The CPU build of torch is a fifth of the size of the default one; where pip has no such build of this version at hand,
# PyTorch's own index of CPU builds can be given: make test PIP_EXTRA="--index-url URL-OF-THE-CPU-INDEX".
$(VENV)/.installed: pyproject.toml requirements-dev.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || (test -n "$(APT)" && apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV))
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check $(PIP_EXTRA) $(TORCH)
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The demo shapes a network with ip and tc; without them it still runs, and says what that means.
.network-tools:
	@command -v tc >/dev/null && command -v ip >/dev/null || (test -n "$(APT)" && test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq iproute2) || true
	@touch $@

demo: $(VENV)/.installed .network-tools
	$(BIN)/gossamer compare ddp bf16 qsgd terngrad topk powersgd slowmo sgp --hosts 4 --rate 200mbit --steps 50 --out runs/demo

test: $(VENV)/.installed .network-tools
	$(BIN)/ruff check -q src tests benchmarks campaigns
	$(BIN)/ruff format -q --check src tests benchmarks campaigns
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright
	@# Two test processes: one starts commands and ranks and waits for them, the other computes; its output comes last.
	@($(BIN)/python -m pytest -m "not processes and not crews and not slow"; laws=$$?; \
	  $(BIN)/python -m pytest -m "crews and not slow"; test $$? = 0 -a $$laws = 0) >$(VENV)/laws.log 2>&1 & laws=$$!; \
	$(BIN)/python -m pytest -m "processes and not slow"; processes=$$?; \
	wait $$laws; laws=$$?; cat $(VENV)/laws.log; test $$processes = 0 -a $$laws = 0

# What takes long: full products of parts, statistics; and all kinds of arguments for the programs for GPUs, with this
# Triton and with that of torch 2.6.
OLDEST := $(VENV)/triton-3.2.0
test-all: test
	$(BIN)/python -m pytest -m slow
	GOSSAMER_WIDE=1 $(BIN)/python -m pytest tests/kernels/test_compiled.py
	@test -d $(OLDEST) || $(BIN)/pip install -q --disable-pip-version-check --no-deps --target $(OLDEST) triton==3.2.0
	GOSSAMER_WIDE=1 PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest tests/kernels/test_compiled.py

docs: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check sphinx myst-parser furo
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html

bench: $(VENV)/.installed
	$(BIN)/gossamer bench kernels

clean:
	rm -rf $(VENV) .network-tools docs/_build

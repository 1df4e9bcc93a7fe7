# `make` alone prints what there is to make.
.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV := .venv
LOCKS := requirements.lock requirements-dev.lock
# A new lock makes a new stamp, whatever the files' times say.
LOCK_DIGEST := $(shell cat $(LOCKS) pyproject.toml scripts/environment | sha256sum | cut -c1-16)
STAMP := $(VENV)/installed-$(LOCK_DIGEST)
# Triton, where torch has brought none: a GB that serving on a CPU has no use for, and the tests of its kernels have.
TRITON := $(VENV)/triton-$(shell sha256sum requirements-triton.lock | cut -c1-16)
# matplotlib draws the pictures of `bench-cases`; nothing else needs it.
PLOTS := $(VENV)/plots-$(shell sha256sum requirements-plots.lock | cut -c1-16)
# atheris has the fuzzer's native library; tests do the same with hypothesis.
FUZZ := $(VENV)/fuzz-$(shell sha256sum requirements-fuzz.lock | cut -c1-16)
MODEL ?= smollm2-135m-instruct
BENCHES := paging step static_batch
PEERS :=
# The whole suite: each of two workers takes a file of tests at a time, in order of their names, by which the small come last.
ALL_TESTS := --numprocesses logical --maxprocesses 2 --dist loadfile --no-loadscope-reorder
PACKAGES := client kernels engine daemon tui scale bench

.PHONY: help
help:  ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: kernels
kernels: $(STAMP)  ## build the C++ kernels for this machine, once (half a minute)
	@$(VENV)/bin/python -P -m pagedd.kernels.cpu

.PHONY: run
run: kernels  ## set up, fetch the default model, start the daemon in the foreground (ARGS="--flag ...")
	@$(VENV)/bin/pagectl pull $(MODEL) >/dev/null
	@echo "pagedd: starting; once it is ready: $(CURDIR)/$(VENV)/bin/pagectl generate 'Once upon a time'"
	@exec $(VENV)/bin/pagedd --model $(MODEL) $(ARGS)

.PHONY: test
test: kernels $(TRITON)  ## set up and run the tests, on two cores if there are; with ARGS="-k name" on one
	@$(VENV)/bin/pytest $(or $(ARGS),$(ALL_TESTS))

.PHONY: test-kernels
test-kernels: $(STAMP) $(TRITON)  ## run the Triton kernels over all their shapes, interpreted (ARGS="-k name")
	@OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/kernels/triton -m "kernels or not kernels" $(ARGS)

.PHONY: kernels-aot
kernels-aot: $(STAMP) $(TRITON)  ## compile the Triton kernels for every GPU, without one (ARGS="--ops linear --archs 90")
	@$(VENV)/bin/python -P -m pagedd.bench.kernels_aot $(ARGS)

.PHONY: lint
lint: $(STAMP) $(TRITON) .typing  ## ruff, the format check, and mypy in strict mode
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy -p pagedd

.PHONY: format
format: $(STAMP)  ## let ruff rewrite the sources
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

.PHONY: bench
bench: $(STAMP)  ## run the benchmarks and print their tables (BENCHES="accuracy" for one that takes long)
	@for bench in $(BENCHES); do echo "== $$bench"; $(VENV)/bin/python -P -m pagedd.bench.$$bench || exit; done

.PHONY: bench-cases
bench-cases: $(STAMP) $(PLOTS)  ## rerun three published comparisons with each mechanism off and on, and draw them into docs/
	@$(VENV)/bin/python -P -m pagedd.bench.cases --pictures docs $(ARGS)

.PHONY: bench-peers
bench-peers: $(STAMP)  ## measure pagedd against the servers in PEERS=DIR, in turn, three rounds (ARGS="--rounds 1")
	@$(VENV)/bin/python -P -m pagedd.bench.serving --peers "$(or $(PEERS),$(error give the folder of the peers: make bench-peers PEERS=DIR))" $(ARGS)

.PHONY: soak
soak: kernels  ## half an hour of random clients and faults against a real daemon (ARGS="--seconds 300 --seed 2")
	@$(VENV)/bin/python -P -m pagedd.bench.soak $(ARGS)

.PHONY: fuzz
fuzz: $(STAMP) $(FUZZ)  ## a million inputs for whatever reads bytes from outside (ARGS="--runs 10000 --only http_heads")
	@$(VENV)/bin/python -P -m pagedd.bench.fuzz $(ARGS)

.PHONY: screenshots
screenshots: $(STAMP)  ## draw the README's pictures of pagetop from its demo into docs/
	@$(VENV)/bin/python -P scripts/screenshots.py docs

.PHONY: install
install:  ## as root: install under /opt/pagedd with the systemd service (DESTDIR, PREFIX, INSTALL_VENV)
	@scripts/install

.PHONY: uninstall
uninstall:  ## as root: remove what install put there; settings, state and models stay
	@scripts/uninstall

.PHONY: clean
clean:  ## remove the environment and every cache in this folder
	rm -rf $(VENV) .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@scripts/environment $(VENV) $(LOCKS)
	@$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(TRITON): $(STAMP)
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || { echo "pagedd: installing Triton for the tests (about 290 MB)"; \
		$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements-triton.lock; }
	@touch $@

$(PLOTS): $(STAMP)
	@$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements-plots.lock
	@touch $@

$(FUZZ): $(STAMP)
	@$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements-fuzz.lock
	@touch $@

# mypy finds a package by its folder's name, and the package here is called pagedd.
.typing:
	@mkdir -p $@/pagedd
	@for package in $(PACKAGES); do ln -sfn ../../$$package $@/pagedd/$$package; done

# `make` says what there is. Everything is set up on first use, in .venv; .venv-proto holds the stub generator.

PYTHON_PACKAGES := $(wildcard speculative outrider verifier_service drafter_service retrieval_service orchestrator training benchmarks)
BENCH ?= offline
SEEDS ?= 100000
SEED ?= 0
FUZZ_INPUTS ?= 1000000
FUZZ_SECONDS ?= 14400
PREVIOUS ?= HEAD

# One thread per process: processes that each compute on all cores stall one another.
export OMP_NUM_THREADS ?= 1

.PHONY: help run test test-slow test-long kernel-check gpu-proof lint proto proto-check bench simulate chaos chaos-check upgrade-check fuzz fuzz-check dist wheels docs clean

help: ## What there is to make
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 14

run: ## Serve the embedded pair and complete held-out prompts; exits non-zero unless all ids are right
	@scripts/run

test: ## The tests, but those that take long
	@scripts/setup test
	.venv/bin/python -m pytest -n 3 --dist worksteal --durations 40 -m "not slow and not long and not fuzz" $(PYTEST_ARGS)

test-slow: ## Those that take long: more than five seconds each
	@scripts/setup test
	.venv/bin/python -m pytest -n 2 --dist worksteal --durations 40 -m slow $(PYTEST_ARGS)

test-long: ## Benchmarks run small, and a thousand simulated scenarios: about a minute each
	@scripts/setup test
	.venv/bin/python -m pytest -n 2 --dist worksteal --durations 40 -m long $(PYTEST_ARGS)

kernel-check: ## The GPU kernel's tests on the CPU, in Triton's interpreter
	@scripts/kernel-check

gpu-proof: ## All that shows the GPU path right without a GPU: replays, counts, every kernel for four architectures
	@GPU_PROOF=1 KERNEL_TESTS=tests/gpu scripts/kernel-check -rP

lint: ## Lint, format, types
	@scripts/setup test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(PYTHON_PACKAGES)

proto: ## Generate outrider/v1 from proto/
	@scripts/proto write

proto-check: ## Whether outrider/v1 is what proto/ generates
	@scripts/proto check

bench: ## A benchmark: make bench BENCH=offline
	@scripts/setup run
	.venv/bin/outrider bench $(BENCH)

simulate: ## A hundred thousand scenarios of faults in virtual time: make simulate SEEDS=100000 SEED=0
	@scripts/setup run
	.venv/bin/outrider bench simulate --seed $(SEED) --seeds $(SEEDS)

chaos: ## Ten minutes of killing, freezing and slowing every service; status 1 unless no stream noticed
	@scripts/setup run
	.venv/bin/outrider bench chaos --json --check --seconds 600 $(CHAOS_ARGS)

chaos-check: ## The same for a minute
	@scripts/setup run
	.venv/bin/outrider bench chaos --json --check --seconds 60 $(CHAOS_ARGS)

upgrade-check: ## Every process to this checkout and back beside the previous release: make upgrade-check PREVIOUS=REVISION
	@scripts/setup run
	.venv/bin/outrider bench upgrade --json --check --previous $(PREVIOUS) $(UPGRADE_ARGS)

fuzz: ## A million hostile inputs over both fronts, beside another tenant's streams: make fuzz FUZZ_INPUTS=1000000
	@scripts/setup test
	FUZZ_INPUTS=$(FUZZ_INPUTS) FUZZ_SECONDS=$(FUZZ_SECONDS) .venv/bin/python -m pytest -n 0 -m fuzz tests/fuzz $(PYTEST_ARGS)

fuzz-check: ## The same for a minute
	@scripts/setup test
	FUZZ_SECONDS=60 .venv/bin/python -m pytest -n 0 -m fuzz tests/fuzz $(PYTEST_ARGS)

dist: ## The wheel, with the embedded pair in it: dist/outrider-VERSION-py3-none-any.whl
	@scripts/dist

wheels: ## Which platforms and Pythons have wheels of the dependencies of client and command line
	@scripts/setup run
	@.venv/bin/python scripts/wheels

docs: ## The documentation as a self-contained site: build/docs/index.html
	@scripts/docs

clean: ## Remove the environments and caches
	rm -rf build dist .venv .venv-docs .venv-proto .venv-triton .venv*.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

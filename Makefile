# Everything that is done to this project: `make help`. The environment lies in .venv and is made on first use.
# PYTHON and CXX name interpreter and compiler; pip's settings and variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS and the others) reach pip as they are.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
MODEL ?= smollm2-135m-instruct
ARGS ?=
OUT ?=
PEERS := openvino vllm transformers llamacpp
# Files are shared out among processes, one more than there are cores, since tests also wait: for services to start, for
# a limit of time to pass. The tests of one file share its models and run in one. A process that crashes ends the run and
# is named: pytest-xdist 3.8 can wait for ever once it has replaced one (its issue 784).
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help env demo serve model test test-full check fix protos baseline chaos soak sanitize bench bench-envs bench-peers gpu-check clean
# One goal after the other, also under -j: they share the environment and the ports.
.NOTPARALLEL:

help: ## show this
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  MODEL=$(MODEL) names the model of demo and serve; ARGS="..." adds flags of `octavo demo`, `octavo up` or pytest.'

env: $(STAMP) ## make the environment in .venv

$(STAMP): pyproject.toml constraints-common.txt constraints-cpu.txt constraints-gpu.txt scripts/make_env.sh
	@bash scripts/make_env.sh $(VENV)
	@touch $@

demo: $(STAMP) ## fetch a small model, serve it with three services, stream one chat, stop
	@$(BIN)/octavo demo $(MODEL) $(ARGS)

serve: $(STAMP) ## serve MODEL until Ctrl-C and print client commands
	@$(BIN)/octavo up $(MODEL) $(ARGS)

model: $(STAMP) ## fetch the model that the tests compare with
	@$(BIN)/octavo pull smollm2-135m-instruct

test: model ## run the tests
	@$(PYTEST) -m 'not full' $(ARGS)

test-full: model ## run all tests, the slow ones too, and look further for counterexamples
	@HYPOTHESIS_PROFILE=thorough $(PYTEST) $(ARGS)

check: $(STAMP) ## check style, types, import rules, contracts, stubs and file sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/python -m pytest -q tests/contract

fix: $(STAMP) ## put right what `make check` can put right by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## make the Python stubs again from protos/
	$(BIN)/python scripts/make_stubs.py .

baseline: $(STAMP) ## at a release: hold today's contracts against later ones
	$(BIN)/buf build protos --output protos/baseline.binpb

chaos: $(STAMP) ## watch streams go on while services are killed, stopped and cut off
	@$(BIN)/python bench/chaos.py --show --seconds 60 --requests 60 $(ARGS)

soak: $(STAMP) ## half an hour of faults: nothing fails, nothing leaks, memory stays flat
	@mkdir -p .bench
	@$(BIN)/python bench/chaos.py --minutes 30 --seconds 60 --requests 200 --json $(or $(OUT),.bench/soak.json) $(ARGS)

# One test compares the bits of NaN, whose sign is the compiler's choice of operands, and this is another compilation.
sanitize: $(STAMP) ## run the kernels' tests where an access outside of an array ends the run (g++)
	@bash scripts/sanitize.sh $(BIN)/python -m pytest -m 'not full' tests/kernels tests/unit/executor_svc \
		--ignore=tests/kernels/triton_set --ignore=tests/unit/executor_svc/parallel \
		--deselect tests/kernels/test_gelu.py::test_rows_and_nan_are_by_themselves $(ARGS)

bench: $(STAMP) ## measure how fast Octavo serves, against the floor of this machine, into OUT
	@mkdir -p .bench
	@$(BIN)/python bench/serve.py --json $(or $(OUT),.bench/serve.json) $(ARGS)

# A peer that cannot be installed here must not keep the others from being measured: it is reported with the figures.
bench-peers: $(STAMP) ## measure Octavo beside its peers, in turns, into OUT and a picture (hours)
	@mkdir -p .bench
	@$(MAKE) --no-print-directory --keep-going bench-envs || true
	@$(BIN)/python bench/peers.py --json $(or $(OUT),.bench/peers.json) $(ARGS)

gpu-check: $(STAMP) ## check and measure the Triton kernels on the GPU at hand, into OUT
	@$(BIN)/python tests/gpu/gpu_check.py $(or $(OUT),.bench/gpu)

bench-envs: $(PEERS:%=.bench/%/.made) ## make an environment for each peer in .bench (8 GB)

.bench/%/.made: bench/envs/%.txt bench/envs/make_env.sh
	@mkdir -p .bench
	@bash bench/envs/make_env.sh $*
	@touch $@

clean: ## remove the environments and everything made; fetched models stay
	rm -rf $(VENV) .bench build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two commands set up everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Big activations otherwise page-fault on every allocation on glibc.
export MALLOC_MMAP_MAX_ := 0
export MALLOC_TRIM_THRESHOLD_ := 100000000000

.PHONY: demo test check gpu-check install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

DEMO_DATA := --max-tokens 8192 --decode-tokens 1024 --capture demo-results/capture
DEMO_LOAD := --balancer static,moeless-roofline --num-prompts 16 --output-len 16 --max-concurrency 8

demo: install  ## profile the bundled model, tune its predictors, compare balancers on two ranks, serve an answer
	$(BIN)/moeless profile checkpoints/demo-moe $(DEMO_DATA) --out demo-results/profile
	$(BIN)/moeless finetune checkpoints/demo-moe $(DEMO_DATA) --threshold 0.9 --out demo-results/predictors
	$(BIN)/moeless bench layers --balancers static,moeless-roofline --iterations 6 --out demo-results/layers
	$(BIN)/moeless bench serve --model checkpoints/demo-moe --predictors demo-results/predictors $(DEMO_LOAD) --out demo-results/bench-serve
	$(BIN)/python benchmarks/demo.py checkpoints/demo-moe --predictors demo-results/predictors --out demo-results/serve

check: install  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-check: install  ## one GPU: is the engine exact on it, and what do experts cost
	$(BIN)/python -m moeless.bench.gpu_check

test: check  ## everything CI runs
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

clean:
	rm -rf $(VENV) demo-results gpu-check

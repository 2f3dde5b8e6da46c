.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PRODUCT := $(VENV)/.product
# A busy two-core machine loses up to 3.5x to spinning OpenMP threads.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export TOKENIZERS_PARALLELISM := false

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 22

setup: $(STAMP)  ## the environment in .venv, with the developers' tools

$(PRODUCT): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftlab needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --upgrade pip
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[gguf]'
	@# pip would compile all modules (40 CPU seconds); this import compiles those that are used.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import draftlab.pipeline.pipeline'
	touch $@

$(STAMP): $(PRODUCT)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(PRODUCT)  ## train, measure and export an EAGLE3 head for the embedded target (minutes)
	$(BIN)/draftlab run recipes/quickstart.yaml

real: $(PRODUCT)  ## SmolLM2-135M-Instruct (98 MB): measures the head that ships; with a GPU trains one
	target=$$($(BIN)/python data_prep/smollm2.py) && \
	if $(BIN)/python -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; \
	then $(BIN)/draftlab eval --head heads/smollm2 --target "$$target" \
		--suite recipes/questions.jsonl --k 2,3 --temps 0 --out runs/real $(ARGS); \
	else $(BIN)/draftlab run recipes/smollm2_eagle3.yaml target="$$target" $(ARGS); fi

test: setup  ## the CPU tests
	$(BIN)/python -m pytest -n 2 tests

test-slow: setup  ## the CPU tests of more than ten seconds that `make test` leaves out
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu' tests

lint: setup  ## style and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Parity is of the latest run's head; ARGS='--head FOLDER --target FOLDER' names another. An
# environment that cannot be installed is said and skipped (status 77).
OR_SKIPPED := || test $$? -eq 77
SPECULATORS := $(BIN)/python eval/parity/parity_speculators.py
VLLM := $(BIN)/python eval/parity/parity_vllm.py
LLAMACPP := $(BIN)/python eval/parity/parity_llamacpp.py
TRANSFORMERS := $(BIN)/python eval/parity/parity_transformers.py

parity-vllm: setup  ## T = 0 equal to a real vLLM, T = 0.7 and 1.5 within intervals (3.4 GB)
	$(VLLM) --k 3 $(ARGS) && $(VLLM) --k 5 $(ARGS) && \
	$(VLLM) --head reference --random 'dflash|dspark' --prompts 2 --max-new-tokens 32 $(OR_SKIPPED)

parity-transformers: setup  ## T = 0 equal to transformers' own generate, with and without drafts
	$(TRANSFORMERS) $(ARGS)

parity-llamacpp: setup  ## T = 0 equal to a real llama.cpp (builds it from source, 6 to 20 minutes)
	$(LLAMACPP) --quantized Q4_K_M $(ARGS) && \
	$(LLAMACPP) --random eagle3 --prompts 4 --max-new-tokens 48 $(ARGS) $(OR_SKIPPED)

parity-speculators: setup  ## logits equal to the speculators library (own environment)
	$(SPECULATORS) $(ARGS) && \
	$(SPECULATORS) --random --prompts 3 --max-new-tokens 32 --steps 4 $(ARGS) $(OR_SKIPPED)

parity-serving: setup  ## calibration files and schedules as SGLang and vLLM read them
	eval/parity/setup_serving.sh && $(BIN)/python -m pytest -n 0 tests/eval/test_parity_serving.py

parity-check: setup  ## what the checks run of them: speculators, and a vLLM that is installed already
	$(SPECULATORS) --head reference --prompts 3 --max-new-tokens 32 && \
	$(SPECULATORS) --head reference --prompts 3 --max-new-tokens 32 --steps 4 \
		--random 'norm_before_residual|qwen3: (dspark, 2 layers, 4|dflash, 1)' $(OR_SKIPPED)
	if eval/parity/setup_vllm.sh --check; then \
		$(VLLM) --head reference --prompts 4 --max-new-tokens 32 --random \
			'llama: (eagle3$$|peagle, 1 layer$$|dflash, 2 layers, 5|dspark, 2 layers, 7)'; \
	else echo 'SKIPPED: tokens and counters of vLLM, which is not installed'; fi

clean:  ## build products and caches (runs/ and the environments stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

.PHONY: help setup quickstart real test test-slow lint parity-vllm parity-transformers parity-llamacpp \
	parity-speculators parity-serving parity-check clean

# Everything happens in .venv, which the first target makes. Nothing is installed again until pyproject.toml, setup.py
# or TORCH changes.
PYTHON ?= python3
OUT ?= out/demo.mp4
PROMPT ?= a large red circle moves right slowly on a white background
# Which torch to install, e.g. TORCH=torch==2.13.0. Left out, it is the one chosen last time, at first torch>=2.11.
TORCH ?= $(or $(shell cat .venv/torch.txt 2>/dev/null),torch>=2.11)
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
API := bc_diffusers $(addprefix bc_diffusers.,pipelines cache attention models ops checkpoints info video_io)
SOURCES := $(wildcard bc_diffusers pipelines demo kernels)

.DEFAULT_GOAL := help
.PHONY: help demo test serve docs lint wheel install install-test clean FORCE
.DELETE_ON_ERROR:

help: ## list the targets
	@echo 'make TARGET [TORCH=torch==2.13.0] [PYTHON=python3.12]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 \2/p' Makefile | awk '{ name = $$1; $$1 = ""; printf "  %-13s%s\n", name, $$0 }'

demo: .venv/installed ## generate a video with the embedded model: out/demo.mp4 (OUT=, PROMPT=)
	@mkdir -p $(dir $(OUT))
	$(BIN)/bc-diffusers generate "$(PROMPT)" -o $(OUT)
	@echo "The video is $(abspath $(OUT))"

test: .venv/installed-test ## run the tests (PYTEST_ARGS="-k cache")
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS)

serve: .venv/installed-demo ## open the web demo
	$(BIN)/bc-diffusers serve

docs: .venv/installed-docs ## write the Python API reference from the docstrings: out/api/index.html
	$(BIN)/python -m pdoc -d google -o out/api $(API)
	@echo "The reference is $(abspath out/api/index.html)"

lint: .venv/installed-test ## check the style with ruff
	$(BIN)/ruff check .

wheel: .venv/installed ## build the wheel: dist/*.whl
	@rm -rf build dist  # build/ would bring back files that are gone from the sources
	$(PIP) wheel --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

install: .venv/installed ## install into .venv only
install-test: .venv/installed-test ## install into .venv with what the tests need

clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) tests -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "bc_diffusers needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

# Holds the torch requirement; written only when it changes, so that only then what follows is made again.
.venv/torch.txt: .venv/bin/python FORCE
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# Without build isolation, so that setup.py sees the torch that is installed here.
.venv/base: .venv/torch.txt
	@echo 'Installing $(TORCH) into .venv (the first time this downloads for some minutes)'
	$(PIP) install '$(TORCH)' 'setuptools>=77' wheel
	@touch $@

.venv/installed: .venv/base pyproject.toml setup.py
	$(PIP) install --no-build-isolation -e .
	@touch $@

.venv/installed-%: .venv/base pyproject.toml setup.py
	$(PIP) install --no-build-isolation -e '.[$*]'
	@touch $@ .venv/installed

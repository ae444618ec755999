# Two commands: `make demo` trains the embedded pipeline and shows what it learned; `make test` runs lint, types and the quick tests.
# `make test-slow` runs the tests with the marker `slow`: parity of whole pipelines, meshes, kills and resume, and other runs.
# `make test-all` runs all tests: in addition all configurations of every network, more meshes and hosts, and coverage.
# Both set up a virtual environment of their own in .venv first; a second call re-uses it.

PYTHON ?= python3
BIN := .venv/bin
# What `make test-all` runs comes in rounds, because a process that compiles all of it runs out of memory maps inside XLA.
NETWORKS := tests/models
WHOLE := tests/runs/test_resume.py tests/rl tests/cli/test_generate.py tests/parallel \
  $(addprefix tests/,diffusion quant data docs)
OTHERS := tests $(addprefix --ignore=,$(NETWORKS) $(WHOLE))
# Three processes, also on two cores: one often waits. One process takes a whole file.
TOGETHER := -n 3 --dist loadfile
QUICKLY := $(TOGETHER) -m 'not slow and not exhaustive'

# what a newcomer's terminal shows is ours alone
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some images set this variable. Then each of the many processes of the tests compiles all that it imports, for three seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs notebook wheel test types quick-tests test-slow test-all test-containers test-targets test-targets-tpu clean

demo: .venv/installed
	$(BIN)/solrl train tiny --report run.dir=runs/demo

# Types are checked beside the tests: mypy uses one core, and two of the tests' processes often wait.
test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 types quick-tests

types: .venv/installed-test
	$(BIN)/mypy

quick-tests: .venv/installed-test
	$(BIN)/python -m pytest $(QUICKLY) tests

test-slow: .venv/installed-test
	$(BIN)/python -m pytest $(TOGETHER) -m 'slow and not exhaustive' tests

# The site, in site/index.html: it can be read from disk. Its search works where it is served: python3 -m http.server -d site
# Pages are in docs/, their order in mkdocs.yml.
docs: .venv/installed-docs
	$(BIN)/zensical build --strict --clean

# The notebooks, and the outputs of docs/one-iteration.ipynb, made anew (three minutes)
notebook: .venv/installed-docs
	$(BIN)/python scripts/make_notebook.py

# The wheel and the sdist, in dist/
wheel: .venv/bin/python
	$(BIN)/python -m pip install --quiet 'hatchling>=1.25'
	$(BIN)/python -m hatchling build --directory dist

# Coverage is measured in the last round, which goes through what the others do.
test-all: .venv/installed-test
	$(BIN)/coverage erase
	$(BIN)/python -m pytest $(TOGETHER) -m '' $(NETWORKS)
	$(BIN)/python -m pytest $(TOGETHER) -m '' $(WHOLE)
	$(BIN)/coverage run -m pytest $(TOGETHER) -m '' $(OTHERS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

# What a machine without Docker can check of scripts/launch/: the Dockerfiles by a linter, and their Python layer by installing it as
# they do and running the demo there. CUDA's wheels are left out, so JAX runs on the CPU. It takes six to ten minutes.
test-containers: .venv-layer/installed .venv/installed-test
	$(BIN)/hadolint scripts/launch/cuda.Dockerfile scripts/launch/tpu.Dockerfile
	$(<D)/bin/solrl train tiny --report run.dir=runs/layer

.venv-layer/installed: scripts/launch/requirements-cuda.txt pyproject.toml
	python3.12 -m venv $(@D)
	grep -vE '^(nvidia-|jax-cuda13-)' $< > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-deps .
	touch $@

# What the compilers of absent devices make of the programs that train: of an H200 and a B200, and of a TPU v6e (20 minutes). Their
# wheels must not lie beside those that train, nor beside each other.
test-targets: .venv-plan-cuda/installed
	$(<D)/bin/python -m pytest -n 2 --dist loadfile tests/targets \
	  tests/planning/test_topology.py tests/planning/test_lowering.py

test-targets-tpu: .venv-plan-tpu/installed
	$(<D)/bin/python -m pytest tests/targets tests/planning/test_topology.py

.venv-plan-%/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --no-compile --editable '.[plan-$*]' 'beartype>=0.20' 'hypothesis>=6.120' 'pytest>=8.3' 'pytest-xdist>=3.6'
	touch $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13), "Python 3.11 to 3.13 is needed, this is " + sys.version'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip  # that of Python 3.11 takes twice as long for all that follows

# PyTorch is an oracle of the tests, never of the product: the demo and the site do without it
.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@ .venv/installed

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'  # bytecode: of what is imported, then
	# an oracle too, without its requirements: its torchvision does not load beside the PyTorch of machines without a GPU
	$(BIN)/python -m pip install --quiet --no-deps 'open_clip_torch==3.3.0'
	touch $@ .venv/installed .venv/installed-docs

clean:
	rm -rf .venv .venv-layer .venv-plan-cuda .venv-plan-tpu build dist site

# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
ifneq ($(wildcard ../shared/data),)
export FEDSIM_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo test test-thorough test-slow lint docs benchmark benchmark-engines benchmark-inversion setup clean

demo: .venv/ready
	.venv/bin/fedsim run examples/quickstart.toml --overwrite

test: .venv/ready
	.venv/bin/pytest -m "not slow and not thorough" -n auto --maxprocesses 4 --dist worksteal

# The claims of the fast suite over more settings, strategies and networks.
test-thorough: .venv/ready
	.venv/bin/pytest -m "thorough and not slow" -n auto --maxprocesses 4 --dist worksteal

test-slow: .venv/ready
	.venv/bin/pytest

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell

# All pages are read anew (-E), for a page that Sphinx remembers is not checked again.
docs: .venv/ready
	.venv/bin/sphinx-build -q -W -E -d build/doctrees docs build/docs

benchmark: .venv/ready
	.venv/bin/python benchmarks/recording_cost.py

# Compares the engines with two other simulators, which are installed in an environment of their own (another 6 GB).
benchmark-engines: .venv/ready .venv-peers/ready
	.venv/bin/python benchmarks/engines.py --out runs/engines.json

# Compares an iteration of IG and SME with that of another library, and measures how the cost of SME and DLFA grows with E.
benchmark-inversion: .venv-peers/ready
	PYTHONPATH=. .venv-peers/bin/python benchmarks/inversion_speed.py --compile
	PYTHONPATH=. .venv-peers/bin/python benchmarks/inversion_speed.py --only '28x28x1 N=10' --epochs 1 5 10 20 50

.venv-peers/ready: .venv/ready
	test -x .venv-peers/bin/pip || .venv/bin/python -m venv .venv-peers
	.venv-peers/bin/pip install --quiet torch==2.15.0 'pfl[pytorch]==0.6.0' fluke-fl==0.8.1 breaching==0.1.2 safetensors
	touch .venv-peers/ready

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedsim needs Python 3.11 or newer, $(PYTHON) is older; use make PYTHON=python3.x")'
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --upgrade pip
	.venv/bin/pip install --constraint constraints.txt --editable '.[federation,dev]'
	touch .venv/ready

clean:
	rm -rf .venv build runs

# `make run` and `make test` do everything on a fresh Debian machine; `make help` lists the rest.
# pip's and npm's own settings (PIP_*, npm configuration) are respected and written down nowhere.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

VENV := .venv
PYTHON_DEV := $(VENV)/bin/python
REPORT := build/report
INSTALLED_BY := pyproject.toml scripts/venv.sh $(wildcard requirements/*.txt)

# Toolchains that only this checkout has come after the system's.
export PATH := $(PATH):$(CURDIR)/.toolchains/bin

.PHONY: help run serve test check soak bench bench-peers setup-system toolchains agents venv lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

run: $(VENV)/.run ## install, then run an example: a CSV in, a table and a chart out of the jail
	@rm -rf $(REPORT)
	$(VENV)/bin/cloche run examples/sales_report.py --file examples/sales.csv --out $(REPORT) --memory 512m
	@test -s $(REPORT)/sales.png
	@echo "The chart is $(REPORT)/sales.png"

serve: $(VENV)/.dev ## install, then serve the API and the page on 127.0.0.1; it prints a key and an address to open
	$(VENV)/bin/cloche serve

test: setup-system $(VENV)/.dev toolchains agents ## all tests but soak, and what `make check` does; from root, as an ordinary user too what depends on the user; AREA=workspace: only the files whose path has this
	$(PYTHON_DEV) scripts/gate.py $(AREA)

check: $(VENV)/.dev toolchains ## style, types, layers of text: what a change must pass beside its tests
	@scripts/check.sh

soak: setup-system $(VENV)/.dev ## hundreds of repetitions, and what is long; AREA=machines, containers, escape, sessions, keeper, local, remote, service, workspace, network, agents, batches, signals, other-python, frameworks, fleet, e2b or (by name alone) kubernetes
	$(PYTHON_DEV) scripts/soak.py $(AREA)

bench: $(VENV)/.dev ## measure against a plain subprocess and bubblewrap, turn by turn
	$(PYTHON_DEV) -m bench

bench-peers: $(VENV)/.dev ## the same, and against other sandboxes, which it installs in ~/.cache/cloche-bench
	PYTHON=$(PYTHON_DEV) scripts/bench_peers.sh $(PYTHON_DEV) -m bench --peers

setup-system: ## install what the tests need with apt-get (root) and the pinned npm toolchains
	@scripts/setup_system.sh

toolchains:
	@scripts/toolchains.sh

agents:
	@scripts/agents.sh agents >/dev/null
	@scripts/agents.sh e2b >/dev/null

venv: $(VENV)/.dev ## create .venv with everything that development needs

$(VENV)/.run: $(INSTALLED_BY)
	@scripts/venv.sh run
	@touch $@

$(VENV)/.dev: $(INSTALLED_BY)
	@scripts/venv.sh dev
	@touch $@ $(VENV)/.run

lock: ## pin and hash the requirements anew (needs uv and npm)
	scripts/lock.sh

clean: ## remove what this Makefile made
	rm -rf $(VENV) .toolchains build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

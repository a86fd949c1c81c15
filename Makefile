# make install    the environment in .venv
# make demo       train a LoRA on the built-in model
# make demo-control  train control by a condition image on it
# make demo-slider  train a slider from texts alone on it
# make demo-video  train a motion from clips on the built-in model of videos
# make demo-evaluate  train three LoRAs on it, too short, right and far too long, and have the right one named
# make web        the page in the browser
# make test       linter, types and the quick tests: before every commit
# make test-slow  the other tests, and the types of code for Windows and macOS
# make test-daily  an eighth of test-slow, another one each day
# make test-pairs today's slice of the runs in which every pair of settings is
# make test-windows  the quick tests by the rules of Windows
# make test-programs  those of benchmarks/
# make test-all   all of them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo demo-control demo-slider demo-video demo-evaluate web test lint lint-platforms test-quick test-slow test-daily test-pairs test-windows test-programs test-all clean

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

demo-slider: install
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  train_lora.py --config_file dataset_configs/demo_slider_run.toml --overwrite
	$(BIN)/python -m scripts.demo_slider output/demo_slider/demo_slider.safetensors output/demo_slider/sheet.png
	@echo
	@echo "Open output/demo_slider/sheet.png: the same pictures with the LoRA at -2, -1, 0, 1 and 2."
	@echo "What this is, and the same for other models: docs/sliders.md"

demo-video: install
	$(BIN)/python -m library demo --video
	$(BIN)/python -m scripts.demo_video output/demo_video/demo_video.safetensors \
	  output/demo_video/strip.png output/demo_video/before_after.webp
	@echo
	@echo "Open output/demo_video/before_after.webp: the upper row is the model before, the lower with the LoRA."
	@echo "What this is, and the same for real models: docs/video.md"

demo-evaluate: install
	@for run in "too_short 30 30 6e-3 cosine" "right 240 120 6e-3 cosine" \
	  "too_long 800 400 1e-2 constant_with_warmup"; do set -- $$run; \
	  $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    train_lora.py --config_file dataset_configs/demo_evaluate_run.toml --overwrite \
	    --output_name $$1 --max_train_steps $$2 --save_every_n_steps $$3 --validate_every_n_steps $$3 \
	    --learning_rate $$4 --lr_scheduler $$5 || exit 1; done
	$(BIN)/python -m library evaluate output/demo_evaluate --num_captions 3 --num_seeds 3 \
	  --evaluation_dir output/demo_evaluate/evaluation
	@echo
	@echo "Open output/demo_evaluate/evaluation/evaluation.png. What the numbers mean: docs/evaluate.md"

web: install
	$(BIN)/python -m library web

# What each suite runs: library/tools/test.py
test: install
	$(BIN)/python -m library test

lint lint-platforms: install
	$(BIN)/python -m library test $@

test-quick test-slow test-daily test-pairs test-windows test-programs: install
	$(BIN)/python -m library test $(patsubst test-%,%,$@)

test-all: install
	$(BIN)/python -m library test all

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

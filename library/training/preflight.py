"""Pre-flight checks: the list of all checks of settings. All problems are reported at once, before a model is loaded.

To add a check, write ``validate_*`` in a validate*.py of its package, which yields a ``Problem`` with the option, the
cause and the fix, and add a line here, by what it needs:

- ``list_settings_checks``: options, dataset TOML, model files, prompts. No torch, so a typo is reported in a second.
- What needs the scanned images (dataset weights, empty stages) is in ``dataset.validate``, called by prepare.py.
- ``list_installation_checks``: packages of optimizers and attention kernels, existing files, tokens; for runs.
  ``--dry_run`` reports them as warnings, since its run may be on another machine.
- Launch checks (devices, launcher, engines, mixed precision) are in ``distributed.validate_launch``: a rank runs them
  in prepare_accelerator, which reports the problems of all ranks together.
- ``list_run_checks``: optimizer, adapter targets and parallelism on a model without weights, as the strategy needs it.
"""

import glob
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic_files import find_write_error
from ..config import ParsedConfig, RunConfig, parse_config
from ..config.option_needs import list_needed_names
from ..config.options import iter_options
from ..config.schema import TrainConfig
from ..config.schema_data import DataConfig
from ..config.schema_objective import LossConfig, NoiseConfig
from ..config.schema_output import SaveConfig, StateConfig
from ..config.unused_options import find_unused_options
from ..config.validate_full import validate_fused_launch
from ..config.validate_objective import validate_objective_for_model
from ..config.validate_slider import explain_unscalable
from ..dataset.dataset_config import can_load_datasets, load_dataset_config
from ..dataset.validate import collect_subset_settings
from ..errors import ConfigError
from ..problems import Problem, dedupe_problems
from .output_lock import has_final_output

if TYPE_CHECKING:
    from ..diffusion.process import NoiseProcess
    from ..models.base import Family
    from ..models.detect import DetectedModel
    from ..parallel.strategy import Strategy


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its checks need besides the settings."""

    family: "Family"
    detected: "DetectedModel"
    has_full_model: bool = True
    can_quantize_base: bool = True
    is_compile_enabled: bool = False
    supports_cuda_graphs: bool = True
    optimizer_sharding_engine: str = ""
    world_size: int = 1
    mixed_precision: str = ""
    """Empty where it is not known, as in a plan; so is the device."""
    device: Any = None

    @classmethod
    def from_strategy(cls, strategy: "Strategy", family: "Family", detected: "DetectedModel") -> "RunFacts":
        return cls(
            family=family,
            detected=detected,
            has_full_model=strategy.has_full_model,
            can_quantize_base=strategy.can_quantize_base,
            is_compile_enabled=strategy.is_compile_enabled,
            supports_cuda_graphs=strategy.supports_cuda_graphs,
            optimizer_sharding_engine=strategy.optimizer_sharding_engine,
            world_size=strategy.comm.world_size,
            mixed_precision=strategy.mixed_precision,
            device=strategy.device,
        )


SettingsCheck = Callable[[ParsedConfig], Iterable[Problem]]
RunCheck = Callable[[RunConfig, RunFacts], Iterable[Problem]]


def list_settings_checks() -> Sequence[SettingsCheck]:
    """List the checks that need neither torch nor a model."""
    from ..dataset.validate import validate_dataset_config
    from ..models.validate_options import validate_model_options
    from ..optim.optimizer_names import validate_optimizer_name

    return (
        lambda loaded: loaded.problems,  # of config.parser and config.validate
        lambda loaded: validate_optimizer_name(loaded.config.optim.optimizer_type),
        lambda loaded: validate_dataset_config(
            loaded.config.data, loaded.config.cache, loaded.config.train, loaded.invalid_options
        ),
        lambda loaded: validate_model_options(loaded.config, loaded.locations),
        lambda loaded: _validate_multipliers(loaded.config),
        lambda loaded: _validate_evaluation_dataset(loaded.config),
    )


def _validate_multipliers(config: RunConfig) -> Iterator[Problem]:
    """Check that the adapter can be trained at the strengths that datasets ask for."""
    if not can_load_datasets(config.data) or (config.data.slider_prompts and config.adapter.is_full):
        return
    reason, fix = explain_unscalable(config.adapter), "use 1 there, or another adapter"
    engines = {
        "torch_compile": config.distributed.torch_compile,
        "cuda_graphs": config.distributed.cuda_graphs,
        "pp_size": config.parallel.pp_size > 1,
    }
    unsupported = [name for name, is_set in engines.items() if is_set and not config.data.slider_prompts]
    if reason is None and unsupported:
        reason, fix = f"not supported with {unsupported[0]}", f"use 1 there, or remove {unsupported[0]}"
    for dataset in load_dataset_config(config.data).datasets if reason else ():
        if dataset.network_multiplier != 1:
            place = dataset.locate("network_multiplier")
            yield Problem(place.key or "network_multiplier", reason or "", fix, place)


def _validate_evaluation_dataset(config: RunConfig) -> Iterator[Problem]:
    """Check the dataset file of the evaluation as that of a run."""
    from ..dataset.validate import validate_dataset_config

    name, value = "evaluation_dataset_config", config.evaluate.evaluation_dataset_config
    if value is None or not config.evaluate.is_active:
        return
    if not Path(value).expanduser().is_file():
        yield Problem(name, f"{value}: no such file")
        return
    for problem in validate_dataset_config(replace_dataset(config.data, value)):
        yield replace(problem, option=name) if problem.place is None else problem


def replace_dataset(data: DataConfig, path: str) -> DataConfig:
    """Return the settings of images with another dataset file."""
    return replace(data, dataset_config=path, train_data_dir=None, reg_data_dir=None, in_json=None)


def list_run_checks() -> Sequence[RunCheck]:
    """List the checks that need torch or a model on the meta device."""
    from ..dataloader.sample_prompts import load_preview_prompts
    from ..models.validate_options import validate_prompts
    from ..optim.validate_optimizer import validate_elementwise_optimizer, validate_lr_schedule, validate_optimizer
    from . import validate_model, validate_token

    return (
        lambda config, _: validate_optimizer(config.optim),
        lambda _, facts: validate_model.validate_compile(facts.family, facts.is_compile_enabled),
        lambda config, _: validate_lr_schedule(config.optim),
        lambda config, facts: (
            validate_elementwise_optimizer(config.optim, facts.optimizer_sharding_engine)
            if facts.optimizer_sharding_engine
            else ()
        ),
        _validate_fused_backward,
        lambda config, facts: validate_model.validate_attention(config.distributed.attn_mode, facts.detected),
        lambda config, facts: validate_model.validate_adapter_targets(
            config.adapter, config.optim, facts.family, facts.detected
        ),
        lambda config, facts: validate_model.validate_model_parallel(
            config.parallel,
            config.optim.optimizer_type,
            facts.family,
            lambda: validate_model.load_denoiser_on_meta(facts.family, facts.detected),
        ),
        lambda config, facts: validate_token.validate_token(config.adapter, facts.family, facts.detected),
        lambda config, facts: validate_model.validate_trained_weights(config.adapter, facts.family, facts.detected),
        lambda config, facts: validate_model.validate_model_file(config, facts.family, facts.detected),
        lambda config, facts: validate_model.validate_quantize_offload(
            config.model, config.train, facts.has_full_model, facts.can_quantize_base
        ),
        lambda config, facts: validate_model.validate_cuda_graphs(
            config, facts.family, facts.supports_cuda_graphs, facts.device
        ),
        lambda config, facts: validate_model.validate_preservation(config, facts.family, facts.is_compile_enabled),
        lambda config, facts: validate_model.validate_slider_family(
            config, facts.family, facts.detected, facts.is_compile_enabled
        ),
        lambda config, facts: validate_model.validate_quantized_matmul(
            config.model, config.parallel, facts.mixed_precision, facts.device
        ),
        lambda config, facts: validate_prompts(load_preview_prompts(config.preview), facts.detected),
        lambda config, facts: validate_model.validate_evaluation(config.evaluate, facts.family),
        lambda config, _: validate_model.validate_prompt_strengths(
            config.adapter, load_preview_prompts(config.preview)
        ),
        lambda config, facts: validate_model.validate_noise_experts(
            config.adapter, config.preview, facts.family, facts.optimizer_sharding_engine
        ),
        lambda config, facts: validate_model.validate_sound(config, facts.family, facts.optimizer_sharding_engine),
        lambda config, facts: validate_model.validate_block_swap(
            config.train.blocks_to_swap, facts.family, facts.detected, facts.is_compile_enabled
        ),
    )


def _validate_fused_backward(config: RunConfig, facts: RunFacts) -> Iterator[Problem]:
    """Check the fused backward pass against the launcher and the optimizer."""
    from ..optim.validate_optimizer import validate_fused_optimizer

    if config.full.fused_backward_pass:
        yield from validate_fused_launch(
            config, facts.world_size, facts.optimizer_sharding_engine, facts.mixed_precision
        )
        yield from validate_fused_optimizer(config.optim)


def validate_objective(
    noise: NoiseConfig, loss: LossConfig, family: "Family", process: "NoiseProcess"
) -> Iterator[Problem]:
    """Check the objective against the prediction type, which is certain only when the model is loaded."""
    from ..diffusion.loss_weighting import find_unbounded_weightings

    yield from validate_objective_for_model(noise, loss, family.facts.title, process.prediction_type)
    for name in find_unbounded_weightings(process, loss):
        yield Problem(
            name, "the model's last timestep has zero SNR, so its loss weight is infinite", "remove the option"
        )


def list_installation_checks() -> Sequence[SettingsCheck]:
    """List the checks of what is installed here; a plan may be made on another machine than the run."""
    from ..config.validate_distributed import validate_attention_package
    from ..optim.optimizer_names import find_missing_package

    return (
        lambda loaded: (
            [Problem("optimizer_type", missing)]
            if (missing := find_missing_package(loaded.config.optim.optimizer_type))
            else []
        ),
        lambda loaded: validate_attention_package(loaded.config.distributed.attn_mode),
        _validate_output_files_here,
        lambda loaded: _validate_upload(loaded.config.save),
    )


def _validate_output_files_here(loaded: ParsedConfig) -> Iterator[Problem]:
    """Check the output files here if this is the only process; of several, the main one does so when they have met."""
    config = loaded.config
    if config.train.dry_run or os.environ.get("WORLD_SIZE", "").strip() in ("", "1"):
        yield from validate_output_files(config.save, config.state, config.train, config.optim.ema_decay is not None)


def check_output_files(save: SaveConfig, state: StateConfig, train: TrainConfig, has_ema: bool) -> None:
    """Raise if LoRA files of an earlier run would be overwritten; for the rank that writes."""
    if problems := list(validate_output_files(save, state, train, has_ema)):
        raise ConfigError(problems)


def validate_output_files(save: SaveConfig, state: StateConfig, train: TrainConfig, has_ema: bool) -> Iterator[Problem]:
    """LoRA files are not overwritten by the same command; a run that resumes writes its own files again."""
    if save.overwrite or state.resume is not None:
        return
    folder, name = Path(save.output_dir), save.output_name
    if state.auto_resume:
        from .checkpoint_dir import find_checkpoints  # imports torch

        if any(find_checkpoints(folder, name)):
            return
    existing = _find_output_files(save, train, has_ema)
    has_final = has_final_output(folder, name)
    if state.auto_resume and not has_final:  # it was killed before its first checkpoint
        return
    if existing:
        names = (f"{name}-{number}" for number in itertools.count(2))
        free = next(each for each in names if not any(folder.glob(f"{glob.escape(each)}*")))
        more = f" and {len(existing) - 1} more files, such as {existing[1].name}," if len(existing) > 1 else ""
        found = f"{existing[0]}{more} exist" if more else f"{existing[0]} exists,"
        yield Problem("output_name", f"{found} from an earlier run", f"add --overwrite, or --output_name {free}")


def _find_output_files(save: SaveConfig, train: TrainConfig, has_ema: bool) -> list[Path]:
    """The existing files and models with names that this run will write, as far as its length is known."""
    pattern = re.compile(
        rf"{re.escape(save.output_name)}(-(\d{{6,}})|-step(\d{{8,}}))?(-ema)?(_(high|low)_noise|_emb)?(\.safetensors)?"
    )
    epochs = 1 if save.save_n_epoch_ratio else save.save_every_n_epochs
    steps = save.save_every_n_steps
    last_epoch = train.max_train_epochs or math.inf
    last_step = math.inf if train.max_train_epochs else train.max_train_steps

    def is_written(match: re.Match[str]) -> bool:
        if match[4] and not has_ema:
            return False
        if match[2]:
            return bool(epochs) and int(match[2]) % (epochs or 1) == 0 and int(match[2]) < last_epoch
        return not match[3] or (bool(steps) and int(match[3]) % (steps or 1) == 0 and int(match[3]) < last_step)

    paths = Path(save.output_dir).glob(f"{glob.escape(save.output_name)}*")
    found = [path for path in paths if (match := pattern.fullmatch(path.name)) and is_written(match)]
    found = [path for path in found if path.suffix == ".safetensors" or (path / "model_index.json").is_file()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _validate_upload(save: SaveConfig) -> Iterator[Problem]:
    if save.huggingface_repo_id is not None:
        from .hub_upload import validate_hub_token

        yield from validate_hub_token()


def load_settings(argv: Sequence[str]) -> ParsedConfig:
    """Parse a command line and its run TOML, without the options that have no effect on this model.

    Keys and tokens become environment variables, as the model may need one, and leave ``sys.argv``.
    """
    from ..models.validate_options import drop_unused_model_options

    parsed = parse_config(argv)
    os.environ.update(parsed.secrets)
    sys.argv[:] = [word for word in sys.argv if word.rpartition("=")[2] not in parsed.secrets.values()]
    return drop_unused_model_options(_drop_unused_data_options(parsed))


def _drop_unused_data_options(parsed: ParsedConfig) -> ParsedConfig:
    """Set options back to their defaults that have no effect on the images of any subset."""
    data = parsed.config.data
    options = list(iter_options(RunConfig))
    needed = {name for option in options if option.name in parsed.explicit for name in list_needed_names(option)}
    if needed <= {option.name for option in options if not option.dataset_table} or not can_load_datasets(data):
        return parsed  # nothing depends on the images
    loaded = load_dataset_config(data)
    if loaded.problems or not loaded.datasets:
        return parsed
    subsets = collect_subset_settings(loaded.datasets)
    return parsed.without_unused(find_unused_options(parsed.config, parsed.explicit, subsets=subsets))


def find_settings_problems(loaded: ParsedConfig) -> list[Problem]:
    """Run the checks of the settings of a command line."""
    return _run_checks(loaded, list_settings_checks())


def find_installation_problems(loaded: ParsedConfig) -> list[Problem]:
    """Run the checks of what is installed and what exists on this machine."""
    return _run_checks(loaded, list_installation_checks())


def _run_checks(loaded: ParsedConfig, checks: Iterable[SettingsCheck]) -> list[Problem]:
    problems = [problem for check in checks for problem in check(loaded)]
    return dedupe_problems(loaded.locate_problems(problems))


def check_run_settings(config: RunConfig, facts: RunFacts) -> None:
    """Run the checks of a run and raise with all problems."""
    if problems := [problem for check in list_run_checks() for problem in check(config, facts)]:
        raise ConfigError(problems)


def check_objective(noise: NoiseConfig, loss: LossConfig, family: "Family", process: "NoiseProcess") -> None:
    """Run the checks that need the scheduler of the loaded model and raise with all problems."""
    if problems := list(validate_objective(noise, loss, family, process)):
        raise ConfigError(problems)


def check_setting_changes(changes: Iterable[object], force_resume: bool) -> None:
    """Raise if settings that change the result differ from the checkpoint's, unless ``--force_resume`` is given."""
    fix = "this changes the result; restore the old value, or add --force_resume"
    problems = [Problem("resume", str(change), fix) for change in changes]
    if problems and not force_resume:
        raise ConfigError(problems)


def check_output_dirs(directories: Mapping[str, Path]) -> None:
    """Raise if a directory, by option, cannot be written to; for the rank that writes."""
    problems = [
        Problem(option, f"cannot write to {directory}: {error}")
        for option, directory in directories.items()
        if (error := find_write_error(directory))
    ]
    if problems:
        raise ConfigError(problems)

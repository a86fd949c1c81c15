"""DeepSpeed settings, resolved from our options, the launcher and the user's DeepSpeed JSON file; no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.schema_distributed import DeepSpeedConfig
from ..problems import Problem, report_file
from .world import World

ZERO_OPTION_KEYS = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}
"""accelerate's options and their keys in ``zero_optimization`` of the JSON file."""

BATCH_SIZE_KEYS = ("train_micro_batch_size_per_gpu", "train_batch_size")
PRECISION_SECTIONS = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": None}
"""Sections of the JSON file that set the precision, and their ``mixed_precision``; ``torch_autocast`` has a dtype."""

FORBIDDEN_SECTIONS = {
    "optimizer": "set --optimizer_type and --optimizer_args",
    "scheduler": "set --lr_scheduler",
    "data_efficiency": "the dataset config sets what is trained, and when",
    "curriculum_learning": "the dataset config sets what is trained, and when",
    "elasticity": "the options set the global batch size",
    "compression_training": "adapters are saved uncompressed",
    "tensor_parallel": "use ZeRO stage 3, or --tp_size without DeepSpeed",
    "sequence_parallel_size": "use --cp_size without DeepSpeed",
    "hybrid_engine": "previews are generated with the training model",
    "communication_data_type": "gradients are reduced in their own dtype",
}
"""Sections of the JSON file that conflict with this trainer, and what to use instead."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed's ZeRO as this run uses it."""

    stage: int = 2
    offload_optimizer_device: str | None = None
    offload_optimizer_path: str | None = None
    offload_param_device: str | None = None
    offload_param_path: str | None = None
    passthrough_config: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the user's JSON file, passed to DeepSpeed as they are."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """The batch sizes in DeepSpeed's JSON file."""

    @property
    def uses_files(self) -> bool:
        return "nvme" in (self.offload_optimizer_device, self.offload_param_device)

    def keep_in_host_memory(self) -> "DeepSpeedSettings":
        """Return the settings that offload to host memory what these offload to files, which cannot be pinned."""
        zero = dict(self.passthrough_config.get("zero_optimization", {}))
        for section, device in (
            ("offload_optimizer", self.offload_optimizer_device),
            ("offload_param", self.offload_param_device),
        ):
            if device == "nvme" and section in zero:
                zero[section] = {**zero[section], "pin_memory": False}
        return replace(
            self,
            passthrough_config={**self.passthrough_config, "zero_optimization": zero},
            offload_optimizer_device=self.offload_optimizer_device and "cpu",
            offload_optimizer_path=None,
            offload_param_device=self.offload_param_device and "cpu",
            offload_param_path=None,
        )

    def build_config(self, *, pin_memory: bool) -> dict[str, Any]:
        """Build DeepSpeed's config; to DeepSpeed every micro-batch is a step, with the boundary set on each."""
        zero = {**self.passthrough_config.get("zero_optimization", {}), "stage": self.stage}
        for section, device, path in (
            ("offload_optimizer", self.offload_optimizer_device, self.offload_optimizer_path),
            ("offload_param", self.offload_param_device, self.offload_param_path),
        ):
            from_file = zero.pop(section, {})
            if device is not None:
                nvme_path = {"nvme_path": path} if path is not None else {}
                zero[section] = {"pin_memory": pin_memory, **from_file, "device": device, **nvme_path}
        return {
            **self.passthrough_config,
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": self.passthrough_config.get("steps_per_print"),
        }

    def format_summary(self, world_size: int) -> str:
        """Format the stage, world size and offloading as one line."""
        locations = {"cpu": "host memory", "nvme": "NVMe"}
        offloaded = [
            f", {what} offloaded to {locations[device]}"
            for what, device in (("optimizer", self.offload_optimizer_device), ("model", self.offload_param_device))
            if device
        ]
        return f"DeepSpeed: ZeRO stage {self.stage}, world size {world_size}{''.join(offloaded)}"


@dataclass(frozen=True)
class DeepSpeedSources:
    """The three sources of DeepSpeed settings."""

    deepspeed: DeepSpeedConfig
    variables: Mapping[str, str]
    """The variables that the launcher exports, without the prefix of their names."""
    path: str
    """The path of DeepSpeed's JSON file, empty without one."""
    content: Mapping[str, Any]
    file_problem: Problem | None = None

    @classmethod
    def read(cls, deepspeed: DeepSpeedConfig, world: World) -> "DeepSpeedSources":
        """Read all sources; variables of a launcher that does not request DeepSpeed are left over and ignored."""
        prefixes = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_")
        variables = {
            name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): value
            for name, value in world.launcher_variables.items()
            if name.startswith(prefixes) and "DeepSpeed" in world.engines
        }
        path = variables.get("CONFIG_FILE", "none")
        if path == "none":
            return cls(deepspeed, variables, "", {})
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return cls(
                deepspeed,
                variables,
                path,
                {},
                report_file(path, f"DeepSpeed's file cannot be read: {error}"),
            )
        if not isinstance(content, dict) or not isinstance(content.get("zero_optimization", {}), dict):
            return cls(deepspeed, variables, path, {}, report_file(path, "not a DeepSpeed config"))
        return cls(deepspeed, variables, path, content)

    def find_values(self, name: str) -> list[tuple[str, Any]]:
        """Return (location, value) of every source that sets an option, ours first."""
        keys = ("zero_optimization", *ZERO_OPTION_KEYS[name])
        launched = self.variables.get(name.upper(), "none")  # accelerate writes none where nothing is set
        candidates = [
            (f"--{name}", getattr(self.deepspeed, name, None)),
            (f"accelerate's {name}", None if launched.lower() == "none" else launched),
            (f"{self.path}: {'.'.join(keys)}", get_config_value(self.content, *keys)),
        ]
        return [
            (location, int(value) if name == "zero_stage" and str(value).isdigit() else value)
            for location, value in candidates
            if value is not None
        ]

    def resolve(self) -> DeepSpeedSettings:
        """Take the first source of each option."""
        values = {name: next((value for _, value in self.find_values(name)), None) for name in ZERO_OPTION_KEYS}
        handled_keys = (*FORBIDDEN_SECTIONS, *PRECISION_SECTIONS, *BATCH_SIZE_KEYS)
        passed = {name: value for name, value in self.content.items() if name not in handled_keys}
        batch_sizes = {name: self.content[name] for name in BATCH_SIZE_KEYS if isinstance(self.content.get(name), int)}
        return DeepSpeedSettings(
            stage=2 if values["zero_stage"] is None else values["zero_stage"],
            offload_optimizer_device=_parse_device(values["offload_optimizer_device"]),
            offload_optimizer_path=values["offload_optimizer_nvme_path"],
            offload_param_device=_parse_device(values["offload_param_device"]),
            offload_param_path=values["offload_param_nvme_path"],
            passthrough_config=_drop_auto_values(passed),
            batch_sizes=batch_sizes,
        )


def resolve_deepspeed(deepspeed: DeepSpeedConfig, world: World) -> DeepSpeedSettings | None:
    """Resolve all sources; ``None`` without DeepSpeed.  Assumes that ``validate_deepspeed`` passes."""
    if deepspeed.deepspeed or ("DeepSpeed" in world.engines and deepspeed.deepspeed is None):
        return DeepSpeedSources.read(deepspeed, world).resolve()
    return None


def get_config_value(table: Mapping[str, Any], *keys: str) -> Any:
    """Get a nested value; ``None`` where it is missing or ``"auto"``."""
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "auto" else value


def _parse_device(name: str | None) -> str | None:
    return None if name == "none" else name


def _drop_auto_values(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _drop_auto_values(inside) for name, inside in value.items() if inside != "auto"}

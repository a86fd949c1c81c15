"""Settings in which an option has no effect, or has one, built from what its field says that it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from library.config.option_needs import AnyOf, Has, HasValue, IsSet, IsUnset, LacksValue, Need, OfModel, Trait
from library.config.options import Option, iter_options
from library.config.schema import RunConfig
from library.config.types import (
    BlockRates,
    DeviceMap,
    FaceCropRange,
    MemorySize,
    Resolution,
    ResolutionSchedule,
    StepRange,
    StepsOrRatio,
)
from library.models.families import FAMILY_FACTS

OPTIONS = {option.name: option for option in iter_options(RunConfig)}
IMAGES = "image_dir = 'images'"
MUSUBI_IMAGES = "image_directory = 'images'"
SUBSETS = {
    ("mask_source", "folder"): f"{IMAGES}\nconditioning_data_dir = 'images/masks'",
    ("mask_source", "alpha"): f"{IMAGES}\nalpha_mask = true",
    ("metadata_file", True): f"{IMAGES}\nmetadata_file = 'images.json'",
    ("parquet", True): "parquet = 'images.parquet'",
    ("is_reg", True): f"{IMAGES}\n[[datasets.subsets]]\nimage_dir = 'images/more'\nis_reg = true",
    ("is_remote", True): "webdataset = 'https://localhost/images.tar'",
    ("has_native_stage", True): IMAGES,
    ("file_format", "musubi-tuner"): MUSUBI_IMAGES,
}
"""The subset of a dataset file that has or lacks a kind of images."""
VALUES_OF_TYPES = {
    BlockRates: ",".join(["1e-5"] * 23),
    FaceCropRange: "2,4",
    Resolution: "96,64",
    ResolutionSchedule: "64",
    StepsOrRatio: 3,
    MemorySize: "2GB",
    StepRange: "2:9",
    DeviceMap: "balanced",
}
VALUES = {"max_token_length": 150, "train_data_dir": "images"}


@dataclass
class Case:
    """Settings in which an option has no effect, or has one."""

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "random:sd1:tiny"
    subset: str = IMAGES
    has_dataset_file: bool = True

    def __ior__(self, other: "Case") -> "Case":
        self.settings |= other.settings
        self.model = other.model if other.model != Case.model else self.model
        self.subset = other.subset if other.subset != IMAGES else self.subset
        self.has_dataset_file = self.has_dataset_file and other.has_dataset_file
        return self


LYCORIS = {"network_module": "lycoris.kohya", "network_args": ["algo=boft"]}
PROMPTS = {"sample_prompts": "a bird on a branch", "sample_sampler": "heun"}
STORED = "stored_in_nf4"
"""The folder of a model whose transformer is stored quantized; ``write_stored_model`` writes it."""
FLOW, V_PREDICTION = "random:flux:tiny", {"v_parameterization": True}
WITHOUT: dict[Trait, Case] = {
    Trait.COMPILED: Case(),
    Trait.FSDP: Case(),
    Trait.DEEPSPEED: Case(),
    Trait.LAUNCHED_DEEPSPEED: Case(),
    Trait.TRACKER: Case(),
    Trait.WANDB: Case({"logging_dir": "logs"}),
    Trait.RATE: Case({"optimizer_type": "Adafactor"}),
    Trait.SHARED_RATE: Case({"unet_lr": 1e-4, "network_train_unet_only": True}),
    Trait.SCHEDULE: Case({"optimizer_type": "AdamWScheduleFree"}),
    Trait.TRAINED_TEXT: Case({"network_train_unet_only": True}),
    Trait.TRAINED_DENOISER: Case({"network_train_text_encoder_only": True}),
    Trait.ALPHA: Case(LYCORIS),
    Trait.DROPOUT: Case({"network_module": "lycoris.kohya"}),
    Trait.SAMPLER: Case(PROMPTS | V_PREDICTION | {"zero_terminal_snr": True}),
    Trait.FLOW: Case(),
    Trait.DIFFUSION: Case(PROMPTS, FLOW),
    Trait.V_PREDICTION: Case(),
    Trait.NOISE_PREDICTION: Case(V_PREDICTION),
    Trait.GUIDANCE: Case(),
    Trait.TEXT_ENCODERS: Case(model="random:z_image:tiny"),
    Trait.STORED_QUANTIZED: Case(),
}
"""A run that lacks a trait."""
WITH: dict[Trait, Case] = {
    Trait.COMPILED: Case({"torch_compile": True}),
    Trait.FSDP: Case({"fsdp": True}),
    Trait.DEEPSPEED: Case({"deepspeed": True}),
    Trait.TRACKER: Case({"logging_dir": "logs"}),
    Trait.WANDB: Case({"log_with": "wandb"}),
    Trait.SAMPLER: Case(PROMPTS),
    Trait.FLOW: Case(model=FLOW),
    Trait.V_PREDICTION: Case(V_PREDICTION),
    Trait.GUIDANCE: Case(model=FLOW),
    Trait.STORED_QUANTIZED: Case(model=STORED),
}
"""A run that has a trait, where that of most cases does not."""


def choose_value(option: Option, *needs: Need) -> Any:
    """Choose a value that asks for something; one that violates the needs of the option's own value, if there are any."""
    if option.name in VALUES:
        return VALUES[option.name]
    if isinstance(option.value_type, tuple):
        choices = [value for value in option.value_type if not option.is_off(value)]
        wrong = [value for value in choices if not any(_allows(need, option.name, value) for need in needs)]
        return (wrong or choices)[0]
    if option.value_type is bool:
        return not option.default
    if option.value_type in (int, float):
        number = option.value_type(option.default[0] if option.is_list and option.default else option.default or 0)
        number = (
            number + 1
            if option.maximum is None or number + 1 <= option.maximum
            else option.value_type(option.maximum / 2)
        )
        return [max(number, option.minimum or 0)] if option.is_list else max(number, option.minimum or 0)
    return VALUES_OF_TYPES.get(option.value_type, ["a=1"] if option.is_list else "./nothing")


def _allows(need: Need, name: str, value: Any) -> bool:
    if isinstance(need, AnyOf):
        return any(_allows(each, name, value) for each in need.needs)
    if isinstance(need, HasValue):
        return need.name == name and value in need.values
    return isinstance(need, LacksValue) and need.name == name and value not in need.values


def build_unmet(need: Need, option: Option) -> Case:
    """Build the settings of a run in which a need of an option is not met."""
    case = Case()
    if isinstance(need, AnyOf):
        for each in need.needs:
            case |= build_unmet(each, option)
    elif isinstance(need, Has):
        case |= WITHOUT[need.trait]
    elif isinstance(need, OfModel):
        case.model = choose_model(option, has_option=False)
    elif isinstance(need, IsSet) and need.name == "dataset_config":
        case.has_dataset_file = False
    elif isinstance(need, IsSet) and need.name in OPTIONS and OPTIONS[need.name].default:
        case.settings[need.name] = 0
    elif isinstance(need, IsUnset):
        case |= build_value(need.name, True)
        if need.name == "enable_bucket":  # the resolution of the cases is below the default
            case.settings["min_bucket_reso"] = 64
    elif isinstance(need, LacksValue) and need.name != option.name:
        case |= build_value(need.name, need.values[0])
    elif isinstance(need, HasValue) and need.name != option.name and OPTIONS[need.name].default in need.values:
        case |= build_value(need.name, choose_value(OPTIONS[need.name], need))
    return case


def build_met(need: Need, option: Option) -> Case:
    """Build the settings of a run in which a need of an option is met."""
    case = Case()
    if isinstance(need, AnyOf):
        case |= build_met(need.needs[0], option)
    elif isinstance(need, Has):
        case |= WITH.get(need.trait, Case())
    elif isinstance(need, OfModel):
        case.model = choose_model(option, has_option=True)
    elif isinstance(need, IsUnset) and need.name == "dataset_config":
        case.has_dataset_file = False
    elif isinstance(need, IsSet) and need.name != "dataset_config":
        case |= build_value(need.name, True)
    elif isinstance(need, HasValue) and OPTIONS[need.name].default not in need.values:
        case |= build_value(need.name, need.values[0])
    elif isinstance(need, LacksValue) and need.name == "mask_source":
        case |= build_value("mask_source", "folder" if None in need.values else "alpha")
    elif isinstance(need, LacksValue) and need.name in OPTIONS and OPTIONS[need.name].default in need.values:
        case |= build_value(need.name, choose_value(OPTIONS[need.name], need))
    return case


def choose_model(option: Option, *, has_option: bool) -> str:
    """Choose a model whose family has an option, or has it not."""
    models = ("sd1", "sdxl", "sd3", "flux", "z_image", "hunyuan_image", "lumina2", "anima", "wan_i2v", "wan22_t2v")
    models += ("wan22_ti2v", "sd1_pix2pix", "ltx2", "framepack")
    facts = {model: FAMILY_FACTS[{"sdxl": "sdxl"}.get(model, model)] for model in models}
    named = {model: option.name in (*each.options.extra, *each.options.components) for model, each in facts.items()}
    return next(f"random:{model}:tiny" for model, has in named.items() if has is has_option)


def build_value(name: str, value: Any) -> Case:
    """Build the settings that give an option or a kind of images a value; True stands for any that is set.

    What the option needs is given as well, since an option without effect is none.
    """
    if name not in OPTIONS:
        more = {"masked_loss": True} if name == "mask_source" else {}
        return Case(more, subset=SUBSETS.get((name, value), IMAGES))
    option, case = OPTIONS[name], Case()
    for need in option.needs or ():
        if name not in need.names:
            case |= build_met(need, option)
    is_any = value is True and option.value_type is not bool
    case.settings[name] = choose_value(option) if is_any else value
    return case


def list_cases() -> Iterator[tuple[str, int]]:
    for option in OPTIONS.values():
        yield from ((option.name, index) for index in range(len(option.needs or ())))

"""``network_args``: what sd-scripts' network modules take as name=value, read into one typed record; no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..registry import did_you_mean
from . import argument_forms as forms
from .schema import AdapterConfig

UNETS = ("sd1", "sd2", "sdxl")
LORAS = ("lora", "dora")
RANKED = ("lora", "dora", "loha", "lokr")

MODULES = {
    "networks.lora": "lora", "networks.lora_flux": "lora", "networks.lora_sd3": "lora", "networks.loha": "loha",
    "networks.lokr": "lokr", "networks.oft": "oft", "networks.oft_flux": "oft", "lycoris.kohya": "lora",
}  # fmt: skip
"""sd-scripts' modules -> what they train; for lycoris.kohya, without ``algo``."""
REFUSED_MODULES = {
    "networks.dylora": "ranks that are trained in turns (DyLoRA) are not supported; write networks.lora",
    "networks.lora_fa": "down matrices that stay as they start (LoRA-FA) are not supported; write networks.lora",
}
MODULE_OF_FAMILY = {"networks.lora_flux": "flux", "networks.oft_flux": "flux", "networks.lora_sd3": "sd3"}
ALGORITHMS = {"lora": "lora", "locon": "lora", "dora": "dora", "loha": "loha", "lokr": "lokr", "diag-oft": "oft",
              "boft": "boft"}  # fmt: skip
"""lycoris' names of what is trained."""


def _arg(
    read: Callable[[str], Any], default: Any = None, families: Sequence[str] = (), kinds: Sequence[str] = ()
) -> Any:
    return field(default=default, metadata={"read": read, "families": tuple(families), "kinds": tuple(kinds)})


@dataclass(frozen=True)
class NetworkArguments:
    """One field for each name; what belongs to some families or kinds only says so."""

    algo: str = _arg(forms.one_of(*ALGORITHMS), "lora")
    use_dora: bool = _arg(forms.flag, False, kinds=LORAS)
    dora_wd: bool = _arg(forms.flag, False, kinds=LORAS)
    use_rslora: bool = _arg(forms.flag, False, kinds=LORAS)
    rs_lora: bool = _arg(forms.flag, False, kinds=LORAS)
    factor: int = _arg(forms.factor, -1, kinds=("lokr",))
    decompose_both: bool = _arg(forms.flag, False, kinds=("lokr",))
    conv_dim: int | None = _arg(forms.number(1, kind=int), families=UNETS, kinds=RANKED)
    conv_alpha: float = _arg(forms.number(0), 1.0, families=UNETS, kinds=RANKED)
    rank_dropout: float = _arg(forms.share, 0.0, kinds=("lora",))
    module_dropout: float = _arg(forms.share, 0.0, kinds=("lora",))
    block_dims: tuple[int, ...] | None = _arg(forms.list_of(forms.rank), families=UNETS)
    block_alphas: tuple[float, ...] | None = _arg(forms.list_of(forms.number(0)), families=UNETS, kinds=RANKED)
    conv_block_dims: tuple[int, ...] | None = _arg(forms.list_of(forms.rank), families=UNETS, kinds=RANKED)
    conv_block_alphas: tuple[float, ...] | None = _arg(forms.list_of(forms.number(0)), families=UNETS, kinds=RANKED)
    down_lr_weight: tuple[float, ...] | str | None = _arg(forms.weights, families=UNETS)
    mid_lr_weight: tuple[float, ...] | str | None = _arg(forms.weights, families=UNETS)
    up_lr_weight: tuple[float, ...] | str | None = _arg(forms.weights, families=UNETS)
    block_lr_zero_threshold: float = _arg(forms.number(0), 0.0, families=UNETS)
    loraplus_lr_ratio: float | None = _arg(forms.positive, kinds=LORAS)
    loraplus_unet_lr_ratio: float | None = _arg(forms.positive, kinds=LORAS)
    loraplus_text_encoder_lr_ratio: float | None = _arg(forms.positive, kinds=LORAS)
    network_reg_dims: tuple[tuple[str, int], ...] = _arg(forms.by_pattern(forms.rank), ())
    network_reg_lrs: tuple[tuple[str, float], ...] = _arg(forms.by_pattern(forms.number(0)), ())
    exclude_patterns: tuple[str, ...] = _arg(forms.patterns, ())
    include_patterns: tuple[str, ...] = _arg(forms.patterns, ())
    train_t5xxl: bool = _arg(forms.flag, False, families=("flux", "sd3"))
    train_blocks: str = _arg(forms.one_of("all", "double", "single"), "all", families=("flux",))
    train_double_block_indices: tuple[tuple[int, int], ...] | None = _arg(forms.blocks, families=("flux",))
    train_single_block_indices: tuple[tuple[int, int], ...] | None = _arg(forms.blocks, families=("flux",))
    train_block_indices: tuple[tuple[int, int], ...] | None = _arg(forms.blocks, families=("sd3",))
    img_attn_dim: int | None = _arg(forms.rank, families=("flux",))
    txt_attn_dim: int | None = _arg(forms.rank, families=("flux",))
    img_mlp_dim: int | None = _arg(forms.rank, families=("flux",))
    txt_mlp_dim: int | None = _arg(forms.rank, families=("flux",))
    img_mod_dim: int | None = _arg(forms.rank, families=("flux",))
    txt_mod_dim: int | None = _arg(forms.rank, families=("flux",))
    single_dim: int | None = _arg(forms.rank, families=("flux",))
    single_mod_dim: int | None = _arg(forms.rank, families=("flux",))
    in_dims: tuple[int, ...] | None = _arg(forms.list_of(forms.rank, 5), families=("flux",))
    context_attn_dim: int | None = _arg(forms.rank, families=("sd3",))
    context_mlp_dim: int | None = _arg(forms.rank, families=("sd3",))
    context_mod_dim: int | None = _arg(forms.rank, families=("sd3",))
    x_attn_dim: int | None = _arg(forms.rank, families=("sd3",))
    x_mlp_dim: int | None = _arg(forms.rank, families=("sd3",))
    x_mod_dim: int | None = _arg(forms.rank, families=("sd3",))
    emb_dims: tuple[int, ...] | None = _arg(forms.list_of(forms.rank, 6), families=("sd3",))


REFUSED = {
    "split_qkv": "queries, keys and values always share one down matrix; it crashes in sd-scripts",
    "ggpo_sigma": "not yet: perturbed weights (GGPO)",
    "ggpo_beta": "not yet: perturbed weights (GGPO)",
    "unit": "belongs to networks.dylora, which is not supported",
    "preset": "the layers are those that sd-scripts trains; choose with exclude_patterns and include_patterns",
    "verbose": "the log counts the modules, and a pattern that matches none is an error",
}
"""Names that network modules of sd-scripts or lycoris take and that are not taken here."""


def read_network_args(words: Sequence[str]) -> tuple[NetworkArguments, list[str]]:
    """What the words say, and everything that is wrong with them."""
    known = {each.name: each for each in fields(NetworkArguments)}
    values, problems = dict[str, Any](), []
    for word in words:
        name, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals:
            problems.append(f"{word!r} is not name=value")
        elif name in REFUSED:
            problems.append(f"{name}: {REFUSED[name]}")
        elif name not in known:
            problems.append(f"no argument {name!r}{did_you_mean(name, known)}")
        elif name in values:
            problems.append(f"{name} is given twice")
        else:
            try:
                values[name] = known[name].metadata["read"](text)
            except ValueError as error:
                problems.append(f"{name}: {error}, got {text!r}")
    return NetworkArguments(**values), problems


def arguments_of(config: AdapterConfig) -> NetworkArguments:
    """The same for settings that were checked."""
    return read_network_args(config.network_args)[0]


def kind_of(config: AdapterConfig) -> str:
    """What is trained: lora, dora, loha, lokr, oft or boft."""
    arguments = arguments_of(config)
    kind = MODULES.get(config.network_module, "lora")
    if config.network_module == "lycoris.kohya":
        kind = ALGORITHMS[arguments.algo]
    return "dora" if kind == "lora" and (arguments.use_dora or arguments.dora_wd) else kind


def module_problem(name: str) -> str | None:
    """What is wrong with ``network_module``."""
    if name in MODULES:
        return None
    if name in REFUSED_MODULES:
        return REFUSED_MODULES[name]
    return f"no adapter {name!r}" + (did_you_mean(name, MODULES) or f"; there are {', '.join(MODULES)}")


def given_arguments(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0].strip() for word in words]


def misplaced(config: AdapterConfig) -> list[str]:
    """Arguments that this kind of adapter does not have."""
    kind, known = kind_of(config), {each.name: each.metadata for each in fields(NetworkArguments)}
    found = [f"{name}: {kind} does not have it, only {', '.join(known[name]['kinds'])}"
             for name in given_arguments(config.network_args)
             if name in known and known[name]["kinds"] and kind not in known[name]["kinds"]]  # fmt: skip
    if "algo" in given_arguments(config.network_args) and config.network_module != "lycoris.kohya":
        found.append("algo belongs to network_module lycoris.kohya")
    return found


def foreign(config: AdapterConfig, family: str, title: str) -> list[str]:
    """Arguments that mean nothing for this family."""
    known = {each.name: each.metadata["families"] for each in fields(NetworkArguments)}
    return [f"{name} means nothing for {title}; leave it out" for name in given_arguments(config.network_args)
            if known.get(name) and family not in known[name]]  # fmt: skip

"""The adapter of a SimpleTuner configuration: peft's LoRA, or LyCORIS with a file of its own."""

from typing import Any

from .equivalents import FULL_LOKR_DIM, keep_only_layers, match_containing, match_last_parts
from .imported import KeyReader, to_integer, to_number, to_switch
from .keys import simpletuner as keys

PROGRAM = "SimpleTuner"
FULL_MATRIX_DIM = 9_999_999
_MODULES = {
    "lora": "networks.lora",
    "locon": "networks.lora",
    "loha": "networks.loha",
    "lokr": "networks.lokr",
}


def is_lycoris_config(content: Any) -> bool:
    return isinstance(content, dict) and "algo" in content


def read_lora_or_lycoris(config: KeyReader, lycoris: dict[str, Any] | None) -> None:
    """Adapter type, rank, alpha and layers."""
    if config.read("lora_type", "standard") == "lycoris":
        config.read_keys.update(("lora_rank", "lora_alpha", "lora_dropout", "flux_lora_target", "use_dora"))
        if lycoris is not None:
            _read_lycoris(KeyReader(lycoris, config.result, "lycoris_config."))
        return
    if config.read("lora_type", "standard") != "standard":
        config.list_change("lora_type", "no such type here; LoRA is trained")
    result = config.result
    rank = config.read("lora_rank", 16, to_integer)
    alpha = config.read("lora_alpha", float(rank), to_number)
    result.options |= {"network_dim": rank, "network_alpha": float(alpha)}
    if config.read("use_dora", False, to_switch):
        result.add_network_arg("use_dora", True)
    targets = config.read("peft_lora_target_modules")
    if isinstance(targets, str):
        targets = [part.strip() for part in targets.strip("[]").replace('"', "").split(",") if part.strip()]
    flux_target = config.read("flux_lora_target", "all")
    if not targets and result.family in ("flux", "flux_kontext", "chroma"):
        targets = keys.FLUX_TARGETS.get(str(flux_target))
        if targets is None:
            config.list_change(
                "flux_lora_target", "no such choice of layers here; all layers of the blocks are trained"
            )
    elif not targets:
        targets = keys.DEFAULT_TARGETS.get(result.family, keys.ATTENTION)
    if targets:
        keep_only_layers(result, [match_last_parts(targets)])


def _read_lycoris(lycoris: KeyReader) -> None:
    result = lycoris.result
    algorithm = str(lycoris.read("algo", "lora")).lower()
    if algorithm not in _MODULES:
        lycoris.list_change("algo", f"not supported; LoRA is trained instead of {algorithm}")
    result.set_option("network_module", _MODULES.get(algorithm, "networks.lora"))
    rank = lycoris.read("linear_dim", 4, to_integer)
    alpha = lycoris.read("linear_alpha", 1.0, to_number)
    if lycoris.read("full_matrix", False, to_switch) and algorithm == "lokr":
        rank = max(rank, FULL_MATRIX_DIM)
    if algorithm == "lokr" and rank >= FULL_LOKR_DIM:
        alpha = float(rank)
    result.options |= {"network_dim": rank, "network_alpha": alpha}
    if algorithm == "lokr":
        result.add_network_arg("factor", lycoris.read("factor", -1, to_integer))
        if lycoris.read("decompose_both", False, to_switch):
            result.add_network_arg("decompose_both", True)
    for name in ("dropout", "rank_dropout", "module_dropout", "use_tucker", "use_scalar", "train_norm", "dora_wd"):
        if lycoris.read(name, 0):
            lycoris.list_change(name, "not supported for this adapter type here; remove it")
    if lycoris.read("multiplier", 1.0, to_number) != 1:
        lycoris.list_change("multiplier", "the adapter is trained at strength 1 here")
    if lycoris.read("bypass_mode") is not None:
        lycoris.list_harmless("bypass_mode", "how the product is computed; the result is the same")
    for name in ("conv_dim", "conv_alpha", "conv_factor"):
        if lycoris.read(name) not in (None, 0):
            lycoris.list_change(name, "convolutions are trained with network_args conv_dim; add it by hand")
    _read_preset(lycoris, lycoris.read_table("apply_preset"))
    lycoris.list_unknown(PROGRAM)


def _read_preset(lycoris: KeyReader, preset: KeyReader) -> None:
    """Read which modules are trained, by class or by name."""
    result, family = lycoris.result, lycoris.result.family
    classes, names = preset.read("target_module", []), preset.read("target_name", preset.read("unet_target_name", []))
    contained: list[str] = []
    for name in classes:
        known = keys.MODULE_CLASSES.get(name)
        if known is None:
            preset.list_change(
                "target_module", f"no such modules here: {name}; see include_patterns in docs/adapters.md", name
            )
        else:
            contained += known.get(family, known[""])
    patterns = [match_containing(text) for text in contained]
    patterns += [rf"(unet|transformer)\.{str(name).replace('.', chr(92) + '.').replace('*', '.*')}" for name in names]
    if patterns and not (len(classes) == 2 and family not in ("flux", "flux_kontext", "chroma", "sd3")):
        keep_only_layers(result, [f"({'|'.join(patterns)})"])
    factor = lycoris.table.get("factor")
    for name, settings in (preset.read("module_algo_map", {}) or {}).items():
        if isinstance(settings, dict) and {
            key: value for key, value in settings.items() if (key, value) != ("factor", factor)
        }:
            preset.list_change("module_algo_map", f"one setting for all layers here; {name} has others", settings)
    if preset.read("exclude_name"):
        preset.list_change("exclude_name", "add them to exclude_patterns by hand")
    preset.read_keys.update(("unet_target_name", "unet_target_module", "enable_conv"))
    preset.list_unknown(PROGRAM)

"""The adapter of a OneTrainer configuration."""

from .equivalents import (
    FULL_LOKR_DIM,
    UNET_FAMILIES,
    keep_only_layers,
    match_containing,
)
from .imported import KeyReader, to_integer, to_number, to_positive_number, to_switch, to_text
from .keys import onetrainer as keys

PROGRAM = "OneTrainer"
FULL_MATRIX_DIM = 9_999_999


def read_adapter(config: KeyReader) -> None:
    """Adapter type, rank, alpha and layers."""
    result, kind = config.result, config.read("peft_type", "LORA")
    modules = {"LORA": "networks.lora", "LOHA": "networks.loha", "LOKR": "networks.lokr"}
    result.set_option("network_module", modules[kind])
    rank, alpha = config.read("lora_rank", 16, to_integer), config.read("lora_alpha", 1.0, to_number)
    if kind == "LOKR":
        rank, alpha = _read_lokr(config, alpha)
    result.options |= {"network_dim": rank, "network_alpha": alpha}
    is_decomposed = config.read("lora_decompose", False, to_switch)
    by_output = config.read("lora_decompose_output_axis", False, to_switch)
    config.read("lora_decompose_norm_epsilon")
    if is_decomposed and kind == "LORA":
        result.add_network_arg("use_dora", True)
        if not by_output:
            config.list_change(
                "lora_decompose_output_axis", "a magnitude for each output feature here, as in peft", by_output
            )
    dropout = config.read("dropout_probability", None, to_positive_number)
    if dropout and kind == "LORA" and not is_decomposed:
        result.set_option("network_dropout", dropout)
    elif dropout:
        config.list_change("dropout_probability", "only plain LoRA has it here; remove it")
    config.read_keys.update(key for key in config.table if key.startswith(("lokr_", "oft_")))
    _read_layers(config, rank, alpha)


def _read_lokr(config: KeyReader, alpha: float) -> tuple[int, float]:
    result, rank = config.result, config.read("lokr_dim", 16, to_integer)
    result.add_network_arg("factor", config.read("lokr_decompose_factor", -1, to_integer))
    if config.read("lokr_decompose_both", False, to_switch):
        result.add_network_arg("decompose_both", True)
    for name in ("lokr_use_tucker", "lokr_weight_decompose"):
        if config.read(name, False, to_switch):
            config.list_change(name, "not supported for LoKr here; remove it")
    if config.read("lokr_full_matrix", False, to_switch):
        rank = FULL_MATRIX_DIM
    return rank, float(rank) if rank >= FULL_LOKR_DIM else alpha


def _read_layers(config: KeyReader, rank: int, alpha: float) -> None:
    """Read which layers of the denoiser are trained: a preset, or texts that their names contain."""
    result, family = config.result, config.result.family
    name = config.read("layer_filter_preset", "full", to_text) or "full"
    text = config.read("layer_filter", "", to_text) or ""
    is_regex = config.read("layer_filter_regex", False, to_switch)
    presets = keys.LAYER_PRESETS["unet" if family in UNET_FAMILIES else family]
    if name in presets:
        contained, difference = presets[name]
        if contained:
            keep_only_layers(result, [match_containing(part) for part in contained])
        if difference:
            config.list_change("layer_filter_preset", difference, name)
    elif text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        patterns = [rf"(unet|transformer)\..*({part}).*" for part in parts]
        keep_only_layers(result, patterns if is_regex else [match_containing(part) for part in parts])
    elif family in UNET_FAMILIES:
        result.add_network_arg("conv_dim", rank)
        result.add_network_arg("conv_alpha", alpha)
        reason = "conv_in, conv_out and the layers of time and size embeddings get no adapter here"
        config.list_change("layer_filter_preset", reason, name)

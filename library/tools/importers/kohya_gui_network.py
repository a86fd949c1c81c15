"""The network of a kohya_ss GUI file: LoRA type, its arguments, and what is trained."""

from ...config.network_args import LYCORIS_PRESETS, TUCKER_ARGS, TUCKER_TYPES
from ...models.families import FAMILY_FACTS
from .equivalents import FLOW_FAMILIES, FULL_LOKR_DIM
from .imported import KeyReader, is_among, to_integer, to_number, to_positive_number, to_switch
from .keys import kohya_gui as keys


def read_network(reader: KeyReader) -> None:
    result, lora_type = reader.result, reader.read("LoRA_type")
    module, algorithm = keys.LORA_TYPES[lora_type]
    if module == "networks.lora" and result.family == "sd3":
        module = "networks.lora_sd3"
    result.set_option("network_module", module)
    if algorithm:
        result.add_network_arg("algo", algorithm)
        _read_lycoris_args(reader, algorithm)
    elif lora_type in ("Kohya LoHa", "Kohya LoKr"):
        _read_native_loha_args(reader, lora_type)
    elif lora_type != "Flux1 OFT":
        if lora_type == "Kohya LoCon":
            _read_conv_args(reader)
        names = {"Flux1": keys.FLUX_ARGS, "Lumina": keys.DROPOUTS}.get(lora_type, keys.NATIVE_ARGS)
        for name in names:
            value = reader.read(name)
            if not value or is_among(value, (0,)):
                continue
            if result.family == "chroma" and name.endswith(("mod_dim", "in_dims")):
                reader.list_change(name, "Chroma has no such layers, or they get no adapter here; remove it")
            else:
                result.add_network_arg(name, str(value).replace(" ", ""))
        _read_flux_switches(reader, lora_type)
    for name in ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"):
        if ratio := reader.read(name, None, to_positive_number):
            result.add_network_arg(name, ratio)
    for name in ("network_dropout", "scale_weight_norms"):
        value = reader.read(name, None, to_positive_number)
        if value and (algorithm not in ("", "locon") or module in ("networks.loha", "networks.lokr")):
            reader.list_change(name, f"only LoRA has it here, not {lora_type}; remove it")
        else:
            result.set_option(name, value)
    if algorithm == "lokr" and result.options.get("network_dim", 0) >= FULL_LOKR_DIM:
        result.options["network_alpha"] = float(result.options["network_dim"])  # full matrices have no scale
    if module == "networks.oft_flux" or algorithm in ("diag-oft", "boft"):
        result.options.pop("network_alpha", None)  # OFT and BOFT have no alpha


def _read_conv_args(reader: KeyReader) -> None:
    reader.result.add_network_arg("conv_dim", reader.read("conv_dim", 1, to_integer))
    reader.result.add_network_arg("conv_alpha", reader.read("conv_alpha", 1, to_number))


def _read_lycoris_args(reader: KeyReader, algorithm: str) -> None:
    if reader.result.family not in FLOW_FAMILIES and algorithm not in ("diag-oft", "boft"):
        _read_conv_args(reader)
    elif "conv_dim" in reader and reader.result.family not in FLOW_FAMILIES:
        reader.list_change("conv_dim", "OFT of convolutions is not supported; only linear layers are trained")
    preset = reader.read("LyCORIS_preset", "full")
    if preset in LYCORIS_PRESETS and reader.result.family not in FLOW_FAMILIES:
        if preset != "full":
            reader.result.add_network_arg("preset", preset)
    elif preset != "full":
        reason = "only the presets of LyCORIS for U-Nets are known; all layers of the blocks are trained"
        reader.list_change("LyCORIS_preset", f"{reason}, see docs/adapters.md", preset)
    if algorithm == "lokr":
        reader.result.add_network_arg("factor", reader.read("factor", -1, to_integer))
        if reader.read("decompose_both", False, to_switch):
            reader.result.add_network_arg("decompose_both", True)
    has_lora_args = algorithm == "locon"
    if reader.read("dora_wd", False, to_switch):
        if has_lora_args:
            reader.result.add_network_arg("dora_wd", True)
        else:
            reader.list_change(
                "dora_wd", f"weight decomposition of {algorithm} is not supported; use LoCon with dora_wd"
            )
    _read_dropouts(reader, has_lora_args, algorithm)
    for name in keys.LYCORIS_SWITCHES:
        if not reader.read(name) or is_among(reader.read(name), (0, False)):
            continue
        if name in TUCKER_ARGS and algorithm in TUCKER_TYPES:
            reader.result.add_network_arg(name, True)
        else:
            reader.list_change(name, "not supported by the adapter types here; remove it")


def _read_native_loha_args(reader: KeyReader, lora_type: str) -> None:
    if reader.read("conv_dim", 1, to_integer) > 0:
        _read_conv_args(reader)
    if reader.read("use_tucker", False, to_switch):
        reader.result.add_network_arg("use_tucker", True)
    factor = reader.read("factor", -1, to_integer)
    if lora_type == "Kohya LoKr" and factor != -1:
        reader.result.add_network_arg("factor", factor)
    _read_dropouts(reader, False, lora_type)


def _read_dropouts(reader: KeyReader, is_supported: bool, adapter: str) -> None:
    for name in ("rank_dropout", "module_dropout"):
        value = reader.read(name, None, to_positive_number)
        if value and is_supported:
            reader.result.add_network_arg(name, value)
        elif value:
            reader.list_change(name, f"only LoRA has it here, not {adapter}; remove it")


def _read_flux_switches(reader: KeyReader, lora_type: str) -> None:
    if lora_type != "Flux1":
        return
    if reader.read("split_mode", False, to_switch):
        reader.result.add_network_arg("train_blocks", "single")
    elif reader.read("train_blocks", "all") != "all":
        reader.list_harmless("train_blocks", "the GUI does not pass it on without split_mode")
    for name, reason in (
        ("split_qkv", "q, k and v share one down matrix here; their ranks add up to the same size"),
        ("train_lora_ggpo", "weight perturbation (GGPO) is not supported; remove it"),
    ):
        if reader.read(name, False, to_switch):
            reader.list_change(name, reason)
    if reader.read("train_t5xxl", False, to_switch) and reader.result.family == "chroma":
        reader.list_change("train_t5xxl", "the text encoder of Chroma cannot be trained here; remove it")
    elif reader.read("train_t5xxl", False, to_switch):
        reader.result.add_network_arg("train_t5xxl", True)


def read_trained_components(reader: KeyReader) -> None:
    result = reader.result
    unet_lr = reader.read("unet_lr", 1e-4, lambda value: to_number(value or 0)) or 0.0
    text_lr = reader.read("text_encoder_lr", 1e-4, lambda value: to_number(value or 0)) or 0.0
    t5_lr = reader.read("t5xxl_lr", 0.0, lambda value: to_number(value or 0))
    if unet_lr:
        result.set_option("unet_lr", unet_lr)
    if text_lr == 0 and unet_lr != 0:
        return  # the denoiser only
    if result.family == "lumina2":
        reader.list_change("text_encoder_lr", "the text encoder is not trained here; set it to 0", text_lr)
    if not FAMILY_FACTS[result.family].lora.text_encoders:
        return
    if unet_lr == 0 and text_lr != 0:
        result.options["network_train_text_encoder_only"] = True
    else:
        result.options["network_train_unet_only"] = False
    if text_lr:
        has_t5 = t5_lr and "train_t5xxl=True" in result.options.get("network_args", ())
        result.options["text_encoder_lr"] = [text_lr, t5_lr] if has_t5 else [text_lr]

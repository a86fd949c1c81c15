"""The bundled configs have the parameter counts of the published models and the keys of sd-scripts."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import original_checkpoints
import pytest
import torch
from published_configs import build_component_on_meta
from torch import nn

from library.adapters import component_key_names, injection
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.adapters.original_module_names import CLIP_KEYS, LDM_KEYS
from library.config.schema import AdapterConfig
from library.models import single_file
from library.models.checkpoint_header import CheckpointHeader
from library.models.checkpoint_inspection import (
    find_component_names,
    has_denoiser,
    match_bundled_config,
    reject_unsupported_file,
    reject_unsupported_model,
)
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.model_configs import (
    GUIDERS,
    is_component,
    list_bundled_configs,
    list_family_configs,
    load_bundled_config,
)
from library.web.presets import PRESETS

DATA = Path(__file__).resolve().parents[1] / "data"

COUNTS = {
    ("sd1", "unet"): 859_520_964,
    ("sd1", "vae"): 83_653_863,
    ("sd1", "text_encoder"): 123_060_480,
    ("sd2", "unet"): 865_910_724,
    ("sd2", "vae"): 83_653_863,
    ("sd2", "text_encoder"): 340_387_840,
    ("sd2_base", "unet"): 865_910_724,
    ("sd2_base", "text_encoder"): 340_387_840,
    ("sdxl", "unet"): 2_567_463_684,
    ("sdxl", "vae"): 83_653_863,
    ("sdxl", "text_encoder"): 123_060_480,
    ("sdxl", "text_encoder_2"): 694_659_840,
    ("sdxl_refiner", "unet"): 2_259_526_660,
    ("sdxl_refiner", "text_encoder_2"): 694_659_840,
    ("sd1_inpainting", "unet"): 859_535_364,
    ("sd2_inpainting", "unet"): 865_925_124,
    ("sdxl_inpainting", "unet"): 2_567_478_084,
    ("sd1_pix2pix", "unet"): 859_532_484,
    ("sdxl_pix2pix", "unet"): 2_567_475_204,
    ("sd3", "transformer"): 2_028_328_000,
    ("sd3", "text_encoder_2"): 694_659_840,
    ("sd3", "text_encoder_3"): 4_762_310_656,
    ("sd3_5_large", "transformer"): 8_056_627_520,
    ("sd3_5_medium", "transformer"): 2_243_171_520,
    ("flux", "transformer"): 11_901_408_320,
    ("flux", "vae"): 83_819_683,
    ("flux", "text_encoder"): 123_060_480,
    ("flux", "text_encoder_2"): 4_762_310_656,
    ("flux_schnell", "transformer"): 11_891_178_560,
    ("flux_kontext", "transformer"): 11_901_408_320,
    ("bria", "transformer"): 3_785_669_392,
    ("bria_fibo", "transformer"): 8_285_836_848,
    ("bria_fibo", "text_encoder"): 3_075_098_624,
    ("bria_fibo_edit", "transformer"): 8_285_836_848,
    ("bria_fibo2", "transformer"): 8_127_342_213,
    ("bria_fibo2", "text_encoder"): 4_437_815_808,
    ("joyimage_edit", "transformer"): 16_263_675_968,
    ("joyimage_edit", "text_encoder"): 8_767_123_696,
    ("joyimage_edit_plus", "transformer"): 16_263_675_968,
    ("flux_control", "transformer"): 11_901_604_928,
    ("flux_fill", "transformer"): 11_902_391_360,
    ("chroma", "transformer"): 8_899_983_424,
    ("flux2_dev", "transformer"): 32_223_281_152,
    ("flux2_dev", "vae"): 84_046_115,
    ("flux2_dev", "text_encoder"): 24_011_361_280,
    ("flux2_klein", "transformer"): 9_078_581_248,
    ("flux2_klein", "text_encoder"): 8_190_735_360,
    ("flux2_klein_4b", "transformer"): 3_875_544_576,
    ("z_image", "transformer"): 6_154_908_736,
    ("z_image", "text_encoder"): 4_022_468_096,
    ("z_image_omni", "transformer"): 6_513_266_880,
    ("z_image_omni", "siglip"): 427_888_064,
    ("qwen_image", "transformer"): 20_430_401_088,
    ("qwen_image_edit", "transformer"): 20_430_401_088,
    ("qwen_image_edit_plus", "transformer"): 20_430_401_088,
    ("qwen_image_layered", "transformer"): 20_430_407_232,
    ("qwen_image_edit_plus_2511", "transformer"): 20_430_401_088,
    ("qwen_image", "vae"): 126_892_531,
    ("qwen_image", "text_encoder"): 8_292_166_656,
    ("qwen_image21", "transformer"): 7_115_124_736,
    ("qwen_image21", "vae"): 337_740_404,
    ("qwen_image21", "text_encoder"): 8_767_123_696,
    ("aura_flow", "transformer"): 6_858_605_568,
    ("ernie_image", "transformer"): 8_033_490_048,
    ("glm_image", "transformer"): 6_926_882_880,
    ("glm_image", "vision_language_encoder"): 1_199_457_280,
    ("ernie_image", "text_encoder"): 3_849_090_048,
    ("longcat_image", "transformer"): 6_270_668_864,
    ("longcat_image_edit", "transformer"): 6_270_668_864,
    ("ovis_image", "transformer"): 7_370_449_728,
    ("ovis_image", "text_encoder"): 1_720_574_976,
    ("lumina2", "transformer"): 2_609_769_152,
    ("lumina2", "text_encoder"): 2_614_341_888,
    ("ideogram4", "transformer"): 9_279_288_448,
    ("ideogram4", "text_encoder"): 8_144_793_840,
    ("krea2", "transformer"): 12_820_073_036,
    ("krea2", "text_encoder"): 4_437_815_808,
    ("sana", "transformer"): 1_604_641_952,
    ("sana", "vae"): 312_250_275,
    ("sana_1_0", "transformer"): 1_604_462_752,
    ("flux3", "transformer"): 5_538_458_368,
    ("hunyuan_image", "transformer"): 17_425_795_520,
    ("hunyuan_image", "vae"): 405_575_491,
    ("hunyuan_image", "text_encoder_2"): 219_314_944,
    ("wan", "transformer"): 1_418_996_800,
    ("wan", "vae"): 126_892_531,
    ("wan", "text_encoder"): 5_680_910_336,
    ("wan_14b", "transformer"): 14_288_491_584,
    ("wan_i2v", "transformer"): 16_394_878_784,
    ("wan_i2v", "image_encoder"): 630_766_080,
    ("wan_flf2v", "transformer"): 16_395_536_704,
    ("wan_vace", "transformer"): 2_153_972_032,
    ("wan_vace_14b", "transformer"): 17_337_592_896,
    ("wan_fun_control", "transformer"): 1_564_502_336,
    ("wan_fun_control_14b", "transformer"): 16_395_124_544,
    ("wan_fun_control11", "transformer"): 1_564_602_176,
    ("wan_fun_control11_14b", "transformer"): 16_395_457_344,
    ("wan22_fun_control", "transformer"): 14_289_561_664,
    ("wan_animate", "transformer"): 17_274_816_884,
    ("wan22_t2v", "transformer_2"): 14_288_491_584,
    ("wan22_t2v", "transformer"): 14_288_491_584,
    ("wan22_i2v", "transformer"): 14_288_901_184,
    ("wan22_ti2v", "transformer"): 4_999_787_712,
    ("wan22_ti2v", "vae"): 704_688_668,
    ("skyreels_v2", "transformer"): 14_288_491_584,
    ("skyreels_v2_i2v", "transformer"): 16_394_878_784,
    ("hunyuan_video15", "transformer"): 8_326_608_160,
    ("hunyuan_video15", "vae"): 1_260_634_115,
    ("hunyuan_video15", "text_encoder"): 7_070_619_136,
    ("hunyuan_video15_i2v", "transformer"): 8_326_608_160,
    ("hunyuan_video15_i2v", "image_encoder"): 428_225_600,
    ("ltx_video", "transformer"): 1_923_385_472,
    ("ltx_video095", "transformer"): 1_923_385_472,
    ("ltx_video095", "vae"): 1_246_913_522,
    ("ltx_video095_0_9_7", "transformer"): 13_042_569_344,
    ("ltx_video", "vae"): 419_193_649,
    ("ltx2", "transformer"): 18_876_174_592,
    ("ltx2", "vae"): 1_222_479_601,
    ("ltx2", "connectors"): 1_431_475_200,
    ("ltx2", "text_encoder"): 12_187_325_040,
    ("ltx2_2_3", "transformer"): 18_988_838_144,
    ("ltx2_2_3", "vae"): 726_105_969,
    ("ltx2_2_3", "connectors"): 3_172_227_584,
    ("ltx_video_0_9_1", "vae"): 934_976_434,
    ("hunyuan_video", "transformer"): 12_821_012_544,
    ("hunyuan_video", "vae"): 246_478_803,
    ("hunyuan_video_i2v", "transformer"): 12_821_012_544,
    ("hunyuan_video_i2v", "text_encoder"): 8_355_272_704,
    ("hunyuan_video_33ch_i2v", "transformer"): 12_810_991_680,
    ("framepack", "transformer"): 12_874_314_816,
    ("framepack", "image_encoder"): 428_225_600,
    ("cogvideox", "transformer"): 5_570_283_072,
    ("cogvideox", "vae"): 215_583_907,
    ("cogvideox_2b", "transformer"): 1_693_783_872,
    ("cogvideox15", "transformer"): 5_570_676_352,
    ("mochi", "transformer"): 10_027_677_744,
    ("mochi", "vae"): 459_748_611,
    ("kandinsky5_video", "transformer"): 2_007_702_848,
    ("kandinsky5_video_pro", "transformer"): 19_311_325_248,
    ("kandinsky5_i2v", "transformer"): 2_007_702_848,
    ("kandinsky5_i2v_pro", "transformer"): 19_311_325_248,
    ("kandinsky6_video", "transformer"): 3_176_632_424,
    ("kandinsky6_video_pro", "transformer"): 30_136_326_248,
    ("sana_video", "transformer"): 2_056_862_144,
    ("minimax_h3", "transformer"): 33_122_992_896,
    ("minimax_h3", "vae"): 2_603_868_984,
    ("minimax_h3", "text_encoder"): 33_357_390_064,
    ("anima", "transformer"): 1_956_405_248,
    ("cosmos2_text2image", "transformer"): 1_956_405_248,
    ("cosmos2_text2image_14b", "transformer"): 14_265_265_152,
    ("cosmos2_video2world", "transformer"): 1_956_413_440,
    ("cosmos2_video2world_14b", "transformer"): 14_265_285_632,
    ("anima", "text_conditioner"): 134_663_680,
    ("anima", "text_encoder"): 596_049_920,
    ("cogview4", "transformer"): 6_369_118_272,
    ("cogview4", "vae"): 406_100_643,
    ("cogview4", "text_encoder"): 8_779_194_368,
    ("pixart_sigma", "transformer"): 610_856_096,
    ("nucleus_image", "transformer"): 16_922_679_296,
    ("nucleus_image", "text_encoder"): 8_767_123_696,
    ("prx", "transformer"): 1_170_691_648,
    ("prx", "text_encoder"): 2_614_341_888,
    ("prx_pixel", "transformer"): 7_003_535_872,
    ("prx_pixel", "text_encoder"): 1_720_574_976,
    ("prx_dc_ae", "transformer"): 1_170_576_928,
    ("prx_dc_ae", "vae"): 312_250_275,
    ("hidream", "transformer"): 17_105_733_184,
    ("hidream", "text_encoder_4"): 8_030_261_248,
    ("kandinsky5_image", "transformer"): 6_022_080_576,
    ("kolors", "unet"): 2_579_458_820,
    ("kolors", "text_encoder"): 6_243_584_000,
    ("aura_flow_v0_2", "transformer"): 6_842_876_928,
    ("aura_flow", "text_encoder"): 1_223_550_976,
}
"""Parameters of the published models."""


@pytest.mark.parametrize("config, part", COUNTS)
@pytest.mark.slow
def test_a_bundled_config_has_as_many_parameters_as_the_published_model(config, part):
    assert (
        sum(parameter.numel() for parameter in build_component_on_meta(config, part).parameters())
        == COUNTS[config, part]
    )


@pytest.mark.parametrize("family", FAMILY_FACTS)
def test_a_family_states_the_parameters_of_its_largest_model(family):
    assert FAMILY_FACTS[family].pipeline.num_parameters == max(
        COUNTS[config, part]
        for config, part in COUNTS
        if get_family_name(config) == family and part == FAMILY_FACTS[family].denoiser_name
    )


PROCESSORS = ("image_processor", "feature_extractor")  # have a configuration and no weights
SOUND = ("audio_vae", "vocoder")  # are not loaded
UNUSED = ("unconditional_transformer",)  # of Ideogram 4, which is neither trained nor previewed with


def test_every_bundled_config_belongs_to_a_family_and_is_complete():
    for name in list_bundled_configs():
        data = load_bundled_config(name)
        (family,) = [family for family in FAMILY_FACTS if name in list_family_configs(family)]
        facts = FAMILY_FACTS[family]
        index = data["model_index.json"]
        assert index["_class_name"] == facts.pipeline.class_name
        components = {
            key
            for key, value in index.items()
            if is_component(value) and key not in (*GUIDERS, *PROCESSORS, *SOUND, *UNUSED)
        }
        if family in ("wan_fun_control", "wan_fun_control11"):
            components.remove("image_encoder")  # of runs with a given first frame
        assert {*facts.components, "scheduler"} == components
        assert facts.detection.match_configs(data.get) is not None, name


def read_golden(name: str) -> dict[str, list[int]]:
    return json.loads((DATA / f"kohya_keys_{name}.json").read_text())


def filter_prefix(prefix: str, keys_and_shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {key: shape for key, shape in keys_and_shapes.items() if key.startswith(f"{prefix}_")}


def export_lora(
    model: nn.Module, targets, prefix: str, style: str
) -> tuple[injection.AdapterStateDict, dict[str, torch.Tensor]]:
    """The state dict of a LoRA in a meta model, and the tensors of its kohya file."""
    adapter = injection.inject_into_model(model, AdapterConfig(network_dim=16, network_alpha=8), targets, seed=1)
    state = {name: torch.zeros(tensor.shape) for name, tensor in injection.get_adapter_state_dict(model).items()}
    part = component_key_names.ComponentKeys("part", component_key_names.list_module_names(model), prefix, style)
    named = {f"part.{name}": tensor for name, tensor in state.items()}
    tensors, _ = convert_to_file_format(
        named, {f"part.{name}": adapter.alpha for name in adapter.modules}, [part], "kohya"
    )
    restored = convert_from_file_format(tensors, {}, [part])
    assert restored.state_dict.keys() == named.keys()
    assert restored.alphas == dict.fromkeys((f"part.{name}" for name in adapter.modules), 8.0)
    return state, tensors


@pytest.mark.slow
@pytest.mark.parametrize("family, config, name", [("sd1", "sd1", "sd15"), ("sdxl", "sdxl", "sdxl")])
def test_keys_and_shapes_of_the_denoiser_are_those_of_sd_scripts(family, config, name):
    family = FAMILIES.get(family)
    _, tensors = export_lora(
        build_component_on_meta(config, family.facts.denoiser_name),
        family.facts.lora.targets,
        family.facts.lora.prefix,
        family.facts.lora.key_style,
    )
    assert {key: list(tensor.shape) for key, tensor in tensors.items()} == filter_prefix(
        family.facts.lora.prefix, read_golden(name)
    )


@pytest.mark.parametrize(
    "family, config, name",
    [("sd1", "sd1", "sd15"), ("sdxl", "sdxl", "sdxl"), ("sd3", "sd3", "sd3_medium"), ("flux", "flux", "flux")],
)
def test_keys_and_shapes_of_the_text_encoders_are_those_of_sd_scripts(family, config, name):
    family = FAMILIES.get(family)
    lora, t5_encoder = family.facts.lora, family.facts.text.t5_encoder
    trained = {part: encoder for part, encoder in lora.text_encoders.items() if part != t5_encoder}
    for part, encoder in trained.items():
        _, tensors = export_lora(
            build_component_on_meta(config, part), encoder.targets, encoder.prefix, encoder.key_style
        )
        expected = filter_prefix(encoder.prefix, read_golden(name))
        assert {key: list(tensor.shape) for key, tensor in tensors.items()} == expected
    assert {key.split("_")[1] for key in read_golden(name)} == {
        prefix.split("_")[1] for prefix in (lora.prefix, *(encoder.prefix for encoder in trained.values()))
    }


def test_original_names_of_convolutions_are_those_of_sd_scripts():
    """Convolutions are the remaining modules of a UNet."""
    model = build_component_on_meta("sdxl", "unet")
    files = component_key_names.build_key_map((name for name, _ in model.named_modules()), LDM_KEYS)
    golden_names = {key.split(".")[0] for key in filter_prefix("lora_unet", read_golden("sdxl_conv"))}
    ours = {
        component_key_names.build_kohya_name(files.renames[name], "lora_unet")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    assert golden_names <= ours
    assert len({*files.renames.values()}) == len(files.renames), "module names are unique"
    outside = {"time_embed", "label_emb", "input_blocks_0_0", "out_2"}
    assert all(re.sub("^lora_unet_", "", name).startswith(tuple(outside)) for name in ours - golden_names)


def test_sd2_has_the_modules_of_sd1_and_its_projections_are_linear():
    family = FAMILIES.get("sd2")
    _, tensors = export_lora(
        build_component_on_meta("sd2", "unet"),
        family.facts.lora.targets,
        family.facts.lora.prefix,
        family.facts.lora.key_style,
    )
    assert tensors.keys() == filter_prefix("lora_unet", read_golden("sd15")).keys()
    assert {tensor.ndim for tensor in tensors.values()} == {0, 2}
    _, text = export_lora(
        build_component_on_meta("sd2", "text_encoder"),
        family.facts.lora.text_encoders["text_encoder"].targets,
        "lora_te",
        CLIP_KEYS,
    )
    assert len(text) == 23 * 6 * 3


def get_family_name(config: str) -> str | None:
    """The family with the longest name that fits: flux_kontext is none of flux."""
    names = [name for name in FAMILY_FACTS if config == name or config.startswith(f"{name}_")]
    return max(names, key=len, default=None)


SAME_SIZES = (
    "z_image_base",
    "krea2_turbo",
    "pixart_sigma_512",
    "pixart_sigma_2k",
    "hunyuan_video15_720p",
    "wan22_ti2v_tiny",
)
"""Configurations that differ from another in schedulers or positions only, which files do not contain."""


TOLD_BY_OPTIONS = {"wan22_t2v", "skyreels_v2", "hunyuan_video15_i2v", "hunyuan_video_i2v"}
"""Families whose files have the names and sizes of Wan 2.1 14B, HunyuanVideo and HunyuanVideo 1.5 T2V."""


@pytest.mark.parametrize(
    "config",
    [
        name
        for name in list_bundled_configs()
        if get_family_name(name) in original_checkpoints.TRANSFORMERS and name not in SAME_SIZES
    ],
)
@pytest.mark.slow
def test_files_of_published_size_are_detected_with_original_and_diffusers_keys(config):
    family = get_family_name(config)
    model = build_component_on_meta(config, "transformer")
    for prefix, tensors in (
        ("", original_checkpoints.TRANSFORMERS[family](model)),
        ("model.diffusion_model.", original_checkpoints.TRANSFORMERS[family](model)),
        ("", model.state_dict()),
    ):
        header = CheckpointHeader({prefix + name: tuple(tensor.shape) for name, tensor in tensors.items()}, {})
        reject_unsupported_file(header)
        reject_unsupported_model(header, FAMILY_FACTS.values())
        candidates = {
            name: match_bundled_config(header, name, facts)
            for name, facts in FAMILY_FACTS.items()
            if has_denoiser(header, facts)
        }
        found = {name: each for name, each in candidates.items() if each is not None}
        # Editing models have the files of the model that they come from; only --family tells them apart.
        told = {name for name in found if FAMILY_FACTS[name].pipeline.kind == "edit"} | TOLD_BY_OPTIONS
        told |= {"wan22_ti2v"} if config == "wan_tiny" else set()  # the tiny ones have one size
        assert {name: each for name, each in found.items() if name not in told} == {family: config}
        assert find_component_names(header, FAMILY_FACTS[family]) == (FAMILY_FACTS[family].file_denoiser,)


@pytest.mark.parametrize(
    "config",
    (
        "sd3 sd3_5_medium flux flux_schnell chroma flux2_dev flux2_klein_4b z_image aura_flow lumina2 ovis_image "
        "longcat_image krea2 ideogram4 anima flux3 hunyuan_image qwen_image21 pixart_sigma wan wan_14b "
        "wan_i2v wan_flf2v wan_vace wan_fun_control wan_fun_control11 wan22_fun_control wan_animate hunyuan_video hunyuan_video15"
    ).split(),
)
@pytest.mark.slow
def test_original_weights_of_published_size_are_converted_to_those_of_diffusers(config):
    """Keys and shapes on the meta device: diffusers' conversion of FLUX supports no other size."""
    family = get_family_name(config)
    model = build_component_on_meta(config, "transformer")
    conversion = single_file.build_key_conversion(FAMILY_FACTS[family], "transformer", model.config)
    originals = original_checkpoints.TRANSFORMERS[family](model)
    originals = {single_file._rename_start(key, conversion.renames, ""): each for key, each in originals.items()}
    renamed = single_file._convert_keys(model, originals, "", conversion)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    kernels = ".0.kernel"  # of blurs, which are no weights
    assert {name: tensor.shape for name, tensor in renamed.items() if not name.endswith(kernels)} == shapes


ORIGINAL = {
    "unet": original_checkpoints.convert_unet_to_ldm,
    "vae": original_checkpoints.convert_vae_to_ldm,
    "CLIPTextModel": original_checkpoints.convert_clip,
    "OpenCLIP": lambda model: original_checkpoints.convert_open_clip(model, more_layers=1),
}


@pytest.mark.parametrize(
    "config, part, original",
    [
        ("sd1", "unet", "unet"),
        ("sd1", "vae", "vae"),
        ("sd1", "text_encoder", "CLIPTextModel"),
        ("sd2", "unet", "unet"),
        ("sd2", "text_encoder", "OpenCLIP"),
        ("sdxl", "unet", "unet"),
        ("sdxl", "text_encoder_2", "OpenCLIP"),
    ],
)
def test_a_single_file_of_published_size_has_every_weight(config, part, original):
    model = build_component_on_meta(config, part)
    tensors = {name: tensor.to("meta") for name, tensor in ORIGINAL[original](model).items()}
    if part.startswith("text"):
        actual = single_file._convert_text_encoder_keys(model, tensors, "", single_file.KeyConversion())
    else:
        actual = single_file._convert_keys(model, tensors, "", single_file.KeyConversion())
    state_dict = model.state_dict()
    assert {name: actual[name].shape for name in state_dict} == {
        name: tensor.shape for name, tensor in state_dict.items()
    }


def test_the_files_of_qwen_image_edit_2511_and_of_layers_are_told_from_qwen_image_by_their_marks():
    model, names = (
        build_component_on_meta("qwen_image", "transformer"),
        [name for name in FAMILY_FACTS if f"{name}_".startswith("qwen_image_")],
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def match(shapes):
        header = CheckpointHeader(shapes, {})
        return {name: match_bundled_config(header, name, FAMILY_FACTS[name]) for name in names}

    layered = "qwen_image_layered"
    assert match(shapes) == {**{name: name for name in names}, layered: None}
    of_layers = match(shapes | {"time_text_embed.addition_t_embedding.weight": (2, 3072)})
    assert of_layers == {**dict.fromkeys(names), layered: layered}
    marked = match(shapes | {"__index_timestep_zero__": (0,)})
    assert marked == {**dict.fromkeys(names), "qwen_image_edit_plus": "qwen_image_edit_plus_2511"}


def test_presets_state_the_parameters_of_the_model_that_they_download():
    """Those of one of the family's models; where its name says how many billions, near that."""
    num_named = 0
    for name, preset in PRESETS.items():
        family = name if name in FAMILY_FACTS else "flux2_klein"
        if not preset.model:
            continue
        assert preset.num_parameters in {
            COUNTS[config, part]
            for config, part in COUNTS
            if get_family_name(config) == family and part == FAMILY_FACTS[family].denoiser_name
        }, name
        if name in ("wan_vace", "wan_animate"):
            continue  # named after the model without its blocks for control clips, or for faces
        if found := re.search(r"-(\d+(?:\.\d+)?)b\b", preset.model.replace("_", "-"), re.IGNORECASE):
            assert preset.num_parameters / 1e9 == pytest.approx(float(found[1]), rel=0.2), name
            num_named += 1
    assert num_named > 10
    assert PRESETS["kandinsky5_video"].num_parameters == COUNTS["kandinsky5_video", "transformer"], "Lite"

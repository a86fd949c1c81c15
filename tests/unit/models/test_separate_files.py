"""Every family loads from ComfyUI's separate files: the denoiser, the VAE and the text encoders."""

import model_layouts
import original_checkpoints
import pytest
import torch
from family_cases import build_case, get_modules, list_cases
from tiny_pipelines import TINY

from library.config.schema import ModelConfig
from library.errors import ConfigError, FileError
from library.models.detect import detect_model
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.loading import import_model_class
from library.models.model_configs import build_bundled_reader, load_bundled_config
from library.models.weights import build_empty_model
from library.parallel.stored_base import keep_stored_layers

__all__ = ["build_case"]  # a fixture
FOLDERS_ONLY = (
    *("kolors", "ltx_video", "ltx_video095", "ltx2", "prx", "prx_pixel", "nucleus_image", "bria_fibo_edit"),
    "glm_image",
    *("cogvideox", "cogvideox15", "mochi", "kandinsky5_video", "sana_video", "skyreels_v2_i2v", "bria", "bria_fibo"),
    *("bria_fibo2", "kandinsky5_i2v", "kandinsky6_video"),
    *("minimax_h3", "cosmos2_text2image", "cosmos2_video2world"),
)
NAMES = [name for name in FAMILY_FACTS if name not in (*FOLDERS_ONLY, *model_layouts.EXPERTS)]


@pytest.mark.parametrize("name", list_cases(NAMES))
@torch.no_grad()
def test_a_model_in_separate_files_is_the_model_in_a_folder(name, build_case, tmp_path):
    _, tiny = build_case(name)
    options = model_layouts.write_separate_files(name, tiny.pipe, tmp_path)
    detected = detect_model(options)
    assert (detected.family, detected.source_type, detected.stored_formats) == (name, "file", ())
    family = FAMILIES.get(name)(options)
    pipe = family.load(detected, torch.float32)
    for part, module in get_modules(family, pipe).items():
        expected, unused = getattr(tiny.pipe, part).state_dict(), ("lm_head.weight",)
        for key, tensor in module.state_dict().items():
            assert key in unused or torch.equal(tensor, expected[key]), f"{part}.{key}"
    if family.facts.control.text_tokens_per_image == 0 and name != "flux2_dev":  # whose byte tokenizer has no <pad>
        ours, theirs = (family.encode_prompts(each, ["a red circle"]) for each in (pipe, tiny.pipe))
        for key, rows in theirs.items():
            torch.testing.assert_close(list(ours[key]), list(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", model_layouts.EXPERTS)
@torch.no_grad()
def test_two_experts_in_a_file_each_are_those_of_the_folder(name, build_case, tmp_path):
    _, tiny = build_case(name)
    pipe = tiny.pipe
    experts = {"low_noise": pipe.transformer_2, "high_noise": pipe.transformer.high_noise}
    paths = {
        expert: model_layouts.save_tensors(
            original_checkpoints.convert_wan_transformer(model), tmp_path / f"wan2.2_{expert}_14B.safetensors"
        )
        for expert, model in experts.items()
    }
    files = model_layouts.build_files("wan", pipe)
    others = {
        option: model_layouts.save_tensors(files[component], tmp_path / f"{option}.safetensors")
        for option, component in (("vae", "vae"), ("text_encoder", "text_encoder"))
    }
    others["tokenizer_cache_dir"] = model_layouts.save_tokenizers(name, pipe, tmp_path / "tokenizers")
    options = ModelConfig(paths["low_noise"], dit_high_noise=paths["high_noise"], **others)
    loaded = FAMILIES.get(name)(options).load(detect_model(options), torch.float32)
    for ours, theirs in ((loaded.transformer, pipe.transformer), (loaded.transformer_2, pipe.transformer_2)):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    state = original_checkpoints.convert_wan_transformer(experts["high_noise"])
    fp8 = model_layouts.save_tensors(model_layouts.scale_to_fp8(state, "scale_weight")[0], tmp_path / "fp8.safetensors")
    mixed = ModelConfig(paths["low_noise"], dit_high_noise=fp8, **others)
    assert detect_model(options).stored_formats == () and detect_model(mixed).stored_formats == ("fp8",)
    parts = ("transformer", "transformer_2")
    kept = FAMILIES.get(name)(mixed).load(detect_model(mixed), torch.float32, parts, keeps_stored=True).transformer
    assert keep_stored_layers(kept.high_noise) > 10 and keep_stored_layers(kept.low_noise) == 0
    for expert, attribute in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        version = next(iter(FAMILY_FACTS[name].options.musubi_versions), None)
        only = ModelConfig(paths[expert], noise_experts=expert, model_version=version, **others)
        detected = detect_model(only)
        model = getattr(FAMILIES.get(detected.family)(only).load(detected, torch.float32), attribute)
        state = experts[expert].state_dict()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    swapped = ModelConfig(paths["high_noise"], dit_high_noise=paths["low_noise"], **others)
    with pytest.raises(ConfigError) as caught:
        detect_model(swapped)
    assert [problem.option for problem in caught.value.problems] == ["pretrained_model_name_or_path", "dit_high_noise"]
    with pytest.raises(ConfigError, match="dit_high_noise"):
        detect_model(ModelConfig(paths["low_noise"], model_version=only.model_version, **others))


def test_the_families_without_separate_files_are_listed():
    assert {name for name, facts in FAMILY_FACTS.items() if not facts.detection.keys} == {*FOLDERS_ONLY}
    assert {*TINY} >= {*FAMILY_FACTS}


@pytest.mark.parametrize(
    ("name", "family", "key"),
    [
        ("sana_video", "sana", "patch_embedding.weight"),
        ("kandinsky5_video", "kandinsky5_image", "visual_embeddings.in_layer.weight"),
    ],
)
def test_a_file_of_a_video_model_is_not_taken_for_one_of_images(name, family, key, tmp_path):
    """The model that is loaded from folders alone has the keys and widths of the one that is loaded from files, too."""
    read = build_bundled_reader(load_bundled_config(name))
    component_class = import_model_class(*read("model_index.json")["transformer"])
    shape = build_empty_model(component_class, read("transformer/config.json")).get_parameter(key).shape
    tensors = {each: torch.zeros(1, 1) for each in FAMILY_FACTS[family].detection.keys} | {key: torch.zeros(shape)}
    path = model_layouts.save_tensors(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=f"is {FAMILY_FACTS[name].title}; use the model as a diffusers folder"):
        detect_model(path)

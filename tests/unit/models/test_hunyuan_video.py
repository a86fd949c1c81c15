"""HunyuanVideo: the tokenizer of Llama 3, models that are refused, the names of LoRA files."""

import json
from dataclasses import replace

import pytest
import torch
from original_checkpoints import convert_hunyuan_video_transformer
from safetensors.torch import save_file
from tiny_pipelines import TINY
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from library.config.schema import ModelConfig
from library.dataset.clip_windows import FrameRule, FrameSettings, list_frame_windows
from library.models import detect, single_file
from library.models.checkpoint_inspection import resolve_component_source
from library.models.families.hunyuan_video import FACTS, HUNYUAN_VIDEO_KEYS
from library.models.loading import import_model_class
from library.models.model_configs import ModelError, build_bundled_reader, load_bundled_config
from library.models.tokenizers import build_byte_tokenizer, load_pretrained_tokenizer


def test_a_tokenizer_of_bytes_that_is_called_one_of_llama_keeps_its_tokens(tmp_path):
    config = load_bundled_config("hunyuan_video_tiny")["tokenizer/tokenizer_config.json"]
    original = build_byte_tokenizer(PreTrainedTokenizerFast, config)
    original.save_pretrained(str(tmp_path))
    text = "a red circle, \N{LATIN SMALL LETTER E WITH ACUTE}"
    expected = original(text).input_ids
    assert load_pretrained_tokenizer(LlamaTokenizer, str(tmp_path))(text).input_ids == expected
    assert LlamaTokenizer.from_pretrained(str(tmp_path))(text).input_ids != expected, "transformers makes another one"


def test_a_transformer_of_i2v_is_refused_in_a_pipeline_from_text():
    configs = dict(load_bundled_config("hunyuan_video"))
    match = FACTS.detection.match_configs(build_bundled_reader(configs))
    assert (match.size_multiple, match.prediction_type, match.has_guidance_embeds) == (16, "flow", True)
    configs["transformer/config.json"] = {**configs["transformer/config.json"], "image_condition_type": "token_replace"}
    with pytest.raises(ModelError, match="that of I2V in a pipeline from text"):
        FACTS.detection.match_configs(build_bundled_reader(configs))


@pytest.mark.parametrize(
    ("name", "file", "option", "found"),
    [
        ("hunyuan_video_i2v", "v2_replace_image_to_video.safetensors", None, "set --family hunyuan_video_i2v"),
        ("hunyuan_video_i2v", "v2_replace_image_to_video.safetensors", "hunyuan_video_i2v", "hunyuan_video_i2v"),
        ("hunyuan_video_33ch_i2v", "image_to_video.safetensors", None, "hunyuan_video_33ch_i2v"),
        ("hunyuan_video", "t2v.safetensors", None, "hunyuan_video"),
    ],
)
def test_files_of_i2v_are_told_apart_by_their_channels_or_by_an_option(name, file, option, found, tmp_path):
    config = load_bundled_config(f"{name}_tiny")["transformer/config.json"]
    model = import_model_class("diffusers", "HunyuanVideoTransformer3DModel").from_config(config)
    save_file(convert_hunyuan_video_transformer(model), tmp_path / file)
    arguments = tmp_path / file, option, None, ModelConfig()
    if found.startswith("set"):
        with pytest.raises(ModelError, match=found):
            detect._detect_single_file(*arguments)
    else:
        assert detect._detect_single_file(*arguments).family == found


def test_models_of_clips_alone_get_no_short_windows():
    settings, rule = FrameSettings((1, 5, 9), "chunk"), FrameRule(stride=4, least=5)
    assert list_frame_windows(9, settings, rule) == [(0, 5), (0, 9)]
    assert list_frame_windows(4, replace(settings, frame_extraction="full"), rule) == []
    assert list_frame_windows(6, replace(settings, frame_extraction="full"), rule) == [(0, 5)]


def test_lora_files_have_the_names_of_musubi_tuner_and_for_comfyui_its_own():
    names = {module.name for module in HUNYUAN_VIDEO_KEYS.layout}
    assert {"double_blocks.{}.img_attn_qkv", "double_blocks.{}.txt_mlp.fc2", "single_blocks.{}.linear1"} <= names
    other = {module.name for module in HUNYUAN_VIDEO_KEYS.comfyui_style.layout}
    assert {"double_blocks.{}.img_attn.qkv", "double_blocks.{}.txt_mlp.2", "single_blocks.{}.linear1"} <= other


def test_a_file_with_the_names_of_its_authors_becomes_the_transformer_of_diffusers(tmp_path):
    model = TINY["hunyuan_video"]().pipe.transformer
    save_file(convert_hunyuan_video_transformer(model), tmp_path / "file.safetensors")
    config = load_bundled_config("hunyuan_video_tiny")["transformer/config.json"]
    conversion = single_file.build_key_conversion(FACTS, "transformer", config)
    loaded = single_file.load_single_file_component(
        type(model),
        str(tmp_path / "file.safetensors"),
        config,
        prefixes=FACTS.single_files.prefixes["transformer"],
        dtype=torch.float32,
        device=None,
        conversion=conversion,
    )
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video15", "ltx_video", "cogvideox", "mochi", "wan"])
def test_a_folder_with_the_autoencoder_of_a_video_model_is_taken_for_it(name, tmp_path):
    config = load_bundled_config(f"{name}_tiny")
    (tmp_path / "config.json").write_text(json.dumps(config["vae/config.json"]), encoding="utf-8")
    source = resolve_component_source(str(tmp_path), "vae", build_bundled_reader(config))
    assert source.source_type == "folder"

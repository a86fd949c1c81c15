"""What single families do otherwise than the rest, compared with diffusers' pipelines."""

import copy
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import original_checkpoints
import pytest
import torch
from diffusers import (
    AnimaModularPipeline,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from family_cases import SIZE, Recorder, build_case, make_generators
from loaded_weights import assert_same_weights
from PIL import Image
from problem_lines import format_lines
from published_configs import build_component_on_meta
from safetensors.torch import save_file

from library.adapters.component_key_names import ComponentKeys, build_key_map, build_kohya_name, list_module_names
from library.adapters.targets_rank_alpha import match_target_modules
from library.config.schema import ModelConfig
from library.config.schema_data import DataConfig
from library.dataloader.prepare import prepare_data
from library.dataloader.sample_prompts import Prompt
from library.errors import FileError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.families.anima import ANIMA_KEYS
from library.models.families.hunyuan_image_keys import HUNYUAN_IMAGE_KEYS
from library.models.loading import load_pipeline_on_meta
from library.models.model_configs import load_bundled_config
from library.models.validate_options import validate_prompts

__all__ = ["build_case"]  # a fixture

DATASET = """[[datasets]]
resolution = {resolution}
enable_bucket = {bucket}
[[datasets.subsets]]
image_dir = '{folder}'
"""


def test_auraflow_refuses_images_without_positions(tmp_path):
    model = detect_model("random:aura_flow:tiny")
    assert (model.max_side, detect_model("random:sdxl:tiny").max_side) == (256, None)
    Image.new("RGB", (512, 128)).save(tmp_path / "wide.png")

    def prepare(resolution, bucket, max_side=model.max_side):
        (tmp_path / "set.toml").write_text(DATASET.format(resolution=resolution, bucket=bucket, folder=tmp_path))
        config = DataConfig(dataset_config=str(tmp_path / "set.toml"), min_bucket_reso=64)
        return prepare_data(config, model.size_multiple, model="AuraFlow", max_side=max_side)

    for resolution, bucket, key in ((320, "false", "resolution"), (256, "true", "max_bucket_reso")):
        with pytest.raises(
            FileError, match=rf"(set\.toml:\d+: |--){key}: AuraFlow has positions for sides of up to 256"
        ):
            prepare(resolution, bucket)
        assert prepare(resolution, bucket, max_side=None).manifest.samples
    assert prepare(256, "false").manifest.samples
    problems = format_lines(validate_prompts([Prompt("a", width=320, height=256)], model))
    assert len(problems) == 1 and "AuraFlow has positions for at most 256 pixels, not 320" in problems[0]


@pytest.mark.slow
@torch.no_grad()
def test_cogview4_is_told_the_timesteps_before_their_shift(build_case):
    family, tiny = build_case("cogview4")
    pipe, record = tiny.pipe, Recorder(tiny.pipe.transformer)
    pipe(
        **tiny.call, **SIZE, latents=tiny.batch.latents, guidance_scale=1.0, num_inference_steps=4, output_type="latent"
    )
    told = [float(call["timestep"][0]) for call in record.calls]
    assert told == [1000, 667, 334, 1]
    for sigma, expected in zip(pipe.scheduler.sigmas.tolist(), told, strict=False):
        family.predict(pipe, pipe.transformer, tiny.batch.latents, torch.full((2,), 1000 * sigma), tiny.batch)
        assert record.calls[-1]["timestep"].tolist() == pytest.approx([expected] * 2, rel=1e-4)
    process = family.build_noise_process(pipe)
    assert process.shift.compute_factor(4096) == pytest.approx(math.sqrt(4096 / 256) * 0.75 + 0.25)


@pytest.mark.slow
@torch.no_grad()
def test_cogview4_attends_as_in_diffusers_and_not_to_padding(build_case):
    from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor

    family, tiny = build_case("cogview4")
    t, theirs = torch.tensor([700.0, 250.0]), copy.deepcopy(tiny.pipe)
    for block in theirs.transformer.transformer_blocks:
        block.attn1.set_processor(CogView4AttnProcessor())
    ours, reference = (
        family.predict(pipe, pipe.transformer, tiny.batch.latents, t, tiny.batch) for pipe in (tiny.pipe, theirs)
    )
    torch.testing.assert_close(ours, reference)


@pytest.mark.slow
@torch.no_grad()
def test_negative_prompts_have_no_instruction(build_case):
    for name, number in (("lumina2", 5), ("sana", 5)):
        family, tiny = build_case(name)
        (negative,) = family.encode_negative_prompts(tiny.pipe, ["blue"])["embeds"]
        assert len(negative) == number, "the start token and the letters"
        (caption,) = family.encode_prompts(tiny.pipe, ["blue"])["embeds"]
        assert caption.shape != negative.shape or not torch.allclose(caption, negative)
        assert family.find_truncated_prompts(tiny.pipe, ["a" * 400]) == ["a" * 400]


@pytest.mark.slow
@torch.no_grad()
def test_krea_2_turbo_has_one_shift_and_few_steps():
    family = FAMILIES.get("krea2")()
    pipe = family.load("random:krea2:tiny", torch.float32, family.facts.text.components)
    pipe = family.load("random:krea2:tiny", torch.float32, ("vae", "transformer"), pipe=pipe)
    pipe.set_progress_bar_config(disable=True)
    assert family.build_noise_process(pipe).shift.compute_factor(6400) == pytest.approx(math.exp(1.15))
    assert family.build_noise_process(pipe).shift.compute_factor(256) == pytest.approx(math.exp(0.5))
    pipe.register_to_config(is_distilled=True)
    assert family.build_noise_process(pipe).shift.compute_factor(256) == pytest.approx(math.exp(1.15))
    record, prompt = Recorder(pipe.transformer), Prompt("a", width=64, height=64)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a", ""))
    family.generate_image(pipe, prompt, cond, negative, make_generators(1)[0], None)
    assert len(record.calls) == 8


@pytest.mark.slow
@torch.no_grad()
def test_anima_is_loaded_from_its_published_files_and_from_a_folder_that_diffusers_writes(build_case, tmp_path):
    family, tiny = build_case("anima")
    pipe = tiny.pipe
    for name, tensors in original_checkpoints.build_anima_files(pipe).items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("transformer", "vae", "text_encoder")]
    for part, repository in family.facts.text.tokenizer_repo_ids.items():
        getattr(pipe, part).save_pretrained(tmp_path / "tokenizers" / repository.replace("/", "_"))
    options = ModelConfig(
        paths[0], vae=paths[1], text_encoder=paths[2], tokenizer_cache_dir=str(tmp_path / "tokenizers")
    )
    modular = AnimaModularPipeline()
    modular.update_components(**pipe.components)
    modular.save_pretrained(str(tmp_path / "folder"), overwrite_modular_index=True)
    for source in (options, ModelConfig(str(tmp_path / "folder"))):
        detected = detect_model(source)
        assert (detected.family, detected.size_multiple, detected.max_side) == ("anima", 16, 2048)
        loaded = FAMILIES.get("anima")(source).load(detected, torch.float32)
        assert_same_weights(family, loaded, pipe)
        assert family.encode_prompts(loaded, ["a cat"])["embeds"][0].equal(
            family.encode_prompts(pipe, ["a cat"])["embeds"][0]
        )

    images = []
    for each in (pipe, modular):
        generator = torch.Generator().manual_seed(1)
        output = each(prompt="a cat", **SIZE, num_inference_steps=2, generator=generator)
        images.append((output.get("images") if each is modular else output.images)[0])
    assert images[0].tobytes() == images[1].tobytes()


def test_anima_trains_the_layers_and_timesteps_of_sd_scripts():
    model, family = build_component_on_meta("anima", "transformer"), FAMILIES.get("anima")
    names = build_key_map((name for name, _ in model.named_modules()), ANIMA_KEYS).renames
    excluded = re.compile(r".*(_modulation|_norm|_embedder|final_layer).*")
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    theirs = [name for name in linear if not excluded.fullmatch(names[name])]
    assert list(match_target_modules(model, family.facts.lora.targets)) == theirs and len(theirs) == 280
    assert names[theirs[3]] == "blocks.0.self_attn.output_proj"
    assert family().build_noise_process(None).shift.compute_factor(4096) == 1


@pytest.mark.slow
@torch.no_grad()
def test_flux3_masks_the_window_of_longer_texts_and_is_loaded_from_a_folder_that_diffusers_writes(build_case, tmp_path):
    family, tiny = build_case("flux3")
    pipe, t = tiny.pipe, torch.tensor([700.0, 250.0])
    cond = family.encode_prompts(pipe, ["a cat", "a very long text " * 8])
    assert [len(row) for row in cond["embeds"]] == [80, 160]
    pair = family.predict(pipe, pipe.transformer, tiny.batch.latents, t, replace(tiny.batch, cond=cond))
    for number in (0, 1):
        row = slice(number, number + 1)
        batch = replace(tiny.batch, cond={"embeds": cond["embeds"][row]})
        alone = family.predict(pipe, pipe.transformer, tiny.batch.latents[row], t[row], batch)
        torch.testing.assert_close(alone, pair[row], rtol=1e-4, atol=1e-5)

    from diffusers import Flux3AutoBlocks, Flux3ModularPipeline

    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")  # a model that writes longer prompts
    modular = Flux3ModularPipeline(blocks=blocks)
    modular.update_components(**pipe.components)
    modular.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    assert "scheduler" not in json.loads((tmp_path / "modular_model_index.json").read_text(encoding="utf-8"))
    loaded = family.load(detect_model(str(tmp_path)), torch.float32)
    assert_same_weights(family, loaded, pipe)
    assert family.build_noise_process(loaded).shift.compute_factor(256) == 6.93

    images = []
    modular.tokenizer.tokenizer = pipe.tokenizer
    for each in (pipe, modular):
        generator = torch.Generator().manual_seed(1)
        output = each(prompt="a cat", **SIZE, num_inference_steps=2, generator=generator)
        images.append((output.get("images") if each is modular else output.images)[0])
    assert images[0].tobytes() == images[1].tobytes()


@torch.no_grad()
def test_hunyuan_image_takes_apostrophes_for_no_quotes(build_case):
    family, tiny = build_case("hunyuan_image")
    with_apostrophes, in_quotes = "the woman's dress and the man's hat", 'a sign “open” beside "it\'s"'
    glyphs = family.encode_prompts(tiny.pipe, [with_apostrophes, in_quotes])["glyphs"]
    assert [len(row) for row in glyphs] == [1, len('Text "it\'s". Text "open". ') + 1] and not glyphs[0].any()
    pipe = load_pipeline_on_meta(family, detect_model(tiny.source), torch.float32)
    on_meta = family.encode_prompts_on_meta(pipe, [with_apostrophes, in_quotes])["glyphs"]
    assert [len(row) for row in on_meta] == [len(row) for row in glyphs]


@pytest.mark.slow
@torch.no_grad()
def test_hunyuan_image_joins_its_texts_as_in_diffusers_and_reads_what_is_in_quotes(build_case):
    family, tiny = build_case("hunyuan_image")
    pipe, t = tiny.pipe, torch.tensor([700.0, 250.0])
    pipe.tokenizer_max_length = 1000
    texts = ['a shop with the words "open now" and ‘closed’', "a cat"]
    cond = family.encode_prompts(pipe, texts)
    glyphs = 'Text "closed". Text "open now". '
    assert [len(row) for row in cond["glyphs"]] == [len(glyphs) + 1, 1] and not cond["glyphs"][1].any()
    pair = family.predict(pipe, pipe.transformer, tiny.batch.latents, t, replace(tiny.batch, cond=cond))
    theirs = copy.deepcopy(pipe.transformer)
    theirs.__class__ = HunyuanImageTransformer2DModel
    reference = family.predict(pipe, theirs, tiny.batch.latents, t, replace(tiny.batch, cond=cond))
    torch.testing.assert_close(pair, reference, rtol=1e-4, atol=1e-5)
    padded = replace(tiny.batch, cond=cond, text_pad_multiple=64)
    padded = family.predict(pipe, pipe.transformer, tiny.batch.latents, t, padded)
    torch.testing.assert_close(pair, padded, rtol=1e-4, atol=1e-5)
    for number in (0, 1):
        row = slice(number, number + 1)
        batch = replace(tiny.batch, cond=family.encode_prompts(pipe, texts[row]))
        alone = family.predict(pipe, pipe.transformer, tiny.batch.latents[row], t[row], batch)
        torch.testing.assert_close(alone, pair[row], rtol=1e-4, atol=1e-5)
    without = {**cond, "glyphs": [cond["glyphs"][1]] * 2}
    without = family.predict(pipe, pipe.transformer, tiny.batch.latents, t, replace(tiny.batch, cond=without))
    assert not torch.allclose(without[0], pair[0], atol=1e-4) and torch.allclose(without[1], pair[1], atol=1e-5)
    long = [f'"{"a" * 200}"', "a" * 1100]
    assert family.find_truncated_prompts(pipe, [*texts, *long]) == long


@pytest.mark.slow
@torch.no_grad()
def test_hunyuan_image_is_loaded_from_the_files_of_sd_scripts_and_from_a_folder_with_its_guidance(build_case, tmp_path):
    family, tiny = build_case("hunyuan_image")
    pipe = tiny.pipe
    files = {
        "transformer": original_checkpoints.convert_hunyuan_image_transformer(pipe.transformer),
        "vae": original_checkpoints.convert_hunyuan_image_vae(pipe.vae),
        "text_encoder": original_checkpoints.convert_text_encoder(pipe.text_encoder),
        "text_encoder_2": original_checkpoints.convert_text_encoder(pipe.text_encoder_2),
    }
    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / f"{name}.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in files]
    tokenizers = tmp_path / "tokenizers"  # byT5's has no files
    pipe.tokenizer.save_pretrained(tokenizers / family.facts.text.tokenizer_repo_ids["tokenizer"].replace("/", "_"))
    options = ModelConfig(
        paths[0], vae=paths[1], text_encoder=paths[2], byt5=paths[3], tokenizer_cache_dir=str(tokenizers)
    )
    pipe.guider = pipe.guider.new(adaptive_projected_guidance_start_step=2)
    pipe.save_pretrained(tmp_path / "folder")
    for source, start in ((options, 0), (ModelConfig(str(tmp_path / "folder")), 2)):
        detected = detect_model(source)
        assert (detected.family, detected.prediction_type) == ("hunyuan_image", "flow")
        loaded = FAMILIES.get("hunyuan_image")(source).load(detected, torch.float32)
        assert_same_weights(family, loaded, pipe)
        assert loaded.guider.adaptive_projected_guidance_start_step == start
        ours, reference = (family.encode_prompts(each, ['a "cat"']) for each in (loaded, pipe))
        assert all(ours[key][0].equal(reference[key][0]) for key in reference)
    original = DiffusionPipeline.from_pretrained(tmp_path / "folder")
    assert type(original) is HunyuanImagePipeline and original.guider.guidance_scale == 3.5

    distilled = {**files["transformer"], "time_r_in.mlp.0.weight": torch.zeros(32, 256)}
    save_file({key: tensor.contiguous() for key, tensor in distilled.items()}, paths[0])
    index = json.loads((tmp_path / "folder" / "transformer" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "folder" / "transformer" / "config.json").write_text(json.dumps({**index, "use_meanflow": True}))
    for source in (options, ModelConfig(str(tmp_path / "folder"))):
        with pytest.raises(FileError, match=r"is the distilled HunyuanImage 2\.1; use the base model"):
            detect_model(source)


def test_hunyuan_image_trains_the_layers_and_timesteps_of_sd_scripts():
    model, family = build_component_on_meta("hunyuan_image", "transformer"), FAMILIES.get("hunyuan_image")
    part = ComponentKeys("transformer", list_module_names(model), "lora_unet", HUNYUAN_IMAGE_KEYS)
    groups = part.get_key_map().group_modules(match_target_modules(model, family.facts.lora.targets))
    stream = ("mod.linear", "attn_qkv", "attn_proj", "mlp.fc1", "mlp.fc2")
    theirs = {f"double_blocks.{n}.{each}_{name}" for n in range(20) for each in ("img", "txt") for name in stream}
    theirs |= {f"single_blocks.{n}.{name}" for n in range(40) for name in ("linear1", "linear2", "modulation.linear")}
    assert {group.name for group in groups} == theirs and len(groups) == 320
    names = [build_kohya_name(group.name, "lora_unet") for group in groups]
    assert not part.has_comfyui_names(names) and part.has_comfyui_names(["lora_unet_double_blocks_7_img_mod_lin"])
    scheduler = load_bundled_config("hunyuan_image")["scheduler/scheduler_config.json"]
    pipe = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler.from_config(scheduler))
    assert family().build_noise_process(pipe).shift.compute_factor(4096) == 5


@pytest.mark.slow
@torch.no_grad()
def test_qwen_image21_is_loaded_from_a_published_folder_and_samples_the_sigmas_of_a_turbo(build_case, tmp_path):
    family, tiny = build_case("qwen_image21")
    tiny.pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text(encoding="utf-8"))
    index |= {"processor": ["transformers", "Qwen3VLProcessor"], "sample_sigmas": [1.0, 0.6, 0.3]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    detected = detect_model(str(tmp_path))
    assert (detected.family, detected.size_multiple) == ("qwen_image21", 16)
    pipe = family.load(detected, torch.float32)
    assert_same_weights(family, pipe, tiny.pipe)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a", ""))
    assert cond["embeds"][0].equal(family.encode_prompts(tiny.pipe, ["a"])["embeds"][0])
    assert family.is_step_distilled(pipe) and not family.is_step_distilled(tiny.pipe)
    for steps, calls in ((None, 3), (5, 5)):
        record, prompt = Recorder(pipe.transformer), Prompt("a", width=64, height=64, num_inference_steps=steps)
        image = family.generate_image(pipe, prompt, cond, negative, make_generators(1)[0], None)
        assert (len(record.calls), image.mode) == (calls, "RGBA")

"""What single families do otherwise than the rest, compared with diffusers' pipelines."""

import copy
import json
import math
import re
from dataclasses import replace

import original_checkpoints
import pytest
import torch
from diffusers import AnimaModularPipeline, Flux3AutoBlocks, Flux3ModularPipeline
from family_cases import SIZE, Recorder, build_case, make_generators
from loaded_weights import assert_same_weights
from PIL import Image
from published_configs import build_component_on_meta
from safetensors.torch import save_file

from library.adapters.component_keys import build_key_map
from library.adapters.targets_rank_alpha import match_target_modules
from library.config.schema import ModelConfig
from library.config.schema_data import DataConfig
from library.data.prepare import prepare_data
from library.data.sample_prompts import Prompt
from library.errors import FileError
from library.models.base import NEGATIVE_MARK
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.families.anima import ANIMA_KEYS
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
    problems = list(validate_prompts([Prompt("a", width=320, height=256)], model))
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
        (negative,) = family.encode_prompts(tiny.pipe, [family.mark_negative_prompt("blue")])["embeds"]
        assert len(negative) == number, "the start token and the letters"
        assert family.find_truncated_prompts(tiny.pipe, [NEGATIVE_MARK + "a" * 400]) == ["a" * 400]


@pytest.mark.slow
@torch.no_grad()
def test_krea_2_turbo_has_one_shift_and_few_steps():
    family = FAMILIES.get("krea2")()
    pipe = family.load("random:krea2:tiny", torch.float32, family.text_components)
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
    for part, repository in family.tokenizer_repo_ids.items():
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
    assert list(match_target_modules(model, family.lora_target_modules)) == theirs and len(theirs) == 280
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


@pytest.mark.slow
@torch.no_grad()
def test_qwen_image21_is_loaded_from_a_published_folder_and_samples_the_sigmas_of_a_turbo(build_case, tmp_path):
    family, tiny = build_case("qwen_image21")
    tiny.pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text(encoding="utf-8"))
    index |= {"processor": ["transformers", "Qwen3VLProcessor"], "sample_sigmas": [1.0, 0.6, 0.3]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    detected = detect_model(str(tmp_path))
    assert (detected.family, detected.size_multiple) == ("qwen_image21", 32)
    pipe = family.load(detected, torch.float32)
    assert_same_weights(family, pipe, tiny.pipe)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a", ""))
    assert cond["embeds"][0].equal(family.encode_prompts(tiny.pipe, ["a"])["embeds"][0])
    assert family.is_step_distilled(pipe) and not family.is_step_distilled(tiny.pipe)
    for steps, calls in ((None, 3), (5, 5)):
        record, prompt = Recorder(pipe.transformer), Prompt("a", width=64, height=64, num_inference_steps=steps)
        image = family.generate_image(pipe, prompt, cond, negative, make_generators(1)[0], None)
        assert (len(record.calls), image.mode) == (calls, "RGBA")

"""``apply_t5_attn_mask``: padding tokens have no influence, in T5 and, for FLUX.1, in the transformer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_runs import train
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import TINY
from training_runs import write_images

from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.models.families import FAMILIES

PROMPTS = ["a red circle", "a much longer caption of two, blue squares"]
T5 = {"flux": ("text_encoder_2", "tokenizer_2"), "sd3": ("text_encoder_3", "tokenizer_3")}


def build_case(name: str, is_masked: bool = True):
    family = FAMILIES.get(name)(ModelConfig(apply_t5_attn_mask=is_masked, t5xxl_max_token_length=48))
    tiny = TINY[name]()
    with torch.no_grad():
        return family, tiny, family.encode_prompts(tiny.pipe, PROMPTS)


@torch.no_grad()
@pytest.mark.parametrize("name", T5)
def test_t5_encodes_a_caption_as_without_padding(name):
    _, tiny, cond = build_case(name)
    encoder, tokenizer = (getattr(tiny.pipe, part) for part in T5[name])
    for row, prompt in zip(cond["embeds"], PROMPTS, strict=True):
        expected = encoder(tokenizer(prompt, return_tensors="pt").input_ids)[0][0]
        t5_row = row if name == "flux" else row[77:, : expected.shape[-1]]  # after CLIP's tokens
        torch.testing.assert_close(t5_row[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(cond["embeds"], build_case(name, is_masked=False)[2]["embeds"])


@torch.no_grad()
def test_masked_tokens_have_no_influence_on_flux():
    family, tiny, cond = build_case("flux")
    lengths = cond["mask"].sum(1).int().tolist()
    assert lengths == [len(tiny.pipe.tokenizer_2(prompt).input_ids) for prompt in PROMPTS]

    def predict(cond):
        denoiser, timesteps = tiny.pipe.transformer.eval(), torch.tensor([700.0, 300.0])
        return family.predict(tiny.pipe, denoiser, tiny.batch.latents, timesteps, replace(tiny.batch, cond=cond))

    garbage = cond["embeds"].clone()
    garbage[0, lengths[0] :] = 7.0
    torch.testing.assert_close(predict({**cond, "embeds": garbage}), predict(cond))
    unmasked = {name: value for name, value in cond.items() if name != "mask"}
    assert not torch.allclose(predict({**unmasked, "embeds": garbage}), predict(unmasked))
    kwargs = family.build_sampling_kwargs(tiny.pipe, Prompt("a"), *[{k: v[:1] for k, v in cond.items()}] * 2)
    assert kwargs["prompt_embeds"].shape[1] == lengths[0], "previews leave masked tokens out"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd3", "flux"])
def test_masked_training_is_the_same_with_cached_captions(model, tmp_path):
    data = write_images(tmp_path / "data", {(64, 64): 2})
    flags = (
        f"--dataset_config {data} --pretrained_model_name_or_path random:{model}:tiny --max_train_steps 2 "
        f"--train_batch_size 2 --t5xxl_max_token_length 32 --learning_rate 1e-2 --output_dir {tmp_path}"
    ).split()
    variants = {
        "plain": (),
        "masked": ("--apply_t5_attn_mask",),
        "cached": ("--apply_t5_attn_mask", "--cache_text_encoder_outputs_to_disk"),
        "plain_cached": ("--cache_text_encoder_outputs_to_disk",),
    }
    for name, more in variants.items():
        run_on_ranks(1, train, *flags, *more, "--output_name", name)
    files = {name: load_file(Path(tmp_path) / f"{name}.safetensors") for name in variants}
    for one, other in (("masked", "cached"), ("plain", "plain_cached")):
        for key, value in files[one].items():
            torch.testing.assert_close(value, files[other][key], rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(value, files["plain"][key]) for key, value in files["masked"].items())

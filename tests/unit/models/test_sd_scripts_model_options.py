"""Options that sd-scripts has for single model families, against its formulas."""

import random
from dataclasses import replace

import pytest
import torch
from family_cases import build_case
from problem_lines import format_lines
from safetensors.torch import save_file

from library.config.schema import LUMINA2_SYSTEM_PROMPT, ModelConfig
from library.dataloader.batch import Batch
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.sd3_positions import PositionCrops, ScaledTable, choose_scaled_table, replace_positions

__all__ = ["build_case"]  # a fixture


def record_texts(tokenizer, monkeypatch):
    texts, original = [], type(tokenizer).__call__

    def call(self, text, *args, **kwargs):
        texts.extend([text] if isinstance(text, str) else text)
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    return texts


@pytest.mark.parametrize(
    ("system_prompt", "text"),
    [
        ("Draw.", "Draw. <Prompt Start> a lorikeet"),
        ("", "a lorikeet"),
        (None, f"{LUMINA2_SYSTEM_PROMPT} <Prompt Start> a lorikeet"),
    ],
)
def test_lumina_puts_the_system_prompt_before_captions_as_sd_scripts_does(build_case, monkeypatch, system_prompt, text):
    pipe = build_case("lumina2")[1].pipe
    options = {} if system_prompt is None else {"system_prompt": system_prompt}
    family = FAMILIES.get("lumina2")(ModelConfig(**options))
    texts = record_texts(pipe.tokenizer, monkeypatch)

    family.encode_prompts(pipe, ["a lorikeet"])
    family.encode_negative_prompts(pipe, ["a parrot"])

    assert set(texts) == {text, "a parrot"}


def test_the_default_system_prompt_of_lumina_is_that_of_the_pipeline(build_case):
    assert build_case("lumina2")[1].pipe.system_prompt == LUMINA2_SYSTEM_PROMPT


def test_gemma2_max_token_length_limits_captions_of_lumina_to_positions_that_exist(build_case):
    pipe, caption = build_case("lumina2")[1].pipe, "a lorikeet on a branch " * 60
    lengths = [
        len(
            FAMILIES.get("lumina2")(ModelConfig(gemma2_max_token_length=limit)).encode_prompts(pipe, [caption])[
                "embeds"
            ][0]
        )
        for limit in (16, None, 299)
    ]

    assert lengths == [16, 256, 299]
    assert FAMILIES.get("lumina2")(ModelConfig(gemma2_max_token_length=9)).find_truncated_prompts(pipe, [caption, ""])
    with pytest.raises(ConfigError) as error:
        detect_model(ModelConfig("random:lumina2:tiny", gemma2_max_token_length=300))
    assert "more than the 299 tokens" in format_lines(error.value.problems)[0]


def build_sd3_batch(family, pipe, captions, draws):
    cond, count = family.encode_prompts(pipe, captions), len(captions)
    return Batch(
        latents=torch.zeros(count, 4, 8, 12),
        cond=cond,
        size_conditioning=torch.zeros(count, 6),
        loss_weights=torch.ones(count),
        global_positions=tuple(range(count)),
        sample_keys=tuple(captions),
        build_draws=draws,
    )


def make_draws(purpose):
    return [random.Random(f"{purpose} {number}") for number in range(4)]


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({"clip_l_dropout_rate": 1.0}, [(0, 77, 0, 16)]),
        ({"clip_g_dropout_rate": 1.0}, [(0, 77, 16, None)]),
        ({"t5_dropout_rate": 1.0}, [(77, None, 0, None)]),
        ({"clip_l_dropout_rate": 1.0, "t5_dropout_rate": 1.0}, [(0, 77, 0, 16), (77, None, 0, None)]),
    ],
)
@torch.no_grad()
def test_dropout_of_one_text_encoder_of_sd3_zeroes_what_it_returns(build_case, options, ranges):
    pipe, captions = build_case("sd3")[1].pipe, ["a", "b", "c", "d"]
    family = FAMILIES.get("sd3")(ModelConfig(**options))
    plain = FAMILIES.get("sd3")().encode_prompts(pipe, captions)
    embeds, pooled = family._drop_text(build_sd3_batch(family, pipe, captions, make_draws))

    expected, expected_pooled = plain["embeds"].clone(), plain["pooled"].clone()
    for top, bottom, left, right in ranges:
        expected[:, top:bottom, left:right] = 0
        if top == 0:
            expected_pooled[:, left:right] = 0
    assert torch.equal(embeds, expected) and torch.equal(pooled, expected_pooled)
    in_validation = family._drop_text(build_sd3_batch(family, pipe, captions, None))
    assert torch.equal(in_validation[0], plain["embeds"])


@torch.no_grad()
def test_dropout_of_text_encoders_is_drawn_for_each_sample(build_case):
    pipe, captions = build_case("sd3")[1].pipe, ["a", "b", "c", "d"]
    family = FAMILIES.get("sd3")(ModelConfig(t5_dropout_rate=0.5))
    embeds, _ = family._drop_text(build_sd3_batch(family, pipe, captions, make_draws))

    dropped = [bool((row[77:] == 0).all()) for row in embeds]
    draws = [[draw.random() for _ in range(3)][2] < 0.5 for draw in make_draws("text encoder dropout")]
    assert dropped == draws and len(set(dropped)) == 2


@torch.no_grad()
def test_apply_lg_attn_mask_hides_what_comes_after_the_end_of_a_text(build_case):
    pipe = build_case("sd3")[1].pipe
    masked, plain = (FAMILIES.get("sd3")(ModelConfig(apply_lg_attn_mask=each)) for each in (True, False))
    found, masks = masked.encode_prompts(pipe, ["a lorikeet"])["embeds"], []
    for name in ("", "_2"):
        encoder, tokenizer = getattr(pipe, f"text_encoder{name}"), getattr(pipe, f"tokenizer{name}")
        tokens = tokenizer(["a lorikeet"], max_length=77, padding="max_length", truncation=True, return_tensors="pt")
        masks.append(tokens.attention_mask)
        states = encoder(tokens.input_ids, tokens.attention_mask, output_hidden_states=True).hidden_states[-2]
        start = 0 if not name else 16
        torch.testing.assert_close(found[:, :77, start : start + states.shape[-1]], states)
    assert 2 < masks[0].sum() < 77
    assert not torch.equal(found, plain.encode_prompts(pipe, ["a lorikeet"])["embeds"])
    assert masked.get_base_model_info(pipe).metadata == {"ss_apply_lg_attn_mask": True, "ss_apply_t5_attn_mask": False}


class Free:
    """A generator that always crops, at the far corner."""

    def random(self):
        return 0.0

    def randint(self, low, high):
        return high


@torch.no_grad()
def test_random_crops_of_positions_take_another_part_of_the_table_for_some_samples(build_case):
    patch_embed = build_case("sd3")[1].pipe.transformer.pos_embed
    latents = torch.randn(2, 4, 8, 12)
    crops = PositionCrops(0.5, [Free(), random.Random(2)])
    with replace_positions(patch_embed, crops.build_embeds(patch_embed, 8, 12)):
        found = patch_embed(latents)

    table = patch_embed.pos_embed.reshape(64, 64, -1)
    projected = patch_embed.proj(latents).flatten(2).transpose(1, 2)
    assert random.Random(2).random() >= 0.5
    torch.testing.assert_close(found[0], projected[0] + table[60:, 58:].flatten(0, 1))
    torch.testing.assert_close(found[1], patch_embed(latents)[1])


def test_scaled_positions_are_those_of_sd_scripts():
    """Its table for 512 pixels: 48 rows, of which an image has the middle 32, with positions from 0 to 15.5."""
    sides = (512, 1024)
    assert choose_scaled_table(32, 32, sides, 2).side == 32
    assert choose_scaled_table(48, 48, sides, 2).side == 32
    assert choose_scaled_table(47, 55, sides, 2).side == 64  # beyond the mean of the areas
    assert choose_scaled_table(100, 100, sides, 2) == ScaledTable(100)  # larger than 96 rows
    small, large = ScaledTable(32), ScaledTable(64)
    assert (small.size, large.size) == (48, 96)
    assert small.compute_positions(8, 32).tolist() == [number / 2 for number in range(32)]
    assert large.compute_positions(16, 64).tolist() == [number / 4 for number in range(64)]


@torch.no_grad()
def test_scaled_positions_of_sd3_change_what_the_denoiser_gets(build_case):
    pipe = build_case("sd3")[1].pipe
    seen = []
    pipe.transformer.pos_embed.register_forward_hook(lambda module, args, output: seen.append(output))
    for is_scaled in (False, True):
        family = FAMILIES.get("sd3")(ModelConfig(enable_scaled_pos_embed=is_scaled))
        batch = replace(build_sd3_batch(family, pipe, ["a", "b"], make_draws), resolution_sides=(64, 128))
        family.predict(pipe, pipe.transformer, batch.latents, torch.tensor([500.0, 500.0]), batch)

    assert not torch.equal(*seen)
    assert "cropped_pos_embed" not in vars(pipe.transformer.pos_embed)


@torch.no_grad()
def test_anima_takes_its_adapter_and_tokenizer_from_files_of_their_own(build_case, tmp_path):
    pipe = build_case("anima")[1].pipe
    tensors = {f"llm_adapter.{name}": tensor + 1 for name, tensor in pipe.text_conditioner.state_dict().items()}
    save_file(tensors, tmp_path / "adapter.safetensors")
    pipe.t5_tokenizer.save_pretrained(tmp_path / "t5")
    options = ModelConfig(
        "random:anima:tiny",
        llm_adapter_path=str(tmp_path / "adapter.safetensors"),
        t5_tokenizer_path=str(tmp_path / "t5"),
    )
    loaded = FAMILIES.get("anima")(options).load(
        detect_model(options), torch.float32, ("text_conditioner", "t5_tokenizer")
    )

    for name, tensor in loaded.text_conditioner.state_dict().items():
        assert torch.equal(tensor, tensors[f"llm_adapter.{name}"])
    assert loaded.t5_tokenizer("a cat").input_ids == pipe.t5_tokenizer("a cat").input_ids
    save_file({"x.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError) as error:
        detect_model(
            ModelConfig(
                "random:anima:tiny",
                llm_adapter_path=str(tmp_path / "other.safetensors"),
                t5_tokenizer_path=str(tmp_path / "t6"),
            )
        )
    lines = format_lines(error.value.problems)
    assert len(lines) == 2 and "contains no text_conditioner" in lines[0] and "no such folder" in lines[1]


@torch.no_grad()
def test_the_two_token_limits_of_anima_truncate_captions(build_case):
    pipe, caption = build_case("anima")[1].pipe, "a lorikeet on a branch " * 8
    cond = [
        FAMILIES.get("anima")(ModelConfig(**options)).encode_prompts(pipe, [caption])["embeds"][0]
        for options in ({}, {"t5_max_token_length": 9}, {"qwen3_max_token_length": 9})
    ]

    assert len(cond[1]) == 9 and len(cond[0]) == len(cond[2]) > 9
    assert not torch.equal(cond[0], cond[2])
    limited = FAMILIES.get("anima")(ModelConfig(qwen3_max_token_length=9))
    assert limited.find_truncated_prompts(pipe, [caption, "a"]) == [caption]

"""Long captions and clip_skip as in sd-scripts, compared with diffusers' encoding of each chunk."""

import logging

import pytest
import torch
from problem_lines import format_lines
from tiny_pipelines import TINY

from library.config import parse_config
from library.config.schema import ModelConfig
from library.models.families import FAMILIES

# A token for each letter and mark: 75 tokens are one piece.
FIRST, SECOND = " ".join("abcdefghijklmnopqrstuvwxyz" * 2 + "abcdefghijklmnopqrstuvw"), "the rest of it"
assert len(FIRST.split()) == 75


def encode_with_diffusers(pipe, text, **options):
    actual = pipe.encode_prompt(
        text, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False, **options
    )
    return actual[0], actual[2] if len(actual) > 2 else None


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd1", "sd2"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_clip_skip_takes_the_nth_last_layer(name, number):
    pipe = TINY[name]().pipe
    if not hasattr(pipe.text_encoder, "text_model"):  # diffusers 0.42 reads the final layer norm here
        object.__setattr__(pipe.text_encoder, "text_model", pipe.text_encoder)
    family = FAMILIES.get(name)(ModelConfig(clip_skip=number))
    reference, _ = encode_with_diffusers(pipe, ["a red circle"], clip_skip=number - 1 or None)
    torch.testing.assert_close(family.encode_prompts(pipe, ["a red circle"])["embeds"], reference)


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl"])
@pytest.mark.parametrize("length", [150, 225])
def test_a_long_caption_is_encoded_in_chunks_of_75_tokens(name, length):
    pipe = TINY[name]().pipe
    family = FAMILIES.get(name)(ModelConfig(max_token_length=length))
    ours = family.encode_prompts(pipe, [f"{FIRST} {SECOND}", "short"])
    embeds = ours["embeds"]
    assert embeds.shape[:2] == (2, length + 2)
    for row, pieces in enumerate([(FIRST, SECOND, ""), ("short", "", "")]):
        states = [encode_with_diffusers(pipe, [piece])[0][0] for piece in pieces[: length // 75]]
        expected = torch.cat([states[0][:1], *[piece[1:-1] for piece in states], states[-1][-1:]])
        torch.testing.assert_close(embeds[row], expected)
    if "pooled" in ours:
        for row, first in enumerate([FIRST, "short"]):
            torch.testing.assert_close(ours["pooled"][row], encode_with_diffusers(pipe, [first])[1][0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl"])
def test_a_caption_that_is_too_long_is_truncated_as_in_diffusers(name):
    pipe, family = TINY[name]().pipe, FAMILIES.get(name)()
    reference, _ = encode_with_diffusers(pipe, [f"{FIRST} {SECOND}"])
    torch.testing.assert_close(family.encode_prompts(pipe, [f"{FIRST} {SECOND}"])["embeds"], reference)
    assert family.find_truncated_prompts(pipe, [FIRST, f"{FIRST} {SECOND}", ""]) == [f"{FIRST} {SECOND}"]
    longer = FAMILIES.get(name)(ModelConfig(max_token_length=150))
    assert longer.find_truncated_prompts(pipe, [f"{FIRST} {SECOND}"]) == []


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_an_image_is_sampled_with_long_captions(name):
    from library.dataloader.sample_prompts import Prompt

    pipe, family = TINY[name]().pipe, FAMILIES.get(name)(ModelConfig(max_token_length=150))
    cond, negative = (family.encode_prompts(pipe, [text]) for text in (f"{FIRST} {SECOND}", "blue"))
    prompt = Prompt("", width=64, height=96, num_inference_steps=1)
    assert family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), "ddim").size == (
        64,
        96,
    )


def test_the_caption_options_are_validated_with_all_others(tmp_path):
    problems = format_lines(parse_config(["--max_token_length", "100", "--clip_skip", "-1"]).problems)
    assert "--max_token_length: expected 75, 150 or 225, got 100" in problems
    assert any(line.startswith("--clip_skip: ") and "at least 0" in line for line in problems)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["sd3", "flux", "flux_schnell", "z_image", "qwen_image"])
def test_a_caption_is_encoded_to_its_end_unless_it_is_reported_as_truncated(name):
    tiny = TINY[name]()
    pipe, family = tiny.pipe, FAMILIES.get(tiny.family)()
    lengths = range(1, 1100)
    most = max(length for length in lengths if not family.find_truncated_prompts(pipe, ["a" * length]))
    assert 100 < most < max(lengths)
    for length, is_read in ((most, True), (most + 1, False)):
        one, other = (family.encode_prompts(pipe, ["a" * (length - 1) + last])["embeds"][0] for last in "bc")
        assert torch.equal(one, other) is not is_read


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_the_max_token_length_of_t5_is_an_option(name):
    tiny = TINY[name]()
    family = FAMILIES.get(name)(ModelConfig(t5xxl_max_token_length=20))
    texts = ["a red circle", "a text of twenty letters"]
    reference = tiny.pipe.encode_prompt(
        texts,
        **{"prompt_2": None, "prompt_3": None} if name == "sd3" else {},
        device=torch.device("cpu"),
        max_sequence_length=20,
    )
    embeds = family.encode_prompts(tiny.pipe, texts)["embeds"]
    assert torch.equal(embeds, reference[0])
    assert embeds.shape[1] == 20 + (77 if name == "sd3" else 0)
    assert family.find_truncated_prompts(tiny.pipe, texts) == texts[1:]


@torch.no_grad()
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_no_warning_is_logged_for_captions_that_clip_truncates(name, caplog, monkeypatch):
    """The warnings would be repeated in every step on every rank; only text that T5 truncates is lost and reported."""
    pipe, family = TINY[name]().pipe, FAMILIES.get(name)()
    for library in ("diffusers", "transformers"):
        monkeypatch.setattr(logging.getLogger(library), "propagate", True)
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        tokenizer.deprecation_warnings.clear()
    caplog.clear()  # drop the messages of loading
    with caplog.at_level(logging.WARNING):
        family.encode_prompts(pipe, [f"{FIRST} {SECOND}"])
        assert not caplog.records
        pipe.encode_prompt(f"{FIRST} {SECOND}", **{"prompt_2": None, "prompt_3": None} if name == "sd3" else {})
        assert caplog.records  # others may still ask it to

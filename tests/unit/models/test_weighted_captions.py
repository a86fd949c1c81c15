"""Weights in captions, against the numbers that A1111's syntax gives."""

import pytest
import tiny_sd1
import torch
from family_cases import build_case

from library.config.schema import ModelConfig
from library.models.families import FAMILIES
from library.models.weighted_captions import parse_weights, tokenize_weighted

__all__ = ["build_case"]  # a fixture


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        ("plain text", [("plain text", 1.0)]),
        ("a (red) bird", [("a ", 1.0), ("red", 1.1), (" bird", 1.0)]),
        ("a (red:1.3) [bird]", [("a ", 1.0), ("red", 1.3), (" ", 1.0), ("bird", 1 / 1.1)]),
        ("((red:0.5))", [("red", 0.5 * 1.1)]),
        ("(a [b] c:2)", [("a ", 2.0), ("b", 1 / 1.1 * 2.0), (" c", 2.0)]),
        (r"bird \(parrot\)", [("bird (parrot)", 1.0)]),
        (r"one \ two", [("one  two", 1.0)]),
        ("(open, [and", [("open, ", 1.1), ("and", 1.1 * (1 / 1.1))]),
        ("12:30) and ]", [("12:30) and ]", 1.0)]),
        ("(ratio:1.2.3)", [("ratio:1.2.3)", 1.1)]),
        ("(zero:-.5)", [("zero", -0.5)]),
        ("", [("", 1.0)]),
        ("(a)(b)", [("ab", 1.1)]),
    ],
)
def test_weights_of_a_caption(caption, parts):
    assert parse_weights(caption) == parts


@torch.no_grad()
def test_weights_multiply_what_the_text_encoder_returns_for_their_words():
    pipe, weighted = tiny_sd1.build_pipeline(), FAMILIES.get("sd1")(ModelConfig(weighted_captions=True))
    plain = FAMILIES.get("sd1")()
    expected = plain.encode_prompts(pipe, ["a red bird"])["embeds"].clone()
    first = len(tokenize_weighted(pipe.tokenizer, "a ")[0])
    count = len(tokenize_weighted(pipe.tokenizer, "red")[0])
    ids, weights = tokenize_weighted(pipe.tokenizer, "a (red:1.5) bird")
    parts = [pipe.tokenizer(text, add_special_tokens=False).input_ids for text in ("a ", "red", " bird")]
    assert ids == [number for part in parts for number in part]
    assert weights == [1.0] * first + [1.5] * count + [1.0] * (len(ids) - first - count)

    found = weighted.encode_prompts(pipe, ["a (red:1.5) bird"])["embeds"]
    rows = torch.tensor([[pipe.tokenizer.bos_token_id, *ids, pipe.tokenizer.eos_token_id]])
    rows = torch.nn.functional.pad(rows, (0, 77 - rows.shape[1]), value=pipe.tokenizer.pad_token_id)
    states = pipe.text_encoder(rows)[0]
    factors = torch.tensor([1.0, *weights] + [1.0] * (76 - len(ids)))
    torch.testing.assert_close(found, states * factors[None, :, None])
    assert found.shape == expected.shape
    assert torch.equal(
        weighted.encode_prompts(pipe, ["a bird"])["embeds"], plain.encode_prompts(pipe, ["a bird"])["embeds"]
    )


@torch.no_grad()
def test_weights_of_long_captions_stay_with_their_tokens_in_every_chunk():
    pipe, caption = tiny_sd1.build_pipeline(), "a bird " * 30 + "(on:2) a branch"
    options = {"max_token_length": 225}
    weighted = FAMILIES.get("sd1")(ModelConfig(weighted_captions=True, **options)).encode_prompts(pipe, [caption])
    ids, weights = tokenize_weighted(pipe.tokenizer, caption)
    place = weights.index(2.0)
    assert 75 < place < len(ids) < 225
    ratio = weighted["embeds"][0].norm(dim=-1) / FAMILIES.get("sd1")(ModelConfig(**options)).encode_prompts(
        pipe, [caption.replace("(on:2)", "on")]
    )["embeds"][0].norm(dim=-1)
    assert (ratio > 1.9).nonzero().flatten().tolist() == [place + 1 + number for number in range(weights.count(2.0))]


@torch.no_grad()
def test_weights_apply_to_both_encoders_of_sdxl_and_not_to_the_pooled_text(build_case):
    pipe = build_case("sdxl")[1].pipe
    cond = [
        FAMILIES.get("sdxl")(ModelConfig(weighted_captions=True)).encode_prompts(pipe, [caption])
        for caption in ("(bird:1)", "(bird:3)")
    ]
    ratio = cond[1]["embeds"] / cond[0]["embeds"]
    count = len(tokenize_weighted(pipe.tokenizer, "bird")[0])
    torch.testing.assert_close(ratio[0, 1 : 1 + count], torch.full_like(ratio[0, 1 : 1 + count], 3.0))
    assert torch.equal(cond[0]["pooled"], cond[1]["pooled"])


def test_brackets_and_weights_do_not_count_as_tokens_of_a_caption():
    pipe, caption = tiny_sd1.build_pipeline(), "((((a:1.234567)))) " * 3
    assert FAMILIES.get("sd1")(ModelConfig(weighted_captions=True)).find_truncated_prompts(pipe, [caption]) == []
    assert FAMILIES.get("sd1")().find_truncated_prompts(pipe, [caption * 3]) == [caption * 3]

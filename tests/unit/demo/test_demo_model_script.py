"""The script that trains the demo model: tokenizer, captions, dataset, the reduced VAE, and the evaluation."""

import random

import pytest
import torch
from PIL import Image

from scripts.demo_model import autoencoder, captions, dataset, emoji, evaluation, lora_dataset, tokenizer
from scripts.demo_model.__main__ import main
from scripts.demo_model.subjects import SUBJECTS, UNSEEN


def draw_blob(color, size=(40, 60)):
    """Draw a half-transparent emoji."""
    image = Image.new("RGBA", size, color)
    image.paste((0, 0, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    return image


def test_the_vocabulary_is_a_function_of_the_words_and_known_words_are_whole(tmp_path):
    others = ["stripes", "string", "strings", "rings", "ringing"]
    one = tokenizer.train_tokenizer(["sunflower", "star"], others, tmp_path / "a")
    two = tokenizer.train_tokenizer(["star", "sunflower"], reversed(others), tmp_path / "b")
    assert one.get_vocab() == two.get_vocab()
    assert one.tokenize("a sunflower star") == ["a</w>", "sunflower</w>", "star</w>"]
    ids = one("ein rötes Ding 猫, 7!").input_ids
    assert one.unk_token_id not in ids[1:-1] and ids[0] == one.bos_token_id and ids[-1] == one.eos_token_id


def test_the_most_frequent_pair_is_merged_first_and_ties_are_broken_by_the_alphabet(tmp_path):
    tokenizer.train_tokenizer([], ["abab", "cd", "ab"], tmp_path)
    merges = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    assert merges == ["a b</w>", "a b", "ab ab</w>", "c d</w>"]


def test_every_caption_has_its_subject_once():
    for subject in SUBJECTS:
        lines = list(captions.generate_captions(subject))
        assert all(line.count(subject) == 1 for line in lines if "{" not in line)
        assert all(f" {subject}" in f" {line}" for line in lines)
    words = {*captions.STYLES, *captions.ADJECTIVES, *captions.PSEUDO_WORDS}
    assert "lorikeet" not in words, "the demo model must not be trained on the word that the demo trains"


def test_subjects_are_distinct_and_the_bird_of_the_demo_is_not_among_them():
    codes = [*SUBJECTS.values(), *UNSEEN.values()]
    assert len(codes) == len(set(codes)) and not set(SUBJECTS) & set(UNSEEN)
    assert set(lora_dataset.REGULARIZATION_SUBJECTS) <= set(SUBJECTS) and lora_dataset.BIRD not in codes


@pytest.mark.parametrize("size", list(dataset.SHAPES))
def test_an_emoji_is_shifted_by_whole_latents(size):
    side, _ = dataset.SHAPES[size]
    middle = dataset.place_emoji(draw_blob("red"), size, side, None)
    left, top, *_ = middle.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
    for seed in range(6):
        moved = dataset.place_emoji(draw_blob("red"), size, side, random.Random(seed))
        x, y, *_ = moved.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
        assert (x - left) % dataset.LATENT_PIXELS == (y - top) % dataset.LATENT_PIXELS == 0


def test_an_emoji_is_as_large_as_fits_and_not_distorted():
    drawn = emoji.compose(draw_blob("blue", (40, 80)), (100, 100), emoji.WHITE, margin=0.1)
    left, top, right, bottom = drawn.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
    assert (right - left, bottom - top) == (40, 80)


@torch.no_grad()
def test_the_reduced_vae_has_uncorrelated_latents_and_decodes_the_projection_of_the_original_ones():
    vae = autoencoder.build_vae(3).eval()
    shown = torch.randint(0, 256, (6, 3, 48, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    small = autoencoder.reduce_channels(vae, shown)
    latents = small.encode(shown / 127.5 - 1).latent_dist.mean
    rows = latents.permute(0, 2, 3, 1).reshape(-1, autoencoder.LATENT_CHANNELS).double()
    covariance = torch.cov(rows.T)
    assert rows.mean(0).abs().max() < 1e-3
    assert covariance.diagonal().mean() == pytest.approx(1, abs=1e-3)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3

    whole = vae.encode(shown / 127.5 - 1).latent_dist.mean
    flat = whole.permute(0, 2, 3, 1).reshape(-1, autoencoder.TRAINING_CHANNELS).double()
    directions = torch.linalg.eigh(torch.cov(flat.T))[1][:, -autoencoder.LATENT_CHANNELS :]
    kept = (flat - flat.mean(0)) @ directions @ directions.T + flat.mean(0)
    expected = vae.decoder.conv_in(vae.post_quant_conv(kept.float().view(6, 6, 8, -1).permute(0, 3, 1, 2)))
    actual = small.decoder.conv_in(latents)
    # At the border, the offset meets the zero padding.
    torch.testing.assert_close(actual[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], rtol=1e-3, atol=1e-4)


def test_the_evaluation_finds_the_samples_that_are_nearest_to_their_own_emoji():
    codes = {"one": 1, "two": 2, "three": 3}
    style = {1: draw_blob("red"), 2: draw_blob("green"), 3: draw_blob("blue", (60, 40))}
    drawn = {
        name: dataset.place_emoji(style[code], evaluation.SIZE, evaluation.SIDE, None) for name, code in codes.items()
    }
    assert evaluation.find_recognizable(drawn, style, codes) == ["one", "two", "three"]
    swapped = {"one": drawn["two"], "two": drawn["one"], "three": drawn["three"]}
    assert evaluation.find_recognizable(swapped, style, codes) == ["three"]
    assert evaluation.draw_contact_sheet(drawn).size[0] > 3 * 96


def test_the_stages_vae_and_decoder_need_all_styles(capsys):
    with pytest.raises(SystemExit):
        main(["vae", "--noto", "font.ttf", "--work", "."])
    assert "needs --fluent and --twemoji" in capsys.readouterr().err


def test_the_demo_images_are_distinct_and_have_captions(tmp_path):
    codes = [lora_dataset.BIRD, *SUBJECTS.values()]
    lora_dataset.write_lora_dataset(dict.fromkeys(codes, draw_blob("red")), tmp_path)
    images = sorted((tmp_path / "demo").glob("*.png"))
    assert len({path.read_bytes() for path in images}) == len(images) == sum(lora_dataset.COUNTS.values())
    assert all("lorikeet" in path.with_suffix(".txt").read_text("utf-8") for path in images)
    assert len(list((tmp_path / "demo_regularisation").glob("*.txt"))) == len(lora_dataset.REGULARIZATION_SUBJECTS)

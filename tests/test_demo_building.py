"""What the built-in model is built with: words, captions, places, the reduced VAE, and the count of what it draws."""

import random

import pytest
import torch
from PIL import Image

from library.demo.building import autoencoder, captions, emoji, pictures, sheet, tokens
from library.demo.building.concept import BIRD, PLAIN
from library.demo.building.subjects import SUBJECTS, UNSEEN


def blob(colour, size=(40, 60)):
    """An emoji of sorts: half of it transparent."""
    picture = Image.new("RGBA", size, colour)
    picture.paste((0, 0, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    return picture


def test_the_vocabulary_is_a_function_of_the_words_and_known_words_are_whole(tmp_path):
    others = ["stripes", "string", "strings", "rings", "ringing"]
    one = tokens.make(["sunflower", "star"], others, tmp_path / "a")
    two = tokens.make(["star", "sunflower"], reversed(others), tmp_path / "b")
    assert one.get_vocab() == two.get_vocab()
    assert one.tokenize("a sunflower star") == ["a</w>", "sunflower</w>", "star</w>"]
    ids = one("ein rötes Ding 猫, 7!").input_ids
    assert one.unk_token_id not in ids[1:-1] and ids[0] == one.bos_token_id and ids[-1] == one.eos_token_id


def test_the_most_frequent_pair_is_joined_first_and_of_equals_the_first_in_the_alphabet(tmp_path):
    tokens.make([], ["abab", "cd", "ab"], tmp_path)
    merges = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    assert merges == ["a b</w>", "a b", "ab ab</w>", "c d</w>"]


def test_every_wording_names_its_subject_once():
    for subject in SUBJECTS:
        lines = list(captions.wordings(subject))
        assert all(line.count(subject) == 1 for line in lines if "{" not in line)
        assert all(f" {subject}" in f" {line}" for line in lines)
    assert "lorikeet" not in {*captions.MANNERS, *captions.QUALITIES, *captions.NONSENSE}, "the demo's word stays new"


def test_subjects_are_distinct_and_the_bird_of_the_demo_is_none_of_them():
    codes = [*SUBJECTS.values(), *UNSEEN.values()]
    assert len(codes) == len(set(codes)) and not set(SUBJECTS) & set(UNSEEN)
    assert set(PLAIN) <= set(SUBJECTS) and BIRD not in codes


@pytest.mark.parametrize("size", list(pictures.SHAPES))
def test_a_drawing_is_moved_by_whole_latents(size):
    side, _ = pictures.SHAPES[size]
    middle = pictures.placed(blob("red"), size, side, None)
    left, top, *_ = middle.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
    for seed in range(6):
        moved = pictures.placed(blob("red"), size, side, random.Random(seed))
        x, y, *_ = moved.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
        assert (x - left) % pictures.LATENT == (y - top) % pictures.LATENT == 0


def test_an_emoji_is_as_large_as_fits_and_not_distorted():
    drawn = emoji.composed(blob("blue", (40, 80)), (100, 100), emoji.WHITE, margin=0.1)
    left, top, right, bottom = drawn.convert("L").point(lambda value: 255 * (value < 250)).getbbox()
    assert (right - left, bottom - top) == (40, 80)


@torch.no_grad()
def test_the_reduced_vae_has_plain_latents_and_decodes_what_the_whole_one_makes_of_them():
    vae = autoencoder.make(3).eval()
    shown = torch.randint(0, 256, (6, 3, 48, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    small = autoencoder.reduced(vae, shown)
    latents = small.encode(shown / 127.5 - 1).latent_dist.mean
    rows = latents.permute(0, 2, 3, 1).reshape(-1, autoencoder.KEPT).double()
    covariance = torch.cov(rows.T)
    assert rows.mean(0).abs().max() < 1e-3
    assert covariance.diagonal().mean() == pytest.approx(1, abs=1e-3)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3

    whole = vae.encode(shown / 127.5 - 1).latent_dist.mean
    flat = whole.permute(0, 2, 3, 1).reshape(-1, autoencoder.CHANNELS).double()
    directions = torch.linalg.eigh(torch.cov(flat.T))[1][:, -autoencoder.KEPT :]
    kept = (flat - flat.mean(0)) @ directions @ directions.T + flat.mean(0)
    expected = vae.decoder.conv_in(vae.post_quant_conv(kept.float().view(6, 6, 8, -1).permute(0, 3, 1, 2)))
    found = small.decoder.conv_in(latents)
    # At the border the constant part meets the padding.
    torch.testing.assert_close(found[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], rtol=1e-3, atol=1e-4)


def test_the_count_knows_right_from_wrong():
    codes = {"one": 1, "two": 2, "three": 3}
    style = {1: blob("red"), 2: blob("green"), 3: blob("blue", (60, 40))}
    drawn = {name: pictures.placed(style[code], sheet.SIZE, sheet.SIDE, None) for name, code in codes.items()}
    assert sheet.right(drawn, style, codes) == ["one", "two", "three"]
    swapped = {"one": drawn["two"], "two": drawn["one"], "three": drawn["three"]}
    assert sheet.right(swapped, style, codes) == ["three"]
    assert sheet.sheet(drawn).size[0] > 3 * 96

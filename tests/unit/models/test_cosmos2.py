"""Cosmos Predict2: the objective and the noise levels of its authors, and the frame that is given."""

import math
from dataclasses import replace

import pytest
import torch
from family_cases import build_case
from PIL import Image
from problem_lines import format_lines

from library.config.schema_objective import NoiseConfig
from library.dataloader.sample_prompts import load_prompts
from library.models.detect import detect_model, get_config_reader
from library.models.families import FAMILY_FACTS
from library.models.validate_options import validate_prompts

__all__ = ["build_case"]  # a fixture
VIDEO = "cosmos2_video2world"
MODEL = f"random:{VIDEO}:tiny"


@pytest.mark.slow
def test_the_loss_of_the_velocity_is_the_weighted_loss_of_the_authors(build_case):
    """Theirs is that of the clean clip with a weight of (1 + level)^2 / level^2, at levels that are added to it."""
    family, tiny = build_case(VIDEO)
    clean, noise, output = torch.randn(3, 2, 4, 2, 8, 12, generator=torch.Generator().manual_seed(1)).unbind()
    levels = torch.tensor([0.3, 40.0]).view(-1, 1, 1, 1, 1)
    shares = levels / (1 + levels)
    noisy, target = family.build_noise_process(tiny.pipe).add_noise(clean, noise, 1000 * shares.flatten())
    theirs = clean + levels * noise
    torch.testing.assert_close(noisy, (1 - shares) * theirs)
    predicted = (1 - shares) * theirs - shares * output
    weighted = (1 + levels) ** 2 / levels**2 * (clean - predicted) ** 2
    torch.testing.assert_close((output - target) ** 2, weighted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "factor"), [(VIDEO, math.sqrt(24)), ("cosmos2_text2image", 1.0)])
def test_noise_levels_are_those_of_the_authors(name, factor):
    """Half of their levels are below the factor, as the logarithm is normal around that of the factor."""
    read = get_config_reader(detect_model(f"random:{name}:tiny"))
    distribution = FAMILY_FACTS[name].training_noise.build_distribution(NoiseConfig(), read)
    for level in (0.5, factor, 20.0):
        normal = 0.5 * (1 + math.erf(math.log(level / factor) / math.sqrt(2)))
        assert distribution.compute_share_below(level / (1 + level), 1024) == pytest.approx(normal, abs=1e-3)


@pytest.mark.slow
@torch.no_grad()
def test_the_given_frame_is_clean_and_has_no_loss_and_an_image_has_none(build_case):
    family, tiny = build_case(VIDEO)
    pipe, batch, times = tiny.pipe, tiny.batch, torch.full((2,), 700.0)
    other = batch.latents.clone()
    other[:, :, 0] += 1
    before = family.predict(pipe, pipe.transformer, batch.latents, times, batch)
    assert torch.equal(before, family.predict(pipe, pipe.transformer, other, times, batch))
    changed = replace(batch, frame_cond={"first": batch.frame_cond["first"] + 1})
    moved = family.predict(pipe, pipe.transformer, batch.latents, times, changed)
    assert not torch.allclose(before[:, :, 1:], moved[:, :, 1:], atol=1e-3)
    image = batch.latents[:, :, :1]
    alone = family.predict(pipe, pipe.transformer, image, times, batch)
    assert torch.equal(alone, family.predict(pipe, pipe.transformer, image, times, changed))
    loss = torch.arange(3.0)[None, None, :, None, None].expand(2, 4, 3, 2, 2)
    assert set(family.select_trained_frames(loss, batch).unique().tolist()) == {1.0, 2.0}
    assert family.select_trained_frames(loss[:, :, :1], batch).shape[2] == 1


@pytest.mark.parametrize(("flags", "reason"), [("--fs 3", "have no shift"), ("--s 1", "at least 2 steps")])
def test_previews_refuse_what_their_noise_levels_do_not_have(flags, reason, tmp_path):
    Image.new("RGB", (64, 32)).save(tmp_path / "first.png")
    found = []
    for line in ("", flags):
        (tmp_path / "prompts.txt").write_text(f"a robot --i first.png --w 64 --h 32 --f 9 {line}\n")
        found.append(format_lines(validate_prompts(load_prompts(tmp_path / "prompts.txt"), detect_model(MODEL))))
    assert found[0] == [] and len(found[1]) == 1 and reason in found[1][0], found

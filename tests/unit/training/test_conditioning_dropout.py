"""Captions and pictures of InstructPix2Pix are dropped as often, alone and together, as in diffusers' training script."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from library.config import parse_config
from library.config.validate import validate_data_options
from library.dataset.schema import collect_flag_defaults
from library.randomness import derive_rng
from library.training.task import DiffusionTask

COUNT, SHARE = 20_000, 0.05


def drop_controls(captions, positions, share=SHARE):
    def build_draws(purpose):
        return [derive_rng(3, purpose, 7, position) for position in positions]

    task = SimpleNamespace(conditioning_dropout_prob=share, to_device=lambda tensor: tensor)
    controls = (torch.ones(len(positions), 1, 2, 2), torch.full((len(positions), 3, 1, 1), 2.0))
    return DiffusionTask._drop_controls(task, controls, captions, build_draws)


def test_the_caption_the_picture_and_both_are_dropped_equally_often():
    """diffusers draws p once: the caption goes below 2 s, the picture between s and 3 s."""
    rate = collect_flag_defaults(parse_config(["--conditioning_dropout_prob", str(SHARE)]).config.data)
    assert rate["caption_dropout_rate"] == 2 * SHARE
    captions = ["" if derive_rng(1, "x", each).random() < 2 * SHARE else "a" for each in range(COUNT)]
    first, second = drop_controls(captions, range(COUNT))
    kept = first.flatten(1).amax(1)
    assert torch.equal(first, kept.view(-1, 1, 1, 1).expand_as(first)) and set(kept.tolist()) == {0.0, 1.0}
    assert torch.equal(second[:, 0, 0, 0], 2 * kept), "all control images of a sample are dropped together"
    empty = torch.tensor([caption == "" for caption in captions])
    shares = {"caption": empty & (kept == 1), "both": empty & (kept == 0), "picture": ~empty & (kept == 0)}
    for name, rows in shares.items():
        assert float(rows.float().mean()) == pytest.approx(SHARE, abs=0.006), name


def test_a_draw_depends_on_the_position_in_the_step_alone():
    captions = ["", "a"] * 20
    whole = drop_controls(captions, range(40))[0]
    parts = [drop_controls(captions[start : start + 5], range(start, start + 5))[0] for start in range(0, 40, 5)]
    assert torch.equal(torch.cat(parts), whole) and 0 < whole.mean() < 1
    assert drop_controls(captions, range(40), share=0.0)[0].min() == 1


def test_two_rates_of_empty_captions_contradict_each_other():
    data = parse_config(["--conditioning_dropout_prob", "0.05"]).config.data
    assert list(validate_data_options(data)) == []
    (problem,) = validate_data_options(replace(data, caption_dropout_rate=0.1))
    assert "conditioning_dropout_prob empties 0.1" in problem.text

"""Shared by tests: training task."""

import pytest
import tiny_sd1
import torch
from torch import nn

from library.config.schema_objective import LossConfig, NoiseConfig
from library.data.batch import PixelBatch
from library.diffusion.objective import Objective
from library.distributed.async_copy import CopyStream
from library.models.families import FAMILIES
from library.training.task import DiffusionTask

HEIGHT, WIDTH = 32, 48


class Silent(nn.Module):
    """Says 0 of everything, so that the loss is the target's own."""

    def __init__(self):
        super().__init__()
        self.said = nn.Parameter(torch.zeros(()))

    def forward(self, noisy, t, **conditioning):
        self.noisy, self.t = noisy, t
        return (self.said.expand(noisy.shape),)


@pytest.fixture
def task():
    family, pipe = FAMILIES.get("sd1")(), tiny_sd1.build_pipeline()
    objective = Objective(
        family.build_noise_process(pipe), NoiseConfig(), LossConfig(loss_type="l1", min_snr_gamma=2.0)
    )
    return DiffusionTask(family, pipe, Silent(), objective, seed=7, to_device=CopyStream(torch.device("cpu")))


def pixels(places, weights, mask=None):
    count = len(places)
    draw = torch.Generator().manual_seed(2)
    pictures = torch.rand(9, 3, HEIGHT, WIDTH, generator=draw)[list(places)] * 2 - 1
    frame = torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]] * count, dtype=torch.float32)
    names = tuple(f"picture {place}" for place in places)
    return PixelBatch(pictures, names, frame, torch.tensor(weights), tuple(places), names, mask)

"""A ``DiffusionTask`` with a denoiser that predicts zeros, and its batches."""

import pytest
import tiny_sd1
import torch
from torch import nn

from library.config.schema_objective import LossConfig, NoiseConfig
from library.dataloader.batch import PixelBatch
from library.diffusion.objective import Objective
from library.models.families import FAMILIES
from library.parallel.async_copy import CopyStream
from library.training.task import DiffusionTask

HEIGHT, WIDTH = 32, 48


class ZeroDenoiser(nn.Module):
    """Predicts 0, so that the loss is a function of the target alone."""

    def __init__(self):
        super().__init__()
        self.output = nn.Parameter(torch.zeros(()))

    def forward(self, noisy, t, **conditioning):
        self.noisy, self.t = noisy, t
        return (self.output.expand(noisy.shape),)


@pytest.fixture
def task():
    family, pipe = FAMILIES.get("sd1")(), tiny_sd1.build_pipeline()
    objective = Objective(
        family.build_noise_process(pipe), NoiseConfig(), LossConfig(loss_type="l1", min_snr_gamma=2.0)
    )
    return DiffusionTask(family, pipe, ZeroDenoiser(), objective, seed=7, to_device=CopyStream(torch.device("cpu")))


def make_pixel_batch(indices, weights, mask=None):
    count = len(indices)
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(9, 3, HEIGHT, WIDTH, generator=generator)[list(indices)] * 2 - 1
    frame = torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]] * count, dtype=torch.float32)
    names = tuple(f"picture {place}" for place in indices)
    return PixelBatch(images, names, frame, torch.tensor(weights), tuple(indices), names, mask)

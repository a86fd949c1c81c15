"""One real training step on the built-in model: does training work on this device at all?"""

import torch

from ..adapters.lora import inject
from ..config.schema import AdapterConfig, LossConfig, NoiseConfig
from ..data.batch import PixelBatch
from ..diffusion.objective import Objective
from ..distributed.copies import Copies
from ..families import FAMILIES
from .loop import trainable
from .task import Task


def one_step(device: str) -> float:
    """Train one step on ``device`` and return the loss; raises when anything on the way does not work."""
    place = torch.device(device)
    family = FAMILIES.get("sd1")()
    pipe = family.load(None, torch.float32)
    pipe.to(place)
    denoiser = getattr(pipe, family.denoiser)
    inject(denoiser, AdapterConfig(), family.lora_targets, seed=0)
    objective = Objective(family.process(pipe), NoiseConfig(), LossConfig())
    task = Task(family, pipe, denoiser, objective, seed=0, here=Copies(place))
    optimizer = torch.optim.SGD(trainable(denoiser), lr=1e-3)
    height, width = 64, 128
    pixels = torch.linspace(0, 255, 3 * height * width).to(torch.uint8).view(1, 3, height, width)
    frame = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32)
    loss = task(PixelBatch(pixels, ("a test",), frame, torch.ones(1), (0,), ("test",)), step=0).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    if not any(bool(parameter.grad.abs().sum() > 0) for parameter in trainable(denoiser) if parameter.grad is not None):
        raise RuntimeError("no gradient reached the adapters")
    optimizer.step()
    return float(loss)

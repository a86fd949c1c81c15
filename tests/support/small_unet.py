"""The tiny UNet, with random lora_B weights as if trained."""

import tiny_sd1
import torch
from tiny_pipelines import TINY

from library.adapters import injection
from library.config.schema import AdapterConfig
from library.models.families import FAMILIES

TARGETS = FAMILIES.get("sd1").facts.lora.targets


CONFIG = AdapterConfig(network_dim=6, network_alpha=2.5)


def build_unet(dtype=torch.float32):
    return tiny_sd1.build_pipeline(("unet",), dtype).unet


def run_unet(model, dtype=torch.float32):
    batch = TINY["sd1"]().batch
    t = torch.tensor([300.0, 700.0])
    return model(batch.latents.to(dtype), t, batch.cond["embeds"].to(dtype), return_dict=False)[0]


def randomize_lora_b(model, seed=0, size=0.05):
    """Replace the zero lora_B weights by random ones, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in injection.iter_adapter_parameters(model):
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))

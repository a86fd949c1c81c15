"""Random adapter state dicts for a whole family, and the outputs of its models."""

import torch
from tiny_pipelines import TINY

from library.adapters.original_module_names import T5_KEYS
from library.adapters.targets_rank_alpha import match_target_modules
from library.models.collect_component_keys import collect_component_keys
from library.models.families import FAMILIES


def build_random_state(name, kind="lora", dtype=torch.float32, seed=0, pipe=None, scale=None, with_t5=True):
    """A random state dict with text encoders and several ranks, the alphas, and the key names of the components."""
    pipe, family, generator = pipe or TINY[name]().pipe, FAMILIES.get(name), torch.Generator().manual_seed(seed)
    parts = [part for part in collect_component_keys(family, pipe) if with_t5 or part.key_style != T5_KEYS]
    state, alphas = {}, {}
    for part in parts:
        model = getattr(pipe, part.name)
        targets = (
            family.facts.lora.targets
            if part.name == family.facts.denoiser_name
            else family.facts.lora.text_encoders[part.name].targets
        )
        if part.name == "unet" and kind in ("lora", "dora"):
            targets = (*targets, *family.facts.lora.conv_targets)
        for module in match_target_modules(model, targets):
            shape = model.get_submodule(module).weight.shape
            # Several ranks, but one alpha: diffusers mixes up alphas of U-Net blocks in files of sd-scripts.
            rank = 2 if kind != "lora" or module.split(".")[1:2] == ["1"] else 3
            full = f"{part.name}.{module}"
            for end, size in list_tensor_shapes(kind, shape, rank).items():
                state[f"{full}.{end}"] = torch.randn(size, generator=generator).to(dtype)
            alphas[full] = 1.5 if scale is None else scale * rank
    return state, alphas, parts


def list_tensor_shapes(kind, shape, rank):
    outputs, inputs = shape[:2]
    more = shape[2:]
    match kind:
        case "lora":
            return {"lora_A.weight": (rank, inputs, *more), "lora_B.weight": (outputs, rank, *[1] * len(more))}
        case "dora":
            magnitude = (1, outputs, 1, 1) if more else (outputs,)
            return {**list_tensor_shapes("lora", shape, rank), "lora_magnitude_vector.weight": magnitude}
        case "loha":
            return {
                "hada_w1_a": (outputs, rank),
                "hada_w1_b": (rank, inputs),
                "hada_w2_a": (outputs, rank),
                "hada_w2_b": (rank, inputs),
            }
        case "lokr":
            out, into = (2 - size % 2 for size in (outputs, inputs))
            return {"lokr_w1": (out, into), "lokr_w2_a": (outputs // out, rank), "lokr_w2_b": (rank, inputs // into)}

"""Names of a UNet's modules in the original code of Stable Diffusion, which kohya's SDXL files use."""

import re
from collections.abc import Iterable, Iterator, Mapping

_LDM_RESNET_NAMES = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_LDM_OUTER_NAMES = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip


def map_to_ldm_names(modules: Iterable[str]) -> Mapping[str, str]:
    """Names of all modules of a diffusers UNet -> the original names; what is not in a block keeps its own."""
    known = list(modules)
    places = dict(_find_ldm_block_names(known))
    return {name: _rename_to_ldm(name, places) for name in known}


def _find_ldm_block_names(modules: list[str]) -> Iterator[tuple[str, str]]:
    """Where each resnet, attention and sampler stands: ``down_blocks.1.attentions.0`` -> ``input_blocks.4.1``."""
    found = {match[0] for name in modules if (match := re.match(r"(?:down|up)_blocks\.\d+\.\w+\.\d+(?=\.|$)", name))}
    per_block = {side: 1 + max((int(name.split(".")[3]) for name in found if name.startswith(f"{side}_blocks.")
                                and ".resnets." in name), default=0) for side in ("down", "up")}  # fmt: skip
    for name in found:
        side, block, kind, number = re.sub("_blocks", "", name).split(".")
        # The original counts layer after layer; a sampler is a layer of its own going down, and a part of one going up.
        if side == "down":
            first = 1 + int(block) * (per_block["down"] + 1)
            at, inner = (first + int(number), "1" if kind == "attentions" else "0")
            if kind == "downsamplers":
                at = first + per_block["down"]
            yield name, f"input_blocks.{at}.{inner}"
        else:
            at = int(block) * per_block["up"] + (per_block["up"] - 1 if kind == "upsamplers" else int(number))
            has_attention = f"up_blocks.{block}.attentions.0" in found
            inner = {"resnets": "0", "attentions": "1", "upsamplers": "2" if has_attention else "1"}[kind]
            yield name, f"output_blocks.{at}.{inner}"
    yield from (("mid_block.resnets.0", "middle_block.0"), ("mid_block.attentions.0", "middle_block.1"),
                ("mid_block.resnets.1", "middle_block.2"))  # fmt: skip


def _rename_to_ldm(name: str, block_names: Mapping[str, str]) -> str:
    if name in _LDM_OUTER_NAMES:
        return _LDM_OUTER_NAMES[name]
    match = re.match(r"((?:(?:down|up)_blocks\.\d+|mid_block)\.\w+\.\d+)(?:\.(.*))?$", name)
    if match is None or match[1] not in block_names:
        return name
    start, rest = block_names[match[1]], match[2]
    if rest is None:
        return start
    if ".resnets." in match[1]:
        return f"{start}.{_LDM_RESNET_NAMES.get(rest, rest)}"
    if ".downsamplers." in match[1]:
        return f"{start}.op"
    return f"{start}.{rest}"

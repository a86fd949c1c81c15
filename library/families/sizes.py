"""How large the latents and the encoded captions of a model are, read from its small JSON files; loads no weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

LONGEST_TEXT = 512
"""Tokens, for text encoders that name no limit of their own."""


@dataclass(frozen=True)
class Sizes:
    """In numbers, whatever the precision that they are kept in."""

    channels: int
    shrinks: int  # pixels of a side that become one of a latent
    text: int  # of one caption, at most

    def moments(self, size: tuple[int, int]) -> int:
        """Mean and spread of a picture of this size in pixels."""
        return 2 * self.channels * (size[0] // self.shrinks) * (size[1] // self.shrinks)


def sizes(read: Callable[[str], Json | None]) -> Sizes | None:
    """``read`` gives a JSON file of the model; nothing when they do not tell."""
    vae = read("vae/config.json") or {}
    channels = vae.get("latent_channels", vae.get("z_dim"))
    blocks = vae.get("block_out_channels", vae.get("dim_mult"))
    if not isinstance(channels, int) or not isinstance(blocks, list):
        return None
    encoders = [config for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
                if (config := read(f"{name}/config.json")) is not None]  # fmt: skip
    # A summary of the whole text is used beside the words only where there are several encoders.
    text = sum(_words(config) + (_summary(config) if len(encoders) > 1 else 0) for config in encoders)
    return Sizes(channels, 2 ** (len(blocks) - 1), text)


def _words(config: Json) -> int:
    inner = config.get("text_config", config)
    width, tokens = inner.get("hidden_size", inner.get("d_model", 0)), inner.get("max_position_embeddings")
    return int(width) * min(int(tokens or LONGEST_TEXT), LONGEST_TEXT)


def _summary(config: Json) -> int:
    return int(config.get("projection_dim", 0))

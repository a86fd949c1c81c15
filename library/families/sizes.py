"""How large the latents and the encoded captions of a model are, read from its small JSON files; loads no weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

JsonDict = dict[str, Any]

MAX_TEXT_TOKENS = 512
"""Tokens, for text encoders that name no limit of their own."""


@dataclass(frozen=True)
class EncodedSizes:
    """In numbers, whatever the precision that they are kept in."""

    latent_channels: int
    vae_scale_factor: int  # pixels of a side that become one of a latent
    text_elements: int  # of one caption, at most

    def count_moment_elements(self, size: tuple[int, int]) -> int:
        """Mean and spread of a picture of this size in pixels."""
        return 2 * self.latent_channels * (size[0] // self.vae_scale_factor) * (size[1] // self.vae_scale_factor)


def read_encoded_sizes(read: Callable[[str], JsonDict | None]) -> EncodedSizes | None:
    """``read`` gives a JSON file of the model; nothing when they do not tell."""
    vae = read("vae/config.json") or {}
    channels = vae.get("latent_channels", vae.get("z_dim"))
    blocks = vae.get("block_out_channels", vae.get("dim_mult"))
    if not isinstance(channels, int) or not isinstance(blocks, list):
        return None
    encoders = [config for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
                if (config := read(f"{name}/config.json")) is not None]  # fmt: skip
    # A summary of the whole text is used beside the words only where there are several encoders.
    text = sum(_count_token_elements(config) + (_count_pooled_elements(config) if len(encoders) > 1 else 0) for config in encoders)
    return EncodedSizes(channels, 2 ** (len(blocks) - 1), text)


def _count_token_elements(config: JsonDict) -> int:
    inner = config.get("text_config", config)
    width, tokens = inner.get("hidden_size", inner.get("d_model", 0)), inner.get("max_position_embeddings")
    return int(width) * min(int(tokens or MAX_TEXT_TOKENS), MAX_TEXT_TOKENS)


def _count_pooled_elements(config: JsonDict) -> int:
    return int(config.get("projection_dim", 0))

"""Wan's transformer with a picture to refer to, as Fun-Control 1.1 and 2.2 have it and diffusers (0.42) has not.

The latents of the picture are embedded by a layer of their own.  They are one more frame, before those of the clip, and
what is predicted for it is left out.
"""

import inspect
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

_transformer: Any = WanTransformer3DModel
_SIGNATURE = inspect.signature(WanTransformer3DModel.__init__)


class ReferencePatchEmbedding(nn.Conv3d):
    """The embedding of patches; the first frame is that of the picture."""

    ref_conv: nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """Embed latents whose first frame has those of the picture in its first channels."""
        picture = self.ref_conv(input[:, : self.ref_conv.in_channels, 0])
        return torch.cat([picture.unsqueeze(2), super().forward(input[:, :, 1:])], dim=2)


class WanReferenceTransformer3DModel(_transformer):  # type: ignore[misc]
    """diffusers' transformer, whose input has the latents of the picture as its last channels, in the first frame."""

    def __init__(self, *args: Any, in_dim_ref_conv: int = 16, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_to_config(in_dim_ref_conv=in_dim_ref_conv)
        _, *patch = self.config.patch_size
        embedding = self.patch_embedding
        embedding.__class__ = ReferencePatchEmbedding
        embedding.ref_conv = nn.Conv2d(in_dim_ref_conv, embedding.out_channels, patch, stride=patch)

    # diffusers reads the names of the values of a config from here.
    __init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[
            *_SIGNATURE.parameters.values(),
            inspect.Parameter("in_dim_ref_conv", inspect.Parameter.KEYWORD_ONLY, default=16),
        ]
    )

    def forward(self, hidden_states: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Predict the frames of the clip."""
        width = self.config.in_dim_ref_conv
        latents, picture = hidden_states[:, :-width], hidden_states[:, -width:, :1]
        frame = nn.functional.pad(picture, (0, 0, 0, 0, 0, 0, 0, latents.shape[1] - width))
        output = super().forward(torch.cat([frame, latents], dim=2), *args, return_dict=return_dict, **kwargs)
        if not return_dict:
            return (output[0][:, :, 1:],)
        output.sample = output.sample[:, :, 1:]
        return output

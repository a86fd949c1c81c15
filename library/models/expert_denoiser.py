"""Two experts as one denoiser: each call runs one of them, that of high noise unless the call says otherwise."""

from collections.abc import Iterator
from typing import Any

from diffusers import ModelMixin
from torch import Tensor, nn

from ..diffusion.expert_selection import HIGH_NOISE, LOW_NOISE


class ExpertDenoiser(ModelMixin):
    """The modules of both experts under one name, for adapters, engines and quantization.

    Everything else about it, such as its config, is that of the expert of high noise, which is its equal in size.
    """

    _supports_gradient_checkpointing = True
    is_partly_idle = True
    """Whether a step trains a part of the modules only, so that the others get no gradient."""

    def __init__(self, high_noise: Any, low_noise: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.high_noise, self.low_noise = high_noise, low_noise
        for name in (
            "_no_split_modules",
            "_repeated_blocks",
            "_keep_in_fp32_modules",
            "_skip_layerwise_casting_patterns",
        ):
            setattr(self, name, getattr(high_noise, name, None))
        self.training = high_noise.training

    @property
    def config(self) -> Any:
        return self.high_noise.config

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        expert: str = HIGH_NOISE,
    ) -> Any:
        """Call an expert."""
        model = self.low_noise if expert == LOW_NOISE else self.high_noise
        return model(
            hidden_states=hidden_states,
            timestep=timestep,
            encoder_hidden_states=encoder_hidden_states,
            encoder_hidden_states_image=encoder_hidden_states_image,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
        )

    def cache_context(self, *args: Any, **kwargs: Any) -> Any:
        """diffusers' pipeline calls this object as the expert of high noise."""
        return self.high_noise.cache_context(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save the expert of high noise, whose place in the pipeline this is."""
        self.high_noise.save_pretrained(save_directory, **options)

    def iter_experts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names and the modules of the experts."""
        yield from ((HIGH_NOISE, self.high_noise), (LOW_NOISE, self.low_noise))


def join_experts(pipe: Any) -> None:
    """Let ``pipe.transformer`` be both experts, when both are loaded; ``pipe.transformer_2`` stays as it is.

    The pipeline's record of classes is kept: it is that of the files.
    """
    high, low = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    if high is not None and low is not None and not isinstance(high, ExpertDenoiser):
        object.__setattr__(pipe, "transformer", ExpertDenoiser(high, low))

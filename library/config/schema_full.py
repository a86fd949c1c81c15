"""Options of full fine-tuning (``--train full``): learning rates of blocks and encoders, fused backward pass.

The choice itself, and which weights are trained, are in ``AdapterConfig``, which says what a run trains.
"""

from dataclasses import dataclass
from typing import Any

from .option_needs import Has, HasValue, IsSet, Trait
from .options import define_option
from .types import BlockRates

IS_FULL = HasValue("train", ("full",), "train is not full")
IS_LORA = HasValue("train", ("lora",), "there is no adapter: train is not lora")


def _define_text_rate(which: str) -> Any:
    """Declare the learning rate of one text encoder, under the name that it has in sd-scripts."""
    return define_option(
        None,
        f"train full: peak learning rate of {which}; 0: it is not trained; default: learning_rate",
        minimum=0,
        needs=(IS_FULL, IsSet("train_text_encoder")),
    )


@dataclass(frozen=True)
class FullConfig:
    """Full fine-tuning: what it has of its own, under the names of sd-scripts."""

    learning_rate_te: float | None = _define_text_rate("the text encoder")
    learning_rate_te1: float | None = _define_text_rate("the first text encoder")
    learning_rate_te2: float | None = _define_text_rate("the second text encoder")
    block_lr: BlockRates | None = define_option(
        None,
        "train full: peak learning rate of each of the 23 blocks of SDXL's UNet, in sd-scripts' order, which replaces"
        " that of the denoiser; 0: the block is not trained",
        needs=(IS_FULL, Has(Trait.RATE)),
    )
    fused_backward_pass: bool = define_option(
        False,
        "train full: update each weight within the backward pass and free its gradient at once; max_grad_norm then"
        " limits the norm of each gradient on its own",
        needs=(IS_FULL,),
    )

    stochastic_rounding: bool = define_option(
        True,
        "train full with full_bf16: compute updates in float32 and round weights and moments up or down at random, so"
        " that updates too small for bf16 count on average; otherwise to the nearest value",
        needs=(IS_FULL, IsSet("full_bf16")),
    )

    @property
    def text_encoder_rate_names(self) -> tuple[str, ...]:
        """The options of single text encoders, if one is set, in the order of the encoders."""
        if self.learning_rate_te1 is None and self.learning_rate_te2 is None:
            return () if self.learning_rate_te is None else ("learning_rate_te",)
        return "learning_rate_te1", "learning_rate_te2"

    @property
    def text_encoder_rates(self) -> tuple[float | None, ...]:
        """The rates that are set for single encoders, in their order; None stands for learning_rate."""
        return tuple(getattr(self, name) for name in self.text_encoder_rate_names)

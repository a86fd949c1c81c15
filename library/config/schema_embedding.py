"""What a run trains, and options of textual inversion: new words as vectors, alone or beside a LoRA (pivotal tuning).

Names and meaning are those of sd-scripts' ``train_textual_inversion.py`` where it has the option.
"""

from dataclasses import dataclass
from typing import Literal

from .option_needs import Has, IsSet, IsUnset, Trait
from .options import ALWAYS, Alias, define_option
from .schema_full import IS_LORA

HAS_TOKEN = IsSet("token_string")


@dataclass(frozen=True)
class TrainedPartConfig:
    """Options that say what is trained: an adapter, the model, or the vectors of a new word; and those of the word."""

    train: Literal["lora", "full", "embedding"] = define_option(
        "lora",
        "what is trained: an adapter, the weights of the model themselves (docs/full_finetuning.md), or the vectors of"
        " a new word alone (docs/textual_inversion.md)",
        needs=ALWAYS,
        default_text="lora; embedding, if token_string is set without options of an adapter, as in sd-scripts",
        is_basic=True,
    )
    token_string: str | None = define_option(
        None,
        "new word of captions and prompts whose vectors are trained; with train lora beside the LoRA (pivotal tuning)",
        needs=ALWAYS,
    )
    init_word: str | None = define_option(
        None,
        "words, with spaces or commas between them, whose embeddings the vectors start from, in turn; default: draws"
        " from the distribution of all embeddings",
        needs=(HAS_TOKEN, IsUnset("embedding_weights", "embedding_weights are what the vectors start from")),
    )
    num_vectors_per_token: int = define_option(
        1, "number of vectors of token_string, each of which takes the place of a token", minimum=1, needs=(HAS_TOKEN,)
    )
    embedding_weights: str | None = define_option(
        None,
        "embedding file (.safetensors) that the vectors start from",
        needs=(HAS_TOKEN,),
        is_path=True,
        aliases=(Alias("weights"),),
    )
    embedding_lr: float | None = define_option(
        None,
        "peak learning rate of the vectors; default: learning_rate",
        minimum=0,
        needs=(HAS_TOKEN, Has(Trait.RATE)),
    )
    use_object_template: bool = define_option(
        False,
        "instead of the captions, draw one of 27 texts such as 'a photo of a TOKEN' for each image",
        needs=(HAS_TOKEN,),
    )
    use_style_template: bool = define_option(
        False,
        "instead of the captions, draw one of 19 texts such as 'a painting in the style of TOKEN' for each image",
        needs=(HAS_TOKEN,),
    )
    bundle_emb: bool = define_option(
        False,
        "put the vectors into the LoRA file as well (bundle_emb, as OneTrainer does), so that one file has both",
        needs=(HAS_TOKEN, IS_LORA),
        changes_result=False,
    )

    @property
    def has_adapter(self) -> bool:
        return self.train == "lora"

    @property
    def is_full(self) -> bool:
        """Whether the weights of the model are trained, and no adapter."""
        return self.train == "full"

    @property
    def trains_embedding(self) -> bool:
        """Whether the vectors of a new word are trained, alone or beside an adapter."""
        return self.token_string is not None and not self.is_full

    @property
    def changes_base(self) -> bool:
        """Whether the model without its adapter, if it has one, differs from the base model after a step."""
        return self.is_full or self.trains_embedding

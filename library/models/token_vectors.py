"""Vectors of a new word in CLIP text encoders (textual inversion): their tokens, and their place in the encoder.

A word ``X`` of three vectors is the tokens ``X``, ``X_1`` and ``X_2``, as diffusers' ``load_textual_inversion`` names
them.  The tokenizer finds ``X`` in a text, and ``expand_vector_tokens`` puts the others behind it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

_WRONG_END_TOKEN = 2
"""The ``eos_token_id`` in CLIP configurations of the first releases of transformers, where the end is another token."""


class ExtendedEmbedding(nn.Embedding):
    """A frozen table of token embeddings, followed by trainable vectors for the tokens from ``first_id`` on.

    The table keeps its memory and its name, so that only the vectors are parameters of the optimizer, and nothing has
    to be restored after a step.
    """

    def __init__(self, table: nn.Embedding, first_id: int, vectors: Tensor):
        """``first_id`` may be below the size of the table: no token of the tokenizer has the rows after it."""
        super().__init__(table.num_embeddings, table.embedding_dim, _weight=table.weight.detach(), _freeze=True)
        self.first_id = first_id
        self.vectors = nn.Parameter(vectors)

    def forward(self, input: Tensor) -> Tensor:
        offsets = input - self.first_id
        is_new = offsets >= 0
        known = embedding(input.masked_fill(is_new, 0), self.weight)
        own = embedding(offsets.clamp(0, len(self.vectors) - 1), self.vectors)
        return torch.where(is_new.unsqueeze(-1), own.to(known.dtype), known)


def list_vector_tokens(token: str, count: int) -> list[str]:
    """List the tokens of a word of ``count`` vectors."""
    return [token, *(f"{token}_{number}" for number in range(1, count))]


def add_vector_tokens(tokenizer: Any, token: str, count: int) -> list[int]:
    """Add the tokens of a word to a tokenizer, and return their ids, which follow those of all other tokens."""
    first_id, tokens = len(tokenizer), list_vector_tokens(token, count)
    if tokenizer.add_tokens(tokens) != count:
        raise AssertionError(f"{token} or one of its numbered tokens is known to the tokenizer")
    ids = list(tokenizer.convert_tokens_to_ids(tokens))
    if ids != list(range(first_id, first_id + count)):
        raise AssertionError(f"the tokens of {token} have no ids in a row: {ids}")
    return ids


def expand_vector_tokens(tokenizer: Any, rows: Iterable[Sequence[int]]) -> list[list[int]]:
    """Put the further tokens of each added word behind its first one, in the token ids of texts."""
    added = tokenizer.get_added_vocab()
    further = {}
    for token, number in added.items():
        numbers = list[int]()
        while (following := added.get(f"{token}_{len(numbers) + 1}")) is not None:
            numbers.append(following)
        if numbers:
            further[number] = numbers
    if not further:
        return [list(row) for row in rows]
    return [[each for number in row for each in (number, *further.get(number, ()))] for row in rows]


def tokenize_words(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, without start and end, and not truncated; added words have all their tokens."""
    input_ids = tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False).input_ids
    return expand_vector_tokens(tokenizer, input_ids)


def extend_text_encoder(encoder: Any, tokenizer: Any, first_id: int, vectors: Tensor) -> ExtendedEmbedding:
    """Give a CLIP text encoder vectors for the tokens from ``first_id`` on.

    Where the configuration has a wrong end token, transformers takes the pooled state from the highest token id, which
    would be that of the new word; the encoder gets the end token of its tokenizer instead, with the same result as
    before for all other texts.
    """
    extended = ExtendedEmbedding(encoder.get_input_embeddings(), first_id, vectors)
    encoder.set_input_embeddings(extended)
    for module in encoder.modules():
        if getattr(module, "eos_token_id", None) == _WRONG_END_TOKEN:
            module.eos_token_id = tokenizer.eos_token_id
    return extended


def list_extended_embeddings(model: nn.Module) -> dict[str, ExtendedEmbedding]:
    """List the extended embeddings of a model by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExtendedEmbedding)}

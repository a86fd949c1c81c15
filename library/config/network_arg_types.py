"""Parsers of the values in ``network_args``; each raises a ``ValueError`` that says what it expects.

And the modules, arguments and values of sd-scripts and LyCORIS that are not supported.
"""

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

LR_WEIGHT_PRESETS = ("cosine", "sine", "linear", "reverse_linear", "zeros")
"""Named curves of learning-rate weights over the blocks of a UNet, as in sd-scripts."""

LAST_BLOCK = 10**6
"""A number that stands for the last block of a model, whatever its index."""

UNSUPPORTED_MODULES = {
    "networks.dylora": "DyLoRA is not supported: each step trains another rank, which peft has not; use networks.lora",
    "locon.locon_kohya": "LoCon is part of LyCORIS now; use lycoris.kohya, or networks.lora with conv_dim",
    "networks.lora_fa": "LoRA-FA is not supported: its down matrices are frozen, not so here; use networks.lora",
}
UNSUPPORTED_ARGS = {
    "split_qkv": "not supported: q, k and v share one down matrix (it crashes in sd-scripts)",
    "ggpo_sigma": "not supported: peft has no layer that perturbs its weights (GGPO); leave it out",
    "ggpo_beta": "not supported: peft has no layer that perturbs its weights (GGPO); leave it out",
    "embedder_dims": "not supported: the embedders of Lumina get no adapter; leave it out",
    "train_llm_adapter": "not supported: Anima's adapter is part of the encoding of captions",
    "enable_conv": "not supported: OFT is for linear layers",
    "disable_conv_cp": "LyCORIS reads it as use_tucker; write use_tucker instead",
}
"""Arguments of network modules of sd-scripts or LyCORIS that are not accepted here, unless they are off."""
UNSUPPORTED_VALUES = {("preset", "*.toml"): "preset: files are not supported; use include_patterns"} | {
    ("algo", name): f"algo: {title} is not supported: {reason}; the nearest is algo={nearest}"
    for name, title, reason, nearest in (
        ("ia3", "(IA)^3", "few programs read its files", "lora with a small network_dim"),
        ("full", "training of full matrices", "its state is that of the whole layers", "lokr with network_dim=100000"),
        ("dylora", "DyLoRA", "each step trains another rank, which peft has not", "lora"),
        ("glora", "GLoRA", "peft trains no such layers", "lora"),
        ("tlora", "T-LoRA", "its rank depends on the timestep, which peft has not", "lora"),
        ("abba", "ABBA", "peft trains no such layers", "loha"),
    )
}
"""Presets and algorithms of LyCORIS that are not accepted here."""


def parse_bool(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ValueError("expected True or False")
    return values[text.lower()]


def parse_switch(text: str) -> bool:
    """Parse an argument that may be a switch or a number, which is off at 0."""
    return text.lower() not in ("false", "0", "0.0", "no", "none", "")


def make_number_parser(
    minimum: float, maximum: float = float("inf"), number_type: type = float
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = number_type(text)
        except ValueError:
            raise ValueError("expected an integer" if number_type is int else "expected a number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"expected {minimum:g} {'or more' if maximum == float('inf') else f'to {maximum:g}'}")
        return value

    return parse


parse_rank = make_number_parser(0, number_type=int)
parse_alpha = make_number_parser(0)
parse_positive = make_number_parser(1e-12)
parse_dropout_rate = make_number_parser(0, 0.999)


def parse_lokr_factor(text: str) -> int:
    value: int = make_number_parser(-1, number_type=int)(text)
    if not value:
        raise ValueError("expected 1 or more, or -1 for the most even factorization")
    return value


def make_list_parser(parse_item: Callable[[str], Any], count: int | None = None) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        items = tuple(parse_item(item.strip()) for item in text.strip("[]() ").split(",") if item.strip())
        if not items or count not in (None, len(items)):
            raise ValueError(f"expected {count or 'some'} comma-separated values")
        return items

    return parse


parse_ranks = make_list_parser(parse_rank)
parse_alphas = make_list_parser(parse_alpha)


def parse_block_lr_weights(text: str) -> tuple[float, ...] | str:
    """Parse a list of weights, or the name of a curve with an offset, such as ``sine+0.5``."""
    name, _, offset = text.partition("+")
    if name in LR_WEIGHT_PRESETS:
        parse_alpha(offset or "0")
        return text
    weights: tuple[float, ...] = parse_alphas(text)
    return weights


def parse_patterns(text: str) -> tuple[str, ...]:
    """Parse one regular expression, or a Python list of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # backslashes of patterns such as '.*\.mlp' are no escapes of Python
            expressions = tuple(ast.literal_eval(text) if text.startswith(("[", "(")) else [text])
        for expression in expressions:
            re.compile(expression)
    except (ValueError, SyntaxError, TypeError, re.error) as error:
        raise ValueError(f"expected a list of regular expressions such as ['.*ff.*']: {error}") from None
    return expressions


def make_pattern_parser(parse_value: Callable[[str], Any]) -> Callable[[str], tuple[tuple[str, Any], ...]]:
    """Make a parser of ``pattern=value,pattern=value``."""

    def parse(text: str) -> tuple[tuple[str, Any], ...]:
        pairs = []
        for item in text.split(","):
            pattern, equals, value = item.strip().rpartition("=")
            if not equals:
                raise ValueError("expected comma-separated pattern=value")
            parse_patterns(f"[{pattern!r}]")
            pairs.append((pattern, parse_value(value)))
        return tuple(pairs)

    return parse


def parse_block_indices(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``all``, ``none``, or indices and ranges such as ``0,3-7``, into pairs of first and last index."""
    if text in ("all", "none"):
        return ((0, LAST_BLOCK),) if text == "all" else ()
    try:
        ends = [item.strip().partition("-") for item in text.split(",")]
        return tuple((int(first), int(last) if dash else int(first)) for first, dash, last in ends)
    except ValueError:
        raise ValueError("expected all, none, or indices such as 0,3-7") from None


def make_choice_parser(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse

"""Options of tools that have no effect beside others are named in a notice, and are no error."""

import pytest

from library.config import parse_config
from library.config.options import flatten_config, iter_options
from library.tools import caption, plan
from library.tools.lora import COMMANDS, options

CASES = [
    (options.MergeArguments, "--model base --to comfy --rank 4 --energy 0.9 --method svd", "to rank energy method"),
    (options.MergeArguments, "--model base --math float64", ""),
    (options.MergeArguments, "--math float64", "math"),
    (options.MergeArguments, "--weights 1 2 --denoiser_weights 1 2 --text_encoder_weights 1 2", "weights"),
    (options.MergeArguments, "--weights 1 2 --denoiser_weights 1 2", ""),
    (options.ResizeArguments, "--conv_rank 2", "conv_rank"),
    (options.ResizeArguments, "--conv_rank 2 --sv_fro 0.9", ""),
    (options.ExtractArguments, "--rank 4 --factor 4", "factor"),
    (options.ExtractArguments, "--type lokr --factor 4", ""),
    (options.MetadataArguments, "--set title=a --json", "json"),
    (plan._Arguments, "--preview_limit 3 --link_speed 9 --gpu_tflops 7", "preview_limit link_speed gpu_tflops"),
    (plan._Arguments, "--resolve_only --json --world_size 2", "world_size"),
    (caption._Arguments, "--api_timeout 5", "api_timeout"),
    (caption._Arguments, "--api_timeout 5 --api_base http://a/v1", ""),
]


@pytest.mark.parametrize(("arguments", "flags", "unused"), CASES)
def test_an_option_without_effect_is_named_and_set_back(arguments, flags, unused):
    parsed = parse_config(flags.split(), arguments)
    assert parsed.problems == []
    assert {place.flag.removeprefix("--") for place, _ in parsed.unused} == set(unused.split())
    values, defaults = flatten_config(parsed.config), flatten_config(arguments())
    assert {name for name in unused.split() if values[name] != defaults[name]} == set()


def test_every_need_of_an_option_of_a_tool_names_an_option_of_the_tool():
    """A name that is misspelt would be met for ever."""
    for arguments in [command[2] for command in COMMANDS.values()]:
        names = {option.name for option in iter_options(arguments)} | {"model"}
        for option in iter_options(arguments):
            assert {name for need in option.needs or () for name in need.names} <= names, option.name

"""Checks of the arguments of ``python -m library lora``; all problems are raised together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.parser import ParsedConfig, parse_config
from ...errors import ConfigError
from ...name_suggestions import suggest_name
from ...problems import Place, Problem, report_argument, report_file
from .block_names import BlockFactor, parse_block_factors
from .options import (
    RULES,
    BlockArguments,
    BlockOptions,
    ExtractArguments,
    InspectArguments,
    MergeArguments,
    MetadataArguments,
    OutputOptions,
    RankOptions,
    ResizeArguments,
)
from .rank_rule import RankRule

if TYPE_CHECKING:
    from .options import ExtractOptions, MergeOptions, MetadataOptions

_LYCORIS_REASONS = {
    "loha": "the elementwise product of two low-rank matrices has no best approximation in closed form; use lora",
    "oft": "a rotation keeps the length of each neuron's weights, which training changes; use lora or dora",
}


def parse_arguments(
    argv: Sequence[str], arguments: type, check: Callable[..., Iterator[Problem]]
) -> tuple[list[str], ParsedConfig]:
    """Split into files and options, and raise with all problems of both."""
    at = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    files, parsed = list(argv[:at]), parse_config(argv[at:], arguments)
    notices = [Problem("", notice) for notice in parsed.notices]
    if problems := [*parsed.problems, *notices, *parsed.drop_consequences(check(files, parsed.config))]:
        raise ConfigError(problems)
    return files, parsed


def check_lora_command(command: str, commands: Collection[str]) -> None:
    """Raise unless it is one of the commands of ``lora``."""
    if command not in commands:
        hint = suggest_name(command, commands) or f"; choose from {', '.join(commands)}"
        raise ConfigError([report_argument("lora", f"unknown command {command!r}{hint}")])


def validate_inspect(files: Sequence[str], arguments: InspectArguments) -> Iterator[Problem]:
    if not files:
        yield Problem("", "expected the LoRA files to inspect", "usage: python -m library lora inspect FILE [FILE ...]")
    yield from validate_files_exist(files)


def validate_merge(files: Sequence[str], arguments: MergeArguments) -> Iterator[Problem]:
    merge, ranks = arguments.merge, arguments.ranks
    if not files:
        yield Problem(
            "", "expected the LoRA files to merge", "usage: python -m library lora merge FILE FILE ... --output FILE"
        )
    elif len(files) == 1 and merge.model is None:
        yield Problem("", "expected two LoRA files or more, or a model to merge one into (--model)")
    yield from validate_files_exist(files)
    yield from _validate_weights(merge, len(files))
    yield from (each for each in _iter_block_factors(merge.blocks, len(files)) if isinstance(each, Problem))
    yield from validate_rank_options(ranks)
    has_rule = ranks.rank is not None or any(getattr(ranks, name) is not None for name in RULES)
    if merge.method == "svd" and not has_rule:
        text = "needs --rank or a rule such as --energy 0.99"
        yield Problem("method", text, value="svd", others=("rank", *RULES))
    elif merge.method == "concat" and has_rule:
        yield Problem("method", "is exact and takes no rank", "use --method svd", value="concat")
    if merge.model is not None:
        yield from _validate_model_path(merge.model, "model")
        yield from validate_output(arguments.output, files, is_model=merge.model)
    else:
        yield from validate_output(arguments.output, files)


def _validate_weights(merge: "MergeOptions", count: int) -> Iterator[Problem]:
    for name in ("weights", "denoiser_weights", "text_encoder_weights"):
        values = getattr(merge, name)
        if values and len(values) != count:
            yield Problem(name, f"expected {count} values, one for each file, got {len(values)}")
    given = (merge.weights, merge.denoiser_weights, merge.text_encoder_weights)
    if merge.weights and not any(weight for weights in given for weight in weights or ()):
        yield Problem("weights", "all are 0, which leaves nothing to write")


def _iter_block_factors(texts: Sequence[str], count: int) -> Iterator[tuple[int | None, list[BlockFactor]] | Problem]:
    """File number and factors of each text, or what is wrong with it."""
    for text in texts:
        number, colon, rest = text.partition(":")
        try:
            if not colon:
                yield None, parse_block_factors(text)
            elif number.isdecimal() and 1 <= int(number) <= count:
                yield int(number) - 1, parse_block_factors(rest)
            else:
                yield Problem(
                    "blocks", f"{text!r}: there is no file {number!r}", f"files are numbered from 1 to {count}"
                )
        except ValueError as error:
            yield Problem("blocks", str(error))


def resolve_block_factors(texts: Sequence[str], count: int) -> list[list[BlockFactor]]:
    """The factors of each file; those for one file are looked up first."""
    found = [each for each in _iter_block_factors(texts, count) if not isinstance(each, Problem)]
    common = [factor for number, factors in found if number is None for factor in factors]
    return [
        [factor for number, factors in found if number == file for factor in factors] + common for file in range(count)
    ]


def validate_rank_options(ranks: RankOptions) -> Iterator[Problem]:
    rules = [name for name in RULES if getattr(ranks, name) is not None]
    if len(rules) > 1:
        yield Problem(rules[1], f"contradicts --{rules[0]}", "use one rule")


def build_rank_rule(ranks: RankOptions) -> RankRule | None:
    """The rule that the options set, or None."""
    name: Any = next((rule for rule in RULES if getattr(ranks, rule) is not None), None)
    if name is not None:
        return RankRule(ranks.rank, ranks.conv_rank, name, getattr(ranks, name))
    return None if ranks.rank is None else RankRule(ranks.rank, ranks.conv_rank)


def validate_extract(files: Sequence[str], arguments: ExtractArguments) -> Iterator[Problem]:
    extract: ExtractOptions = arguments.extract
    if len(files) != 2:
        yield Problem("", f"expected two models, got {len(files)}: BASE TUNED")
    for path in files:
        yield from _validate_model_path(path)
    if reason := _LYCORIS_REASONS.get(extract.type):
        yield Problem("type", f"cannot be extracted: {reason}", value=extract.type)
    yield from validate_rank_options(arguments.ranks)
    if extract.type != "lokr" and build_rank_rule(arguments.ranks) is None:
        yield Problem("rank", "missing", "give a rank, or a rule such as --energy 0.99", others=RULES)
    yield from validate_output(arguments.output, ())


def validate_resize(files: Sequence[str], arguments: ResizeArguments) -> Iterator[Problem]:
    if len(files) != 1:
        yield Problem("", f"expected one LoRA file, got {len(files)}")
    yield from validate_files_exist(files)
    yield from validate_rank_options(arguments.ranks)
    if build_rank_rule(arguments.ranks) is None:
        yield Problem("rank", "missing", "give a rank, or a rule such as --sv_fro 0.98", others=RULES)
    yield from validate_output(arguments.output, files)


def validate_scale(files: Sequence[str], arguments: BlockArguments) -> Iterator[Problem]:
    yield from _validate_one_file(files, arguments.output)
    if not arguments.blocks.blocks:
        yield Problem("blocks", "missing", "give NAME=FACTOR, such as IN04=0.5 text_encoders=0")
    if arguments.blocks.keep:
        yield Problem("keep", "only with prune")
    for text in arguments.blocks.blocks:
        try:
            parse_block_factors(text)
        except ValueError as error:
            yield Problem("blocks", str(error))


def validate_prune(files: Sequence[str], arguments: BlockArguments) -> Iterator[Problem]:
    options: BlockOptions = arguments.blocks
    yield from _validate_one_file(files, arguments.output)
    if bool(options.blocks) == bool(options.keep):
        text = "give one of them, with the blocks to remove, or those to keep"
        yield Problem("blocks", text, place=Place(flag="--blocks or --keep"), others=("keep",))
    for text in (*options.blocks, *options.keep):
        if "=" in text:
            yield Problem("blocks", f"{text!r}: prune takes names only", "for factors use lora scale")


def validate_metadata(files: Sequence[str], arguments: MetadataArguments) -> Iterator[Problem]:
    options: MetadataOptions = arguments.metadata
    changes = bool(options.set or options.remove)
    for text in options.set:
        key, equals, _ = text.partition("=")
        if not equals or not key:
            yield Problem("set", f"{text!r}: expected KEY=VALUE")
        elif key.startswith("sshs_") or key == "modelspec.hash_sha256":
            yield Problem("set", f"{key} is computed from the weights")
    if len(files) != 1:
        yield Problem("", f"expected one file, got {len(files)}")
    yield from validate_files_exist(files)
    if changes:
        yield from validate_output(arguments.output, files)
    elif arguments.output.output is not None:
        yield Problem("output", "nothing to change", "add --set or --remove")


def _validate_one_file(files: Sequence[str], output: OutputOptions) -> Iterator[Problem]:
    if len(files) != 1:
        yield Problem("", f"expected one LoRA file, got {len(files)}")
    yield from validate_files_exist(files)
    yield from validate_output(output, files)


def validate_files_exist(files: Sequence[str]) -> Iterator[Problem]:
    for text in files:
        path = Path(text).expanduser()
        if not text:
            yield _report_empty_name("give the .safetensors file")
        elif path.is_dir():
            yield report_file(text, "is a folder", "give the .safetensors file")
        elif not path.is_file():
            yield report_file(text, f"no such file (looked in {path.absolute().parent})")


def _report_empty_name(fix: str, option: str = "") -> Problem:
    """Build the problem of a name of no characters, which Python would take for the working directory."""
    return Problem(option, "the name is empty", fix, None if option else Place(flag="''"))


def _validate_model_path(name: str, option: str = "") -> Iterator[Problem]:
    """Check the path of a model that an option gives, or an argument without one."""
    path = Path(name).expanduser()
    if not name:
        yield _report_empty_name("give a diffusers folder or a .safetensors file", option)
        return
    if not path.exists():
        text, fix = f"no such file or folder (looked in {path.absolute().parent})", "hub ids are not read"
    elif path.is_file() and path.suffix != ".safetensors":
        text, fix = "expected a .safetensors file or a diffusers folder", ""
    else:
        return
    yield Problem(option, f"{name}: {text}", fix) if option else report_file(name, text, fix)


def validate_output(output: OutputOptions, files: Sequence[str], *, is_model: str | None = None) -> Iterator[Problem]:
    """Check the output; for a model its path tells whether the output is a file or a folder."""
    if output.output is None:
        yield Problem("output", "missing", "give the file to write")
        return
    if not output.output:
        yield _report_empty_name("give the file to write", "output")
        return
    path = Path(output.output).expanduser()
    is_folder = is_model is not None and Path(is_model).expanduser().is_dir()
    sources = [*files, *([is_model] if is_model is not None else [])]
    if any(path.resolve() == Path(each).expanduser().resolve() for each in sources):
        yield Problem("output", f"{path}: is an input", "give another name")
    elif path.exists() and not output.overwrite:
        yield Problem("output", f"{path}: already exists", "add --overwrite, or give another name")
    elif path.is_dir() != is_folder and path.exists():
        yield Problem("output", f"{path}: is a {'folder' if path.is_dir() else 'file'}", "give another name")
    if not is_folder and path.suffix != ".safetensors":
        yield Problem("output", f"{path}: expected a file name ending in .safetensors")
    elif is_folder and path.suffix == ".safetensors":
        yield Problem("output", f"{path}: the model is a folder, so the output is one, too", "give a folder")

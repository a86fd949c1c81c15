"""``python -m library convert IN OUT --to FORMAT``: a LoRA file with the names of another program, without loss."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..registry import suggest_name

USAGE = "usage: python -m library convert IN.safetensors OUT.safetensors --to kohya|diffusers|comfy"
FORMAT_DESCRIPTIONS = {
    "kohya": "as sd-scripts writes them; read by ComfyUI, Forge and diffusers for SD 1, SD 2 and SDXL",
    "diffusers": "as diffusers writes them; alpha is multiplied into the weights, and told in the metadata",
    "comfy": "as ComfyUI reads them, with alpha: like kohya for SD and SDXL, diffusers' names for the others",
}


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Convert one file."""
    if not argv or set(argv) & {"--help", "-h"}:
        lines = [USAGE, "", *(f"  {name:<10} {what}" for name, what in FORMAT_DESCRIPTIONS.items()), "",
                 "Which model the LoRA is for is found from its names. docs/files.md says who reads what."]  # fmt: skip
        return "\n".join(lines), 0
    source, target, form = _parse_arguments(list(argv))
    from ..training.converting import convert_lora_file

    return convert_lora_file(source, target, form), 0


def _parse_arguments(argv: list[str]) -> tuple[Path, Path, str]:
    problems, form = [], ""
    if "--to" in argv:
        at = argv.index("--to")
        form = "".join(argv[at + 1 : at + 2])
        del argv[at : at + 2]
    if form not in FORMAT_DESCRIPTIONS:
        what = f"--to: no format {form!r}{suggest_name(form, FORMAT_DESCRIPTIONS)}" if form else "--to: missing"
        problems.append(f"{what}; there are: {', '.join(FORMAT_DESCRIPTIONS)}")
    problems += [f"{word}: no such option" for word in argv if word.startswith("--")]
    paths = [Path(word).expanduser() for word in argv if not word.startswith("--")]
    if len(paths) != 2:
        problems.append(f"expected two files, and found {len(paths)}; {USAGE}")
    elif paths[1].exists():
        problems.append(f"{paths[1]}: is there already; it is not overwritten")
    elif paths[1].suffix != ".safetensors":
        problems.append(f"{paths[1]}: LoRA files end in .safetensors")
    if problems:
        raise ConfigError(problems)
    return paths[0], paths[1], form

"""``python -m library bench NAME``: how fast it is here, with the command and the machine beside the figures."""

from collections.abc import Iterator, Sequence

from ..config import RunConfig
from ..config.options import options_of
from ..log import set_up
from ..registry import Registry

WHAT = {
    "data": "looking at pictures, the second start, memory, latents out of a cache, the batch plan",
    "compile": "compiling: graphs, seconds to the first step, seconds of a step, for 1, 8 and 24 sizes",
    "step": "a step of training beside a bare loop of PyTorch, on any model",
    "startup": "from the command to the first step, beside a bare script on the same model",
    "memory": "what switches that save memory cost in time, on any model",
    "strategies": "the same job on DDP, FSDP, ZeRO, pipelines, tensor and context parallel: pace, bytes sent, memory",
    "pipeline": "how long the stages of --pp_size wait for each other, beside the formula",
    "saves": "LoRA files and states: what saving costs of a run's time",
}
BENCHES = Registry("bench", "library.tools", {name: f".bench_{name}:run" for name in WHAT})
ARGUMENTS = Registry("bench", "library.tools", {name: f".bench_{name}:Arguments" for name in WHAT})


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Each bench takes ``--help``, ``--json`` and options of its own."""
    if not argv or argv[0] in ("--help", "-h"):
        lines = [f"  {name:<10} {what}" for name, what in WHAT.items()]
        return "\n".join(["usage: python -m library bench NAME [--json] [--help]", "", *lines]), 0
    name, *rest = argv
    bench = BENCHES.get(name)
    if name in WHAT and set(rest) & {"--help", "-h"}:
        return "\n".join(_help(name, ARGUMENTS.get(name))), 0
    set_up(quiet=True, simple=True)
    return bench(rest), 0


def _help(name: str, arguments: type) -> Iterator[str]:
    yield from [f"usage: python -m library bench {name} [--option value ...]", "", WHAT[name], ""]
    for option in options_of(arguments):
        if option.group == "bench":
            value = "" if option.kind is bool else f" {option.syntax}{' ...' if option.many else ''}"
            default = option.default if isinstance(option.default, tuple) else (option.default,)
            usual = " ".join(f"{each:,}" if type(each) is int else str(each) for each in default if each)
            yield f"  {'--' + option.name + value:<28} {option.help}{f' ({usual})' if usual else ''}"
    if issubclass(arguments, RunConfig):
        from .bench_run import DEFAULTS, MODELS

        model = ("--pretrained_model_name_or_path", MODELS.get(name, DEFAULTS[1]))
        yield from ["", "Beside these, every option of training; without any: " + " ".join((*model, *DEFAULTS[2:]))]

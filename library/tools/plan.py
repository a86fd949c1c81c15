"""``python -m library plan --dataset_config x.toml [--world_size N]``: what would be trained, without training."""

from collections.abc import Sequence

from ..config import load_options
from ..data.prepare import check
from ..errors import ConfigError


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Takes every option of training, and the number of processes to plan for."""
    ranks, rest = _world_size(list(argv))
    loaded = load_options(rest)
    problems = [*loaded.problems, *check(loaded.config.data)]
    if problems:
        raise ConfigError(problems)
    from ..training.outline import outline_of

    return outline_of(loaded.config, ranks), 0


def _world_size(argv: list[str]) -> tuple[int, list[str]]:
    if "--world_size" not in argv:
        return 1, argv
    at = argv.index("--world_size")
    word = argv[at + 1] if at + 1 < len(argv) else ""
    if not word.isdigit() or int(word) < 1:
        raise ConfigError([f"--world_size: expected the number of processes, got {word or 'nothing'}"])
    return int(word), argv[:at] + argv[at + 2 :]

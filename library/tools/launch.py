"""``python -m library launch accelerate launch ...``: a launcher, with the exit code that a scheduler needs."""

from collections.abc import Sequence

from ..errors import UserError

USAGE = """usage: python -m library launch LAUNCHER ...

Starts accelerate launch, torchrun or the like.  SIGTERM, SIGINT and SIGUSR1 are passed on to the training processes,
and when the run ended because of them, its exit code (--requeue_exit_code) is that of this program:

  python -m library launch accelerate launch --multi_gpu --num_processes 8 train_lora.py ... --requeue_exit_code 75"""


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Nothing to print but help, and the exit code."""
    from ..distributed.supervised import supervise

    if argv and argv[0] in ("--help", "-h"):
        return USAGE, 0
    command = list(argv[1:]) if argv and argv[0] == "--" else list(argv)
    if not command:
        raise UserError(f"what is to be started?\n{USAGE}")
    return "", supervise(command)

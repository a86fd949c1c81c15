"""Train a LoRA.  Usage: accelerate launch train_lora.py --dataset_config x.toml [--option value ...]"""

import sys
from pathlib import Path

import library

if Path(library.__file__ or ".").resolve().parent != Path(__file__).resolve().parent / "library":
    print(
        f"train_lora: nothing was started: 'import library' finds {library.__file__ or library.__path__}.\n"
        "  Another project (sd-scripts?) is installed in this environment. Use a separate virtual environment,\n"
        f"  or set PYTHONPATH={Path(__file__).resolve().parent}",
        file=sys.stderr,
    )
    raise SystemExit(2)

from library.cli import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

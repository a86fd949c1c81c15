"""``python -m library NAME ...``: the tools beside training."""

import sys

from .cli import tool

if __name__ == "__main__":
    raise SystemExit(tool(sys.argv[1:]))

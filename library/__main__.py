"""``python -m library NAME ...``: run a tool."""

import sys

from .cli import run_tool

if __name__ == "__main__":
    raise SystemExit(run_tool(sys.argv[1:]))

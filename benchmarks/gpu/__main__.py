"""One section in a process of its own: ``python -m benchmarks.gpu FILE`` appends its measurements to the file's."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from library.log import configure_logging

from .sections import SectionContext


def main(argv: list[str]) -> int:
    request_file = Path(argv[0])
    request: dict[str, Any] = json.loads(request_file.read_text("utf-8"))
    context = SectionContext(**{**request["context"], "directory": Path(request["context"]["directory"]),
                                "training_options": tuple(request["context"]["training_options"])})  # fmt: skip
    os.environ.update(context.environment)
    configure_logging(quiet=True, simple=True)
    function = resolve_name(f"benchmarks.gpu.{request['function']}")
    with Path(request["output"]).open("a", encoding="utf-8") as output:
        for measurement in function(context):
            output.write(json.dumps(asdict(measurement)) + "\n")
            output.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Shared by tests: model files."""

import json


def written(folder, files):
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(json.dumps(data))
    return str(folder)

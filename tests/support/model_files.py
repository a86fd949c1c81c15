"""Write the JSON files of a model folder."""

import json


def write_json_files(folder, files):
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(json.dumps(data))
    return str(folder)

"""Files of other programs that are dropped become the same run and dataset files as by the command."""

import json
import tempfile
from pathlib import Path

import pytest
from web_pages import open_page

from library.tools.import_config import run_import_config

DATA = Path(__file__).resolve().parents[2] / "data" / "import"


def drop(page, *files: Path):
    return page.post("/api/import", json={"files": [{"name": path.name, "text": path.read_text()} for path in files]})


@pytest.mark.parametrize(
    "names",
    [
        "kohya_sdxl.json",
        "ai_toolkit_flux.yaml",
        "onetrainer_sdxl.json onetrainer_concepts.json onetrainer_samples.json",
    ],
)
def test_a_dropped_file_becomes_what_the_command_writes(tmp_path, names, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [DATA / name for name in names.split()]
    page = open_page(tmp_path / "open") if (tmp_path / "open").mkdir() is None else None
    answers = [drop(page, *files).json(), drop(page, *files).json()]
    name = files[0].stem
    folders = [tmp_path / "open" / "imports" / each for each in (name, f"{name}-2")]  # nothing is overwritten
    run_import_config([*map(str, files), "--output_dir", str(tmp_path / "command")])

    for answer, folder in zip(answers, folders, strict=True):
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "command").iterdir()}
        for path in (tmp_path / "command").iterdir():
            expected = path.read_text().replace(str(tmp_path / "command"), str(folder))
            assert (folder / path.name).read_text() == expected
        assert answer["file"] == f"0/imports/{folder.name}/{name}.toml" and name in answer["report"]
        assert "lorikeet-import" not in answer["report"]
    text = page.get(f"/new?file={answers[0]['file']}").text
    assert page.get("/new").status_code == 200 and '"network_dim"' in text


def test_files_that_name_what_is_not_open_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "databackend.json").write_text('[{"id": "secret words", "instance_data_dir": "/x"}]')
    (tmp_path / "open").mkdir()
    path = str(tmp_path / "secret" / "databackend.json")
    monkeypatch.chdir(tmp_path)
    up = "../" * (len(Path(tempfile.gettempdir()).resolve().parts) + 1)
    for named in (path, up + path[1:]):  # from the working directory, or from the folder of the dropped file
        (tmp_path / "config.json").write_text(json.dumps({"--model_type": "lora", "--data_backend_config": named}))
        answer = drop(open_page(tmp_path / "open"), tmp_path / "config.json")
        assert answer.status_code == 400 and "outside of the opened folders" in answer.text
        assert "secret words" not in answer.text and not list((tmp_path / "open").iterdir())
        assert answer.json()["error"].startswith("config.json")


def test_a_file_whose_name_is_like_that_of_a_dataset_file_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the file names a folder "output", which is in a checkout where a demo has run
    text = (DATA / "kohya_sdxl.json").read_text()
    page = open_page(tmp_path)
    answer = page.post("/api/import", json={"files": [{"name": "my.dataset.json", "text": text}]})
    assert answer.json()["file"] == "0/imports/my.dataset/my.dataset.toml"


@pytest.mark.parametrize(
    "files",
    [
        [],
        "x",
        [{"name": "a.json"}],
        [{"name": "a.json", "text": "{"}],
        [{"name": "a.txt", "text": "{}"}],
        [{"name": "../../.bashrc", "text": "{}"}],
        [{"name": "a\n.json", "text": "{}"}],
        [{"name": f"{'라' * 90}.json", "text": "{}"}],
        [{"name": "a.json", "text": "{}"}, {"name": "b/a.json", "text": "{}"}],
        [{"name": "a.json", "text": "[" * 100_000}],
        [{"name": "a.yaml", "text": "[" * 5000}],
        [{"name": "a.toml", "text": f"a = {'[' * 5000}"}],
        [{"name": "a.yaml", "text": "a: 2020-02-31"}],
        [{"name": "a.toml", "text": f"a = {'1' * 5000}"}],
        [{"name": "a.json", "text": '{"a": "\ud800"}'}],
        [
            {
                "name": "a.yaml",
                "text": "a0: &a0 [x]\n"
                + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)),
            }
        ],
    ],
)
def test_what_is_no_configuration_is_refused_in_words(tmp_path, files):
    body, kind = json.dumps({"files": files}), {"Content-Type": "application/json"}
    answer = open_page(tmp_path).post("/api/import", content=body, headers=kind)
    assert answer.status_code == 400 and answer.json()["problems"] and "lorikeet-import" not in answer.text
    assert not list(tmp_path.iterdir())

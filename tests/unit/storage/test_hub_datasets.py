"""Datasets of ``hf://`` through Hugging Face's own file system, from a hub on this machine."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fake_hub import run_fake_hub
from image_listings import encode_image, make_config, prepare_subsets, write_files

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from library.config.schema_data import DataConfig
from library.dataloader.prepare import prepare_data
from library.errors import UserError
try:
    print(prepare_data(DataConfig(dataset_config=sys.argv[1]), 8).manifest.compute_fingerprint())
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_repository_is_planned_as_its_local_copy(tmp_path):
    files = {f"pictures/{number} #.png": encode_image(number) for number in range(4)}
    write_files(tmp_path / "repo", files | {f"pictures/{number} #.txt": f"caption {number}" for number in range(4)})
    with tarfile.open(tmp_path / "repo" / "0.tar", "w") as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = len(encode_image(number))
            tar.addfile(info, io.BytesIO(encode_image(number)))
    with run_fake_hub(tmp_path / "repo") as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        environment["XDG_CACHE_HOME"] = str(tmp_path / "xdg")

        def plan(subset: str) -> str:
            config = make_config(tmp_path, subset, head="[[datasets]]\nresolution = 64\n")
            command = [sys.executable, "-c", SCRIPT, str(config.dataset_config)]
            run = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            return run.stdout.strip()

        for subset in ("image_dir = '{}/pictures'", "webdataset = '{}/*.tar'"):
            expected = prepare_subsets(tmp_path, subset.format(tmp_path / "repo")).manifest.compute_fingerprint()
            assert plan(subset.format("hf://datasets/me/set")) == expected
        assert "webdataset: hf://datasets/me/set@main/1.tar does not exist; hf://datasets/me/set@main contains" in plan(
            "webdataset = 'hf://datasets/me/set@main/1.tar'"
        )
        assert "the repository 'datasets/me/other' does not exist; check its name; run `hf auth login`" in plan(
            "image_dir = 'hf://datasets/me/other/pictures'"
        )

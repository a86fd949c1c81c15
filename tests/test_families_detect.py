"""The family of a model is found from its small files, without torch, with a reason; or the message says why not."""

import json
import subprocess
import sys

import pytest

from library.errors import ConfigError
from library.families.detect import detect


def model(folder, name="StableDiffusionPipeline", unet=None, vae=None, scheduler=None):
    """The JSON files of a diffusers folder with the sizes of Stable Diffusion 1.5."""
    sizes = {"cross_attention_dim": 768, "block_out_channels": [320, 640, 1280, 1280], "in_channels": 4}
    files = {
        "model_index.json": {"_class_name": name},
        "unet/config.json": {**sizes, **(unet or {})},
        "vae/config.json": {"block_out_channels": [128, 256, 512, 512], **(vae or {})},
        "scheduler/scheduler_config.json": scheduler or {},
        "text_encoder/config.json": {},
        "tokenizer/tokenizer_config.json": {},
    }
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(json.dumps(data))
    return str(folder)


def problem(source):
    with pytest.raises(ConfigError) as caught:
        detect(source)
    (line,) = caught.value.problems
    assert line.startswith(f"pretrained_model_name_or_path: {source}: ")
    return line


def test_a_diffusers_folder_of_stable_diffusion_1_is_known_with_a_reason(tmp_path):
    found = detect(model(tmp_path))
    assert found.family == "sd1"
    assert "StableDiffusionPipeline" in found.reason and "768" in found.reason
    assert found.pixel_step == 64


def test_the_built_in_model_is_what_its_saved_files_say(tmp_path):
    from library.demo import stand_in

    stand_in.build().save_pretrained(tmp_path)
    read, told = detect(str(tmp_path)), detect(None)
    assert (read.family, read.pixel_step) == (told.family, told.pixel_step) == ("sd1", 16)
    assert "built-in" in told.reason


def test_other_models_are_named_and_refused(tmp_path):
    assert "FluxPipeline; not yet" in problem(model(tmp_path / "a", name="FluxPipeline"))
    assert "Stable Diffusion 2; not yet" in problem(model(tmp_path / "b", unet={"cross_attention_dim": 1024}))
    assert "takes 9 channels" in problem(model(tmp_path / "c", unet={"in_channels": 9}))


def test_what_is_no_model_is_told_with_the_way_out(tmp_path):
    assert "no model_index.json" in problem(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "single file; not yet" in problem(str(file))
    assert "no such folder (looked in" in problem(str(tmp_path / "absent"))
    assert "no such folder (looked in" in problem("absent.safetensors")
    broken = tmp_path / "broken"
    model(broken)
    (broken / "unet/config.json").write_text("{")
    assert "config.json cannot be read" in problem(str(broken))
    (broken / "unet/config.json").unlink()
    assert "unet/config.json is missing" in problem(str(broken))


def test_a_hub_id_without_network_is_one_clear_line():
    assert "the hub cannot be reached" in problem("nobody/nothing")
    assert "the hub says: " in problem("no--body/nothing")


def test_looking_at_a_folder_loads_neither_torch_nor_diffusers(tmp_path):
    script = (
        "import sys; from library.families.detect import detect; from library.families import FAMILIES;"
        f"detect({model(tmp_path)!r}); detect(None); FAMILIES.names();"
        "print({'torch', 'diffusers', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("part", ["unet/config.json", "vae/config.json", "scheduler/scheduler_config.json",
                                  "text_encoder/config.json", "tokenizer/tokenizer_config.json"])  # fmt: skip
def test_a_model_that_lacks_a_part_is_told_before_it_is_loaded(part, tmp_path):
    source = model(tmp_path)
    (tmp_path / part).unlink()

    assert f"{part} is missing; the model is not complete" in problem(source)


def test_what_training_cannot_use_is_told_before_it_is_loaded(tmp_path):
    assert "predict" in problem(model(tmp_path / "a", scheduler={"prediction_type": "sample"}))
    assert "num_train_timesteps 500" in problem(model(tmp_path / "b", scheduler={"num_train_timesteps": 500}))
    assert "names no block_out_channels" in problem(model(tmp_path / "c", unet={"block_out_channels": None}))


def test_a_damaged_file_of_weights_is_told_in_one_line_and_a_tilde_is_the_home(tmp_path, monkeypatch):
    import torch

    from library.demo import stand_in
    from library.families.sd1 import StableDiffusion1

    monkeypatch.setenv("HOME", str(tmp_path))
    stand_in.build().save_pretrained(tmp_path / "model")
    assert StableDiffusion1().load("~/model", torch.float32, ["vae"]).vae is not None
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")

    with pytest.raises(ConfigError, match="cannot be loaded"):
        StableDiffusion1().load("~/model", torch.float32, ["vae"])

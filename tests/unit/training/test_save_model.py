"""Parts of a saved model that are not trained are compared with what was written, as trained ones are."""

import shutil

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from library.errors import UserError
from library.training.save_model import copy_folder, save_and_verify


def change_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_copied_folder_is_compared_with_its_source(tmp_path, monkeypatch):
    (tmp_path / "vae" / "part").mkdir(parents=True)
    (tmp_path / "vae" / "part" / "model.safetensors").write_bytes(b"weights")
    copy_folder(tmp_path / "vae", tmp_path / "copy")
    assert (tmp_path / "copy" / "part" / "model.safetensors").read_bytes() == b"weights"

    def copy_badly(source, target):
        copytree(source, target)
        change_a_byte(target / "model.safetensors")

    copytree = shutil.copytree
    monkeypatch.setattr(shutil, "copytree", copy_badly)
    with pytest.raises(UserError, match=r"model\.safetensors.*reads back other.*faulty"):
        copy_folder(tmp_path / "vae" / "part", tmp_path / "other")


@pytest.mark.parametrize("kind", ["diffusers", "transformers"])
def test_a_written_component_is_compared_with_its_weights(kind, tmp_path, monkeypatch):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoencoderKL() if kind == "diffusers" else CLIPTextModel(CLIPTextConfig(vocab_size=16, **sizes))
    model = model.to(torch.bfloat16)
    save_and_verify(model, tmp_path / "good", model.state_dict())
    save = model.save_pretrained

    def save_badly(folder, **options):
        save(folder, **options)
        change_a_byte(next(folder.glob("*.safetensors")))

    monkeypatch.setattr(model, "save_pretrained", save_badly)
    with pytest.raises(UserError, match="reads back other than written"):
        save_and_verify(model, tmp_path / "bad", model.state_dict())

"""Runs of the flow-matching families write files that the pipelines of diffusers load."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from tiny_pipelines import TINY
from training_runs import even_dataset, max_relative_difference, train_adapter

from library.config import parse_config
from library.models.families import FAMILIES

__all__ = ["even_dataset"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "sd3": "random:sd3:tiny",
    "flux": "random:flux:tiny",
    "flux_schnell": "random:flux:schnell:tiny",
    "z_image": "random:z_image:tiny",
    "qwen_image": "random:qwen_image:tiny",
}


@torch.no_grad()
def predict(family, pipe, name):
    """The prediction of a model for one batch."""
    batch = TINY[name]().batch
    cond = family.encode_prompts(pipe, ["a red circle", "a longer text, of blue"])
    denoiser = getattr(pipe, family.facts.denoiser_name).eval()
    return family.predict(pipe, denoiser, batch.latents, torch.tensor([900.0, 300.0]), replace(batch, cond=cond))


def train_and_predict(name, *flags):
    """Train, and return the prediction of the model in memory for the batch when the file is written."""
    from library.training import save_adapter
    from library.training.run import run_training

    looks = []
    save_file = save_adapter.SaveAdapter.save

    def save(self, job, file):
        save_file(self, job, file)
        looks.append(predict(job.task.family, job.task.pipe, name))

    save_adapter.SaveAdapter.save = save
    run_training(
        parse_config(
            ["--network_train_unet_only", *flags, "--quiet", "--max_data_loader_n_workers", "0"]
        ).require_valid()
    )
    return looks[-1].tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_diffusers_samples_the_same_with_the_file_as_the_model_in_memory(name, tmp_path):
    source = SOURCES[name]
    (prediction_in_memory,) = run_on_ranks(
        1,
        train_and_predict,
        name,
        "--dataset_config",
        str(ROOT / "dataset_configs/demo.toml"),
        "--pretrained_model_name_or_path",
        source,
        *"--max_train_steps 3 --learning_rate 3e-2 --network_dim 4 --network_alpha 3".split(),
        "--output_dir",
        str(tmp_path),
    )
    prediction_in_memory = torch.tensor(prediction_in_memory)
    family = FAMILIES.get(source.split(":")[1])()
    pipe = family.load(source, torch.float32)
    base = predict(family, pipe, name)
    pipe.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    assert (predict(family, pipe, name) - prediction_in_memory).abs().max() < 1e-4
    assert (base - prediction_in_memory).abs().max() > 0.02, (
        "the LoRA changes the image by much more than the tolerance"
    )


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image"])
def test_one_process_and_two_train_the_same_weights(name, even_dataset, tmp_path):
    """With modules that share lora_A, and unused layers."""
    flags = (
        "--pretrained_model_name_or_path",
        SOURCES[name],
        *"--optimizer_type SGD --gradient_checkpointing --max_train_steps 3".split(),
    )
    one = train_adapter(tmp_path / "one", 1, 4, 1, *flags, dataset=even_dataset)
    two = train_adapter(tmp_path / "two", 2, 2, 1, *flags, dataset=even_dataset)
    assert max_relative_difference(one, two) < 1e-4


def test_modules_that_are_fused_in_the_original_share_lora_a_to_the_end(even_dataset, tmp_path):
    one = train_adapter(tmp_path, 1, 4, 1, "--pretrained_model_name_or_path", SOURCES["flux"], dataset=even_dataset)
    name = "transformer.single_transformer_blocks.0"
    down = [one[f"{name}.{part}.lora_A.weight"] for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    assert all(torch.equal(each, down[0]) for each in down)
    assert not torch.equal(one[f"{name}.attn.to_q.lora_B.weight"], one[f"{name}.attn.to_k.lora_B.weight"])

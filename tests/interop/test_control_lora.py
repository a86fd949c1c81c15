"""A control LoRA of FLUX.1 works in diffusers' control pipeline, from images to the file."""

from dataclasses import replace

import numpy as np
import torch
from diffusers import FluxControlPipeline
from PIL import Image
from safetensors.torch import load_file
from tiny_pipelines import TINY
from training_runs import train, write_images

from library.adapters import injection
from library.config import parse_config
from library.dataloader.sample_prompts import Prompt
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.trainable_modules import select_target_components

CONTROL = ("--pretrained_model_name_or_path", "random:flux:tiny", "--control", "channels", "--network_dim", "4")


def test_a_control_lora_makes_the_same_picture_in_diffusers_control_pipeline(tmp_path):
    data = write_images(tmp_path, {(96, 64): 4})
    data.write_text(data.read_text() + "\ncontrol_from_image = 'colorization'\n")
    words = (*CONTROL, "--network_alpha", "2", "--dataset_config", str(data), "--output_dir", str(tmp_path))
    train(*words, "--output_name", "control", "--max_train_steps", "3", "--learning_rate", "0.1")
    file = load_file(tmp_path / "control.safetensors")
    assert file["transformer.x_embedder.lora_A.weight"].shape[1] == 2 * 16

    config = parse_config(words).config
    detected = detect_model(config.model)
    family = FAMILIES.get(detected.family)(config.model)
    pipe = family.load(detected, torch.float32)
    tiny = TINY["flux"]()
    plain, cond = tiny.pipe, {name: rows[:1] for name, rows in tiny.batch.cond.items()}
    condition = next((tmp_path / "images").glob("*.png"))
    prompt = Prompt("", width=96, height=64, num_inference_steps=2, control_images=(condition,))

    def draw_with_lora():
        parts = select_target_components(config.adapter, config.optim, family, pipe)
        injection.inject_adapters(
            parts, replace(config.adapter, network_alpha=4), 0
        )  # alpha is in the weights of the file
        injection.load_adapter_state_dict(
            pipe.transformer, {name.removeprefix("transformer."): each for name, each in file.items()}
        )
        return family.generate_image(pipe, prompt, cond, cond, torch.Generator().manual_seed(0), None)

    before = family.generate_image(pipe, prompt, cond, cond, torch.Generator().manual_seed(0), None)
    ours = draw_with_lora()

    theirs = FluxControlPipeline(
        **{name: plain.components[name] for name in FluxControlPipeline._get_signature_keys(FluxControlPipeline)[0]}
    )
    theirs.set_progress_bar_config(disable=True)
    theirs.load_lora_weights(str(tmp_path), weight_name="control.safetensors")
    assert theirs.transformer.config.in_channels == 32
    loaded = [name for name, _ in theirs.transformer.named_parameters() if ".lora_" in name]
    assert len(loaded) == len(file)
    pixels = theirs.image_processor.preprocess(Image.open(condition).convert("RGB"), 64, 96)
    latents = family.encode_moments(pipe, pixels).mean_and_std[:, 0]
    control = theirs._pack_latents(latents, *latents.shape)
    expected = theirs(
        prompt_embeds=cond["embeds"],
        pooled_prompt_embeds=cond["pooled"],
        control_image=control,
        width=96,
        height=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    difference = np.abs(np.asarray(ours, int) - np.asarray(expected, int))
    assert difference.max() <= 1
    assert np.abs(np.asarray(before, int) - np.asarray(ours, int)).max() > 8, "the LoRA changes the picture"

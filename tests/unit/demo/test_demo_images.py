"""The tiny pipeline with random weights, and the images of the demo."""

import time
from pathlib import Path

import pytest
import tiny_sd1
import torch
from PIL import Image
from torch import nn

from library.adapters import injection
from library.config.schema import AdapterConfig
from library.dataloader.batch import Batch
from library.dataloader.sample_prompts import Prompt
from library.models.detect import detect_model
from library.models.families import FAMILIES

FOLDER = Path(__file__).resolve().parents[3] / "dataset_configs"


def weights(pipe):
    return torch.cat(
        [p.flatten() for part in ("vae", "text_encoder", "unet") for p in getattr(pipe, part).parameters()]
    )


def test_the_tiny_pipeline_is_a_function_of_its_seed_and_the_global_generator_is_unchanged():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(tiny_sd1.build_pipeline())
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(weights(tiny_sd1.build_pipeline()), first)
    assert not torch.equal(weights(tiny_sd1.build_pipeline(seed=1)), first)
    assert first.numel() * 4 < 5e6, "the pipeline is small"


def test_a_part_has_the_same_weights_whichever_others_are_built():
    single, among = tiny_sd1.build_pipeline(("unet",)), tiny_sd1.build_pipeline()
    assert single.vae is None and single.text_encoder is None and single.tokenizer is None
    assert all(torch.equal(a, b) for a, b in zip(single.unet.parameters(), among.unet.parameters(), strict=True))


def test_any_text_is_tokenized_and_different_texts_have_different_tokens():
    tokens = tiny_sd1.build_pipeline(("tokenizer",)).tokenizer
    one, two = (tokens(text).input_ids for text in ("a red circle, 7!", "ein rötes Ding 猫"))
    assert one[0] == two[0] == tokens.bos_token_id and one[-1] == tokens.eos_token_id
    assert tokens.unk_token_id not in one[1:-1] and tokens.unk_token_id not in two[1:-1]
    assert one != two
    assert tokens.model_max_length == 77


def test_latents_of_the_demo_images_have_about_unit_variance():
    family, pipe = FAMILIES.get("sd1")(), tiny_sd1.build_pipeline()
    latents = []
    for path in sorted((FOLDER / "demo").glob("*.png")):
        image = Image.open(path)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*reversed(image.size), 3)
        pixels = pixels.permute(2, 0, 1)[None] / 127.5 - 1
        latents.append(family.encode_moments(pipe, pixels).sample([torch.Generator().manual_seed(0)]).flatten())
    assert 0.5 < torch.cat(latents).std() < 2


@pytest.mark.slow
def test_a_training_step_is_fast_and_reduces_the_loss():
    family, pipe = FAMILIES.get("sd1")(), tiny_sd1.build_pipeline()
    injection.inject_into_model(
        pipe.unet, AdapterConfig(network_dim=8, network_alpha=8), family.facts.lora.targets, seed=0
    )
    weights = [parameter for _, parameter in injection.iter_adapter_parameters(pipe.unet)]
    optimizer, process = torch.optim.AdamW(weights, lr=5e-3), family.build_noise_process(pipe)
    draw = torch.Generator().manual_seed(0)
    latents, embeds = torch.randn(2, 4, 8, 12, generator=draw), torch.randn(2, 77, 64, generator=draw)
    batch = Batch(latents, {"embeds": embeds}, torch.zeros(2, 6), torch.ones(2), (0, 1), ("a", "b"))
    losses, times = [], []
    for _ in range(40):
        start = time.process_time()
        t = torch.randint(0, 1000, (2,), generator=draw).float()
        noise = torch.randn(latents.shape, generator=draw)
        noisy, target = process.add_noise(latents, noise, t)
        loss = nn.functional.mse_loss(family.predict(pipe, pipe.unet, noisy, t, batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.process_time() - start)
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    assert min(times) < 0.2, "CPU seconds of this process, with a large margin"


def test_the_images_are_portrait_landscape_and_square_and_small_on_disk():
    shapes = [Image.open(path).size for path in (FOLDER / "demo").glob("*.png")]
    assert 10 <= len(shapes) <= 20
    assert {(width > height) - (width < height) for width, height in shapes} == {-1, 0, 1}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.png")) < 1_000_000


def test_every_image_has_a_caption_and_only_the_bird_captions_contain_its_name():
    for folder, is_bird in (("demo", True), ("demo_regularisation", False)):
        for path in (FOLDER / folder).glob("*.png"):
            caption = path.with_suffix(".txt").read_text().split()
            assert ("lorikeet" in caption) == is_bird and caption, path


def test_the_demo_dataset_fits_the_built_in_model():
    from library.config.toml_positions import read_toml_with_lines

    data, _ = read_toml_with_lines(FOLDER / "demo.toml")
    (dataset,) = data["datasets"]
    assert dataset["bucket_reso_steps"] % detect_model(None).size_multiple == 0
    assert all(dataset[key] % dataset["bucket_reso_steps"] == 0 for key in ("min_bucket_reso", "max_bucket_reso"))
    assert all((FOLDER / subset["image_dir"]).is_dir() for subset in dataset["subsets"])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["ddim", "euler", "euler_a", "heun", "dpmsolver++", "pndm"])
def test_every_sampler_generates_a_different_image(sampler):
    family, pipe = FAMILIES.get("sd1")(), tiny_sd1.build_pipeline()
    prompt = Prompt("a red circle", width=64, height=96, num_inference_steps=8, cfg_scale=3)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in (prompt.text, ""))
    drawn = [
        family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(4), name)
        for name in (sampler, sampler, "ddim" if sampler != "ddim" else "euler")
    ]
    assert drawn[0].tobytes() == drawn[1].tobytes() != drawn[2].tobytes()

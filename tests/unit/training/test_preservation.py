"""Output preservation: the target is the base model's prediction, and the loss is added to that of the images."""

from dataclasses import replace

import pytest
import torch
from tiny_pipelines import TINY

from library.adapters.injection import get_adapter_state_dict, inject_into_model, load_adapter_state_dict
from library.config.schema import AdapterConfig
from library.config.schema_objective import LossConfig, NoiseConfig, PreservationConfig
from library.dataloader.batch import PixelBatch
from library.errors import ConfigError
from library.models.families import FAMILIES
from library.parallel.async_copy import CopyStream
from library.training.preservation import OutputPreservation, check_trigger
from library.training.setup import build_objective
from library.training.task import DiffusionTask

SIDE = 64
CLASS_OF_MIKA = PreservationConfig("dog", "mika", 0.5, 0.25)


def make_batch(*captions: str) -> PixelBatch:
    count = len(captions)
    pixels = torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    size = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]] * count, dtype=torch.float32)
    names = tuple(f"picture {number}" for number in range(count))
    return PixelBatch(pixels, captions, size, torch.ones(count), tuple(range(count)), names)


def build_task(name: str, *, with_adapter: bool = True) -> DiffusionTask:
    """Build a task of a tiny model, with an adapter that changes what it predicts."""
    family, pipe = FAMILIES.get(name)(), TINY[name]().pipe
    denoiser = getattr(pipe, family.facts.denoiser_name).eval().requires_grad_(False)
    if with_adapter:
        inject_into_model(denoiser, AdapterConfig(network_dim=4), family.facts.lora.targets, seed=1)
        noise = torch.Generator().manual_seed(3)
        state = get_adapter_state_dict(denoiser)
        changed = {key: torch.randn(value.shape, generator=noise) * 0.2 for key, value in state.items()}
        with torch.no_grad():
            load_adapter_state_dict(denoiser, changed)
    objective = build_objective(NoiseConfig(), LossConfig(), family, pipe)
    return DiffusionTask(family, pipe, denoiser, objective, 7, CopyStream(torch.device("cpu")))


def add_preservation(task: DiffusionTask, config: PreservationConfig) -> DiffusionTask:
    return replace(task, preservation=OutputPreservation(config, task.denoiser))


def compute_gradients(task: DiffusionTask, batch: PixelBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    task.denoiser.zero_grad()
    losses = task(batch, 3)
    losses.sum().backward()
    named = task.denoiser.named_parameters()
    return losses.detach(), {name: item.grad.clone() for name, item in named if item.grad is not None}


@pytest.mark.parametrize(
    "name", ["sd1", "flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "sd3", "z_image"))]
)
def test_the_target_is_what_a_model_without_adapter_predicts_for_the_other_caption(name):
    batch = make_batch("a photo of Mika", "a tree")
    plain, task = build_task(name, with_adapter=False), add_preservation(build_task(name), CLASS_OF_MIKA)

    inputs = task.prepare(batch, 3)

    assert [each.weights.tolist() for each in inputs.preserved] == [[0.5, 0.0], [0.25, 0.25]]
    for captions, preserved in zip((("a photo of dog", "a tree"), ("", "")), inputs.preserved, strict=True):
        with torch.no_grad():
            expected = plain.prepare(replace(batch, captions=captions), 3)
            noised = expected.noised
            target = plain.family.predict(plain.pipe, plain.denoiser, noised.latents, noised.timesteps, expected.batch)
        assert torch.equal(preserved.noised.latents, noised.latents)
        assert torch.equal(preserved.noised.target, target) and not preserved.noised.target.requires_grad


@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_loss_and_gradient_are_those_of_the_images_plus_weighted_ones_of_the_other_captions(name):
    task, batch = build_task(name), make_batch("a photo of mika", "a tree")
    plain_losses, plain = compute_gradients(task, batch)
    preserving = add_preservation(task, CLASS_OF_MIKA)
    losses, gradients = compute_gradients(preserving, batch)

    outputs = preserving.prepare(batch, 3).preserved
    expected, total = plain_losses.clone(), {name: grad.clone() for name, grad in plain.items()}
    for preserved in outputs:
        noised = preserved.noised
        task.denoiser.zero_grad()
        predicted = task.family.predict(task.pipe, task.denoiser, noised.latents, noised.timesteps, preserved.batch)
        parts = preserved.weights * (predicted - noised.target).square().flatten(1).mean(1)
        parts.sum().backward()
        expected += parts.detach()
        for key, item in task.denoiser.named_parameters():
            if item.grad is not None:
                total[key] += item.grad
    torch.testing.assert_close(losses, expected)
    assert (losses > plain_losses).all()
    for key, grad in gradients.items():
        torch.testing.assert_close(grad, total[key], rtol=1e-4, atol=1e-6)


def test_a_caption_without_the_trigger_has_the_gradient_of_its_image_alone():
    task, batch = build_task("sd1"), make_batch("a tree", "a mikado game")
    losses, gradients = compute_gradients(task, batch)
    other_losses, others = compute_gradients(add_preservation(task, PreservationConfig("dog", "mika")), batch)
    assert torch.equal(losses, other_losses)
    assert all(torch.equal(grad, others[name]) for name, grad in gradients.items())


def test_a_trigger_is_replaced_as_whole_words_in_any_case(caplog):
    config = PreservationConfig(r"a \1 dog", "mika dog")
    assert config.replace_trigger("Mika Dog, mika dog!") == r"a \1 dog, a \1 dog!"
    assert config.replace_trigger("mika dogs") is None
    with caplog.at_level("INFO"):
        check_trigger(config, ["a mika dog", "a tree"])
    assert caplog.messages == ["differential output preservation: 1 of 2 captions contain the trigger"]
    with pytest.raises(ConfigError, match="no caption contains 'mika dog'"):
        check_trigger(config, ["a tree"])

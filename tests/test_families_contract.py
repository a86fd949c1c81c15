"""Every family keeps the contract of library.families.base; diffusers' own pipelines are the judge."""

import inspect
from types import SimpleNamespace

import diffusers
import pytest
import torch
from tiny import HEIGHT, TINY, WIDTH
from torch import nn

from library.data.prompts import Prompt
from library.families import FAMILIES
from library.families.base import Family


class Wrapped(nn.Module):
    """Like DDP or FSDP: only ``forward`` works; the attributes of the inner module are hidden."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


class Recorder:
    """Remembers each call of a module, bound to the parameter names, and what came out."""

    def __init__(self, module):
        self.calls, self.outputs, self.signature = [], [], inspect.signature(module.forward)
        module.register_forward_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs, output):
        self.calls.append(self.signature.bind(*args, **kwargs).arguments)
        self.outputs.append(output[0])


def tensors(value):
    """The tensors inside ``value``, in order, in one comparable dtype."""
    if isinstance(value, torch.Tensor):
        return [value.double()]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in tensors(value[key])]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.fixture(params=TINY)
def case(request):
    tiny = TINY[request.param]()
    tiny.pipe.set_progress_bar_config(disable=True)
    return FAMILIES.get(tiny.family)(), tiny


def pixels(count=2):
    return torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5)) * 2 - 1


def generators(count=2):
    return [torch.Generator().manual_seed(100 + number) for number in range(count)]


def test_every_family_has_a_tiny_pipeline():
    assert {make().family for make in TINY.values()} == set(FAMILIES.names())


def test_a_family_is_a_direct_stateless_subclass(case):
    family, _ = case
    assert type(family).__bases__ == (Family,)
    assert not vars(family)


@torch.no_grad()
def test_the_denoiser_is_called_as_the_diffusers_pipeline_calls_it(case):
    family, tiny = case
    pipe, batch = tiny.pipe, tiny.batch
    denoiser = getattr(pipe, family.denoiser)
    record, steps = Recorder(denoiser), []
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda out, t, *args, **kw: (steps.append((out, t)), step(out, t, *args, **kw))[1]
    pipe(**tiny.call, latents=batch.latents, num_inference_steps=2, guidance_scale=1.0, height=HEIGHT, width=WIDTH,
         output_type="latent")  # fmt: skip
    theirs, t = steps[0]

    wrapped = Wrapped(denoiser)
    noisy = batch.latents * pipe.scheduler.init_noise_sigma
    ours = family.predict(pipe, wrapped, noisy, torch.full((len(batch),), float(t)), batch)

    assert wrapped.calls == 1, "predict calls the denoiser it is given, once"
    their_call, our_call = record.calls[0], record.calls[-1]
    assert {name for name in their_call if tensors(their_call[name])} == {n for n in our_call if tensors(our_call[n])}
    for name, value in our_call.items():
        for a, b in zip(tensors(value), tensors(their_call[name]), strict=True):
            torch.testing.assert_close(a, b.expand_as(a), msg=lambda text, name=name: f"argument {name!r}: {text}")
    assert ours.shape == batch.latents.shape
    torch.testing.assert_close(ours.double(), theirs.double())


@torch.no_grad()
def test_a_perfect_model_is_stepped_back_to_the_clean_latents(case):
    """The target is in the form that the model's own scheduler expects of the model."""
    family, tiny = case
    clean, noise = tiny.batch.latents, torch.randn(tiny.batch.latents.shape, generator=generators()[0])
    t = 601
    noisy, target = family.process(tiny.pipe).add_noise(clean, noise, torch.full((len(clean),), float(t)))
    tiny.pipe.scheduler.set_timesteps(1000)
    recovered = tiny.pipe.scheduler.step(target, t, noisy).pred_original_sample
    torch.testing.assert_close(recovered, clean, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prompts_are_encoded_as_the_diffusers_pipeline_encodes_them(case):
    family, tiny = case
    record = Recorder(getattr(tiny.pipe, family.denoiser))
    texts = ["a red circle on white ground", "Blau, 7"]
    tiny.pipe(texts, num_inference_steps=1, guidance_scale=1.0, height=HEIGHT, width=WIDTH, output_type="latent")
    family.predict(tiny.pipe, getattr(tiny.pipe, family.denoiser), tiny.batch.latents, torch.zeros(2),
                   SimpleNamespace(cond=family.encode_prompts(tiny.pipe, texts)))  # fmt: skip
    theirs, ours = (call["encoder_hidden_states"] for call in record.calls)
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours[0], ours[1])


@torch.no_grad()
def test_pixels_are_encoded_as_diffusers_own_inpainting_encodes_them(case):
    family, tiny = case
    judge = diffusers.StableDiffusionInpaintPipeline(**tiny.pipe.components, requires_safety_checker=False)
    theirs = judge._encode_vae_image(pixels(), generators())
    ours = family.encode_pixels(tiny.pipe, pixels(), generators())
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == tiny.batch.latents.shape


@torch.no_grad()
def test_latents_are_decoded_as_the_diffusers_pipeline_decodes_them(case):
    family, tiny = case
    options = dict(latents=tiny.batch.latents, num_inference_steps=1, guidance_scale=1.0, height=HEIGHT, width=WIDTH)
    theirs = tiny.pipe(**tiny.call, **options, output_type="pt").images
    latents = tiny.pipe(**tiny.call, **options, output_type="latent").images
    ours = family.decode_latents(tiny.pipe, latents)
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), theirs)


@torch.no_grad()
def test_decoding_undoes_encoding_as_far_as_the_vae_can(case):
    family, tiny = case
    back = family.decode_latents(tiny.pipe, family.encode_pixels(tiny.pipe, pixels(1), generators(1)))
    alone = tiny.pipe.vae.decode(tiny.pipe.vae.encode(pixels(1)).latent_dist.sample(generators(1)[0])).sample
    torch.testing.assert_close(back, alone)


def test_latents_of_a_sample_do_not_depend_on_the_others_in_the_batch(case):
    family, tiny = case
    together = family.encode_pixels(tiny.pipe, pixels(), generators())
    alone = family.encode_pixels(tiny.pipe, pixels()[1:], generators()[1:])
    torch.testing.assert_close(together[1:], alone)
    assert not torch.allclose(together[:1], family.encode_pixels(tiny.pipe, pixels()[:1], generators()[1:]))


def test_the_vae_stays_in_float32_in_a_bfloat16_run(case, tmp_path):
    family, tiny = case
    exact = family.encode_pixels(tiny.pipe, pixels(), generators())
    picture = family.decode_latents(tiny.pipe, exact)
    tiny.pipe.save_pretrained(tmp_path)
    for source in (str(tmp_path), None):
        low = family.load(source, torch.bfloat16)
        assert getattr(low, family.denoiser).dtype == low.text_encoder.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(family.encode_pixels(low, pixels(), generators()), exact)
            torch.testing.assert_close(family.decode_latents(low, exact), picture)


def test_only_the_named_parts_are_loaded(case, tmp_path):
    family, tiny = case
    tiny.pipe.save_pretrained(tmp_path)
    for parts in [family.text_parts, ("vae",), (family.denoiser,)]:
        for source in (str(tmp_path), None):
            pipe = family.load(source, torch.float32, parts)
            present = {name for name in family.parts if getattr(pipe, name) is not None}
            assert present == set(parts)
            assert pipe.scheduler is not None
    assert {name for name in family.parts if getattr(family.load(str(tmp_path), torch.float32), name)} == {
        *family.parts
    }


@torch.no_grad()
def test_a_saved_model_loads_with_the_same_weights(case, tmp_path):
    family, tiny = case
    tiny.pipe.save_pretrained(tmp_path)
    pipe = family.load(str(tmp_path), torch.float32)
    for name in ("text_encoder", "vae", family.denoiser):
        for a, b in zip(getattr(pipe, name).parameters(), getattr(tiny.pipe, name).parameters(), strict=True):
            assert torch.equal(a, b)
    assert pipe.tokenizer("a red circle").input_ids == tiny.pipe.tokenizer("a red circle").input_ids
    assert family.process(pipe).prediction == family.process(tiny.pipe).prediction


def test_a_broken_model_is_the_users_to_mend(case, tmp_path):
    from library.errors import ConfigError

    family, tiny = case
    tiny.pipe.save_pretrained(tmp_path)
    (tmp_path / family.denoiser / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        family.load(str(tmp_path), torch.float32)


def draw(family, pipe, sampler="ddim", **options):
    prompt = Prompt("a red circle", "blue", width=WIDTH, height=HEIGHT, **{"steps": 3, "scale": 3.0, **options})
    cond, negative = (family.encode_prompts(pipe, [text]) for text in (prompt.text, prompt.negative))
    return family.draw(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), sampler)


def test_a_preview_is_the_picture_that_the_diffusers_pipeline_draws(case):
    family, tiny = case
    theirs = tiny.pipe("a red circle", negative_prompt="blue", width=WIDTH, height=HEIGHT, num_inference_steps=3,
                       guidance_scale=3.0, generator=torch.Generator().manual_seed(1)).images[0]  # fmt: skip
    ours = draw(family, tiny.pipe)
    assert ours.size == (WIDTH, HEIGHT)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.tobytes() != draw(family, tiny.pipe, scale=5.0).tobytes()


def test_a_preview_leaves_no_trace(case):
    """Neither the global generator, nor the pipeline's scheduler, nor who is in training mode changes."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.denoiser).train()
    resting = next(module for module in denoiser.modules() if isinstance(module, nn.GroupNorm)).eval()
    before, scheduler = torch.random.get_rng_state(), tiny.pipe.scheduler
    table = dict(vars(scheduler))
    draw(family, tiny.pipe, "euler_a")
    assert torch.equal(before, torch.random.get_rng_state())
    assert tiny.pipe.scheduler is scheduler and vars(scheduler) == table
    assert denoiser.training and not resting.training


def test_a_preview_needs_no_text_encoder_and_draws_in_bfloat16(case):
    family, _ = case
    pipe = family.load(None, torch.bfloat16)
    prompt = Prompt("a", width=WIDTH, height=HEIGHT, steps=2)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a", ""))
    pipe.text_encoder = pipe.tokenizer = None
    picture = family.draw(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), "ddim")
    assert picture.size == (WIDTH, HEIGHT)


def test_lora_targets_are_the_layers_that_sd_scripts_trains(case):
    """Linear layers and 1x1 convolutions inside blocks of the classes that networks/lora.py names."""
    from library.adapters.lora import matching

    family, tiny = case
    denoiser = getattr(tiny.pipe, family.denoiser)
    blocks = [name for name, module in denoiser.named_modules() if type(module).__name__ == "Transformer2DModel"]
    expected = {
        name
        for name, module in denoiser.named_modules()
        if any(name.startswith(f"{block}.") for block in blocks)
        and (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)))
    }
    assert set(matching(denoiser, family.lora_targets)) == expected

"""Kolors: its noise schedule of 1100 timesteps and its tokenizer."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from problem_lines import format_lines

from library.config import parse_config
from library.config.schema_objective import LossConfig, NoiseConfig
from library.diffusion.losses import LossContext, exponential_threshold
from library.diffusion.timestep_sampling import compute_timesteps
from library.models.families import FAMILIES
from library.models.loading import import_model_class
from library.models.model_configs import load_bundled_config
from library.models.tokenizers import build_byte_tokenizer
from library.models.validate_options import validate_model_options


def test_kolors_is_trained_at_all_of_its_1100_timesteps():
    family = FAMILIES.get("kolors")()
    scheduler = EulerDiscreteScheduler.from_config(load_bundled_config("kolors")["scheduler/scheduler_config.json"])
    process = family.build_noise_process(SimpleNamespace(scheduler=scheduler))
    u, shape = torch.tensor([0.0, 0.5, 0.9999]), torch.Size((3, 4, 8, 8))
    assert compute_timesteps(u, NoiseConfig(), process, shape).tolist() == [0, 550, 1099]
    assert compute_timesteps(u, NoiseConfig(max_timestep=1000), process, shape).tolist() == [0, 500, 999]
    assert process.alphas_cumprod[1099] < process.alphas_cumprod[999] < 0.01
    thresholds = exponential_threshold(LossContext(LossConfig(huber_c=0.1), torch.tensor([0.0, 1100.0]), process))
    assert thresholds.tolist() == pytest.approx([1, 0.1])


def test_kolors_without_sentencepiece_is_one_problem(monkeypatch):
    monkeypatch.setattr("library.models.families.kolors.find_spec", lambda name: None)
    config = parse_config(["--pretrained_model_name_or_path", "random:kolors:tiny"]).config
    problems = [line for line in format_lines(list(validate_model_options(config, {}))) if "sentencepiece" in line]
    assert problems and all("pip install sentencepiece" in line for line in problems) and len(problems) == 1


def test_captions_of_kolors_are_truncated_at_its_256_tokens():
    family = FAMILIES.get("kolors")()
    tokenizer = build_byte_tokenizer(import_model_class("kolors", "ChatGLMTokenizer"), {"model_max_length": 512})
    texts = ["a" * 252, "a" * 254]  # with the beginning of a word: 253 and 255 tokens
    assert family.find_truncated_prompts(SimpleNamespace(tokenizer=tokenizer), texts) == texts[1:]
    ids = [tokenizer(text, truncation=True, max_length=256).input_ids for text in texts]
    assert [len(each) for each in ids] == [255, 256]


def test_only_the_pipelines_of_diffusers_are_trusted_besides_diffusers_and_transformers():
    assert import_model_class("kolors", "ChatGLMModel").__module__.startswith("diffusers.pipelines.")
    for library in ("os", "torch", "__builtins__", "kolors.text_encoder"):
        with pytest.raises(ValueError, match="only diffusers and transformers are supported"):
            import_model_class(library, "system")

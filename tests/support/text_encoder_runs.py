"""Trainable modules of a tiny pipeline, and the loss of its family."""

from types import SimpleNamespace

import torch
from problem_lines import format_lines
from tiny_pipelines import TINY
from training_runs import even_dataset, max_relative_difference  # noqa: F401

from library.config import parse_config
from library.models.families import FAMILIES
from library.training.trainable_modules import build_trainable_modules


def parse_settings(*flags):
    problems = [line for line in format_lines(parse_config([*flags]).problems) if "dataset_config" not in line]
    assert problems == []
    return parse_config([*flags]).config


def build_trainable_case(name, *flags):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    model, adapter = build_trainable_modules(parse_settings(*flags), family, tiny.pipe)
    return SimpleNamespace(tiny=tiny, family=family, model=model, adapter=adapter, pipe=tiny.pipe)


def compute_loss(case, texts=("a red circle", "two, blue squares")):
    batch = case.tiny.batch
    cond = case.family.encode_prompts(case.pipe, list(texts))
    dtype = next(case.model.parameters()).dtype
    batch = SimpleNamespace(
        build_draws=None,
        cond={name: value if isinstance(value, list) else value.to(dtype) for name, value in cond.items()},
        size_conditioning=batch.size_conditioning.to(dtype),
        control_latents=(),
    )
    t = torch.tensor([700.0, 250.0], dtype=dtype)
    return case.family.predict(case.pipe, case.model, case.tiny.batch.latents.to(dtype), t, batch).square().mean()

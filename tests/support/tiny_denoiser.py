"""The tiny denoiser of a family."""

from tiny_pipelines import TINY

from library.models.families import FAMILIES


def build_tiny_denoiser(name):
    family = FAMILIES.get(name)
    return getattr(TINY[name]().pipe, family.facts.denoiser_name), family

"""Shared by tests: tiny denoiser."""

from tiny_pipelines import TINY

from library.models.families import FAMILIES


def tiny_denoiser(name):
    family = FAMILIES.get(name)
    return getattr(TINY[name]().pipe, family.denoiser_name), family

"""diffusers' modular pipelines with the constructor, the call and the output of its other pipelines.

A modular pipeline runs blocks; the ones for a call are chosen here: texts or their embeddings, latents or images.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..registry import copy_class_name


@dataclass(frozen=True)
class PipelineSteps:
    """The blocks of one modular pipeline, by name, in the order in which they run."""

    encode: Callable[[], Mapping[str, Any]]
    """Build the steps from texts to the embeddings that the denoiser gets."""
    denoise: Callable[[], Mapping[str, Any]]
    """Build the steps from embeddings to latents."""
    decode: Callable[[], Mapping[str, Any]]
    """Build the steps from latents to images."""
    results: Mapping[str, tuple[str, str]] = field(default_factory=lambda: {"images": ("latents", "images")})
    """The names in the steps of what a call returns, by its own: as latents, and decoded."""


def build_pipeline_class(modular_class: Any, components: Sequence[str], steps: PipelineSteps) -> Any:
    """Build a subclass of the modular pipeline that is constructed from these components and called as others are."""
    guiders, blocks_of = import_module("diffusers.guiders"), import_module("diffusers.modular_pipelines")
    logging.getLogger("diffusers.guiders").setLevel(logging.ERROR)  # each guider says that it is experimental

    class CallablePipeline(modular_class):  # type: ignore[misc]
        def __init__(self, **parts: Any) -> None:
            super().__init__()
            self._progress_bar_config: dict[str, Any] = {}
            given = {name: part for name, part in parts.items() if part is not None}
            loaded = set(self.pretrained_component_names)
            self.update_components(**{name: part for name, part in given.items() if name in loaded})
            for name in given.keys() - loaded:  # which diffusers makes from a config
                setattr(self, name, given[name])

        @classmethod
        def _get_signature_keys(cls, _: Any) -> tuple[set[str], set[str]]:
            """Names of the components, and of the other arguments of the constructor."""
            return set(components), set()

        def set_progress_bar_config(self, **config: Any) -> None:
            self._progress_bar_config = config

        def save_pretrained(self, save_directory: Any, **options: Any) -> None:
            super().save_pretrained(str(save_directory), overwrite_modular_index=True, **options)

        def __call__(
            self,
            prompt: Any = None,
            *,
            prompt_embeds: Any = None,
            guidance_scale: float | None = None,
            output_type: str = "pil",
            **inputs: Any,
        ) -> Any:
            blocks = {**({} if prompt_embeds is not None else steps.encode()), **self.build_denoise_steps()}
            blocks |= {} if output_type == "latent" else self.build_decode_steps()
            self._blocks = blocks_of.SequentialPipelineBlocks.from_blocks_dict(blocks)
            for loop in _iter_loops(self._blocks):
                loop.set_progress_bar_config(**self._progress_bar_config)
            if guidance_scale is not None:
                self.guider = guiders.ClassifierFreeGuidance(guidance_scale=guidance_scale)
            prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
            given = {"prompt": prompt} if prompt_embeds is None else {"prompt_embeds": prompt_embeds}
            given |= {} if output_type == "latent" else {"output_type": output_type}
            names = {own: pair[output_type != "latent"] for own, pair in steps.results.items()}
            values = super().__call__(output=list(names.values()), **given, **inputs)
            return SimpleNamespace(**{own: values[name] for own, name in names.items()})

        def build_denoise_steps(self) -> Mapping[str, Any]:
            return steps.denoise()

        def build_decode_steps(self) -> Mapping[str, Any]:
            return steps.decode()

    return copy_class_name(CallablePipeline, modular_class)


def _iter_loops(blocks: Any) -> Iterator[Any]:
    """The blocks that have a progress bar."""
    if hasattr(blocks, "set_progress_bar_config"):
        yield blocks
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield from _iter_loops(block)

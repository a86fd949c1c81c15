"""Bria FIBO Edit: Bria FIBO trained to edit; references are further tokens, each in a plane of its own.

Captions are JSON with an ``edit_instruction``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import ControlFacts
from .bria_fibo import FACTS as FIBO_FACTS
from .bria_fibo import BriaFibo, build_encoded_pipeline_class

if TYPE_CHECKING:
    from ...dataloader.batch import Cond
    from ...dataloader.sample_prompts import Prompt

INSTRUCTION = "edit_instruction"

FACTS = replace(
    FIBO_FACTS,
    title="Bria FIBO Edit",
    pipeline=replace(
        FIBO_FACTS.pipeline, class_name="BriaFiboEditPipeline", kind="edit", hub_id="briaai/Fibo-Edit-1.5-base"
    ),
    lora=replace(FIBO_FACTS.lora, modelspec_architecture="bria-fibo-edit"),
    text=replace(
        FIBO_FACTS.text,
        tokenizer_repo_ids={"tokenizer": "briaai/Fibo-Edit-1.5-base:tokenizer"},
        has_negative_encoding=True,
    ),
    control=ControlFacts(num_images=(1, 10)),
)


class BriaFiboEdit(BriaFibo):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_edit_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("bria_fibo_edit", "bria-fibo-edit")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return super().encode_prompts(pipe, list(map(_write_instruction, prompts)))

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode negative prompts, which are no instructions, as they are."""
        return super().encode_prompts(pipe, prompts)

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return super().encode_prompts_on_meta(pipe, list(map(_write_instruction, prompts)))

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        texts = dict(zip(map(_write_instruction, prompts), prompts, strict=True))
        return [texts[text] for text in super().find_truncated_prompts(pipe, list(texts))]

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        return {**kwargs, "prompt": _write_instruction("")}


def _write_instruction(caption: str) -> str:
    """Return a caption that is JSON with an instruction as it is, and write another one as such JSON."""
    try:
        is_instruction = isinstance(data := json.loads(caption), dict) and INSTRUCTION in data
    except ValueError:
        is_instruction = False
    return caption if is_instruction else json.dumps({INSTRUCTION: caption}, ensure_ascii=False)


def _build_edit_pipeline_class() -> Any:
    """diffusers' pipeline, which refuses captions without an instruction, with such as instructions."""
    from diffusers import BriaFiboEditPipeline

    pipeline: Any = build_encoded_pipeline_class(BriaFiboEditPipeline)

    class InstructionPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, prompt: Any = None, **kwargs: Any) -> Any:
            prompts = [_write_instruction(each) for each in ([prompt] if isinstance(prompt, str) else prompt)]
            return super().__call__(prompt=prompts, **kwargs)

    return copy_class_name(InstructionPipeline, pipeline)

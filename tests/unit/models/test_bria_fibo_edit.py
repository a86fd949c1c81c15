"""Captions of Bria FIBO Edit are instructions."""

import json

import pytest

from library.models.families.bria_fibo_edit import _build_edit_pipeline_class, _write_instruction

INSTRUCTION = '{"edit_instruction": "Make the owl a cat", "style": "photo"}'


@pytest.mark.parametrize("caption", ["", "Make the owl a cät", "12", '"edit_instruction"', '{"style": "photo"}', "{"])
def test_a_plain_caption_is_written_as_an_instruction(caption):
    assert json.loads(_write_instruction(caption)) == {"edit_instruction": caption}
    assert _write_instruction(INSTRUCTION) == INSTRUCTION
    assert _write_instruction(_write_instruction(caption)) == _write_instruction(caption)


def test_the_pipeline_of_diffusers_takes_it():
    """Its check, which is the reason for writing captions so."""
    from diffusers.pipelines.bria_fibo.pipeline_bria_fibo_edit import is_valid_edit_json

    assert is_valid_edit_json(_write_instruction("Make the owl a cat")) and not is_valid_edit_json("Make the owl a cat")
    assert _build_edit_pipeline_class().__name__ == "BriaFiboEditPipeline"

"""PRX: captions are cleaned as in diffusers, and its text encoder is read in both forms in which folders have it."""

import json
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.prx import pipeline_prx

from library.models.families import FAMILIES

CAPTION = " A <person> with 2x4 apples, see https://example.com/a.jpg -- (Schl\u00f6\u00dfer &amp; S\u00f6hne) #12345 "


@pytest.fixture
def pipe():
    return FAMILIES.get("prx")().load("random:prx:tiny", torch.float32)


def test_a_caption_is_cleaned_as_by_the_pipeline(pipe, monkeypatch):
    monkeypatch.setattr(pipeline_prx, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    states, mask, *_ = pipe.encode_prompt([CAPTION], torch.device("cpu"), do_classifier_free_guidance=False)
    cleaned = pipe.text_preprocessor.clean_text(CAPTION)
    assert cleaned.startswith("a person with apples") and "#" not in cleaned
    (ours,) = FAMILIES.get("prx")().encode_prompts(pipe, [CAPTION])["embeds"]
    assert torch.equal(ours, states[0][mask[0]])


def test_the_text_encoder_may_have_the_configuration_of_the_whole_model(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    path = tmp_path / "text_encoder" / "config.json"
    own = json.loads(path.read_text(encoding="utf-8"))
    whole = {"model_type": "t5gemma", "encoder": own, "decoder": own | {"num_hidden_layers": 7}}
    family = FAMILIES.get("prx")()
    expected = family.encode_prompts(pipe, ["a red circle"])["embeds"][0]
    for config in (own, whole):
        path.write_text(json.dumps(config), encoding="utf-8")
        read = family.load(str(tmp_path), torch.float32, ["text_encoder", "tokenizer"])
        assert torch.equal(family.encode_prompts(read, ["a red circle"])["embeds"][0], expected)

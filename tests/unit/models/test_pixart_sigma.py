"""PixArt-Sigma: folders as they are published, and variants that are refused."""

import copy
import json

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from family_cases import build_case

from library.errors import FileError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.loading import load_components_on_meta
from library.models.model_configs import load_bundled_config

__all__ = ["build_case"]  # a fixture


def write_folder(folder, **changes):
    """The JSON files of the tiny model, whose transformer is of the class that published folders name."""
    data = copy.deepcopy(dict(load_bundled_config("pixart_sigma_tiny")))
    data["model_index.json"]["transformer"] = ["diffusers", "Transformer2DModel"]
    data["transformer/config.json"] |= {"_class_name": "Transformer2DModel", **changes}
    for path, content in data.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return str(folder)


def test_the_class_in_published_folders_becomes_that_of_pixart(tmp_path):
    family, folder = FAMILIES.get("pixart_sigma")(), write_folder(tmp_path)
    built = family.load("random:pixart_sigma:tiny", torch.float32, ["transformer"]).transformer
    built.save_pretrained(tmp_path / "transformer")
    write_folder(tmp_path)
    loaded = family.load(folder, torch.float32, ["transformer"]).transformer
    assert type(loaded) is PixArtTransformer2DModel
    expected = built.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def test_the_class_in_published_folders_is_built_as_that_of_pixart_without_weights(tmp_path):
    model = load_components_on_meta(detect_model(write_folder(tmp_path)), ("transformer",)).transformer
    assert type(model) is PixArtTransformer2DModel


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"use_additional_conditions": True}, "is told sizes of images, as that of PixArt-Alpha"),
        ({"use_additional_conditions": None, "sample_size": 128}, "is told sizes of images, as that of PixArt-Alpha"),
        ({"in_channels": 8}, "8 input channels; control models cannot be trained"),
    ],
)
def test_other_models_with_the_same_pipeline_are_refused(changes, text, tmp_path):
    with pytest.raises(FileError) as caught:
        detect_model(write_folder(tmp_path, **changes))
    assert text in str(caught.value)


@pytest.mark.slow
def test_captions_are_lower_case_and_not_cleaned(build_case):
    family, tiny = build_case("pixart_sigma")
    with torch.no_grad():
        upper, lower, number = family.encode_prompts(tiny.pipe, [" Jc6640 #123", "jc6640 #123", "jc6640"])["embeds"]
    assert torch.equal(upper, lower) and len(number) == 7 + 1
    assert family.find_truncated_prompts(tiny.pipe, ["a" * 298, "a" * 299]) == ["a" * 299]

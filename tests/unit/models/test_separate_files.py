"""Every family loads from ComfyUI's separate files: the denoiser, the VAE and the text encoders."""

import model_layouts
import pytest
import torch
from family_cases import build_case, get_modules, list_cases
from tiny_pipelines import TINY

from library.models.detect import detect_model
from library.models.families import FAMILIES, FAMILY_FACTS

__all__ = ["build_case"]  # a fixture
FOLDERS_ONLY = (
    *("kolors", "wan22_t2v", "wan22_i2v", "wan22_ti2v", "skyreels_v2", "hunyuan_video15", "ltx_video"),
    *("cogvideox", "cogvideox15", "mochi", "kandinsky5_video", "sana_video", "bria", "bria_fibo"),
)
NAMES = [name for name in FAMILY_FACTS if name not in (*FOLDERS_ONLY, "hunyuan_video")]  # which has one of its denoiser


@pytest.mark.parametrize("name", list_cases(NAMES))
@torch.no_grad()
def test_a_model_in_separate_files_is_the_model_in_a_folder(name, build_case, tmp_path):
    _, tiny = build_case(name)
    options = model_layouts.write_separate_files(name, tiny.pipe, tmp_path)
    detected = detect_model(options)
    assert (detected.family, detected.source_type, detected.stored_formats) == (name, "file", ())
    family = FAMILIES.get(name)(options)
    pipe = family.load(detected, torch.float32)
    for part, module in get_modules(family, pipe).items():
        expected, unused = getattr(tiny.pipe, part).state_dict(), ("lm_head.weight",)
        for key, tensor in module.state_dict().items():
            assert key in unused or torch.equal(tensor, expected[key]), f"{part}.{key}"
    if family.facts.control.text_tokens_per_image == 0 and name != "flux2_dev":  # whose byte tokenizer has no <pad>
        ours, theirs = (family.encode_prompts(each, ["a red circle"]) for each in (pipe, tiny.pipe))
        for key, rows in theirs.items():
            torch.testing.assert_close(list(ours[key]), list(rows), rtol=1e-5, atol=1e-5)


def test_the_families_without_separate_files_are_listed():
    assert {name for name, facts in FAMILY_FACTS.items() if not facts.detection.keys} == {*FOLDERS_ONLY}
    assert {*TINY} >= {*FAMILY_FACTS}

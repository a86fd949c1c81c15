"""The subject is found in captions, and captions of each kind are chosen from a dataset."""

from dataclasses import replace

import pytest
from data_paths import ROOT

from library.config import parse_config
from library.dataloader.prepare import prepare_data
from library.dataset.controls import ControlImage
from library.errors import UserError
from library.evaluation.caption_sets import CaptionChoice, build_caption_sets, contains_subject, find_subject


@pytest.mark.parametrize(
    ("captions", "subject"),
    [
        (["a lorikeet", "lorikeet", "a picture of a Lorikeet"], "lorikeet"),
        (["a photo of mika dog, on a beach", "mika dog in the snow", "close-up of mika dog"], "mika dog"),
        (["a photo of a cat", "a photo of a dog"], ""),
        (["catfish", "cat"], ""),
        ([], ""),
    ],
)
def test_the_subject_is_what_all_captions_have(captions, subject):
    assert find_subject(captions) == subject


def test_a_caption_names_the_subject_as_whole_words():
    assert contains_subject("A Mika Dog, asleep", "mika dog")
    assert not contains_subject("a dogma", "dog")
    assert not contains_subject("a dog", "")


def build_demo_sets(**choice):
    config = parse_config(["--dataset_config", str(ROOT / "dataset_configs/demo_evaluate.toml")]).require_valid()
    prepared = prepare_data(config.data, 16)
    sets = build_caption_sets(prepared, CaptionChoice(**{"num_captions": 3, "is_demo": True, **choice}), 16)
    return prepared, {each.group: [(p.text, p.width, p.height) for p in each.prompts] for each in sets}


def test_captions_of_pictures_are_different_and_have_the_size_of_their_picture():
    prepared, sets = build_demo_sets()
    known = {
        (sample.caption, *assignment.bucket_resolution)
        for sample, assignment in zip(prepared.manifest.samples, prepared.assignments, strict=True)
        if not sample.is_reg
    }

    assert list(sets) == ["training", "validation", "composing", "unrelated"]
    assert {text for text, *_ in sets["training"]} == {"lorikeet", "a lorikeet", "a picture of a lorikeet"}
    assert set(sets["training"]) <= known
    assert all(size == [96, 96] for _, *size in sets["unrelated"])


def test_regularization_images_and_the_subject_are_in_no_unrelated_caption():
    prepared, sets = build_demo_sets(num_captions=8)
    captions = {sample.caption for sample in prepared.manifest.samples}

    assert len(sets["unrelated"]) == 8
    assert not captions & {text for text, *_ in sets["unrelated"]}
    assert all("lorikeet" in text for text, *_ in sets["composing"])


def test_the_class_of_a_subject_of_several_words_is_an_unrelated_caption():
    _, sets = build_demo_sets(is_demo=False, subject="mika dog")

    assert sets["unrelated"][0][0] == "a photo of a dog"
    assert all("mika dog" in text for text, *_ in sets["composing"])


def test_pictures_with_control_images_are_refused():
    prepared, _ = build_demo_sets()
    samples = [
        replace(sample, controls=(ControlImage(sample.image, (96, 96), "hash"),))
        for sample in prepared.manifest.samples
    ]
    changed = replace(prepared, manifest=replace(prepared.manifest, samples=tuple(samples)))
    with pytest.raises(UserError, match="only captions are evaluated"):
        build_caption_sets(changed, CaptionChoice(3), 16)

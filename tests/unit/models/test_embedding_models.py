"""Embedding models give what transformers computes for the same pictures and texts; those without texts say so."""

import string

import numpy as np
import pytest
import torch
from PIL import Image

from library.models.embedding_models import EmbeddingModel, find_embedding_problem

HOST = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models with random weights, saved as users have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        Dinov2Config,
        Dinov2Model,
        PreTrainedTokenizerFast,
        Siglip2Config,
        Siglip2ImageProcessor,
        Siglip2Model,
        SiglipConfig,
        SiglipImageProcessor,
        SiglipModel,
    )

    root = tmp_path_factory.mktemp("models")
    words = {name: number for number, name in enumerate(["[UNK]", "[PAD]", "[EOS]", *string.ascii_lowercase])}
    raw = Tokenizer(models.WordLevel(words, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]", model_max_length=8
    )
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    text = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 8, "eos_token_id": 2, "pad_token_id": 1}
    torch.manual_seed(0)
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    siglip = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    patches = {**SIZES, "num_patches": 16, "patch_size": 8}
    naflex = Siglip2Model(Siglip2Config(text_config=text, vision_config=patches))
    dino = Dinov2Model(Dinov2Config(**SIZES, image_size=32, patch_size=16))
    square = {"height": 32, "width": 32}
    for name, model, processor in (
        ("clip", clip, CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)),
        ("siglip", siglip, SiglipImageProcessor(size=square)),
        ("naflex", naflex, Siglip2ImageProcessor(patch_size=8, max_num_patches=16)),
        ("dino", dino, CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)),
    ):
        model.eval().save_pretrained(root / name)
        processor.save_pretrained(root / name)
        if name != "dino":
            tokenizer.save_pretrained(root / name)
    return root


IMAGES = [Image.new("RGB", (40, 32), color) for color in ("red", "blue")] + [Image.new("L", (32, 50), 90)]


@pytest.mark.parametrize("name", ["clip", "siglip", "naflex", "dino"])
def test_pictures_have_the_embeddings_of_the_model_and_batches_do_not_matter(folders, name, monkeypatch):
    model = EmbeddingModel("image_model", str(folders / name), HOST)

    found = model.embed_pictures(IMAGES)
    monkeypatch.setattr("library.models.embedding_models.BATCH_SIZE", 2)

    inputs = model.processor(images=[image.convert("RGB") for image in IMAGES], return_tensors="pt")
    with torch.no_grad():
        output = model.model.vision_model(**inputs) if name != "dino" else model.model(**inputs)
        expected = output.pooler_output
        if name == "clip":
            expected = model.model.visual_projection(expected)
    assert found == pytest.approx(expected.numpy(), abs=1e-5)
    assert model.embed_pictures(IMAGES) == pytest.approx(found, abs=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_cosines_of_pictures_and_texts_are_the_logits_of_the_model(folders, name):
    model = EmbeddingModel("text_model", str(folders / name), HOST)
    texts = ["a b", "c"]
    images, embedded = model.embed_pictures(IMAGES), model.embed_texts(texts)
    padding = "max_length" if name == "siglip" else True
    inputs = model.tokenizer(texts, padding=padding, max_length=8, truncation=True, return_tensors="pt")
    inputs = {key: inputs[key] for key in (["input_ids"] if name == "siglip" else ["input_ids", "attention_mask"])}
    pixels = model.processor(images=[image.convert("RGB") for image in IMAGES], return_tensors="pt")["pixel_values"]

    with torch.no_grad():
        logits = model.model(**inputs, pixel_values=pixels).logits_per_image

    cosines = (images / np.linalg.norm(images, axis=1)[:, None]) @ (
        embedded / np.linalg.norm(embedded, axis=1)[:, None]
    ).T
    scale = model.model.logit_scale.exp().item()
    bias = model.model.logit_bias.item() if name == "siglip" else 0.0
    assert scale * cosines + bias == pytest.approx(logits.numpy(), abs=1e-4)
    assert model.embed_texts(["a " * 99]).shape == embedded[:1].shape  # is truncated


@pytest.mark.parametrize("kind", ["llava", "bert"])
def test_models_that_answer_in_texts_or_read_no_pictures_are_refused(kind, tmp_path):
    from transformers import BertConfig, LlavaConfig

    {"llava": LlavaConfig, "bert": BertConfig}[kind]().save_pretrained(tmp_path)

    for option in ("image_model", "text_model"):
        found = find_embedding_problem(option, str(tmp_path), needs_texts=option == "text_model")
        assert str(found).startswith(f"--{option} {tmp_path}: {kind} has no embeddings of ")


def test_a_model_that_is_missing_or_reads_no_texts_is_one_problem(folders, tmp_path):
    dino, missing = str(folders / "dino"), str(tmp_path / "none")

    assert find_embedding_problem("image_model", dino, needs_texts=False) is None
    assert str(find_embedding_problem("text_model", dino, needs_texts=True)) == (
        f"--text_model {dino}: dinov2 has no embeddings of texts; give a CLIP or SigLIP model"
    )
    assert str(find_embedding_problem("image_model", missing, needs_texts=False)) == (
        f"--image_model {missing}: no such folder (looked in {tmp_path})"
    )
    (tmp_path / "none").mkdir()
    assert str(find_embedding_problem("image_model", missing, needs_texts=False)).startswith(
        f"--image_model {missing}: cannot be read: "
    )

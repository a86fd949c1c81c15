"""Tables that a model makes on the host: a forecast for accelerators counts what a processor has already."""

import pytest
import torch
from measured import forecast_of, peak_on_rank
from ranks import on_ranks

from library.families import FAMILIES

MODEL = "random:qwen_image:tiny"


@pytest.mark.long
@pytest.mark.parametrize("size", ["128", "512"])
def test_the_places_of_qwen_image_are_all_that_is_foretold_too_high(size, tmp_path):
    words = ("--pretrained_model_name_or_path", MODEL, "--resolution", size, "--train_batch_size", "1")
    (counted,) = on_ranks(1, peak_on_rank, tmp_path, *words)
    places = FAMILIES.get("qwen_image")().load(MODEL, torch.float32).transformer.pos_embed
    tables = places.pos_freqs.nbytes + places.neg_freqs.nbytes

    foretold = forecast_of(*words)
    assert foretold - tables == pytest.approx(counted, rel=0.05)
    if size == "512":  # where they do not matter
        assert foretold == pytest.approx(counted, rel=0.2)

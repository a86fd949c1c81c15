"""Four images per step train the same adapter with every strategy; ``one_result.py`` prints a table of all."""

import pytest
from one_result import BOUNDS, REFERENCE, train_layout, write_even_dataset
from training_runs import max_relative_difference


@pytest.mark.daily
@pytest.mark.parametrize(
    ("model", "name", "precision", "flags"),
    [
        ("sdxl", "HSDP 2 x 2", "no", ("--gradient_checkpointing",)),
        ("flux", "FSDP 2 x 2, CPU offload", "no", ()),
        ("sd3", "FSDP 2 x 1, 2 accumulated", "bf16", ("--gradient_checkpointing",)),
    ],
)
def test_every_strategy_trains_the_adapter_of_one_process(model, name, precision, flags, tmp_path):
    data = write_even_dataset(tmp_path)
    more = ("--mixed_precision", precision)
    one = train_layout(REFERENCE, model, data, tmp_path, *more)
    distributed = train_layout(name, model, data, tmp_path, *more, *flags)

    assert max_relative_difference(one, distributed) < BOUNDS[precision]
    assert any(key.startswith(("lora_te", "text_encoder")) and bool(distributed[key].any()) for key in distributed)


@pytest.mark.parametrize(
    ("model", "name", "quant_type", "flags"),
    [
        ("flux", "FSDP 2 x TP 2", "nf4", ("--gradient_checkpointing",)),
        ("flux", "PP 2, interleaved", "nf4", ()),
        ("sdxl", "FSDP 2 x 2, CPU offload", "fp8", ()),
        ("sdxl", "TP 2 x PP 2", "int8", ()),
        ("sd3", "FSDP 2 x CP 2", "int8", ()),
        ("sd3", "FSDP 2 x 2", "nf4", ()),
        ("sd3", "ZeRO 2, 2 x 1, 2 accumulated", "nf4", ("--blocks_to_swap", "1")),
    ],
)
def test_every_strategy_trains_on_the_same_quantized_base(model, name, quant_type, flags, tmp_path):
    data, quantized = write_even_dataset(tmp_path), ("--quantize_base", quant_type)
    one = train_layout(REFERENCE, model, data, tmp_path, *quantized)
    distributed = train_layout(name, model, data, tmp_path, *quantized, *flags)

    assert max_relative_difference(one, distributed) < 1e-5

"""Four images per step train the same adapter with every strategy; ``one_result.py`` prints a table of all."""

import pytest
from one_result import BOUNDS, REFERENCE, train_layout, write_even_dataset
from training_runs import max_relative_difference


@pytest.mark.quick
@pytest.mark.parametrize(
    ("model", "name", "precision", "flags"),
    [
        ("sdxl", "HSDP 2 x 2", "no", ("--gradient_checkpointing",)),
        pytest.param("flux", "FSDP 2 x 2, CPU offload", "no", (), marks=pytest.mark.slow),
        pytest.param("sd3", "FSDP 2 x 1, 2 accumulated", "bf16", ("--gradient_checkpointing",), marks=pytest.mark.slow),
    ],
)
def test_every_strategy_trains_the_adapter_of_one_process(model, name, precision, flags, tmp_path):
    data = write_even_dataset(tmp_path)
    more = ("--mixed_precision", precision)
    one = train_layout(REFERENCE, model, data, tmp_path, *more)
    distributed = train_layout(name, model, data, tmp_path, *more, *flags)

    assert max_relative_difference(one, distributed) < BOUNDS[precision]
    assert any(key.startswith(("lora_te", "text_encoder")) and bool(distributed[key].any()) for key in distributed)

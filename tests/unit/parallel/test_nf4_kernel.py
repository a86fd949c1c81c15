"""bitsandbytes' kernel for nf4: chosen where it works, equal to the built-in one, and told between runs and ranks."""

import importlib.util
import logging
import os
from dataclasses import replace

import pytest
import torch
from bitsandbytes_stub import install_bitsandbytes
from rank_processes import run_on_ranks
from small_unet import build_unet
from torch import nn
from training_runs import write_images

from library.config import parse_config
from library.parallel.frozen_base import quantize_and_offload_base
from library.parallel.quantize import (
    BUILT_IN_KERNEL,
    FrozenLayer,
    QuantizedWeight,
    convert_frozen_layer,
    select_nf4_kernel,
    take_ranges,
)
from library.training.resume import find_changes

CPU = torch.device("cpu")
BROKEN = {
    "imports without its operator": "",
    "has no library for this device": "import torch\n@torch.library.custom_op('bitsandbytes::dequantize_4bit',"
    " mutates_args=())\ndef f(A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str,"
    " shape: list[int], dtype: torch.dtype) -> torch.Tensor:\n    raise RuntimeError('no library\\nfor CUDA')\n",
    "fails to import": "raise OSError('libcudart.so: not found')",
}


def check_values(folder):
    """In a process of its own: an operator cannot be unregistered."""
    assert select_nf4_kernel(torch.device("meta")) == BUILT_IN_KERNEL
    install_bitsandbytes(folder)
    kernel = select_nf4_kernel(CPU)
    assert kernel.startswith("bitsandbytes ")
    for shape in ((6, 128), (5, 7), (4, 3, 3, 3), (64, 64)):
        weight = QuantizedWeight.quantize(torch.randn(shape), "nf4")
        with_bitsandbytes = replace(weight, nf4_kernel=kernel)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)):
            values, expected = with_bitsandbytes.dequantize(dtype), weight.dequantize(dtype)
            assert values.shape == expected.shape and values.dtype is dtype
            torch.testing.assert_close(values, expected, rtol=tolerance, atol=1e-6)
        assert with_bitsandbytes.map_tensors(lambda tensor: tensor.to("meta")).dequantize(torch.bfloat16).is_meta
    check_slices(kernel)

    denoiser = build_unet().requires_grad_(False)
    config = parse_config(["--quantize_base", "nf4", "--blocks_to_swap", "1"]).config
    quantize_and_offload_base(denoiser, (CPU, CPU), config.model, config.train, kernel)
    layers = [layer for layer in denoiser.modules() if isinstance(layer, FrozenLayer)]
    assert len(layers) > 4 and {layer.fetch_weight().nf4_kernel for layer in layers} == {kernel}


def check_graphs(folder):
    from torch._dynamo.testing import EagerAndRecordGraphs

    install_bitsandbytes(folder)
    kernel = select_nf4_kernel(CPU)
    layer = nn.Linear(64, 8).requires_grad_(False)
    convert_frozen_layer(layer, replace(QuantizedWeight.quantize(layer.weight, "nf4"), nf4_kernel=kernel))
    inputs, recorder = torch.randn(3, 64, requires_grad=True), EagerAndRecordGraphs()
    output = torch.compile(layer, backend=recorder, fullgraph=True)(inputs)
    gradient = torch.autograd.grad(output.sum(), inputs)[0]
    assert torch.equal(gradient, torch.autograd.grad(layer(inputs).sum(), inputs)[0])
    assert len(recorder.graphs) == 1
    names = [str(node.target) for module in recorder.graphs[0].modules() for node in module.graph.nodes]
    assert any("bitsandbytes.dequantize_4bit" in name for name in names), names


def check_slices(kernel, device=CPU):
    """Slices of other blocks than 64 values, which bitsandbytes does not take, have its values, in bf16, too."""
    # The AVX-512 kernel of the real one rounds differently from that for CUDA.
    is_exact = kernel == "bitsandbytes 9.9" or device != CPU
    for shape, dim, ranges in (
        ((256, 192), 0, ((64, 64),)),
        ((64, 384), 1, ((0, 64), (192, 128))),
        ((32, 96), 1, ((48, 48),)),
        ((6, 10), 0, ((2, 2),)),
        ((4, 9), 1, ((3, 3),)),
    ):
        whole = replace(QuantizedWeight.quantize(torch.randn(shape, device=device), "nf4"), nf4_kernel=kernel)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            values = whole.take_ranges(dim, ranges).dequantize(dtype)
            whole_values = whole.dequantize(torch.float32).to(dtype)
            rounding = dict.fromkeys(("rtol", "atol"), 0 if is_exact else torch.finfo(dtype).eps)
            torch.testing.assert_close(values, take_ranges(whole_values, dim, ranges), **rounding)
            torch.testing.assert_close(whole.dequantize(dtype), whole_values, **rounding)


@pytest.mark.slow
def test_the_kernel_has_the_values_of_the_built_in_one_also_in_slices(tmp_path):
    run_on_ranks(1, check_values, tmp_path)


@pytest.mark.slow
def test_the_kernel_is_part_of_compiled_graphs(tmp_path):
    run_on_ranks(1, check_graphs, tmp_path)


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("bitsandbytes") is None,
    reason="needs a GPU and bitsandbytes",
)
def test_the_kernel_on_a_gpu_has_the_float32_values_of_the_built_in_one():
    device = torch.device("cuda")
    kernel = select_nf4_kernel(device)
    assert kernel.startswith("bitsandbytes ")
    for shape in ((6, 128), (5, 7), (4, 3, 3, 3), (3072, 3072)):
        weight = QuantizedWeight.quantize(torch.randn(shape, device=device), "nf4")
        values = replace(weight, nf4_kernel=kernel).dequantize(torch.float32)
        assert torch.equal(values, weight.dequantize(torch.float32))
    check_slices(kernel, device)


def select_with_warnings(folder, source):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("library").addHandler(handler)
    install_bitsandbytes(folder, source)
    return select_nf4_kernel(CPU), records


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_bitsandbytes_is_told_and_not_used(name, tmp_path):
    ((kernel, warnings),) = run_on_ranks(1, select_with_warnings, tmp_path, BROKEN[name])
    assert kernel == BUILT_IN_KERNEL
    assert len(warnings) == 1 and "nf4: bitsandbytes' kernel does not work here (" in warnings[0], warnings
    assert "\n" not in warnings[0]


def test_another_kernel_is_no_error_on_resume_but_told():
    saved = {"settings": {}, "model": "m", "data": "d", "batch": [1], "nf4_kernel": "bitsandbytes 0.50.2"}
    (change,) = find_changes(saved, {**saved, "nf4_kernel": BUILT_IN_KERNEL})
    assert str(change) == "nf4 kernel: bitsandbytes 0.50.2 -> built-in" and not change.changes_result
    former = {name: value for name, value in saved.items() if name != "nf4_kernel"}
    assert [str(change) for change in find_changes(former, saved)] == ["nf4 kernel: built-in -> bitsandbytes 0.50.2"]
    assert list(find_changes(former, {**saved, "nf4_kernel": None})) == []


def train_with_bitsandbytes(ranks, folder, *flags):
    """Train with the kernel on these ranks; return messages and the kernel of the saved state."""
    import contextlib
    import io

    from library.cli import main

    if int(os.environ.get("RANK", "0")) in ranks:
        install_bitsandbytes(folder)
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main([*flags])
    return code, text.getvalue()


@pytest.mark.slow
def test_ranks_with_different_kernels_stop_and_a_resumed_run_says_what_changed(tmp_path):
    dataset = write_images(tmp_path / "data", {(64, 64): 4})
    flags = ["--pretrained_model_name_or_path", "random:sd1:tiny", "--dataset_config", str(dataset), "--save_state"]
    flags += ["--output_dir", str(tmp_path / "out"), "--network_dim", "2", "--max_data_loader_n_workers", "0"]
    flags += ["--network_train_unet_only", "--quantize_base", "nf4", "--overwrite", "--max_train_steps"]
    code, text = run_on_ranks(2, train_with_bitsandbytes, {1}, tmp_path, *flags, "2")[0]
    assert code == 2 and 'nf4 kernel: "bitsandbytes ' in text, text
    assert '"built-in" on rank 0; install the same version of bitsandbytes on every machine, or remove it' in text

    ((code, text),) = run_on_ranks(1, train_with_bitsandbytes, {0}, tmp_path, *flags, "2")
    assert code == 0 and "(nf4, bitsandbytes" in text, text
    ((code, text),) = run_on_ranks(1, train_with_bitsandbytes, set(), tmp_path, *flags, "3", "--auto_resume")
    assert code == 0 and "changed since the checkpoint was saved: nf4 kernel: bitsandbytes " in text, text

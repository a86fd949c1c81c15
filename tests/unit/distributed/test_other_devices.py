"""Devices that this machine does not have: what is read of MPS and XPU, with torch's functions replaced."""

from types import SimpleNamespace

import pytest
import torch

from library.distributed import device_memory, devices
from library.distributed.step_phases import is_out_of_memory

MPS, XPU = torch.device("mps"), torch.device("xpu")


def test_the_memory_of_mps_is_that_of_its_driver(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * 2**30)

    assert device_memory.get_peak_memory(MPS) == 3 * 2**30
    assert device_memory.get_free_memory(MPS) == 7 * 2**30
    assert not device_memory.has_device_memory(MPS), "it shares the host's, and pins none"


def test_torch_has_what_is_asked_of_mps_and_no_more():
    """A release that counts the peak of MPS is used at once; one without these functions would fail only on a Mac."""
    assert callable(torch.mps.driver_allocated_memory) and callable(torch.mps.recommended_max_memory)
    assert not hasattr(torch.mps, "get_device_name")


def test_every_device_has_a_name(monkeypatch):
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(get_device_name=lambda device: "Intel Arc B580"))

    assert devices.get_device_name(XPU) == "Intel Arc B580"
    assert "Metal" in devices.get_device_name(MPS)
    assert devices.get_device_name(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("hip", "cuda", "xpu", "has_metal", "name"),
    [
        ("7.1", None, None, False, "ROCm 7.1"),
        (None, "12.9", None, False, "CUDA 12.9"),
        (None, None, "20250101", False, "oneAPI 20250101"),
        (None, None, None, True, "Metal"),
        (None, None, None, False, "none (a CPU build of torch)"),
    ],
)
def test_the_toolkit_of_each_build_is_named(hip, cuda, xpu, has_metal, name, monkeypatch):
    for key, value in {"hip": hip, "cuda": cuda, "xpu": xpu}.items():
        monkeypatch.setattr(torch.version, key, value, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: has_metal)

    assert devices.get_compute_toolkit() == name


@pytest.mark.parametrize(("is_new", "expected"), [(True, True), (False, False)])
def test_mps_computes_bf16_from_macos_14_on(is_new, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.backends.mps, "is_macos_or_newer", lambda major, minor: is_new and (major, minor) == (14, 0)
    )

    assert devices.supports_bf16() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18.1 GB).", True),
        ("Invalid buffer size: 24.00 GiB", True),
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", True),
        ("The operator 'aten::_linalg_svd' is not currently implemented for the MPS device", False),
    ],
)
def test_out_of_memory_errors_of_mps_and_xpu_are_recognized(text, expected):
    assert is_out_of_memory(RuntimeError(text)) == expected

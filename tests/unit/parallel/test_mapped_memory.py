"""Memory in files: what shares memory stays together, and what cannot be reserved is named with the way out."""

import resource
import sys

import pytest
import torch

from library.errors import UserError
from library.parallel.deepspeed import mapped_memory
from library.parallel.deepspeed.mapped_memory import MappedMemory

OPTION = "offload_optimizer_nvme_path"
pytestmark = pytest.mark.skipif(
    getattr(sys, "_refuses_open_files", False), reason="DeepSpeed is not for systems that refuse to remove open files"
)


def test_views_of_a_tensor_are_moved_together_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_memory, "MIN_BYTES", 1)
    whole = torch.arange(12.0)
    parts = [whole.narrow(0, 0, 5), whole.narrow(0, 5, 7).view(7, 1)]
    before = whole.data_ptr()
    MappedMemory(OPTION, str(tmp_path)).move([whole, *parts])
    assert whole.data_ptr() != before and torch.equal(whole, torch.arange(12.0))
    parts[1].add_(1)
    assert whole.tolist() == [*range(5), *range(6, 13)] and parts[0].tolist() == [*range(5)]
    assert not [*tmp_path.iterdir()]


def test_a_missing_folder_and_a_full_disk_are_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_memory, "MIN_BYTES", 1)
    with pytest.raises(UserError) as missing:
        MappedMemory(OPTION, str(tmp_path / "missing")).move([torch.zeros(4)])
    assert "No such file or directory; name another folder" in str(missing.value)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(UserError) as full:
            MappedMemory(OPTION, str(tmp_path)).move([torch.zeros(2**19)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "2 MiB cannot be reserved: File too large; free some space" in str(full.value)
    assert not [*tmp_path.iterdir()]

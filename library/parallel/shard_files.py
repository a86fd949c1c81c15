"""The part of a checkpoint that is sharded over the ranks, written and read with ``torch.distributed.checkpoint``.

Each rank writes its parts as safetensors files with their offsets (``HuggingFaceStorageWriter``), which contain no
pickle, and reads what it needs of all files, however many ranks wrote them.  So all ranks need the same file system.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from ..atomic_files import FileEntry, describe_file, fsync_dir
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST
from ..errors import UserError
from .sharded_weights import copy_shard_to_host, fit_shape, shard_like
from .strategy import Strategy

SHARDS_FOLDER = "shards"
"""The folder in a checkpoint with the parts of all ranks."""

MAX_FILE_BYTES = 2 * 10**9
"""Bytes of all ranks' parts in files of one number: the writer holds a file in memory."""


def split_sharded(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, DTensor]]:
    """Split tensors into those that each rank holds as a whole, and those of which it holds a part."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return {name: tensor for name, tensor in tensors.items() if name not in sharded}, sharded


def describe_sharded(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Describe the tensors for state.json."""
    return {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}


class _HostCopyWriter(HuggingFaceStorageWriter):
    """A writer that copies the parts of this rank to host memory, and nothing else.

    torch 2.13 copies parts that are there already with all of the memory of which they are slices.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: copy_shard_to_host(tensor) for name, tensor in state_dict.items()}


class _InPlaceWriter(HuggingFaceStorageWriter):
    """A writer of the parts of this rank from where they are."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class ShardWriter:
    """Writes the parts of all ranks in the background, in a process group of its own."""

    def __init__(self, comm: Communicator, *, copies: bool = True):
        """Create the process group; a collective.

        Without copies, as host memory has no room for them, a rank waits until its parts are written.
        """
        self._comm, self._copies = comm, copies
        self._group: Any = dist.new_group(backend="gloo")

    def start(self, folder: Path, tensors: Mapping[str, DTensor]) -> Future[Any]:
        """Copy the parts of this rank to host memory and start writing them; a collective."""
        writer_class = _HostCopyWriter if self._copies else _InPlaceWriter
        writer = writer_class(str(folder / SHARDS_FOLDER), _number_files(tensors), save_distributed=True)
        with _silence_checkpoint_warnings():
            future: Any = async_save(dict(tensors), storage_writer=writer, process_group=self._group)
        if not self._copies:
            futures.wait([future])
        return future  # type: ignore[no-any-return]

    def finish(self, folder: Path, written: Future[Any] | None, error: str | None) -> dict[str, FileEntry]:
        """Wait until all ranks have written, and return the files of all on the main rank; raise if any rank failed.

        All ranks call it, in a background thread; ``error`` says why this rank could not start.
        """
        entries: dict[str, FileEntry] = {}
        try:
            if written is not None:
                written.result()
                entries = self._describe_own_files(folder)
        except Exception as failure:
            error = str(failure).strip().splitlines()[-1]
        outcomes: Any = [None] * self._comm.world_size if self._comm.is_main else None
        dist.gather_object((entries, error), outcomes, group=self._group)
        found: dict[str, FileEntry] = {}
        for rank, (files, problem) in enumerate(outcomes or ()):
            if problem:
                raise UserError(f"rank {rank}: {problem}")
            found |= files
        for name, entry in found.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["size"]:
                raise UserError(f"{name} of another rank is not here: all machines need the same output_dir")
        if found:
            fsync_dir(folder / SHARDS_FOLDER)
        return found

    def _describe_own_files(self, folder: Path) -> dict[str, FileEntry]:
        own = f"shard-{self._comm.rank + 1:05d}-*.safetensors"
        return {f"{SHARDS_FOLDER}/{path.name}": describe_file(path) for path in (folder / SHARDS_FOLDER).glob(own)}


def _number_files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number the files of each rank, or the parts in which they are read, so that each can be held in memory."""
    numbers, used = dict[str, int](), 0
    for name, tensor in tensors.items():
        used += tensor.nbytes
        numbers[name] = 1 + (used - 1) // MAX_FILE_BYTES if used else 1
    ordered = {number: index for index, number in enumerate(sorted(set(numbers.values())), start=1)}
    return {name: ordered[number] for name, number in numbers.items()}


def load_shards(
    checkpoint: Path, listed: Mapping[str, Any], strategy: Strategy, names: Mapping[nn.Parameter, str]
) -> dict[str, Tensor]:
    """Load the sharded tensors of a checkpoint: as they are sharded now, or whole; a collective.

    ``listed`` are their dtypes and shapes (``describe_sharded``).  Whole tensors are read by the main rank, which sends
    them to the others.
    """
    if not listed:
        return {}
    parameters = {name: parameter for parameter, name in names.items()}
    folder = checkpoint / SHARDS_FOLDER

    def read_whole_tensors() -> dict[str, Tensor]:
        targets = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in listed.items()}
        _load(folder, targets, no_dist=True)
        return targets

    if not strategy.writes_shards:
        return strategy.comm.load_on_main_and_broadcast(read_whole_tensors)
    targets, others = dict[str, Tensor](), dict[str, Tensor]()
    for name, (dtype, shape) in listed.items():
        own = _find_parameter(name, parameters)
        if own is not None and list(own.shape) == shape:
            targets[name] = torch.zeros_like(own.detach(), dtype=getattr(torch, dtype))
        else:  # another strategy's shape, or a weight that is not trained now or differs, which is reported later
            others[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    _load(folder, targets, no_dist=False)
    return targets | _load_whole_and_shard(folder, others, names)


def _load_whole_and_shard(
    folder: Path, stand_ins: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]
) -> dict[str, Tensor]:
    """Load tensors as a whole on each rank, which keeps its part, some at a time; ``stand_ins`` have their shapes."""
    numbers, found = _number_files(stand_ins), dict[str, Tensor]()
    for number in sorted(set(numbers.values())):
        part = {
            name: torch.empty_like(each, device=HOST) for name, each in stand_ins.items() if numbers[name] == number
        }
        _load(folder, part, no_dist=True)
        found |= shard_whole_tensors(part, names)
    return found


def shard_whole_tensors(
    tensors: Mapping[str, Tensor],
    names: Mapping[nn.Parameter, str],
    take_shard: Callable[[nn.Parameter, Tensor], Tensor] = lambda parameter, whole: whole,
) -> dict[str, Tensor]:
    """Shard the tensors of a checkpoint of whole weights as the parameters are that they belong to.

    ``take_shard`` returns this rank's part of a tensor, where parameters are parts but no DTensors.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        own = _find_parameter(name, parameters)
        if own is not None:
            tensor = take_shard(own, tensor)
        fitted = tensor if own is None else fit_shape(tensor, own)
        found[name] = shard_like(fitted, own) if own is not None and own.shape == fitted.shape else tensor
    return found


def _find_parameter(name: str, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """Find the parameter of a tensor such as ``optimizer/state/unet.conv_in.weight/exp_avg``."""
    return next((parameters[part] for part in name.split("/") if part in parameters), None)


def _load(folder: Path, targets: dict[str, Tensor], *, no_dist: bool) -> None:
    with _silence_checkpoint_warnings():
        load(targets, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=no_dist)


@contextmanager
def _silence_checkpoint_warnings() -> Iterator[None]:
    """Silence warnings of torch about its own storage classes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield

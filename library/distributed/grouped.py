"""Several processes work on the same pictures, each with a part of the frozen model; adapters are whole on all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..data.batch import PixelBatch
from .context_cut import ContextCut
from .flat import FlatGradients
from .layout import Layout
from .memory import phase
from .strategy import DataParallel, LossFunction
from .structure import Structure
from .tensor_cut import TensorCut
from .token_exchange import Group

if TYPE_CHECKING:
    from .compiling import Compilation, Shapes


class Grouped(DataParallel):
    """A process finds gradients for what it computed, and their sum over all processes is the gradient.

    So all of them keep all adapters the same, and optimizers, states and files are what they are on one process.
    """

    computes_together = True

    def __init__(self, accelerator: Accelerator, layout: Layout):
        super().__init__(accelerator)
        self.layout, self.together = layout, layout.together
        self.data_rank, self.data_size = layout.data_rank(self.rank), layout.data
        self.tellers = layout.tellers()
        self.tells = self.rank in self.tellers
        self.stage = layout.stage(self.rank)
        self.is_last_stage = self.stage == layout.stages - 1
        self.has_whole_model = layout.contexts == layout.together
        if not self.has_whole_model:
            self.frozen_home = torch.device("cpu")  # no device ever holds all of it
        sizes = {"data": layout.data, "stage": layout.stages, "context": layout.contexts, "part": layout.parts}
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        self.cutting = TensorCut.among(self.mesh.get_group("part")) if layout.parts > 1 else None
        self._compilation: Compilation | None = None
        self.dealing = None
        if layout.contexts > 1:
            self.dealing = ContextCut(Group(self.mesh.get_group("context")), self._changes)
        self.have_patience()

    def compile(self, parts: Sequence[nn.Module], denoiser: nn.Module, shapes: "Shapes") -> "Compilation | None":
        """As without others; of what changes in an exchange, it is told."""
        self._compilation = super().compile(parts, denoiser, shapes)
        return self._compilation

    def _changes(self, tensor: Tensor) -> None:
        if self._compilation is not None:
            self._compilation.changes(tensor)

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Take the model apart, and bring this process's part of it to the device."""
        denoiser, structure = denoiser or model, structure or Structure()
        with self._compiling_left_to_us():
            if self.cutting is not None:
                self.cutting.cut(denoiser, structure.cuts)
            if self.dealing is not None:
                self.dealing.enter(denoiser, structure)
            self._take_apart(model, denoiser, structure)
            if self.dealing is not None:
                self.dealing.enclose()
            # What accelerate adds is autocast; nothing is moved or wrapped.
            self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return self.model, self.optimizer

    def _take_apart(self, model: nn.Module, denoiser: nn.Module, structure: Structure) -> None:
        """What else is left to others; what is not brings itself to the device."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, single layers work as if nothing was taken apart."""
        if self.cutting is None:
            yield
            return
        with self.cutting.alone():
            yield

    def places(self, down: nn.Module) -> Tensor | None:
        """Only some, where a picture is shared."""
        return None if self.dealing is None else self.dealing.places(down)

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that several processes computed together, on all of them."""
        (loss * float(self.is_last_stage)).backward()  # type: ignore[no-untyped-call]
        self._exchange(self.layout.data)

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        """Forward and backward of one step; the gradients are exchanged once, after its last micro-batch."""
        loss = super().gradients(loss_function, work, samples, step)
        self._exchange(self.size)
        return loss

    def _exchange(self, processes: int) -> None:
        """The sum over all processes, divided by so many; what several of them found as a whole counts once."""
        if self.cutting is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter not in self.cutting.learnt:
                    parameter.grad /= self.layout.parts
        with phase("communication"):
            gradients = FlatGradients(self.model, of_all=self.layout.together > 1)
            gradients.become_the_mean(processes * self.layout.contexts)

    def _summed(self, total: Tensor) -> Tensor:
        return super()._summed(total if self.tells else torch.zeros_like(total))

"""The sections of the GPU benchmark, in order of what is least known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from library.distributed.step_phases import OutOfMemory, is_out_of_memory
from library.errors import UserError

from ..report import Measurement

NO_DEVICE = "not run: no device"
NOT_MEASURED = (UserError, RuntimeError, OutOfMemory)
"""Errors that become the note of a measurement: the section goes on."""
NOTE_LENGTH = 300
SMALL = ("--resolution", "64", "--network_dim", "4")


@dataclass(frozen=True)
class SectionContext:
    """The device, the folder and the programs of other trainers with which a section runs."""

    device_type: str
    is_tiny: bool
    """Tiny models and few steps: the same code on a CPU."""
    directory: Path
    training_options: tuple[str, ...] = ()
    """The training options of the section's model; empty where it has none."""
    sd_scripts: str = ""
    sd_scripts_python: str = ""
    diffusers: str = ""
    diffusers_python: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which child processes use the device."""
        return {"ACCELERATE_USE_CPU": "true"} if self.device_type == "cpu" else {}

    def choose(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full


@dataclass(frozen=True)
class Section:
    name: str
    function: str
    """``module:name`` in this package; takes a ``SectionContext`` and yields measurements as they are made."""
    seconds: int
    """The time that an H100 needs; guessed from the processes and steps of sections that have not run on one."""
    description: str
    model: str = ""
    options: tuple[str, ...] = ()
    """Training options of the full size."""

    def build_training_options(self, is_tiny: bool) -> tuple[str, ...]:
        if not self.model:
            return ()
        if is_tiny:
            return ("--pretrained_model_name_or_path", f"{self.model}:tiny", *SMALL)
        return ("--pretrained_model_name_or_path", self.model, "--network_dim", "16", *self.options)


_BF16 = ("--mixed_precision", "bf16")
_1024 = ("--resolution", "1024", *_BF16)
_CHECKPOINTED = (*_1024, "--gradient_checkpointing")
OPEN_SECTIONS: Sequence[Section] = (
    Section("graphs_sdxl", "graphs:compare_graphs", 150, "SDXL eager, with --cuda_graphs, compiled: losses, step",
            "random:sdxl", _1024),
    Section("graphs_sdxl4", "graphs:compare_modes", 80, "the same with a batch size of 4", "random:sdxl",
            (*_1024, "--train_batch_size", "4")),
    Section("block_swap", "memory:compare_ring_sizes", 70, "half of SDXL swapped, with rings of 1 to 12 buffers",
            "random:sdxl", _1024),
    Section("flux_cards", "memory:fit_into_cards", 120, "FLUX.1 in 12, 16 and 24 GB as plan advises", "random:flux",
            _1024),
    Section("matmul_flux", "kernels:measure_quantized_steps", 110, "FLUX.1 with fp8 and int8 matmul", "random:flux",
            _CHECKPOINTED),
    Section("peers_sdxl", "training_speed:compare_peers", 130, "SDXL beside diffusers' script (--diffusers)",
            "random:sdxl", _1024),
    Section("qwen_cards", "memory:fit_into_cards", 160, "Qwen-Image in 12, 16 and 24 GB as plan advises",
            "random:qwen_image", _1024),
)  # fmt: skip
"""What no GPU has measured yet and decides most; without ``--sections`` these run, in a quarter of an hour."""
SECTIONS: Sequence[Section] = (
    *OPEN_SECTIONS,
    # Then what else no GPU has measured yet.
    Section("device", "correctness:measure_device", 10, "bf16 and fp8 matmul, copies: what others compare with"),
    Section("kernels", "kernels:measure_kernels", 110, "nf4 by both kernels; fp8 and int8 matmul, and its LoRA"),
    Section("matmul_flux_compiled", "kernels:measure_compiled_quantized_steps", 270, "FLUX.1 with fp8 and int8 matmul,"
            " compiled", "random:flux", _CHECKPOINTED),
    Section("peers", "training_speed:compare_peers", 120, "Stable Diffusion 1.5 beside sd-scripts (--sd_scripts)",
            "random:sd1", ("--resolution", "512", *_BF16, "--train_batch_size", "4")),
    Section("peers_flux", "training_speed:compare_peers", 350, "FLUX.1 beside diffusers' script (--diffusers)",
            "random:flux", _CHECKPOINTED),
    Section("block_swap_flux", "memory:compare_ring_sizes", 110, "half of FLUX.1 swapped, checkpointed", "random:flux",
            _CHECKPOINTED),
    Section("graphs_sd1", "graphs:compare_graphs", 120, "Stable Diffusion 1.5 with --cuda_graphs", "random:sd1",
            ("--resolution", "512", *_BF16)),
    Section("qwen_image", "training_speed:measure_model", 130, "Qwen-Image at 1024, checkpointed", "random:qwen_image",
            _CHECKPOINTED),
    Section("z_image", "training_speed:measure_model", 100, "Z-Image at 1024: compiled", "random:z_image", _1024),
    Section("memory", "memory:measure_switches", 190, "memory-saving options on SDXL: estimate, peak, step time",
            "random:sdxl", _1024),
    Section("compile", "training_speed:compile_sizes", 130, "12 image sizes of SDXL: graphs, cold and warm cache",
            "random:sdxl", _1024),
    Section("variants", "training_speed:compare_variants", 90, "attention backends, optimizers on FLUX.1",
            "random:flux", _1024),
    # Then what changes with the layers.
    Section("layers_sdxl", "layers:compare_layers", 70, "fused layers beside peft's, and a CUDA graph: SDXL, batch 1",
            "random:sdxl", _1024),
    Section("layers_sdxl4", "layers:compare_layers", 65, "the same with a batch size of 4", "random:sdxl",
            (*_1024, "--train_batch_size", "4")),
    Section("layers_flux", "layers:compare_layers", 60, "the same for FLUX.1", "random:flux", _1024),
    Section("layers_z_image", "layers:compare_layers", 45, "the same for Z-Image", "random:z_image", _1024),
    Section("layers_sd1", "layers:compare_layers", 35, "the same for Stable Diffusion 1.5, batch size 8", "random:sd1",
            ("--resolution", "512", *_BF16, "--train_batch_size", "8")),
    Section("sdxl", "training_speed:measure_model", 80, "Stable Diffusion XL at 1024, batch size 4", "random:sdxl",
            (*_1024, "--train_batch_size", "4")),
    Section("flux", "training_speed:measure_model", 110, "FLUX.1 at 1024: step, MFU, compiled", "random:flux", _1024),
    Section("flux_cudnn", "training_speed:measure_model", 110, "the same with cuDNN's attention", "random:flux",
            (*_1024, "--attn_mode", "cudnn")),
    Section("sd1", "training_speed:measure_model", 70, "Stable Diffusion 1.5 at 512, batch size 8", "random:sd1",
            ("--resolution", "512", *_BF16, "--train_batch_size", "8")),
    # Last what was right when it was measured.
    Section("golden", "correctness:compare_losses", 60, "losses on the device against those on the CPU, fp32, bf16,"
            " fp16"),
    Section("resume", "correctness:compare_resumed_runs", 60, "resumed and uninterrupted runs, with --deterministic"),
    Section("sync", "correctness:count_synchronizations", 40, "steps in which the host waits for the device"),
    Section("faults", "faults:provoke_faults", 80, "NaN, Ctrl-C, out of memory with and without on_oom"),
    Section("parallel", "parallel:compare_layouts", 60, "two processes on one device against one; NCCL alone"),
)  # fmt: skip


def yield_unmeasured(names: Sequence[str], why: str = NO_DEVICE) -> Iterator[Measurement]:
    for name in names:
        yield Measurement(name, [], note=why)


def format_failure(error: Exception) -> str:
    """Say in one line why something was not measured."""
    if isinstance(error, OutOfMemory):
        return f"does not fit: out of memory in {error.phase}: {error.reason}"[:NOTE_LENGTH]
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{'does not fit' if is_out_of_memory(error) else 'not measured'}: {reason}"[:NOTE_LENGTH]

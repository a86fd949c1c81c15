"""CUDA graphs on a CPU: a captured function is replayed by calling it, with its inputs and outputs where they were."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map

from benchmarks.synthetic_run import build_run
from library.parallel.cuda_graphs import StepGraphs
from library.training import setup, validate_model


class CallingCapture:
    """Stands for the capture of a graph, which keeps the addresses of tensors and no Python."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, function, warm_up):
        outputs = tree_map(torch.clone, warm_up())
        self.captured += 1

        def replay():
            self.replayed += 1
            tree_map(torch.Tensor.copy_, outputs, function())

        return outputs, replay


@contextmanager
def build_run_with_graphs(argv, folder, max_graphs=8):
    """A run that trains with graphs; yields it with its capture.  Otherwise graphs are refused on a CPU."""
    capture = CallingCapture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate_model, "validate_cuda_graphs", lambda *_: ())
        patch.setattr(setup, "CudaCapture", lambda device: capture)
        patch.setattr(setup, "StepGraphs", partial(StepGraphs, max_graphs=max_graphs))
        with build_run([*argv, "--cuda_graphs"], folder) as run:
            yield run, capture

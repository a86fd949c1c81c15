"""CUDA graphs on a CPU: a captured function is replayed by calling it, with its inputs and outputs where they were."""

import torch
from torch.utils._pytree import tree_map

from library.parallel.cuda_graphs import StepGraphs


class CallingCapture:
    """Stands for the capture of a graph, which keeps the addresses of tensors and no Python."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, function):
        outputs = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, function())
        self.captured += 1

        def replay():
            self.replayed += 1
            tree_map(lambda old, new: old.copy_(new) if isinstance(old, torch.Tensor) else None, outputs, function())

        return outputs, replay


def use_graphs(run, max_graphs=8):
    """Let a run train with graphs; return its capture."""
    capture = CallingCapture()
    run.strategy.step_graphs = StepGraphs(
        run.strategy.unwrap_model(run.model), run.strategy.accelerator.autocast, capture, max_graphs
    )
    return capture

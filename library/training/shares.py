"""Losses of single pictures, told apart by how much noise there was, by bucket and by dataset."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .job import StepMetrics, TrainingRun

TIMESTEP_BINS = 10


def compute_grouped_losses(run: "TrainingRun", metrics: Sequence["StepMetrics"]) -> Mapping[str, float]:
    """Mean loss of the pictures of these steps, over all processes; every process has to call this.

    Which picture is of which bucket is known to all from the plan, so only times and losses travel.
    """
    strategy = run.strategy
    if strategy.has_loss:
        mine = [torch.stack([seen.timesteps.float(), seen.losses.float()]) for item in metrics for seen in item.micro_batches]
        table = torch.cat(mine, dim=1).T.contiguous()
    else:  # as large as what the others have
        count = sum(len(batch.sample_indices) for item in metrics for batch in run.plan.batch_plan.get_step(item.step))
        table = torch.zeros(count // strategy.data_parallel_size, 2, device=strategy.device)
    everybody = strategy.all_gather_tensor(table).tolist()
    tellers, each = strategy.loss_ranks, len(everybody) // strategy.world_size
    sums: defaultdict[str, list[float]] = defaultdict(list)
    place = 0
    for item in metrics:
        for batch in run.plan.batch_plan.get_step(item.step):
            bucket = run.plan.batch_plan.buckets[batch.bucket_index]
            share = len(batch.sample_indices) // len(tellers)
            for index, is_real in enumerate(batch.is_real):
                rank, offset = divmod(index, share)
                time, loss = everybody[tellers[rank] * each + place + offset]
                if is_real and math.isfinite(loss):
                    low = min(int(time * TIMESTEP_BINS), TIMESTEP_BINS - 1)
                    sums[f"loss/time/{low / TIMESTEP_BINS:.1f}-{(low + 1) / TIMESTEP_BINS:.1f}"].append(loss)
                    sums[f"loss/bucket/{bucket.resolution[0]}x{bucket.resolution[1]}"].append(loss)
                    sums[f"loss/dataset/{bucket.dataset_number + 1}"].append(loss)
            place += share
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}

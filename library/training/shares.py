"""Losses of single pictures, told apart by how much noise there was, by bucket and by dataset."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .job import Figures, Run

BINS = 10


def losses_by_kind(run: "Run", figures: Sequence["Figures"]) -> Mapping[str, float]:
    """Mean loss of the pictures of these steps, over all processes; every process has to call this.

    Which picture is of which bucket is known to all from the plan, so only times and losses travel.
    """
    strategy = run.strategy
    if strategy.tells:
        mine = [torch.stack([seen.t.float(), seen.loss.float()]) for item in figures for seen in item.seen]
        table = torch.cat(mine, dim=1).T.contiguous()
    else:  # as large as what the others have
        count = sum(len(batch.samples) for item in figures for batch in run.plan.batches.step(item.step))
        table = torch.zeros(count // strategy.data_size, 2, device=strategy.device)
    everybody = strategy.gathered(table).tolist()
    tellers, each = strategy.tellers, len(everybody) // strategy.size
    sums: defaultdict[str, list[float]] = defaultdict(list)
    place = 0
    for item in figures:
        for batch in run.plan.batches.step(item.step):
            bucket = run.plan.batches.buckets[batch.bucket]
            share = len(batch.samples) // len(tellers)
            for index, is_real in enumerate(batch.weights):
                rank, offset = divmod(index, share)
                time, loss = everybody[tellers[rank] * each + place + offset]
                if is_real and math.isfinite(loss):
                    low = min(int(time * BINS), BINS - 1)
                    sums[f"loss/time/{low / BINS:.1f}-{(low + 1) / BINS:.1f}"].append(loss)
                    sums[f"loss/bucket/{bucket.size[0]}x{bucket.size[1]}"].append(loss)
                    sums[f"loss/dataset/{bucket.dataset + 1}"].append(loss)
            place += share
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}

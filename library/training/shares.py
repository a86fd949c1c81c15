"""Losses of single pictures, told apart by how much noise there was, by bucket and by dataset."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .loop import Figures, Run

BINS = 10


def losses_by_kind(run: "Run", figures: Sequence["Figures"]) -> Mapping[str, float]:
    """Mean loss of the pictures of these steps, over all processes; every process has to call this.

    Which picture is of which bucket is known to all from the plan, so only times and losses travel.
    """
    mine = [torch.stack([seen.t.float(), seen.loss.float()]) for item in figures for seen in item.seen]
    everybody = run.strategy.gathered(torch.cat(mine, dim=1).T.contiguous()).tolist()
    ranks, each = run.strategy.size, len(everybody) // run.strategy.size
    sums: defaultdict[str, list[float]] = defaultdict(list)
    place = 0
    for item in figures:
        for batch in run.plan.batches.step(item.step):
            bucket = run.plan.batches.buckets[batch.bucket]
            share = len(batch.samples) // ranks
            for index, is_real in enumerate(batch.weights):
                rank, offset = divmod(index, share)
                time, loss = everybody[rank * each + place + offset]
                if is_real and math.isfinite(loss):
                    low = min(int(time * BINS), BINS - 1)
                    sums[f"loss/time/{low / BINS:.1f}-{(low + 1) / BINS:.1f}"].append(loss)
                    sums[f"loss/bucket/{bucket.size[0]}x{bucket.size[1]}"].append(loss)
                    sums[f"loss/dataset/{bucket.dataset + 1}"].append(loss)
            place += share
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}

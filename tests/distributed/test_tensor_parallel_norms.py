"""Norms over all heads of an attention layer whose heads are on two ranks: outputs and gradients are those of one rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from library.parallel.parallel_plan import build_tensor_parallel_plan
from library.parallel.tensor_parallel import TensorParallel
from library.parallel.tensor_parallel_norms import ShardedNorm
from library.parallel.tensor_parallel_weights import TensorParallelWeights

pytestmark = pytest.mark.quick
WIDTH, HEADS, RANKS = 12, 4, 2


class Attention(nn.Module):
    def __init__(self, eps: float | None):
        super().__init__()
        torch.manual_seed(3)
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.norm_q, self.norm_k = (nn.RMSNorm(WIDTH, eps) for _ in range(2))
        self.norm_v = nn.RMSNorm(WIDTH // HEADS, eps)
        for norm in (self.norm_q, self.norm_k, self.norm_v):
            nn.init.normal_(norm.weight, 1, 0.5)

    def forward(self, states):
        query, key, value = self.norm_q(self.to_q(states)), self.norm_k(self.to_k(states)), self.to_v(states)
        value = self.norm_v(value.unflatten(-1, (self.heads, -1))).flatten(-2)
        return self.to_out[0](query * key.tanh() + value)


class SumOfThreads:
    """Adds up the tensors of all threads, as an all-reduce of ranks does."""

    def __init__(self):
        self.barrier, self.given = threading.Barrier(RANKS, timeout=20), {}

    def __call__(self, tensor):
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        total = sum(self.given.values())
        self.barrier.wait()
        tensor.copy_(total)


@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("trains_base", [False, True])
def test_two_ranks_normalize_as_one(eps, trains_base):
    states = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    whole, wholes, add_up = Attention(eps), states.clone().requires_grad_(), SumOfThreads()
    whole.requires_grad_(trains_base)
    expected = whole(wholes)
    expected.square().sum().backward()

    models = [nn.ModuleDict({"attn": Attention(eps).requires_grad_(trains_base)}) for _ in range(RANKS)]

    def run(rank):
        model, mine = models[rank], states.clone().requires_grad_()
        weights = TensorParallelWeights(None, torch.device("cpu")) if trains_base else None
        parallel = TensorParallel(rank, RANKS, add_up, weights)
        parallel.shard_layers(model, build_tensor_parallel_plan(model))
        output = model.attn(mine)
        output.square().sum().backward()
        return model.attn, output.detach(), mine.grad, parallel

    with ThreadPoolExecutor(RANKS) as pool:
        ranks = list(pool.map(run, range(RANKS)))
    for rank, (model, output, gradient, parallel) in enumerate(ranks):
        torch.testing.assert_close(output, expected.detach())
        torch.testing.assert_close(gradient, wholes.grad)
        part = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
        assert torch.equal(model.norm_q.weight, whole.norm_q.weight[part]), "each rank has its part of the weight"
        assert model.norm_v.weight.shape == (WIDTH // HEADS,)
        if trains_base:
            torch.testing.assert_close(model.norm_k.weight.grad, whole.norm_k.weight.grad[part])
            assert all(each is not model.norm_k.weight for each in parallel.partial_grad_parameters)


def test_estimates_run_a_norm_on_the_meta_device():
    """Autocast does not know this device."""
    states = torch.empty(2, 5, WIDTH // RANKS, dtype=torch.bfloat16, device="meta")
    norm = nn.RMSNorm(WIDTH // RANKS, device="meta")
    output = ShardedNorm(norm, WIDTH, lambda tensor: None)(states)
    assert output.shape == states.shape and output.dtype == states.dtype

"""Each collective equals, in values and gradients, what one rank holding all the slices would compute.

Why it matters: every parallel axis is made of these, and a wrong backward trains on without an error. float64, 3 ranks
(not a power of two), even and uneven slices. Not covered: NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megamoe.ops import collectives as c
from megamoe.testing.distributed import run_distributed

RANKS, WIDTH = 3, 4
UNEVEN = [5, 0, 3]


def _slices(sizes, seed):
    return torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).split(sizes)


def _leaf(x):
    return x.clone().requires_grad_()


def _close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def _check_on_rank():
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    for sizes in ([4] * RANKS, UNEVEN):
        slices, whole = _slices(sizes, 1), torch.cat(_slices(sizes, 1))
        weights = [torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9 + r)) for r in range(RANKS)]
        own = sum(sizes[:rank])
        # all_gather: rank r's loss is <w_r, tanh(whole)>; the gradient of a slice is the sum over ranks.
        x = _leaf(slices[rank])
        gathered = c.all_gather(x, group, sizes)
        (gathered.tanh() * weights[rank]).sum().backward()
        _close(gathered, whole)
        _close(x.grad, ((1 - whole.tanh() ** 2) * sum(weights))[own : own + sizes[rank]])
        # reduce_scatter: rank r contributes w_r, the sum's slice s goes to rank s and into <tanh(slice), slice_of_whole>.
        x = _leaf(weights[rank])
        part = c.reduce_scatter(x, group, sizes)
        (part.tanh() * slices[rank]).sum().backward()
        _close(part, sum(weights)[own : own + sizes[rank]])
        _close(x.grad, (1 - sum(weights).tanh() ** 2) * whole)

    a = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    x = _leaf(a)
    (c.copy_to(x, group) * (rank + 1)).sin().sum().backward()
    _close(x.grad, sum((r + 1) * (a * (r + 1)).cos() for r in range(RANKS)))
    x = _leaf(a * (rank + 1))
    total = c.reduce_from(x, group)
    total.square().sum().backward()
    _close(total, a * 6)
    _close(x.grad, 2 * a * 6)

    # all_to_all with every (from, to) size different, zero included; there and back is the identity in both directions.
    size = lambda s, t: (2 * s + t) % 4  # noqa: E731
    send, receive = [size(rank, t) for t in range(RANKS)], [size(s, rank) for s in range(RANKS)]
    mine = torch.full((sum(send), WIDTH), float(rank), dtype=torch.float64)
    mine += torch.arange(sum(send), dtype=torch.float64)[:, None] / 100
    x = _leaf(mine)
    there = c.all_to_all(x, send, receive, group)
    assert [row.item() // 1 for row in there[:, 0]] == [s for s in range(RANKS) for _ in range(receive[s])]
    home = c.all_to_all(there * (1 + there), receive, send, group)
    _close(home, mine * (1 + mine))
    home.sum().backward()
    _close(x.grad, 1 + 2 * mine)

    slices = _slices([4] * RANKS, 2)
    x = _leaf(slices[rank])
    front = c.halo(x, 2, group)
    _close(front, slices[rank - 1][2:] if rank else torch.zeros_like(front))
    (front.sin() * (rank + 1)).sum().backward()
    expected = torch.zeros_like(x)
    if rank + 1 < RANKS:
        expected[2:] = slices[rank][2:].cos() * (rank + 2)
    _close(x.grad, expected)
    try:
        c.halo(slices[rank], 5, None)
    except ValueError as error:
        assert "fewer" in str(error)
    else:
        raise AssertionError("a halo wider than the slice was accepted")
    try:
        c.reduce_scatter(torch.zeros(4, 1), group)
    except ValueError as error:
        assert "multiple of 3" in str(error)
    else:
        raise AssertionError("uneven rows were accepted")
    dist.barrier()
    dist.destroy_process_group()
    return True


def test_collectives_equal_one_rank_in_values_and_gradients():
    assert run_distributed(_check_on_rank, RANKS) == [True] * RANKS


def test_a_group_of_none_sends_nothing():
    x = torch.randn(3, 2)
    for y in (c.all_gather(x, None), c.reduce_scatter(x, None), c.copy_to(x, None), c.reduce_from(x, None), c.all_to_all(x, [3], [3], None)):
        assert y is x
    assert c.halo(x, 2, None).eq(0).all()

"""Dispatch over several hosts: a token crosses to a host once, and is spread there through its ranks' memory.

    home (n, l)  --all_to_all over rail l-->  (m, l) for every host m that has an expert of the token
    (m, l)       --windows of host m------>   owners of the experts, as `peers.py` does it; rows are those of flat dispatch
    and back:    owners' outputs are summed for the token on host m, the sums return over the rail and are added in host order

Rail l is the l-th rank of every host. Rows arrive where and in the order in which flat dispatch puts them: the place of a slot depends
on the counts of all ranks and on nothing else, so experts compute the same bits. A token's result is summed per host and
rounded once there, then added over hosts and rounded again: with H hosts it differs from flat dispatch by at most H more roundings
of its dtype, and not at all on one host. Gradients of weights are the same bits.

Letters: N tokens, A experts per token, E experts, P ranks, H hosts of L ranks, T tokens that came over the rail, D width.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megamoe.ops.collectives import all_to_all
from megamoe.ops.moe_dispatch import cuda, cuda_ipc, host, peers, reference, shared_memory
from megamoe.ops.moe_dispatch.cuda import Slots
from megamoe.ops.precision import wide
from megamoe.utils.errors import check
from megamoe.utils.torch_compat import all_gather_single, group_timeout


@dataclass
class Hosts:
    """Where the ranks of a group are.

    Attributes:
        H, L: hosts, ranks on each. Rank p of the group is on host p // L.
        rail: group of the ranks at this place on every host, in host order.
        windows: of the ranks of this host.
    """

    group: Any
    H: int
    L: int
    rail: Any
    windows: peers.Windows

    @property
    def me(self) -> int:
        return dist.get_rank(self.group)

    @property
    def mine(self) -> int:
        return self.me // self.L


def find_hosts(group, name_of_host: str, windows_of: Callable[[Any], peers.Windows]) -> Hosts:
    """Sort a group's ranks by host and make the groups inside it. Collective over `group`.

    Args:
        name_of_host: of this rank: ranks with one name share memory.
        windows_of: makes the windows of a group of one host.

    Raises:
        UserError: hosts with different numbers of ranks, or ranks of a host that do not follow one another.
    """
    P = dist.get_world_size(group)
    names: list = [None] * P
    dist.all_gather_object(names, name_of_host, group=group)
    hosts = list(dict.fromkeys(names))
    H, L = len(hosts), P // len(hosts)
    check(names == [h for h in hosts for _ in range(L)], "model.moe.dispatch", "hierarchical", f"needs equally many consecutive ranks of the expert-parallel group on every host, got hosts {names}; choose parallel.ep and the start order so, or model.moe.dispatch=auto")
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    rails = [[ranks[h * L + place] for h in range(H)] for place in range(L)]
    # Both are made by their members alone: this is inside a layer, where other groups' ranks are elsewhere.
    kind = dist.get_backend(group)
    made = dict(backend=kind, timeout=group_timeout(group, "cuda" if kind == "nccl" else "cpu"), use_local_synchronization=True)
    rail = dist.new_group(rails[me % L], **made)
    here = dist.new_group(ranks[me // L * L : me // L * L + L], **made)
    return Hosts(group, H, L, rail, windows_of(here))


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, num_experts: int, hosts: Hosts):
    """The contract of `megamoe.ops.moe_dispatch`. Syncs the host once, for R.

    Raises:
        PeerLost: counts that cannot be true, or a rank of this host that is missing. A missing host ends in the group's time-out.
    """
    w, E, H, (N, A) = hosts.windows, num_experts, hosts.H, topk_idx_NA.shape
    P, own, ops = hosts.H * hosts.L, num_experts // (hosts.H * hosts.L), hosts.windows.ops
    w.check()
    idx = topk_idx_NA.contiguous()
    host_NA = torch.where(idx < 0, -1, idx // (own * hosts.L))
    wanted_HN = torch.stack([(host_NA == h).any(1) for h in range(H)])
    line = torch.cat([ops.moe_count(idx, E)[0], (idx >= 0).sum(dtype=torch.int32)[None], wanted_HN.sum(1, dtype=torch.int32)])
    table = line.new_empty(P * line.shape[0])
    all_gather_single(table, line, group=hosts.group)
    table = table.view(P, -1)
    counts_PE = table[:, :E].contiguous()
    told = torch.cat([counts_PE.view(P, P, own).sum(-1), table[:, E:]], 1).tolist()  # the one host sync
    sent_PP, announced_P, tokens_PH = [t[:P] for t in told], [t[P] for t in told], [t[P + 1 :] for t in told]
    w.check_counts(sent_PP, announced_P)

    # Over the rail: each host's tokens, their ids there and their weights. Sources keep their order, so slots keep theirs.
    place = hosts.me % hosts.L
    going, coming = tokens_PH[hosts.me], [tokens_PH[h * hosts.L + place][hosts.mine] for h in range(H)]
    token_h = [torch.argsort(~wanted, stable=True)[:n] for wanted, n in zip(wanted_HN, going)]
    x_TD = all_to_all(_ToHosts.apply(x_ND, token_h), going, coming, hosts.rail)
    weight_TA = all_to_all(_ToHosts.apply(topk_weight_NA, token_h), going, coming, hosts.rail)
    ids = torch.cat([torch.where(host_NA[t] == h, idx[t], -1) for h, t in enumerate(token_h)])
    idx_TA = all_to_all(ids, going, coming, hosts.rail)

    # This rank now stands in for the ranks of its rail: a slot's row is the one its source would have found.
    placed = []
    for source, (i, g) in enumerate(zip(idx_TA.split(coming), weight_TA.detach().split(coming))):
        _, chunk_CE, rank_TA = ops.moe_count(i.contiguous(), E)
        placed.append(ops.moe_place(i.contiguous(), g.contiguous(), counts_PE, source * hosts.L + place, chunk_CE, rank_TA))
    row, owner, weight, column = (torch.cat(parts) for parts in list(zip(*placed))[:4])
    first = hosts.mine * hosts.L
    # Owners count within the host. Empty slots keep owner 0.
    owner = torch.where(row >= 0, owner - first, 0).to(torch.uint8)
    received = [sum(line[first + q] for line in sent_PP) for q in range(hosts.L)]
    count_e = counts_PE[:, hosts.me * own : (hosts.me + 1) * own].sum(0, dtype=torch.int32)
    total = count_e.sum(0, keepdim=True, dtype=torch.int32)
    sent = peers.Sent(w, Slots(row, owner, weight, column, total), received, E)
    w.hold(E, 0)
    w.meet("dispatch: free")
    rows_RD = peers._Send.apply(x_TD.contiguous(), sent, True)
    return rows_RD, count_e, Handle(hosts, peers.Handle(sent, weight_TA), token_h, (coming, going), N)


@dataclass
class Handle:
    """What `combine` needs: the handle inside the host, and the way back over the rail."""

    hosts: Hosts
    inside: peers.Handle
    token_h: list[torch.Tensor]
    splits: tuple[list[int], list[int]]
    N: int

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        home = all_to_all(self.inside.combine(out_RD), *self.splits, self.hosts.rail)
        return _FromHosts.apply(home, self.token_h, self.N)


def _gather(x, token_h):
    return torch.cat([x[t] for t in token_h])


def _sum(parts, token_h, N: int):
    """Each token's parts added in host order, in the wide dtype, rounded once. A token is at most once in a host's list."""
    out = torch.zeros(N, parts.shape[1], dtype=wide(parts.dtype), device=parts.device)
    for t, part in zip(token_h, parts.split([len(t) for t in token_h])):
        out[t] += part.to(out.dtype)
    return out.to(parts.dtype)


class _ToHosts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token_h):
        ctx.token_h, ctx.N = token_h, x.shape[0]
        return _gather(x, token_h)

    @staticmethod
    def backward(ctx, d):
        return _sum(d, ctx.token_h, ctx.N), None


class _FromHosts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, token_h, N: int):
        ctx.token_h = token_h
        return _sum(parts, token_h, N)

    @staticmethod
    def backward(ctx, dy):
        return _gather(dy, ctx.token_h), None, None


def why_not(*, device="cuda", **facts) -> str | None:
    """Why this backend cannot serve a call site, in words, or None. Who is on which host is seen at a group's first call."""
    return None if device == "cpu" else cuda_ipc.why_not(device=device, **facts)


@functools.cache
def load():
    """Return `dispatch`: one for all layers, which share a group's windows. On a CPU windows are shared memory."""
    made: dict[Any, Hosts] = {}

    def windows_of(here, on_gpu: bool) -> peers.Windows:
        if not on_gpu:
            return peers.Windows(here, shared_memory.SharedMemory(), host, "hierarchical")
        cuda.load()
        cuda_ipc.check_hosts(here)
        return peers.Windows(here, cuda_ipc.DeviceMemory(), torch.ops.megamoe, "hierarchical")

    def dispatch_over_hosts(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts):
        if group is None:
            alone = cuda.load() if x_ND.is_cuda else reference.dispatch
            return alone(x_ND, topk_idx_NA, topk_weight_NA, group=None, num_experts=num_experts)
        if group not in made:
            made[group] = find_hosts(group, socket.gethostname(), lambda here: windows_of(here, x_ND.is_cuda))
        return dispatch(x_ND, topk_idx_NA, topk_weight_NA, num_experts=num_experts, hosts=made[group])

    return dispatch_over_hosts

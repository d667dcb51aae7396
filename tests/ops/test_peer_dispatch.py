"""Dispatch through peers' memory moves the bits of all_to_all_single, and a broken peer ends in a report on every rank.

Why: the phases decide what is overwritten while a peer still reads it; a mistake there shows as a rare wrong row. Four processes
run `peers.py` over shared memory, with `host.py` in place of the kernels: the order of phases, growing windows, counts and
reports are those of `cuda_ipc`. Not covered: the kernels (tests/ops/test_moe_kernels.py), memory order of a GPU (the PTX is
read below), links.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamoe.ops.moe_dispatch import combine, hierarchical, host, peers, reference, shared_memory, virtual
from megamoe.testing.pool import RankPool
from megamoe.utils.errors import UserError

E, A = 16, 4


def tokens(rank: int, call: int, kind: str, D: int, dtype):
    gen = torch.Generator().manual_seed(100 * call + rank)
    N = {"empty rank": 0 if rank == 1 else 9, "uneven": 3 + 5 * rank + call}.get(kind, 12)
    score = torch.randn(N, E, generator=gen)
    if kind == "one expert":
        score[:, 5] += 100
    idx = score.topk(A, dim=1).indices
    if kind == "holes":
        idx[torch.rand(N, A, generator=gen) < 0.4] = -1
    make = lambda *s: torch.randn(s, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(N, D), idx, make(N, A).to(torch.promote_types(dtype, torch.float32)), make(N, D)


@pytest.fixture(scope="module")
def ranks():
    with RankPool(4) as pool:
        yield lambda fn, *args: pool.run(fn, 4, *args)


def start():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    return dist.get_rank(), dist.group.WORLD


def run(op, group, rank, call, kind, D, dtype, positive=False):
    x, idx, weight, dy = tokens(rank, call, kind, D, dtype)
    if positive:
        x, weight, dy = x.abs(), weight.abs(), dy.abs()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    rows, count, handle = op(x, idx, weight, group=group, num_experts=E)
    scale = 1 + torch.arange(rows.shape[0], dtype=torch.float64).to(dtype)[:, None] / 64  # another factor in every row
    y = combine(rows * scale, handle)
    return rows.detach(), count, y.detach(), *torch.autograd.grad(y, [x, weight], dy)


CALLS = [("random", 8, torch.float64), ("uneven", 24, torch.bfloat16), ("one expert", 40, torch.float32), ("empty rank", 8, torch.float64), ("holes", 64, torch.bfloat16)]


def both_ways():
    rank, group = start()
    op = shared_memory.load()
    for call, (kind, D, dtype) in enumerate(CALLS * 2):
        got, want = (run(f, group, rank, call, kind, D, dtype) for f in (op, reference.dispatch))
        for name, a, b in zip(("rows", "count", "y", "dx", "dweight"), got, want):
            assert a.dtype == b.dtype and torch.equal(a, b), (kind, name)
    dist.destroy_process_group()
    return len(CALLS)


def test_four_processes_move_and_sum_the_bits_of_all_to_all(ranks):
    assert ranks(both_ways) == [len(CALLS)] * 4


class SlowToPull:
    """Pulls only when every peer has come to its next meeting: whatever a peer does without waiting for this rank, it has done."""

    def __init__(self, windows):
        self.windows = windows

    def __getattr__(self, name):
        return getattr(host, name)

    def moe_combine(self, *args):
        w, begin = self.windows, time.monotonic()
        others = [p for p in range(w.P) if p != w.me]
        while not bool((w.layout.flags(w.windows[w.me])[others] > w.meeting).all()):
            assert time.monotonic() - begin < 20, "the others did not come"
        return host.moe_combine(*args)


def overtaken():
    """Rank 1 is still pulling when the others begin the next call: largest difference of what it pulls to what it should."""
    rank, group = start()
    windows = peers.Windows(group, shared_memory.SharedMemory(), host, "shared_memory")
    parts = [tokens(rank, call, "random", 8, torch.float64) for call in range(2)]
    sent = [peers.dispatch(x, idx, weight, num_experts=E, windows=windows) for x, idx, weight, _ in parts]
    want = [handle.combine(rows) for rows, _, handle in sent]
    if rank == 1:
        windows.ops = SlowToPull(windows)
    first = sent[0][2].combine(sent[0][0])
    if rank == 1:
        windows.ops = host
    second = sent[1][2].combine(sent[1][0])
    if rank == 1:
        windows.ops = SlowToPull(windows)
    third = sent[0][2].combine(sent[0][0])
    if rank == 1:
        windows.ops = host
    sent[1][2].sent.push_weighted(parts[1][3], sent[1][0])
    dist.destroy_process_group()
    return [(a - b).abs().max().item() for a, b in zip((first, second, third), (*want, want[0]))]


def test_a_rank_that_still_pulls_is_not_overtaken_by_the_next_call(ranks):
    assert ranks(overtaken) == [[0.0] * 3] * 4


def over_hosts():
    """Hierarchical against flat on 2 pretended hosts of 2: (kind, rows and weight gradients equal, worst error of y and dx, eps).

    Errors are relative to the sum of a token's terms without their signs: that is what its parts on two hosts are rounded at.
    """
    rank, group = start()
    windows_of = lambda here: peers.Windows(here, shared_memory.SharedMemory(), host, "hierarchical")  # noqa: E731
    two, one = (hierarchical.find_hosts(group, name, windows_of) for name in (f"host{rank // 2}", "host"))
    assert (two.H, two.L, one.H, one.L) == (2, 2, 1, 4) and two.windows.P == 2
    found = []
    for call, (kind, D, dtype) in enumerate(CALLS):
        ops = [lambda *args, group, num_experts, h=h: hierarchical.dispatch(*args, num_experts=num_experts, hosts=h) for h in (two, one)]
        split, whole, flat = (run(op, group, rank, call, kind, D, dtype) for op in (*ops, reference.dispatch))
        assert all(torch.equal(a, b) for a, b in zip(whole, flat)), kind  # one host rounds nothing more
        bits = [torch.equal(split[i], flat[i]) for i in (0, 1, 4)]
        size = run(reference.dispatch, group, rank, call, kind, D, dtype, positive=True)
        worst = max(((split[i] - flat[i]).abs().double() / size[i].double().clamp(min=1e-30)).amax().item() if len(flat[i]) else 0.0 for i in (2, 3))
        found.append((kind, bits, worst, torch.finfo(dtype).eps))
    names = [f"host{n}" for n in (0, 1, 0, 1)]
    try:
        hierarchical.find_hosts(group, names[rank], windows_of)
        found.append("interleaved hosts were accepted")
    except UserError as error:
        assert "consecutive ranks" in str(error)
    dist.destroy_process_group()
    return found


def test_two_hosts_of_two_give_flat_rows_and_sums_to_two_roundings(ranks):
    for found in ranks(over_hosts):
        for kind, bits, worst, eps in found:
            assert bits == [True] * 3 and worst <= 2 * eps, found


def reports(fault: str):
    """What this rank raises when rank 2 does `fault` in its second call."""
    rank, group = start()
    try:
        return report_of(fault, rank, group)
    finally:
        dist.destroy_process_group()


def report_of(fault: str, rank: int, group):
    windows = peers.Windows(group, shared_memory.SharedMemory(), host, "shared_memory", patience_s=1.0)
    op = lambda *args, group, num_experts: peers.dispatch(*args, num_experts=num_experts, windows=windows)  # noqa: E731
    run(op, group, rank, 0, "random", 8, torch.float64)
    if rank == 2 and fault == "stops":
        return "stopped"
    if rank == 2 and fault == "lies":

        class Liar:
            def __getattr__(self, name):
                return getattr(host, name)

            def moe_share_counts(self, line, counts, me):
                host.moe_share_counts(line + (torch.arange(len(line)) == 3), counts, me)

        windows.ops = Liar()
    begin = time.monotonic()
    try:
        run(op, group, rank, 1, "random", 8, torch.float64)
    except peers.PeerLost as error:
        return f"{time.monotonic() - begin:.1f} s: {error}"
    return "nothing"


def test_a_peer_that_stops_is_named_on_every_other_rank_within_the_time_it_may_take(ranks):
    found = ranks(reports, "stops")
    assert found[2] == "stopped"
    for rank in (0, 1, 3):
        assert float(found[rank].split()[0]) < 10, found
        assert re.search(r"ranks \[2\] did not arrive within 1 s|gave up", found[rank]), found
        assert "dispatch: counts" in found[rank] and f"rank {rank} waited" in found[rank]
    assert any("ranks [2] did not arrive" in found[rank] for rank in (0, 1, 3))


def test_counts_that_do_not_add_up_are_reported_alike_on_every_rank(ranks):
    found = ranks(reports, "lies")
    texts = {text.split(": ", 1)[1] for text in found}
    assert len(texts) == 1 and "rank 2 announced 48 rows" in texts.pop(), found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_ranks_meet_by_release_and_acquire_at_system_scope(tmp_path):
    """A flag stored with a weaker scope may pass the rows it stands for: nothing would fail until a peer reads stale ones."""
    source, ptx = Path(__file__).parents[2] / "csrc/moe_dispatch/smxx_moe_dispatch.cu", tmp_path / "out.ptx"
    subprocess.run(["nvcc", "-std=c++17", "-arch=sm_90a", "-ptx", str(source), "-o", str(ptx)], check=True, capture_output=True)
    kernel = re.search(r"\.entry \S*meet_kernel.*?\n}", ptx.read_text(), re.S).group()
    # Every access to a peer's memory and to the report's first word; the report's others are stored before a system fence.
    flags = re.findall(r"\b(?:ld|st)\.\S*global\S*", kernel)
    assert flags.count("ld.acquire.sys.global.s32") >= 2 and flags.count("st.release.sys.global.s32") == 3, flags
    assert set(flags) <= {"ld.acquire.sys.global.s32", "st.release.sys.global.s32", "st.global.u32", "st.global.b32"}, flags
    assert re.search(r"membar\.sys|fence\.(sc|acq_rel)\.sys", kernel)
    assert "trap" not in kernel


@pytest.mark.parametrize("P", [1, 2, 8, 16])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_virtual_ranks_on_the_host_equal_one_rank(monkeypatch, P, deduplicate):
    """The twin that stands in for the kernels above, against the order of one rank's rows."""
    monkeypatch.setattr(virtual, "ops", host)
    kinds = ["random", "one expert", "holes", "uneven"]
    parts = [tokens(p, P, "empty rank" if p == 1 else kinds[p % 4], 6, torch.float64) for p in range(P)]
    x, idx, weight, dy = (list(t) for t in zip(*parts))
    many = virtual.dispatch(x, idx, weight, num_experts=E, deduplicate=deduplicate)
    one = virtual.dispatch([torch.cat(x)], [torch.cat(idx)], [torch.cat(weight)], num_experts=E, deduplicate=False)
    assert torch.equal(torch.cat(many.rows), one.rows[0]) and torch.equal(torch.cat(many.count), one.count[0])
    whole = [torch.cat(many.rows) * 3]
    split = list(whole[0].split([len(r) for r in many.rows]))
    assert torch.equal(torch.cat(virtual.combine(split, many)), virtual.combine(whole, one)[0])
    got, want = virtual.combine_bwd(dy, split, many), virtual.combine_bwd([torch.cat(dy)], whole, one)
    assert torch.equal(torch.cat(got[0]), want[0][0]) and torch.equal(torch.cat(got[1]), want[1][0])
    assert torch.equal(torch.cat(virtual.dispatch_bwd(got[0], many)), virtual.dispatch_bwd(want[0], one)[0])

"""On a card: processes that write into each other's memory move the bits that one process playing all ranks moves.

Four processes share one GPU (with or without MPS), as `moe.dispatch=cuda_ipc` does; a process that is killed, or whose counts do
not add up, ends in a report on the others. The CPU twin of the protocol is in test_peer_dispatch.py. Not covered: NVLink.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megamoe.ops.moe_dispatch import combine, cuda, peers, virtual
from megamoe.testing.distributed import run_distributed

pytestmark = pytest.mark.gpu
RANKS, E, A, D = 4, 64, 8, 520


def ready():
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


def parts(kind: str, call: int):
    """Every rank's (x, idx, weight, dy), the same on all: no collective is needed to know them."""
    out = []
    for rank in range(RANKS):
        gen = torch.Generator().manual_seed(1000 * call + rank)
        N = 0 if kind == "empty rank" and rank == 1 else 200 + 31 * rank
        score = torch.randn(N, E, generator=gen)
        if kind == "one expert":
            score[:, 5] += 100
        idx = score.topk(A, dim=1).indices
        if kind == "holes":
            idx[torch.rand(N, A, generator=gen) < 0.3] = -1
        make = lambda *s: torch.randn(s, generator=gen).cuda()  # noqa: E731
        out.append((make(N, D).bfloat16(), idx.cuda(), make(N, A), make(N, D).bfloat16()))
    return out


def start(patience_s: float):
    from megamoe.ops.moe_dispatch import cuda_ipc

    cuda_ipc.load()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    cuda_ipc.check_hosts(dist.group.WORLD)
    return dist.get_rank(), peers.Windows(dist.group.WORLD, cuda_ipc.DeviceMemory(), torch.ops.megamoe, "cuda_ipc", patience_s)


def step(windows, rank, everyone, deduplicate=True):
    x, idx, weight, dy = everyone[rank]
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rows, count, handle = peers.dispatch(x, idx, weight, num_experts=E, windows=windows, deduplicate=deduplicate)
    y = combine(rows * 3, handle)
    return rows.detach(), count, y.detach(), *torch.autograd.grad(y, [x, weight], dy)


def played(everyone, rank):
    x, idx, weight, dy = (list(t) for t in zip(*everyone))
    many = virtual.dispatch(x, idx, weight, num_experts=E, deduplicate=False)
    out = [r * 3 for r in many.rows]
    dout, dweight = virtual.combine_bwd(dy, out, many)
    dx = virtual.dispatch_bwd([d * 3 for d in dout], many)
    return many.rows[rank], many.count[rank], virtual.combine(out, many)[rank], dx[rank], dweight[rank]


def bits(repeats: int):
    rank, windows = start(60.0)
    for call, kind in enumerate(["random", "one expert", "empty rank", "holes"]):
        everyone = parts(kind, call)
        want = played(everyone, rank)
        for repeat in range(repeats):
            got = step(windows, rank, everyone, deduplicate=repeat % 2 == 0)
            for name, a, b in zip(("rows", "count", "y", "dx", "dweight"), got, want):
                assert torch.equal(a, b), (kind, name, repeat)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(200):
        windows.meet("timing")
    end.record()
    torch.cuda.synchronize()
    windows.check()
    dist.barrier()
    dist.destroy_process_group()
    return begin.elapsed_time(end) * 5


def test_processes_move_the_bits_of_virtual_ranks_again_and_again():
    ready()
    meeting_us = run_distributed(bits, RANKS, 25, timeout_s=150)
    print(f"a meeting of {RANKS} ranks on one card: {max(meeting_us):.1f} us")


def over_hosts():
    """Two pretended hosts of two: rows are those of flat dispatch, sums within two roundings of bf16."""
    from megamoe.ops.moe_dispatch import cuda_ipc, hierarchical

    rank, _ = start(60.0)
    windows_of = lambda here: peers.Windows(here, cuda_ipc.DeviceMemory(), torch.ops.megamoe, "hierarchical")  # noqa: E731
    hosts = hierarchical.find_hosts(dist.group.WORLD, f"host{rank // 2}", windows_of)
    worst = 0.0
    for call, kind in enumerate(["random", "one expert", "empty rank", "holes"]):
        everyone = parts(kind, call)
        x, idx, weight, dy = everyone[rank]
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rows, count, handle = hierarchical.dispatch(x, idx, weight, num_experts=E, hosts=hosts)
        y = combine(rows * 3, handle)
        got = rows.detach(), count, y.detach(), *torch.autograd.grad(y, [x, weight], dy)
        want = played(everyone, rank)
        for i, (a, b) in enumerate(zip(got, want)):
            if i in (0, 1, 4):
                assert torch.equal(a, b), (kind, i)
            elif len(b):
                worst = max(worst, ((a - b).abs().double().amax() / b.abs().double().amax()).item())
    dist.barrier()
    return worst


def test_two_pretended_hosts_give_flat_rows_and_sums_to_two_roundings():
    ready()
    assert max(run_distributed(over_hosts, RANKS, timeout_s=90)) <= 4 * 2**-8  # of the largest: parts on two hosts may cancel


def broken(fault: str):
    """What this rank reports when rank 2 does `fault` in its second call."""
    rank, windows = start(3.0)
    everyone = parts("random", 0)
    step(windows, rank, everyone)
    torch.cuda.synchronize()
    if rank == 2 and fault == "lies":

        class Liar:
            def __getattr__(self, name):
                return getattr(torch.ops.megamoe, name)

            def moe_share_counts(self, line, counts, me):
                torch.ops.megamoe.moe_share_counts(line + (torch.arange(len(line), device="cuda") == 3).int(), counts, me)

        windows.ops = Liar()
    if rank == 2 and fault == "stops":
        dist.barrier()  # alive, its memory too, and silent until the others have reported
        return "stopped"
    begin, text = time.monotonic(), "nothing"
    try:
        step(windows, rank, everyone)
        torch.cuda.synchronize()
        windows.check()
    except peers.PeerLost as error:
        text = f"{time.monotonic() - begin:.1f} s: {error}"
    dist.barrier()
    return text


def test_a_silent_peer_is_named_on_every_other_rank():
    ready()
    found = run_distributed(broken, RANKS, "stops", timeout_s=60)
    for rank in (0, 1, 3):
        assert re.search(r"ranks \[2\] did not arrive within 3 s|gave up", found[rank]), found
    assert any("ranks [2] did not arrive" in found[rank] for rank in (0, 1, 3)), found


def test_counts_that_do_not_add_up_are_reported_alike_on_every_rank():
    ready()
    texts = {text.split(": ", 1)[1] for text in run_distributed(broken, RANKS, "lies", timeout_s=60)}
    assert len(texts) == 1 and "rank 2 announced" in texts.pop()


def killed(folder: str):
    rank, windows = start(5.0)
    everyone = parts("random", 0)
    step(windows, rank, everyone)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    text = "nothing"
    try:
        for _ in range(50):
            step(windows, rank, everyone)
        torch.cuda.synchronize()
        windows.check()
    except (peers.PeerLost, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    with open(os.path.join(folder, f"rank{rank}"), "w") as file:
        file.write(text)
    os._exit(0)  # the card may be in any state: no clean-up is asked of it


def test_a_killed_peer_ends_in_a_report_on_every_other_rank(tmp_path):
    ready()
    context = torch.multiprocessing.get_context("spawn")
    from megamoe.testing.distributed import _entry, free_port

    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=_entry, args=(killed, rank, RANKS, port, queue, (str(tmp_path),)), daemon=True) for rank in range(RANKS)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(timeout=90)
    assert not any(p.is_alive() for p in processes), "a rank hangs"
    texts = {rank: (tmp_path / f"rank{rank}").read_text() for rank in (0, 1, 3)}
    print(texts)
    assert all("PeerLost" in t and ("[2]" in t or "gave up" in t) for t in texts.values()), texts


def test_virtual_ranks_on_streams_of_their_own_meet_and_report():
    ready()
    cuda.load()
    P, report = 4, [torch.zeros(6, dtype=torch.int32, pin_memory=True) for _ in range(4)]
    flags = [torch.zeros(P, dtype=torch.int32, device="cuda") for _ in range(P)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(P)]
    for epoch in (1, 2, 3):
        for me in range(P):
            if epoch < 3 or me != 1:
                with torch.cuda.stream(streams[me]):
                    torch.ops.megamoe.moe_meet(flags, me, epoch, 2.0, report[me])
    torch.cuda.synchronize()
    assert int(report[1][0]) == 0
    for me in (0, 2, 3):
        assert report[me][:2].tolist() == [1, 3], report[me]
    assert any(int(report[me][2 + 1]) == 2 for me in (0, 2, 3))

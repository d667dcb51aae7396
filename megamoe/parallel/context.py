"""Context parallelism: layers that see a contiguous slice of the stream and give every token its whole past.

KDA. The state after a fragment is an affine function of the state before it: S_out = M S_in + S̃. Each rank finds (M, S̃)
of its last document's tokens, one all_gather tells everyone, and each composes what precedes its own first document.
Convolutions need the last taps-1 tokens of the neighbour. Both are passed to the plain layer as the `state` of its first
document.

MLA. Causal scores are unbalanced over contiguous slices, so the layer moves to a balanced layout and back: the stream is cut
into 2·cp chunks, rank r computes chunks r and 2·cp-1-r. All ranks gather the latents (kv_lora_rank + rope wide, not the
expanded keys) and expand the prefix they need. The hidden states move twice, 2·D numbers per token, against O(T) scores.

When no document reaches over a border nothing is exchanged; every rank knows that from the document starts.

Letters: T tokens of the slice, D model width, H heads of this rank, K head width, N documents in the slice, r a cp rank.
Source: arXiv:2607.24653 sec. 5.1.2 (KDA), arXiv:2405.04434 (latents); code ours. Checked: architecture notes §2.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.layers.kda import KDA, KDAState
from megamoe.layers.mla import MLA
from megamoe.layers.stream import Stream
from megamoe.ops.collectives import all_gather, all_to_all, halo
from megamoe.parallel.mesh import Axis
from megamoe.parallel.stream import ShardedStream, Slice
from megamoe.utils.torch_compat import all_gather_single


class ContextKDA(KDA):
    """KDA on a cp slice. Parameters and single-rank behaviour are `KDA`'s."""

    def forward(self, x_TD: torch.Tensor, stream: Stream, *, state: KDAState | None = None, output_state: bool = False):
        if not _crossed(stream):
            return super().forward(x_TD, stream, state=state, output_state=output_state)
        assert state is None and not output_state, "a sliced stream starts and ends within the step"
        return super().forward(x_TD, stream, state=self._history(x_TD, stream))

    def _history(self, x_TD: torch.Tensor, stream: ShardedStream) -> KDAState:
        """What the convolutions of each document's first tokens read: the neighbour's last tokens for the first one.

        The layer input travels, once, and is projected here: D numbers a token instead of the three projections.
        """
        taps = self.config.conv_kernel - 1
        before_WD = halo(x_TD, taps, stream.cp.group)
        first, start = stream.mine.documents[0][0], stream.mine.start
        same_document_W = torch.arange(start - taps, start, device=x_TD.device) >= first
        before_WD = before_WD * same_document_W[:, None]
        histories = []
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            raw_1WC = proj(before_WD).unsqueeze(0)
            others = raw_1WC.new_zeros(len(stream.mine.documents) - 1, *raw_1WC.shape[1:])
            histories.append(torch.cat([raw_1WC, others]))
        return KDAState(None, *histories)

    def core(self, x_TD: torch.Tensor, stream: Stream):
        op = super().core(x_TD, stream)
        return ContextKDACore(op, stream) if _crossed(stream) else op


class ContextKDACore:
    """The `kda_chunk` op with the first document's initial state taken from the ranks in front."""

    def __init__(self, op, stream: ShardedStream):
        self.op, self.stream = op, stream

    def __call__(self, q_THK, k_THK, v_THV, g_THK, beta_TH, *, cu_seqlens, initial_state_NHKV=None, output_final_state=False, **gate):
        assert initial_state_NHKV is None and not output_final_state
        rows = (q_THK, k_THK, v_THV, g_THK, beta_TH)
        S_HKV = incoming_state(self.op, rows, gate, self.stream)
        others = S_HKV.new_zeros(cu_seqlens.shape[0] - 2, *S_HKV.shape)
        return self.op(*rows, cu_seqlens=cu_seqlens, initial_state_NHKV=torch.cat([S_HKV.unsqueeze(0), others]), **gate)


def incoming_state(op, rows, gate: dict, stream: ShardedStream) -> torch.Tensor:
    """(H, K, V): the state with which this rank's first document enters; zero where it starts here.

    Args:
        op: a `kda_chunk` backend.
        rows: its q, k, v, g, beta of the slice. gate: its other arguments.

    Both maps come out of the op itself, so every backend serves: from a zero state, the final state is S̃; with v = 0 and
    the identity as the state, it is M. Collective over cp. Gradients are exact, through both.
    """
    mine = stream.mine
    q_THK, _, v_THV, _, _ = rows
    H, K, V = *q_THK.shape[1:], v_THV.shape[-1]
    state_dtype = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    M_HKK = q_THK.new_zeros(H, K, K, dtype=state_dtype)
    S_HKV = q_THK.new_zeros(H, K, V, dtype=state_dtype)
    if mine.continues_after:
        begin = max(mine.documents[-1][0], mine.start) - mine.start
        q, k, v, g, beta = (x[begin:] for x in rows)
        _, S_1HKV = op(q, k, v, g, beta, output_final_state=True, **gate)
        S_HKV = S_1HKV[0]
        if mine.one_document:
            identity = torch.eye(K, dtype=state_dtype, device=q.device).expand(1, H, K, K).contiguous()
            _, M_1HKK = op(q, k, k.new_zeros(k.shape), g, beta, initial_state_NHKV=identity, output_final_state=True, **gate)
            M_HKK = M_1HKK[0]
    # The anchor makes the exchange part of the graph on every rank, also where (M, S̃) are constants.
    return _IncomingState.apply(M_HKK, S_HKV, q_THK, stream.cp, [s.continues_after for s in stream.slices], [s.one_document for s in stream.slices])


class _IncomingState(torch.autograd.Function):
    """Compose the fragments in front: S_in(r+1) = S_out(r) where the document goes on, S_out(r) = [M_r S_in(r)] + S̃_r.

    The bracket only where one document fills slice r. Backward, with G(r) the whole gradient of S_in(r):
        dS_out(r) = G(r+1) where the document goes on;  dS̃_r = dS_out(r);  dM_r = dS_out(r) S_in(r)^T
        G(r) = what rank r's own layer says + [M_r^T dS_out(r)]
    One all_gather each way: (M, S̃), then (M, dS_in). Kept in between: M and S_in of this rank.
    """

    @staticmethod
    def forward(ctx, M_HKK, S_HKV, anchor, cp, goes_on, passes):
        M_rHKK, S_rHKV = _gather_pair(M_HKK, S_HKV, cp)
        into = torch.zeros_like(S_HKV)
        for r in range(cp.rank):
            out = S_rHKV[r] + (M_rHKK[r] @ into if passes[r] else 0)
            into = out if goes_on[r] else torch.zeros_like(out)
        ctx.cp, ctx.goes_on, ctx.passes = cp, goes_on, passes
        ctx.save_for_backward(M_HKK, into)
        return into

    @staticmethod
    def backward(ctx, dinto_HKV):
        M_HKK, into_HKV = ctx.saved_tensors
        M_rHKK, G_rHKV = _gather_pair(M_HKK, dinto_HKV, ctx.cp)
        dout = torch.zeros_like(dinto_HKV)
        for r in range(ctx.cp.size - 1, ctx.cp.rank, -1):
            G = G_rHKV[r] + (M_rHKK[r].mT @ dout if ctx.passes[r] else 0)
            dout = G if ctx.goes_on[r - 1] else torch.zeros_like(G)
        dM = dout @ into_HKV.mT if ctx.passes[ctx.cp.rank] else None
        return dM, dout if ctx.goes_on[ctx.cp.rank] else None, None, None, None, None


def _gather_pair(a_HKK: torch.Tensor, b_HKV: torch.Tensor, cp: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of all ranks, in one all_gather."""
    mine = torch.cat([a_HKK, b_HKV], -1).contiguous()
    out = mine.new_empty(cp.size, *mine.shape)
    all_gather_single(out.flatten(0, 1), mine, group=cp.group)
    return out.split([a_HKK.shape[-1], b_HKV.shape[-1]], -1)


@dataclass(frozen=True)
class Balance:
    """The 2·cp chunks of a stream and who computes which: rank r takes chunks r and 2·cp-1-r.

    Attributes:
        borders: 2·cp+1 tokens; slice r is chunks 2r and 2r+1.
    """

    borders: tuple[int, ...]

    @staticmethod
    def of(slices: tuple[Slice, ...]) -> Balance:
        borders = [s.start + part * (s.stop - s.start) // 2 for s in slices for part in (0, 1)]
        return Balance((*borders, slices[-1].stop))

    @property
    def ranks(self) -> int:
        return (len(self.borders) - 1) // 2

    def owner(self, chunk: int) -> int:
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def size(self, chunk: int) -> int:
        return self.borders[chunk + 1] - self.borders[chunk]

    def to_balanced(self, x: torch.Tensor, cp: Axis) -> torch.Tensor:
        """Rows of this rank's slice -> rows of its two balanced chunks, the earlier chunk first."""
        mine = [(c, self.owner(c)) for c in (2 * cp.rank, 2 * cp.rank + 1)]
        if mine[0][1] > mine[1][1]:  # all_to_all sends blocks in rank order
            first = self.size(mine[0][0])
            x = torch.cat([x[first:], x[:first]])
        send = [sum(self.size(c) for c, owner in mine if owner == r) for r in range(cp.size)]
        receive = [sum(self.size(c) for c in self.chunks(cp.rank) if c // 2 == r) for r in range(cp.size)]
        return all_to_all(x, send, receive, cp.group)

    def to_slice(self, x: torch.Tensor, cp: Axis) -> torch.Tensor:
        """The way back."""
        mine = [(c, self.owner(c)) for c in (2 * cp.rank, 2 * cp.rank + 1)]
        send = [sum(self.size(c) for c in self.chunks(cp.rank) if c // 2 == r) for r in range(cp.size)]
        receive = [sum(self.size(c) for c, owner in mine if owner == r) for r in range(cp.size)]
        x = all_to_all(x, send, receive, cp.group)
        if mine[0][1] > mine[1][1]:
            second = self.size(mine[1][0])
            x = torch.cat([x[second:], x[:second]])
        return x

    def gathered_to_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks' balanced chunks, rank by rank -> rows of the stream."""
        order = [c for r in range(self.ranks) for c in self.chunks(r)]
        parts = dict(zip(order, x.split([self.size(c) for c in order])))
        return torch.cat([parts[c] for c in range(2 * self.ranks)])


class ContextMLA(MLA):
    """MLA on a cp slice. Parameters and single-rank behaviour are `MLA`'s."""

    def forward(self, x_TD: torch.Tensor, stream: Stream) -> torch.Tensor:
        if not _crossed(stream):
            return super().forward(x_TD, stream)
        cp, balance = stream.cp, Balance.of(stream.slices)
        device = x_TD.device
        pieces = [Slice.of(_starts(stream.slices), balance.borders[c], balance.borders[c + 1]) for c in balance.chunks(cp.rank)]
        x_TD = balance.to_balanced(x_TD, cp)
        positions_T = torch.cat([piece.positions(device) for piece in pieces])
        latent_TM = self.latent(x_TD, positions_T)
        sizes = [sum(balance.size(c) for c in balance.chunks(r)) for r in range(cp.size)]
        latent_SM = balance.gathered_to_stream(all_gather(latent_TM, cp.group, sizes))
        k_SHQ, v_SHV = self.keys_values(latent_SM[: pieces[-1].stop])
        # For every document of each chunk: the queries here, and the keys from the document's start up to the chunk's end.
        spans = [(max(a, piece.start), a, min(b, piece.stop)) for piece in pieces for a, b in piece.documents]
        q_THQ = self.queries(x_TD, positions_T)
        o_THV = self.attend(
            q_THQ,
            torch.cat([k_SHQ[a:b] for _, a, b in spans]),
            torch.cat([v_SHV[a:b] for _, a, b in spans]),
            cu_seqlens=_cumulative([b - first for first, _, b in spans], device),
            cu_seqlens_k=_cumulative([b - a for _, a, b in spans], device),
            max_seqlen=max(b - a for _, a, b in spans),
        )
        return balance.to_slice(self.output(o_THV, x_TD), cp)


def _crossed(stream: Stream) -> bool:
    return isinstance(stream, ShardedStream) and stream.crossed


def _starts(slices: tuple[Slice, ...]) -> list[int]:
    """Document starts of the whole stream, its end last."""
    return [*sorted({a for s in slices for a, _ in s.documents}), slices[-1].stop]


def _cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    total = [0]
    for n in lengths:
        total.append(total[-1] + n)
    return torch.tensor(total, dtype=torch.int32, device=device)

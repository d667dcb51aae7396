"""Balanced placement: which rank computes which of an expert's slots, so that every rank computes the same number.

Every rank keeps its own E/P experts and may borrow at most E/P experts of others for one micro-batch. A plan that loads all
ranks equally always exists:

    repeat:  take a rank below its quota and one above it, and move slots from the second to the first until the first is
             full; it is never touched again.

A rank is filled once, from one rank, whose slots all belong to its own E/P experts (only full ranks hold foreign slots, and a
full rank gives nothing away): hence at most E/P borrowed experts, whatever the routing. So buffers of E/P extra experts and of
exactly quota rows are always enough: shapes are static and nothing waits for the host.

Source: arXiv:2607.24653 sec. 5.2.1 and app. E (the theorem); code ours.
Letters: E experts, P ranks, e = E/P experts a rank owns, N tokens of a rank, A slots per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.ops.backends import cuda_backend
from megamoe.ops.registry import choose, register

OP = "moe_plan"


class Plan(NamedTuple):
    """Who computes what.

    Attributes:
        share_EP: int32 slots of each expert that each rank computes. Rows sum to the counts, columns to the quotas.
        borrowed_Pe: int32 ids of the foreign experts of each rank, ascending, -1 behind the last; at most e.
    """

    share_EP: torch.Tensor
    borrowed_Pe: torch.Tensor


def quotas(total: int, ranks: int) -> list[int]:
    """Slots per rank: equal, the first `total % ranks` ranks one more. With no empty slots total = P N A divides evenly."""
    return [total // ranks + (p < total % ranks) for p in range(ranks)]


def plan(count_E: torch.Tensor, ranks: int) -> Plan:
    """Balance one layer's micro-batch.

    Args:
        count_E: (E,) integers, slots of each expert summed over all source ranks; the same on every rank.
        ranks: P; rank p owns experts p e … (p+1) e - 1.

    Returns: the plan, on count_E's device; equal counts give equal bits, so every rank computes it for itself.

    Raises:
        ValueError: E not a multiple of P.

    Of the ranks above quota the fullest gives to the emptiest (ties to the lower rank), its largest experts first (ties to
    the lower id), so that few experts travel. No collective. `cuda` never syncs the host. Twin: reference.py.
    """
    validate(count_E, ranks)
    return choose(OP, device=count_E.device.type, E=count_E.shape[0], P=ranks)(count_E, ranks)


def validate(count_E, ranks: int) -> None:
    """Check the contract without touching the device."""
    if count_E.dim() != 1 or count_E.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_plan: counts are {count_E.dtype} {tuple(count_E.shape)}, expected (E,) integers")
    if ranks < 1 or count_E.shape[0] % ranks:
        raise ValueError(f"moe_plan: {count_E.shape[0]} experts do not divide over {ranks} ranks; use a divisor of {count_E.shape[0]}")


def assign(expert_of_slot, place_in_expert, plan: Plan):
    """The rank that computes each slot: an expert's slots, in their fixed order, fill its ranks' shares in this order: its
    owner first, then borrowers ascending.

    Args:
        expert_of_slot: integers of any shape, -1 for an empty slot.
        place_in_expert: same shape, the slot's place among all slots of its expert (source rank, then token).

    Returns:
        rank: int64, -1 for an empty slot.
        place: int64, the slot's place among those of its expert that this rank computes.
    """
    E, P = plan.share_EP.shape
    owner_E1 = torch.arange(E, device=plan.share_EP.device)[:, None] // (E // P)
    rank_P = torch.arange(P, device=plan.share_EP.device)
    order_EP = torch.where(rank_P == owner_E1, -1, rank_P).argsort(1)  # owner, then the others ascending
    end_EP = plan.share_EP.long().gather(1, order_EP).cumsum(1)
    expert = expert_of_slot.clamp(min=0).long()
    passed = (place_in_expert[..., None] >= end_EP[expert]).sum(-1).clamp(max=P - 1)
    rank = order_EP[expert].gather(-1, passed[..., None])[..., 0]
    begin = (end_EP - plan.share_EP.long().gather(1, order_EP))[expert].gather(-1, passed[..., None])[..., 0]
    empty = expert_of_slot < 0
    return torch.where(empty, -1, rank), torch.where(empty, -1, place_in_expert.long() - begin)


def _load_reference():
    from megamoe.ops.moe_plan.reference import plan

    return plan


register(OP, "cuda", **cuda_backend("megamoe.ops.moe_plan.cuda"))
register(OP, "reference", load=_load_reference)

"""Rows to the ranks that compute them and back, driven by a table every rank already has.

All ranks know every rank's counts and the split before a row is sent, so each knows how many rows of which expert it
sends to and gets from whom (`moeless.policy.deal`), and nothing is negotiated. Each pair is computed exactly once. The
weighted sum over a token's experts runs in slot order, as in transformers' grouped path, so it does not depend on who
computed what.

Legend: T tokens, K experts a token, N = T*K pairs held here, E experts, G ranks, R rows received, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.engine.ep import RankGroup, all_to_all


@dataclass(frozen=True, slots=True)
class Route:
    """How this rank's pairs travel; made before the dispatch and needed again by the combine.

    Attributes:
        order_N: the pair (t*K + k) at each position of the send buffer, by destination and then by expert.
        send_counts: rows for each rank [G].
        receive_counts: rows from each rank [G].
        regroup_R: the received position at each position of the buffer grouped by expert; None where it is grouped.
        counts_E: rows of each expert in the grouped buffer.
    """

    order_N: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    regroup_R: torch.Tensor | None
    counts_E: list[int]


def plan_route(ids_TK: torch.Tensor, send_EG: NDArray[np.int64], receive_GE: NDArray[np.int64]) -> Route:
    """The route of this rank's pairs.

    Args:
        send_EG: pairs held here of each expert for each rank; rows must count exactly the ids in `ids_TK`.
        receive_GE: pairs of each rank of each expert to be computed here.
    """
    num_experts, num_ranks = send_EG.shape
    order_N = ids_TK.reshape(-1).argsort(stable=True)  # by expert
    if num_ranks > 1:
        destination_N = np.repeat(np.tile(np.arange(num_ranks), num_experts), send_EG.reshape(-1))
        by_rank_N = torch.from_numpy(destination_N.argsort(kind="stable"))
        order_N = order_N[by_rank_N.to(order_N.device)]
    expert_R = np.repeat(np.tile(np.arange(num_experts), num_ranks), receive_GE.reshape(-1))
    regroup = None
    if np.count_nonzero(receive_GE.any(1)) > 1:
        regroup = torch.from_numpy(expert_R.argsort(kind="stable")).to(order_N.device)
    return Route(
        order_N=order_N,
        send_counts=send_EG.sum(0).tolist(),
        receive_counts=receive_GE.sum(1).tolist(),
        regroup_R=regroup,
        counts_E=receive_GE.sum(0).tolist(),
    )


def dispatch(x_TH: torch.Tensor, top_k: int, route: Route, group: RankGroup) -> Callable[[], torch.Tensor]:
    """Start sending; the call of the result waits and gives the received rows [R, H] grouped by expert."""
    wait = group.start_all_to_all(x_TH[route.order_N // top_k], route.send_counts, route.receive_counts)

    def receive() -> torch.Tensor:
        rows_RH = wait()
        return rows_RH if route.regroup_R is None else rows_RH[route.regroup_R]

    return receive


def combine(y_RH: torch.Tensor, weights_TK: torch.Tensor, route: Route, group: RankGroup) -> torch.Tensor:
    """Send computed rows home and sum each token's experts in slot order: [T, H].

    The sum is taken in the wider of the rows' and the weights' types and rounded once, to the rows' type.
    """
    if route.regroup_R is not None:
        ungrouped_RH = torch.empty_like(y_RH)
        ungrouped_RH[route.regroup_R] = y_RH
        y_RH = ungrouped_RH
    home_NH = all_to_all(group, y_RH, route.receive_counts, route.send_counts)
    pairs_NH = torch.empty_like(home_NH)
    pairs_NH[route.order_N] = home_NH
    num_tokens, top_k = weights_TK.shape
    weighted_TKH = pairs_NH.view(num_tokens, top_k, y_RH.shape[-1]) * weights_TK.unsqueeze(-1)
    return weighted_TKH.sum(1).to(y_RH.dtype)


def moe_reference(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What an expert-parallel layer has to equal: every token alone, its experts in slot order.

    Args:
        expert: (expert id, rows) -> rows.
    """
    out_TH = torch.zeros_like(x_TH)
    for token, (ids_K, weights_K) in enumerate(zip(ids_TK.tolist(), weights_TK, strict=True)):
        row = x_TH[token : token + 1]
        parts = [expert(e, row) * weight for e, weight in zip(ids_K, weights_K, strict=True)]
        out_TH[token] = torch.stack(parts).sum(0)[0].to(x_TH.dtype) if parts else 0
    return out_TH


def balanced_ids(ids_TK: torch.Tensor, num_experts: int, first: int) -> torch.Tensor:
    """Ids dealt round robin from expert `first` in place of the router's: what the lossy `oracle` computes."""
    return (first + torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)) % num_experts

"""`Judge`: the accuracy of predicted ids on one part of the split, in all readings of the word.

Legend: N rows of the part, K experts a token, E experts, I iterations.
"""

from __future__ import annotations

import numpy as np
import torch

from moeless.train.inputs import held_out_iterations
from moeless.train.rows import PHASE_NAMES
from moeless.train.scores import PearsonSum, PredictionScore
from moeless.train.store import CaptureStore


class Judge:
    """Scores predictions for the rows where `mask_T` is true; one serves all layers and predictors of a capture."""

    def __init__(self, store: CaptureStore, mask_T: torch.Tensor, batch_tokens: int) -> None:
        self.rows_N = mask_T.nonzero().squeeze(1)
        phases_N = store.column("phases")[self.rows_N].numpy()
        iterations_N = store.column("iterations")[self.rows_N].numpy()
        self.iteration_N, self.phase_N = held_out_iterations(phases_N, iterations_N, batch_tokens)

    def judge(
        self, predicted_NK: np.ndarray, actual_NK: np.ndarray, num_experts: int, pearson: PearsonSum | None = None
    ) -> dict[str, float]:
        """The four metrics over all rows, and token recall of each phase; load pairs go to `pearson`."""
        return self.judge_loads(predicted_NK, self.loads(predicted_NK, num_experts), actual_NK, pearson)

    def judge_loads(
        self,
        predicted_NK: np.ndarray,
        predicted_IE: np.ndarray,
        actual_NK: np.ndarray,
        pearson: PearsonSum | None = None,
    ) -> dict[str, float]:
        """The same where loads are predicted apart from ids."""
        actual_IE = self.loads(actual_NK, predicted_IE.shape[1])
        score = PredictionScore()
        score.add_tokens(predicted_NK, actual_NK)
        score.add_loads(predicted_IE, actual_IE)
        if pearson is not None:
            pearson.add(predicted_IE, actual_IE)
        found = score.summary()
        assert found is not None, "a part of the split is never empty"
        for phase, name in enumerate(PHASE_NAMES):
            keep_N = self.phase_N == phase
            if keep_N.any():
                part = PredictionScore()
                part.add_tokens(predicted_NK[keep_N], actual_NK[keep_N])
                found[f"token_recall_{name}"] = part.hits / (part.num_tokens * part.top_k)
        return found

    def history(self, actual_IE: np.ndarray, before_E: np.ndarray, window: int) -> np.ndarray:
        """What the loads of up to `window` earlier iterations of the same phase say of each [I, E].

        `before_E` is what is known before the first iteration: all loads of the training part.
        """
        first_I = np.unique(self.iteration_N, return_index=True)[1]
        phase_I = self.phase_N[first_I]
        seen_IE = np.empty(actual_IE.shape)
        for phase in np.unique(phase_I):
            own = np.flatnonzero(phase_I == phase)
            for position, iteration in enumerate(own):
                earlier = own[max(0, position - window) : position]
                seen_IE[iteration] = actual_IE[earlier].sum(0) if len(earlier) else before_E
        return seen_IE

    def loads(self, ids_NK: np.ndarray, num_experts: int) -> np.ndarray:
        """Tokens by iteration and expert [I, E]."""
        num_iterations = int(self.iteration_N.max()) + 1
        cells = self.iteration_N[:, None] * num_experts + ids_NK
        return np.bincount(cells.ravel(), minlength=num_iterations * num_experts).reshape(num_iterations, num_experts)

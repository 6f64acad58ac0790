"""Whether balancing is worth it for this traffic, in one sentence a user can act on."""

from __future__ import annotations

from typing import Any

WORTH_IT = 0.05
"""Share of the iteration's time that a method must save to be worth its memory and its risk."""

MORE_MEMORY = 0.02
"""Share of added memory below which it is not mentioned."""


def verdict(rows: list[dict[str, Any]], without_prediction: dict[str, Any] | None) -> dict[str, Any]:
    """Compare the best method that could be deployed with static expert parallelism.

    Args:
        rows: one a balancer, `static` among them (see `simulate_rows.make_row`). Lossy methods and the bound do not
            count: the one changes the model's output, the other knows the future.
        without_prediction: the row of moeless-roofline on history alone, when the rows used predictions.
    """
    static = next(row for row in rows if row["name"] == "static")
    candidates = [row for row in rows if not row["lossy"] and row["name"] not in ("static", "bound")]
    best = min(candidates, key=lambda row: float(row["iteration_ms"]), default=static)
    gain = 1 - best["iteration_ms"] / static["iteration_ms"]
    memory = best["resident_gb"] / static["resident_gb"] - 1
    worth_it = gain >= WORTH_IT
    waiting = f"static ranks wait for one with {static['max_over_mean']:.2f}x the mean load"
    if worth_it:
        reason = f"{waiting}; {best['name']} cuts the iteration by {gain:.1%} ({_layer_change(static, best)})"
        reason += f" for {memory:.0%} more expert memory" if memory > MORE_MEMORY else " with no more expert memory"
    elif best is static or gain <= 0:
        reason = f"do nothing: {waiting}, and no method here is faster ({static['layer_ms']['mean']:.3g} ms a layer)"
    else:
        reason = (
            f"do nothing: {waiting}, but the best method, {best['name']}, would save only {gain:.1%} of an iteration"
        )
    found = {
        "worth_it": worth_it,
        "reason": reason,
        "best": best["name"],
        "imbalance": static["max_over_mean"],
        "gain": round(gain, 4),
        "more_memory": round(memory, 4),
    }
    return found | _worth_of_prediction(rows, without_prediction)


def _layer_change(static: dict[str, Any], best: dict[str, Any]) -> str:
    return f"{static['layer_ms']['mean']:.3g} -> {best['layer_ms']['mean']:.3g} ms a layer"


def _worth_of_prediction(rows: list[dict[str, Any]], without: dict[str, Any] | None) -> dict[str, Any]:
    """What the predictor adds over history, so that it isn't credited with what history does as well."""
    ours = next((row for row in rows if row["name"] == "moeless-roofline"), None)
    if without is None or ours is None:
        return {}
    gain = 1 - ours["layer_ms"]["mean"] / without["layer_ms"]["mean"]
    says = f"the predictor saves {gain:.1%} of layer time over history alone"
    if gain < 0.01:
        says = f"history alone does as well as the predictor ({gain:+.1%} of layer time)"
    return {"prediction_gain": round(gain, 4), "prediction_reason": says}

"""How long experts stay without a token, by the shared clock: when to look, and what leaves then."""

from __future__ import annotations

import math

from moeless.engine.residency import Eviction, Residency

_PARTS = 8
"""A replica leaves between 1 and 1 + 1 / _PARTS keep-alive times after its last token; nobody looks more often."""


class KeepAlive:
    """Asked at every step and, while there is none, as often as it says itself; the same on every rank."""

    def __init__(self, residency: Residency, keep_alive_s: float, *, to_zero: bool) -> None:
        """See `Residency.expire` for `to_zero`."""
        self._residency, self._to_zero = residency, to_zero
        self._keep_alive_us = round(keep_alive_s * 1e6)
        self._looked_us: int | None = None

    def look(self, now_us: int, *, is_idle: bool = False) -> list[Eviction]:
        """What leaves at `now_us`; between idle times only looked for every now and then.

        Time begins for all experts at the first call: the clock of an earlier group says nothing here.
        """
        if self._looked_us is None:
            self._residency.start_clock(now_us)
            self._looked_us = now_us
        if not is_idle and now_us - self._looked_us < self._keep_alive_us // _PARTS:
            return []
        self._looked_us = now_us
        return self._residency.expire(now_us, self._keep_alive_us, to_zero=self._to_zero)

    def rest_s(self, now_us: int) -> float:
        """Seconds after which to look again if no token comes until then; infinite when nothing can leave."""
        due_us = self._residency.next_expiry_us(self._keep_alive_us, to_zero=self._to_zero)
        return math.inf if due_us is None else (due_us - now_us + self._keep_alive_us / _PARTS) * 1e-6

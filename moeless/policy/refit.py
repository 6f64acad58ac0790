"""Local search for the roofline split: take an expert off its ranks and pour it back better.

Legend: G ranks, M movable experts. Times are microseconds; `rows` are tokens by movable expert and host.
"""

from __future__ import annotations

from collections.abc import Callable

from moeless.policy.flow import Rows
from moeless.policy.layout import Layout


class Refit:
    """A split in the making: its rows and the time of every rank, always consistent with each other."""

    __slots__ = (
        "alpha",
        "base",
        "beta",
        "bound",
        "floor",
        "hosts",
        "layout",
        "left",
        "on_rank",
        "rows",
        "times",
        "tokens",
    )

    def __init__(
        self,
        base: list[float],
        tokens: list[int],
        layout: Layout,
        floor: float,
        alpha: float,
        beta: float,
        bound: float,
    ) -> None:
        """`base` are the times of the fixed experts [G], `tokens` the movable ones' [M], `bound` a lower bound."""
        self.base = base
        self.tokens = tokens
        self.layout = layout
        self.hosts = layout.hosts
        self.on_rank = layout.on_rank
        self.floor, self.alpha, self.beta = floor, alpha, beta
        self.bound = bound
        self.rows: Rows = []
        self.times = base
        self.left = 0

    def slowest(self) -> float:
        """The time of the slowest rank."""
        return max(self.times)

    def priced(self, rows: Rows) -> list[float]:
        """The times of the ranks under `rows`."""
        times = self.base[:]
        floor, alpha, beta = self.floor, self.alpha, self.beta
        for ranks, row in zip(self.hosts, rows, strict=True):
            for rank, n in zip(ranks, row, strict=True):
                if n:
                    compute = alpha * n
                    times[rank] += (compute if compute > floor else floor) + beta * n
        return times

    def take(self, rows: Rows) -> None:
        """Go on from `rows`."""
        self.rows, self.times = rows, self.priced(rows)

    def take_if_better(self, rows: Rows) -> None:
        """Go on from `rows` if their slowest rank is faster."""
        times = self.priced(rows)
        if max(times) < max(self.times):
            self.rows, self.times = rows, times

    def could_beat(self, part: Callable[[int, int], int]) -> bool:
        """Whether a rule that gives part(expert, host) tokens leaves every rank below the slowest now.

        Looks at the slowest ranks first and stops at the first that decides.
        """
        limit = max(self.times)
        for rank in sorted(range(len(self.times)), key=self.times.__getitem__, reverse=True):
            time = self.base[rank]
            for i, p in self.on_rank[rank]:
                time += self._cost(part(i, p))
            if time >= limit:
                return False
        return True

    def greedy(self) -> Rows:
        """Most tokens first, each expert poured over as few of its hosts as the lower bound allows."""
        times = self.base[:]
        rows: Rows = [[0] * len(ranks) for ranks in self.hosts]
        for i in sorted(range(len(rows)), key=self.tokens.__getitem__, reverse=True):
            if not self.tokens[i]:
                break
            rows[i] = row = self._pour(self.tokens[i], [times[rank] for rank in self.hosts[i]])
            for rank, n in zip(self.hosts[i], row, strict=True):
                if n:
                    compute = self.alpha * n
                    times[rank] += (compute if compute > self.floor else self.floor) + self.beta * n
        return rows

    def repair(self, stop: float, budget: int) -> None:
        """Relieve the slowest rank until it is below `stop`, nothing helps, or `budget` experts were poured anew."""
        self.left = budget
        while self.left > 0 and (top := max(self.times)) > stop:
            rank = self.times.index(top)
            if not self._refit_one(rank, top) and not self._relieve_by_chain(rank, top):
                break

    def _refit_one(self, rank: int, limit: float, banned: int = -1) -> bool:
        """Pour one expert of `rank` anew so that all its hosts end below `limit`."""
        return any(self.rows[i][p] and i != banned and self._refit(i, limit) for i, p in self.on_rank[rank])

    def _relieve_by_chain(self, rank: int, limit: float) -> bool:
        """Move an expert off `rank` whole, and then relieve the host that took it; undone if that fails."""
        for i, p in self.on_rank[rank]:
            if not self.rows[i][p]:
                continue
            for q, host in enumerate(self.hosts[i]):
                if q == p or self.left <= 0:
                    continue
                times, rows = self.times[:], self.rows[:]
                self._move(i, p, q)
                if self.times[rank] < limit and (self.times[host] < limit or self._refit_one(host, limit, banned=i)):
                    return True
                self.times, self.rows = times, rows
        return False

    def _refit(self, i: int, limit: float) -> bool:
        """Pour expert i anew; keep that if all its hosts end below `limit` (a hair, so that the search ends)."""
        self.left -= 1
        if self.left < 0:
            return False
        ranks, times = self.hosts[i], self.times
        floor, alpha, beta = self.floor, self.alpha, self.beta
        without = []
        for rank, n in zip(ranks, self.rows[i], strict=True):
            compute = alpha * n
            without.append(times[rank] - (compute if compute > floor else floor) - beta * n if n else times[rank])
        row = self._pour(self.tokens[i], without)
        after = []
        limit *= 1 - 1e-9
        for n, time in zip(row, without, strict=True):
            if n:
                compute = alpha * n
                time += (compute if compute > floor else floor) + beta * n
            if time >= limit:
                return False
            after.append(time)
        for rank, time in zip(ranks, after, strict=True):
            times[rank] = time
        self.rows[i] = row
        return True

    def _move(self, i: int, p: int, q: int) -> None:
        """Move all of expert i's tokens from its host p to its host q."""
        row = self.rows[i][:]
        moved, there = row[p], row[q]
        row[p], row[q] = 0, there + moved
        self.times[self.hosts[i][p]] -= self._cost(moved)
        self.times[self.hosts[i][q]] += self._cost(there + moved) - self._cost(there)
        self.rows[i] = row

    def _cost(self, n: int) -> float:
        return max(self.floor, self.alpha * n) + self.beta * n if n else 0.0

    def _pour(self, n: int, times: list[float]) -> list[int]:
        """The best way to put n > 0 tokens of one expert on hosts that stand at `times` without it."""
        if len(times) > 2:
            return self._pour_many(n, times)
        first, second = times
        low, high = (first, second) if first <= second else (second, first)
        compute = self.alpha * n
        whole = low + (compute if compute > self.floor else self.floor) + self.beta * n
        part = 0
        if whole > self.bound and whole > high and n > 1:
            per_token = self.alpha + self.beta
            mean = (low + high + per_token * n) * 0.5
            if whole > mean and whole > high + self.floor:
                part = int((mean - high) / per_token) if per_token else n >> 1
                if self.alpha * part < self.floor:  # the floor is paid: use it
                    part = min(int(self.floor / self.alpha), n - 1) if self.alpha else part
        return [n - part, part] if first <= second else [part, n - part]

    def _pour_many(self, n: int, times: list[float]) -> list[int]:
        """`_pour` for three hosts or more.

        Over the m least loaded hosts the level is max(time of the m-th + floor, mean of all with the tokens added);
        the smallest m that reaches the lower bound wins (fewest launches), else the m with the lowest level.
        """
        floor, alpha, per_token = self.floor, self.alpha, self.alpha + self.beta
        order = sorted(range(len(times)), key=times.__getitem__)
        low = times[order[0]]
        best, num, total = low + self._cost(n), 1, low
        for m in range(2, min(len(times), n) + 1):
            if best <= self.bound:
                break
            time = times[order[m - 1]]
            total += time
            reached = max(time + floor, (total + per_token * n) / m)
            if reached < best:
                best, num = reached, m
        row, left = [0] * len(times), n
        least = int(floor / alpha) if alpha else 0
        total = sum([times[p] for p in order[:num]])
        for m in range(num, 1, -1):  # the most loaded first; one that is opened takes what its floor pays for
            time = times[order[m - 1]]
            part = int(((total + per_token * left) / m - time) / per_token) if per_token else left // m
            row[order[m - 1]] = part = min(left, max(part, least, 0))
            left -= part
            total -= time
        row[order[0]] = left
        return row

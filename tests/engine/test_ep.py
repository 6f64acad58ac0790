"""Groups of ranks: what they say arrives, and a rank that is missing is named in time."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from moeless.engine.ep import Control, EpGroup, LocalGroup, all_to_all
from moeless.engine.store import host_store, join_store
from moeless.errors import RankError
from tests.engine import work
from tests.engine.ranks import RankPool


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hear_each_other(ranks: RankPool, size: int) -> None:
    for rank, said in enumerate(ranks.run(work.talk, size)):
        assert said["table"] == [[g] * 3 for g in range(size)]
        assert said["word"] == Control(has_work=1, stop=0, part=size - 1, time_us=7)
        assert said["got"] == [10.0 * g + rank for g in range(size) for _ in range(said["receive"][g])]


def test_one_rank_needs_no_store() -> None:
    store, _ = host_store()
    group = EpGroup.connect(store, rank=0, size=1)
    assert isinstance(group, LocalGroup)
    rows = torch.randn(3, 2)
    assert all_to_all(group, rows, [3], [3]) is rows
    assert group.exchange(torch.arange(4)).tolist() == [[0, 1, 2, 3]]
    assert group.control(Control(has_work=1)) == Control(has_work=1)
    group.close()


def test_a_killed_rank_is_named_at_once(ranks: RankPool) -> None:
    begin = time.monotonic()
    told = ranks.run(work.fall_silent, 3, culprit=1, how="kill", dying=(1,), timeout_s=15)
    assert time.monotonic() - begin < 14
    for rank in (0, 2):
        assert told[rank].startswith(f"rank {rank} failed at exchanging expert counts")
        assert "no answer from rank 1;" in told[rank]


def test_a_hanging_rank_is_named_after_the_time_out(ranks: RankPool) -> None:
    told = ranks.run(work.fall_silent, 2, culprit=1, how="hang", dying=(1,), timeout_s=1.5)
    assert "(limit 1.5 s): no answer from rank 1;" in told[0]


def test_a_rank_that_leaves_is_noticed_by_one_that_waits_for_it_alone(ranks: RankPool) -> None:
    """Or the survivors of a loss, which leave one after the other, would wait for each other until the time-out."""
    told = ranks.run(work.leave, 2, timeout_s=20)[1]
    assert float(told.split()[0]) < 5
    assert "exchanging expert counts" in told


def test_waiting_ranks_do_not_spin(ranks: RankPool) -> None:
    spent_s = ranks.run(work.cpu_while_waiting, 4, wait_s=1.5)
    assert max(spent_s[1:]) < 0.02 * 1.5


def test_nobody_at_the_store_is_one_line() -> None:
    with pytest.raises(RankError, match=r"no store answers at 127\.0\.0\.1:9 within 1 s"):
        join_store("127.0.0.1", 9, timeout_s=1)


def test_the_store_listens_on_the_address_it_is_given_only() -> None:
    store, port = host_store()
    try:
        join_store("127.0.0.1", port, timeout_s=10).set("key", "value")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        with pytest.raises(RankError, match=f"cannot host the ranks' store at 127.0.0.1:{port}"):
            host_store(port=port)
    finally:
        del store


def test_a_store_cannot_be_hosted_at_another_hosts_address() -> None:
    with pytest.raises(RankError, match=r"cannot host the ranks' store at 192\.0\.2\.1"):
        host_store("192.0.2.1")

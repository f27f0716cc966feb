"""Who is gone, who is stuck: verdicts from signs of life, by a clock of numbers."""

import time
from typing import Any

import pytest

from sfpo_jax.parallel._watchdog import Peers, Sign, Watchdog


def signs(*pairs: tuple[int, int]):
    return {r: Sign(f"m{r}", beat, step) for r, (beat, step) in enumerate(pairs)}


@pytest.fixture
def peers():
    return Peers(rank=0, deadline=5.0, stuck_after=60.0)


def test_nobody_is_gone_before_anybody_was_seen(peers: Peers) -> None:
    assert peers.gone(1e9) is None
    assert peers.stuck(1e9) is None


def test_a_peer_is_gone_when_its_beat_is_older_than_the_deadline(
    peers: Peers,
) -> None:
    peers.saw(signs((1, 0), (1, 0)), 0.0)
    peers.saw(signs((2, 0), (2, 0)), 1.0)
    for now in range(2, 7):
        peers.saw(signs((now + 1, 0), (2, 0)), float(now))
    assert peers.gone(6.0) is None
    verdict = peers.gone(6.1)
    assert verdict is not None and "host 1 (m1)" in verdict and "5 s" in verdict


def test_this_process_never_counts_as_gone(peers: Peers) -> None:
    peers.saw(signs((1, 0)), 0.0)
    assert peers.gone(100.0) is None


def test_a_peer_that_comes_back_in_time_is_not_gone(peers: Peers) -> None:
    peers.saw(signs((1, 0), (1, 0)), 0.0)
    peers.saw(signs((5, 0), (2, 0)), 4.9)
    assert peers.gone(9.8) is None


def test_the_process_that_the_others_wait_for_is_stuck(peers: Peers) -> None:
    peers.saw(signs((1, 7), (1, 7), (1, 6)), 0.0)
    for now in (30, 59, 61):
        peers.saw(signs((now, 7), (now, 7), (now, 6)), float(now))
    assert peers.stuck(60.0) is None
    verdict = peers.stuck(61.0)
    assert verdict is not None and verdict.startswith("host 2 (m2) is alive")


def test_a_process_can_find_out_that_it_is_stuck_itself(peers: Peers) -> None:
    peers.saw(signs((1, 6), (1, 7)), 0.0)
    verdict = peers.stuck(61.0)
    assert verdict is not None and verdict.startswith("this host (m0)")


def test_nobody_is_stuck_where_all_are_as_far(peers: Peers) -> None:
    peers.saw(signs((1, 7), (1, 7)), 0.0)
    assert peers.stuck(1e6) is None


def test_nobody_is_stuck_while_the_others_still_come_further(peers: Peers) -> None:
    peers.saw(signs((1, 7), (1, 3)), 0.0)
    peers.saw(signs((2, 8), (2, 3)), 50.0)
    assert peers.stuck(100.0) is None


class Table:
    """The coordinator's table, of one process; or none that answers."""

    def __init__(self, is_there: bool = True) -> None:
        self.held, self.is_there = {}, is_there

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False):
        assert allow_overwrite or key not in self.held
        self._answer()
        self.held[key] = value

    def key_value_dir_get(self, folder: Any):
        self._answer()
        return [(k, v) for k, v in self.held.items() if k.startswith(folder)]

    def _answer(self) -> None:
        if not self.is_there:
            raise RuntimeError("unreachable")


def wait_for(words: Any):
    until = time.monotonic() + 20
    while not words and time.monotonic() < until:
        time.sleep(0.05)
    return words


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    said = []
    watchdog = Watchdog(Table(False), 1, 2, 1.0, 60.0, said.append)
    assert "the coordinator on host 0 has not answered" in wait_for(said)[0]
    watchdog.stop()


def test_a_process_that_dies_before_its_first_sign_is_named() -> None:
    said: list[str] = []
    watchdog = Watchdog(Table(), 1, 2, 2.0, 60.0, said.append)
    assert (
        "host 0 (not heard of since it joined) has given no sign" in wait_for(said)[0]
    )
    watchdog.stop()


def test_the_reason_of_another_process_is_passed_on() -> None:
    table, said = Table(), []
    watchdog = Watchdog(table, 1, 2, 30.0, 60.0, said.append)
    table.held["sfpo/failed/0"] = "the disk is full"
    assert wait_for(said)[0] == "host 0 ended: the disk is full"
    watchdog.stop()


def test_a_process_that_fails_leaves_its_reason_to_the_others() -> None:
    table, said = Table(), []
    watchdog = Watchdog(table, 1, 2, 30.0, 60.0, said.append)
    watchdog.fail("the loss was nan")
    assert table.held["sfpo/failed/1"] == "the loss was nan"
    assert said == ["the loss was nan"]
    watchdog.stop()

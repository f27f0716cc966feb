"""Signals set a flag, the second Ctrl-C does not wait, and all is put back after."""

import itertools
import os
import signal

import pytest

from sfpo_jax.parallel import Hosts
from sfpo_jax.training import Stop, stop_on_signals
from tests.hosts_table import Table


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag(number: int) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        # A supervisor may repeat itself.
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_after_it_interrupts_at_once(first: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def stops(count: int):
    table = Table()
    made = [Stop(Hosts(rank, count, table)) for rank in range(count)]
    # All processes count alike; here they are one.
    for stop in made:
        stop._name = "stop"
    return made


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("when", [0, 1, 5])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[:4])
def test_all_hosts_end_at_the_same_question(
    asked: int, when: int, order: tuple[int, ...]
) -> None:
    """Hosts ask one after another in any order, and are told so in the same round."""
    hosts = stops(3)
    for question in range(when + 4):
        if question == when:
            hosts[asked].request()
        answers = {hosts[host].requested for host in order}
        assert len(answers) == 1
        if True in answers:
            # The request was seen at the question after `when`, numbered from 1.
            assert question == when + 2
            return
    raise AssertionError("nobody was told to end")


@pytest.mark.parametrize("lead", [1, 2])
def test_a_host_that_is_two_questions_ahead_ends_with_the_others(lead: int) -> None:
    slow, fast = stops(2)
    for _ in range(lead):
        assert not fast.requested
    slow.request()
    ends = {"slow": 0, "fast": lead}
    # In lockstep from here on, the fast one in front.
    for name, stop in [("slow", slow), ("fast", fast)] * 5:
        if ends[name] >= 0:
            ends[name] += 1
            if stop.requested:
                ends[name] = -ends[name]
    assert ends["slow"] == ends["fast"] == -3


def test_of_two_requests_the_first_counts() -> None:
    hosts = stops(2)
    hosts[0].request()
    assert [stop.requested for stop in hosts] == [False, False]
    hosts[1].request()
    assert [stop.requested for stop in hosts] == [False, False]
    assert [stop.requested for stop in hosts] == [True, True]

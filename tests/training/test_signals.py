"""Signals set a flag, the second Ctrl-C does not wait, and all is put back after."""

import os
import signal

import pytest

from sfpo_jax.training import stop_on_signals


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

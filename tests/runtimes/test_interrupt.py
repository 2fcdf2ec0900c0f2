"""Ctrl-C, gently; the whole of it, through the command line, is in test_run."""

import os
import signal
import threading

import pytest

from codistill.runtimes.workers import GentleInterrupt


def test_the_first_asks_and_the_second_stops_at_once(capsys):
    with GentleInterrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        assert "Stopping at the end of this round (again: at once)" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_being_terminated_is_an_interrupt_too(capsys):
    with GentleInterrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked


def test_afterwards_all_is_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with GentleInterrupt():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(ValueError, match="from inside"), GentleInterrupt():
        raise ValueError("from inside")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_signals_are_left_alone():
    """Python allows signal handlers in the main thread only; a run in a thread must work all the same."""
    seen = []

    def work():
        with GentleInterrupt() as interrupt:
            seen.append((interrupt.asked, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_a_stream_that_cannot_be_written_to_does_not_end_the_run(monkeypatch):
    """The signal may come in the middle of a write to standard error, which must not be entered again."""

    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", Busy())
    with GentleInterrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked

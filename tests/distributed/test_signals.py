"""Signals are heard by the process that listens, and not by those that it forks."""

import os
import signal
import threading

from ppl_eval.distributed.signals import listen


def test_the_signal_that_ends_a_forked_child_is_not_the_parent_s():
    heard, here = [], threading.Event()

    def act(number):
        heard.append(number)
        here.set()

    end = listen(act)
    try:
        ready, say = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(say, b"!")
            while True:
                signal.pause()
        assert os.read(ready, 1) == b"!"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        # It had no handler of ours, and ended as a child does.
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGHUP)
        assert here.wait(60)
        assert heard == [signal.SIGHUP]
    finally:
        end()

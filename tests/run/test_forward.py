"""Batches that share the memory of a process, and then do not."""

import threading
from types import SimpleNamespace

from ppl_eval.run.forward import Forwards


def test_once_memory_ran_out_a_batch_waits_for_the_others():
    """The one that failed is tried again when nothing else takes memory."""
    state = SimpleNamespace(inputs=SimpleNamespace(plan=SimpleNamespace(batch_size=4)), concurrent_batches=2)
    forwards, seen = Forwards(state), []

    def second():
        with forwards._turn():
            seen.append("second")

    with forwards._turn():
        together = threading.Thread(target=second)
        together.start()
        together.join()
        forwards._alone = True
        alone = threading.Thread(target=second)
        alone.start()
        # It would be done at once, did it not wait.
        alone.join(timeout=0.5)
        seen.append("first")
    alone.join()
    assert seen == ["second", "first", "second"]

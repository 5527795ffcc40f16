"""Failing together: a failure of one rank or of a host ends all ranks, and its cause is printed once."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ppl_eval.distributed.causes import explain, is_connection, is_for_person
from ppl_eval.distributed.outcome import Stop, print_error, record_cause
from ppl_eval.distributed.process import Process
from ppl_eval.distributed.watch import GRACE_SECONDS, Watch


@contextmanager
def fail_together(process: Process, clean_up: Callable[[], None] = lambda: None) -> Iterator[Watch]:
    """While inside, a failure of any rank ends all of them within seconds, and its cause is printed once.

    Args:
        process: this one.
        clean_up: called on every way out. It closes connections, which others must not take for the cause:
            so it comes after the announcement.

    Yields:
        The watch, which has to be given the ``World`` once the processes have met.

    Raises:
        Stop: in the place of any exception. Its cause is the last line that is printed, under a traceback
            where it is not one for the person.
    """
    watch = Watch(process)
    try:
        with _cleaning(clean_up), _announcing(process, watch):
            yield watch
        watch.leave()
    finally:
        watch.end()


@contextmanager
def _cleaning(clean_up: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):  # What goes wrong in a run that failed already is not its cause.
            clean_up()
        raise
    clean_up()


@contextmanager
def _announcing(process: Process, watch: Watch) -> Iterator[None]:
    try:
        yield
    except Stop as stop:
        watch.leave_within(2 * GRACE_SECONDS, stop.code)
        raise
    except BaseException as error:
        if is_connection(error):
            watch.find_lost()
        failure = explain(error, process.where)
        # Cleaning up may wait for others that will never answer.
        watch.leave_within(2 * GRACE_SECONDS, failure.code)
        if process.announce_failure(failure):
            if not is_for_person(error):
                traceback.print_tb(error.__traceback__, file=sys.stderr)
            print_error(failure.message)
        else:
            failure = watch.first_failure() or failure
        record_cause(failure)
        watch.let_others_read()
        raise Stop(failure.code) from error

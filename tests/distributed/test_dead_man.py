"""The kernel's timer, in processes that it ends."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="POSIX timers by way of Linux' C library")

START = """
import os, signal, subprocess, sys
from ppl_eval.distributed.dead_man import DeadMan
timer = DeadMan(1.0)
timer.wind()
"""


def run(rest):
    process = subprocess.Popen([sys.executable, "-c", START + rest], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_it_ends_a_process_that_is_stopped():
    assert run("os.kill(os.getpid(), signal.SIGSTOP)")[0] == -signal.SIGKILL


def test_one_that_winds_it_up_or_stops_it_goes_on_and_children_have_none():
    lives = """
import time
for _ in range(10):
    time.sleep(0.15)
    timer.wind()
child = os.fork()
timer.stop()
time.sleep(1.2)
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(lives) == (0, "7\n")

"""A clock that is put off is off in a running process and its children, and its other clocks are not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.clocks import Clocks, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler here")

TELL = """
import datetime, os, sys, time
for line in sys.stdin:
    if os.fork() == 0:
        now = datetime.datetime.now(datetime.UTC).timestamp()
        print(time.time(), now, time.monotonic(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_clock_is_off_by_what_was_said_until_it_is_put_right(tmp_path: Path):
    clocks = Clocks(tmp_path)
    clocks.build()
    teller = subprocess.Popen(
        [sys.executable, "-c", TELL],
        env=os.environ | clocks.environment("node-1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for seconds in (0, 300, -300, 0):
            clocks.shift("node-1", seconds)
            clocks.shift("node-2", 77)
            assert teller.stdin is not None and teller.stdout is not None
            teller.stdin.write("\n")
            teller.stdin.flush()
            told, as_date, monotonic = map(float, teller.stdout.readline().split())
            assert told == pytest.approx(time.time() + seconds, abs=10)
            assert as_date == pytest.approx(told, abs=10)
            assert monotonic == pytest.approx(time.monotonic(), abs=10)
    finally:
        teller.communicate()

"""In every rank: run `ppl-eval` once for every argument list of a JSON file, and record the exit codes."""

import json
import os
import sys
from pathlib import Path

from ppl_eval.commands import cli

codes = []
for number, argv in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    # Every run must find the store empty, as a process of its own would.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    try:
        cli.main(argv)
        codes.append(0)
    except SystemExit as stop:
        codes.append(stop.code)
print(f"codes {codes} of rank {os.environ['RANK']}")

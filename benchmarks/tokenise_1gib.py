"""Tokenise and plan a text of 1 GiB, and watch the memory of every process that takes part.

    python benchmarks/tokenise_1gib.py --tokenizer ~/.cache/ppl_eval/models/smollm2-135m

The text is made on the spot from CPython's own documentation and made-up words, so that no line repeats.
Memory is what /proc calls Pss, added up over this process and its workers five times a second: pages that
two share count once.
"""

import argparse
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

MIB = 1 << 20


def write_text(path: Path, num_bytes: int) -> None:
    """A text of about this size: shuffled lines of the Python reference, each with a made-up word in it."""
    from pydoc_data.topics import topics

    lines = [line for topic in topics.values() for line in topic.split("\n")]
    chosen = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            block = []
            for _ in range(5000):
                word = "".join(chosen.choices("aeioulnrstdmcé", k=chosen.randint(3, 9)))
                block.append(f"{chosen.choice(lines)} {word} {chosen.randint(0, 99999)}\n")
            text = "".join(block)
            file.write(text)
            written += len(text.encode())


def watch_memory(done: threading.Event, peak: list[float]) -> None:
    """Keep the highest memory of this process and its children in ``peak[0]``, MiB."""
    own = psutil.Process()
    while not done.wait(0.2):
        used = 0
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):
                used += process.memory_full_info().pss
        peak[0] = max(peak[0], used / MIB)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, seconds and peak MiB of a call."""
    done, peak = threading.Event(), [psutil.Process().memory_full_info().pss / MIB]
    watch = threading.Thread(target=watch_memory, args=(done, peak))
    watch.start()
    try:
        begin = time.monotonic()
        result = call()
        return result, time.monotonic() - begin, peak[0]
    finally:
        done.set()
        watch.join()


def main() -> None:
    """Run the benchmark and print its figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", required=True, help="folder with tokenizer.json and tokenizer_config.json"
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the text")
    arguments = parser.parse_args()

    # As in a run: the process that tokenises has torch and torchtune loaded.
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    from ppl_eval.data import text_files
    from ppl_eval.data.sources import EncodeRequest
    from ppl_eval.data.token_data import open_tokens, prepare_tokens
    from ppl_eval.protocols import disjoint
    from ppl_eval.protocols.plan import make_plan
    from ppl_eval.tokenization.tokenizer import wrap_tokenizer
    from ppl_eval.tokenization.workers import MAX_WORKERS, num_cores

    folder = Path(arguments.tokenizer).expanduser()
    config = {
        "tokenizer_json_path": str(folder / "tokenizer.json"),
        "tokenizer_config_json_path": str(folder / "tokenizer_config.json"),
    }
    encoder = wrap_tokenizer(HuggingFaceBaseTokenizer(**config), config)
    idle = psutil.Process().memory_full_info().pss / MIB

    with TemporaryDirectory() as scratch:
        path, cache = Path(scratch) / "text.txt", Path(scratch) / "cache"
        write_text(path, arguments.mib * MIB)
        # A file that changed just now is hashed again.
        time.sleep(3)
        source = text_files(str(path))

        def prepare() -> Path:
            return prepare_tokens(source, EncodeRequest(encoder, "\n\n", "tokenizer"), cache)

        view, first_seconds, first_peak = timed(prepare)
        _, second_seconds, second_peak = timed(prepare)

        def plan() -> Any:
            data = open_tokens(view)
            return data, make_plan(disjoint(1024), data.offsets_D1, batch_size=8)

        (data, made), plan_seconds, plan_peak = timed(plan)
        figures = {
            "text_mib": path.stat().st_size / MIB,
            "num_tokens": data.num_tokens,
            "num_documents": data.num_documents,
            "num_windows": made.num_windows,
            "cores": num_cores(),
            "workers": min(num_cores(), MAX_WORKERS),
            "idle_mib": idle,
            "first_run_seconds": first_seconds,
            "first_run_mib_per_second": path.stat().st_size / MIB / first_seconds,
            "first_run_peak_mib": first_peak,
            "second_run_seconds": second_seconds,
            "second_run_peak_mib": second_peak,
            "plan_seconds": plan_seconds,
            "plan_peak_mib": plan_peak,
        }
        shutil.rmtree(cache)
    json.dump({key: round(value, 4) for key, value in figures.items()}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

"""Time of ``import teamtr``, of ``teamtr --help``, and of ``teamtr check`` of a tiny team beside the imports it needs.
All run in fresh processes, side by side with ``import numpy``.

    python bench/imports.py --json              # 15 rounds, all commands of a round one after the other
    python bench/imports.py --rounds 3          # quick

Every round starts each command once, so that all run under the same conditions; the result is the median of the rounds.
The startup time of Python is measured too and subtracted. One round before the others, which is not counted, fills the
caches of files, of compiled modules, and of trained tiny models.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import report

TARGET = 0.3
CHECKED = Path(__file__).parents[1] / "src" / "teamtr" / "recipes" / "code-exchange.yaml"
START = "start of Python"
OURS = "import teamtr"
COMMANDS: dict[str, tuple[str, ...]] = {
    START: ("-c", "pass"),
    OURS: ("-c", "import teamtr"),
    "teamtr --help": ("-m", "teamtr.cli", "--help"),
    "from teamtr import TeamTrainer": ("-c", "from teamtr import TeamTrainer"),
    "import numpy": ("-c", "import numpy"),
    "import torch": ("-c", "import torch"),
    "transformers' Qwen3": (
        "-c",
        "import torch; from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM",
    ),
    "teamtr check": ("-m", "teamtr.cli", "check", str(CHECKED)),
}


def seconds(words: tuple[str, ...]) -> float:
    """Seconds of one fresh process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    for words in COMMANDS.values():
        seconds(words)
    rounds = [{name: seconds(words) for name, words in COMMANDS.items()} for _ in range(a.rounds)]
    whole = {name: statistics.median(times[name] for times in rounds) for name in COMMANDS}
    alone = {name: statistics.median(times[name] - times[START] for times in rounds) for name in COMMANDS}
    over = {name: statistics.median(times[name] / times["import numpy"] for times in rounds) for name in COMMANDS}
    rows = [(name, whole[name], None if name == START else alone[name], over[name]) for name in COMMANDS]
    record = {"benchmark": "imports", "rounds": a.rounds, "target": TARGET, "seconds": whole, "without start": alone}
    title = f"fresh processes, median of {a.rounds}; target for {OURS}: {TARGET} s at most"
    report(title, ("", "seconds", "without start", "over import numpy"), rows, record, a.json)


if __name__ == "__main__":
    main()

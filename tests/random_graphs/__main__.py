"""Check random graphs: ``python -m random_graphs --count 1000 --seed 7``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from random_graphs.running import Run, default_processes

# Folder of build results. The current directory has no effect.
FOLDER = Path(__file__).resolve().parents[2] / "build" / "random-graphs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m random_graphs", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of graphs (300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first graph; others have the next seeds (0)")
    parser.add_argument("--processes", type=int, default=default_processes(), help="number of parallel processes")
    parser.add_argument("--timeout", type=float, default=60, help="time limit of a graph in seconds (60)")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to shrink a failure; 0 disables it (60)")
    parser.add_argument("--each", type=int, default=1, help="number of failures of each kind to shrink (1)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="output folder for failures")
    parser.add_argument("--brief", action="store_true", help="print the nodes of a shrunk graph on one line")
    arguments = parser.parse_args()
    start = time.monotonic()
    run = Run(
        arguments.processes,
        arguments.timeout,
        arguments.shrink,
        arguments.folder,
        arguments.each,
        verbose=not arguments.brief,
    )
    failures = run.over(
        range(arguments.seed, arguments.seed + arguments.count), say=lambda line: print(line, flush=True)
    )
    seconds = time.monotonic() - start
    print(f"seed {arguments.seed}: {run.checked} graphs in {seconds:.0f} s, {len(failures)} failed")
    print(run.summary())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

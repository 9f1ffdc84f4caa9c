"""Write the tables of speed in README.md and docs/performance.md, from a recorded run: python tests/speed_page.py.

test_pages.py compares the tables of the pages with the run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
# Recorded by `make compare ARGUMENTS="--save avx512-2-cores-2026-11-23"`.
RUN = ROOT / "benches" / "results" / "avx512-2-cores-2026-11-23.json"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
# PyTorch has two image layouts; the faster one counts.
LIBRARIES = {
    "onnxruntime-training": ["onnxruntime-training"],
    "PyTorch": ["torch", "torch-channels-last"],
    "jax": ["jax"],
}
SURROUNDED = r"(<!-- {name}: python tests/speed_page.py -->\n)(.*?)(<!-- end -->)"


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RUN.read_text())
    return found


def _ratio(workload: dict[str, Any], peers: list[str]) -> str:
    ratios = [other["ratio"] for other in workload["others"] if other["peer"] in peers]
    return f"{max(ratios):.2f}" if ratios else ""


def _memory(workload: dict[str, Any], peers: list[str]) -> str:
    bytes_of = [other["startup"]["anonymous"] for other in workload["others"] if other["peer"] in peers]
    return f"{min(bytes_of) / 1e6:.0f}" if bytes_of else ""


def _milliseconds(workload: dict[str, Any]) -> str:
    value = median(workload["ours"]["rounds"]) * 1e3
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def times() -> str:
    """Return the table of milliseconds for a step, and of ratios to the other libraries."""
    rows = [
        [f"`{found['name']}`", _milliseconds(found), *(_ratio(found, peers) for peers in LIBRARIES.values())]
        for found in recorded()["workloads"]
    ]
    return _table(["workload", "ortrain, ms", *(f"/ {name}" for name in LIBRARIES)], rows)


def steps() -> str:
    """Return the table of times with the batch size and the trained weights of each workload."""
    rows = [
        [
            f"`{found['name']}`",
            str(found["about"]["batch"]),
            f"{found['about']['trainable']:,}",
            _milliseconds(found),
            *(_ratio(found, peers) for peers in LIBRARIES.values()),
        ]
        for found in recorded()["workloads"]
    ]
    return _table(["workload", "batch", "trained weights", "ortrain, ms", *(f"/ {name}" for name in LIBRARIES)], rows)


def memory() -> str:
    """Return the table of peak memory above the memory after the import, in MB."""
    rows = [
        [
            f"`{found['name']}`",
            f"{found['ours']['startup']['anonymous'] / 1e6:.0f}",
            *(_memory(found, peers) for peers in LIBRARIES.values()),
        ]
        for found in recorded()["workloads"]
    ]
    return _table(["workload", "ortrain, MB", *LIBRARIES], rows)


TABLES = [(README, "times", times), (PERFORMANCE, "steps", steps), (PERFORMANCE, "memory", memory)]


def table_of(page: Path, name: str) -> str:
    """Return the text between the two comments of a page."""
    (found,) = re.findall(SURROUNDED.format(name=name), page.read_text(), re.DOTALL)
    table: str = found[1]
    return table.strip() + "\n"


def main() -> None:
    for page, name, table in TABLES:
        text = re.sub(SURROUNDED.format(name=name), rf"\1\n{table()}\n\3", page.read_text(), flags=re.DOTALL)
        page.write_text(text)


if __name__ == "__main__":
    main()

"""`python3 -m papers.cuda_llm.table` brings the README's table of searches up to date with the records."""

from __future__ import annotations

from pathlib import Path

from gpu_accel.cuda_llm.records_table import text
from gpu_accel.workbench import registry
from gpu_accel.workbench.report import update_block

BLOCK = "search"
README = Path(__file__).with_name("README.md")


def main() -> None:
    """Update the README."""
    changed = update_block(README, BLOCK, text(registry.paper("cuda-llm").records()))
    print("changed" if changed else "is up to date")


if __name__ == "__main__":
    main()

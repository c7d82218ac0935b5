"""Brings the README's table of searches up to date with the records, and keeps the winners of a search.

`python3 -m papers.cuda_llm.table` does the first. With a folder, the one that a run of `search` kept its searches in,
it also writes their winners and their course to winners/<gpu>.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_accel.cuda_llm.progress import keep, of_folder
from gpu_accel.cuda_llm.records_table import text
from gpu_accel.cuda_llm.report import read_folder
from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench import registry
from gpu_accel.workbench.records import gpu_slug
from gpu_accel.workbench.report import update_block

BLOCK = "search"
README = Path(__file__).with_name("README.md")
WINNERS = Path(__file__).with_name("winners")


def keep_winners(folder: Path) -> Path:
    """Write the winners of all searches in a folder that were timed, with their course; returns the file.

    Raises:
        InvalidInputError: there is none.
    """
    found = [one for one in read_folder(folder) if one.run.get("final")]
    if not found:
        raise InvalidInputError(f"no search in {folder} was timed")
    WINNERS.mkdir(exist_ok=True)
    path = WINNERS / f"{gpu_slug(str(found[0].run['host']['env']['sku']))}.json"
    keep([of_folder(one) for one in found], path)
    return path


def main() -> None:
    """Update the README."""
    parser = argparse.ArgumentParser(prog="python3 -m papers.cuda_llm.table", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of searches, whose winners are to be kept")
    if folder := parser.parse_args().folder:
        try:
            print(keep_winners(folder))
        except InvalidInputError as error:
            parser.error(str(error))
    changed = update_block(README, BLOCK, text(registry.paper("cuda-llm").records()))
    print("changed" if changed else "is up to date")


if __name__ == "__main__":
    main()

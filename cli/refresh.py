"""`make readme`: bring what READMEs show of committed records up to date."""

from __future__ import annotations

import argparse

from gpu_accel.workbench import pages, registry
from gpu_accel.workbench.report import update_block

from .papers import readme_table


def main() -> None:
    argparse.ArgumentParser(prog="python3 -m cli.refresh", description=__doc__).parse_args()
    for paper in registry.papers():
        for path in pages.refresh(paper):
            print(path)
    print("README.md", "changed" if update_block("README.md", "papers", readme_table()) else "is up to date")


if __name__ == "__main__":
    main()

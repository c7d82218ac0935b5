"""Where the command line starts: `gpu-accel`, or `python3 -m cli` in a checkout, where nothing is installed."""

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")


def main() -> None:
    """The application, once what it needs is there. An interrupt before it runs is one like any other."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(
            f"error: the command line needs {' and '.join(missing)}: pip install {' '.join(missing)}\n"
            "       (running kernels needs torch and triton too; `make install` brings everything into .venv)",
            file=sys.stderr,
        )
        sys.exit(4)
    try:
        from .main import main as run

        run()
    except KeyboardInterrupt:  # before there is a command that could say so
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python3 -m cli` in a checkout, where nothing is installed."""

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")

if missing := [name for name in NEEDED if find_spec(name) is None]:
    print(
        f"error: the command line needs {' and '.join(missing)}: pip install {' '.join(missing)}\n"
        "       (running kernels needs torch and triton too; `make install` brings everything into .venv)",
        file=sys.stderr,
    )
    sys.exit(4)

from .main import main  # noqa: E402

main()

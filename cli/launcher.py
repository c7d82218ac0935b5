"""What `--nproc` starts: torchrun, which an interrupt or another signal ends without a traceback of its own.

What is to be said of a signal the command has said, and the processes have written what they measured. An error of a
process is torchrun's to tell, as ever.
"""

from __future__ import annotations

import sys

from . import codes


def main() -> None:
    """torchrun with the arguments of this process; a signal is exit code 128 and its number."""
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException

        try:
            run.main()
        except SignalException as stop:
            sys.exit(128 + int(stop.sigval))
    except KeyboardInterrupt:  # before torchrun takes care of signals
        sys.exit(codes.INTERRUPTED)


if __name__ == "__main__":
    main()

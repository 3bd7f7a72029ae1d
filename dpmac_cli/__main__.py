"""``dpmac`` and ``python -m dpmac_cli``: what must hold before anything is imported."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """The console script."""
    # Importing takes seconds, during which nothing is begun yet and Ctrl-C may simply end it all;
    # a command that has something to lose installs its own handler.
    for number in ASKS_TO_STOP:
        signal.signal(number, _leave)
    # A stream that the caller has closed is None; what is written to it shall vanish.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    from dpmac_cli.cli.app import app  # noqa: PLC0415
    from dpmac_cli.cli.completion import join_values  # noqa: PLC0415

    join_values(os.environ)
    try:
        app()
    finally:  # all is written: let a late signal not change the exit code
        for number in ASKS_TO_STOP:
            signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    os.write(2, b"error: interrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

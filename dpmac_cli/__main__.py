"""Entry point of ``dpmac`` and ``python -m dpmac_cli``: signals and streams, then the command."""

import os
import signal
import sys

from dpmac_cli.errors import INTERRUPTED, USAGE, explain_os_error

ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the console script ``dpmac`` with the arguments of the process.

    Ctrl-C and SIGTERM end it at once with exit code 130, until a command installs a handler of its
    own. A stream that the caller closed is replaced by one that discards what is written. Help that
    cannot be written ends with exit code 2, as a result that cannot be written does.
    """
    # Imports take seconds, in which Ctrl-C may simply end the process. Commands with something to
    # lose install their own handler.
    for number in ASKS_TO_STOP:
        signal.signal(number, _leave)
    # A stream that the caller has closed is None: discard output to it.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # Looking for plugins of pydantic, it would read what each installed package says of itself.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from dpmac_cli.cli.app import app  # noqa: PLC0415  (after the signals)

    try:
        app(prog_name="dpmac")
    except OSError as failure:
        from dpmac_cli.cli import console  # noqa: PLC0415  (rich is slow to load)

        console.discard_output(sys.stdout)
        console.print_errors([explain_os_error(failure)])
        sys.exit(USAGE)
    finally:  # all output is written: a late signal must not change the exit code
        for number in ASKS_TO_STOP:
            signal.signal(number, signal.SIG_IGN)


def _leave(*_: object) -> None:
    os.write(2, b"error: interrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

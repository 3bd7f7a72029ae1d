"""Entry point of ``dpmac`` and ``python -m dpmac_cli``: signals and streams, then the command."""

import locale
import os
import signal
import sys

from dpmac_cli.errors import INTERRUPTED

ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the console script."""
    _name_files_in_utf8()
    # Imports take seconds, in which Ctrl-C may simply end the process. Commands with something to
    # lose install their own handler.
    for number in ASKS_TO_STOP:
        signal.signal(number, _leave)
    # A stream that the caller has closed is None: discard output to it.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # Looking for plugins of pydantic, it would read what each installed package says of itself.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from dpmac_cli.cli.app import app  # noqa: PLC0415  (after the signals)

    try:
        app()
    finally:  # all output is written: a late signal must not change the exit code
        for number in ASKS_TO_STOP:
            signal.signal(number, signal.SIG_IGN)


def _name_files_in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding.

    Names in a run's files are in UTF-8, and so are those of most files. Where a locale has fewer
    characters, some could not be opened, and others would have other names than in the run. Output
    keeps the encoding of the locale; characters that it lacks are escaped.
    """
    if sys.flags.utf8_mode or locale.getencoding().lower() == "utf-8" or not sys.executable:
        return
    stream = sys.stdout or sys.stderr
    encoding = locale.getencoding() if stream is None else stream.encoding
    os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:backslashreplace")
    os.environ["PYTHONUTF8"] = "1"  # of worker processes
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execv(sys.executable, command)  # noqa: S606  (this very command)


def _leave(*_: object) -> None:
    os.write(2, b"error: interrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

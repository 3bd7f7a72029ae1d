"""When does something appear on the screen, and how long does nothing move?

Runs commands in a pseudo-terminal of 80 columns and prints a row for each: seconds until the first
output, the longest silence after it, and the whole. A silence is a time in which no byte arrives.

    python benchmarks/terminal.py docs/data/terminal.json
"""

import fcntl
import json
import os
import pty
import select
import shlex
import struct
import sys
import tempfile
import termios
from pathlib import Path
from time import perf_counter

COLUMNS, ROWS = 80, 40
#: In this order: later commands read what earlier ones wrote.
COMMANDS = (
    "dpmac --help",
    "dpmac train --help",
    "dpmac account --sigma 1.0 --epochs 5",
    "dpmac account --epsilon 3 --risk",
    "dpmac account --sigma 1.0 --epochs 5 --sampler random-allocation",
    "dpmac train --dataset digits --out digits",
    "dpmac train --dataset mnist --epochs 1 --out mnist",
    "dpmac train --dataset cifar10 --steps 3 --out cifar10",
    "dpmac train --resume mnist",
    "dpmac eval mnist",
    "dpmac account mnist",
    "dpmac card mnist",
    "dpmac compare --dataset digits --optimizers dp-sgd,dp-adam --seeds 2 --steps 20 --out study",
    "dpmac cache",
)


def watch(command: str, folder: Path) -> dict[str, object]:
    """Run a command in a pseudo-terminal; return when bytes arrived."""
    begun = perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        program, *rest = shlex.split(command)
        os.execvp(program, [program, *rest])  # noqa: S606  (commands of the list above)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    times = []
    while True:
        select.select([terminal], [], [])
        try:
            if not os.read(terminal, 1 << 16):
                break
        except OSError:  # the program has ended
            break
        times.append(perf_counter() - begun)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(terminal)
    whole = perf_counter() - begun
    gaps = [(b - a, a) for a, b in zip(times, [*times[1:], whole], strict=True)]
    silence, at = max(gaps, default=(whole, 0.0))
    return {
        "command": command,
        "exit_code": code,
        "first_output": round(times[0] if times else whole, 2),
        "longest_silence": round(silence, 2),
        "silent_from": round(at, 2),
        "seconds": round(whole, 2),
    }


def main() -> None:
    """Watch all commands and write what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for command in COMMANDS:
            rows.append(watch(command, Path(folder)))
            print(*(f"{value}" for value in rows[-1].values()), sep="\t", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

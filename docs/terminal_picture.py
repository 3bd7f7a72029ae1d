"""Draw docs/train.svg: the terminal at the end of a real `dpmac train --dataset digits`.

python docs/terminal_picture.py
"""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from dpmac_cli.cli.display import RunDisplay
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.session import Update

COMMAND = "dpmac train --dataset digits"
#: Lines of earlier epochs are left out.
WIDTH, FIRST_EPOCH = 88, 18
#: Rich's frame with the reader's own typeface: a picture need not fetch one from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono"
)
PICTURE = Path(__file__).resolve().with_name("train.svg")


def main() -> None:
    """Train, and draw."""
    shown = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True)
    display = RunDisplay(shown)
    display._bar.disable = True
    shown.print(Text.assemble(("$ ", "dim"), (COMMAND, "bold")))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plan = resolve({"dataset": "digits"}).plan
        for event in train_plan(plan):
            scored = event if isinstance(event, Update) and event.evaluated else None
            if scored is None or scored.step >= FIRST_EPOCH * plan.event.steps_per_epoch:
                display.show(event)
    shown.save_svg(str(PICTURE), title="dpmac", code_format=FORMAT, unique_id="dpmac-train")


if __name__ == "__main__":
    main()

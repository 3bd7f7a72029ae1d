"""Check the types of the programs in README, docs/ and examples/ with mypy --strict.

``python docs/check_programs.py`` prints the faults and ends with the exit code of mypy.

The blocks of a page are one program, as they run in one namespace. Functions of its author need no
annotations (``[tool.mypy.overrides]`` of ``programs.*`` in pyproject.toml): it is the types of
dpmac that are checked, where they are used.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Names that a page takes from its reader, whose type may be any.
FROM_THE_READER = {
    "README": ("net", "train_set", "test_set"),
    "evidence": ("X_train", "y_train", "X_test", "y_test"),
    "own-data": ("frame",),
    "units": ("x", "y", "patient", "model"),
}
#: Imports that a page leaves out.
IMPORTS = {"units": "import dpmac_cli\n"}


def pages() -> list[Path]:
    """Return the pages of the manual that may have programs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def program(page: Path) -> str:
    """Return the program of a page; "" if it has none."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    if not blocks:
        return ""
    names = FROM_THE_READER.get(page.stem, ())
    declared = "".join(f"{name}: Any\n" for name in names)
    header = f"from typing import Any\n{IMPORTS.get(page.stem, '')}{declared}"
    return header + "\n\n".join(blocks)


def write_programs(folder: Path) -> list[Path]:
    """Write the programs of the pages and the examples as modules.

    Args:
        folder: an empty folder.

    Returns:
        The files and packages to check.
    """
    package = folder / "programs"
    package.mkdir()
    (package / "__init__.py").touch()
    for page in pages():
        text = program(page)
        if text:
            name = page.stem.replace("-", "_").lower()
            (package / f"{name}.py").write_text(text, encoding="utf-8")
    examples = ROOT / "examples"
    shutil.copytree(examples / "flower" / "hospitals", folder / "hospitals")
    written = [package, folder / "hospitals"]
    for file in sorted(examples.glob("*/*.py")):
        copy = folder / f"{file.parent.name}_{file.name}"
        shutil.copy(file, copy)
        written.append(copy)
    return written


def main() -> int:
    """Check the programs; return the exit code of mypy."""
    with tempfile.TemporaryDirectory() as place:
        files = [str(path) for path in write_programs(Path(place))]
        settings = ["--config-file", str(ROOT / "pyproject.toml"), "--strict"]
        faults, errors, code = api.run([*settings, *files])
    sys.stdout.write(faults)
    sys.stderr.write(errors)
    return code


if __name__ == "__main__":
    sys.exit(main())

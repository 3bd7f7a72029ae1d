"""Check the contents of the wheel, and that another one has the same files.

python .ci/wheel.py WHEEL [OTHER]
"""

import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dpmac_cli"
#: What the package reads when it runs, beside its code and its types.
KINDS = {".py", ".pyi", ".toml", ".jinja", ".yaml", ".typed"}


def contents(path: str) -> dict[str, bytes]:
    """Return the files of a wheel by name, without its own records of them."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        return {name: wheel.read(name) for name in names}


def main() -> None:
    """Print what is wrong, and end with exit code 1 if anything is."""
    first, *others = map(contents, sys.argv[1:])
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in KINDS
    }
    faults = [f"missing: {name}" for name in sorted(wanted - first.keys())]
    faults += [f"not of the package: {name}" for name in sorted(first.keys() - wanted)]
    faults += ["the wheels differ" for other in others if other != first]
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

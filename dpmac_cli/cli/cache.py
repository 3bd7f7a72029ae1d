"""dpmac cache: list or clear the kept features of frozen parts."""

import time
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, JSON, switch, with_options
from dpmac_cli.cli.runs import age
from dpmac_cli.storage.cache import BEGUN, kept_files, make_room
from dpmac_cli.storage.files import to_json
from dpmac_cli.storage.paths import cache_folder, cache_size


@with_options(switch("clear", "Remove all of them.", "Cache"), JSON, DEBUG)
@explained
def cache(clear: bool, json: bool) -> None:
    """List the files, or remove them and say how many there were."""
    folder, limit = cache_folder(), cache_size()
    removed = make_room(folder, -1) if clear else []
    files = [_described(file) for file in kept_files(folder)]
    if json:
        found = {"folder": str(folder), "limit": limit, "files": files, "removed": len(removed)}
        console.print_result(to_json(found))
        return
    out = console.stdout()
    for of in files:
        last = f"last used {age(time.time() - of['last_used'])} ago"
        begun = ", begun" * (not of["whole"])
        out.print(Text(f"{of['name']}  {decimal(of['bytes'])}, {last}{begun}"))
    total, most = decimal(sum(of["bytes"] for of in files)), decimal(int(limit))
    out.print(Text(f"{folder}: {len(files)} files, {total} of {most}; {len(removed)} removed"))


def _described(file: Path) -> dict[str, Any]:
    return {
        "name": file.name[:12],
        "bytes": file.stat().st_size,
        "last_used": file.stat().st_mtime,
        "whole": file.suffix != BEGUN,
    }

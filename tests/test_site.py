"""The documentation site builds without a warning, and needs no other site."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpmac_cli

ROOT = Path(__file__).parents[1]
#: What a page loads when it is opened.
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//[^>]*>")


@pytest.mark.long
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.glob("**/*.html")}
    assert len(pages) > 30
    for page, text in pages.items():
        assert not LOADED.search(text), page.name
        assert "arithmatex" not in text, page.name
    for name in dpmac_cli.__all__:
        assert name == "__version__" or f'id="dpmac_cli.{name}"' in pages[tmp_path / "api.html"]

"""The documentation site builds without a warning, and needs no other site."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpmac_cli

ROOT = Path(__file__).parents[1]
#: What a page loads when it is opened.
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//[^>]*>")


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.glob("**/*.html")}
    assert len(pages) > 30
    for page, text in pages.items():
        assert not LOADED.search(text), page.name
        assert "arithmatex" not in text, page.name
    for name in dpmac_cli.__all__:
        assert name == "__version__" or f'id="dpmac_cli.{name}"' in pages[tmp_path / "api.html"]


@pytest.mark.long
@pytest.mark.parametrize("link", ["faq.md#nowhere", "nowhere.md", "../nowhere.py"])
def test_a_broken_link_would_be_found(tmp_path: Path, link: str) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("data"))
    for path in {*ROOT.glob("*"), ROOT / "docs" / "data"} - {ROOT / "docs", ROOT / "site"}:
        (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    page = tmp_path / "docs" / "tour.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n[text]({link})\n", encoding="utf-8")
    assert build(tmp_path, tmp_path / "built").returncode != 0


def test_a_loaded_script_would_be_found() -> None:
    assert LOADED.search('<script async src="https://cdn.example/x.js"></script>')
    assert LOADED.search("<link rel=stylesheet href=//fonts.example/a.css>")
    assert not LOADED.search('<a href="https://arxiv.org"></a><script src="assets/x.js"></script>')

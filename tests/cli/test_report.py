"""dpmac report: a run or a comparison as one web page."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dpmac_cli.plots import COLOURS, trade_offs
from dpmac_cli.release.page import web_page
from dpmac_cli.runs import folder
from tests.digits_runs import train_digits
from tests.typed import dpmac

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]


def pictures(text: str) -> list[ElementTree.Element]:
    """The pictures of a page, which must be well-formed."""
    return [ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def page_of(path: Path, where: Path) -> str:
    html = where / "page.html"
    result = dpmac("report", path, "--html", html)
    assert result.exit_code == 0, result.output
    text = html.read_text(encoding="utf-8")
    page = Page(text)
    assert all(source.startswith("#") for source in page.sources)
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert "url(http" not in text
    return text


@pytest.mark.long
def test_the_page_of_a_run_has_card_course_attacks_and_settings(tmp_path: Path) -> None:
    run = train_digits(out=tmp_path / "run", epochs=2).folder
    text = page_of(run, tmp_path)
    course, attacks = pictures(text)
    assert "<h2>Test accuracy and epsilon</h2>" in text
    assert "<h2>What any membership attack can reach</h2>" in text
    assert "<td>trust model</td>" in text
    assert "optimizer: dp-macadam" in text
    markers = [use for use in course.iter(f"{SVG}use") if use.get("y") is not None]
    assert len(markers) > 4  # two epochs in each of two panels, and ticks
    assert attacks.find(f".//{SVG}path") is not None


def test_the_page_shows_no_markup_of_its_author() -> None:
    marks = "<b>*a* | `b` [c](d)\\\n\te"
    text = web_page("# A *title*\n\n<script>alert(1)</script>\n", {marks: trade_offs([])})
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;" in text
    assert f"<h2>{escape(marks)}</h2>" in text


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open and print the page with")
def test_a_browser_shows_and_prints_the_page(tmp_path: Path) -> None:
    page_of(train_digits(out=tmp_path / "run", epochs=1).folder, tmp_path)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
    alone = ("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}")
    pdf = tmp_path / "page.pdf"
    for wanted in ("--dump-dom", f"--print-to-pdf={pdf}"):
        done = subprocess.run(
            [str(CHROMIUM), *flags, *alone, wanted, f"file://{tmp_path}/page.html"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        if wanted == "--dump-dom":
            assert done.stdout.count("<svg") == 2
            assert "<title>mlp-small on digits, epsilon" in done.stdout
    assert pdf.read_bytes().startswith(b"%PDF")


def test_a_run_without_privacy_has_no_picture_of_attacks(tmp_path: Path) -> None:
    text = page_of(train_digits(out=tmp_path / "run", no_dp=True, steps=2).folder, tmp_path)
    assert len(pictures(text)) == 1
    assert "What any membership attack" not in text


@pytest.mark.long
def test_the_page_of_a_comparison_has_its_table_and_a_picture(tmp_path: Path) -> None:
    study = tmp_path / "study"
    given = ("--optimizers", "dp-sgd,dp-macadam", "--seeds", "2", "--steps", "2", "--jobs", "1")
    assert dpmac("compare", "--dataset", "digits", *given, "--out", study).exit_code == 0
    text = page_of(study, tmp_path)
    assert "<td>dp-macadam</td>" in text
    assert "publishing anything learnt from all of them" in " ".join(text.split())
    (picture,) = pictures(text)
    colors = {
        color.lower()
        for color in re.findall(r"#[0-9a-f]{6}", ElementTree.tostring(picture).decode())
    }
    assert COLOURS[4].lower() in colors  # of dp-macadam, whatever it is compared with
    values = json.loads((study / "compare.json").read_text())
    values["schema_version"] = 1
    (study / "compare.json").write_text(json.dumps(values))
    result = dpmac("report", study, "--html", tmp_path / "other.html")
    assert result.exit_code == 2
    assert "another version of dpmac" in " ".join(result.output.split())


def study(where: Path) -> Path:
    """A folder with the files of a comparison."""
    texts = {"compare.json": '{"schema_version": 3}', "compare.csv": "", "compare.md": "| |"}
    for name, text in texts.items():
        (where / name).write_text(text)
    folder.seal(where, texts)
    return where


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("compare.json", "{", "compare.json is not a comparison of dpmac"),
        ("compare.json", "[]", "compare.json is not a comparison of dpmac"),
        ("compare.json", '{"schema_version": 1}', "was written by another version of dpmac"),
        ("compare.json", '{"schema_version": 3} ', "compare.json and the checksums"),
        ("compare.md", "| best |", "compare.md and the checksums"),
    ],
)
def test_a_comparison_that_was_changed_is_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (study(tmp_path) / name).write_text(content)
    result = dpmac("report", tmp_path)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("{run}/report.json",), "report.json is a file. Name the folder of the run."),
        (("{run}", "--html", "page.pdf"), "--html page.pdf must end in .html"),
        (("{run}", "--html", "none/page.html"), "folder none of --html does not exist"),
        (("{run}", "--html", "{there}"), "already exists. Add --force to replace it"),
    ],
)
def test_what_cannot_be_written_is_refused(
    args: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    there = tmp_path / "there.html"
    there.write_text("mine")
    given: dict[str, Any] = {"run": train_digits(steps=1).folder, "there": there}
    result = dpmac("report", *(arg.format(**given) for arg in args))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert there.read_text() == "mine"
    assert not Path("report.html").exists()
    assert dpmac("report", given["run"], "--html", there, "--force").exit_code == 0
    assert there.read_text().startswith("<!doctype html>")

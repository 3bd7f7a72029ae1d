"""Hooks of mkdocs: generated pages, linked files outside of docs/, and formulas as MathML."""

import re
import runpy
from collections.abc import Callable
from html import unescape
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages that are made from the program, by name.
BUILT = runpy.run_path(str(Path(__file__).with_name("generate.py")))["BUILT"]
#: A relative link: what is before its target, target, anchor, and what is behind.
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
#: A role of Sphinx, which docstrings name classes by.
ROLE = re.compile(r":(class|func|meth|mod):(?=<code)")
#: A flag in the text.
FLAG = re.compile(r"<code>(--[\w-]+)</code>")
#: Names of languages by the ends of file names.
LANGUAGES = {".cff": "yaml", ".py": "python", ".toml": "toml", ".yaml": "yaml"}
#: A page that is not worth searching.
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and one for each file of the repository that some page links to."""
    for name, page in BUILT.items():
        files.append(File.generated(config, name, content=page()))
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    while pages:
        path, text = pages.popitem()
        for target in (repository_path(match[2], path) for match in LINK.finditer(text)):
            if not target.startswith("docs/") and place(target) not in files.src_uris:
                content = content_of(target)
                files.append(File.generated(config, place(target), content=content))
                if target.endswith(".md"):
                    pages[target] = content
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the pages made for them."""
    here = page.file.src_uri
    path = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"
    known = here in BUILT or (ROOT / path).exists()
    return LINK.sub(link_from(path), markdown) if known else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers show without a script; keep flags in one line."""
    html = FLAG.sub(r'<code class="flag">\1</code>', ROLE.sub("", html))
    return FORMULA.sub(formula, html.replace(" ± ", "&nbsp;±&nbsp;"))


def formula(match: re.Match[str]) -> str:
    """Return a formula as MathML."""
    if match[2] == "(":
        return convert(unescape(match[3]))
    return f'<div class="formula">{convert(unescape(match[3]), display="block")}</div>'


def link_from(path: str) -> Callable[[re.Match[str]], str]:
    """Return what rewrites a link on the page of a file."""

    def rewritten(match: re.Match[str]) -> str:
        target = place(repository_path(match[2], path))
        return f"{match[1]}{relpath(target, dirname(place(path)))}{match[3] or ''}{match[4]}"

    return rewritten


def repository_path(target: str, path: str) -> str:
    """Return the path that a link in a file leads to, from the top of the repository."""
    return normpath(f"{dirname(path)}/{target}").removeprefix("/")


def place(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path.removesuffix('.md')}.md"


def content_of(path: str) -> str:
    """Return the page of a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{UNSEARCHED}# {path}\n\n````{language}\n{text}\n````\n"

"""The programs of the guides for those who come from scikit-learn, and for output checkers."""

import re
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_the_programs_of_the_guide_from_scikit_learn_run_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, block in enumerate(BLOCK.findall((DOCS / "scikit-learn.md").read_text())):
        exec(compile(block, f"scikit-learn.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "above the budget of 2" in printed
    assert "standardscaler: StandardScaler can learn from the records" in printed
    assert names["budget"].spent > 2
    assert Path("digits-model/report.json").exists()


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_sacro_ml_attacks_an_estimator_as_the_guide_says() -> None:
    """Needs sacroml, which has a job of its own."""
    pytest.importorskip("sacroml")
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x, y, test_size=0.5, random_state=0)
    names: dict[str, Any] = dict(
        zip(("X_train", "X_test", "y_train", "y_test"), parts, strict=True)
    )
    [block] = BLOCK.findall((DOCS / "evidence.md").read_text())
    exec(compile(block, "evidence.md", "exec"), names)
    assert [*Path("sacro").glob("report.*")]


def test_no_page_installs_a_stranger_s_package() -> None:
    """The package index has an empty package by the name of LeakPro."""
    for page in DOCS.glob("*.md"):
        assert not re.search(r"(pip|uv)\S* install\S* .*leakpro", page.read_text(), re.IGNORECASE)

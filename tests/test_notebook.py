"""What a notebook shows, and networks that are defined in its cells."""

import math
import re
from contextvars import Context
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpmac_cli import (
    ArrayData,
    Finished,
    InputError,
    ModelError,
    PrivateTraining,
    format_epsilon,
    load_model,
    make_private,
    predict,
    score,
)
from dpmac_cli.errors import counted
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.notebook import as_html
from dpmac_cli.training.private_scores import PrivateScore

X, Y = np.random.default_rng(0).random((150, 6)), np.arange(150) % 2


class Net(nn.Module):
    """As in a cell: no file has it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


def data(**more: object) -> ArrayData:
    return ArrayData(X, Y, low=0, high=1, classes=["no", "<b>&yes"], **more)  # type: ignore[arg-type]


def trained(**more: object) -> tuple[PrivateTraining, Finished]:
    private = make_private(Net(), data(**more), sigma=4, steps=3, batch_size=16)
    list(private)
    return private, private.publish("run", force=True)


def test_a_network_of_a_cell_is_loaded_scored_and_predicted_with() -> None:
    private, run = trained()
    assert repr(run) == "Finished(folder=PosixPath('run'), state='finished')"
    with pytest.raises(ModelError, match=r"add --model FILE\.py:FACTORY"):  # typed as a command
        load_model("run")
    with pytest.raises(ModelError, match="Pass network= with an instance of Net, a function"):
        Context().run(load_model, "run")
    scored = private.evaluate().accuracy
    for network in (Net, Net(), partial(Net), lambda shape, classes: Net()):
        model = load_model("run", network=network).model
        assert model is not network
        assert score("run", data(), network=network).result.accuracy == scored
        assert len(predict("run", X[:5], network=network).predicted) == 5
    assert run.folder == Path("run")


def test_an_instance_keeps_its_weights() -> None:
    trained()
    net = Net()
    before = net.head.weight.detach().clone()
    load_model("run", network=net)
    assert torch.equal(before, net.head.weight)


@pytest.mark.privacy
def test_a_loaded_network_of_a_cell_carries_its_training() -> None:
    private, _ = trained()
    again = make_private(
        load_model("run", network=Net).model, data(), sigma=4, steps=2, batch_size=16
    )
    assert again.epsilon == pytest.approx(private.epsilon)
    list(again)
    assert again.epsilon > private.epsilon


def test_what_is_no_network_is_refused() -> None:
    trained()
    with pytest.raises(InputError, match="network 3 is a value of type int"):
        load_model("run", network=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"must return a torch\.nn\.Module"):
        load_model("run", network=dict)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="does not fit"):
        load_model("run", network=lambda: nn.Linear(6, 2))


# What is shown at the end of a cell.


class Page(HTMLParser):
    """Tags and text of a page, which must be closed as they were opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def shown(result: object) -> str:
    """Text of a result in a notebook, without its tags."""
    page = Page(result._repr_html_())  # type: ignore[attr-defined]
    assert page.tags <= {"div", "strong", "table", "tbody", "tr", "th", "td"}
    return " | ".join(filter(None, page.cells))


def test_a_published_run_shows_the_numbers_that_matter() -> None:
    private, run = trained()
    text, report = shown(run), run.report
    assert f"epsilon | {format_epsilon(report['privacy']['epsilon'])} | delta | " in text
    assert f"protected | one {report['privacy']['unit']['name']}" in text
    assert f"test accuracy | {report['test']['accuracy']:.2%} (95%: " in text
    assert f"trained on | {report['dataset']['train_size']} records" in text
    assert f"tested on | {report['test']['samples']} records" in text
    assert len(run._repr_html_()) < 3000
    assert f"epsilon | {format_epsilon(private.epsilon)}" in shown(private)
    assert "steps | 3 of 3" in shown(private)


def test_scores_show_the_numbers_that_matter() -> None:
    private, _ = trained()
    evaluated, scored = private.evaluate(), score("run", data(), network=Net)
    for result in (evaluated, scored):
        assert f"test accuracy | {evaluated.accuracy:.2%} (95%: " in shown(result)
        assert f"tested on | {evaluated.samples} records" in shown(result)
        assert "which epsilon does not cover" in shown(result)
    assert f"epsilon | {format_epsilon(private.epsilon)} | delta | " in shown(scored)


def test_units_are_counted_as_units() -> None:
    private, run = trained(unit=np.arange(150) // 3)
    units = private.plan.data.facts.train_size
    assert f"trained on | {units} units" in shown(run)
    assert "protected | one unit with all of its training records" in shown(run)
    assert re.search(r"tested on \| \d+ records of \d+ units", shown(private.evaluate()))


def test_a_run_without_privacy_says_so() -> None:
    private = make_private(Net(), data(), no_dp=True, steps=2, batch_size=16)
    list(private)
    text = shown(private.publish("open"))
    assert "privacy | No privacy: no noise was added." in text
    assert "epsilon" not in text


def test_covered_scores_say_so() -> None:
    task = Classification(("a", "b"))
    assert "test accuracy | 75.00% (95%: " in shown(PrivateScore(task, 0.75, 40, 0.01))
    assert "test accuracy | - | tested on | 40 units" in shown(PrivateScore(task, math.nan, 40))


def test_text_is_escaped() -> None:
    page = as_html("<script>a</script>", [("<b>", "<i>&'\"")], "</div><img src=x>")
    assert Page(page).tags == {"div", "strong", "table", "tbody", "tr", "th", "td"}
    run = replace(trained()[1], folder=Path("<img src=x onerror=alert(1)>"))
    assert "<img src=x" in shown(run)


@pytest.mark.parametrize(
    ("number", "what", "said"),
    [(1, "record", "1 record"), (2000, "unit", "2,000 units"), (0, "class", "0 classes")],
)
def test_one_thing_is_singular(number: int, what: str, said: str) -> None:
    assert counted(number, what) == said

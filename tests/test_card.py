"""Model card and web pages: true, complete, and with a code block that works as it stands."""

import csv
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

from dpmac_cli import ArrayData, train
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.release.card import OPEN, QUESTIONS, model_card, templates, without_front_matter
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.report import Report
from dpmac_cli.release.run import Run
from dpmac_cli.release.sentences import TOPICS, WITHOUT_PRIVACY
from dpmac_cli.release.train import resume_folder
from dpmac_cli.tasks.task import METRICS
from tests.digits_runs import SEED, train_digits
from tests.helpers import load_data
from tests.typed import dpmac


def card(where: Path) -> str:
    return (where / "model-card.md").read_text(encoding="utf-8")


def titled(text: str) -> str:
    """The title of a card, below its front matter."""
    return without_front_matter(text).splitlines()[0]


def code(text: str) -> str:
    """The one code block of a card."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def cells(text: str) -> dict[str, str]:
    """The rows of its tables of two columns."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in reversed(rows) if len(row) == 2}


# The code block


@pytest.mark.long
def test_the_code_block_gives_the_reports_accuracy_without_dpmac(finished: Run) -> None:
    test = load_data("digits", finished.folder, torch.device("cpu")).tested
    torch.save({"images": test.images, "labels": test.labels}, finished.folder / "test.pt")
    script = code(card(finished.folder)) + (
        "\nimport sys\n"
        "test = torch.load('test.pt')\n"
        "right = predict(test['images']) == test['labels']\n"
        "assert not [name for name in sys.modules if name.startswith('dpmac')]\n"
        "print(int(right.sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=finished.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    (finished.folder / "test.pt").unlink()
    assert done.stderr == ""
    assert int(done.stdout) / 360 == finished.report["scores"]["accuracy"]["value"]


NUMBERS = """\
columns:
- {name: age, range: [0, 100]}
- {name: smoker, categories: ["no", "yes"], type: boolean}
- {name: ward, categories: [a, b]}
label: {LABEL}
"""
LABELS = {
    "cost": "{column: cost, range: [0, 1000]}",
    "long": "{column: long, range: [0, 500], transform: log1p}",
    "outcome": "{column: outcome, classes: [home, ward]}",
}


@pytest.mark.parametrize("label", LABELS)
def test_the_code_of_a_table_predicts_what_dpmac_predict_does(label: str) -> None:
    """Also for records outside of the declared ranges, to which dpmac clips."""
    draw = random.Random(0)
    Path("schema.yaml").write_text(NUMBERS.replace("{LABEL}", LABELS[label]))

    def write(name: str, ages: list[float]) -> list[list[float]]:
        lines, inputs = [f"age,smoker,ward,{label}"], list[list[float]]()
        for age in ages:
            smoker, ward = draw.choice(("no", "yes")), draw.choice("ab")
            cost = min(1000, 10 * max(age, 0))
            target = {"cost": cost, "long": cost / 2, "outcome": ("home", "ward")[age > 50]}
            lines.append(f"{age},{smoker},{ward},{target[label]}")
            inputs.append([age, smoker == "yes", ward == "a", ward == "b", 0])
        Path(name).write_text("\n".join(lines) + "\n")
        return inputs

    write("t.csv", [draw.uniform(0, 100) for _ in range(400)])
    flags = ("--dataset", "t.csv", "--schema", "schema.yaml", "--model", "linear", "--no-dp")
    trained = dpmac("train", *flags, "--epochs", "20", "--out", "run")
    assert trained.exit_code == 0, trained.output
    rows = torch.tensor(write("new.csv", [-99, -1, 0, 55.5, 100, 101, 180, 1e6]))
    assert dpmac("predict", "run", "new.csv", "--out", "p.csv").exit_code == 0
    with Path("p.csv").open(newline="") as file:
        said = [line["predicted"] for line in csv.DictReader(file)]
    names = dict[str, Any]()
    where = Path.cwd()
    os.chdir("run")
    try:
        exec(code(card(Path())), names)
    finally:
        os.chdir(where)
    for found in (rows, rows.double()):
        if label == "outcome":
            assert [("home", "ward")[k] for k in names["predict"](found).tolist()] == said
        else:
            assert names["predict"](found).tolist() == pytest.approx([*map(float, said)], rel=1e-5)
    assert len(set(said)) > 1


def test_the_heading_of_the_code_says_whether_it_needs_dpmac() -> None:
    """Networks of torch's layers do not; those with layers or features of dpmac do."""
    scattered: dict[str, Any] = {"model": "linear", "features": "scatter"}
    for flags, needed in ((dict[str, Any](), False), (scattered, True)):
        text = card(train_digits(**flags).folder)
        assert f"## Load it {'with' if needed else 'without'} dpmac\n" in text
        assert ("dpmac_cli" in code(text)) == needed


@pytest.mark.parametrize("features", ["scatter", "scatter-mirror"])
def test_the_code_of_a_network_of_your_own_has_its_features(features: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(81 * 4, classes))\n"
    )
    network = f"{tmp_path / 'net.py'}:make"
    out = tmp_path / "run"
    run = train_digits(model=network, features=features, steps=20, sigma=1.0, out=str(out))
    text = code(card(run.folder)).replace("net.py:make", network)
    names: dict[str, Any] = {}
    exec(text.replace("model.safetensors", str(out / "model.safetensors")), names)
    test = load_data("digits", out, torch.device("cpu")).tested
    right = (names["predict"](test.images) == test.labels).double().mean()
    assert float(right) == run.report["scores"]["accuracy"]["value"]


def test_a_model_that_never_says_yes_is_seen_as_such(tmp_path: Path) -> None:
    """Its accuracy is the share of the largest class."""
    x = np.zeros((520, 2), np.float32)
    y = (np.arange(520) % 26 == 0).astype(np.int64)
    data = ArrayData(x, y, x, y, classes=("no", "yes"), low=0.0, high=1.0)
    settings = {"dataset": data, "no_dp": True, "model": "linear", "out": "run"}
    report = train(settings, steps=100, lr=0.1).report
    assert report["scores"]["confusion"] == [[500, 0], [20, 0]]
    assert (
        report["scores"]["accuracy"]["constant"]
        == report["scores"]["accuracy"]["value"]
        == 500 / 520
    )
    text = card(Path("run"))
    said = cells(text)
    assert said["largest class"].startswith("96.15% of the test records: the accuracy of a model ")
    assert said["balanced accuracy"].startswith("50.00%")
    auroc = f"{report['scores']['auroc']['value']:.2%}"
    assert said["AUROC"] == f"{auroc}; 50% for guessing"
    assert said["sensitivity by class"] == "`no` 100.00%, `yes` 0.00%"
    assert "| `yes` | 20 | 0 |" in text
    page = page_of(Path("run"), tmp_path)
    for shown in ("50.00%", "96.15% of the test records", "<td>20</td>", "0.00%"):
        assert shown in page.replace(' style="text-align:right"', "")


def test_an_infinite_epsilon_is_said(finished: Run) -> None:
    """A report has null for it."""
    written = Report.model_validate({**finished.report, "epsilon": None})
    assert ", epsilon infinite at delta" in model_card(written, load_model(finished.folder).model)


# What it says


@pytest.mark.promise("said")
def test_it_says_what_the_report_says(finished: Run) -> None:
    text, report = card(finished.folder), finished.report
    written = Report.model_validate(report)
    assert text == model_card(written, load_model(finished.folder).model)
    sentences = report["sentences"]
    epsilon = format_epsilon(report["epsilon"])
    assert titled(text) == f"# mlp-small on digits, epsilon {epsilon} at delta 1e-05"
    assert sentences["guarantee"] in text
    said = cells(text)
    assert said["network"] == "mlp-small, 4,810 parameters"
    assert said["trained on"] == "digits, 1,437 records"
    assert said["its checksum"] == f"SHA-256 `{DATASETS['digits'].sha256}`"
    assert said["training"] == "dp-macadam, steps: 24 (epochs: 2), expected batch 128, finished"
    accuracy = report["scores"]["accuracy"]["value"]
    low, high = (report["scores"]["accuracy"][end] for end in ("low", "high"))
    assert said["test accuracy"] == (
        f"{accuracy:.2%} of 360 test records (95% interval for records like these: "
        f"{low:.2%} to {high:.2%})"
    )
    assert said["classes"] == "`0`, `1`, `2`, `3`, `4`, `5`, `6`, `7`, `8`, `9`"
    assert (said["epsilon"], said["delta"]) == (epsilon, "1e-05")
    assert said["adjacency"].startswith("add-or-remove-one: adding or removing any one")
    assert said["accountant"] == sentences["accountant"]
    assert "were not saved" in said["seeds"]
    assert "| this model | 24 | poisson | 0.0890745 | 6 |" in text


@pytest.mark.promise("said")
def test_it_says_what_is_not_covered(finished: Run) -> None:
    rest = card(finished.folder).split("## Not covered")[1]
    for said in (
        "Other runs on the same records: any further hyperparameter search",
        "The test records. The accuracy was measured on them without noise. If settings, steps",
        "Times in `report.json` and `metrics.jsonl`: they are measured, without noise.",
        "Attackers who can observe the machine during training.",
    ):
        assert said in rest
    rows = finished.report["sentences"]["computed_from_records"]
    assert rows["number of training records"] == "declared public"
    assert rows["scores of the test records"] == "not covered"
    for what, status in rows.items():
        assert f"| {what} | {status} |" in card(finished.folder)


@pytest.mark.promise("said")
def test_a_seed_is_admitted_in_card_report_and_header() -> None:
    finished = train_digits(seed=SEED)
    said = "There is no guarantee against anyone who knows or guesses the seed"
    text = card(finished.folder)
    title, _, lead, *_ = without_front_matter(text).splitlines()
    assert "name: epsilon at delta 1e-05, only against those who do not know its seed" in text
    assert title.endswith("at delta 1e-05 only against those who do not know its seed")
    assert said in lead
    assert said in cells(text)["seeds"]
    header = load_model(finished.folder).facts.values()
    for facts in (finished.report, header):
        assert facts["sentences"]["guarantee"].count(said) == 1
        assert said in facts["sentences"]["seeds"]


@pytest.mark.promise("said")
def test_a_seeded_run_resumed_into_another_folder_is_seeded() -> None:
    first = train_digits(seed=SEED, out="run")
    *_, last = resume_folder(first.folder, {"steps": "5", "out": "longer"})
    assert isinstance(last, Run)
    assert "only against those who do not know its seed" in titled(card(last.folder))


@pytest.mark.promise("said")
@pytest.mark.promise("said")
def test_a_card_says_whether_the_run_may_be_published(finished: Run) -> None:
    exact = cells(card(finished.folder))["security"]
    assert exact.startswith("Report, card and model may be published if exact test scores may:")
    covered = train_digits(cover_scores=True)
    assert cells(card(covered.folder))["security"].startswith(
        "Report, card and model may be published. So"
    )
    audited = train_digits(canaries=10, out="audited")
    assert "must not be published" in cells(card(audited.folder))["security"]
    assert "may be published" not in card(audited.folder)


def test_a_baseline_says_so_in_its_first_line() -> None:
    text = card(train_digits(no_dp=True, seed=SEED).folder)
    assert "- no-privacy\n" in text
    assert "epsilon" not in text.split("---\n")[1]
    title, _, lead, *_ = without_front_matter(text).splitlines()
    assert title == "# mlp-small on digits, trained without privacy"
    assert lead.startswith("**No privacy: no noise was added.")
    assert "Everything: this is a baseline." in text.split("## Not covered")[1]
    assert "differential privacy" not in text
    assert "epsilon" not in text


@pytest.mark.promise("said")
def test_what_a_run_says_of_privacy_no_baseline_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a topic that is not listed as one of both."""
    monkeypatch.setitem(cast(dict[str, Any], TOPICS), "new", lambda _: iter(["It is noisy."]))
    private, baseline = train_digits(out="private"), train_digits(no_dp=True, out="baseline")
    assert private.report["sentences"]["new"] == "It is noisy."
    assert {"new", "mechanism", "tuning"}.isdisjoint(baseline.report["sentences"])
    assert {*WITHOUT_PRIVACY} < {*TOPICS}


@pytest.mark.promise("said")
def test_every_ancestor_of_a_run_in_another_folder_is_listed() -> None:
    first = train_digits(out="run", steps=5)
    before = card(first.folder)
    *_, last = resume_folder(first.folder, {"steps": "9", "sigma": "8", "out": "longer"})
    assert isinstance(last, Run)
    text = card(last.folder)
    assert "| before 1 | 5 | poisson | 0.0890745 | 6 |" in text
    assert "| this model | 4 | poisson | 0.0890745 | 8 |" in text
    assert cells(text)["epsilon"] == format_epsilon(last.report["epsilon"])
    assert card(first.folder) == before


# The answers of its author.


def answered(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", text.split("### Statement")[1], re.MULTILINE)
    return dict(rows)


def test_answers_are_filled_in(finished: Run) -> None:
    before = card(finished.folder)
    given = ("--contact", "dpo@clinic.example", "--intended-use", "triage | no diagnosis")
    answers = answered(dpmac("card", finished.folder, *given).stdout)
    assert answers["contact"] == "dpo@clinic.example"
    assert answers["intended use"] == "triage \\| no diagnosis"
    assert [row for row, text in answers.items() if text == OPEN] == [
        row for row in QUESTIONS if row not in ("contact", "intended use")
    ]
    assert answers["audit"].startswith("This run was not audited.")
    assert dpmac("card", finished.folder).stdout == card(finished.folder) == before


# Web pages.

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
    """Return the page that is written in the place of another file."""
    html = where / "page.html"
    html.write_text("mine")
    result = dpmac("report", path, "--html", html, "--force")
    assert result.exit_code == 0, result.output
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    page = Page(text)
    assert all(source.startswith("#") for source in page.sources)
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert "url(http" not in text
    return text


def test_the_page_of_a_run_has_card_course_attacks_and_settings(
    finished: Run, tmp_path: Path
) -> None:
    text = page_of(finished.folder, tmp_path)
    course, _, attacks = pictures(text)
    assert "<h2>Test accuracy and epsilon</h2>" in text
    assert "<h2>Test records by true and predicted class</h2>" in text
    title, *_ = text[text.index("Test records by true and") :].split("</figure>")
    drawn = Counter(map(int, re.findall(r"<!-- (\d+) -->", title)))
    for row in finished.report["scores"]["confusion"]:
        drawn.subtract(row)
    assert drawn == Counter([*range(10), *range(10)])  # the names of the classes on both axes
    assert "<h2>What any membership attack can reach</h2>" in text
    assert "<td>trust model</td>" in text
    assert "optimizer: dp-macadam" in text
    markers = [use for use in course.iter(f"{SVG}use") if use.get("y") is not None]
    assert len(markers) > 4  # two epochs in each of two panels, and ticks
    assert attacks.find(f".//{SVG}path") is not None


def test_the_page_of_a_run_has_its_figures_first_then_pictures_guarantee_and_settings(
    finished: Run, tmp_path: Path
) -> None:
    text = page_of(finished.folder, tmp_path)
    order = (
        *("<td>test accuracy</td>", "<td>largest class</td>", "<td>network</td>"),
        "Test records by class",
        *("<h2>Test accuracy and epsilon</h2>", "<h2>Guarantee</h2>", "<h2>Load it"),
        *("<h2>Privacy</h2>", "<h2>Settings</h2>"),
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "library_name" not in text
    ticks = re.findall(r"<!-- ([^ ]+) -->", text[text.index("Test accuracy and epsilon") :])
    assert {"0", "1", "2"} & {*ticks}
    assert not {"0.5", "1.5"} & {*ticks}


# The front matter


def figures_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a report that a repository page shows."""
    names = (metric.key for metric in METRICS.values())
    found = {name: report["scores"].get(name, {}).get("value") for name in names}
    found["epsilon"] = report["epsilon"]
    return {name: value for name, value in found.items() if value is not None}


RUNS: Mapping[str, dict[str, Any]] = {
    "private": {},
    "without privacy": {"no_dp": True},
    "covered": {"cover_scores": True},
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_front_matter_of_a_card_has_the_figures_of_the_report(
    kind: str, tmp_path: Path
) -> None:
    last = train_digits(out=tmp_path / "run", **RUNS[kind])
    found = yaml.safe_load(card(last.folder).split("---\n")[1])
    [index] = found["model-index"]
    [result] = index["results"]
    shown = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert shown == figures_of(last.report)
    assert found["metrics"] == [name for name in shown if name != "epsilon"]
    assert found["datasets"] == [result["dataset"]["name"]] == ["digits"]
    assert (found["library_name"], found["pipeline_tag"]) == ("dpmac", "image-classification")
    assert "license" not in found
    assert ("epsilon" in shown) == (kind != "without privacy")


def test_hugging_face_reads_the_front_matter_of_a_card(finished: Run) -> None:
    hub = pytest.importorskip("huggingface_hub")
    read = hub.ModelCard.load(finished.folder / "model-card.md")
    found = {each.metric_type: each.metric_value for each in read.data.eval_results}
    assert found == figures_of(finished.report)
    assert {each.dataset_name for each in read.data.eval_results} == {"digits"}


def test_no_name_of_private_data_is_a_data_set_of_a_repository(tmp_path: Path) -> None:
    np.savez(tmp_path / "ward.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2, low=-9, high=9)
    settings = {"dataset": tmp_path / "ward.npz", "sigma": 6, "steps": 1, "device": "cpu"}
    last = train(settings, out=tmp_path / "run")
    found = yaml.safe_load(card(last.folder).split("---\n")[1])
    assert "datasets" not in found
    assert found["pipeline_tag"] == "tabular-classification"


def test_a_name_in_a_card_is_no_markup() -> None:
    as_text = templates().filters["as_text"]
    shown = as_text(r"<img src=x> | [a](b) *c* `d` \ e")
    assert shown == r"\<img src=x\> \| \[a\](b) \*c\* \`d\` \\ e"

"""dpmac card: the model card with the author's answers, as a web page, and as a registry entry."""

import json
import re
import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, FormatChecker

from dpmac_cli.release.card import templates, web_page
from tests.digits_runs import train_digits
from tests.typed import dpmac

TEXT, NUMBER, SWITCH = {"type": "string"}, {"type": "number"}, {"type": "boolean"}


def fields(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def texts(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, TEXT)


#: Keys, types and choices of the registry's schema, at the commit that release/card.py names.
REGISTRY = fields(
    ("status", "registry_authors", "tier", "deployment"),
    status={"enum": ["Draft", "Pending", "Approved"]},
    registry_authors={"type": "array", "items": TEXT, "minItems": 1},
    tier={"enum": [1, 2, 3]},
    deployment=fields(
        (
            *("name", "data_curator", "description", "intended_use", "data_product_type"),
            *("data_product_region", "publication_date"),
        ),
        **texts("name", "data_curator", "description", "intended_use", "data_product_region"),
        data_product_type={"enum": ["Summary statistics", "Machine learning model", "Dataset"]},
        publication_date={"type": "string", "format": "date"},
        dp_flavor=fields(
            ("name", "data_domain", "unprotected_quantities"),
            name={"enum": ["Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP"]},
            **texts("input_metric", "bound_on_input_distance", "output_measure"),
            **texts("bound_on_output_distance", "data_domain", "unprotected_quantities"),
        ),
        privacy_loss=fields(
            ("privacy_unit", "privacy_parameters"),
            **texts("privacy_unit", "privacy_unit_description", "privacy_parameters_description"),
            privacy_parameters=fields((), epsilon=NUMBER, rho=NUMBER, delta=NUMBER),
        ),
        model=fields(
            ("model_name",),
            model_name={"enum": ["Local", "Central", "Shuffle", "Federated", "Varies"]},
            is_many_release=SWITCH,
            is_dynamic=SWITCH,
            is_interactive=SWITCH,
            **texts("model_name_description", "actors", "is_many_release_description"),
        ),
        accounting=fields(
            ("post_processing", "composition"), **texts("post_processing", "composition")
        ),
        implementation=fields(
            ("pre_processing_eda_hyperparameter_tuning", "mechanisms", "justification"),
            **texts("pre_processing_eda_hyperparameter_tuning", "mechanisms", "justification"),
        ),
    ),
)
#: What the guide asks, from the guarantee down to what it rests on.
QUESTIONS = (
    *("unit of privacy", "what epsilon means", "trust model", "adversary", "mechanism", "sampler"),
    *("accountant", "randomness and floating point", "post-processing", "tuning"),
    *("public data and weights", "audit", "side channels", "security", "software"),
    *("data domain", "bias", "release", "other releases"),
)
OPEN = (
    *("data curator", "intended use", "contact", "region", "access and collection"),
    "justification",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("card") / "run").folder


def answered(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", text.split("### Statement")[1], re.MULTILINE)
    return dict(rows)


@pytest.mark.long
def test_every_question_is_answered_or_marked_open(run: Path) -> None:
    text = dpmac("card", run).stdout
    assert text == (run / "model-card.md").read_text()
    answers = answered(text)
    assert set(answers) >= {*QUESTIONS, *OPEN}
    assert all(answers[row] == "to be filled in" for row in OPEN)
    assert not any("to be filled in" in answers[row] for row in QUESTIONS)
    assert answers["audit"].startswith("This run was not audited.")
    assert answers["public data and weights"].startswith("the dataset digits")


def test_answers_are_filled_in(run: Path) -> None:
    given = ("--contact", "dpo@clinic.example", "--intended-use", "triage | no diagnosis")
    before = (run / "model-card.md").read_bytes()
    answers = answered(dpmac("card", run, *given).stdout)
    assert answers["contact"] == "dpo@clinic.example"
    assert answers["intended use"] == "triage \\| no diagnosis"
    assert answers["region"] == "to be filled in"
    assert answered(dpmac("card", run, "--region", "  ").stdout)["region"] == "to be filled in"
    assert (run / "model-card.md").read_bytes() == before


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


def test_the_page_stands_alone_and_shows_no_markup_of_its_author(run: Path) -> None:
    text = dpmac("card", run, "--format", "html", "--contact", "<script>alert(1)</script>").stdout
    page = Page(text)
    assert page.sources == []
    assert "script" not in page.tags
    assert "&lt;script&gt;" in text
    assert page.tags.count("table") == text.count("<table>") >= 5
    assert "<title>mlp-small on digits, epsilon " in text
    for question in QUESTIONS:
        assert f"<td>{question}</td>" in text


def test_the_registry_entry_is_as_its_schema_says(run: Path) -> None:
    text = dpmac("card", run, "--format", "registry-yaml", "--data-curator", 'A "B": c').stdout
    entry = yaml.safe_load(text)
    Draft202012Validator(REGISTRY, format_checker=FormatChecker()).validate(entry)
    deployment = entry["deployment"]
    report = json.loads((run / "report.json").read_text())
    loss = deployment["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == report["privacy"]["epsilon"]
    assert loss["privacy_parameters"]["delta"] == 1e-5
    assert loss["privacy_unit"] == "training record"
    assert deployment["data_curator"] == 'A "B": c'
    assert deployment["data_product_type"] == "Machine learning model"
    assert "measured times" in deployment["dp_flavor"]["unprotected_quantities"]
    assert "scores of the test records" in deployment["dp_flavor"]["unprotected_quantities"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("{run}/report.json",), "report.json is a file. Name the folder of the run."),
        (("{run}", "--format", "pdf"), "--format: there is no format 'pdf'"),
        (("{base}", "--format", "registry-yaml"), "has no finite epsilon"),
    ],
)
def test_what_has_no_card_is_refused(args: tuple[str, ...], message: str, run: Path) -> None:
    base = train_digits(no_dp=True, steps=1).folder if "{base}" in args else ""
    result = dpmac("card", *(arg.format(run=run, base=base) for arg in args))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def copy_of(run: Path) -> Path:
    return Path(shutil.copytree(run, "copy"))


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["model-card.md", "report.json", "metrics.jsonl", "config.yaml"])
@pytest.mark.parametrize("lost", [True, False])
def test_no_card_of_a_run_that_was_edited(name: str, lost: bool, run: Path) -> None:
    """What it says of epsilon may be false."""
    file = copy_of(run) / name
    edited = file.read_text().replace("a", "b")
    file.unlink()
    if not lost:
        file.write_text(edited)
    for command in (("card", "copy"), ("card", "copy", "--format", "html"), ("report", "copy")):
        result = dpmac(*command)
        assert result.exit_code == 2
        assert f"copy: {name} and the checksums in SHA256SUMS do not match" in result.output
    assert not Path("report.html").exists()


def test_marks_in_an_answer_are_shown_as_they_are(run: Path) -> None:
    given = "<b>*a* | `b` [c](d)\\\n\te"
    assert answered(dpmac("card", run, "--contact", given).stdout)["contact"] == (
        r"\<b\>\*a\* \| \`b\` \[c\](d)\\ e"
    )
    page = dpmac("card", run, "--contact", given, "--format", "html").stdout
    assert "<td>&lt;b&gt;*a* | `b` [c](d)\\ e</td>" in page


@pytest.mark.parametrize("name", ["a|b", "``", "` <i> ```", "x`|`y", "<b>"])
def test_names_of_classes_are_code_whatever_they_are(name: str) -> None:
    cell = templates().from_string("|  |\n| --- |\n| {{ name|as_code }} |").render(name=name)
    assert f"<td><code>{escape(name, quote=False)}</code></td>" in web_page(cell)


@pytest.mark.parametrize(
    ("answer", "no_dp", "message"),
    [
        ("a\x01b", False, "The answer to 'contact' has characters that cannot be displayed."),
        ("a\u202eb", False, "The answer to 'contact' has characters that cannot be displayed."),
        ("a", True, "has no row 'contact': it promises no privacy."),
    ],
)
def test_answers_that_cannot_be_shown_are_refused(
    answer: str, no_dp: bool, message: str, run: Path
) -> None:
    where = train_digits(no_dp=True, steps=1).folder if no_dp else run
    result = dpmac("card", where, "--contact", answer)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_report_of_an_older_version_has_no_entry(run: Path) -> None:
    where = copy_of(run)
    (where / "SHA256SUMS").unlink()
    report = json.loads((where / "report.json").read_text())
    for lacking in ("randomness", "unit"):
        del report["privacy"][lacking]
        (where / "report.json").write_text(json.dumps(report))
        result = dpmac("card", where, "--format", "registry-yaml")
        assert result.exit_code == 2
        assert "was written by an older dpmac" in " ".join(result.output.split())


def test_the_card_tells_the_sampler(run: Path) -> None:
    assert " | poisson | 0.0890745 | " in dpmac("card", run).stdout
    allocated = train_digits(steps=12, sampler="random-allocation").folder
    text = dpmac("card", allocated).stdout
    assert "| 12 | random-allocation | one of every 12 steps | " in text
    assert "12 randomly allocated steps (each training record in one of every 12)" in text

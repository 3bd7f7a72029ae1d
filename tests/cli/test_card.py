"""dpmac card: the model card with the author's answers."""

import re
import shutil
from html import escape
from pathlib import Path

import pytest

from dpmac_cli.release.card import templates
from dpmac_cli.release.page import web_page
from tests.digits_runs import train_digits
from tests.typed import dpmac

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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("{run}/report.json",), "report.json is a file. Name the folder of the run."),
        (("{run}", "--format", "html"), "For a web page, type: dpmac report RUN --html FILE"),
    ],
)
def test_what_has_no_card_is_refused(args: tuple[str, ...], message: str, run: Path) -> None:
    result = dpmac("card", *(arg.format(run=run) for arg in args))
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
    for command in (("card", "copy"), ("report", "copy")):
        result = dpmac(*command)
        assert result.exit_code == 2
        assert f"copy: {name} and the checksums in SHA256SUMS do not match" in result.output
    assert not Path("report.html").exists()


def test_marks_in_an_answer_are_shown_as_they_are(run: Path) -> None:
    given = "<b>*a* | `b` [c](d)\\\n\te"
    assert answered(dpmac("card", run, "--contact", given).stdout)["contact"] == (
        r"\<b\>\*a\* \| \`b\` \[c\](d)\\ e"
    )


@pytest.mark.parametrize("name", ["a|b", "``", "` <i> ```", "x`|`y", "<b>"])
def test_names_of_classes_are_code_whatever_they_are(name: str) -> None:
    cell = templates().from_string("|  |\n| --- |\n| {{ name|as_code }} |").render(name=name)
    assert f"<td><code>{escape(name, quote=False)}</code></td>" in web_page(cell, {})


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


def test_the_card_tells_the_sampler(run: Path) -> None:
    assert " | poisson | 0.0890745 | " in dpmac("card", run).stdout
    allocated = train_digits(steps=12, sampler="random-allocation").folder
    text = dpmac("card", allocated).stdout
    assert "| 12 | random-allocation | one of every 12 steps | " in text
    assert "12 randomly allocated steps (each training record in one of every 12)" in text

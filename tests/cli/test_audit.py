"""dpmac train --canaries and dpmac eval --audit, as typed and as seen."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError
from dpmac_cli.release import audit, sentences
from dpmac_cli.release.model_file import load_model
from dpmac_cli.runs import folder
from tests.digits_runs import digits_config
from tests.tiers import rest_long
from tests.typed import dpmac

DIGITS = (
    *("train", "--dataset", "digits", "--sigma", "6", "--steps", "3", "--seed", "1"),
    *("--canaries", "100"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """An audit run, and what was seen of it."""
    out = tmp_path_factory.mktemp("audit") / "run"
    result = dpmac(*DIGITS, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


@pytest.mark.privacy
def test_an_audit_run_says_so_everywhere(trained: tuple[Path, Result]) -> None:
    out, seen = trained
    lines = seen.stdout.splitlines()
    assert any(line.startswith("AUDIT: 100 canaries,") for line in lines[:4])
    assert sentences.AUDIT_RUN in lines
    assert f"next: dpmac eval --audit {out}, dpmac report {out}" in lines
    assert lines[-2].endswith("audit.json")
    report = json.loads((out / folder.REPORT).read_text())
    assert report["audit"]["statement"] == sentences.AUDIT_RUN
    assert (report["audit"]["canaries"], report["audit"]["guesses"]) == (100, 20)
    header = load_model(out, None, torch.device("cpu")).facts
    assert header["audit"] == report["audit"]
    assert f"**{sentences.AUDIT_RUN}**" in (out / folder.CARD).read_text()
    assert folder.vouched(out, folder.AUDIT)


@pytest.mark.privacy
def test_the_report_prices_the_rate_at_which_records_and_canaries_were_drawn(
    trained: tuple[Path, Result],
) -> None:
    out, _ = trained
    price = json.loads((out / folder.REPORT).read_text())["privacy"]
    assert price["sampling_rate"] == 128 / (1437 + 50)
    again = dpmac("account", out)
    assert again.exit_code == 0
    assert "0.0860" in again.stdout


def test_an_ordinary_run_is_no_audit(tmp_path: Path) -> None:
    result = dpmac(*DIGITS[:-2], "--out", tmp_path / "run")
    assert "audit" not in result.stdout.lower()
    assert json.loads((tmp_path / "run" / folder.REPORT).read_text())["audit"] is None
    assert not (tmp_path / "run" / folder.AUDIT).exists()
    found = dpmac("eval", tmp_path / "run", "--audit")
    assert found.exit_code == 2
    assert "it is not an audit run, or has not ended" in found.stderr


@pytest.mark.long
def test_what_the_attack_found_beside_the_claim(trained: tuple[Path, Result]) -> None:
    out, _ = trained
    told = dpmac("eval", out, "--audit")
    body = json.loads(dpmac("eval", out, "--audit", "--json").stdout)
    kept = json.loads((out / folder.AUDIT).read_text())
    report = json.loads((out / folder.REPORT).read_text())
    assert told.exit_code == 0
    assert body["claimed_epsilon"] == kept["claimed"] == report["privacy"]["epsilon"]
    assert body["guesses"] == 20
    assert body["confidence"] == 0.95
    assert body["holds"] is True
    assert body["run"] == str(out)
    lines = told.stdout.splitlines()
    assert lines[0].startswith("claimed: epsilon 0.08674 at delta 1e-05")
    assert lines[1].startswith(f"attack: {body['right']} of 20 guesses right, 100 canaries")
    bounds = (
        f"{body['lower_bound']:.3f} for any training, and at least {body['curve_bound']:.3f} if"
    )
    assert lines[2].startswith(f"proven: epsilon at least {bounds} only the amount of noise may be")
    assert lines[3].startswith("The attack does not contradict the claim. That does not prove it")


@pytest.fixture(scope="module", autouse=True)
def _bounds_computed_once() -> Iterator[None]:
    """A bound takes seconds, and several commands print the same one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(audit, "curve_bound", cache(audit.curve_bound))
        yield


@pytest.mark.privacy
@pytest.mark.parametrize("known", rest_long([{"events": []}, {}], short=1))
def test_a_claim_that_the_attack_contradicts_is_exit_code_4(
    known: dict[str, Any], trained: tuple[Path, Result], tmp_path: Path
) -> None:
    """With the bound for any training alone, and for this one."""
    kept: dict[str, Any] = json.loads((trained[0] / folder.AUDIT).read_text())
    scores = [1.0 if coin else -1.0 for coin in kept["coins"]]
    (tmp_path / folder.CONFIG).write_text("")
    text = json.dumps({**kept, "guesses": 40, "scores": scores, **known})
    (tmp_path / folder.AUDIT).write_text(text)
    told, found = (dpmac("eval", tmp_path, "--audit", *flags) for flags in ((), ("--json",)))
    assert (told.exit_code, found.exit_code) == (4, 4)
    assert "40 of 40 guesses right" in told.stdout
    assert "The attack contradicts the claim" in told.stdout
    assert "training has a bug" in told.stdout
    body = json.loads(found.stdout)
    assert (body["right"], body["holds"]) == (40, False)
    assert body["lower_bound"] > 2
    assert told.stderr == found.stderr == ""


def test_a_model_of_an_audit_can_still_be_scored(trained: tuple[Path, Result]) -> None:
    result = dpmac("eval", trained[0])
    assert result.exit_code == 0
    assert "360 samples" in result.stdout


REFUSED = [
    (("--canaries", "1"), "--canaries must be at least 2 and at most 1,000,000, not 1"),
    (("--canaries", "many"), "--canaries: 'many' is not a whole number"),
    (("--canaries", "50", "--no-dp"), "without a privacy guarantee there is nothing to audit"),
    (
        ("--canaries", "50", "--sampler", "random-allocation"),
        "only poisson sampling can be audited, not random-allocation",
    ),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_audited_is_refused(flags: tuple[str, ...], message: str) -> None:
    result = dpmac("train", "--dataset", "digits", "--out", "run", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not Path("run").exists()


def test_more_canaries_than_parameters_are_exit_code_4() -> None:
    flags = ("--sigma", "1.5", "--canaries", "5000")
    result = dpmac("train", "--dataset", "digits", "--out", "run", *flags)
    assert result.exit_code == 4
    assert (
        "--canaries 5,000: each canary needs its own parameter, but the model has only 4,810"
        in result.stderr
    )
    assert not Path("run").exists()


def test_an_audit_is_not_for_comparing() -> None:
    result = dpmac("compare", "--dataset", "digits", "--canaries", "50")
    assert result.exit_code == 2
    assert "No such option: --canaries" in result.stderr
    Path("study.yaml").write_text("dataset: digits\ncanaries: 50\n")
    result = dpmac("compare", "--config", "study.yaml")
    assert result.exit_code == 2
    assert "study.yaml: There is no setting 'canaries'." in result.stderr


@pytest.mark.parametrize("flag", ["--dataset", "--data-dir"])
def test_an_audit_scores_no_data_set(trained: tuple[Path, Result], flag: str) -> None:
    result = dpmac("eval", trained[0], "--audit", flag, "digits")
    assert result.exit_code == 2
    assert f"leave out {flag}" in result.stderr


@pytest.mark.parametrize(
    ("canaries", "guesses"), [(2, 2), (19, 19), (20, 20), (199, 20), (210, 21), (5000, 500)]
)
def test_a_tenth_is_guessed_and_a_few_at_least(canaries: int, guesses: int) -> None:
    config = digits_config(canaries=canaries)
    assert config.privacy.guesses == guesses


@pytest.mark.privacy
def test_a_config_file_repeats_an_audit(trained: tuple[Path, Result]) -> None:
    config = resolve({}, trained[0] / folder.CONFIG).plan
    assert (config.privacy.canaries, config.privacy.guesses) == (100, 20)
    assert config.privacy.event.sampling_rate == 128 / (DATASETS["digits"].train_size + 50)
    with pytest.raises(InputError, match="without a privacy guarantee there is nothing to audit"):
        resolve({"no_dp": True}, trained[0] / folder.CONFIG)

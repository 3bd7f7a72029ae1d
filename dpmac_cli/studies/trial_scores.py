"""Scores that decide which trial of a search is best: covered ones, or scores on public data."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from dpmac_cli.config.plan import DataPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.models.registry import UserModel, parse_model
from dpmac_cli.release.scoring import score_trial
from dpmac_cli.runs import folder
from dpmac_cli.runs.prepare import record_sums
from dpmac_cli.storage.report_keys import ReportKeys
from dpmac_cli.studies.public_records import check_public
from dpmac_cli.studies.transfer import last_score
from dpmac_cli.tasks.known import METRICS

#: Score of a run, by its folder and the name of a metric; larger for better runs.
Score: TypeAlias = Callable[[Path, str], float]


def covered_score(run: Path, metric: str) -> float:
    """Return the last score of a run, which is larger for better runs.

    Raises ValueError if it is not covered: then the choice by it would reveal test records.
    """
    report: ReportKeys = json.loads((run / folder.REPORT).read_bytes())
    if not (report["privacy"]["covered_scores"] or {}).get("released"):
        raise ValueError("a search needs covered scores")
    return last_score(run, metric)


class PublicScore:
    """Score of a run on the test records of data that are declared public.

    Args:
        judge: the public data. device: where to score.
        private: the private records.

    Attributes:
        checksum: checksum of the public records.

    Raises:
        InputError: they are the private records, or many of them.
    """

    def __init__(self, judge: DataPlan, device: torch.device, private: Data) -> None:
        self._data = load_data(judge.source, judge.folder, device, facts=judge.facts)
        self._facts, self._device = judge.facts, device
        harm = "exact scores reveal its test records"
        check_public(f"--score-on {judge.dataset}", self._data, private, harm)
        self.checksum = record_sums(self._data)["data"]

    def __call__(self, run: Path, metric: str) -> float:
        """Return the score of a run, which is larger for better runs."""
        model = str(folder.settings(run)["model"])
        factory = model if isinstance(parse_model(model), UserModel) else None
        found = score_trial(run, self._data, self._facts, self._device, factory).metric(metric)
        return -math.inf if math.isnan(found) else METRICS[metric].better(found)

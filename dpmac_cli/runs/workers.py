"""Ranks other than 0: compute a share of every batch, and nothing else."""

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.facts import listed
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.sources import by_flag, by_setting
from dpmac_cli.dp.torch_errors import torch_failures_explained
from dpmac_cli.errors import InputError, RunError
from dpmac_cli.models.dataset import Data, fingerprint
from dpmac_cli.models.digest import digest
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.runs.environment import choose_device, device_name, environment
from dpmac_cli.runs.folder import resume_command
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.training.distributed import DismissedError, Ranks


def brief_workers(trainer: Trainer, folder: Path, task: PreparedRun, keys: Keys) -> None:
    """Send the run's plan, progress and folder to the other ranks, without secrets.

    The key of layers is sent, those of noise and batches are not. The other side is
    :func:`run_worker`. It returns once all ranks have agreed on what they compute.

    Args:
        trainer: plan and processes of the run, of which this is the first, and its state, which
            the other ranks take over.
        folder: its folder, which messages of the other ranks name.
        task: its network and data.
        keys: keys, of which the others get those of layers and of the initial weights.

    Raises:
        InputError: ranks have other records, or compute otherwise.
        RunError: another rank failed.
    """
    plan = trainer.plan
    brief = {
        "config": by_flag(plan.recorded),
        "folder": str(folder),
        "event": asdict(plan.event),
        "steps": trainer.steps,
        "numbers": trainer.state.numbers(),
        "keys": {name: getattr(keys, name).hex() for name in ("layers", "init")},
    }
    trainer.ranks.brief(brief)
    _agree(trainer, task)


def run_worker(ranks: Ranks, local: Mapping[str, Any]) -> None:
    """Receive the run from rank 0, and work on it until rank 0 ends it; then return.

    The plan is that of rank 0, with the data and the device of this machine. Nothing is written.

    Args:
        ranks: the processes of the run, of which this is not the first.
        local: settings of this machine, ``data_dir`` and ``device``, by name; {} for the defaults.

    Raises:
        DpmacError: this rank or another one cannot continue. The message has the command that
            resumes the run, if training had begun.
    """
    brief = None
    try:
        with torch_failures_explained():
            choose_device(local.get("device", "auto"), ranks)
            brief = ranks.brief()
            event = TrainingEvent(**brief["event"])
            resolved = resolve(local, by_setting(brief["config"]), noise=event)
            plan = resolved.plan
            init, layers = (bytes.fromhex(brief["keys"][name]) for name in ("init", "layers"))
            keys = Keys(init=init, layers=layers)
            device = choose_device(plan.settings.device, ranks)
            task = prepare(plan, device, keys, resolved.data)
            account = Account(event=plan.event.first(brief["steps"]))  # rank 0 has the ledger
            trainer = make_trainer(plan, task, keys, account, ranks=ranks)
            _agree(trainer, task)
            trainer.state.go_to(brief["numbers"])
            while True:
                trainer.step()
    except DismissedError:
        return
    except RunError as failure:
        if brief is None:
            raise
        remedy = f"To resume from the last checkpoint: {resume_command(Path(brief['folder']))}"
        raise RunError([f"{error} {remedy}" for error in failure.errors]) from failure


def _agree(trainer: Trainer, task: PreparedRun) -> None:
    """Synchronise the state of all ranks, and reject different records, which could count twice.

    Ranks that may round differently are rejected too.
    """
    tensors = task.model.state_dict(keep_vars=True).items()
    frozen = {name: t.detach().cpu() for name, t in tensors if not t.requires_grad}
    compared = {
        "records": _records(trainer.plan, task.data),
        "network": digest(frozen, {}),
        "device": device_name(trainer.state.theta.device),
        **environment(),
    }
    sums = list[int]()
    for value in compared.values():
        sums.append(int(sha256(str(value).encode()).hexdigest()[:15], 16))
    differs = ~trainer.ranks.alike(torch.tensor(sums))
    others = list(compress(compared, differs.tolist()))
    if others:
        raise InputError(
            f"The processes of this run do not have the same {listed(others)}, so a record "
            "could count more than once in a step, or be rounded differently. Use the same files, "
            "devices, libraries, threads and environment variables on every machine, and run the "
            "command again."
        )
    trainer.share_state()


def _records(plan: Plan, data: Data) -> str:
    """Return the SHA-256 of records or features, their units, and what is declared of them."""
    facts, units = plan.facts, list[str | None]()
    for split in data.splits:
        units.append(None if split.units is None else split.units.sha256())
    record = {
        "records": fingerprint(*data.splits),
        "units": units,
        "declared": [facts.task.facts, facts.records.model_dump()],
    }
    return digest({}, record)

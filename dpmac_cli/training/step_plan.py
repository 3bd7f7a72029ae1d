"""Arguments of a :class:`.PrivateStep`, and the plan that they make."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config import checks
from dpmac_cli.config.datasets import Defaults
from dpmac_cli.config.facts import DataFacts
from dpmac_cli.config.flags import unknown
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.planning import plan as plan_run
from dpmac_cli.config.records import Numbers
from dpmac_cli.config.settings import GROUPS, NO_CALIBRATION, OPTIMIZER, RENAMED
from dpmac_cli.config.sources import given_settings
from dpmac_cli.errors import InputError, ModelError, raise_errors
from dpmac_cli.randomness.sampling import BatchSampling
from dpmac_cli.tasks.classification import Classification

#: Settings of docs/configuration.md that a step has.
SETTINGS_OF_STEP = (
    *("fix_norm", "isolate", "epochs", "steps", "sigma", "epsilon", "max_epsilon", "delta"),
    "secure",
    *(name for name, group in GROUPS.items() if group == OPTIMIZER),
    *("lr_schedule", "warmup_steps", "weight_decay", "physical_batch"),
)
#: Message for a seed in a program.
NO_SEED = (
    "seed: a program has none, because it may create two trainings, or load a state twice, and "
    "with the same seed both would add the same noise to two sums, whose difference has none. "
    "Leave it out: every training draws secret keys of its own. For the initial weights of your "
    "network use torch.manual_seed(0); to repeat a whole run, use dpmac train --seed 0."
)
#: Name of the batches of a program in place of a dataset, and records of them to process at a time.
BATCHES, RECORDS_AT_A_TIME = "<batches>", 256


def plan_of_step(
    model: nn.Module,
    sampling: BatchSampling,
    before: tuple[TrainingEvent, ...],
    keywords: Mapping[str, Any],
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of the steps of a program, and notes on its settings.

    Args:
        model: the network, of which only its name matters.
        sampling: how batches are drawn.
        before: events on the same records, which a target epsilon must cover too.
        keywords: settings by name.

    Raises:
        InputError: settings cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    settings: dict[str, Any] = {
        **keywords,
        "model": f"{type(model).__module__}:{type(model).__qualname__}",
        "batch_size": sampling.batch_size,
        "sampler": sampling.sampler,
        "calibration": NO_CALIBRATION,
    }
    completed = given_settings(settings)
    plan = plan_run(completed, _facts_of_batches(sampling, completed.model), earlier=before)
    notes = checks.notes(plan, completed.explicit)
    # Nothing is scored or published.
    return replace(plan, settings=plan.settings.replace(ema=None)), notes


def _facts_of_batches(sampling: BatchSampling, model: str) -> DataFacts:
    """Return facts of records that a program supplies, of which their number alone matters."""
    defaults = Defaults(model, sampling.batch_size, physical_batch=RECORDS_AT_A_TIME)
    return DataFacts(
        name=BATCHES,
        typed=BATCHES,
        train_size=sampling.n,
        test_size=0,
        records=Numbers(shape=(1,), low=(-1.0,), high=(1.0,)),
        task=Classification(("0", "1")),  # no setting of a step depends on it
        defaults=defaults,
        about="",
    )


def check_arguments(
    model: object, loss: object, sampling: object, account: object, keywords: Mapping[str, Any]
) -> None:
    """Reject arguments of a :class:`.PrivateStep` by their types and names.

    Args:
        model, loss, sampling, account: what a program passed.
        keywords: settings by name.

    Raises:
        InputError: lists every argument that cannot be used.
        ModelError: there is no network.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{getattr(model, '__name__', repr(model))} is not a torch module. Pass a network "
            "instance, such as torch.nn.Linear(64, 10)."
        )
    errors = []
    if not callable(loss):
        errors.append(
            f"loss must be a function loss(model, batch) that returns one loss per record, not a "
            f"{type(loss).__name__}."
        )
    if not isinstance(sampling, BatchSampling):
        errors.append(
            "sampling must say how batches are drawn: Poisson(n=len(dataset), batch_size=256) "
            f"or RandomAllocation(...), not {sampling!r}."
        )
    if not isinstance(account, Account | None):
        errors.append(
            f"account must come from Account.create(...) or Account.open(...), not {account!r}."
        )
    if keywords.get("seed") is not None:
        errors.append(NO_SEED)
    for name in keywords:
        if name not in (*SETTINGS_OF_STEP, "seed"):
            errors.append(unknown(name, SETTINGS_OF_STEP, RENAMED))
    raise_errors(errors)


def check_account(account: Account, plan: Plan) -> None:
    """Reject an account to which the events of a plan cannot be added.

    Args:
        account: account of the records.
        plan: plan of the steps.

    Raises:
        InputError: it protects another unit, or is for another delta.
    """
    if account.unit != plan.account_unit:
        raise InputError(
            f"The account protects one {account.unit[0]}, and this training one "
            f"{plan.account_unit[0]}: costs of different units cannot be added. Use the same unit, "
            "or an account of its own for other records."
        )
    if account.delta != plan.settings.delta:
        raise InputError(
            f"{{delta=}}{plan.settings.delta:g} is not that of the account, {account.delta:g}. "
            "Leave it out."
        )


def check_size(size: int, sampling: BatchSampling) -> None:
    """Reject a dataset of another number of records than batches are drawn from.

    Args:
        size: number of records of the dataset.
        sampling: how batches are drawn, from n records.

    Raises:
        InputError: they differ.
    """
    if size != sampling.n:
        raise InputError(
            f"The dataset has {size:,} records, but epsilon was computed for n={sampling.n:,}. Use "
            f"sampling={type(sampling).__name__}(n=len(dataset), ...)."
        )

"""A silo: rounds of private steps on records that stay in one place.

Order of a round: the request is checked; its steps begin in the account on disk; records are read
and steps taken; state and reply are written; the reply leaves. So whatever is killed, what was
released is counted, and a request that is repeated gets the reply that was written.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dpmac_cli import files
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.part import Part
from dpmac_cli.dp.clipping.batches import Batch, map_rows
from dpmac_cli.errors import BudgetError, DpmacError, InputError
from dpmac_cli.models.digest import digest
from dpmac_cli.models.trial_samples import BatchLoss, device_of
from dpmac_cli.randomness.sampling import BatchSampling
from dpmac_cli.silo.claims import Claim
from dpmac_cli.silo.rounds import (
    ACCOUNT,
    LOCK,
    PROBLEMS,
    REPLY,
    ROUNDS,
    STATE,
    Rounds,
    read_rounds,
)
from dpmac_cli.training.carried_accounts import carried_by
from dpmac_cli.training.private_step import PrivateStep
from dpmac_cli.training.reading import Checked

#: All that a failure may say to a server. None depends on a record.
LOCKED = "This silo is in use by another process."
USED_UP = "The privacy budget of this silo is used up."
REFUSED = "The silo refused the request. problems.txt in its folder says why."
#: Settings of a PrivateStep that a silo chooses itself.
CHOSEN = ("sigma", "epochs", "max_epsilon", "seed", "account")


class SiloError(DpmacError):
    """A silo does not answer: one of the three texts above, which a server may see."""


@dataclass(frozen=True)
class Reply:
    """All that leaves a silo in a round.

    Attributes:
        weights: trained parameters by name, after noise. Buffers stay.
        claim: public facts.
    """

    weights: Mapping[str, Tensor]
    claim: Claim


class Silo:
    """Private steps on the records of one place, some in each round of a federation.

        silo = Silo("/srv/silo", Net(), loss, records, sampling=Poisson(n=4000, batch_size=80),
                    epsilon=3, rounds=60, steps=5, silos=10)
        with silo:
            reply = silo.round(run, number, weights, seen=begun)

    Every step is in an account on disk before a record is read. All records are read and checked
    when the silo is created, and the loss of each is computed, so that none makes a round fail; one
    that cannot be read later adds nothing, so that no reply depends on whether it can.

    Args:
        folder: folder of this silo's account, of these records alone. It must not be deleted or
            put back from a backup: what was spent would be forgotten.
        network: the network, with its initial weights, which no record has changed.
        loss: ``loss(model, batch)``, as for :class:`~dpmac_cli.PrivateStep`.
        records: map-style dataset of n records, such as a ``torch.utils.data.Dataset``.
        sampling: how batches are drawn. An epoch of :class:`~dpmac_cli.RandomAllocation` must end
            with a round.
        epsilon: epsilon of all rounds together, which a lost round shortens.
        rounds: number of rounds.
        steps: number of steps of a round.
        silos: number of silos. The average of their weights has less noise, so the default learning
            rate is multiplied by its square root.
        settings: other arguments of :class:`~dpmac_cli.PrivateStep`, such as ``optimizer`` and
            ``lr``.

    Raises:
        InputError: settings or records cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        network: nn.Module,
        loss: BatchLoss,
        records: Any,
        *,
        sampling: BatchSampling,
        epsilon: float,
        rounds: int,
        steps: int,
        silos: int = 1,
        **settings: Any,
    ) -> None:
        if chosen := sorted(settings.keys() & set(CHOSEN)):
            raise InputError(f"A silo has no {', '.join(chosen)}: noise is new in every round.")
        for name, count in (("rounds", rounds), ("steps", steps), ("silos", silos)):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"{name} must be a whole number from 1, not {count!r}.")
        if carried_by(network, loss):
            raise InputError("The network was trained privately before. Start from public weights.")
        if sampling.sampler != "poisson" and steps % sampling.steps_per_epoch:
            raise InputError(
                f"A round must end with an epoch: use steps={sampling.steps_per_epoch} or a "
                "multiple of it, or sampling=Poisson(...)."
            )
        self.folder = Path(folder).absolute()
        self._network, self._sampling, self._steps = network, sampling, steps
        weigh = settings.get("weights")
        use = _used_by(network, (loss,) if weigh is None else (loss, lambda _, batch: weigh(batch)))
        self._records = Checked(records, settings.get("example"), sampling.n, use)
        self._loss = _of_records(loss)
        self._options = {**settings, "example": self._records.example}
        if weigh is not None:
            self._options["weights"] = lambda batch: weigh(batch["record"])
        plain = {name: v for name, v in settings.items() if isinstance(v, str | int | float)}
        self._settings: dict[str, Any] = {
            **plain,
            "n": sampling.n,
            "batch_size": sampling.batch_size,
            "sampler": sampling.sampler,
            "epsilon": epsilon,
            "rounds": rounds,
            "steps": steps,
            "silos": silos,
            "parameters": {name: list(p.shape) for name, p in _parameters(network).items()},
        }
        self._lock: FileLock | None = None

    def __enter__(self) -> Self:
        """Lock the folder, and read its account.

        Raises:
            SiloError: another process has locked it.
            InputError: the account is missing, damaged or older than the rest of the folder, or
                was begun with other settings.
            BudgetError: no noise meets epsilon.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=files.PRIVATE_FOLDER)
        lock = FileLock(self.folder / LOCK, timeout=0, mode=files.PRIVATE_MODE)
        try:
            lock.acquire()
        except Timeout:
            raise SiloError(LOCKED) from None
        try:
            self._rounds = self._kept() or self._created()
            self._account = Account.open(self.folder / ACCOUNT)
            self._check_kept()
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def name(self) -> str:
        """Return the random name of this silo's account."""
        return self._account.number

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all that has begun on these records."""
        return self._account.epsilon

    @property
    def rounds_left(self) -> int:
        """Return the number of rounds that epsilon still allows."""
        return self._rounds.left(self._account.count)

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee."""
        return self._account.statement

    def round(self, run: str, number: int, weights: Mapping[str, Tensor], seen: int = 0) -> Reply:
        """Take the steps of a round, and return all that leaves the silo.

        The same request again gets the same reply, if there was one, at no cost.

        Args:
            run: name of the server's run, whose rounds are numbered from 1.
            number: number of the round.
            weights: parameters by name, such as the average of the last round. Others are ignored.
            seen: the largest ``claim.begun`` that the server has had from this place. A folder that
                was deleted or restored counts less, and is refused. One that was deleted has
                another name: keep the number by place, not by ``claim.silo`` alone.

        Raises:
            SiloError: with a text that may be shown to the server. The reason is in the folder's
                ``problems.txt``, which may be about records and must not leave.
        """
        try:
            return self._round(str(run), int(number), weights, seen)
        except Exception as failure:  # noqa: BLE001  (user code may raise anything)
            said = USED_UP if isinstance(failure, BudgetError) else REFUSED
            self._note(failure)
        raise SiloError(said)  # not within the handler, so that nothing else is attached

    def _round(self, run: str, number: int, weights: Mapping[str, Tensor], seen: int) -> Reply:
        if self._lock is None:
            raise InputError("Take rounds within the silo: with silo: silo.round(...).")
        account, kept = self._account, self._rounds
        if account.count < seen:
            raise InputError(
                f"The server has seen {seen} steps of this silo, and its account has "
                f"{account.count}: it was deleted, or an older copy was restored."
            )
        given = self._checked(weights)
        entry = kept.enter(run, number, digest(given, {}))
        if entry.sent is not None:
            return self._again(entry.sent)
        step = self._resumed(given)
        step.reserve(self._steps)  # on disk, before a record is read
        kept.begun = account.count
        kept.write(self.folder)
        for batch in islice(step.loader(self._records), self._steps):
            step(batch)
        reply = Reply(
            {name: p.detach().cpu().clone() for name, p in _parameters(step.model).items()},
            self._claim(),
        )
        self._save(step)
        self._write(REPLY, reply.weights, {"claim": asdict(reply.claim)})
        entry.sent = digest(reply.weights, {})
        kept.write(self.folder)
        return reply

    def _resumed(self, given: Mapping[str, Tensor]) -> "_Step":
        """Return a training with the state of the last round, on the weights of the server."""
        network = copy.deepcopy(self._network)
        _assign(network, given)
        step = self._step(network, sigma=self._rounds.sigma, account=self._account)
        if (self.folder / STATE).exists():
            tensors, kept = self._read(STATE)
            structure = self._records.structure
            step.load_state_dict(
                {
                    **kept,
                    "tensors": tensors,
                    "structure": structure.template,
                    "public": structure.keep,
                }
            )
            _assign(network, given)
        step.lr = self._rounds.lr
        return step

    def _step(self, network: nn.Module, **options: Any) -> "_Step":
        planned = self._settings["rounds"] * self._steps
        given = {**self._options, "steps": planned, **options}
        return _Step(network, self._loss, sampling=self._sampling, **given)

    def _save(self, step: "_Step") -> None:
        state = step.state_dict()
        kept = {name: state[name] for name in ("numbers", "trainings", "lr")}
        self._write(STATE, state["tensors"], kept)

    def _again(self, sent: str) -> Reply:
        """Return the last reply again. Raises InputError if it is not that of a round."""
        weights, kept = self._read(REPLY)
        if digest(weights, {}) != sent:
            raise InputError("The round was answered, and a later one since.")
        return Reply(weights, Claim(**kept["claim"]))

    def _claim(self) -> Claim:
        account, settings = self._account, self._settings
        return Claim(
            silo=account.number,
            unit=account.unit[0],
            n=settings["n"],
            sampling_rate=settings["batch_size"] / settings["n"],
            sigma=self._rounds.sigma,
            steps=self._steps,
            delta=account.delta,
            begun=account.count,
            epsilon=account.epsilon,
        )

    def _checked(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a request that the network has. Raises InputError."""
        given = dict[str, Tensor]()
        for name, own in _parameters(self._network).items():
            tensor = weights.get(name)
            if tensor is None or tensor.shape != own.shape or not tensor.isfinite().all():
                raise InputError(f"The server's {name} is missing, not finite, or another shape.")
            given[name] = tensor.detach().to("cpu", own.dtype)
        return given

    def _kept(self) -> Rounds | None:
        """Return the rounds in the folder; None for a new one. Raises InputError."""
        if (self.folder / ROUNDS).exists():
            return read_rounds(self.folder)
        there = {p.name for p in self.folder.iterdir() if not p.name.endswith(files.PART)}
        new = there <= {LOCK, PROBLEMS, ACCOUNT, f"{ACCOUNT}.lock"}
        if not new or (ACCOUNT in there and Account.open(self.folder / ACCOUNT).count):
            return read_rounds(self.folder)
        return None

    def _created(self) -> Rounds:
        """Begin an account, and choose the noise. Raises BudgetError."""
        epsilon, silos = self._settings["epsilon"], self._settings["silos"]
        probe = self._step(copy.deepcopy(self._network), epsilon=epsilon)
        if not (self.folder / ACCOUNT).exists():
            Account.create(self.folder / ACCOUNT, delta=probe.delta, epsilon=epsilon)
        lr = probe.lr if "lr" in self._settings else probe.lr * math.sqrt(silos)
        made = Rounds(settings=self._settings, sigma=probe.sigma, lr=lr)
        made.write(self.folder)
        return made

    def _check_kept(self) -> None:
        """Raise InputError if the folder has other settings, or an account that is older."""
        was = self._rounds.settings
        if changed := sorted(
            n for n in self._settings | was if self._settings.get(n) != was.get(n)
        ):
            raise InputError(
                f"The silo in {self.folder} was begun with other settings: {', '.join(changed)}. "
                "Use the same ones, because its noise was chosen for them."
            )
        if self._account.count < self._rounds.begun:
            raise InputError(f"An older copy of {self.folder / ACCOUNT} was restored.")

    def _write(self, name: str, tensors: Mapping[str, Tensor], kept: Mapping[str, Any]) -> None:
        content = save(dict(tensors), {"kept": json.dumps(kept)})
        files.write_atomically(self.folder / name, content, files.PRIVATE_MODE)

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with safe_open(self.folder / name, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            return tensors, json.loads(opened.metadata()["kept"])

    def _note(self, failure: Exception) -> None:
        """Write the reason of a failure to the folder, where its owner alone can read it."""
        path = self.folder / PROBLEMS
        with suppress(OSError):  # which would say more than may be shown
            path.touch(files.PRIVATE_MODE)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{type(failure).__name__}: {failure}\n")


class _Step(PrivateStep):
    """Training of a silo, whose steps of a round begin together."""

    __slots__ = ()

    def reserve(self, steps: int) -> None:
        """Begin steps in the account. Raises BudgetError if it does not allow all of them."""
        if not isinstance(self._account, Part):
            raise ValueError("a silo's steps need an account")
        self._account.check(self._account.steps(steps))
        self._account.reserve(steps)


def _used_by(network: nn.Module, functions: tuple[BatchLoss, ...]) -> Callable[[Batch], None]:
    """Return a function that runs a copy of a network, and functions of it, on a record."""
    model, device = copy.deepcopy(network), device_of(network)

    def use(row: Batch) -> None:
        for function in functions:
            function(model, map_rows(lambda t: t.to(device), row))

    return use


def _of_records(loss: BatchLoss) -> BatchLoss:
    """Return a loss of :class:`.Checked` records: NaN for one that could not be used."""

    def of_used(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = loss(model, batch["record"]) * batch["used"]
        return found

    return of_used


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


@torch.no_grad()
def _assign(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in _parameters(network).items():
        parameter.copy_(weights[name])

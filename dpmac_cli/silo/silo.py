"""A silo: rounds of private steps on records that stay in one place.

Order of a round: the request is checked; its steps begin in the account on disk; records are read
and steps taken; state and reply are written; the reply leaves. So whatever is killed, what was
released is counted, and a request that is repeated gets the reply that was written.
"""

import copy
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
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
from dpmac_cli.arguments import checked
from dpmac_cli.errors import BudgetError, DpmacError, InputError
from dpmac_cli.models.digest import digest
from dpmac_cli.models.trial_samples import BatchLoss
from dpmac_cli.randomness.sampling import BatchSampling
from dpmac_cli.silo.claims import Claim
from dpmac_cli.silo.records import LossOfRecord, WeightsOfRecord, used_by
from dpmac_cli.silo.rounds import (
    ACCOUNT,
    ANSWERED,
    LOCK,
    PROBLEMS,
    ROUNDS,
    Rounds,
    check_counts,
    read_rounds,
)
from dpmac_cli.training.carried_accounts import carried_by
from dpmac_cli.training.private_step import PrivateStep
from dpmac_cli.training.reading import Checked
from dpmac_cli.training.state import copies_of

#: All that a failure may say to a server. None depends on a record.
LOCKED = "This silo is in use by another process."
USED_UP = "The privacy budget of this silo is used up."
REFUSED = "The silo refused the request. problems.txt in its folder says why."
#: Said to the program that made the silo, before any request.
NOT_OPEN = (
    "This silo is not open: its folder is neither locked nor read. Use it within a with statement: "
    "with silo: silo.round(...)."
)
#: Beginnings of the names of tensors of the last round that was answered.
OF_STATE, OF_REPLY = "state.", "reply."
#: Settings of a PrivateStep that a silo chooses itself.
CHOSEN = ("sigma", "epochs", "max_epsilon", "seed")


class SiloError(DpmacError):
    """A silo does not answer: one of the texts above, which a server may see.

    They are :data:`LOCKED`, :data:`USED_UP`, :data:`REFUSED` and :data:`NOT_OPEN`.
    """


@dataclass(frozen=True)
class Reply:
    """All that leaves a silo in a round. It was computed after noise.

    Attributes:
        weights: trained parameters by name, after noise, on the CPU. Buffers stay.
        claim: public facts, none of which depends on what a record contains.
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
    when a silo is created in a new folder, and the loss of each is computed, so that none makes a
    round fail; one that cannot be read later adds nothing, so that no reply depends on whether it
    can. Without ``example``, the first record is read whenever a silo is created.

    Args:
        folder: folder of this silo's rounds and account, of these records alone. It must not be
            deleted or put back from a backup: what was spent would be forgotten.
        network: the network, with its initial weights, which no record has changed.
        loss: ``loss(model, batch)``, as for :class:`~dpmac_cli.PrivateStep`.
        records: map-style dataset of n records, such as a ``torch.utils.data.Dataset``. Each item
            is what epsilon protects: a record, or all records of a person in tensors of one shape.
        sampling: how batches are drawn. An epoch of :class:`~dpmac_cli.RandomAllocation` must end
            with a round.
        epsilon: epsilon of all rounds together, which a lost round shortens. With an ``account``,
            of everything that it counts.
        rounds: number of rounds.
        steps: number of steps of a round.
        silos: number of silos. The average of their weights has less noise, so the default learning
            rate is multiplied by its square root.
        account: account on disk of the same records, of :meth:`.Account.create`, if they are used
            elsewhere, too: by a silo in another folder, or another training. By default the folder
            has one of its own, which counts the silo's rounds alone.
        settings: other arguments of :class:`~dpmac_cli.PrivateStep`, such as ``optimizer`` and
            ``lr``.

    Raises:
        InputError: settings or records cannot be used.
    """

    @checked()
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
        account: Account | None = None,
        **settings: Any,
    ) -> None:
        if chosen := sorted(settings.keys() & set(CHOSEN)):
            raise InputError(f"A silo has no {', '.join(chosen)}: noise is new in every round.")
        check_counts(rounds=rounds, steps=steps, silos=silos)
        if account is not None and account.path is None:
            raise InputError(
                "The account of a silo must be on disk, because each round may be in a process of "
                "its own. Use Account.create(path, ...)."
            )
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
        # In a folder that has begun they were checked. What fails later may not show in a reply.
        checked_before = (self.folder / ROUNDS).exists()
        use = None if checked_before else used_by(network, loss, weigh)
        self._records = Checked(records, settings.get("example"), sampling.n, use)
        self._loss = LossOfRecord(loss)
        weights = None if weigh is None else WeightsOfRecord(weigh)
        self._options = {**settings, "example": self._records.example, "weights": weights}
        self._settings = dict[str, Any]()
        for name, value in settings.items():
            if isinstance(value, str | int | float):
                self._settings[name] = value
        self._settings |= {
            "n": sampling.n,
            "batch_size": sampling.batch_size,
            "sampler": sampling.sampler,
            "epsilon": epsilon,
            "rounds": rounds,
            "steps": steps,
            "silos": silos,
            "parameters": {name: list(p.shape) for name, p in _parameters(network).items()},
        }
        self._shared = account
        if account is not None:
            self._settings["account"] = account.number
        self._lock: FileLock | None = None
        self._answered: PrivateStep | None = None
        self._notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        """Lock the folder, and read its account.

        Raises:
            SiloError: another process has locked it.
            InputError: the account is missing, damaged or older than the rest of the folder, or
                was begun with other settings.
            BudgetError: no noise meets epsilon.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=files.PRIVATE_FOLDER)
        except OSError as failure:
            why = "is a file" if self.folder.is_file() else f"cannot be made ({failure.strerror})"
            raise InputError(f"{self.folder} {why}. Use a folder of this silo alone.") from failure
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
        """Unlock the folder. The silo can be opened again by another ``with``."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            self._answered = None

    @property
    def name(self) -> str:
        """Return the random name of this silo's account. Raises SiloError outside of ``with``."""
        return self._open.number

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all that has begun on these records.

        Raises:
            SiloError: the silo is not open: outside of ``with``.
        """
        return self._open.epsilon

    @property
    def rounds_left(self) -> int:
        """Return the number of rounds that epsilon still allows; 0 if all are taken.

        Raises:
            SiloError: the silo is not open: outside of ``with``.
        """
        events = self._open.own
        return self._rounds.left(events)

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee, in plain sentences.

        It is about everything in the account of these records, and says what is not covered.

        Raises:
            SiloError: the silo is not open: outside of ``with``.
        """
        return self._open.statement

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on settings and network, for whoever runs the silo; () before a round.

        They are those of the last round that this object has taken: see
        :attr:`.PrivateStep.notes`. None is about a record.
        """
        return self._notes

    @property
    def _open(self) -> Account:
        """Return the account. Raises SiloError outside of ``with``."""
        if self._lock is None:
            raise SiloError(NOT_OPEN)
        return self._account

    @property
    def _begun(self) -> int:
        """Return the number of steps of this silo that have begun."""
        events = self._open.own
        return self._rounds.begun_in(events)

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
        account = self._open
        try:
            return self._round(account, str(run), int(number), weights, seen)
        except Exception as failure:  # noqa: BLE001  (user code may raise anything)
            message = USED_UP if isinstance(failure, BudgetError) else REFUSED
            self._note(failure)
        raise SiloError(message)  # not within the handler, so that nothing else is attached

    def _round(
        self, account: Account, run: str, number: int, weights: Mapping[str, Tensor], seen: int
    ) -> Reply:
        """Take a round. Its failures may be about records."""
        rounds, begun = self._rounds, self._begun
        if begun < seen:
            raise InputError(
                f"The server has seen {seen} steps of this silo, and its account has {begun}: it "
                "was deleted, or an older copy was restored."
            )
        weights = self._checked(weights)
        entry = rounds.enter(run, number, digest(weights, {}))
        if entry.sent is not None:
            return self._again(entry.sent)
        step = self._resumed(weights)
        self._answered = None  # until this round is
        step.reserve(self._steps)  # on disk, before a record is read
        rounds.begun = account.count
        rounds.write(self.folder)
        for batch in islice(step.loader(self._records), self._steps):
            step(batch)
        self._notes = step.notes
        reply = Reply(copies_of(_parameters(step.model)), self._claim())
        self._save(step, reply)
        entry.sent = digest(reply.weights, {})
        rounds.write(self.folder)
        if self._shared is None:  # nothing else takes steps off those that are left
            self._answered = step
        return reply

    def _resumed(self, weights: Mapping[str, Tensor]) -> PrivateStep:
        """Return a training with the state of the last round, on the weights of the server.

        The training that answered it in this process goes on, with keys that no other process has.
        After a round that failed, or in another process, its state is read, and keys are new.
        """
        if self._answered is not None:
            _assign(self._answered.model, weights)
            return self._answered
        network = copy.deepcopy(self._network)
        _assign(network, weights)
        limit = {} if self._shared is None else {"max_epsilon": self._settings["epsilon"]}
        step = self._step(network, sigma=self._rounds.sigma, account=self._account, **limit)
        if (self.folder / ANSWERED).exists():
            tensors, facts = self._saved(OF_STATE)
            structure = self._records.structure
            step.load_state_dict(
                {
                    **facts,
                    "tensors": tensors,
                    "structure": structure.template,
                    "public": structure.keep,
                }
            )
            _assign(network, weights)
        step.lr = self._rounds.lr
        return step

    def _step(self, network: nn.Module, **options: Any) -> PrivateStep:
        planned = self._settings["rounds"] * self._steps
        settings = {**self._options, "steps": planned, **options}
        return PrivateStep(network, self._loss, sampling=self._sampling, **settings)

    def _save(self, step: PrivateStep, reply: Reply) -> None:
        """Write the state of the training and the reply, in one file."""
        state = step.state_dict()
        facts = {
            "numbers": state["numbers"],
            "trainings": state["trainings"],
            "lr": state["lr"],
            "claim": asdict(reply.claim),
        }
        tensors = dict[str, Tensor]()
        for prefix, part in ((OF_STATE, state["tensors"]), (OF_REPLY, reply.weights)):
            for name, tensor in part.items():
                tensors[f"{prefix}{name}"] = tensor
        content = save(tensors, {"facts": json.dumps(facts)})
        files.write_atomically(self.folder / ANSWERED, content, files.PRIVATE_MODE)

    def _saved(self, part: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors of the last round that was answered, and all facts of it.

        ``part`` is the beginning of their names: :data:`OF_STATE` or :data:`OF_REPLY`.
        """
        with safe_open(self.folder / ANSWERED, "pt") as file:
            tensors = dict[str, Tensor]()
            for name in file.keys():  # noqa: SIM118
                if name.startswith(part):
                    tensors[name.removeprefix(part)] = file.get_tensor(name)
            return tensors, json.loads(file.metadata()["facts"])

    def _again(self, sent: str) -> Reply:
        """Return the last reply again. Raises InputError if it is not that of a round."""
        weights, facts = self._saved(OF_REPLY)
        if digest(weights, {}) != sent:
            raise InputError("The round was answered, and a later one since.")
        return Reply(weights, Claim(**facts["claim"]))

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
            begun=self._begun,
            epsilon=account.epsilon,
        )

    def _checked(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a request that the network has, on the CPU, in its dtypes.

        Raises InputError if one is missing, has another shape, or is not finite.
        """
        checked: dict[str, Tensor] = {}
        for name, parameter in _parameters(self._network).items():
            tensor = weights.get(name)
            if tensor is None or tensor.shape != parameter.shape or not tensor.isfinite().all():
                raise InputError(f"The server's {name} is missing, not finite, or another shape.")
            checked[name] = tensor.detach().to("cpu", parameter.dtype)
        return checked

    def _kept(self) -> Rounds | None:
        """Return the rounds in the folder; None for a new one. Raises InputError.

        A folder without rounds is new if nothing has begun in an account of its own. Another one
        also counts what is not known here.
        """
        account = self.folder / ACCOUNT
        if (self.folder / ROUNDS).exists():
            return read_rounds(self.folder)
        names = {p.name for p in self.folder.iterdir() if not p.name.endswith(files.PART)}
        new = names <= {LOCK, PROBLEMS, ACCOUNT, f"{ACCOUNT}.lock"}
        alone = ACCOUNT in names and not account.is_symlink()
        if not new or (alone and Account.open(account).count):
            return read_rounds(self.folder)
        return None

    def _created(self) -> Rounds:
        """Begin an account, and choose the noise. Raises BudgetError."""
        epsilon, silos = self._settings["epsilon"], self._settings["silos"]
        network, account = copy.deepcopy(self._network), self.folder / ACCOUNT
        probe = self._step(network, epsilon=epsilon, account=self._shared)
        if self._shared is not None and self._shared.path is not None:
            account.unlink(missing_ok=True)  # a link, or of no event
            account.symlink_to(self._shared.path)
        elif not account.exists():
            Account.create(account, delta=probe.delta, epsilon=epsilon)
        lr = probe.lr if "lr" in self._settings else probe.lr * math.sqrt(silos)
        rounds = Rounds(settings=self._settings, sigma=probe.sigma, lr=lr)
        rounds.write(self.folder)
        return rounds

    def _check_kept(self) -> None:
        """Raise InputError if the folder has other settings, or an account that is older."""
        settings, earlier = self._settings, self._rounds.settings
        changed = list[str]()
        for name in sorted(settings | earlier):
            if settings.get(name) != earlier.get(name):
                changed.append(name)
        if changed:
            raise InputError(
                f"The silo in {self.folder} was begun with other settings: "
                f"{', '.join(changed)}. Use the same ones, because its noise was chosen for them."
            )
        if self._shared is not None and self._shared.number != self._account.number:
            raise InputError(
                f"{self.folder / ACCOUNT} is another account than that of these records. Put the "
                "link to it back."
            )
        if self._account.count < self._rounds.begun:
            raise InputError(f"An older copy of {self.folder / ACCOUNT} was restored.")

    def _note(self, failure: Exception) -> None:
        """Write the time and the reason of a failure to the folder, for its owner alone."""
        path = self.folder / PROBLEMS
        with suppress(OSError):  # which would say more than may be shown
            path.touch(files.PRIVATE_MODE)
            with path.open("a", encoding="utf-8") as file:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(f"{now} {type(failure).__name__}: {failure}\n")


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


@torch.no_grad()
def _assign(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by name into the trained parameters of a network."""
    for name, parameter in _parameters(network).items():
        parameter.copy_(weights[name])

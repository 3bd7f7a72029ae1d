"""Claims of silos, and what those of a federation mean together. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.arguments import checked
from dpmac_cli.errors import InputError, raise_errors

#: Limits of what a federation guarantees.
NOT_COVERED = (
    "Names of silos, numbers of records, settings, participation and times of rounds are public or "
    "not covered. Neither are scores, choices by a silo's own test records, and numbers to scale "
    "by that were taken from records. Secure aggregation hides single updates from the server, and "
    "lowers no epsilon."
)
OWN_WORD = (
    "All of this is the silos' own word: nobody else can check how much noise a silo added. Each "
    "silo's account says what it spent (dpmac account FOLDER)."
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Public facts that a silo sends with its weights. None depends on a record's content.

    Attributes:
        silo: random name of the silo's account.
        unit: unit of privacy, in words.
        n: number of records.
        sampling_rate: probability that a step uses a record.
        sigma: noise multiplier.
        steps: steps of a round.
        delta: delta of the guarantee.
        begun: steps that have begun, in all rounds, also in those that were lost.
        epsilon: their privacy cost, with everything else in the account of these records.
    """

    silo: str
    unit: str
    n: int
    sampling_rate: float
    sigma: float
    steps: int
    delta: float
    begun: int
    epsilon: float


@dataclass(frozen=True)
class Federation:
    """Joint meaning of the claims of all silos. See :func:`federation`.

    Epsilon of a silo is for one unit of privacy in that silo. Somebody with one in each is covered
    by the sum, which :attr:`statement` names, beside what several in one silo cost.

    Attributes:
        silos: the last claim of each silo, and the number of its rounds that were lost.
        server: who ran the server.
        aggregation: how weights were averaged.
    """

    silos: tuple[tuple[Claim, int], ...]
    server: str
    aggregation: str

    @property
    def epsilon(self) -> float:
        """Return the largest epsilon of a silo."""
        return max(claim.epsilon for claim, _ in self.silos)

    @property
    def statement(self) -> str:
        """Return the guarantee in plain sentences, to publish with the model.

        It names every silo's epsilon, and what is not covered.
        """
        costs = list[str]()
        for number, (claim, _) in enumerate(self.silos, 1):
            cost = f"epsilon {format_epsilon(claim.epsilon)}, delta {claim.delta:g}"
            costs.append(f"silo {number}: {cost}, for one {claim.unit}")
        return (
            "Each silo's records are protected by that silo's own noise, whoever runs the server. "
            "What a silo sent in all rounds is seen by the server and, averaged, by every other "
            "silo and by whoever gets the model. It is differentially private with the silo's own "
            f"epsilon and delta: {'; '.join(costs)}. {self._persons} {NOT_COVERED}"
        )

    @property
    def report(self) -> str:
        """Return a card of the final model, in Markdown.

        It has a table of the silos, :attr:`statement`, and that all of it is their own word.
        """
        head = "| silo | unit | records | sampling rate | sigma | steps (lost) | epsilon | delta |"
        table = [head, "|---" * 8 + "|"]
        for number, (claim, lost) in enumerate(self.silos, 1):
            table.append(
                f"| {number} ({claim.silo[:8]}) | {claim.unit} | {claim.n:,} | "
                f"{claim.sampling_rate:.4g} | {claim.sigma:.10g} | {claim.begun} "
                f"({lost * claim.steps}) | {format_epsilon(claim.epsilon)} | {claim.delta:g} |"
            )
        by = (
            f"- Server: {self.server or 'not stated'}",
            f"- Aggregation: {self.aggregation or 'not stated'}",
        )
        parts = ("# Privacy of a federated model", "\n".join(table), "\n".join(by))
        return "\n\n".join((*parts, self.statement, OWN_WORD)) + "\n"

    @property
    def _persons(self) -> str:
        """Return what holds for somebody with one unit in one silo, with several, or in all."""
        most = format_epsilon(self.epsilon)
        units = {claim.unit: None for claim, _ in self.silos}
        unit = " or ".join(units)
        alone = (
            f"Somebody with one {unit} in one silo: epsilon at most {most}. With k of them there: "
            "epsilon k times as large, and delta k e^((k - 1) epsilon) times, at most."
        )
        if len(units) > 1:
            return f"{alone} Silos protect different units, whose costs cannot be added."
        total = sum(claim.epsilon for claim, _ in self.silos)
        deltas = sum(claim.delta for claim, _ in self.silos)
        return (
            f"{alone} Somebody with one {unit} in each silo: at most the sum, "
            f"epsilon {format_epsilon(total)} and delta {deltas:.4g}."
        )


@checked()
def federation(claims: Iterable[Claim], *, server: str = "", aggregation: str = "") -> Federation:
    """Return what the claims of all rounds of all silos mean together.

    Args:
        claims: every claim that the server received, each silo's in order. One that was received
            twice counts once.
        server: who ran the server; "" if that is not to be stated.
        aggregation: how weights were averaged, such as "mean with equal weights"; "" as above.

    Raises:
        InputError: there is no claim; or a silo's steps did not rise from round to round, because
            its account was replaced.
    """
    by_silo: dict[str, list[Claim]] = {}
    for claim in claims:
        if not isinstance(claim, Claim):
            raise InputError(f"federation: {claim!r:.100} is no claim. Use reply.claim of a silo.")
        known = by_silo.setdefault(claim.silo, [])
        if claim not in known:  # a reply that was sent again
            known.append(claim)
    if not by_silo:
        raise InputError("A federation has at least one claim of a silo.")
    errors = list[str]()
    for name, rounds in by_silo.items():
        if not _is_one_account(rounds):
            errors.append(
                f"The claims of silo {name} do not belong to one account: each round begins more "
                "steps."
            )
    raise_errors(errors)
    silos = list[tuple[Claim, int]]()
    for rounds in by_silo.values():
        last = rounds[-1]
        lost = last.begun // last.steps - len(rounds)
        silos.append((last, lost))
    return Federation(tuple(silos), server, aggregation)


def _is_one_account(rounds: Sequence[Claim]) -> bool:
    """Return whether the steps of a silo rise by those of a round, from each claim to the next."""
    return all(later.begun >= earlier.begun + later.steps for earlier, later in pairwise(rounds))

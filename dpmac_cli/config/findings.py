"""Faults and notes that follow from the records themselves, which epsilon does not cover.

They are for the person who holds the records: no file and no log has them. Settings are in braces,
as in :func:`~dpmac_cli.errors.as_flags`.
"""

from collections.abc import Iterator

from dpmac_cli.config.facts import DataFacts, PrivateNotes, first_of
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import Settings
from dpmac_cli.errors import counted


def tested_twice(settings: Settings, facts: DataFacts, notes: PrivateNotes) -> Iterator[str]:
    """Yield a fault if scores are to be covered, and a record is trained and tested on.

    A unit is on one side only. Without units, each record is one, with its copies.

    Args:
        settings: completed settings.
        facts: public facts of the records.
        notes: what was found in the records, among it which test records are copies.
    """
    tested = notes.tested
    if tested and settings.cover_scores and not facts.unit:
        yield (
            f"{{cover_scores}}: {_copies(len(tested), 'test record', facts.typed)} of training "
            f"records, such as test record {tested[0] + 1}. Epsilon covers the scores of records "
            "that are not trained on, so it would be too low for these. Leave them out on one "
            "side, or name the person of each record with {unit}, or in an .npz by arrays unit and "
            "unit_test: a unit is on one side."
        )


def private_notes(plan: Plan, findings: PrivateNotes) -> tuple[str, ...]:
    """Return notes about the records, such as counts of them, which epsilon does not cover.

    They are for the person who holds the records. No file and no log has them. () without any.

    Args:
        plan: plan of the run.
        findings: what was found in the records when they were read.
    """
    return tuple(_notes_on_records(plan, findings))


def _notes_on_records(plan: Plan, findings: PrivateNotes) -> Iterator[str]:
    """Yield sentences on what was found in the records."""
    dataset, tested = plan.facts.typed, findings.tested
    if findings.left_out.records:
        yield findings.left_out.note(dataset)
    copies_matter = plan.private and not findings.expected
    if findings.copies and copies_matter:
        both = f" ({len(tested):,} of training records among test records)" if tested else ""
        yield (
            f"{_copies(findings.copies, 'record', dataset)} of others{both}. If they "
            "come from one person, epsilon protects each copy, but not the person: name the unit "
            "of each record with {unit}, or in an .npz by an array unit."
        )
    if tested and copies_matter and not plan.facts.held_out:
        yield (
            f"{_copies(len(tested), 'test record', dataset)} of training records, such as test "
            f"record {tested[0] + 1}. Epsilon does not count that they are used twice, and scores "
            "on them are too high. Leave them out on one side."
        )
    for remark in findings.remarks:
        yield f"{dataset}: {remark}."
    if findings.untested and not plan.settings.cover_scores:
        yield (
            f"{dataset} has no test record of the classes {first_of(findings.untested)}. Accuracy "
            "does not cover them."
        )


def _copies(number: int, noun: str, dataset: str) -> str:
    """Return the beginning of a sentence: "2 records of data.csv are exact copies"."""
    copies = "is an exact copy" if number == 1 else "are exact copies"
    return f"{counted(number, noun)} of {dataset} {copies}"

"""Networks that compute the fixed features of records, by the class of the features.

They train nothing, and a published model has no weights of them. The features of a record depend
on that record alone: a network sees batches of a fixed size, so that rounding does not either.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dpmac_cli.config.networks import (
    SCATTERED,
    FixedFeatures,
    OwnFeatures,
    Scattered,
    TableColumns,
)
from dpmac_cli.config.records import Records
from dpmac_cli.features.frozen import FrozenFeatures, Mirrored, OneByOne
from dpmac_cli.features.scattering import Scattering
from dpmac_cli.features.tables import TableInputs


def _scattering(features: Scattered, records: Records) -> nn.Module:
    """Return a network of scattering features, and a group norm of 27 groups.

    As in Tramer and Boneh 2021, arXiv 2011.11660. ``records`` say the size of the images.
    """
    channels, height, width = records.shape
    norm = nn.GroupNorm(27, channels * SCATTERED, affine=False)
    network = nn.Sequential(Scattering(height, width), norm)
    return Mirrored(network) if features.mirrored else network


def _inputs_of_table(_: TableColumns, records: Any) -> nn.Module:
    """Return a network of the inputs of each column."""
    return TableInputs(records)


def _one_by_one(features: OwnFeatures, _: Records) -> nn.Module:
    """Return a network that calls a function of a program for each record."""
    return OneByOne(features)


#: Functions of features and records that return a network. It maps records, shape (records, ...)
#: and standardised, to their features, shape (records, *shape_of(records)).
BUILDERS: Mapping[type[FixedFeatures], Callable[[Any, Any], nn.Module]] = {
    Scattered: _scattering,
    TableColumns: _inputs_of_table,
    OwnFeatures: _one_by_one,
}


def with_fixed_features(
    head: nn.Module, features: FixedFeatures, records: Records
) -> FrozenFeatures:
    """Return a network on records from a network on their fixed features.

    Args:
        head: network on features, shape (records, *shape of the features), which is trained.
        features: the fixed features and their options. They say the dtype in which features are
            stored.
        records: kind and shape of the records, which must be a kind that the features are for:
            rows of tables for TableColumns, images for Scattered.

    Returns:
        A network that maps records to the outputs of ``head``, and trains the head alone.
    """
    frozen = BUILDERS[type(features)](features, records)
    return FrozenFeatures(frozen, head, getattr(torch, features.stored))

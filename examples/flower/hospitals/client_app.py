"""What runs in a hospital."""

import os

from dpmac_cli import Poisson, Silo
from dpmac_cli.silo.flower import client_app
from hospitals.task import ROUNDS, SILOS, Net, loss, records_of


def make_silo(context):
    """Return the silo of this node, with its account on disk."""
    hospital = context.node_config["partition-id"]
    records = records_of(hospital)
    accounts = os.environ.get("ACCOUNTS", "accounts")  # the same folder at every start
    return Silo(
        f"{accounts}/{hospital}",
        Net(),
        loss,
        records,
        sampling=Poisson(n=len(records), batch_size=75),
        epsilon=3,
        rounds=ROUNDS,
        steps=10,
        silos=SILOS,
        optimizer="dp-adam",
    )


app = client_app(make_silo)

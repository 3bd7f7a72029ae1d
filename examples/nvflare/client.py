"""What runs in a hospital: its silo, which takes NVFlare's rounds."""

import os

import nvflare.client as flare
from hospitals.task import ROUNDS, SILOS, Net, loss, records_of

from dpmac_cli import Poisson, Silo
from dpmac_cli.silo.nvflare import serve

flare.init()
hospital = int(flare.get_site_name().removeprefix("site-")) - 1
records = records_of(hospital)
serve(
    Silo(
        os.path.join(os.environ["ACCOUNTS"], str(hospital)),
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
)

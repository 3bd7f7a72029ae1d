"""Run two silos in NVFlare's simulator: python simulate.py, with examples/flower on PYTHONPATH."""

import os
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parent / "flower"))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("ACCOUNTS", str(Path("accounts").absolute()))

from hospitals.task import ROUNDS, SILOS, Net  # noqa: E402
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe  # noqa: E402
from nvflare.recipe import SimEnv  # noqa: E402

recipe = FedAvgRecipe(
    name="hospitals",
    model=Net(),
    min_clients=SILOS,
    num_rounds=ROUNDS,
    train_script=str(here / "client.py"),
    key_metric="",
)
recipe.execute(SimEnv(num_clients=SILOS, workspace_root=str(Path("nvflare").absolute())))

"""Run the example in one process tree: python simulate.py, in this folder."""

import os
import sys

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])

from flwr.simulation import run_simulation  # noqa: E402
from hospitals.client_app import app as client  # noqa: E402
from hospitals.server_app import app as server  # noqa: E402

ray = {"address": "local", "num_cpus": 2, "include_dashboard": False}
run_simulation(server, client, num_supernodes=2, backend_config={"init_args": ray})

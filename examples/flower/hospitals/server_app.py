"""What runs at the server, which sees noisy weights and claims."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from dpmac_cli import federation
from dpmac_cli.silo.flower import SiloAvg
from hospitals.task import ROUNDS, SILOS, Net, accuracy

app = ServerApp()


@app.main()
def main(grid, context):
    """Average the silos' weights for some rounds, and print what the result guarantees."""
    strategy = SiloAvg(min_train_nodes=SILOS, min_available_nodes=SILOS)
    start = ArrayRecord(Net().state_dict())
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    print(f"accuracy {accuracy(result.arrays.to_torch_state_dict()):.3f}")
    print(federation(strategy.claims, aggregation="mean with equal weights").report)

"""A silo as a client of Flower, and a strategy of its server. Needs the extra ``flower``.

Flower sends the text of an exception to the server, so every failure here has one of three texts.
"""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from dpmac_cli.silo.claims import Claim
from dpmac_cli.silo.silo import REFUSED, Silo, SiloError


def client_app(make_silo: Callable[[Context], Silo]) -> ClientApp:
    """Return a client that trains, and does nothing else. Run it as Flower's ``ClientApp``.

    Args:
        make_silo: returns the silo of a node, not open yet. It is called for every message, because
            Flower starts a process for each. Reasons of its failures are printed where the node
            runs.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(make_silo, message, context)

    return app


def answer(make_silo: Callable[[Context], Silo], message: Message, context: Context) -> Message:
    """Return the reply of a node to a message: weights, and the silo's claim.

    Args:
        make_silo: see :func:`client_app`.
        message: message of the server, with weights ("arrays") and the round ("config").
        context: Flower's facts of the node and the run.

    Raises:
        SiloError: the silo does not answer. Nothing else is raised, because Flower sends its text.
    """
    message_to_server = REFUSED
    try:
        config, arrays = message.content["config"], message.content["arrays"]
        seen = dict(zip(config.get("silos", ()), config.get("seen", ()), strict=True))
        with make_silo(context) as silo:
            reply = silo.round(
                str(context.run_id),
                config["server-round"],
                arrays.to_torch_state_dict(),
                seen=max(seen.get(silo.name, 0), seen.get(_node(context.node_id), 0)),
            )
    except SiloError as failure:
        message_to_server = str(failure)
    except Exception:  # noqa: BLE001  (its text may be about records)
        traceback.print_exc()
    else:
        content = {
            "arrays": ArrayRecord(dict(reply.weights)),
            "metrics": MetricRecord({"num-examples": 1}),
            "claim": ConfigRecord(asdict(reply.claim)),
        }
        return Message(RecordDict(content), reply_to=message)
    raise SiloError(message_to_server)  # not within the handler, so that nothing else is attached


def _node(number: int) -> str:
    """Return what the server calls a node: a silo that was deleted comes back with another name."""
    return f"node {number}"


class SiloAvg(FedAvg):
    """Strategy of Flower's server: the mean of the silos' weights, all equal, with their claims.

    It keeps the claims, and tells the silos what the server has seen of them, and of their nodes,
    so that one whose account was restored notices, and one that was deleted within a run.

    Args:
        claims: claims of earlier runs. Keep them between runs, so that a restored account is
            noticed.
        settings: arguments of Flower's ``FedAvg``, without ``fraction_evaluate``.

    Attributes:
        claims: all claims, for :func:`~dpmac_cli.federation`.
    """

    def __init__(self, *, claims: Iterable[Claim] = (), **settings: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **settings)
        self.claims = list(claims)
        self._of_nodes: dict[str, int] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Add the largest number of steps that was seen of each silo, and of each node.

        Flower calls it before each round. Arguments and result are those of ``FedAvg``.
        """
        seen = dict(self._of_nodes)
        for claim in self.claims:
            seen[claim.silo] = max(claim.begun, seen.get(claim.silo, 0))
        config["silos"], config["seen"] = [*seen], [*seen.values()]
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Keep the claims, and average the weights. Replies that are failures are left out.

        Flower calls it after each round. Arguments and result are those of ``FedAvg``.
        """
        received = list(replies)
        for reply in received:
            if reply.has_content():
                claim = Claim(**dict(reply.content["claim"]))
                self.claims.append(claim)
                node = _node(reply.metadata.src_node_id)
                self._of_nodes[node] = max(claim.begun, self._of_nodes.get(node, 0))
        return super().aggregate_train(server_round, received)

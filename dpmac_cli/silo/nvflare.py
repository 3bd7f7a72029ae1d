"""A silo as a client of NVFlare. Needs the extra ``nvflare``."""

from dataclasses import asdict

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from dpmac_cli.silo.silo import Silo


def serve(silo: Silo, seen: int = 0) -> int:
    """Take rounds of a silo until NVFlare's job ends, and send each reply with its claim.

    Clients count equally in the server's mean. Call it at the end of the client's script, where a
    failure of anything before it stays on this machine.

    Args:
        silo: the silo, not open yet.
        seen: the largest ``claim.begun`` that the server has had from this place in earlier jobs,
            such as the script's argument. A folder that was deleted or restored since is refused.

    Returns:
        The largest one after this job.

    Raises:
        SiloError: the silo does not answer; a server may see its text.
    """
    flare.init()
    with silo:
        while flare.is_running():
            model = flare.receive()
            if model is None:
                break
            weights = {name: torch.as_tensor(value) for name, value in model.params.items()}
            reply = silo.round(flare.get_job_id(), model.current_round, weights, seen=seen)
            seen = reply.claim.begun
            meta = {"NUM_STEPS_CURRENT_ROUND": 1, "claim": asdict(reply.claim)}
            flare.send(FLModel(params_type=ParamsType.FULL, params=dict(reply.weights), meta=meta))
    return seen

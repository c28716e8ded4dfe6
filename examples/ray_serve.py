"""amoeba-jax as a deployment of Ray Serve, for teams that run Ray.

Run `pip install 'ray[serve]'` and `pip install -e '.[http]'`, then

    python examples/ray_serve.py --model smollm2-135m --replicas 2

It serves OpenAI's API on http://127.0.0.1:8000. A replica has all devices of its host, with an engine and a scheduler.
Its instances merge and split as under `amoeba serve`. Ray starts the replicas, restarts a replica whose engine has
failed, and balances the requests.

Every token passes through two actors: the replica and Ray's proxy. This does not slow down a slow model. A fast model
reaches only 0.3 to 0.6 times the tokens/s of `amoeba serve`. docs/many_hosts.md has figures, and compares this example
with the gateway of this project, which has no such cost.
"""

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve

from amoeba_jax import LLM
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.request_handler import State
from serving.grpc_server.server import Server
from serving.http_server.app import create_app, with_gate
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig

# Seconds that running requests may take after a replica is told to stop.
DRAIN_S = 60.0


@serve.deployment(
    health_check_period_s=2,
    graceful_shutdown_timeout_s=DRAIN_S + 10,
    # The engine batches and queues requests. Ray must not hold them back.
    max_ongoing_requests=1024,
)
@serve.ingress()
class Amoeba:
    """A replica: an engine with its scheduler, and OpenAI's API in the event loop of the replica."""

    async def __init__(self, settings: dict[str, Any]) -> None:
        """Load the model. The replica gets requests afterwards.

        Args:
            settings: arguments of `LLM`.
        """
        # The server binds no port: it only connects the engine, the metrics and the request handler.
        self._server = Server(ServerConfig(metrics_port=None))
        self._llm = await asyncio.to_thread(lambda: LLM(**settings, warmup=[1], progress=False))
        self._scheduling = Scheduling(self._llm, SchedulingConfig(), self._server.metrics)
        await self._server.attach(self._llm, scheduling=self._scheduling)

    def __serve_build_asgi_app__(self) -> Callable[..., Any]:
        """Return the application. Ray calls this after the constructor."""
        handler = self._server.request_handler
        return with_gate(create_app(handler), handler)

    def check_health(self) -> None:
        """Raise an exception if the engine has failed. Ray then replaces the replica."""
        if self._server.request_handler.state is State.DEAD:
            raise RuntimeError("the engine has failed")

    async def __del__(self) -> None:
        """End running requests, and free the devices."""
        await self._server.drain(DRAIN_S)
        await self._server.stop()
        self._scheduling.close()
        await asyncio.to_thread(self._llm.close)


def main() -> None:
    """Start the deployment, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model of each replica")
    parser.add_argument("--num-devices", type=int, default=1, help="devices of each replica")
    parser.add_argument("--device-memory", default="1GiB", help="memory of each device")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas: at most one for each host")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica; 0 on hosts without GPUs")
    args = parser.parse_args()
    settings = {"model": args.model, "num_devices": args.num_devices, "device_memory": args.device_memory}
    deployment = Amoeba.options(num_replicas=args.replicas, ray_actor_options={"num_gpus": args.gpus})
    serve.run(deployment.bind(settings), name="amoeba", route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()

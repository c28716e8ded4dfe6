"""The synchronous client."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from amoeba_jax.client import requests, results
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from amoeba_jax.client.connection import (
    DEFAULT_TARGET,
    Credentials,
    Deadline,
    Retries,
    Route,
    is_unavailable,
)
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.valid_text import check_unicode
from sharding.placement import Placement

T = TypeVar("T")


class Client:
    """Connection to a server: `Client("127.0.0.1:50051").generate("Once upon a time")`.

    Calls raise `grpc.RpcError` with `code()` and `details()`. If a call fails with the status UNAVAILABLE, the client
    repeats the call (`retries`). `watch_cluster`, `transform` and changes of placement are not repeated. The
    `timeout_s` of a call limits all attempts of the call together. Several threads may share a client.

    Args:
        target: `HOST:PORT`, `[IPV6]:PORT`, or a target in gRPC's own syntax. The default port is 50051.
        token: access token, if the server needs one. Administration needs the admin token.
        ca: PEM file with the certificates to trust. Turns TLS on.
        certificate: PEM file with a certificate of this client, if the server needs one.
        key: PEM file with the private key of `certificate`.
        retries: number of attempts and delays between them.

    Raises:
        ConfigError: `target` is not an address, `token` is not printable ASCII, `certificate` or `key` is given without
            the other, or both are given without `ca`.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        retries: Retries | None = None,
    ):
        credentials = Credentials(token, ca, certificate, key)
        tls = credentials.channel_credentials()
        self._route = Route(target)
        if tls is None:
            self._channel = grpc.insecure_channel(self._route.target, self._route.options)
        else:
            self._channel = grpc.secure_channel(self._route.target, tls, self._route.options)
        self._metadata = credentials.metadata
        self._retries = retries or Retries()
        self._inference = pb_grpc.InferenceServiceStub(self._channel)
        self._admin = pb_grpc.AdminServiceStub(self._channel)

    def close(self) -> None:
        """End all calls and the connection."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inference

    def stream(
        self,
        prompt: requests.Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[results.Chunk]:
        """Yield the generated text of a prompt in chunks, as the chunks arrive. Leaving the loop aborts the request.

        Args:
            prompt: text, token ids or conversation.
            params: sampling settings.
            request_id: id for `abort`. "": the server chooses one.
            cache_salt: name of a group of requests. Cached prefixes are shared only inside a group.
            timeout_s: seconds for the whole call. None: no limit.

        Raises:
            RequestError: the prompt is malformed.
        """
        message = requests.generate_request(prompt, params, request_id, cache_salt)
        deadline = Deadline(timeout_s)
        call, first = self._retried(lambda: self._start(message, deadline), deadline)
        try:
            while first is not None:
                yield from results.read_chunks(first)
                first = next(call, None)
        finally:
            call.cancel()

    def _start(self, message: pb.GenerateRequest, deadline: Deadline) -> tuple[Any, pb.GenerateResponse | None]:
        call = self._inference.Generate(message, timeout=deadline.left_s, metadata=self._metadata)
        return call, next(call, None)

    def generate(
        self,
        prompt: requests.Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[results.Generation]:
        """Return all `params.n` samples of a prompt when all are finished. The arguments are those of `stream`."""
        stream = self.stream(prompt, params, request_id=request_id, cache_salt=cache_salt, timeout_s=timeout_s)
        return results.collect(stream)

    def tokenize(self, text: str | requests.Messages, *, timeout_s: float | None = None) -> list[int]:
        """Return the token ids of a text or a conversation."""
        message = requests.tokenize_request(text)
        return list(self._call(self._inference.Tokenize, message, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of token ids."""
        return self._call(self._inference.Detokenize, pb.DetokenizeRequest(token_ids=token_ids), timeout_s).text

    def model_info(self, *, timeout_s: float | None = None) -> results.ModelInfo:
        """Return the name and sizes of the server's model, and the limits of requests."""
        return results.read_model_info(self._call(self._inference.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Abort a request. Return False if no unfinished request has this id.

        If the server uses tokens, a client can abort only its own requests. The admin token can abort all requests.
        """
        message = pb.AbortRequest(request_id=check_unicode(request_id, "request_id"))
        return self._call(self._inference.Abort, message, timeout_s).aborted

    # Administration

    def cluster(self, *, timeout_s: float | None = None) -> results.Cluster:
        """Return the state of the server: its instances (serving replicas) and its queue."""
        return results.read_cluster(self._call(self._admin.GetCluster, pb.GetClusterRequest(), timeout_s))

    def watch_cluster(self, interval_s: float = 1.0, *, timeout_s: float | None = None) -> Iterator[results.Cluster]:
        """Yield the state of the server every `interval_s` seconds, until the caller leaves the loop. See `cluster`."""
        message = pb.WatchClusterRequest(interval_s=interval_s)
        call = self._admin.WatchCluster(message, timeout=timeout_s, metadata=self._metadata)
        try:
            with self._route.explained():
                for cluster in call:
                    yield results.read_cluster(cluster)
        finally:
            call.cancel()

    def transform(
        self,
        tensor_parallel_size: int,
        devices: Sequence[int] | None = None,
        variant: str = "in_place_overlapped",
        release_weights: bool = True,
        layers_per_step: int | None = None,
        *,
        wait_for_programs: bool = False,
        running: str = "migrate",
        order: str = "layer",
        timeout_s: float | None = None,
    ) -> results.Transformation:
        """Merge or split instances (serving replicas) while requests run. Return a report at the end.

        Arguments are the same as for `LLM.transform`, but `layers_per_step=None` means "auto". After `timeout_s`
        seconds (None: no limit), the call fails, but the transformation continues.
        """
        message = requests.transform_request(
            tensor_parallel_size, devices, variant, release_weights, layers_per_step, wait_for_programs, running, order
        )
        # No retry: the server may have started the transformation.
        with self._route.explained():
            response = self._admin.Transform(message, timeout=timeout_s, metadata=self._metadata)
        return results.read_transformation(response)

    def placement(self, instance: int = 0, *, timeout_s: float | None = None) -> Placement:
        """Return the placement of an instance: the devices that compute each layer."""
        message = pb.GetPlacementRequest(instance=requests.index("instance", instance))
        return results.read_placement(self._call(self._admin.GetPlacement, message, timeout_s))

    def replicate(
        self,
        layers: range,
        device: int,
        instance: int = 0,
        modules: str = "layer",
        *,
        timeout_s: float | None = None,
    ) -> results.PlacementChange:
        """Replicate layers of an instance on another device while requests run.

        Arguments are the same as for `LLM.replicate`. After `timeout_s` seconds (None: no limit), the call fails, but
        the change continues. `timeout_s` of `evict`, `migrate`, `scale_out` and `scale_in` has the same meaning.
        """
        message = requests.layers_request(pb.ReplicateRequest, layers, device, instance, modules)
        return self._change_placement(self._admin.Replicate, message, timeout_s)

    def evict(
        self,
        layers: range,
        device: int,
        instance: int = 0,
        modules: str = "layer",
        *,
        timeout_s: float | None = None,
    ) -> results.PlacementChange:
        """Remove copies of layers from a device: undo `replicate`. Arguments are the same as for `LLM.evict`."""
        message = requests.layers_request(pb.EvictRequest, layers, device, instance, modules)
        return self._change_placement(self._admin.Evict, message, timeout_s)

    def migrate(
        self,
        layers: range,
        device: int,
        instance: int = 0,
        modules: str = "layer",
        move_kv: bool = True,
        *,
        timeout_s: float | None = None,
    ) -> results.PlacementChange:
        """Move layers of an instance, or only their attention or FFN, to another device while requests run.

        Arguments are the same as for `LLM.migrate`.
        """
        message = requests.layers_request(pb.MigrateRequest, layers, device, instance, modules)
        message.move_kv = move_kv
        return self._change_placement(self._admin.Migrate, message, timeout_s)

    def scale_out(self, device: int, instance: int = 0, *, timeout_s: float | None = None) -> results.PlacementChange:
        """Replicate all layers of an instance on an empty device. The copy then becomes a separate instance."""
        message = pb.ScaleOutRequest(
            device=requests.index("device", device), instance=requests.index("instance", instance)
        )
        return self._change_placement(self._admin.ScaleOut, message, timeout_s)

    def scale_in(self, device: int, instance: int = 0, *, timeout_s: float | None = None) -> results.PlacementChange:
        """End the instance (serving replica) on a device.

        The requests continue on the instance with the id `instance`.
        """
        message = pb.ScaleInRequest(
            device=requests.index("device", device), instance=requests.index("instance", instance)
        )
        return self._change_placement(self._admin.ScaleIn, message, timeout_s)

    def _change_placement(
        self, method: Callable[..., Any], message: Any, timeout_s: float | None
    ) -> results.PlacementChange:
        # No retry: the server may have started the change.
        with self._route.explained():
            response = method(message, timeout=timeout_s, metadata=self._metadata)
        return results.read_placement_change(response)

    def drain(self, request_timeout_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """Make the server refuse new requests, and wait until the last request has ended.

        Args:
            request_timeout_s: seconds after which running requests are aborted. 0: never.
            timeout_s: seconds after which this call fails. None: no limit.

        Returns:
            Number of aborted requests.
        """
        message = pb.DrainRequest(timeout_s=request_timeout_s)
        return self._call(self._admin.Drain, message, timeout_s).aborted

    def set_policy(self, policy: str, *, timeout_s: float | None = None) -> str:
        """Replace the policy, which decides where requests run. Return the name of the previous policy."""
        message = pb.SetPolicyRequest(policy=check_unicode(policy, "policy"))
        return self._call(self._admin.SetPolicy, message, timeout_s).previous_policy

    def _call(self, method: Callable[..., T], message: Any, timeout_s: float | None) -> T:
        deadline = Deadline(timeout_s)
        return self._retried(lambda: method(message, timeout=deadline.left_s, metadata=self._metadata), deadline)

    def _retried(self, attempt: Callable[[], T], deadline: Deadline) -> T:
        with self._route.explained():
            for delay_s in self._retries.delays_s():
                try:
                    return attempt()
                except grpc.RpcError as error:
                    if not is_unavailable(error) or not deadline.allows(delay_s):
                        raise
                time.sleep(delay_s)
            return attempt()

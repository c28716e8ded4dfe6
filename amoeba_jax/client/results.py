"""Results of client calls, as plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.outputs import FinishReason, Logprob
from amoeba_jax.views import DegreePrograms, PlacementStatus, TransformStatus
from sharding.placement import Placement

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}
Position = dict[int, Logprob]
"""Log-probabilities at one position of the text, by token id. The first entry is the token at this position."""


@dataclass(frozen=True)
class Usage:
    """Token counts and times of a request. Times are in seconds. Unknown times are None.

    `amoeba_jax.outputs.RequestMetrics` defines the times and `cached_tokens`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    preemptions: int


@dataclass(frozen=True)
class Chunk:
    """New output of one sample of a request.

    Chunks with `prompt_logprobs` come first. They belong to sample 0 and have no other content.

    Attributes:
        index: index of the sample, below `SamplingParams.n`.
        finish_reason: reason why the sample ended (`outputs.FinishReason`). None before the sample's last chunk.
        stop_reason: stop string or id of the stop token that ended the sample. None in all other cases.
        usage: usage of the whole request. Only the last chunk of a request has it.
        prompt_logprobs: log-probabilities of a part of the prompt, one entry for each token. The next chunk continues
            after this part. The entry of the first prompt token is None.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    usage: Usage | None
    prompt_logprobs: tuple[Position | None, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One finished sample of a request.

    Attributes:
        usage: usage of the whole request.
        prompt_logprobs: log-probabilities of each prompt token, equal for all samples of the request. The first entry
            is None. The field is None if the request did not ask for log-probabilities of the prompt.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    prompt_logprobs: tuple[Position | None, ...] | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Model that a server serves. `max_model_len` limits the tokens of a prompt and its output together."""

    model: str
    server_version: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    limits: dict[str, int] = field(default_factory=dict)
    """Limits of requests and of their fields, by name (docs/serving.md)."""


@dataclass(frozen=True)
class Instance:
    """One instance (serving replica) of a server.

    Attributes:
        running: number of running requests.
        kv_cached_pages: number of KV pages of cached prefixes. These pages are evicted if running requests need pages.
        paused: number of paused requests. The requests resume after a transformation back to `paused_degree`.
        phase: `serving`, `draining` (waiting for steps in flight) or `changing` (its layers are switching).
        placement: devices that compute each layer. None: unknown, because the server is older than this client.
    """

    id: int
    devices: tuple[int, ...]
    tensor_parallel_size: int
    running: int
    kv_used_pages: int
    kv_total_pages: int
    kv_cached_pages: int
    paused: int = 0
    paused_degree: int = 0
    phase: str = ""
    placement: Placement | None = None


@dataclass(frozen=True)
class Cluster:
    """State of a server at one moment.

    Attributes:
        state: `loading`, `ready`, `draining` or `dead`.
        instances: present instances.
        waiting: number of requests in the queue.
        accepted: number of accepted requests that have not ended.
        degrees: progress of the background compilation for each tensor-parallel degree.
        transformations: merges and splits of instances that have not ended.
        placements: replications and migrations of layers that have not ended.
    """

    state: str
    instances: tuple[Instance, ...]
    waiting: int
    accepted: int
    degrees: tuple[DegreePrograms, ...] = ()
    transformations: tuple[TransformStatus, ...] = ()
    placements: tuple[PlacementStatus, ...] = ()


@dataclass(frozen=True)
class Transformation:
    """Report of a transformation, which merges or splits instances.

    Attributes:
        tensor_parallel_size: requested tensor-parallel degree.
        seconds: seconds from the call to the end, including compilation of missing programs.
        prepare_s: part of `seconds` in which the engine stopped to compile missing programs.
        moved_bytes: bytes of KV cache that moved, on all devices together.
        extra_bytes: largest number of temporary bytes on any device.
        steps: number of model steps that ran on the affected devices during the transformation.
        tokens: number of tokens that were generated on the affected devices during the transformation.
        paused: number of sequences that were paused.
        resumed: number of paused sequences that were resumed.
        awaited_programs: number of missing programs that the transformation waited for.
        waited_s: part of `seconds` in which the transformation waited for missing programs, and requests ran as before.
    """

    tensor_parallel_size: int
    seconds: float
    prepare_s: float
    moved_bytes: int
    extra_bytes: int
    steps: int
    tokens: int
    paused: int
    resumed: int
    awaited_programs: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class PlacementChange:
    """Report of a change of placement: layers of an instance that were copied, moved or removed.

    Attributes:
        kind: `replicate`, `evict`, `migrate`, `scale_out` or `scale_in`.
        device: device to which the layers were copied or moved, or from which they were removed.
        layers: index of the first layer of the change, and the index after the last layer.
        seconds: seconds from the call to the end.
        copied_bytes: bytes of weights that were copied between devices.
        shared_bytes: bytes of weights that were not copied, because the device already had them for another instance.
        kv_moved_bytes: bytes of KV pages that moved.
        device_bytes_delta: increase of the bytes in use on each device, negative if memory was freed.
        steps: number of model steps of the instance during the change.
        recomputed: number of times that a sequence lost its KV cache and was computed again.
    """

    kind: str
    instance: int
    device: int
    layers: tuple[int, int]
    seconds: float
    copied_bytes: int
    shared_bytes: int
    kv_moved_bytes: int
    device_bytes_delta: tuple[int, ...]
    steps: int
    recomputed: int


def read_chunks(response: pb.GenerateResponse) -> list[Chunk]:
    """Convert a message to chunks.

    Log-probabilities of the prompt are in a separate first chunk. The usage, if any, is in the last chunk.
    """
    usage = read_usage(response.usage) if response.HasField("usage") else None
    last = len(response.completions) - 1
    chunks = []
    if response.prompt_logprobs:
        positions = tuple(_position(entry) if entry.tokens else None for entry in response.prompt_logprobs)
        chunks.append(Chunk(response.request_id, 0, "", (), (), None, None, None, positions))
    return chunks + [
        Chunk(
            response.request_id,
            completion.index,
            completion.text,
            tuple(completion.token_ids),
            tuple(_position(entry) for entry in completion.logprobs),
            _FINISH_REASONS.get(completion.finish_reason),
            _stop_reason(completion),
            usage if place == last else None,
        )
        for place, completion in enumerate(response.completions)
    ]


def read_usage(message: pb.Usage) -> Usage:
    """Convert a usage message. Times that are not set become None."""
    times = {name: getattr(message, name) if message.HasField(name) else None for name in _TIMES}
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        preemptions=message.preemptions,
        **times,
    )


_TIMES = ("queue_s", "ttft_s", "tpot_s", "e2e_s")


def collect(chunks: Iterable[Chunk]) -> list[Generation]:
    """Combine all chunks of a request into one `Generation` for each sample, ordered by index."""
    by_index: dict[int, list[Chunk]] = {}
    usage: Usage | None = None
    prompt_logprobs: list[Position | None] = []
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
        usage = chunk.usage or usage
        prompt_logprobs += chunk.prompt_logprobs
    generations = []
    for index, parts in sorted(by_index.items()):
        last = parts[-1]
        assert usage is not None, "a stream that ends without an error ends with the usage"
        assert last.finish_reason is not None, "and each sample with its reason"
        generations.append(
            Generation(
                last.request_id,
                index,
                "".join(part.text for part in parts),
                tuple(token for part in parts for token in part.token_ids),
                tuple(position for part in parts for position in part.logprobs),
                last.finish_reason,
                last.stop_reason,
                usage,
                tuple(prompt_logprobs) or None,
            )
        )
    return generations


def read_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """Convert a message to a `ModelInfo`."""
    return ModelInfo(
        message.model,
        message.server_version,
        message.max_model_len,
        message.vocab_size,
        message.has_tokenizer,
        message.has_chat_template,
        tuple(message.eos_token_ids),
        message.bos_token_id if message.HasField("bos_token_id") else None,
        dict(message.limits),
    )


def read_cluster(message: pb.Cluster) -> Cluster:
    """Convert a message to a `Cluster`."""
    state = pb.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower()
    instances = tuple(
        Instance(
            instance.id,
            tuple(instance.devices),
            instance.tensor_parallel_size,
            instance.running,
            instance.kv_used_pages,
            instance.kv_total_pages,
            instance.kv_cached_pages,
            instance.paused,
            instance.paused_degree,
            instance.phase,
            read_placement(instance.placement) if instance.HasField("placement") else None,
        )
        for instance in message.instances
    )
    degrees = tuple(DegreePrograms(it.tensor_parallel_size, it.num_programs, it.num_ready) for it in message.degrees)
    transformations = tuple(
        TransformStatus(
            it.tensor_parallel_size,
            tuple(it.devices),
            it.state,
            it.programs_left,
            it.estimated_s if it.HasField("estimated_s") else None,
            it.layers_switched,
            it.num_layers,
        )
        for it in message.transformations
    )
    placements = tuple(
        PlacementStatus(it.kind, it.instance, it.device, _layers(it.layers), it.state, it.layers_switched)
        for it in message.placements
    )
    return Cluster(state, instances, message.waiting, message.accepted, degrees, transformations, placements)


def read_transformation(message: pb.TransformResponse) -> Transformation:
    """Convert a message to a `Transformation`."""
    names = Transformation.__dataclass_fields__
    return Transformation(**{name: getattr(message, name) for name in names})


def read_placement(message: pb.Placement) -> Placement:
    """Convert a message to a `Placement`. Raises `LayoutError` if a layer has no devices."""
    stages = [
        {
            "layers": _layers(stage.layers),
            "module": pb.PlacementModules.Name(stage.modules).removeprefix("PLACEMENT_MODULES_").lower(),
            "homes": [list(home.devices) for home in stage.homes],
        }
        for stage in message.stages
    ]
    homes = [message.head, *(home for stage in message.stages for home in stage.homes)]
    num_layers = max((stage.layers.end for stage in message.stages), default=0)
    num_devices = max((device for home in homes for device in home.devices), default=0) + 1
    data = {"head": list(message.head.devices), "stages": stages}
    return Placement.from_data(data, num_layers, num_devices, max_degree=num_devices)


def read_placement_change(message: pb.PlacementReport) -> PlacementChange:
    """Convert a message to a `PlacementChange`."""
    values = {name: getattr(message, name) for name in PlacementChange.__dataclass_fields__}
    values |= {"layers": _layers(message.layers), "device_bytes_delta": tuple(message.device_bytes_delta)}
    return PlacementChange(**values)


def _layers(message: pb.LayerRange) -> tuple[int, int]:
    return message.first, message.end


def _position(entry: pb.PositionLogprobs) -> Position:
    return {token.token_id: Logprob(token.logprob, token.rank, token.decoded_token) for token in entry.tokens}


def _stop_reason(completion: pb.Completion) -> int | str | None:
    kind = completion.WhichOneof("stop_reason")
    return None if kind is None else getattr(completion, kind)

"""Valid requests for each RPC of a server, from which `fuzz.py` makes damaged messages."""

import struct
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from amoeba_jax.client._proto import inference_pb2 as pb
from attacks.pressure import infer
from serving.grpc_server._proto import open_inference_pb2 as oip

_CHANGES = ("Transform", "Replicate", "Evict", "Migrate", "ScaleOut", "ScaleIn")
# Weights of RPCs. `_CHANGES` change instances, and endless streams run until their deadline.
_WEIGHTS = {
    "Generate": 25.0,
    "ModelInfer": 14.0,
    "ModelStreamInfer": 10.0,
    "Tokenize": 8.0,
    "Detokenize": 8.0,
    "WatchCluster": 1.0,
    "Watch": 1.0,
    "SetPolicy": 1.0,
    **dict.fromkeys(_CHANGES, 0.05),
}
_TIMEOUTS_S = {"Generate": 1.0, "ModelStreamInfer": 1.0, "WatchCluster": 0.2, "Watch": 0.2}
_TIMEOUTS_S |= dict.fromkeys(_CHANGES, 60.0)
# Drain would end the server.
_LEFT_OUT = {"Drain"}


@dataclass(frozen=True)
class Rpc:
    """RPC to fuzz. `request`: type of its requests. `seeds`: valid requests. `weight`: its relative frequency."""

    path: str
    request: Descriptor
    seeds: tuple[bytes, ...]
    weight: float
    timeout_s: float


def rpcs(model: str) -> list[Rpc]:
    """Return all RPCs of a server of this model, except `Drain`."""
    modules = (pb.DESCRIPTOR, oip.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services: list[Any] = [s for module in modules for s in module.services_by_name.values()]
    valid = _valid(model)
    found = []
    for service in services:
        for method in service.methods:
            if method.name in _LEFT_OUT:
                continue
            path = f"/{service.full_name}/{method.name}"
            seeds = valid.get(method.name, (b"",))
            weight, timeout_s = _WEIGHTS.get(method.name, 2.0), _TIMEOUTS_S.get(method.name, 5.0)
            found.append(Rpc(path, method.input_type, seeds, weight, timeout_s))
    return found


def _valid(model: str) -> dict[str, tuple[bytes, ...]]:
    """Return valid requests, encoded, by name of the RPC. RPCs that are missing in the result take an empty message."""
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="system", content="Be kind."), pb.ChatMessage(role="user", content="Hi")]
    )
    named = {"name": model, "version": "1"}
    messages = {
        "Generate": _generate(chat),
        "Tokenize": [pb.TokenizeRequest(text="Once upon a time", model=model), pb.TokenizeRequest(chat=chat)],
        "Detokenize": [pb.DetokenizeRequest(token_ids=[1, 200, 300, 17], skip_special_tokens=False)],
        "Abort": [pb.AbortRequest(request_id="no one")],
        "WatchCluster": [pb.WatchClusterRequest(interval_s=0.1)],
        "Transform": [
            pb.TransformRequest(tensor_parallel_size=2, layers_per_step=4),
            pb.TransformRequest(tensor_parallel_size=1, devices=[0, 1], variant=pb.TRANSFORM_VARIANT_IN_PLACE),
        ],
        **_placement_changes(),
        "SetPolicy": [pb.SetPolicyRequest(policy=name) for name in ("amoeba", "static", "round_robin")],
        "ModelReady": [oip.ModelReadyRequest(**named)],
        "ModelMetadata": [oip.ModelMetadataRequest(**named)],
        "ModelConfig": [oip.ModelConfigRequest(**named)],
        "ModelStatistics": [oip.ModelStatisticsRequest(**named)],
        "RepositoryIndex": [oip.RepositoryIndexRequest(ready=True)],
        "Check": [health_pb2.HealthCheckRequest(service="amoeba.v1.InferenceService")],
        "Watch": [health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")],
        "ServerReflectionInfo": [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="amoeba.v1.InferenceService"),
            reflection_pb2.ServerReflectionRequest(file_by_filename="amoeba/v1/inference.proto", host="here"),
        ],
    }
    valid = {name: tuple(message.SerializeToString() for message in several) for name, several in messages.items()}
    return valid | {
        "ModelInfer": _infer(model, None),
        "ModelStreamInfer": (*_infer(model, True), *_infer(model, False)),
    }


def _placement_changes() -> dict[str, list[Any]]:
    layers = pb.LayerRange(first=1, end=3)
    return {
        "GetPlacement": [pb.GetPlacementRequest(instance=0)],
        "Replicate": [pb.ReplicateRequest(layers=layers, device=1, modules=pb.PLACEMENT_MODULES_FFN)],
        "Evict": [pb.EvictRequest(layers=layers, device=1)],
        "Migrate": [pb.MigrateRequest(layers=layers, device=1, modules=pb.PLACEMENT_MODULES_KV, move_kv=False)],
        "ScaleOut": [pb.ScaleOutRequest(device=1, instance=0)],
        "ScaleIn": [pb.ScaleInRequest(device=1, instance=0)],
    }


def _generate(chat: pb.Chat) -> list[pb.GenerateRequest]:
    ids = pb.TokenIds(ids=[1, 403, 407, 261, 378])
    every = pb.SamplingParams(
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        seed=7,
        stop=["zebra", "\n\n"],
        stop_token_ids=[2, 17],
        include_stop_str_in_output=True,
        ignore_eos=False,
        max_tokens=3,
        min_tokens=1,
        logprobs=3,
        prompt_logprobs=2,
        logit_bias={5: 1.5, 300: -100.0},
        bad_words=["dog", "big cat"],
        skip_special_tokens=False,
        priority=-3,
    )
    allowed = pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=range(10, 60)), max_tokens=2)
    return [
        pb.GenerateRequest(text="Once upon a time", params=every, cache_salt="salt"),
        pb.GenerateRequest(text="Lily and Tom", params=pb.SamplingParams(temperature=0, max_tokens=2)),
        pb.GenerateRequest(token_ids=ids, params=pb.SamplingParams(temperature=0, max_tokens=3, logprobs=0)),
        pb.GenerateRequest(token_ids=ids, params=allowed),
        pb.GenerateRequest(chat=chat, params=pb.SamplingParams(max_tokens=2, stop=["."])),
    ]


def _infer(model: str, stream: bool | None) -> tuple[bytes, ...]:
    """Return encoded inference requests, with settings as JSON or parameters, and inputs as bytes or `contents`."""
    settings = (
        '{"temperature": 0, "max_tokens": 2}',
        '{"n": 2, "top_k": "5", "stop": ["."], "max_tokens": 3, "logprobs": 1, "logit_bias": {"7": 1.5}, "seed": 3}',
    )
    tensor = oip.ModelInferRequest.InferInputTensor
    text = tensor(name="text_input", datatype="BYTES", shape=[1])
    by_parameter = oip.ModelInferRequest(
        model_name=model,
        model_version="1",
        inputs=[text],
        outputs=[oip.ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
        raw_input_contents=[struct.pack("<I", 4) + b"Once"],
        parameters={
            "max_tokens": oip.InferParameter(int64_param=2),
            "temperature": oip.InferParameter(double_param=0),
            "timeout": oip.InferParameter(uint64_param=500_000),
        },
    )
    flag = tensor(name="return_finish_reason", datatype="BOOL", shape=[1])
    flag.contents.bool_contents.append(True)
    text.contents.bytes_contents.append(b"Once upon")
    contents = oip.ModelInferRequest(
        model_name=model, inputs=[text, flag], parameters={"max_tokens": oip.InferParameter(int64_param=2)}
    )
    calls = [infer("", model, it, stream=stream).data for it in settings]
    return (*calls, by_parameter.SerializeToString(), contents.SerializeToString())

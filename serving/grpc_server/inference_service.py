"""amoeba.v1.InferenceService."""

import uuid

import grpc

import amoeba_jax
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import RequestOutput
from serving.grpc_server.front_door import Call, FrontDoor
from serving.grpc_server.messages import read_params, read_prompt, response

Context = grpc.aio.ServicerContext
_TRACE_HEADERS = ("traceparent", "tracestate")


class InferenceService(pb_grpc.InferenceServiceServicer):
    """Generates text over the front door."""

    def __init__(self, front_door: FrontDoor):
        self._front_door = front_door

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream what is generated for a prompt."""
        self._front_door.check_model(request.model)
        call = Call(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt=read_prompt(request, "prompt"),
            params=read_params(request.params),
            client=client_of(context),
            timeout_s=time_left(context),
            cache_salt=request.cache_salt,
            trace_headers=trace_headers(context),
        )

        async def send(before: RequestOutput | None, output: RequestOutput) -> None:
            await context.write(response(before, output))

        await self._front_door.serve(call, send)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The token ids of a text or a conversation."""
        self._front_door.check_model(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        tokens = await self._front_door.tokenize(read_prompt(request, "input"), special)
        return pb.TokenizeResponse(token_ids=tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The text of token ids."""
        self._front_door.check_model(request.model)
        vocabulary = self._front_door.backend.dims.config.vocab_size
        if (largest := max(request.token_ids, default=0)) >= vocabulary:
            raise RequestError(f"token id {largest} is outside the vocabulary [0, {vocabulary})")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        decode = self._front_door.tokenizer().decode
        return pb.DetokenizeResponse(text=await self._front_door.control(decode, list(request.token_ids), skip))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What is served."""
        backend = self._front_door.backend
        tokenizer = backend.tokenizer
        return pb.GetModelInfoResponse(
            model=backend.name,
            server_version=amoeba_jax.__version__,
            max_model_len=backend.max_model_len,
            vocab_size=backend.dims.config.vocab_size,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            eos_token_ids=sorted(tokenizer.eos_token_ids) if tokenizer else (),
            bos_token_id=tokenizer.bos_token_id if tokenizer else None,
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a request."""
        return pb.AbortResponse(aborted=await self._front_door.abort(request.request_id))


def time_left(context: Context) -> float | None:
    """Seconds until the client's deadline; None where it has set none."""
    left = context.time_remaining()
    # gRPC says "none" with a very large number.
    return None if left is None or left > 1e8 else left


def trace_headers(context: Context) -> dict[str, str]:
    """Where the client's trace is, by W3C Trace Context."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if key in _TRACE_HEADERS and isinstance(value, str)}


def client_of(context: Context) -> str:
    """The client's address without its port: connections of one machine count together."""
    return context.peer().rpartition(":")[0]

"""Service amoeba.v1.InferenceService: text generation and tokenization."""

import uuid
from dataclasses import replace

import grpc

import amoeba_jax
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import RequestDelta
from serving.grpc_server.calls import Call
from serving.grpc_server.field_limits import check_length
from serving.grpc_server.messages import read_params, read_prompt, responses, usage
from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.writer import Writer

Context = grpc.aio.ServicerContext
_TRACE_HEADERS = ("traceparent", "tracestate")


class InferenceService(pb_grpc.InferenceServiceServicer):
    """RPCs of amoeba.v1 for text generation and tokenization."""

    def __init__(self, request_handler: RequestHandler):
        self._handler = request_handler

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the generated text of a prompt."""
        handler, caller = self._handler, self._handler.callers.caller(context)
        handler.check_model(request.model)
        check_length("request_id", len(request.request_id), "max_id_chars", handler.limits, "characters")
        check_length("cache_salt", len(request.cache_salt), "max_salt_chars", handler.limits, "characters")
        call = Call(
            name=request.request_id,
            prompt=read_prompt(request, "prompt", handler.limits, handler.backend.max_model_len),
            params=read_params(request.params, handler.limits, caller),
            caller=caller,
            timeout_s=time_left(context),
            num_bytes=request.ByteSize(),
            cache_salt=request.cache_salt,
            trace_headers=trace_headers(context),
        )
        # Requests without an id get one, so that the client can abort them.
        shown_id = request.request_id or uuid.uuid4().hex
        completion_tokens, writer = 0, Writer(context, handler.admission, caller.client)

        async def send(delta: RequestDelta) -> None:
            nonlocal completion_tokens
            completion_tokens += delta.num_tokens
            ended = usage(delta, completion_tokens) if delta.finished else None
            for message in responses(shown_id, delta, ended):
                await writer.write(message)

        await handler.serve(replace(call, name=shown_id), send)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> None:
        """Return the token ids of a text or a conversation."""
        handler, caller = self._handler, self._handler.callers.caller(context)
        handler.check_model(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        async with handler.admitted(caller, request.ByteSize(), time_left(context)):
            prompt = read_prompt(request, "input", handler.limits, handler.backend.max_model_len)
            answer = pb.TokenizeResponse(token_ids=await handler.tokenize(prompt, special))
            await Writer(context, handler.admission, caller.client).write_last(answer)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> None:
        """Return the text of token ids."""
        handler, caller = self._handler, self._handler.callers.caller(context)
        handler.check_model(request.model)
        async with handler.admitted(caller, request.ByteSize(), time_left(context)):
            handler.check_num_tokens("token_ids", len(request.token_ids))
            vocabulary = handler.backend.dims.config.vocab_size
            if (largest := max(request.token_ids, default=0)) >= vocabulary:
                raise RequestError(f"token id {largest} is outside the vocabulary [0, {vocabulary})")
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            answer = pb.DetokenizeResponse(text=await handler.detokenize(list(request.token_ids), skip))
            await Writer(context, handler.admission, caller.client).write_last(answer)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Return the model, its sizes and the limits of the server."""
        backend = self._handler.backend
        tokenizer = backend.tokenizer
        return pb.GetModelInfoResponse(
            model=backend.name,
            server_version=amoeba_jax.__version__,
            max_model_len=backend.max_model_len,
            vocab_size=backend.dims.config.vocab_size,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            eos_token_ids=sorted(backend.eos_token_ids),
            bos_token_id=tokenizer.bos_token_id if tokenizer else None,
            limits=vars(self._handler.limits),
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort a request. The reply says whether there was a request to abort."""
        handler = self._handler
        return pb.AbortResponse(aborted=await handler.abort(handler.callers.caller(context), request.request_id))


def time_left(context: Context) -> float | None:
    """Return the seconds until the deadline of the client, or None if there is no deadline."""
    left = context.time_remaining()
    # gRPC represents "no deadline" by a very large number.
    return None if left is None or left > 1e8 else left


def trace_headers(context: Context) -> dict[str, str]:
    """Return the headers of W3C Trace Context that the client sent."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if key in _TRACE_HEADERS and isinstance(value, str)}

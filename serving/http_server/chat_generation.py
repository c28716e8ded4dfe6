"""Generation of answers to a conversation, for chat completions and for OpenAI's responses."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from amoeba_jax.outputs import Logprob, RequestDelta
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.calls import Call, Chat
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.conversation import Tools, for_template
from serving.http_server.errors import FieldError
from serving.http_server.output_parser import OutputParser, Piece, family_of, reasons
from serving.http_server.usage import Usage, text_entries

# Last tokens of a prompt, in which an answer may have started.
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class Step:
    """New output of one sample.

    Attributes:
        index: index of the sample.
        pieces: new content, reasoning and tool calls, in order.
        entries: list with a pair (token id, log-probabilities by token id) for each of `token_ids`. If the sample ends
            with a stop token or end-of-sequence token, this token has no pair, except with the sampling setting
            `include_stop_str_in_output`. Empty if log-probabilities were not requested.
        token_ids: ids of all new tokens.
        finish_reason: `stop`, `length`, `tool_calls` or `abort`. None: the sample has not ended.
        stop_reason: stop string or stop token that ended the sample, or None.
    """

    index: int
    pieces: list[Piece]
    entries: list[tuple[int, dict[int, Logprob]]]
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None


class ChatGeneration:
    """Generation of `params.n` answers to one conversation.

    Attributes:
        usage: token counts so far.
        num_entries: number of generated tokens so far, plus the number of their log-probabilities.
        prompt: token ids of the prompt, set when the generation starts.
        prompt_logprobs: log-probabilities of the prompt so far, one entry for each position.
    """

    def __init__(
        self,
        handler: RequestHandler,
        request: Request,
        messages: list[dict[str, Any]],
        tools: Tools,
        params: SamplingParams,
        max_tokens: int | None,
        settings: dict[str, Any],
        name: str,
        cache_salt: str,
    ):
        """Check the conversation. `run` starts the generation.

        Args:
            handler: handler of the requests of all protocols.
            request: HTTP request.
            messages: conversation, from `read_messages`.
            tools: tools of the request.
            params: sampling settings.
            max_tokens: limit for generated tokens. None: `LLM.default_max_tokens`.
            settings: arguments of `Tokenizer.apply_chat_template`.
            name: id that the client chose, or "".
            cache_salt: salt that the client sent, or "".
        """
        template = handler.tokenizer().chat_template
        self._handler, self._tools, self._max_tokens = handler, tools, max_tokens
        self._family = family_of(template)
        self._reasons = reasons(template)
        if (constraint := tools.constraint) is not None:
            if params.structured is not None:
                raise FieldError("tool_choice", "cannot force a call together with another constraint of the text")
            params = replace(params, structured=constraint)
        elif params.structured is not None and tools.functions:
            raise FieldError("tools", 'need tool_choice "none" together with a constraint of the text')
        self._params = params
        self._stop_ids = handler.backend.eos_token_ids | frozenset(params.stop_token_ids)
        if params.include_stop_str_in_output:
            self._stop_ids = frozenset()
        self._parsers: list[OutputParser] = []
        self.usage, self.num_entries = Usage(), 0
        self.prompt: list[int] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._call = Call(
            name=name,
            prompt=Chat(for_template(messages, tools, template), tools.functions, settings),
            params=params,
            caller=request.scope["caller"],
            timeout_s=handler.limits.max_http_s,
            cache_salt=cache_salt,
            with_tokens=self._start,
            trace_headers={key: value for key in ("traceparent", "tracestate") if (value := request.headers.get(key))},
        )

    @staticmethod
    def keeps_special_tokens(handler: RequestHandler, tools: Tools) -> bool:
        """Return whether special tokens must stay in the generated text.

        This is so if the model uses special tokens to mark tool calls or reasoning.
        """
        family = family_of(handler.tokenizer().chat_template)
        return family.uses_special_tokens and (bool(tools.functions) or bool(family.content))

    def _start(self, tokens: list[int]) -> SamplingParams:
        self.prompt = tokens
        tail = self._handler.tokenizer().decode(tokens[-_TAIL_TOKENS:], skip_special_tokens=False)
        tools = self._tools
        self._parsers = [
            OutputParser(
                self._family,
                tail,
                has_tools=bool(tools.functions),
                reasons=self._reasons and self._params.structured is None,
                forced=tools.forced,
                **({} if tools.parallel else {"most_calls": 1}),
            )
            for _ in range(self._params.n)
        ]
        if self._max_tokens is not None:
            return self._params
        return replace(self._params, max_tokens=self._handler.backend.default_max_tokens(len(tokens)))

    async def run(self, send: Callable[[list[Step]], Awaitable[None]]) -> None:
        """Generate the answers, and pass new output to `send`."""

        async def send_delta(delta: RequestDelta) -> None:
            self.usage.add(0, delta)
            self.prompt_logprobs += delta.prompt_logprobs
            self.num_entries += delta.num_tokens * (1 + (self._params.logprobs or 0))
            self.num_entries += len(delta.prompt_logprobs) * (1 + (self._params.prompt_logprobs or 0))
            await send(self._steps(delta))

        await self._handler.serve(self._call, send_delta)

    def _steps(self, delta: RequestDelta) -> list[Step]:
        steps = []
        for it in delta.completions:
            parser = self._parsers[it.index]
            was_reasoning = parser.is_reasoning
            pieces = parser.feed(it.text)
            if was_reasoning or parser.is_reasoning:
                self.usage.reasoning_tokens += len(it.token_ids)
            reason: str | None = it.finish_reason
            if reason is not None:
                pieces += parser.finish()
                if reason == "stop" and parser.num_calls and self._tools.choice != "named":
                    reason = "tool_calls"
            entries = text_entries(it, self._stop_ids)
            steps.append(Step(it.index, pieces, entries, it.token_ids, reason, it.stop_reason))
        return steps

"""`amoeba generate`: one completion on stdout."""

import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np

from amoeba_jax import LLM, EngineConfig, RequestOutput, SamplingParams, StructuredOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.valid_text import check_unicode
from serving.commands.terminal_input import accept_any_bytes


def stream_to_stdout(config: EngineConfig, prompt: str, params: SamplingParams, chat: bool | None) -> None:
    """Load a model and stream the answer to stdout. Timings go to stderr.

    Args:
        prompt: text to answer. "-": read the text from stdin.
        chat: whether to wrap the prompt in the chat template. None: wrap it if the model has a template.
    """
    accept_any_bytes()
    text = check_unicode(sys.stdin.read() if prompt == "-" else prompt, "the prompt")
    if not text:
        raise RequestError("the prompt is empty: pass a text with --prompt, or use --prompt - and pipe a text in")
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    start = time.perf_counter()
    with LLM(**settings, progress=sys.stderr.isatty()) as llm:
        loaded_s = time.perf_counter() - start
        use_chat = uses_chat(llm.tokenizer) if chat is None else chat
        last, times = None, []
        for output in llm.stream(chat_prompt(llm.tokenizer, text) if use_chat else text, params):
            print(output.new_text, end="", flush=True)
            last = output
            times.append(time.perf_counter())
        print(flush=True)
        assert last is not None, "the stream returned no output"
        print(_figures(last, loaded_s, np.diff(times)), file=sys.stderr)


def constraint(json_schema: Path | None, regex: str | None) -> StructuredOutput | None:
    """Return the constraint on the generated text: a JSON schema from a file, or a regular expression.

    Return None if both arguments are None. Raises `RequestError` if both are given, or if the file cannot be read or
    has no schema.
    """
    if json_schema is None and regex is None:
        return None
    schema = None
    if json_schema is not None:
        try:
            schema = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the schema {json_schema} cannot be read: {error}") from error
    return StructuredOutput(json_schema=schema, regex=regex)


def uses_chat(tokenizer: Tokenizer | None) -> bool:
    """Return whether a model has a chat template. If so, prompts are wrapped in the template by default."""
    return tokenizer is not None and tokenizer.has_chat_template


def chat_prompt(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Return the token ids of a user message in the chat template of the model.

    Raises `RequestError` if the model has no chat template.
    """
    if tokenizer is None:
        raise RequestError("a chat prompt needs a tokenizer, but the model has no tokenizer.json")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _figures(output: RequestOutput, loaded_s: float, gaps_s: np.ndarray) -> str:
    """Return the timings of a completion as one line. `gaps_s` has the seconds between consecutive tokens."""
    completion = output.outputs[0]
    parts = [
        f"{len(output.prompt_token_ids)} prompt tokens",
        f"{len(completion.token_ids)} generated ({completion.finish_reason})",
        f"load {loaded_s:.1f} s",
    ]
    if output.metrics.ttft_s is not None:
        parts.append(f"first token after {output.metrics.ttft_s:.2f} s, compiling included")
    if len(gaps_s):
        parts.append(f"median step {1e3 * np.median(gaps_s):.0f} ms")
    return f"[{', '.join(parts)}]"

"""`amoeba chat` and `amoeba transform`: commands for a running server."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import typer

from amoeba_jax.client import Client
from amoeba_jax.errors import ConfigError, RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.valid_text import check_unicode
from serving.commands.terminal_input import accept_any_bytes
from serving.errors import EXIT_FAILURE
from serving.token_file import read_token


def open_client(
    target: str,
    token_file: Path | None,
    token: str | None,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> Client:
    """Connect to a server, with the token of a file or else the given token.

    Raises `ConfigError` if a file cannot be read, or if only one of certificate and key is given.
    """
    token = read_token(token_file, token)
    try:
        return Client(target, token=token, ca=tls_ca, certificate=tls_certificate, key=tls_key)
    except OSError as error:
        raise ConfigError(f"the certificate file {error.filename} cannot be read: {error}") from error


def run_chat(client: Client, params: SamplingParams, system: str | None) -> None:
    """Read questions and stream the answers until end of input. Ctrl-C ends an answer or, at the prompt, the chat."""
    interactive = sys.stdin.isatty()
    accept_any_bytes()
    check_unicode(system or "", "--system")
    with server_errors():
        info = client.model_info()
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    if interactive:
        kind = "/new starts a new chat, Ctrl-D ends" if info.has_chat_template else "no chat template: continues a text"
        print(f"{info.model} ({kind})", file=sys.stderr)
    while (question := _ask(interactive)) is not None:
        if question == "/new":
            messages = list(first)
            continue
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        with server_errors(fatal=not interactive):
            check_unicode(question, "the question")
            answer = _answer(client, messages if info.has_chat_template else question, params)
            messages.append({"role": "assistant", "content": answer})
            continue
        messages.pop()


def _ask(interactive: bool) -> str | None:
    """Read one line; return None at the end of input."""
    try:
        return input("> " if interactive else "")
    except EOFError:
        return None


def _answer(client: Client, prompt: str | list[dict[str, str]], params: SamplingParams) -> str:
    parts: list[str] = []
    stream = client.stream(prompt, params)
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            parts.append(chunk.text)
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]  (Closing the generator ends the request.)
    print(flush=True)
    return "".join(parts)


def run_transform(
    client: Client,
    tensor_parallel_size: int,
    devices: list[int] | None,
    variant: str,
    *,
    keep_weights: bool,
    running: str,
    wait: bool,
) -> None:
    """Request a transformation and print its report."""
    with server_errors():
        done = client.transform(
            tensor_parallel_size, devices, variant, not keep_weights, wait_for_programs=wait, running=running
        )
        degrees = [instance.tensor_parallel_size for instance in client.cluster().instances]
    print(
        f"{' + '.join(f'TP{degree}' for degree in degrees)} after {done.seconds:.2f} s ({done.prepare_s:.2f} s of it "
        f"compiling): {done.moved_bytes / 2**20:.1f} MiB moved, {done.steps} steps and {done.tokens} tokens meanwhile"
        + (f", {done.paused} requests paused" if done.paused else "")
        + (f", {done.resumed} requests resumed" if done.resumed else "")
    )


@contextmanager
def server_errors(fatal: bool = True) -> Iterator[None]:
    """Print errors of the server and of requests on stderr, and exit with 1 if they are `fatal`."""
    try:
        yield
    except RequestError as error:
        if fatal:
            raise
        print(f"error: {error}", file=sys.stderr)
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error.code().name}: {error.details()}{notes}", file=sys.stderr)
        if fatal:
            raise typer.Exit(EXIT_FAILURE) from None

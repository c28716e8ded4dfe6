"""`amoeba chat` and `amoeba transform`: commands for a running server."""

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
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

_POLL_S = 1.0
_POLL_TIMEOUT_S = 5.0


def open_client(
    target: str,
    token_file: Path | None,
    token: str | None,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> Client:
    """Connect to a server with the access token in `token_file`, or with `token` if no file is given.

    Raises `ConfigError` if a file cannot be read, or if only one of a certificate and its key is given.
    """
    token = read_token(token_file, token)
    try:
        return Client(target, token=token, ca=tls_ca, certificate=tls_certificate, key=tls_key)
    except OSError as error:
        raise ConfigError(f"the certificate file {error.filename} cannot be read: {error}") from error


def run_chat(client: Client, params: SamplingParams, system: str | None) -> None:
    """Read questions from stdin and stream the answers, until the end of the input.

    Ctrl-C during an answer ends the answer. Ctrl-C while the user types a question ends the chat.
    """
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
    order: str,
    wait: bool,
) -> None:
    """Ask the server to merge or split instances, and print the report of the server."""
    with server_errors(), _progress(client, tensor_parallel_size, devices or ()) if wait else nullcontext():
        done = client.transform(
            tensor_parallel_size,
            devices,
            variant,
            not keep_weights,
            wait_for_programs=wait,
            running=running,
            order=order,
        )
        degrees = [instance.tensor_parallel_size for instance in client.cluster().instances]
    print(
        f"{' + '.join(f'TP{degree}' for degree in degrees)} after {done.seconds:.2f} s ({done.prepare_s:.2f} s of it "
        f"compiling): {done.moved_bytes / 2**20:.1f} MiB moved, {done.steps} steps and {done.tokens} tokens meanwhile"
        + (f", {done.waited_s:.2f} s of waiting for programs" if done.awaited_programs else "")
        + (f", {done.paused} requests paused" if done.paused else "")
        + (f", {done.resumed} requests resumed" if done.resumed else "")
    )


@contextmanager
def _progress(client: Client, degree: int, devices: Collection[int]) -> Iterator[None]:
    """Print the progress of a running transformation on stderr until the `with` block ends.

    The line is updated each second.
    """
    over = threading.Event()

    def poll() -> None:
        shown, in_place = "", sys.stderr.isatty()
        while not over.wait(_POLL_S):
            try:
                running = client.cluster(timeout_s=_POLL_TIMEOUT_S).transformations
            except grpc.RpcError:
                continue  # the call of the transformation reports the error
            mine = [it for it in running if not devices or not set(devices).isdisjoint(it.devices)]
            lines = [str(it) for it in mine if it.tensor_parallel_size == degree]
            if lines and lines[0] != shown:
                shown = lines[0]
                text, end = (f"\r{shown}\033[K", "") if in_place else (shown, "\n")
                print(text, end=end, file=sys.stderr, flush=True)
        if shown and in_place:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def server_errors(fatal: bool = True) -> Iterator[None]:
    """Handle errors of calls to a server in the `with` block.

    With `fatal`, a failed call is printed on stderr, and the program exits with 1. A `RequestError` (an invalid
    request) is raised and not printed. Without `fatal`, both are printed on stderr, and the program continues after the
    block.
    """
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

"""Settings of the gRPC server."""

from dataclasses import dataclass
from pathlib import Path

from amoeba_jax.address import read_host, read_url
from amoeba_jax.errors import ConfigError

DEFAULT_PORT, DEFAULT_METRICS_PORT = 50051, 9400


@dataclass(frozen=True)
class Limits:
    """What is refused. Raises `ConfigError` for a limit below 1."""

    max_message_bytes: int = 4 * 2**20
    """Bytes of the longest message that is read. Replies have no limit: a long one is several messages."""
    max_header_bytes: int = 16 * 2**10
    """Bytes of a call's metadata, its token included."""
    max_queued_requests: int = 1024
    """Accepted requests that have no token yet. A request counts those of its own class and of more urgent ones, as
    with the next two, `max_requests_per_client` and `max_samples_per_client`: see `PriorityClass`."""
    max_queued_tokens: int = 4_000_000
    """Prompt tokens of all accepted requests that have no token yet."""
    max_queued_urgent_requests: int = 1024
    """Accepted requests with a `priority` below 0 that have no token yet."""
    max_queued_best_effort_requests: int = 1024
    """Accepted requests with a `priority` above 0 that have no token yet."""
    max_requests_per_client: int = 512
    """Requests of one client (its address) in flight."""
    max_samples_per_client: int = 4096
    """Samples of these requests: a request with `n` samples counts as `n`."""
    max_client_bytes: int = 64 * 2**20
    """Bytes of the messages of one client's requests in flight, of prompts that ModelInfer is to repeat for each
    sample, and of replies that were cut off as the client does not read them."""
    max_buffered_tokens: int = 1024
    """Tokens of a sample that its client has not read while a message to it is being written. Log-probabilities, those
    of the prompt too, count as tokens. A client that falls further behind is cut off."""
    max_prompt_chars: int = 2**20
    """Characters of a prompt, or of a call of Tokenize; of a conversation, those of all messages together. Lower where
    no context could hold that much text: see `max_model_len`."""
    max_chat_messages: int = 1024
    """Messages of a conversation."""
    max_stop_strings: int = 16
    """Stop strings of a request."""
    max_stop_string_chars: int = 512
    """Characters of a stop string."""
    max_stop_token_ids: int = 1024
    """Stop token ids of a request."""
    max_bad_words: int = 512
    """Bad words of a request. Words of several tokens count twice, with a space before them and without: at most 256 of
    these together."""
    max_bad_word_chars: int = 128
    """Characters of a bad word."""
    max_logit_bias: int = 4096
    """Entries of a request's logit bias."""
    max_allowed_token_ids: int = 16384
    """Allowed token ids of a request."""
    max_id_chars: int = 128
    """Characters of a request's id."""
    max_salt_chars: int = 256
    """Characters of a request's `cache_salt`."""
    max_settings_bytes: int = 256 * 2**10
    """Bytes of `sampling_parameters`, as JSON (Open Inference Protocol)."""
    max_reply_entries: int = 2**20
    """Tokens and log-probabilities that a reply in one message (ModelInfer) could have, by `n`, `max_tokens` and
    `logprobs`. Streams have no such limit."""
    max_echo_bytes: int = 16 * 2**20
    """Bytes of a prompt, times `n`, that ModelInfer or ModelStreamInfer is to repeat before the text of each sample."""
    max_prompt_entries: int = 2**20
    """Tokens of a prompt whose log-probabilities are asked for, times 1 + `prompt_logprobs`."""
    min_priority: int = 0
    """Lowest `priority`, which is served first, that requests may ask for. The admin's token allows any."""
    min_ttft_slo_ms: int = 10
    """Lowest `ttft_slo_s` that requests may ask for, in milliseconds: policies change instances for a request whose SLO
    would be missed. The admin's token allows any."""
    min_tpot_slo_ms: int = 1
    """Lowest `tpot_slo_s` that requests may ask for, in milliseconds. The admin's token allows any."""
    max_refusals_per_second: int = 25
    """Calls of one client that are refused, or that it gives up (or that end by their deadline) within a quarter of a
    second, after the first 100: further answers, and requests, are up to a second late."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and name != "min_priority"):
                raise ConfigError(f"{name}={value!r} must be a positive integer")


@dataclass(frozen=True)
class TLS:
    """Certificates, in PEM files that are read again when they change."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Certificates that sign those of clients: given, a client must have one."""

    def __post_init__(self) -> None:
        for path in (self.certificate, self.key, self.client_ca):
            if path is not None and not path.is_file():
                raise ConfigError(f"there is no file {path}: TLS needs a certificate and its key in PEM form")


@dataclass(frozen=True)
class SecretFiles:
    """Files with the certificates and tokens of a server, which `amoeba serve` takes."""

    tls_certificate: Path | None = None
    """PEM file with the server's certificate; turns TLS on. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    tls_client_ca: Path | None = None
    """PEM file with the certificates that sign those of clients: given, a client must have one."""
    api_token_file: Path | None = None
    """File with the tokens of clients, one a line. Default: the environment's AMOEBA_API_TOKEN, or no token."""
    admin_token_file: Path | None = None
    """File with the token of admins. Default: the environment's AMOEBA_ADMIN_TOKEN, or no token."""


@dataclass(frozen=True)
class ServerConfig:
    """Where and how to serve."""

    host: str = "127.0.0.1"
    """Host name or IP address to bind: 0.0.0.0 for all IPv4 addresses, :: for all addresses of the machine. By default
    only programs on this machine can connect."""
    port: int = DEFAULT_PORT
    """gRPC port; 0 takes any free one."""
    admin_port: int | None = None
    """Port of AdminService. Default: the same as `port`."""
    metrics_port: int | None = DEFAULT_METRICS_PORT
    """HTTP port of Prometheus metrics; 0 takes any free one, null in a file turns them off."""
    tls: TLS | None = None
    """Certificates. None: no TLS."""
    api_token: str | tuple[str, ...] | None = None
    """Tokens of clients, which send `authorization: Bearer TOKEN`. Clients with different tokens share no request ids
    and no cached prefixes. None: clients need no token."""
    admin_token: str | None = None
    """Token for AdminService, which also allows everything else. None: where there is an `api_token`, no one may call
    AdminService."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests may go on after SIGTERM."""
    engine_timeout_s: float = 300.0
    """Seconds without an answer from the engine after which it counts as stuck, and the process ends. It answers
    between steps: choose more than the longest compilation while serving, of which there are none after a warm-up."""
    otlp_traces_endpoint: str | None = None
    """Address of an OpenTelemetry collector, http://HOST:PORT or https://HOST:PORT, that takes OTLP over gRPC: it gets
    a span of every request and transformation. Needs the extra otel. Default: no traces."""
    limits: Limits = Limits()
    """What is refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", read_host(self.host, "host"))
        ports = {"port": self.port, "admin_port": self.admin_port, "metrics_port": self.metrics_port}
        for name, value in ports.items():
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value!r} must be from 0 to 65535")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ConfigError(f"shutdown_timeout_s={self.shutdown_timeout_s!r} must be finite and at least 0")
        if not 0 < self.engine_timeout_s < float("inf"):
            raise ConfigError(f"engine_timeout_s={self.engine_timeout_s!r} must be finite and above 0")
        if self.otlp_traces_endpoint is not None:
            read_url(self.otlp_traces_endpoint, "otlp_traces_endpoint")
        if isinstance(self.api_token, tuple) and not self.api_token:
            raise ConfigError("api_token must have a token, or be None")
        for name, tokens in (("api_token", self.api_tokens), ("admin_token", (self.admin_token,))):
            for token in tokens:
                if token is not None and (not token.isascii() or not token.strip() or token != token.strip()):
                    raise ConfigError(f"{name} must be ASCII characters without a space around them")

    @property
    def api_tokens(self) -> tuple[str, ...]:
        """`api_token` as a tuple."""
        token = self.api_token
        return token if isinstance(token, tuple) else () if token is None else (token,)

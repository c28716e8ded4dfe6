"""Settings of the gRPC server."""

from dataclasses import dataclass
from pathlib import Path

from amoeba_jax.address import read_host, read_url
from amoeba_jax.errors import ConfigError

DEFAULT_PORT, DEFAULT_METRICS_PORT = 50051, 9400


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of their fields.

    Raises `ConfigError` for a limit below 1. Only `min_priority` may be below 1.
    """

    max_message_bytes: int = 4 * 2**20
    """Bytes of a message to the server. Replies have no limit: a long reply is split into several messages."""
    max_header_bytes: int = 16 * 2**10
    """Bytes of the metadata of a call, including its token."""
    max_queued_requests: int = 1024
    """Accepted requests without a first token. Only requests of the same or of a more urgent class count (see
    `PriorityClass`). The same holds for `max_queued_tokens`, `max_requests_per_client` and `max_samples_per_client`."""
    max_queued_tokens: int = 4_000_000
    """Prompt tokens of all accepted requests without a first token."""
    max_queued_urgent_requests: int = 1024
    """Accepted requests with a `priority` below 0 and without a first token."""
    max_queued_best_effort_requests: int = 1024
    """Accepted requests with a `priority` above 0 and without a first token."""
    max_requests_per_client: int = 512
    """Unfinished requests of one client address."""
    max_samples_per_client: int = 4096
    """Samples of the unfinished requests of one client address. A request with `n` samples counts as `n`."""
    max_client_bytes: int = 64 * 2**20
    """Bytes of one client's unfinished requests, of the prompts that ModelInfer repeats for each sample, and of replies
    that the client does not read."""
    max_buffered_tokens: int = 1024
    """Unread tokens of a sample while a write to its client is blocked. Log-probabilities count as tokens. The
    server cuts off a client that falls further behind."""
    max_prompt_chars: int = 2**20
    """Characters of a prompt, of a call of Tokenize, or of a conversation with its keys, tools and template arguments.
    The limit is lower if the context of the model cannot hold that much text (see `max_model_len`)."""
    max_chat_messages: int = 1024
    """Messages of a conversation."""
    max_stop_strings: int = 16
    """Stop strings of a request."""
    max_stop_string_chars: int = 512
    """Characters of a stop string."""
    max_stop_token_ids: int = 1024
    """Stop token ids of a request."""
    max_bad_words: int = 512
    """Bad words of a request. At most 256 forms of words may have several tokens. A word has two forms: with and
    without a space before it."""
    max_bad_word_chars: int = 128
    """Characters of a bad word."""
    max_logit_bias: int = 4096
    """Entries of a request's logit bias."""
    max_allowed_token_ids: int = 16384
    """Allowed token ids of a request."""
    max_id_chars: int = 128
    """Characters of a request's id."""
    max_prompts: int = 128
    """Prompts of an HTTP request for completions."""
    max_tools: int = 128
    """Tools of an HTTP request."""
    max_http_s: int = 3600
    """Seconds that an HTTP request may take, from its arrival to its last token."""
    max_salt_chars: int = 256
    """Characters of a request's `cache_salt`."""
    max_settings_bytes: int = 256 * 2**10
    """Bytes of `sampling_parameters`, as JSON (Open Inference Protocol)."""
    max_reply_entries: int = 2**20
    """Tokens and log-probabilities that a reply of ModelInfer may have, computed from `n`, `max_tokens` and `logprobs`.
    The limit also holds for an HTTP reply without a stream, and for the prompts that it repeats for each sample."""
    max_echo_bytes: int = 16 * 2**20
    """Bytes of a prompt times `n`, if ModelInfer, ModelStreamInfer or an HTTP completion repeats the prompt before each
    sample."""
    max_prompt_entries: int = 2**20
    """Tokens of a prompt times 1 + `prompt_logprobs`, if the request asks for log-probabilities of the prompt."""
    min_priority: int = 0
    """Lowest `priority` of a request. Lower values are served first. The admin token allows any value."""
    min_ttft_slo_ms: int = 10
    """Lowest `ttft_slo_s` of a request, in milliseconds. Policies change instances for a request that would miss its
    SLO. The admin token allows any value."""
    min_tpot_slo_ms: int = 1
    """Lowest `tpot_slo_s` of a request, in milliseconds. The admin token allows any value."""
    max_refusals_per_second: int = 25
    """Calls per second of one client that are refused, or that end by cancellation or deadline within 0.25 s. After the
    first 100 such calls, the server delays answers to further refused calls, and further requests, by up to 1 s."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and name != "min_priority"):
                raise ConfigError(f"{name}={value!r} must be a positive integer")


@dataclass(frozen=True)
class TLS:
    """Certificates of the server, in PEM files. The server reads a file again when the file changes."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Certificates that sign the certificates of clients. If given, every client needs a certificate."""

    def __post_init__(self) -> None:
        for path in (self.certificate, self.key, self.client_ca):
            if path is not None and not path.is_file():
                raise ConfigError(f"there is no file {path}: TLS needs a certificate and its key in PEM form")


@dataclass(frozen=True)
class SecretFiles:
    """Files with the certificates and access tokens of a server, as options of `amoeba serve`."""

    tls_certificate: Path | None = None
    """PEM file with the server's certificate. Turns TLS on. The server reads it again when it changes."""
    tls_key: Path | None = None
    """PEM file with the key of the certificate."""
    tls_client_ca: Path | None = None
    """PEM file with the certificates that sign the certificates of clients. If given, every client needs a
    certificate."""
    api_token_file: Path | None = None
    """File with the tokens of clients, one token on each line. Default: the environment's AMOEBA_API_TOKEN, or no
    token."""
    admin_token_file: Path | None = None
    """File with the admin token. Default: the environment's AMOEBA_ADMIN_TOKEN, or no token."""


@dataclass(frozen=True)
class ServerConfig:
    """Addresses, access tokens and time limits of the gRPC server."""

    host: str = "127.0.0.1"
    """Host name or IP address to bind: 0.0.0.0 for all IPv4 addresses, :: for all addresses of the machine. By default
    only programs on this machine can connect."""
    port: int = DEFAULT_PORT
    """gRPC port. 0 takes any free port."""
    admin_port: int | None = None
    """Port of AdminService. Default: the same as `port`."""
    metrics_port: int | None = DEFAULT_METRICS_PORT
    """HTTP port of Prometheus metrics. 0 takes any free port, null in a file turns metrics off."""
    http_port: int | None = None
    """HTTP port of OpenAI's API. 0 takes any free port. Needs the extra http. Default: no HTTP."""
    tls: TLS | None = None
    """Certificates. None: no TLS."""
    api_token: str | tuple[str, ...] | None = None
    """Tokens of clients, which send `authorization: Bearer TOKEN`. Clients with different tokens do not share request
    ids or cached prefixes. None: clients need no token."""
    admin_token: str | None = None
    """Token for AdminService and for all other services. None: if there is an `api_token`, nobody may call
    AdminService."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests may continue after SIGTERM."""
    engine_timeout_s: float = 300.0
    """Seconds without an answer from the engine until it counts as stuck and the process exits. The engine answers
    between steps, so this must be longer than the longest compilation while serving. After a warm-up, nothing is
    compiled while serving."""
    otlp_traces_endpoint: str | None = None
    """Address of an OpenTelemetry collector for OTLP over gRPC: http://HOST:PORT or https://HOST:PORT. The server sends
    it a span for every request and transformation. Needs the extra otel. Default: no traces."""
    limits: Limits = Limits()
    """Limits of requests."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", read_host(self.host, "host"))
        for name in ("port", "admin_port", "metrics_port", "http_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value!r} must be from 0 to 65535")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ConfigError(f"shutdown_timeout_s={self.shutdown_timeout_s!r} must be finite and at least 0")
        if not 0 < self.engine_timeout_s < float("inf"):
            raise ConfigError(f"engine_timeout_s={self.engine_timeout_s!r} must be finite and above 0")
        if self.otlp_traces_endpoint is not None:
            read_url(self.otlp_traces_endpoint, "otlp_traces_endpoint")
        if isinstance(self.api_token, tuple) and not self.api_token:
            raise ConfigError("api_token must have at least one token, or be None")
        for name, tokens in (("api_token", self.api_tokens), ("admin_token", (self.admin_token,))):
            for token in tokens:
                if token is not None and (not token.isascii() or not token.strip() or token != token.strip()):
                    raise ConfigError(f"{name} must be ASCII characters without spaces around them")

    @property
    def api_tokens(self) -> tuple[str, ...]:
        """Access tokens of clients, as a tuple."""
        token = self.api_token
        return token if isinstance(token, tuple) else () if token is None else (token,)

"""Settings of `amoeba serve` from a YAML file and from options. An option overrides the file."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from amoeba_jax import EngineConfig
from amoeba_jax.errors import ConfigError
from serving.grpc_server.config import TLS, Limits, SecretFiles, ServerConfig
from serving.runtime.scheduling_config import SchedulingConfig

_ENGINE = {field.name for field in fields(EngineConfig)}
_LIMITS = {field.name for field in fields(Limits)}
_SERVER = {field.name for field in fields(ServerConfig)} - {"limits", "tls", "api_token", "admin_token"}
_SCHEDULING = {field.name for field in fields(SchedulingConfig)}
_FILES = {field.name for field in fields(SecretFiles)}


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file, by option name. Raises `ConfigError` for an invalid file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {path} must hold names and values, not a {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def merge_settings(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of a YAML file, if there is one, with the options `flags`. An option overrides the file.

    Raises `ConfigError` for an invalid file.
    """
    values = read_file(file) if file else {}
    return values | {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}


def serve_settings(
    values: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[ServerConfig, EngineConfig, SchedulingConfig]:
    """Build the configurations of `amoeba serve` from settings by name. Raises `ConfigError` for invalid settings.

    If the settings name no file of access tokens, the tokens come from the variables in `environment`.
    """
    known = _ENGINE | _SCHEDULING | _LIMITS | _SERVER | _FILES
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    for name in sorted(_FILES & set(values)):
        if not isinstance(values[name], str):
            raise ConfigError(f"{name}={values[name]!r} must be the path of a file")
    server = _typed(ServerConfig, {name: values[name] for name in _SERVER & set(values)})
    server = ServerConfig(
        **server,
        limits=Limits(**{name: values[name] for name in _LIMITS & set(values)}),
        tls=_tls(values),
        api_token=_tokens(values.get("api_token_file"), environment.get("AMOEBA_API_TOKEN")),
        admin_token=_token(values.get("admin_token_file"), environment.get("AMOEBA_ADMIN_TOKEN")),
    )
    engine = EngineConfig.from_fields({name: values[name] for name in _ENGINE & set(values)})
    return server, engine, SchedulingConfig(**{name: values[name] for name in _SCHEDULING & set(values)})


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Check the types of the settings of the dataclass `kind`, and return the settings.

    Raises `ConfigError` for a wrong type, such as text for a number.
    """
    for name, value in values.items():
        texts = ("host", "otlp_traces_endpoint")
        wanted = str if name in texts else (int, float) if name.endswith("_s") else int
        optional = name in ("admin_port", "metrics_port", "http_port", "otlp_traces_endpoint") and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, wanted)):
            raise ConfigError(f"{name}={value!r} of {kind.__name__} has the wrong type")
    return values


def _tls(values: Mapping[str, Any]) -> TLS | None:
    certificate, key, client_ca = (values.get(f"tls_{name}") for name in ("certificate", "key", "client_ca"))
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs both tls_certificate and tls_key")
    return TLS(Path(certificate), Path(key), None if client_ca is None else Path(client_ca))


def _tokens(path: str | None, from_environment: str | None) -> tuple[str, ...] | None:
    """Return the access tokens of clients: the lines of the file `path`, or of `from_environment` if `path` is None.

    Return None if both are None.
    """
    text = _token(path, from_environment)
    return None if text is None else tuple(line.strip() for line in text.splitlines() if line.strip()) or ("",)


def _token(path: str | None, from_environment: str | None) -> str | None:
    if path is None:
        return from_environment
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error

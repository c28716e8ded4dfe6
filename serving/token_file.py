"""Access tokens of clients and administrators, from files."""

from pathlib import Path

from amoeba_jax.errors import ConfigError


def read_token(token_file: Path | None, token: str | None) -> str | None:
    """Return the access token in the file `token_file`, or `token` if no file is given.

    Raises `ConfigError` if the file cannot be read.
    """
    if token_file is None:
        return token
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {token_file} cannot be read: {error}") from error

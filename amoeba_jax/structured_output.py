"""Constraint on the text of a request: a JSON schema, any JSON object, a regular expression, a grammar or a choice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten
from amoeba_jax.valid_text import check_unicode

MAX_CONSTRAINT_BYTES = 128 * 1024
"""Limit in bytes of UTF-8, for a JSON schema, a regular expression, a grammar, or all choices together."""
MAX_CHOICES = 1024
"""Limit for the number of choices."""


@dataclass(frozen=True)
class StructuredOutput:
    """Constraint on the generated text. Exactly one field must be set.

    When the text matches the constraint, the sequence ends with the finish reason "stop". If the sequence reaches
    `max_tokens` before that, it ends with "length", and its text is the beginning of a match.

    Raises `RequestError` if no field or several fields are set, or if a field is invalid or too large. If the
    constraint cannot be compiled, the request is refused later.
    """

    json_schema: str | Mapping[str, Any] | None = None
    """JSON schema, as a mapping or as JSON text. Stored as JSON text. At most 128 KiB."""
    json_object: bool = False
    """Whether the text must be a JSON object, of any content."""
    regex: str | None = None
    """Regular expression for the whole text, in the syntax of Rust's crate `regex`. At most 128 KiB."""
    grammar: str | None = None
    """Grammar in the form of Lark, with the rule `start`. At most 128 KiB."""
    choice: Sequence[str] | None = None
    """Allowed texts: 1 to 1024 different non-empty strings. Stored as a tuple. At most 128 KiB together."""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"structured.json_object must be True or False, got {shorten(self.json_object)}")
        fields = vars(self)
        given = [name for name, value in fields.items() if value is not None and value is not False]
        if len(given) != 1:
            raise RequestError(f"structured must set exactly one of {', '.join(fields)}, got {given or 'none of them'}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_schema(self.json_schema))
        for name in ("regex", "grammar"):
            if (text := fields[name]) is not None:
                _check_text(name, text)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name, value in vars(self).items() if value is not None and value is not False)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"structured.{name} must be a non-empty string, got {shorten(text)}")
    _check_size(name, len(check_unicode(text, f"structured.{name}").encode()))


def _check_size(name: str, num_bytes: int) -> None:
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise RequestError(f"structured.{name} has {num_bytes} bytes, over the limit of {MAX_CONSTRAINT_BYTES}")


def _json_schema(schema: Any) -> str:
    """Return a schema as compact JSON text. The order of keys is kept."""
    if isinstance(schema, str):
        _check_text("json_schema", schema)
    elif not isinstance(schema, Mapping):
        raise RequestError(f"structured.json_schema must be a mapping or JSON text, got {shorten(schema)}")
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError("structured.json_schema is nested too deep") from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured.json_schema is not valid JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise RequestError(f"structured.json_schema must be a JSON object, true or false, got {shorten(value)}")
    _check_text("json_schema", text)
    return text


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence):
        raise RequestError(f"structured.choice must be a sequence of strings, got {shorten(choices)}")
    texts = tuple(choices)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise RequestError(f"structured.choice must have 1 to {MAX_CHOICES} strings, got {len(texts)}")
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"structured.choice must have non-empty strings, got {shorten(texts)}")
    for index, text in enumerate(texts):
        check_unicode(text, f"structured.choice[{index}]")
    if len(set(texts)) < len(texts):
        raise RequestError(f"structured.choice must have different strings, got {shorten(texts)}")
    _check_size("choice", sum(len(text.encode()) for text in texts))
    return texts

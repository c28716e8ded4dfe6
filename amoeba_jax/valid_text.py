"""Check that text from outside is valid Unicode."""

from amoeba_jax.errors import RequestError


def check_unicode(text: str, name: str) -> str:
    """Return the text. Raises `RequestError` if the text has an unpaired surrogate, which UTF-8 cannot express.

    JSON can contain unpaired surrogates. Python also uses them for arguments and file names that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python's "surrogateescape" maps the bytes 0x80 to 0xFF to these characters.
        byte = f" (the byte 0x{code - 0xDC00:02X} of a text that is not UTF-8)" if 0xDC80 <= code <= 0xDCFF else ""
        raise RequestError(
            f"{name} must be valid Unicode: character {error.start} is the unpaired surrogate U+{code:04X}{byte}"
        ) from None
    return text

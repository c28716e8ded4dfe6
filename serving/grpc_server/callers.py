"""Who calls: what the token and the connection of a call say about it."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import grpc


@dataclass(frozen=True)
class Caller:
    """Where a call comes from.

    Attributes:
        client: whom requests and bytes are counted for: the address without its port, so that connections of one
            machine count together.
        scope: within which a request's id names it: the token, or, without tokens, the connection.
        account: whom slots and pages are counted for: the token, or, without tokens, the client.
        salt: what separates its cached prefixes from those of others; "" without tokens.
        has_admin_token: it has sent the admin's token.
        may_abort_all: it may end requests of others: an admin, or anyone where there are no tokens.
    """

    client: str
    scope: str
    account: str
    salt: str = ""
    has_admin_token: bool = False
    may_abort_all: bool = False


class Callers:
    """Knows the tokens. Without any, everyone may do everything."""

    def __init__(self, api_tokens: Iterable[str] = (), admin_token: str | None = None):
        self._api_tokens, self._admin_token = tuple(api_tokens), admin_token

    @property
    def needs_no_token(self) -> bool:
        """Whether there are no tokens at all."""
        return not self._api_tokens and self._admin_token is None

    @property
    def inference_is_open(self) -> bool:
        """Whether calls other than the admin's need no token."""
        return not self._api_tokens

    def is_client(self, token: str | None) -> bool:
        """Whether a token is one of the clients'."""
        same = [_same(token, known) for known in self._api_tokens]  # all of them, so that the time tells nothing
        return any(same)

    def is_admin(self, token: str | None) -> bool:
        """Whether a token is the admin's."""
        return _same(token, self._admin_token)

    def caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Who has made a call."""
        peer, token = context.peer(), bearer_token(context.invocation_metadata() or ())
        client, is_admin = peer.rpartition(":")[0], self.is_admin(token)
        if token is not None and (is_admin or self.is_client(token)):
            name = hashlib.blake2b(token.encode(), digest_size=16, person=b"caller").hexdigest()
            scope = f"token {name}"
            return Caller(client, scope, scope, name, is_admin, is_admin)
        return Caller(client, f"connection {peer}", client, may_abort_all=self.needs_no_token)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token in a call's metadata."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer ":
            return value[7:].strip()
    return None


def _same(given: str | None, token: str | None) -> bool:
    return given is not None and token is not None and hmac.compare_digest(given.encode(), token.encode())

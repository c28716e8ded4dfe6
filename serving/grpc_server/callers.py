"""Identity of the caller, from the access token and the connection of a call."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import grpc

from serving.grpc_server.statuses import CredentialsError, ForbiddenError

NO_TOKEN = "send a valid token as metadata: authorization: Bearer TOKEN"


@dataclass(frozen=True)
class Caller:
    """Identity of the client that sent a call.

    Attributes:
        client: IP address, in the same form for gRPC and HTTP. The limits of a client's requests and bytes count all
            connections from one address together.
        scope: namespace of the caller's request ids, different for each access token. For a caller without a token, it
            is different for each connection.
        account: name under which the caller gets its fair share of the engine, different for each token. For a caller
            without a token, it is `client`.
        salt: salt of the prefix cache, different for each token, so that callers with different tokens share no
            prefixes. "": the caller has no token.
        has_admin_token: whether the caller sent the admin token.
        may_abort_all: whether the caller may abort requests of other callers. This is true for the admin, and for every
            caller if the server has no tokens.
    """

    client: str
    scope: str
    account: str
    salt: str = ""
    has_admin_token: bool = False
    may_abort_all: bool = False


class Callers:
    """Access tokens of a server. If the server has no tokens, every caller may call every method."""

    def __init__(self, api_tokens: Iterable[str] = (), admin_token: str | None = None):
        self._api_tokens, self._admin_token = tuple(api_tokens), admin_token

    @property
    def needs_no_token(self) -> bool:
        """Whether the server has no tokens."""
        return not self._api_tokens and self._admin_token is None

    @property
    def inference_is_open(self) -> bool:
        """Whether callers without a token may call all services except AdminService."""
        return not self._api_tokens

    def is_client(self, token: str | None) -> bool:
        """Return whether a token is one of the tokens for clients."""
        # Compare with every token: the time must not show which one matches.
        same = [_same(token, known) for known in self._api_tokens]
        return any(same)

    def is_admin(self, token: str | None) -> bool:
        """Return whether a token is the admin token."""
        return _same(token, self._admin_token)

    def check_admin(self, token: str | None) -> None:
        """Check that a token allows calls of AdminService. If the server has no tokens, no token is needed.

        Raises:
            CredentialsError: there is no token, or it is unknown.
            ForbiddenError: the token is a token for clients.
        """
        if self.needs_no_token or self.is_admin(token):
            return
        if self.is_client(token):
            raise ForbiddenError("this token does not allow administration: send the admin token")
        raise CredentialsError(NO_TOKEN)

    def caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return the identity of the caller of a gRPC call."""
        peer = context.peer()
        return self.identify(_host(peer), peer, bearer_token(context.invocation_metadata() or ()))

    def identify(self, client: str, connection: str, token: str | None) -> Caller:
        """Return the identity of a caller, for the limits and the fair sharing of the server.

        Args:
            client: IP address, in any of its forms. "unix": the caller has no IP address.
            connection: address of the client with the port.
            token: token that the caller sent, or None.
        """
        client = _normal(client)
        is_admin = self.is_admin(token)
        if token is not None and (is_admin or self.is_client(token)):
            name = hashlib.blake2b(token.encode(), digest_size=16, person=b"caller").hexdigest()
            scope = f"token {name}"
            return Caller(client, scope, scope, name, is_admin, is_admin)
        return Caller(client, f"connection {connection}", client, may_abort_all=self.needs_no_token)


def _host(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer, such as `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5` or `unix:...`."""
    kind, _, address = peer.partition(":")
    return kind if kind == "unix" else unquote(address.rpartition(":")[0]).strip("[]")


def _normal(host: str) -> str:
    """Return the shortest form of an IP address. An IPv4 address that is written as IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the bearer token in the metadata of a call, or None if the metadata has no token."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer ":
            return value[7:].strip()
    return None


def _same(given: str | None, token: str | None) -> bool:
    return given is not None and token is not None and hmac.compare_digest(given.encode(), token.encode())

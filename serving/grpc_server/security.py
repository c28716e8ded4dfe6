"""TLS credentials of the server. The server reads the files again when a file changes."""

import logging
from pathlib import Path
from typing import Any

import grpc

from serving.grpc_server.config import TLS

logger = logging.getLogger(__name__)


class _Files:
    """PEM files of a server, with the time stamps that the files had when they were last read."""

    def __init__(self, tls: TLS):
        self._paths = tuple(path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None)
        self._stamps = self._stamp()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates in the files. Raises `OSError` if a file cannot be read."""
        certificate, key, *client_ca = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if a file has changed since the last read, or None if no file has changed.

        Also return None if a file cannot be read. gRPC calls this method for each new connection.
        """
        try:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            configuration = self.configuration()
        except OSError:
            logger.exception("the certificates cannot be read: the server keeps the previous ones")
            return None
        self._stamps = stamps
        return configuration

    def _stamp(self) -> tuple[tuple[Path, int, int], ...]:
        stats = [(path, path.stat()) for path in self._paths]
        return tuple((path, stat.st_mtime_ns, stat.st_ino) for path, stat in stats)


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Return the TLS credentials of a port. If `tls.client_ca` is set, each client needs a certificate."""
    files = _Files(tls)
    changed: Any = files.changed  # gRPC allows None, its stubs do not
    return grpc.dynamic_ssl_server_credentials(files.configuration(), changed, tls.client_ca is not None)

"""TLS: certificates that are read again when their files change."""

import logging
from pathlib import Path
from typing import Any

import grpc

from serving.grpc_server.config import TLS

logger = logging.getLogger(__name__)


class _Files:
    """The PEM files, as they were when they were last read."""

    def __init__(self, tls: TLS):
        self._paths = tuple(path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None)
        self._stamps = self._stamp()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What they hold now. Raises `OSError`."""
        certificate, key, *client_ca = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What they hold, if they changed; called for each new connection. None: as before, or unreadable."""
        try:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            configuration = self.configuration()
        except OSError:
            logger.exception("certificates cannot be read: those from before stay in use")
            return None
        self._stamps = stamps
        return configuration

    def _stamp(self) -> tuple[tuple[Path, int, int], ...]:
        stats = [(path, path.stat()) for path in self._paths]
        return tuple((path, stat.st_mtime_ns, stat.st_ino) for path, stat in stats)


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Credentials for a port; clients need a certificate where `tls.client_ca` is given."""
    files = _Files(tls)
    changed: Any = files.changed  # may answer None: nothing changed
    return grpc.dynamic_ssl_server_credentials(files.configuration(), changed, tls.client_ca is not None)

"""HTTP endpoint that Prometheus scrapes."""

import socket
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer


class MetricsServer:
    """Thread that serves `/metrics`, always in Prometheus' text format. It ignores the request header Accept.

    The OpenMetrics format is not offered, because `prometheus_client` would replace the colons in the metric names.

    Attributes:
        port: port on which the server listens.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int):
        """Bind the port and start to serve. Raises `OSError` if the port cannot be bound."""
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

        class Server(ThreadingWSGIServer):
            address_family = family

        self._http = make_server(str(address[0]), port, _text_app(registry), Server, _SilentHandler)
        self.port = self._http.server_port
        self._thread = Thread(target=self._http.serve_forever, name="amoeba-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _text_app(registry: CollectorRegistry) -> Any:
    exposition = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return exposition(environ, start_response)

    return app


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

"""HTTP/2 peer whose flow-control window admits no byte of an answer."""

import socket
import struct

_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_ACK, _END_STREAM, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 0x4
TIMEOUT_S = 60


class DeafPeer:
    """Connection on which the server may send headers but no message."""

    def __init__(self, port: int):
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW_SIZE, 0))
        self._stream = -1

    def call(self, path: str, message: bytes = b"") -> None:
        """Start a call, and wait for the server's headers. Its first message is then blocked."""
        self._stream += 2
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here", "te": "trailers"}
        headers["content-type"] = "application/grpc"
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        self._send(_HEADERS, _END_HEADERS, self._stream, block)
        self._send(_DATA, _END_STREAM, self._stream, struct.pack("!BI", 0, len(message)) + message)
        while self._read() != (_HEADERS, self._stream):
            pass

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload)

    def _read(self) -> tuple[int, int]:
        """Return the kind and stream of the next frame. Acknowledge the server's settings."""
        header = self._receive(9)
        kind, flags, stream = struct.unpack("!BBI", header[3:])
        self._receive(int.from_bytes(header[:3], "big"))
        if kind == _SETTINGS and not flags & _ACK:
            self._send(_SETTINGS, _ACK, 0, b"")
        return kind, stream

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the server has closed the connection"
            data += more
        return data


def _text(text: str) -> bytes:
    """Return an uncompressed HPACK string."""
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()

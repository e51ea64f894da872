"""HTTP/2 by hand, for what no gRPC library would say."""

import select
import socket
import time

SETTINGS = bytes(3) + b"\x04" + bytes(5)  # none but the defaults
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
END_HEADERS = 4
DATA, HEADERS, RST_STREAM, SETTINGS_FRAME, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8


def dial(address, hello=PREFACE):
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(hello)
    return connection


def heard_until_closed(connection, seconds=5):
    """Returns the bytes that the peer sends until it closes; None after `seconds` without a
    byte."""
    connection.settimeout(seconds)
    heard = b""
    try:
        while part := connection.recv(1 << 16):
            heard += part
    except (TimeoutError, socket.timeout):
        return None
    except ConnectionResetError:
        pass
    return heard


def frame(kind, flags, stream, payload):
    return (len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
            + payload)


def _text(text):
    """HPACK's string literal, as it is."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    size, rest = [127], len(data) - 127
    while rest >= 128:
        size.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*size, rest]) + data


def headers(stream, *fields):
    """A HEADERS frame that begins a stream; nothing enters HPACK's table."""
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, END_HEADERS, stream, block)


def exchange(stream, address, *metadata):
    """The beginning of an Exchange call. `stream`: 1, 3, 5..."""
    return headers(stream, (":method", "POST"), (":scheme", "http"),
                   (":path", "/ringattn.v1.ShardService/Exchange"), (":authority", address),
                   ("content-type", "application/grpc"), ("te", "trailers"), *metadata)


class Unfinished:
    """An Exchange call whose first message is as long as it says and never ends: `pour` sends all
    but its last byte, as far as the peer's windows let it, until the call is over."""

    def __init__(self, address, message_bytes, *metadata):
        self.connection = dial(address)
        self.connection.sendall(exchange(1, address, *metadata))
        self.data = bytes(1) + message_bytes.to_bytes(4, "big") + bytes(message_bytes - 1)
        self.sent_bytes = 0
        self.windows = {0: 65535, 1: 65535}  # the connection's, the stream's
        self.initial = 65535
        self.ended = False

    def pour(self, seconds):
        try:
            self._pour(time.monotonic() + seconds)
        except OSError:
            self.ended = True

    def _pour(self, end):
        while not self.ended and self.sent_bytes < len(self.data) and time.monotonic() < end:
            room = min(*self.windows.values(), 1 << 14, len(self.data) - self.sent_bytes)
            if room > 0:
                self.connection.sendall(
                    frame(DATA, 0, 1, self.data[self.sent_bytes:self.sent_bytes + room]))
                self.sent_bytes += room
                self.windows = {key: window - room for key, window in self.windows.items()}
            while not self.ended and self._is_heard(0 if room > 0 else 0.1):
                self._take()

    def close(self):
        self.connection.close()

    def _is_heard(self, seconds):
        return select.select([self.connection], [], [], seconds)[0]

    def _take(self):
        head = self._read(9)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream, payload = int.from_bytes(head[5:], "big"), self._read(size)
        if kind in (HEADERS, RST_STREAM, GOAWAY):
            self.ended = True  # an accepted call is answered by HEADERS, then DATA
        elif kind == WINDOW_UPDATE:
            self.windows[stream] += int.from_bytes(payload, "big")
        elif kind == PING and not flags:
            self.connection.sendall(frame(PING, 1, 0, payload))
        elif kind == SETTINGS_FRAME and not flags:
            for at in range(0, size, 6):
                if payload[at:at + 2] == b"\0\4":  # INITIAL_WINDOW_SIZE
                    initial = int.from_bytes(payload[at + 2:at + 6], "big")
                    self.windows[1] += initial - self.initial
                    self.initial = initial
            self.connection.sendall(frame(SETTINGS_FRAME, 1, 0, b""))

    def _read(self, size):
        data = b""
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            if not part:
                return bytes(size)
            data += part
        return data

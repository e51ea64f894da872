"""A TCP relay between two processes whose network can be cut and stopped."""

import contextlib
import socket
import struct
import threading


class Proxy:
    """Relays connections to `target` (HOST:PORT). Thread safe."""

    def __init__(self, target):
        self.target = target
        self.lock = threading.Lock()
        self.flows = threading.Event()
        self.flows.set()
        self.sockets = set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Resets every connection; new ones are relayed again."""
        with self.lock:
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                          struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)

    def stall(self):
        """Blocks all traffic until resume(), without closing connections."""
        self.flows.clear()

    def resume(self):
        self.flows.set()

    def close(self):
        self.resume()
        self.listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            host, port = self.target.rsplit(":", 1)
            try:
                far = socket.create_connection((host, int(port)), timeout=10)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            left = [2]  # directions
            with self.lock:
                self.sockets |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink, left),
                                 daemon=True).start()

    def _relay(self, source, sink, left):
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 18):
                self.flows.wait()
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self.lock:
            left[0] -= 1
            if left[0] == 0:
                self.sockets -= {source, sink}
                source.close()
                sink.close()

"""A piece of network between workers, which forwards slowly or not at all."""

import selectors
import socket
import threading
from typing import Any

from tests.worlds import free_port


class Proxy:
    """A piece of network between workers: forwards TCP connections, slowly or not at all.

    Listens on 127.0.0.2, at the port where a worker listens on 127.0.0.1 that advertises
    the former: `Proxy.options` has the worker do so.
    """

    _CHUNK = 32 << 10

    def __init__(self) -> None:
        self.port = free_port()
        self.pause = 0.0
        """Seconds before each 32 KiB."""
        self.frozen = threading.Event()
        """Forward nothing, and tell nobody."""
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._CHUNK)
        self._listener.bind(("127.0.0.2", self.port))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    @property
    def options(self) -> dict[str, Any]:
        """For the worker behind the proxy."""
        return {"ports": (self.port, self.port), "advertise": "127.0.0.2"}

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(0.02):
                if self.frozen.is_set():
                    self._closing.wait(0.02)
                elif key.data is None:
                    self._accept()
                else:
                    self._forward(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self.port))
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        if source.fileno() < 0:
            return  # ended with the other direction, just now
        self._closing.wait(self.pause)
        try:
            data = source.recv(self._CHUNK)
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, target):
                self._selector.unregister(one)
                one.close()

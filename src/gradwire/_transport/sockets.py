"""The transport between processes: Unix sockets and shared memory on one host, TCP between hosts.

Listens, admits peers that know the key, connects on first use, and watches over all connections.
Nothing from an unauthenticated connection is read beyond the fixed-size hello and proof. What a
worker sends to itself goes by a loopback network of its own.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from .._wire.frames import Frame, Limits, Parcel
from ..cores import to_mask, usable_cores
from ..errors import ClosedError, GradwireError, ProtocolError, WorkerLostError
from ..locks import CheckedLock
from ..options import Options
from ..threads import Executor
from . import addresses
from .acceptor import Acceptor
from .base import Answer, Card, IsOver, Receiver, Traffic
from .busy_poll import BusyPoll
from .connection_pool import Connections, IncomingConnections, OutgoingConnections
from .connector import Dialer, describe_silence
from .credentials import Credentials
from .endpoint import Endpoint, describe_end
from .framed_socket import Stream
from .handshake import Hello
from .keys import Keys
from .listener import Listener
from .loopback import LoopbackNetwork, LoopbackTransport
from .poller import Poller
from .quota import Quota
from .shared_memory import Recycler

log = logging.getLogger("gradwire")

_TICK = 5.0


class SocketTransport:
    """Moves parcels between processes."""

    def __init__(
        self, options: Options, executor: Executor, rendezvous: str | None = None
    ) -> None:
        self.traffic = Traffic()
        self._options = options
        self._executor = executor
        self._host = addresses.host_identity()
        self._instance = secrets.randbits(64)
        self._busy_poll = BusyPoll(options.spin)
        self._poller = Poller(executor, self._busy_poll)
        self._own = LoopbackTransport(LoopbackNetwork(), executor)
        self._listeners: list[Listener] = []
        self._unix = ""
        self._tcp: tuple[str, int] | None = None
        self._out: dict[int, OutgoingConnections] = {}
        self._in: dict[tuple[int, int], IncomingConnections] = {}
        self._quotas: WeakValueDictionary[int, Quota] = WeakValueDictionary()
        """By worker, as long as it has connections here, or something in flight."""
        self._ended_links: list[Connections] = []
        self._leaving: set[int] = set()  # workers that have said goodbye
        self._lock = CheckedLock()
        self._making: dict[int, CheckedLock] = {}
        self._acceptor: Acceptor | None = None
        self._closed = False
        self._frees_at_once = False  # no task will: the executor ends
        self._ticked_at = time.monotonic()
        try:
            self._listen(rendezvous)
        except BaseException:
            self._poller.close()
            for listener in self._listeners:
                listener.close()
            raise

    def __repr__(self) -> str:
        return f"<SocketTransport {self._tcp}: {[*self._out.values()]}>"

    def links(self) -> dict[int, str]:
        with self._lock:
            return {worker: link.describe() for worker, link in self._out.items()}

    def card(self, name: str, number: int, main: str) -> Card:
        """This worker's card."""
        self._name = name
        return Card(
            name=name,
            id=number,
            host=self._host,
            unix=self._unix,
            tcp=self._tcp,
            plain=self._options.allow is not None,
            main=main,
            cores=to_mask(usable_cores()),
            instance=self._instance,
        )

    def start(self, me: int, keys: Keys, receiver: Receiver) -> None:
        """Begin to receive."""
        options = self._options
        self._me = me
        self._own.start(me, keys, receiver)
        credentials = Credentials(options, me, self._name, keys)
        if options.tls is False:
            self._warn_of_plain_connections()
        self._endpoint = Endpoint(
            credentials=credentials,
            executor=self._executor,
            poller=self._poller,
            receiver=receiver,
            limits=Limits(options.max_body, options.max_bulk),
            busy_poll=self._busy_poll,
            recycler=Recycler(),
            traffic=self.traffic,
        )
        self._acceptor = Acceptor(
            self._endpoint, options, self._welcome, instance=self._instance
        )
        self._poller.start()
        for listener in self._listeners:
            self._poller.watch(listener)
        self._executor.call_at(time.monotonic() + self._pace(), self._tick)

    def share_host(self, workers: int) -> None:
        self._busy_poll.crowd(workers > len(usable_cores()))

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        if to.id == self._me:
            self._own.post(to, call, parcel)
            return
        connections = self._out.get(to.id) or self._connect(to, deadline)
        try:
            connections.shared.post(call, parcel)
        except OSError as error:
            raise WorkerLostError(to.name, describe_end(error)) from error

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        if to.id == self._me:
            return self._own.exchange(
                to, call, parcel, deadline=deadline, is_over=is_over
            )
        connections = self._out.get(to.id) or self._connect(to, deadline)
        return connections.exchange(call, parcel, deadline, is_over)

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        connections = self._out.get(to)
        if connections is not None:
            connections.shared.attend(call, answer, deadline)

    def watch(self, to: Card) -> None:
        with self._lock:
            if any(link.peer == to.id for link in self._links()):
                return
        try:
            self._connect(to, None)
        except GradwireError as error:
            log.debug("worker %r: %s", to.name, error)  # a loss has been reported

    def forget(self, worker: int) -> None:
        with self._lock:
            links = self._links()
        for link in links:
            if link.peer == worker:
                link.close(goodbye=False)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = self._links()
        for listener in self._listeners:
            self._poller.drop(listener)
            listener.close()
        if self._acceptor is not None:
            self._acceptor.close()
        for link in links:
            link.close(goodbye=True)
        self._frees_at_once = True
        self._ended_links += links  # also those that another thread is ending
        self._free_ended()
        self._own.close()
        self._poller.close()
        if self._unix:
            addresses.forget_unix(self._unix)

    def _free_ended(self) -> None:
        """Clean up after ended links, in a thread that may block."""
        links: list[Connections] = []
        while self._ended_links:
            try:
                links.append(self._ended_links.pop())
            except IndexError:
                break  # another thread has seen to it
        for link in links:  # of all, before waiting for what others have open
            link.close_device_memory()
        with self._executor.waiting():
            for link in links:
                link.free_device_memory()

    def _links(self) -> list[Connections]:
        return [*self._out.values(), *self._in.values()]

    def _listen(self, rendezvous: str | None) -> None:
        options = self._options
        if options.unix_sockets:
            try:
                listener, self._unix = addresses.listen_unix()
                self._listeners.append(self._listener(listener))
            except OSError as error:
                log.debug("no unix sockets here: %s", error)
        where = addresses.bind_address(options, rendezvous)
        tcp = addresses.listen_tcp(where, options.ports)
        self._tcp = addresses.advertised(tcp, options)
        self._bound_to = tcp.getsockname()
        self._listeners.append(self._listener(tcp))

    def _listener(self, sock: socket.socket) -> Listener:
        return Listener(sock, self._poller, self._executor, self._stranger)

    def _connect(self, to: Card, deadline: float | None) -> OutgoingConnections:
        with self._lock:
            making = self._making.setdefault(to.id, CheckedLock())
        with self._executor.waiting(), _held(making, deadline):
            link = self._out.get(to.id)
            if link is not None:
                return link
            if self._closed:
                raise ClosedError("this worker is shut down")
            try:
                link = self._new_link(to, deadline)
            except WorkerLostError as error:
                self._endpoint.receiver.lost(to.id, error.reason)
                raise
            with self._lock:
                if not self._closed:
                    self._out[to.id] = link
                    return link
        link.close(goodbye=True)
        raise ClosedError("this worker is shut down")

    def _new_link(self, to: Card, deadline: float | None) -> OutgoingConnections:
        unix = to.host == self._host and self._options.unix_sockets
        return OutgoingConnections(
            self._endpoint,
            to,
            dialer=Dialer(
                self._endpoint.credentials,
                to,
                unix=unix,
                silence=(self._options.host_heartbeat, self._options.heartbeat),
                is_over=lambda: self._closed,
            ),
            memory=self._options.shared_memory,
            deadline=deadline,
            ended=self._ended,
        )

    def _ended(self, link: Connections, reason: str | None) -> None:
        self._ended_links.append(link)
        if self._frees_at_once:
            self._free_ended()
        else:
            self._executor.submit(self._free_ended)
        with self._lock:
            self._out = {k: v for k, v in self._out.items() if v is not link}
            self._in = {k: v for k, v in self._in.items() if v is not link}
            if not link.was_used:
                return
            if reason is None:
                self._leaving.add(link.peer)
            leaves = link.peer in self._leaving
            if leaves and any(other.peer == link.peer for other in self._links()):
                return  # responses may still arrive by the other link, which will end as well
        if self._closed:
            return
        if leaves:
            self._endpoint.receiver.left(link.peer)
        else:
            self._endpoint.receiver.lost(link.peer, reason or "")

    def _stranger(self, sock: socket.socket) -> None:
        """Someone connects."""
        assert self._acceptor is not None  # listeners are watched from `start` on
        self._acceptor.take(sock)

    def _warn_of_plain_connections(self) -> None:
        if not addresses.is_loopback(self._bound_to):
            log.warning(
                "TLS is off (tls=False): anyone who can read or modify the traffic with other "
                "machines can run any code on this one"
            )

    def _welcome(self, hello: Hello, sock: Stream) -> None:
        self._incoming(hello).accept(hello.purpose, sock)

    def _incoming(self, hello: Hello) -> IncomingConnections:
        key = (hello.sender, hello.link)
        with self._lock:
            if self._closed:
                raise ClosedError("this worker is shut down")
            self._check_number(hello.sender)
            link = self._in.get(key)
            if link is None:
                quota = self._quotas.get(hello.sender) or Quota(self._options)
                self._quotas[hello.sender] = quota
                link = self._in[key] = IncomingConnections(
                    self._endpoint, hello.sender, self._ended, quota=quota
                )
            return link

    def _check_number(self, sender: int) -> None:
        """Whether a worker may have another connection here.

        Raises:
            ProtocolError: it has as many as it may have.
        """
        count = sum(link.count for link in self._in.values() if link.peer == sender)
        if count >= self._options.max_peer_connections:
            raise ProtocolError(
                f"{count} of it are open, the limit is max_peer_connections"
            )

    def _pace(self) -> float:
        beats = (self._options.heartbeat, self._options.host_heartbeat)
        return min([_TICK, *(beat / 3 for beat in beats if beat)])

    def _beat(self, link: Connections) -> float:
        """Seconds that a link may be silent; 0 for no limit."""
        options = self._options
        return options.heartbeat if link.is_remote else options.host_heartbeat

    def _tick(self) -> None:
        """Now and then: pings, silent links, unused connections and memory."""
        if self._closed:
            return
        with self._lock:
            outgoing, incoming = list(self._out.values()), list(self._in.values())
        now = time.monotonic()
        for link in outgoing:
            link.tick()
            if now - link.shared.alive_at > self._beat(link) / 4:
                link.ping()
        for guest in incoming:
            guest.tick()
        self._check_silence()
        self._endpoint.recycler.trim()
        self._executor.call_at(time.monotonic() + self._pace(), self._tick)

    def _check_silence(self) -> None:
        now = time.monotonic()
        slept = now - self._ticked_at > 2 * self._pace()  # stopped, or a machine asleep
        self._ticked_at = now
        with self._lock:
            links = self._links()
        for link in links:
            shared, beat = link.shared, self._beat(link)
            if not beat or shared is None:
                continue
            if slept:
                shared.heard_at = now  # this process was the one that did not run
            silence = now - shared.alive_at
            if silence > beat:
                text = describe_silence(silence, is_remote=link.is_remote)
                shared.end(TimeoutError(text))


@contextmanager
def _held(lock: CheckedLock, deadline: float | None) -> Iterator[None]:
    """With the lock, if it can be had in time.

    Raises:
        TimeoutError: it cannot.
    """
    left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
    if not lock.acquire(timeout=left):
        raise TimeoutError
    try:
        yield
    finally:
        lock.release()

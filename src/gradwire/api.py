"""The public functions, which act as the current worker. The project's only global is here.

The current worker is the one that the thread belongs to (a function that another worker called runs
in such a thread) or that began its script; otherwise the one that `init_rpc` created here.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ._rpc.futures import CallFuture
from ._rpc.serial import made_serial
from ._rref import reference
from ._rref.reference import RRef
from ._transport.stores import find_place
from ._wire.pickling import Reducer
from .errors import ClosedError
from .ids import WorkerInfo
from .options import Options
from .retries import call_with_retries
from .tracebacks import hidden_frames, hide_frames
from .uncompiled import uncompiled
from .worker import Worker, open_worker

log = logging.getLogger("gradwire")

_process: Worker | None = None
_starting = threading.Lock()


class _Thread(threading.local):
    """Whose thread this is."""

    worker: Worker | None = None


_thread = _Thread()
inherited: Callable[[], Worker | None] | None = None
"""The worker that began this thread's script; set once scripts can make calls."""
_reducers: dict[type, Reducer] = {}
_own_place: dict[str, Any] = {}
"""Arguments of `init_rpc` where it is called without a place."""


def init_rpc(  # noqa: PLR0913 torch's signature
    name: str | None = None,
    backend: None = None,
    rank: int | None = None,
    world_size: int | None = None,
    rpc_backend_options: Options | None = None,
    *,
    init_method: str | None = None,
    store: Store | None = None,
    **options: Any,
) -> Worker:
    """Join a world as one of its workers, which becomes the current worker of this process.

    Use the worker that it returns in a `with` block, at the end of which it shuts down.

    Args:
        name: The worker's name. Default: `GRADWIRE_NAME`, or `worker<rank>`.
        backend: For compatibility with torch, which has several; omit it.
        rank: The worker's rank, which becomes its id. Default: `RANK`, with `env://`.
        world_size: The number of workers. Default: `WORLD_SIZE`, with `env://`; else the world is
            elastic: workers come and go.
        rpc_backend_options: `Options`; each of them can also be given as a keyword.
        init_method: The rendezvous: `env://` (the default), `tcp://host:port` or `file:///path`.
        store: A store of `torch.distributed` for the rendezvous, instead of `init_method`.
        options: Fields of `Options`.

    Raises:
        ClosedError: this process already has a current worker.
        ValueError: the name or rank is taken, or an option is invalid.
        GradwireError: the other workers did not arrive within `join_timeout`.

    >>> with gw.init_rpc("alone", rank=0, world_size=1, store=HashStore()) as worker:
    ...     worker.name, worker.id
    ('alone', 0)
    """
    if backend is not None:
        raise ValueError(
            f"backend={backend!r}: there is only one backend, leave it out"
        )
    if _own_place and not any((init_method, store)) and rank is world_size is None:
        arguments = {**_own_place, **options}
        return init_rpc(name, rpc_backend_options=rpc_backend_options, **arguments)
    given = rpc_backend_options or Options()
    settings = replace(given, **options) if options else given
    with hidden_frames, _starting:
        if _process is not None and not _process.is_closed:
            raise ClosedError(
                f"this process is worker {_process.name!r} already: shut it down first"
            )
        rank = None if rank is not None and rank < 0 else rank
        place = find_place(init_method, store, rank, world_size, settings.join_timeout)
        if settings.min_workers is not None:
            place.let_come_and_go(settings.min_workers, world_size)
        name = _own_name(place.rank) if name is None else name
        worker = open_worker(name, place, settings, enter)
        adopt(worker)
        return worker


def set_place(**arguments: Any) -> None:
    """Set where `init_rpc` joins in this process when it is called without arguments for it."""
    global _own_place
    _own_place = arguments


def adopt(worker: Worker) -> None:
    """Make a worker the current one of this process."""
    global _process
    prepare(worker)
    _process = worker


def prepare(worker: Worker) -> None:
    """Give a new worker the reducers that were registered before it was created."""
    for kind, reducer in _reducers.items():
        worker.register_reducer(kind, reducer)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the world: together with all other workers if `graceful`, otherwise at once.

    Raises:
        CallTimeout: other workers did not shut down within `timeout` seconds (0 and the default
            have no limit), or calls from here are in flight; this worker is closed all the same.

    >>> with gw.testing.World(2) as other:
    ...     other.run(lambda worker: gw.shutdown())
    [None, None]
    """
    global _process
    worker = current_worker()
    with hidden_frames:
        worker.shutdown(graceful, timeout)
    if worker is _process:
        _process = None


def current_worker() -> Worker:
    """The worker that this thread acts as; ClosedError if there is none."""
    worker = _thread.worker or (inherited and inherited()) or _process
    if worker is None:
        raise ClosedError("there is no worker in this process: call init_rpc first")
    return worker


@uncompiled
def rpc_sync(  # noqa: PLR0913 torch's signature, and more
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    *,
    retries: int = 0,
    device_map: Mapping[Any, Any] | None = None,
) -> Any:
    """Call `func(*args, **kwargs)` on a worker and wait for its result.

    Args:
        to: The worker: its name, id or `WorkerInfo`.
        func: Any callable. It is sent by name if it can be imported, otherwise by value.
        args: Positional arguments, in a tuple or list.
        kwargs: Keyword arguments.
        timeout: Seconds; 0 means no limit. Default: `Options.timeout`.
        retries: How often to retry a function marked as `idempotent` after the worker was lost
            and has come back under its name. All attempts share the `timeout`.
        device_map: On which device there the tensors of each device here arrive, and backwards for
            the result. Default: that of `Options.device_maps`.

    Raises:
        CallTimeout: no response in time.
        WorkerLostError: the worker is lost.
        Exception: what the function raised there; its cause has the remote traceback.

    >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    tensor([4., 4.])
    """
    try:
        worker = current_worker()
        if retries:
            call = func, args, kwargs
            return call_with_retries(worker, to, call, timeout, retries, device_map)
        return worker.rpc_sync(to, func, args, kwargs, timeout, device_map)
    except Exception as error:
        hide_frames(error)
        raise


@uncompiled
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    device_map: Mapping[Any, Any] | None = None,
) -> CallFuture:
    """Call `func(*args, **kwargs)` on a worker, and return a future of the result.

    The future can be awaited, and raises what the function raises. Arguments: those of `rpc_sync`.

    >>> futures = [rpc_async("worker1", max, args=(i, 2)) for i in range(4)]
    >>> [future.wait() for future in futures]
    [2, 2, 2, 3]
    """
    try:
        return current_worker().rpc_async(to, func, args, kwargs, timeout, device_map)
    except Exception as error:
        hide_frames(error)
        raise


@uncompiled
def remote(  # noqa: PLR0913 torch's signature, and more
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    *,
    serial: bool = False,
    device_map: Mapping[Any, Any] | None = None,
) -> RRef[Any]:
    """Call `func(*args, **kwargs)` on a worker, and return a reference to the result at once.

    The arguments are those of `rpc_sync`. What it raises is raised where the reference is used.
    A `device_map` is for the arguments: the value is fetched by that of `Options.device_maps`.
    With `serial`, methods of the result run one at a time, in order of arrival (see `gw.serial`).

    >>> rref = remote("worker1", torch.add, args=(torch.ones(2), 3))
    >>> rref.rpc_sync().sum()
    tensor(8.)
    """
    if serial:
        func, args, kwargs = made_serial, (func, args, kwargs), None
    try:
        return current_worker().remote(to, func, args, kwargs, timeout, device_map)
    except Exception as error:
        hide_frames(error)
        raise


def debug_info() -> dict[str, Any]:
    """What this worker currently owns, holds and waits for.

    >>> rref = remote("worker1", list)
    >>> [held["owner"] for held in debug_info()["held"]]
    ['worker1']
    """
    return current_worker().debug_info()


def statistics() -> dict[str, Any]:
    """Calls made and run, bytes sent and received, and the transport to each other worker.

    >>> [name for name in sorted(statistics()) if "device" not in name]
    ['bytes_received', 'bytes_sent', 'calls_made', 'calls_run', 'links']
    """
    return current_worker().statistics()


def context() -> AbstractContextManager[int]:
    """A context for a forward pass over workers and its backward passes; yields its id.

    All calls made in the block belong to it, including nested ones. At the end of the block, it and
    its gradients are released on all workers.

    Raises:
        GradwireError: this thread is already in a context.

    >>> w = torch.ones(2, requires_grad=True)
    >>> with context() as ctx:
    ...     loss = rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
    ...     backward(ctx, [loss])
    ...     get_gradients(ctx)[w]
    tensor([3., 3.])
    """
    return current_worker().autograd.context()


@uncompiled
def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    create_graph: bool = False,
    accumulate: bool = False,
    timeout: float | None = None,
) -> None:
    """Run one backward pass from these losses, through all workers of a context.

    Gradients stay in the context, where the leaf is; those of several passes accumulate.

    Args:
        context_id: The id that `context()` yielded.
        roots: Losses of this worker: tensors with one element each.
        retain_graph: Keep the graph for another pass.
        create_graph: Record the pass itself, so that the gradients can be differentiated again.
        accumulate: Also accumulate the gradients into `.grad` of the leaves.
        timeout: Seconds. Default: no limit.

    Raises:
        GradwireError: an argument is invalid; or the pass failed on a worker: `Error on Node N:
            ...` with the error there as its cause. Gradients computed before that stay in the
            context.
        WorkerLostError: a worker of the context is lost.
        BackwardTimeout: the pass did not finish in time, and was aborted on all workers.

    >>> w = torch.ones(2, requires_grad=True)
    >>> with context() as ctx:
    ...     loss = rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
    ...     for _ in range(2):
    ...         backward(ctx, [loss], retain_graph=True, accumulate=True)
    >>> w.grad
    tensor([6., 6.])
    """
    with hidden_frames:
        current_worker().autograd.backward(
            context_id,
            roots,
            retain_graph,
            create_graph=create_graph,
            accumulate=accumulate,
            timeout=timeout,
        )


@uncompiled
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients of this worker's leaves in a context, given its `context_id`.

    Raises:
        GradwireError: there is no such context.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> with context() as ctx:
    ...     backward(ctx, [rpc_sync("worker1", torch.dot, args=(x, 2 * y))])
    ...     gradients = get_gradients(ctx)
    >>> gradients[x], gradients[y], x.grad
    (tensor([2., 2.]), tensor([2., 2.]), None)
    """
    with hidden_frames:
        return current_worker().autograd.get_gradients(context_id)


@uncompiled
def grad(  # noqa: PLR0913 they are those of `torch.autograd.grad`
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    timeout: float | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs` with respect to `inputs`, both of this worker, across workers.

    As `torch.autograd.grad`: nothing is stored in the context. It raises what `backward` does;
    `context_id`, `retain_graph`, `create_graph` and `timeout` are also those of `backward`.

    Args:
        outputs: The tensors to differentiate.
        inputs: With respect to what. An unused one is an error, or None with `allow_unused`.
        grad_outputs: The gradients of the outputs; required for outputs of more than one element.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> with context() as ctx:
    ...     y = rpc_sync("worker1", torch.pow, args=(x, 3))
    ...     (slope,) = grad(ctx, [y], [x], create_graph=True)
    ...     (curvature,) = grad(ctx, [slope], [x])
    >>> slope.item(), curvature.item()
    (12.0, 12.0)
    """
    with hidden_frames:
        return current_worker().autograd.grad(
            context_id,
            outputs,
            inputs,
            grad_outputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            timeout=timeout,
        )


@uncompiled
def barrier(timeout: float | None = None) -> None:
    """Wait until all workers have called this, for at most `timeout` seconds.

    >>> _ = world.run(lambda worker: gw.barrier())
    """
    with hidden_frames:
        current_worker().barrier(timeout)


@uncompiled
def all_gather(value: Any, timeout: float | None = None) -> dict[str, Any]:
    """The `value` of every worker, by name, within `timeout` seconds. All workers must call it.

    >>> world.run(lambda worker: gw.all_gather(worker.id))[0]
    {'worker0': 0, 'worker1': 1}
    """
    with hidden_frames:
        return current_worker().all_gather(value, timeout)


@uncompiled
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of a worker; without a `worker_name`, those of this one.

    >>> get_worker_info("worker1")
    WorkerInfo(name='worker1', id=1)
    """
    with hidden_frames:
        return current_worker().get_worker_info(worker_name)


@uncompiled
def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the world, in order of ids.

    >>> [info.name for info in get_worker_infos()]
    ['worker0', 'worker1']
    """
    return current_worker().get_worker_infos()


def on_join(callback: Callable[[WorkerInfo], object]) -> Callable[[], None]:
    """Call `callback(info)` for every worker that joins. Returns a function that unsubscribes.

    >>> stop = on_join(lambda info: print(info.name, "is here"))
    >>> stop()
    """
    return current_worker().on_join(callback)


def on_leave(callback: Callable[[WorkerInfo], object]) -> Callable[[], None]:
    """Call `callback(info)` for every worker that leaves or is lost. Returns an unsubscriber.

    >>> stop = on_leave(lambda info: print(info.name, "is gone"))
    >>> stop()
    """
    return current_worker().on_leave(callback)


def register_reducer(kind: type, reducer: Reducer) -> None:
    """Pickle objects of exactly this type with `reducer`, as with `copyreg.pickle`, in all calls.

    Args:
        kind: The type; its subclasses are not affected.
        reducer: Returns a callable and its arguments, which may contain tensors.

    >>> class Session:
    ...     url = "tcp://10.0.0.1"
    >>> register_reducer(Session, lambda session: (str, (session.url,)))
    >>> rpc_sync("worker1", str, args=(Session(),))
    'tcp://10.0.0.1'
    """
    _reducers[kind] = reducer
    for worker in (_thread.worker, _process):
        if worker is not None:
            worker.register_reducer(kind, reducer)


def enter(worker: Worker | None) -> Worker | None:
    """Make a worker current in this thread; returns the previous one. For worlds in one process."""
    before, _thread.worker = _thread.worker, worker
    return before


def _own_name(rank: int | None) -> str:
    name = os.environ.get("GRADWIRE_NAME")
    if name is None and rank is None:
        raise ValueError("name=None: there is no rank to derive a name from")
    return f"worker{rank}" if name is None else name


def _at_exit() -> None:
    """A program that forgot to shut down ends quietly; others see it leave."""
    if _process is None or _process.is_closed:
        return
    if count := _process.give_up_calls():
        log.warning(
            "worker %r exits with %d calls in flight: wait for them, or call gw.shutdown()",
            _process.name,
            count,
        )
    _process.close()


def _after_fork() -> None:
    """The threads and sockets belong to the parent."""
    global _process, _starting
    _process = None
    _starting = threading.Lock()


reference.find_service = lambda: current_worker().references
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)

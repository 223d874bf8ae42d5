"""An asyncio client: calls and references are awaited, a thousand at a time, in one thread.

    gradwire launch -n 3 examples/asyncio_client.py

Futures of calls can be awaited, and so can references. Everything in asyncio works with them:
gather, timeouts, tasks. A coroutine function can be called as well: it runs on an event loop of the
callee.
"""

import asyncio
import time

import torch
from torch import Tensor

import gradwire as gw

WORKERS = ("worker1", "worker2")


async def square_slowly(x: Tensor) -> Tensor:
    """Runs on another worker, thousands at a time: none of them keeps a thread waiting."""
    await asyncio.sleep(0.1)
    return x * x


def too_slow() -> None:
    time.sleep(1)


async def many() -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    calls = [
        gw.rpc_async(WORKERS[i % 2], square_slowly, args=(torch.tensor(float(i)),))
        for i in range(1000)
    ]
    squares = await asyncio.gather(*calls)
    assert [int(s) for s in squares] == [i * i for i in range(1000)]
    print(f"1000 calls of 0.1 s each, all right: {loop.time() - begin:.1f} s")


async def chain() -> None:
    """Each task goes its own way; values stay where they were made until they are awaited."""

    async def walk(number: int) -> float:
        made = gw.remote(WORKERS[number % 2], torch.full, args=((2,), float(number)))
        doubled = made.remote().mul(2)
        return float((await doubled).sum())

    sums = await asyncio.gather(*(asyncio.create_task(walk(n)) for n in range(8)))
    print("by reference:", sums)


async def limits() -> None:
    try:
        await asyncio.wait_for(gw.rpc_async("worker1", too_slow), 0.2)
    except asyncio.TimeoutError:
        print("a limit of asyncio's own holds")
    try:
        await gw.rpc_async("worker2", too_slow, timeout=0.2)
    except gw.CallTimeout as error:
        print("so does the call's:", str(error).partition(";")[0])


async def main() -> None:
    await many()
    await chain()
    await limits()


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            asyncio.run(main())

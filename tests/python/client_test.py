"""The published Python client (queen-mq 1.3.0) against a running broker: python client_test.py URL"""

import asyncio
import sys
import uuid

from queen import Queen


async def main(url):
    name = f"py-{uuid.uuid4()}"
    async with Queen(url) as queen:
        await queen.queue(name).create()

        pushed = await queen.queue(name).partition("p").push([{"data": {"n": n}} for n in range(3)])
        assert [e["status"] for e in pushed] == ["queued"] * 3, pushed

        popped = await queen.queue(name).group("g").subscription_mode("all").batch(10).wait(True).pop()
        assert [m["data"]["n"] for m in popped] == [0, 1, 2], popped

        nack = await queen.ack(popped[0], False, {"group": "g"})
        assert nack["success"], nack
        again = await queen.queue(name).group("g").batch(10).wait(True).pop()
        assert [m["data"]["n"] for m in again] == [0, 1, 2], again
        done = await queen.ack(again, True, {"group": "g"})
        assert done["success"], done
        assert await queen.queue(name).group("g").batch(10).wait(False).pop() == []

        # A consumer in a loop, woken by pushes, that fails on one message the first time.
        seen, failed, over = [], [], asyncio.Event()

        async def handle(message):
            n = message["data"]["n"]
            if n == 5 and not failed:
                failed.append(n)
                raise RuntimeError("not yet")
            seen.append(n)
            if n == 7:
                over.set()

        async def produce():
            for n in range(3, 8):
                await asyncio.sleep(0.1)
                await queen.queue(name).partition("p").push([{"data": {"n": n}}])

        consumer = queen.queue(name).group("g").each().consume(handle, signal=over)
        await asyncio.wait_for(asyncio.gather(produce(), run(consumer)), 30)
        assert (seen, failed) == ([3, 4, 5, 6, 7], [5]), (seen, failed)
        deleted = await queen.queue(name).delete()
        assert deleted["deleted"] is True, deleted
    print("python client: pushed, popped, consumed in a loop, acked and nacked")


async def run(consumer):
    await consumer


asyncio.run(main(sys.argv[1]))

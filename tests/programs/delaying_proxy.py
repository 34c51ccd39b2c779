"""A ProxyCommand of ssh that carries each byte so many seconds later: HOST PORT SECONDS.

It stands for a link with that delay in each direction, where the kernel has no netem.
"""

import asyncio
import os
import sys


async def carry(reader: asyncio.StreamReader, write, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            await write(data)

    delivery = asyncio.create_task(deliver())
    while True:
        data = await reader.read(1 << 16)
        waiting.put_nowait((loop.time() + delay_s, data))
        if not data:
            break
    await delivery


async def main(host: str, port: str, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    far, writer = await asyncio.open_connection(host, int(port))
    near = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(near), sys.stdin)

    async def to_far(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    async def to_near(data: bytes) -> None:
        while data:
            data = data[await loop.run_in_executor(None, os.write, 1, data) :]

    tasks = [carry(near, to_far, delay_s), carry(far, to_near, delay_s)]
    await asyncio.wait(map(asyncio.create_task, tasks), return_when=asyncio.FIRST_COMPLETED)


asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))

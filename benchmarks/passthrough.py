"""The yardstick for the gateway: the least that an aiohttp process does to pass a stream on.

python -m benchmarks.passthrough PORT TARGET_URL
"""

from __future__ import annotations

import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(port: int, target: str) -> web.Application:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": request.headers["Content-Type"]}
        async with session.post(target + request.path, data=await request.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def close(_: web.Application) -> None:
        await session.close()

    app = web.Application()
    app.on_cleanup.append(close)
    app.router.add_post("/{path:.*}", forward)
    return app


if __name__ == "__main__":
    uvloop.install()
    web.run_app(serve(int(sys.argv[1]), sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: None, access_log=None)

"""The control endpoints of one SGLang server, in the only order that it survives (``guard``)."""

from __future__ import annotations

from typing import Any, Final

import aiohttp

from talaria.gpu.engine.errors import Busy
from talaria.gpu.engine.guard import TAGS, Guard

_QUICK_S: Final = 60.0
_COPY_S: Final = 600.0
"""A first release allocates and pins host memory for all weights."""


class Control:
    """Requests to ``url``. Each raises aiohttp.ClientError or TimeoutError where the answer is not the expected one."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.guard = Guard()
        self._session = aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {admin_key}"})

    async def close(self) -> None:
        await self._session.close()

    async def ready(self) -> bool:
        """Whether it has loaded, warmed up and takes calls. False also where nothing listens yet."""
        try:
            async with self._session.get("/ready", timeout=aiohttp.ClientTimeout(total=_QUICK_S)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def pause(self) -> None:
        with self.guard.step("pause"):
            await self._post("/pause_generation", {"mode": "in_place"})

    async def flush(self) -> None:
        """Empty the prefix cache, which tells whether the engine is idle. Raises Busy, and nothing was flushed."""
        with self.guard.step("flush"):
            try:
                await self._post("/flush_cache", {})
            except aiohttp.ClientResponseError as refused:
                if refused.status == 400:
                    raise Busy("calls are still running") from None
                raise

    async def release(self) -> None:
        with self.guard.step("release"):
            await self._post("/release_memory_occupation", {"tags": list(TAGS)}, _COPY_S)

    async def resume(self, tag: str) -> None:
        with self.guard.step("resume", tag):
            await self._post("/resume_memory_occupation", {"tags": [tag]}, _COPY_S)

    async def go_on(self) -> None:
        with self.guard.step("go_on"):
            await self._post("/continue_generation", {})

    async def _post(self, path: str, body: dict[str, Any], within_s: float = _QUICK_S) -> None:
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the engine was stopped")
        limit = aiohttp.ClientTimeout(total=within_s)
        async with self._session.post(path, json=body, timeout=limit, raise_for_status=True) as answer:
            await answer.read()

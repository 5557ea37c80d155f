"""Rendering and encoding a prompt never blocks the streams of other calls.

SGLang does it in a worker thread for ``/v1/chat/completions`` only; here for ``/v1/messages`` and ``/v1/responses`` too.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any, Final

from talaria.gpu import compat, seams


async def _message(original: Callable[..., Any], endpoint: Any, chat_request: Any, request: Any, raw_request: Any) -> Any:
    """``/v1/messages`` finds its request converted already, or what was wrong with it."""
    chat = endpoint.openai_serving_chat
    work = asyncio.get_running_loop().run_in_executor(None, chat._convert_to_internal_request, chat_request, raw_request)
    await asyncio.wait([work])
    work.exception()  # is told where the endpoint asks for the result, if it does
    ready, ready_chat = copy.copy(endpoint), copy.copy(chat)
    ready_chat._convert_to_internal_request = lambda *_: work.result()
    ready.openai_serving_chat = ready_chat
    return await original(ready, chat_request, request, raw_request)


async def _whole(original: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, **named: Any) -> Any:
    """Runs a coroutine that waits for nothing in a worker thread."""
    return await asyncio.get_running_loop().run_in_executor(None, _drive, original(*arguments, **named))


def _drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")


HOOKS: Final = (
    compat.Hook(seams.MESSAGE_STREAM, "around", _message),
    compat.Hook(seams.MESSAGE, "around", _message),
    compat.Hook(seams.MESSAGE_COUNT, "around", _whole),
    compat.Hook(seams.RESPONSE_PROMPT, "around", _whole),
)

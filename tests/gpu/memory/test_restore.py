"""On real engines: prefixes come back from the host after a switch, token for token, on every rank, whatever goes wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from talaria.gpu import config
from tests.gpu.memory.pooled import FIRST_PROMPTS, Pooled, pooled

PAGE_TOKENS = 16
LAG_PAGES = AGREED_PAGES = 2
"""As in ``talaria_linkers``."""


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("model", "tp"),
    [("qwen3", 1), *(pytest.param(model, tp, marks=pytest.mark.full) for model, tp in (("qwen3", 2), ("deepseek", 1), ("deepseek", 2)))],
)
def test_sessions_resume_with_the_tokens_of_an_engine_that_never_switched(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, model: str, tp: int
) -> None:
    async def main() -> None:
        async with pooled(cpu_engine, tiny_models / model, tmp_path, tp) as engine:
            assert engine.family == ("mla" if model == "deepseek" else "mha")
            calm = await engine.converse(switching=False)
            assert sum(calm.restored_tokens) == 0
            await forget(engine)
            switched = await engine.converse(switching=True)
            assert switched.outputs == calm.outputs
            returns = switched.restored_tokens[3:]
            assert switched.restored_tokens[:3] == [0, 0, 0] and min(returns) >= PAGE_TOKENS, "a return found nothing on the host"
            await copying_nothing_is_noticed(engine, calm.outputs)
            await a_failed_restore_is_told_and_recomputed(engine)
            if tp > 1:
                await a_rank_that_knows_less_shortens_the_prefix(engine, calm.outputs, returns)
                await what_ranks_disagree_on_is_recomputed(engine, calm.outputs)

    asyncio.run(main())


async def forget(engine: Pooled) -> None:
    """Neither device nor host know anything any more."""
    await engine.switch_away_and_back()
    engine.server.store.clear()
    assert engine.server.store.used_bytes == 0


async def copying_nothing_is_noticed(engine: Pooled, outputs: list[list[int]]) -> None:
    """The control: with a mover that copies nothing this very test fails."""
    await forget(engine)
    engine.fault.write_text("idle")
    idle = await engine.converse(switching=True)
    engine.fault.write_text("")
    assert min(idle.restored_tokens[3:]) >= PAGE_TOKENS
    assert idle.outputs[:3] == outputs[:3]
    assert all(said != expected for said, expected in zip(idle.outputs[3:6], outputs[3:6], strict=True))


async def a_failed_restore_is_told_and_recomputed(engine: Pooled) -> None:
    """Without the plugin's hold, SGLang ends the request with a 503; the next attempt is served from the pool again."""
    await forget(engine)
    prompt = [*range(4, 104)]
    _, first = await engine.generate(prompt, 8)
    await engine.switch_away_and_back()
    engine.fault.write_text("broken")
    status, _ = await engine.generate(prompt, 8)
    engine.fault.write_text("")
    assert status == 503
    assert engine.server.store.audit() == []
    status, again = await engine.generate(prompt, 8)
    assert (status, again["output_ids"]) == (200, first["output_ids"])
    assert again["meta_info"]["cached_tokens_details"]["host"] == 96


async def a_rank_that_knows_less_shortens_the_prefix(engine: Pooled, outputs: list[list[int]], restored: list[int]) -> None:
    await forget(engine)
    engine.fault.write_text("lag")
    lagging = await engine.converse(switching=True)
    engine.fault.write_text("")
    assert lagging.outputs == outputs
    assert lagging.restored_tokens[3:] == [tokens - LAG_PAGES * PAGE_TOKENS for tokens in restored]


async def what_ranks_disagree_on_is_recomputed(engine: Pooled, outputs: list[list[int]]) -> None:
    """The published prefix ends where rank 1 hashes differently, or where it lost what it was to save: behind a session's first prefill."""
    agreed = {"differ": [AGREED_PAGES] * 3, "lost": [tokens // PAGE_TOKENS for tokens in FIRST_PROMPTS]}
    for fault, pages in agreed.items():
        await forget(engine)
        failed = engine.server.store.failed_copies
        engine.fault.write_text(fault)
        disagreeing = await engine.converse(switching=True)
        engine.fault.write_text("")
        assert disagreeing.outputs == outputs
        assert disagreeing.restored_tokens[3:] == [count * PAGE_TOKENS for count in pages] * 2
        assert (engine.server.store.failed_copies > failed) == (fault == "lost")

"""One call inside the agent: where it stands, what it owes its client, and its exact books."""

from __future__ import annotations

from typing import Protocol

from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.protocol.agent import CallEnded
from talaria.gpu.protocol.engine import Ended, call_id
from talaria.policy.instance import CallView
from talaria.policy.predict import split_prompt


class Client(Protocol):
    """The way back to the client of one call."""

    @property
    def began(self) -> bool:
        """Whether it has been sent anything: then nothing can be tried again."""

    def post(self, model: str) -> None:
        """Send the client's body to the engine of ``model``, again if an earlier one has died."""

    def fail(self, status: int, why: str) -> None:
        """Answer with an error of our own; nothing of the engine's answer follows."""

    def ended(self) -> None:
        """The gateway has the call's last word: the answer may end."""


class AgentCall:
    """A call from its submission to its last word."""

    __slots__ = (
        "admitted_s",
        "arrived",
        "arrived_round",
        "attempts",
        "by_sp",
        "cached_tokens",
        "chain",
        "client",
        "dropped",
        "engine_id",
        "first_token_s",
        "grant_steps",
        "granted",
        "id",
        "model",
        "on_device",
        "output",
        "over",
        "parked",
        "posted",
        "prompt",
        "ready",
        "rounds_waited",
        "seq",
        "view",
    )  # fmt: skip

    def __init__(self, view: CallView, client: Client, seq: int) -> None:
        self.view = view
        self.id = view.call.id
        self.model = view.call.key.model
        self.client = client
        self.seq = seq
        self.engine_id = call_id(view.call.id)
        self.prompt = b""
        """Token ids as the engine counts them: uint32, little endian."""
        self.chain: PageChain | None = None
        """Of the prompt."""
        self.arrived = False
        """The slot scheduler knows it."""
        self.over = False
        self.dropped = ""
        """Why it is being ended early, while its engine still has to let go of it."""
        self.parked = self.arrived_round = self.rounds_waited = self.attempts = 0
        self.start_over()

    def start_over(self) -> None:
        """Nothing of it is in an engine: before its first one, and after that died."""
        self.first_token_s = self.admitted_s = -1.0
        self.by_sp = False
        self.posted = self.ready = False
        """``ready``: the engine holds it, rendered and tokenised."""
        self.grant_steps: int | None = None
        """A grant that waits for ``ready``."""
        self.granted = False
        """A segment of it runs."""
        self.on_device = False
        """In flight, and its KV has not been flushed since."""
        self.cached_tokens: int | None = None
        """Of the prompt, on the device when its first segment was prefilled."""
        self.output = bytearray()
        self.view.generated_tokens = self.view.device_tokens = self.view.host_tokens = 0

    @property
    def context_tokens(self) -> int:
        return self.view.call.prompt_tokens + self.view.generated_tokens

    def found(self, ended: Ended) -> None:
        """Where the prompt's prefix was when its first segment ran; nothing new of a later one."""
        if self.cached_tokens is None and ended.output_tokens > 0:
            prompt = self.view.call.prompt_tokens
            self.cached_tokens = self.view.device_tokens = min(ended.cached_tokens, prompt)
            self.view.host_tokens = min(ended.host_tokens, prompt - self.cached_tokens)

    def books(self, outcome: str, why: str, now_s: float) -> CallEnded:
        """Its last word to the gateway: device + host + recomputed + new = prompt, for every call that was rendered."""
        device, host, lost, _ = split_prompt(self.view)
        prompt = self.view.call.prompt_tokens
        if not self.ready:
            prompt = device = host = lost = 0
        elif self.cached_tokens is None:
            device = host = lost = 0
        return CallEnded(
            call=self.id, outcome=outcome, why=why, prompt_tokens=prompt, device_tokens=device, host_tokens=host,
            recomputed_tokens=lost, output_tokens=self.view.generated_tokens, admitted_s=self.admitted_s,
            first_token_s=self.first_token_s, ended_s=now_s, by_sp=self.by_sp, parked=self.parked, rounds_waited=self.rounds_waited,
        )  # fmt: skip

"""Makes the tiny models of the tests, in place of downloads: ``python models.py DIRECTORY`` writes them there, each to its own folder.

With ``--large`` only ``large``, of 200 MB and more. Random float32 weights of fixed seeds, so that greedy output is the same on every run
and in any batch. One tokenizer (byte-level BPE) and one chat template for all, with what agents use: tools and tool calls (Hermes format),
tool results, and ``<think>``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CONTEXT_TOKENS = 32768
_TEXTS = [
    "read the file and fix the failing test, then run the tests again and report what passed",
    '{"name": "run", "arguments": {"command": "ls -la", "timeout": 10}} {"type": "object", "properties": {}, "required": []}',
    "def main() -> None:\n    for line in open(path):\n        print(line.strip())\n",
    "The quick brown fox jumps over the lazy dog. 0 1 2 3 4 5 6 7 8 9",
]
TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ (call.function or call).name }}", "arguments": {{ (call.function or call).arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{%- endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_TEXTS * 10, trainer)
    bpe.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": CONTEXT_TOKENS // 2,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
"""The only scaling with which SGLang rotates latents on CPUs."""
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    first_k_dense_replace=2, moe_layer_freq=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
    rope_scaling=_YARN,
)  # fmt: skip
_ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(num_key_value_heads=2)),
    "llama": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=2)),
    "deepseek": (DeepseekV2Config, DeepseekV2ForCausalLM, _LATENT),
}


def write(directory: Path, architecture: str, *, seed: int, layers: int, width: int = 64) -> None:
    words = tokenizer()
    words.save_pretrained(directory)
    shape: dict[str, Any] = dict(
        vocab_size=len(words), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        head_dim=width // 4, max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=False, initializer_range=1.6 / width**0.5,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    config, kind, own = _ARCHITECTURES[architecture]
    model = kind(config(**shape, **own))
    model.to(torch.float32).save_pretrained(directory, safe_serialization=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if "--large" in sys.argv:
        write(target / "large", "llama", seed=4, layers=6, width=1024)
    else:
        write(target / "qwen3", "qwen3", seed=1, layers=2)
        write(target / "llama", "llama", seed=2, layers=3)
        write(target / "deepseek", "deepseek", seed=3, layers=2)

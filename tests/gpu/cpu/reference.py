"""What a model says that nothing ever happened to: ``python reference.py MODEL`` reads calls from standard input, one JSON list
``[prompt, output]`` of token ids a line, and prints for each whether greedy decoding of transformers gives that output.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def agrees(model: torch.nn.Module, prompt: list[int], output: list[int]) -> bool:
    """Every token of the output is the best one after all before it."""
    ids = torch.tensor([prompt + output])
    best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return best.tolist() == output


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(agrees(model, *json.loads(line))))

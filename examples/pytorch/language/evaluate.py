r"""The loss of a language model on the part of the text that `train.py` does not train on.

python examples/pytorch/language/evaluate.py --model smollm2
python examples/pytorch/language/evaluate.py --model tiny --weights model.pt
"""

from __future__ import annotations

import argparse
import math

import torch
from model import validation_loss
from text import Text, verses
from train import prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--weights", metavar="FILE", help="of train.py --save (default: those it begins with)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="of 128 tokens (128)")
    args = parser.parse_args()
    model, tokens = prepared(args.model, seed=1)
    if args.weights:
        model.load_state_dict(torch.load(args.weights))
    loss = validation_loss(model, Text(tokens, 1).validation(args.samples))
    bits = loss / math.log(2) * len(tokens) / len(verses().encode())
    print(f"loss {loss:.4f}: a perplexity of {math.exp(loss):.2f} per token, {bits:.3f} bits per byte of text")


if __name__ == "__main__":
    main()

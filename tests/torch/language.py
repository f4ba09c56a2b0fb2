"""One rank: trains `tiny` of examples/pytorch/language in every way; prints its loss and a digest of its parameters."""

import hashlib
import sys

import torch
import torch.distributed as dist

from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "examples" / "pytorch" / "language"))
import train
from model import TINY, LanguageModel, loss_of
from text import Text, bytes_of, verses

WORDS = ["--steps", "40", "--batch-size", "1", "--sync-every", "12", "--test-every", "40", "--test-samples", "1"]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("distopt")
    model, validation = LanguageModel(TINY), Text(bytes_of(verses()), 1).validation(8)
    for way in (*train.HOOKS, *train.LOCAL):
        model.load_state_dict(train.train(train.options([*WORDS, "--way", way])))
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
        with torch.no_grad():
            print("end", dist.get_rank(), way, loss_of(model, validation).item(), digest.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

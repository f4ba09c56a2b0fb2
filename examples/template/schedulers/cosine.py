"""From -lr to zero, as a cosine falls; like all, it takes a step after every epoch."""

from torch.optim.lr_scheduler import CosineAnnealingLR


def build(args, optimizer):
    return CosineAnnealingLR(optimizer, args.epochs)

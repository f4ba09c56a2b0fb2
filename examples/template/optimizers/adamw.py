"""Adam with decoupled weight decay; a usual -lr is 0.001."""

import torch


def add_options(parser):
    parser.add_argument("-weight_decay", type=float, default=0.01, help="(0.01)")


def build(args, parameters):
    return torch.optim.AdamW(parameters, args.lr, weight_decay=args.weight_decay)

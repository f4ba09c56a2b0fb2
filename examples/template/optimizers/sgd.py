"""Stochastic gradient descent with momentum."""

import torch


def add_options(parser):
    parser.add_argument("-momentum", type=float, default=0.9, help="(0.9)")
    parser.add_argument("-weight_decay", type=float, default=1e-5, help="(1e-5)")


def build(args, parameters):
    return torch.optim.SGD(parameters, args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

"""Watches a script of SINGA from outside: what it trained is written to a file when its process ends.

Python loads this module at the start of every process that has this folder on PYTHONPATH. $SINGA_RECORDS names the
folder for the files: one per process that has parameters, with the digest of their values and the loss of the first
and of the last step.
"""

import atexit
import functools
import hashlib
import json
import os
from multiprocessing import util
from pathlib import Path

import numpy as np

from distopt import opt
from distopt.nn.core import autograd

params = {}  # by id, in the order in which they were seen first
losses = []


def watch(owner, name, see) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def watched(*args, **options):
        see(*args)
        return method(*args, **options)

    setattr(owner, name, watched)


def see_param(optimizer, param, grad) -> None:
    params[id(param)] = param


def see_params(optimizer, found) -> None:
    params.update({id(param): param for param in found})


def see_loss(loss, dy=None) -> None:
    losses.append(float(np.mean(loss.to_numpy())))


def write() -> None:
    if params:
        digest = hashlib.blake2b(digest_size=16)
        for param in params.values():
            array = np.ascontiguousarray(param.to_numpy())
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        elements = sum(param.to_numpy().size for param in params.values())
        record = {"digest": digest.hexdigest(), "elements": elements, "losses": losses[:1] + losses[-1:]}
        Path(os.environ["SINGA_RECORDS"], f"{os.getpid()}.json").write_text(json.dumps(record))


watch(opt.Optimizer, "update", see_param)
watch(opt.Optimizer, "attach", see_params)
watch(opt.DistOpt, "attach", see_params)
watch(autograd, "backward", see_loss)
atexit.register(write)
# A child of multiprocessing ends without atexit; it runs finalizers, but none that its parent has registered.
util.register_after_fork(write, lambda function: util.Finalize(None, function, exitpriority=0))

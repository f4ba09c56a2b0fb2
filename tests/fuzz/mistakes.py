"""Mistakes that the fuzz must find: what repaired them once is taken out of a module when it is loaded."""

import os
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

VARIABLE = "FUZZ_MISTAKE"  # of the environment: a key of `MISTAKES`


class Mistake(NamedTuple):
    family: str  # which finds it
    module: str
    right: str
    wrong: str


MISTAKES = {
    "span": Mistake("codecs", "distopt.compress.power_sgd", "noise = eps", "noise = 0"),
    "residual": Mistake("codecs", "distopt.compress.power_sgd", "total -= state.bucket", "pass"),
    "skip": Mistake("codecs", "distopt.compress.base", "if not any(verdicts):", "if True:"),
    "options": Mistake("codecs", "distopt.compress.state", ' if key.split("/", 1)[0] in names}', "}"),
    "overlap": Mistake("communicators", "distopt.comm.base", "if count and -part", "if False and -part"),
    "in place": Mistake("operations", "distopt.nn.core.changes", "if mode.last_change < op.order:", "if True:"),
    "alias": Mistake("operations", "distopt.nn.ops.elementwise", "(operator.add, xs) if len(xs) > 1 else xs[0].copy()",
                     "(operator.add, xs)"),
}  # fmt: skip


def make():
    """The one that the environment names, if any."""
    if VARIABLE not in os.environ:
        return
    mistake, right = MISTAKES[os.environ[VARIABLE]], SourceFileLoader.get_code

    def get_code(loader, name):
        if name != mistake.module:
            return right(loader, name)
        source = loader.get_source(name)
        assert source.count(mistake.right) == 1, f"{mistake.right!r} is not once in {name}"
        return compile(source.replace(mistake.right, mistake.wrong), loader.path, "exec")

    SourceFileLoader.get_code = get_code

"""Checks of a group on its ranks: functions `check_...` by subject, which `__main__` runs."""

from . import batch_norm, callbacks, codecs, collectives, ddp, errors, groups, hosts, memory, messages, sharding, works

_SUBJECTS = collectives, hosts, messages, works, callbacks, groups, errors, ddp, memory, batch_norm, sharding, codecs

CHECKS = {
    name.removeprefix("check_"): function
    for subject in _SUBJECTS
    for name, function in vars(subject).items()
    if name.startswith("check_") and function.__module__ == subject.__name__
}
# Sets of checks that are about as long, by names, for workers of pytest to run beside each other.
GROUPS = [
    [name for name, function in CHECKS.items() if function.__module__ in {each.__name__ for each in subjects}]
    for subjects in (_SUBJECTS[:3], _SUBJECTS[3:7], _SUBJECTS[7:11], _SUBJECTS[11:])
]
# A compiler's processes, and hooks of C++, are not for every run: `make torch` has them.
BY_MAKE_TORCH = ("compiled_ddp", "compiled_collectives", "dist_opt_under_compiled_autograd", "builtin_hooks")
# Checks that take another way among three ranks or on several hosts, with a few of those for which it is all the same.
FAR = [*GROUPS[0], "groups", "split_group", "monitored_barrier", "a_rank_that_does_not_join", "ddp", "fsdp"]
FAR += ["sync_batch_norm", "codecs_of_hooks", "dist_opt_is_ddp", "dist_opt_joins", "dist_opt_of_unused_parameters"]
FAR += ["diloco"]

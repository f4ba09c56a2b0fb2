"""The processes that one process starts as ranks, and supervises until all have ended.

One supervisor (`ranks`) for two kinds of ranks: `launch.main` starts a function (`child`), an agent of `distopt run` a
program (`program`). Imports `job` and everything below it. Never knows that there are other nodes.
"""

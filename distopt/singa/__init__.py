"""The modules that scripts for SINGA import, under its names: `distopt.opt` is `distopt.singa.opt`, and so on.

Their functions are local unless they say Collective.
"""

"""Capturing of training steps in CUDA graphs, and their replay; see `distopt.nn.replay.graphs`."""

"""Starting ranks and supervising them: `distopt.launch.main` and `distopt run`."""

"""Where ranks run: on this machine, on two emulated hosts, or on those of a hosts file."""

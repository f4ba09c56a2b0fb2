"""Where ranks run: on this machine, on emulated hosts, near or far apart, or on those of a hosts file."""

"""`distopt run`: an agent on each node, and how the agents of several nodes act as one.

Imports `supervise`, `heal` and `launchers`; starts without NumPy. Never knows what the ranks compute.

An agent and the owner of the endpoint, which is one of the agents, exchange lines. Each line is an object in JSON.
Messages of an agent have the key "say":

- `hello`: it has come, or come back, with how many ranks it starts ("ranks"), how many of these the job can do without
  ("spare"), the last attempt that it was part of ("attempt"), and, under --heal, whether they would start warm
  ("ready");
- `ready`: after `prepare`, its ranks would start warm now;
- `failed`: ranks have failed ("failures"), or signals have arrived ("signals");
- `ended`: all its ranks have ended, with the same content;
- `kill`: a second Ctrl-C has killed its ranks, with the same content;
- `stepped`: rank 0 has done its first step of this attempt ("step"), under --heal, after copies that are made at an
  interval ("every"), if the ranks have resumed from one;
- `gives`: its ranks give their live states, which takes so long at most ("seconds"), under --heal;
- `beat`: it is alive, under --heal;
- `watch`: the activity of one of its ranks ("row"), under --watch.

The first four also have a free port of its host ("port"), the port where it takes states of the node before ("states",
see `courier`), and the newest step of each rank ("steps"). Messages of the owner have the key "do", and some have a
line to print ("text"):

- `start`: start the ranks; it has the values for their environment, and where the next node takes states ("next");
- `prepare`: import these modules ("modules"), while the job continues;
- `end`: end the ranks by SIGTERM and, after "patience" seconds, by SIGKILL; with 0, by SIGKILL at once, or, under
  --heal ("gives"), when they have given their live states;
- `finish`: leave with this exit code ("code");
- `beat`: the owner is alive.
"""

"""`distopt run --workers`: workers that come and go, each a job of its own, and the service that names them.

A worker is a job of one node: `distopt run --heal` supervises its ranks (`supervisor`). Workers know each other by one
service (`service`); `membership` decides. It is part of one supervisor, which those of all nodes elect
(`distopt.launch.agents.election`); each supervisor shows its workers where the service is (`variables`). The first
rank of a worker talks to it (`client`), in lines of JSON. Messages of a worker have the key "say":

- `hello`: it has come, or come back ("number"); the model that it trains ("model"), how many workers it asks for
  ("least"), its "fragments", and the port where others copy its states;
- `join`: it wants to hold what the others hold; its states now ("average": the number of the last average; -1: nothing,
  "digest", "steps"); "late" if it is a member that was left out;
- `listen`: it has begun to copy the states after an average ("average"); `caught`: it has them, and what came since;
- `ready`: it has a change for an average ("average"), after so many steps;
- `averaged`, `failed`: it has the result of a try ("average", "trial"), or its collective has failed;
- `ask`: a request to the values by which the members of a trial meet ("epoch", "content", see `distopt.launch.keys`);
- `member`: it has connected again, and holds an average, which has counted by a trial ("average", "of");
- `done`: it holds the last average of the training; `bye`: it leaves; `beat`: it is alive.

Messages of the service have the key "do":

- `welcome`: its number among those that ever joined; `refuse`: it may not join ("text");
- `copy`: copy the states of a member ("host", "port"); `listen`: it takes part in the averages that follow, with
  weight 0; `again`: it came too late for that, and copies again;
- `member`: it is a member, and holds an average ("average");
- `members`: the workers of a trial ("average", "trial", "members", "counting"), and the number of their communicator
  ("epoch"); `abort`: the trial has ended without a result; `commit`: the average counts;
- `late`: an average has counted without this worker;
- `values`: the answer to `ask`; `leave`: no worker is left that lacks the last average; `beat`: the service is alive.

Supervisors of other nodes connect to the service as agents do. Under --watch, they send it `watch`: the activity of a
rank ("row") of the worker at a place among those of the node ("place"); `monitor` shows it.
"""

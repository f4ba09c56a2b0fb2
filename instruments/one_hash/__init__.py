"""One hash: training in shards ends with the same bits on any number of ranks, on every layout of them."""

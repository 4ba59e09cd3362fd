#!/bin/sh -eu
# Two laptops, one of them three times slower: which method, and what does the slow one cost?
# Minutes: 1. Expected output:
#   predicted 25 steps/s, workers wait 25.0 % of their time
#   asp leads: time to 95.0 % accuracy
#   next: ashl train sync=asp
cluster="cluster.compute=[1,3] cluster.exchange_s=0.02" # seconds of one push plus pull, at factor 1

ashl train runtime=sim $cluster sync=bsp --dry-run
ashl sweep -q sync=bsp,asp,local_sgd seed=0,1,2 runtime=sim $cluster \
  stop.target_accuracy=0.95 eval.every_s=0.2 tracking=none run.dir=laptops
ashl train -q runtime=sim $cluster sync=asp stop.target_accuracy=0.95 tracking=none

# To train on two real hosts by ssh, see docs/how-to/several_nodes.md.

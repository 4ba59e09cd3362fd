#!/bin/sh -eu
# Two regions behind 100 Mbit/s and 37.5 ms: average at every step, every 16 steps, or with a compression?
# Minutes: 1. Expected output:
#   time to 90.0 % accuracy
#   local_sgd
regions="runtime=sim cluster=two_regions_100m topology=all_reduce model.hidden=[1024]"
limits="stop.target_accuracy=0.9 eval.every_s=0.5 tracking=none"

ashl train $regions sync=bsp --dry-run # the first prediction: how long a worker waits
ashl sweep -q $regions $limits sync=bsp,local_sgd compression=none,topk seed=0,1 run.dir=regions

#!/bin/sh -eu
# Kill a run of real processes with SIGKILL, and resume it from its checkpoint.
# Minutes: 1. Expected output:
#   killed after a checkpoint
#   finished: epochs
#   next: ashl compare killed
ashl train -q runtime=local cluster=one_slow sync=bsp cluster.num_workers=2 stop.epochs=20 \
  run.checkpoint_s=0.5 run.dir=killed tracking=none > first.log 2>&1 &
controller=$!
until ls killed/checkpoint/*/manifest.json > /dev/null 2>&1; do sleep 0.2; done
kill -9 "$controller"
echo "killed after a checkpoint"
sleep 3 # the workers miss the controller and end

ashl train --resume killed

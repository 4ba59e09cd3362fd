#!/bin/sh -eu
# One GPU and three CPUs, eight times slower each: equal batches, batches by speed, or no barrier?
# Minutes: 1. Expected output:
#   asp leads: time to 95.0 % accuracy
#   lb_bsp
#   next: ashl train sync=asp
ashl sweep -q sync=bsp,lb_bsp,asp,local_sgd seed=0,1,2 runtime=sim \
  'cluster.compute=[1,8,8,8]' cluster.step_s=0.004 cluster.exchange_s=0.01 \
  stop.target_accuracy=0.95 eval.every_s=0.1 tracking=none run.dir=gpu_and_cpus

# The same on real machines: one rank each, and each rank takes its GPU if it has one (docs/how-to/gpu.md).
#   ashl launch --hosts hosts.txt -- train sync=asp runtime.device=auto

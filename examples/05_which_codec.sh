#!/bin/sh -eu
# Which compression at 50 Mbit/s? The codec with the fewest bytes is not the fastest one.
# Minutes: 1. Expected output:
#   qsgd leads: time to 95.0 % accuracy
#   next: ashl train compression=qsgd
#   QSGD: round each element at random
ashl sweep -q compression=none,topk,qsgd,power_sgd,sign seed=0,1,2 sync=bsp topology=all_reduce \
  runtime=sim cluster=homogeneous cluster.exchange_s=null cluster.bandwidth_mbit_s=50 \
  cluster.latency_s=0.001 model.hidden=[512] \
  stop.target_accuracy=0.95 eval.every_s=0.2 tracking=none run.dir=codecs

ashl list compression qsgd # its rule, its guarantees, and its laws as measured here

#!/bin/sh -eu
# Turn a run into a script for torchft, which trains in the same rounds without ashl's kernels.
# Minutes: 1. Expected output:
#   next: torchft_lighthouse --min_replicas 4
#   from torchft import Manager
ashl train -q runtime=sim sync=local_sgd topology=all_reduce stop.steps=400 run.dir=rounds tracking=none
ashl export rounds --to torchft --out train_torchft.py
grep -n torchft train_torchft.py | head -5

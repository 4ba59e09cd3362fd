#!/bin/sh -eu
# Measure what steps and exchanges cost two processes here, read it, and predict other settings from it.
# Minutes: 1. Expected output:
#   worker 0: a step takes
#   predicted
ashl profile -q --json cluster=real cluster.num_workers=2 run.dir=costs > costs.json
python - << 'END'
import json

for rank, worker in enumerate(json.load(open("costs.json"))["profile"]["workers"]):
    step_ms, push_ms = 1e3 * worker["step_s"], 1e3 * worker["push_s"]
    print(f"worker {rank}: a step takes {step_ms:.2f} ms, a push of the model {push_ms:.2f} ms")
END
ashl train runtime=sim cluster=profile profile=costs/profile.json sync=bsp --dry-run
ashl train runtime=sim cluster=profile profile=costs/profile.json sync=local_sgd --dry-run

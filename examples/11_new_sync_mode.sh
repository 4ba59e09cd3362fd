#!/bin/sh -eu
# A sync mode of your own in a folder of your own: a merge of the first half of the workers.
# Minutes: 1. Expected output:
#   sync=half
#   next: ashl compare half
mkdir -p options/sync mine
cat > mine/half.py << 'END'
"""Half: merge as soon as half of the workers have pushed. Source: an example."""

from ashl.option import option
from ashl.topology.parameter_server import ServerRule


@option
class Half(ServerRule):
    """A merge of half of the workers."""

    def quorum(self, num_workers: int) -> int:
        return max(1, num_workers // 2)
END
echo "_target_: mine.half.Half" > options/sync/half.yaml
export PYTHONPATH=. ASHL_CONFIG_DIR=options

ashl list sync half
ashl train -q runtime=sim cluster=one_slow sync=half 'allow_targets=[mine]' stop.epochs=5 run.dir=half tracking=none

#!/bin/sh -eu
# One column of the Ripples paper's table: sixteen workers on four nodes, one of them five times slower.
# Minutes: 20. Expected output:
#   time to
#   ripples_smart
ashl sweep -q experiment=ripples_table cluster=four_nodes_5x seed=0,1,2 tracking=none run.dir=ripples
ashl compare ripples --figures pdf --out ripples.html # figures for the paper, in the folder figures/

#!/bin/sh -eu
# A Slurm job of two kinds of machines: one with a GPU, two with CPUs. Prints the script that sbatch would get.
# Minutes: 1. Expected output:
#   #SBATCH
#   hetjob
#   predicted
cat > hosts.txt << 'END'
constraint=a100 slots=2
constraint=epyc slots=3
END
ashl launch --on slurm --hosts hosts.txt --dry-run -- train sync=asp cluster.num_workers=4

"""Predicted and measured on machines that really are unequal: `python -m tests.benchmarks.unequal`, as root with sshd.

Three workers, each in a network namespace behind a link of its own that is shaped both ways, and with a share of a core
by a control group (version 1), so that together they need no more cores than there are. The server has a machine
of its own behind a fast link or behind a slow one, or it is on the first worker's. `ashl launch -- calibrate` runs
there, from one more machine, whose time is nobody's.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.namespaces import CPU, address, inside, machines, missing, no_sshd, run, slowed, ssh_between

WORKERS = ((1000, 0.5), (200, 0.4), (50, 0.3))  # Mbit/s, cores
FAST, SLOW, CORES = 1000, 50, 0.5  # of the server's machine
BESIDE = "worker's machine"
PLACES = {"own machine": FAST, "slow link": SLOW, BESIDE: None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", choices=PLACES, help="one place of it alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--folder", type=Path, help="where to leave the calibrations, and to go on with them")
    parser.add_argument("typed", nargs="*", help="KEY=VALUE as for `ashl calibrate`")
    asked = parser.parse_args()
    groups = (CPU / "cpu.cfs_quota_us").exists()
    if why := missing() or no_sshd() or (None if groups else f"there are no control groups in {CPU}"):
        sys.exit(f"not run: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the namespaces taken away
    for place in [asked.server] if asked.server else PLACES:
        print(f"\nthe server: {place}", flush=True)
        calibrated(place, asked.folder, ["--seconds", f"{asked.seconds:g}", *asked.typed])


def calibrated(place: str, folder: Path | None, typed: list[str]) -> None:
    """Run it, with what it prints."""
    rate = PLACES[place]
    own = [*WORKERS, *([] if rate is None else [(rate, CORES)])]
    with tempfile.TemporaryDirectory() as temporary, machines(*(mbit_s for mbit_s, _ in own), FAST) as names:
        *there, console = names
        with slowed(there, [cores for _, cores in own]), ssh_between(there, Path(temporary)) as ssh:
            work = (folder or Path(temporary)).absolute() / place.replace(" ", "-").replace("'", "")
            work.mkdir(parents=True, exist_ok=True)
            places = [address(name) for name in there]
            if rate is None:  # a second way to the first worker's machine
                places.append(address(f"{console.rpartition('-')[0]}-100"))
                run("ip", "-n", there[0], "addr", "add", f"{places[-1]}/24", "dev", "eth0")
            (work / "hosts").write_text("\n".join(places) + "\n")
            launch = ["launch", "--hosts", "hosts", "--ssh", ssh, "--env", "OMP_NUM_THREADS=1", "--"]
            hosts = f"cluster.hosts=[{','.join(there[: len(WORKERS)])}]"
            command = [*inside(console), sys.executable, "-m", "ashl.cli", *launch, "calibrate", hosts, "run.dir=run"]
            subprocess.run([*command, *typed], cwd=work, check=True)


if __name__ == "__main__":
    main()

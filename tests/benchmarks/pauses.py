"""What becomes of a run of which one worker stands still for a while: `python -m tests.benchmarks.pauses`.

Modes, workers and moments as `tests.benchmarks.kills` draws them, on processes: the worker gets SIGSTOP at that moment
of the run's clock and SIGCONT later. `--pauses N --seed S`: N pauses shorter than `runtime.timeout_s`, and N longer.

After a shorter one the run ends as if nothing had been, exit code 0 and nobody lost. After a longer one it has gone on
without the worker, which takes part again where the mode lets it back, and is gone where not; or it has ended in one
sentence, where the mode needs all. All else is WRONG.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.benchmarks.kills import BOUND_S, ENDS, TOPOLOGIES, WRONG, Kill, Outcome, kills, modes, struck
from tests.disturbed import ranks_of

TIMEOUT_S, LATE_S = 8.0, 5.0  # of a shorter pause: at most
SHORT = (f"runtime.timeout_s={TIMEOUT_S}", "stop.seconds=8")
LONG = (f"runtime.timeout_s={TIMEOUT_S}", "stop.seconds=22")
AS_EVER, BACK, WITHOUT = "as if nothing had been", "came back", "went on without it"


def paused(kill: Kill, for_s: float, folder: str) -> Outcome:
    """`kill`: which worker, when."""

    def strike(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(for_s)
        if pid in ranks_of(Path(folder)).values():  # it may have been ended by then
            os.kill(pid, signal.SIGCONT)

    longer = for_s > TIMEOUT_S
    code, err, took_s = struck(kill, folder, LONG if longer else SHORT, strike)
    path, lines = Path(folder, "summary.json"), err.splitlines()
    if (left := ranks_of(Path(folder))) or took_s > BOUND_S or not path.exists():
        return Outcome(WRONG, took_s, f"exit code {code} after {took_s:.1f} s, ranks {sorted(left)} are left: {err}")
    lost = json.loads(path.read_text())["lost_workers"]
    if code == 0 and not lines and not lost and not longer:
        return Outcome(AS_EVER, took_s)
    if code == 0 and not lines and longer and [of["worker"] for of in lost] == [kill.worker]:
        return Outcome(WITHOUT if lost[0]["back_s"] is None else BACK, took_s)
    if code == 1 and longer and len(lines) == 1 and err.startswith("ashl: "):
        return Outcome(ENDS, took_s, err)
    return Outcome(WRONG, took_s, f"exit code {code}, lost {lost}: {err}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pauses", type=int, default=20, help="so many shorter and so many longer ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TOPOLOGIES), help="of these topologies, separated by commas")
    asked = parser.parse_args()
    rng, counts, wrong = random.Random(asked.seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        drawn = [kill for mode in modes(asked.only.split(",")) for kill in kills(mode, rng)]
        for number in range(2 * asked.pauses):
            kill, longer = rng.choice(drawn), number % 2 > 0
            for_s = rng.uniform(TIMEOUT_S + 1, TIMEOUT_S + 3) if longer else rng.uniform(0.2, LATE_S)
            found = paused(kill, for_s, f"real-{number}")
            what = f"{'longer' if longer else 'shorter'}: {found.what}"
            counts[what] += 1
            line = f"{number + 1}/{2 * asked.pauses} {kill.topology} {kill.sync} {kill.moment} {for_s:.1f} s {what}"
            print(f"{line} {found.why}".strip(), flush=True)
            if found.what == WRONG:
                wrong.append(f"{kill}, {for_s:.1f} s: {found.why}")
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    print("\n".join(wrong))


if __name__ == "__main__":
    main()

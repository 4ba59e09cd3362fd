"""Start by mpirun of Open MPI or of MPICH (Hydra); the ranks do not use MPI."""

from ashl.errors import UsageError
from ashl.launch.job import RANK, Launch, random_port

OPEN_MPI, MPICH = "Open MPI", "MPICH"
# Hydra ends all ranks after one that was killed; its `-disable-auto-cleanup` does so, too.
HIDE_KILL = "[ $code -gt 128 ] && exit 0; "


def flavor_of(version: str) -> str:
    """Return the implementation from the output of `mpirun --version`.

    Raises: UsageError for another one.
    """
    if OPEN_MPI in version or "OpenRTE" in version:
        return OPEN_MPI
    if "HYDRA" in version or MPICH in version:
        return MPICH
    raise UsageError(
        "--on mpirun: this mpirun is neither Open MPI nor MPICH; start the ranks by hand with RANK,"
        " WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def command(launch: Launch, flavor: str, program: str = "mpirun") -> list[str]:
    """Return the command line that starts all ranks.

    A killed rank does not end the others: the run decides. The environment of the command has the
    variables of `environment`; only their names are in the command line.
    """
    shares = launch.hosts
    names = sorted(environment(launch))
    hosts = ",".join(f"{share.machine.login}:{len(share.ranks)}" for share in shares)
    if flavor == OPEN_MPI:
        words = [program, "-np", str(launch.size), "--enable-recovery", "-wdir", launch.folder]
        words += ["--host", hosts, "--map-by", "slot"] if shares else ["--oversubscribe"]
        words += [word for name in names for word in ("-x", name)]
    else:
        words = [program, "-n", str(launch.size), "-wdir", launch.folder]
        words += ["-hosts", hosts] if shares else []
        words += ["-genvlist", ",".join(["PATH", "HOME", *names])]
    after = "" if flavor == OPEN_MPI else HIDE_KILL
    rank = launch.guard_command([launch.python, *RANK, *launch.argv], after)
    return [*words, *launch.options, *rank]


def environment(launch: Launch) -> dict[str, str]:
    """Return the variables of every rank, with the master's address if there are hosts."""
    own = {"MASTER_PORT": str(random_port())}
    if launch.machines:
        own["MASTER_ADDR"] = launch.machines[0].name
    return {**own, **launch.env}

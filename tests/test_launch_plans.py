"""Commands and scripts of `ashl launch` before it starts a process, by engine."""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ashl.cli.app import main
from ashl.cli.launch import implied_settings
from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.launch import kubernetes, mpirun, ray, slurm, ssh, torchrun
from ashl.launch.job import (
    Launch,
    Machine,
    copied_environment,
    job_size,
    read_machines,
)

THREE = (Machine("a", 2), Machine("me@b.example.org", 1), Machine("fe80::1", 2))
KINDS = (Machine("constraint=fast", 2), Machine("constraint=slow", 1))


def job(engine: str, size: int, machines: tuple[Machine, ...], **known: Any) -> Launch:
    """One with a secret and fixed paths."""
    known = {"env": {"ASHL_JOB_SECRET": "s3cret"}, **known}
    return Launch(engine, ("train", "sync=bsp"), size, machines, "/opt/py", "/w", **known)


def written(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text, encoding="utf-8")
    return folder / "hosts"


def test_a_hostfile(tmp_path: Path) -> None:
    text = "# ours\na slots=2\n\n  me@b.example.org   # the slow one\nfe80::1 slots=2"
    for mark in ("", "\ufeff"):  # which some editors begin a file with
        assert read_machines(written(tmp_path, mark + text)) == THREE
    assert [machine.name for machine in THREE] == ["a", "b.example.org", "fe80::1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# nobody\n", "names no host"),
        ("a\nb slots=two", "line 2: 'b slots=two' is no host"),
        ("a slots=0", "line 1: 'a slots=0' is no host"),
        ("a slots=-1", "is no host"),
        ("a slots=2 max_slots=4", "is no host"),
        ("a b", "line 1: 'a b' is no host"),
        ("a:2", "write `host`, or `host slots=2`"),
        ("-oProxyCommand=evil", "is no host"),
        ("me@-oProxyCommand=evil", "is no host"),
        ("$(evil)", "is no host"),
        ("a\nme@a slots=2", "line 2: a is there in line 1 already"),
    ],
)
def test_nonsense_in_a_hostfile(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"[^.]$") as error:
        read_machines(written(tmp_path, text))
    assert said in str(error.value)


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("none", "no such file"),
        (".", "is a directory"),
        ("binary", "it is no text"),
    ):
        with pytest.raises(UsageError, match=why):
            read_machines(tmp_path / name)


def test_a_kind_of_machine(tmp_path: Path) -> None:
    found = read_machines(written(tmp_path, "constraint=fast&gpu slots=2\nzone/x.y=a-1"))
    assert [machine.kind for machine in found] == [("constraint", "fast&gpu"), ("zone/x.y", "a-1")]
    for engine, tasks in (("ssh", ssh.tasks), ("torchrun", torchrun.tasks)):
        with pytest.raises(
            UsageError, match=f"is a kind of machine, and --on {engine} needs names"
        ):
            tasks(job(engine, 2, KINDS))


def test_ranks_on_slots() -> None:
    five, two = (job("ssh", size, THREE) for size in (5, 2))
    assert [share.ranks for share in five.shares] == [range(2), range(2, 3), range(3, 5)]
    assert [share.machine.name for share in two.shares] == ["a"]
    last = ssh.tasks(job("ssh", 4, THREE))[3]
    assert last.env == {
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
    }


def test_what_is_copied() -> None:
    ours = {
        "ASHL_DATA": "/d",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    env = {**ours, "HOME": "/", "X": ""}
    found = copied_environment(env, ["X", "Y=a=b"])
    assert found == {**ours, "X": "", "Y": "a=b"}
    for text in ("Z", "", "=1"):
        with pytest.raises(UsageError, match="--env"):
            copied_environment(env, [text])


@pytest.mark.parametrize(
    ("addresses", "env", "master"),
    [
        (["10.0.0.1", "10.0.0.2"], {}, "10.0.0.1"),
        (["localhost", "127.0.0.2"], {}, "127.0.0.1"),
        (["10.0.0.1", "10.0.0.1"], {}, "127.0.0.1"),  # all ranks are on one host
        (["localhost", "10.0.0.2"], {"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        (["localhost", "10.0.0.2"], {}, None),
    ],
)
def test_the_address_to_meet_at(
    addresses: list[str], env: dict[str, str], master: str | None
) -> None:
    launch = replace(job("ssh", 2, THREE), env=env)
    if master is None:
        with pytest.raises(UsageError, match=r"cannot reach the first one at 127\.0\.0\.1"):
            ssh.environment_line(launch, addresses)
    else:
        assert f" PET_MASTER_ADDR={master} " in ssh.environment_line(launch, addresses).decode()


def test_the_command_line_of_ssh() -> None:
    launch = replace(job("ssh", 3, THREE), ssh=("ssh", "-p", "2222"), folder="/a b")
    words = ssh.task_command(launch, ssh.tasks(launch)[2])
    assert words[:3] == ["ssh", "-p", "2222"]
    assert words[-2] == "me@b.example.org"
    assert {"BatchMode=yes", "ConnectTimeout=10"} < set(words)
    script = shlex.split(words[-1])[-1]
    assert "cd '/a b'" in script
    assert "RANK=2 WORLD_SIZE=3" in script
    assert "/opt/py -P -m ashl.cli train sync=bsp </dev/null" in script
    here = ["env", "-u", "SSH_CONNECTION", "sh", "-c", "x"]
    assert ssh.command(launch, Machine("localhost", 1), "x") == here


def test_a_secret_is_in_no_command_line() -> None:
    """Other users can read command lines, and a queue keeps scripts."""
    launch, kinds = job("", 3, THREE), job("", 3, KINDS)
    texts = [
        *(str(ssh.task_command(launch, task)) for task in ssh.tasks(launch)),
        *(str(ssh.task_command(launch, task)) for task in torchrun.tasks(launch)),
        *(str(mpirun.command(launch, flavor)) for flavor in (mpirun.OPEN_MPI, mpirun.MPICH)),
        slurm.script(kinds),
        kubernetes.manifest(kinds),
        ray.script(launch),
    ]
    assert not [text for text in texts if "s3cret" in text]
    assert b"ASHL_JOB_SECRET=s3cret" in ssh.environment_line(launch, ["a"])


def test_agents_of_torchrun() -> None:
    launch = replace(job("torchrun", 4, THREE), options=("--max-restarts=3",))
    assert [(task.rank, " ".join(task.argv)) for task in torchrun.tasks(launch)] == [
        (
            first,
            f"/opt/py -m torch.distributed.run --nnodes=3 --node-rank={node} --nproc-per-node={count}"
            " --max-restarts=3 -m ashl.cli train sync=bsp",
        )
        for node, (first, count) in enumerate(((0, 2), (2, 1), (3, 1)))
    ]


def test_commands_of_mpirun() -> None:
    launch = replace(job("mpirun", 4, (*THREE[:2], Machine("c", 1))), options=("--tag-output",))
    command = "/opt/py -P -m ashl.cli train sync=bsp"
    assert " ".join(mpirun.command(launch, mpirun.OPEN_MPI)) == (
        "mpirun -np 4 --enable-recovery -wdir /w --host a:2,me@b.example.org:1,c:1 --map-by slot"
        f" -x ASHL_JOB_SECRET -x MASTER_ADDR -x MASTER_PORT --tag-output {command}"
    )
    words = mpirun.command(launch, mpirun.MPICH)
    guard = words[words.index("sh") + 2]
    assert guard.endswith("[ $code -gt 128 ] && exit 0; exit $code"), "Hydra would end all"
    assert " ".join(words) == (
        "mpirun -n 4 -wdir /w -hosts a:2,me@b.example.org:1,c:1 -genvlist"
        " PATH,HOME,ASHL_JOB_SECRET,MASTER_ADDR,MASTER_PORT --tag-output"
        f" sh -c {guard} ashl {command}"
    )
    assert mpirun.environment(launch)["MASTER_ADDR"] == "a"
    assert mpirun.flavor_of("mpirun (Open MPI) 4.1.4") == mpirun.OPEN_MPI
    assert mpirun.flavor_of("HYDRA build details:") == mpirun.MPICH
    with pytest.raises(UsageError, match="neither Open MPI nor MPICH"):
        mpirun.flavor_of("Intel(R) MPI Library")


SBATCH = """#!/bin/sh
#SBATCH --job-name=ashl
#SBATCH --output=ashl-%j.out
#SBATCH --chdir=/w
#SBATCH --no-kill
#SBATCH --time=60
#SBATCH --ntasks=2
#SBATCH --constraint=fast
#SBATCH hetjob
#SBATCH --ntasks=1
#SBATCH --constraint=slow

exec srun --het-group=0-1 --no-kill --kill-on-bad-exit=0 /opt/py -P -m ashl.cli train sync=bsp
"""


def test_the_script_of_slurm() -> None:
    assert slurm.script(replace(job("slurm", 3, KINDS), options=("--time=60",))) == SBATCH
    alone = slurm.script(job("slurm", 3, ()))
    assert "#SBATCH --ntasks=3\n" in alone
    assert "het" not in alone
    assert "#SBATCH --nodelist=a\n" in slurm.script(job("slurm", 2, THREE))


def test_a_dry_run_for_kubernetes_prints_the_manifest_alone(tmp_path: Path, capsys) -> None:
    """A pipe gets what `kubectl` can read."""
    hosts = tmp_path / "hosts"
    hosts.write_text("pool=fast slots=2\npool=slow\n")
    words = ["launch", "--on", "kubernetes", "--hosts", str(hosts), "--option=image=me/ashl:1"]
    assert main([*words, "--dry-run", "--", "train", "cluster=real", "sync=bsp"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "JobSet"


def test_the_manifest_of_kubernetes() -> None:
    """JobSet v1alpha2, as its reference describes the fields; not run."""
    kinds = (Machine("node.kubernetes.io/instance-type=m5.large", 2), Machine("pool=slow", 1))
    text = kubernetes.manifest(replace(job("kubernetes", 3, kinds), options=("image=me/ashl:1",)))
    assert text == (Path(__file__).parent / "golden/jobset.yaml").read_text()
    document = yaml.safe_load(text)
    jobs = document["spec"]["replicatedJobs"]
    assert [of["template"]["spec"]["completions"] for of in jobs] == [2, 1]


def test_bundles_of_ray() -> None:
    kinds = (Machine("fast=1", 2), Machine("10.0.0.2", 1))
    assert ray.bundles(job("ray", 3, kinds)) == [
        {"CPU": 1.0, "fast": 1.0},
        {"CPU": 1.0, "fast": 1.0},
        {"CPU": 1.0, "node:10.0.0.2": 0.001},
    ]
    compile(ray.script(job("ray", 2, (), restarts=3)), "job.py", "exec")


def test_what_is_understood() -> None:
    assert implied_settings("train", ["sync=bsp", "cluster.num_workers=2"], None) == [
        "runtime=torchrun",
        "cluster=real",
    ]
    assert implied_settings("train", ["cluster.compute=[1,2]", "runtime=local"], None) == []
    with pytest.raises(UsageError, match=r"Give cluster.num_workers, as all runs"):
        implied_settings("sweep", ["sync=bsp,ssp"], None)
    assert implied_settings("train", ["cluster=mixed"], None) == ["runtime=torchrun"]


def test_how_many_it_takes() -> None:
    config = compose(["cluster=real", "runtime=torchrun"])
    two, five = ({**config, "cluster": {**config["cluster"], "num_workers": n}} for n in (2, 5))
    without_server = {**two, "topology": {"_target_": "ashl.topology.all_reduce.AllReduce"}}

    def size(config: dict, machines: tuple[Machine, ...] = THREE) -> int:
        return job_size(config, job("ssh", 0, machines))

    assert (size(config), size(two), size(without_server)) == (5, 3, 2)
    with pytest.raises(
        UsageError, match="5 workers and a server need 6 slots, and the hosts have 5"
    ):
        size(five)
    with pytest.raises(
        UsageError, match="cluster=profile is in virtual time, which needs no hosts"
    ):
        size(compose(["cluster=profile", "runtime=torchrun"]))
    assert size(two, machines=()) == 3
    with pytest.raises(UsageError, match="nothing gives the number of processes"):
        size(config, machines=())


@pytest.mark.parametrize(
    ("rank", "ends", "starts", "code"),
    [
        (1, ["kill -9 $$", "kill -9 $$", "exit 0"], 3, 0),
        (1, ["kill -9 $$", "kill -9 $$", "kill -9 $$"], 3, 137),  # no restart remains
        (1, ["exit 1"], 1, 1),  # an error of the run
        (0, ["kill -9 $$"], 1, 137),  # it serves the job's store
    ],
)
def test_a_killed_rank_is_started_again(
    rank: int, ends: list[str], starts: int, code: int, tmp_path: Path
) -> None:
    for number, text in enumerate(ends):
        (tmp_path / f"end{number}").write_text(text)
    command = ["sh", "-c", "echo >> starts; . ./end$(($(wc -l < starts) - 1))"]
    words = replace(job("ssh", 2, ()), restarts=2).guard_command(command)
    found = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"RANK": str(rank)}, stderr=subprocess.PIPE
    )
    assert found.returncode == code
    assert (tmp_path / "starts").read_text() == starts * "\n"
    assert found.stderr.count(b"is started again") == starts - 1


def test_a_signal_ends_a_guarded_rank() -> None:
    """The rank ends in order, and is not started again."""
    rank = ["sh", "-c", "trap 'exit 130' TERM; echo begun; while :; do sleep 0.05; done"]
    words = replace(job("ssh", 2, ()), restarts=2).guard_command(rank)
    with subprocess.Popen(words, env=os.environ | {"RANK": "1"}, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        shell.terminate()
        assert shell.wait(10) == 130

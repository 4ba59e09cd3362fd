"""Parts of a job on several nodes: variables of launchers, assignment of ranks, messages."""

import os
import re
import socket
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ashl.cluster.spec import RealCluster
from ashl.config.compose import compose
from ashl.errors import AshlError, DataMissingError, UsageError
from ashl.launch.environment import PORTS, JobMembership, first_host, read_membership
from ashl.plan.declared_costs import profile_of_declared_costs
from ashl.plan.profile import Profile
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import parts_of
from ashl.run import interface
from ashl.run import job as jobs
from ashl.run.authenticated_store import StoreAddress, StoreClient, StoreServer, new_secret
from ashl.run.handshake import (
    JOINS,
    Hello,
    Place,
    PlaceRequests,
    assign_ranks,
    check_gpus,
    check_profile,
    make_hello,
    server_note,
    settings_in_common,
)
from ashl.run.interface import Interface
from ashl.run.job import sharing_error
from ashl.run.rank import RankSettings
from ashl.run.supervisor import answer_requests
from tests.conf_option import conf_option
from tests.support import planned

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "1",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "n[07-09]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
KUBEFLOW = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_MASTER_ADDR": "job-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "1",
}
POD = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (TORCHRUN, JobMembership(1, 4, "a", 29500, 1)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
            JobMembership(1, 4, "a", 29500, 1, True, "2"),
        ),
        (TORCHRUN | SRUN, JobMembership(1, 4, "a", 29500, 1)),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, JobMembership(2, 3, "127.0.0.1", 29500, 1)),
        (MPIRUN | SRUN, JobMembership(2, 3, "n07", 29500, 1)),
        (MPICH | {"MASTER_ADDR": "b"}, JobMembership(1, 3, "b", 29500, 0)),
        (MPICH | {"MPI_LOCALNRANKS": "3"}, JobMembership(1, 3, "127.0.0.1", 29500, 0)),
        (MPICH | SRUN, JobMembership(1, 3, "n07", 29500, 0)),
        (KUBEFLOW, JobMembership(1, 2, "job-0.job", 29400, None)),
        (KUBEFLOW | TORCHRUN, JobMembership(1, 4, "a", 29500, 1)),
        (POD | {"ASHL_RANK_OFFSET": "2"}, JobMembership(3, 4, "job-0.job", 29500, None)),
        ({"JOB_COMPLETION_INDEX": "1"}, None),
        (MPIRUN | SRUN | {"MASTER_ADDR": "b"}, JobMembership(2, 3, "b", 29500, 1)),
        (SRUN | {"SLURM_JOB_ID": "40017"}, JobMembership(2, 3, "n07", 12017, 0)),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "77"}, JobMembership(2, 3, "b", 77, 0)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN | {"ENVIRONMENT": "BATCH"}, None),
        ({"MASTER_ADDR": "a", "SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_what_starters_say(env: dict[str, str], found: JobMembership | None) -> None:
    assert read_membership(env) == found


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK='x' in the environment, where a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK: rank 4, but WORLD_SIZE=4 counts ranks from 0 to 3"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' in the environment"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        (
            TORCHRUN | {"MASTER_ADDR": ""},
            "RANK is set, and nothing says where .* set MASTER_ADDR and MASTER_PORT for every process",
        ),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        (MPICH, "PMI_RANK is set, and nothing says where the process of rank 0 is"),
        (
            KUBEFLOW | {"PET_NPROC_PER_NODE": "2"},
            "this pod has several ranks; start them by torchrun",
        ),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES='1:4' in the environment"),
        (POD | {"MASTER_ADDR": ""}, "nothing says where the process of rank 0 is; set MASTER_ADDR"),
        (POD | {"ASHL_RANK_OFFSET": "3"}, "JOB_COMPLETION_INDEX: rank 4, but WORLD_SIZE=4"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        (MPIRUN, "nothing says where the process of rank 0 is; .* -x MASTER_ADDR="),
        (SRUN, "srun does not say SLURM_JOB_ID"),
        (SRUN | {"SLURM_JOB_NODELIST": "n[7-"}, "SLURM_JOB_NODELIST='n.7-' is no list of nodes"),
        (SRUN | {"SLURM_JOB_NODELIST": ""}, "SLURM_PROCID is set, and nothing says where"),
    ],
)
def test_an_environment_that_makes_no_sense(env: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_membership(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b[1-3,07]c", "a"),
        ("b[1-3,07]c,a", "b1c"),
        ("gpu-[08-10]", "gpu-08"),
        ("r[1-2]n[01-02].x", "r1n01.x"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host("SLURM_JOB_NODELIST", nodes) == first


# --- who plays which rank
# ---------------------------------------------------------------------------------------------


def process(rank: int, host: str, local_rank: int | None = None, **known: str | None) -> Hello:
    return Hello(
        rank,
        host,
        f"machine of {host}",
        ("1", "2", "3.11"),
        local_rank,
        address=f"10.0.0.{host}",
        **known,
    )


JOB = (process(0, "a"), process(1, "a"), process(2, "b.lan"), process(3, "c"))


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ((), (0, 2, 3, 1)),  # the server beside process 0, and behind it
        (("a", "a", "b"), (0, 1, 2, 3)),
        (("c", "a:1", "a"), (3, 1, 0, 2)),  # the server is what is left
        (("10.0.0.c", "b.lan", "a"), (3, 2, 0, 1)),
        (("c", "a", "b", "a"), (3, 0, 2, 1)),  # without a server
    ],
)
def test_workers_and_a_server_find_their_processes(
    hosts: tuple[str, ...], found: tuple[int, ...]
) -> None:
    assert assign_ranks(JOB, len(hosts) or 3, 4, hosts) == found


@pytest.mark.parametrize(
    ("mode", "size", "workers", "found"),
    [
        ("", 3, None, 2),
        ("", 2, 1, 1),
        ("", 3, 2, 2),
        ("", 2, 2, r"the job has 2 processes, and 2 workers and 1 server need 3; change"),
        ("topology=all_reduce", 2, None, 2),
        ("", 1, None, r"the job has 1 process, and 2 workers and 1 server need 3"),
        ("", 4, 2, r"the job has 4 processes, and 2 workers and 1 server need 3"),
        ("topology=gossip sync=hop", 2, None, r"2 workers and 1 coordinator need 3"),
    ],
)
def test_how_many_workers_a_job_has(
    mode: str, size: int, workers: int | None, found: int | str
) -> None:
    """One worker beside a server learns alone: nobody wants that who does not say so."""
    asked = [] if workers is None else [f"cluster.num_workers={workers}"]
    config = compose(["runtime=torchrun", "cluster=real", "sync=bsp", *mode.split(), *asked], None)
    if isinstance(found, int):
        assert compile_plan(config, world_size=size).num_workers == found
        return
    with pytest.raises(UsageError, match=found):
        compile_plan(config, world_size=size)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (
            ("a", "d", "c"),
            r"cluster.hosts names d, and .* there are: a \(2 processes\), b.lan \(1 process\), c",
        ),
        (
            ("a", "c", "c"),
            r"cluster.hosts names c once more than the job has processes there \(1\); start more",
        ),
        (("a:0", "a:0", "c"), "cluster.hosts names a:0 once more than"),
        (
            ("a:2", "b.lan", "c"),
            "cluster.hosts names a:2, and no process of the job is there; there are: a",
        ),
    ],
)
def test_hosts_that_cannot_be(hosts: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        assign_ranks(JOB, 3, 4, hosts)


def test_two_machines_of_one_name() -> None:
    twins = (process(0, "pi"), process(1, "pi")._replace(node_id="another", address="10.0.0.9"))
    with pytest.raises(
        UsageError, match=r"the name of several nodes; use their addresses: 10.0.0.pi, "
    ):
        assign_ranks(twins, 2, 2, ("pi", "pi"))
    assert assign_ranks(twins, 2, 2, ("10.0.0.9", "10.0.0.pi")) == (1, 0)


@pytest.mark.parametrize(
    ("hosts", "workers", "said"),
    [
        ([], None, "no host; give one for each worker"),
        (["a"], 2, "has 1 entry and cluster.num_workers is 2"),
        (["a", "b"], 3, "2 entries"),
    ],
)
def test_fewer_hosts_than_workers(hosts: list[str], workers: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RealCluster(num_workers=workers, hosts=tuple(hosts))
    assert RealCluster(num_workers=None, hosts=("a", "b")).num_workers == 2


def test_two_workers_on_one_gpu() -> None:
    job = (
        process(0, "a", gpu="0"),
        process(1, "a", gpu="1"),
        process(2, "b", gpu="0"),
        process(3, "a", gpu="0"),
    )
    check_gpus(job, (0, 1, 2), share=False)
    check_gpus(job, (0, 1, 2, 3), share=True)
    with pytest.raises(
        UsageError, match=r"ranks 0 and 3 on a both take its GPU 0; .* runtime.share_gpu=true"
    ):
        check_gpus(job, (0, 1, 2, 3), share=False)


# --- what a profile says of places
# ------------------------------------------------------------------------------------


PLAN = planned("cluster=homogeneous", "cluster.compute=[1,1,1]", "sync=asp", "runtime=local")


def test_a_profile_of_other_hosts_is_refused() -> None:
    known = profile_of_declared_costs(
        conf_option("cluster", "homogeneous", compute=[1] * 3), "mlp", 1000, 8
    )

    def measured_on(*hosts: str | None) -> Profile:
        pairs = zip(known.workers, hosts, strict=True)
        return replace(known, workers=tuple(replace(own, host=host) for own, host in pairs))

    check_profile(measured_on("c", "b.lan", "a"), JOB, (3, 2, 0, 1), "FILE")
    said = (
        r"profile=FILE has measured worker 0 on c, and here it is on a; set"
        r" cluster.hosts=\[c,b.lan,a\], or run"
    )
    with pytest.raises(UsageError, match=said):
        check_profile(measured_on("c", "b.lan", "a"), JOB, (0, 2, 3, 1), "FILE")
    for elsewhere in (measured_on("x", "y", "z"), measured_on(None, None, None), None):
        check_profile(elsewhere, JOB, (0, 2, 3, 1), "FILE")
    (note,) = server_note(PLAN, "a")
    assert note == "the job is 3 workers and a server; the server runs on host a"


PLAN = planned("cluster=homogeneous", "cluster.compute=[1,1,1]", "sync=asp", "runtime=local")


# --- the handshake
# --------------------------------------------------------------------------------------------------


def member(rank: int, size: int = 3) -> JobMembership:
    return JobMembership(rank, size, "127.0.0.1", 29500, None)


@contextmanager
def asking(*said: Hello) -> Generator[tuple[PlaceRequests, list[Future[Place]]]]:
    """Ask for a place by each hello but the first, which is that of process 0."""
    secret = new_secret()
    server = StoreServer(secret)
    address = StoreAddress(server.host, server.port, secret)
    requests = PlaceRequests(server, said[0])
    with ThreadPoolExecutor(8) as threads:
        found = [
            threads.submit(jobs.await_place, StoreClient(address, 0.0), hello, 0.5)
            for hello in said[1:]
        ]
        try:
            yield requests, found
        finally:
            requests.refuse_all(AshlError("it is over"), sum(not one.done() for one in found))


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (
            {"versions": ("1", "2.12", "3.11")},
            UsageError,
            "rank 1 on a has torch 2.12 and rank 0 on a has torch 2; install the same on both",
        ),
        (
            {"versions": ("0.9", "2", "3.11")},
            UsageError,
            "rank 1 on a has ashl 0.9 and rank 0 on a has ashl 1",
        ),
        ({"error": "no data", "exit_code": 3}, DataMissingError, "rank 1 on a: no data"),
        (
            {"settings": {"sync": "ssp", "limits": 1}},
            UsageError,
            "rank 1 on a has sync=ssp and rank 0 on a has sync=bsp; give every process",
        ),
    ],
)
def test_what_does_not_fit_together(changed: dict, kind: type[AshlError], said: str) -> None:
    """It is told before all have come."""
    first = JOB[0]._replace(settings={"sync": "bsp", "limits": 0})
    second = JOB[1]._replace(settings=first.settings)._replace(**changed)
    with (
        asking(first, second) as (requests, _),
        pytest.raises(kind, match=re.escape(said)),
    ):
        requests.gather(3, 5.0)


def test_who_did_not_come_is_named() -> None:
    said = r"ranks 2, 3 of the 4 processes did not join within 0.5 s \(runtime.wait_timeout_s\)"
    with asking(*JOB[:2]) as (requests, _), pytest.raises(AshlError, match=said):
        requests.gather(4, 0.5)


def test_a_process_gets_its_place_or_the_error_of_process_0() -> None:
    with asking(*JOB[:3]) as (requests, answers):
        assert requests.gather(3, 5.0) == JOB[:3]
        with pytest.raises(DataMissingError, match="no data"), sharing_error(member(0), requests):
            raise DataMissingError("no data")
        assert [str(answer.exception(5)) for answer in answers] == ["no data"] * 2
    with asking(JOB[0], JOB[2]) as (requests, (answer,)):
        requests.places, requests.workers = {2: Place(RankSettings(1, "none"))}, {2: 1}
        answer_requests_until(requests, answer)
        assert answer.result() == Place(RankSettings(1, "none"))


def answer_requests_until(requests: PlaceRequests, answer: Future[Place]) -> None:
    """Answer as the controller of a run in which no worker has failed."""
    monitor = SimpleNamespace(
        job=SimpleNamespace(parts=parts_of(PLAN)), final=None, stop_reason=None, counts=lambda: 1
    )
    liveness: Any = SimpleNamespace(
        requests=requests, plan=PLAN, monitor=monitor, failed={}, rejoining={}
    )
    liveness.channel = SimpleNamespace(expect_reports=lambda rank, thread: None)
    while not answer.done():
        answer_requests(liveness)
        time.sleep(0.01)


def test_a_restarted_process_that_cannot_run_gets_no_place() -> None:
    """Its error reaches it, with its exit code; it took the place of the worker before."""
    broken = JOB[2]._replace(error="no data", exit_code=3)
    with asking(JOB[0], broken) as (requests, (answer,)):
        requests.workers = {2: 1}
        answer_requests_until(requests, answer)
        error = answer.exception()
        assert isinstance(error, DataMissingError)
        assert str(error) == f"rank 2 on {broken.host}: no data"


def test_a_joining_process_is_none_of_those_that_begin() -> None:
    joining = JOB[1]._replace(rank=JOINS)
    with asking(JOB[0], joining, JOB[1]) as (requests, _):
        assert requests.gather(2, 5.0) == JOB[:2]


def test_a_second_process_is_refused_while_the_first_one_runs() -> None:
    with asking(JOB[0], JOB[2]) as (requests, (answer,)):
        requests.workers = {2: 1}
        began_s = time.monotonic()
        answer_requests_until(requests, answer)
        refused = str(answer.exception())
    assert re.search("rank 2 is there already, .* b.lan .*: worker 1 has not failed; give", refused)
    assert time.monotonic() - began_s > 0.5, "the run may notice the failure a little later"


def test_another_version_of_ashl_join_is_refused() -> None:
    own = make_hello(0)
    other = make_hello()._replace(versions=("0.1", *own.versions[1:]))
    with asking(own, other) as (requests, (answer,)):
        answer_requests_until(requests, answer)
        assert "this process has ashl 0.1 and rank 0 on" in str(answer.exception())


def test_what_machines_may_have_each_its_own() -> None:
    plan = planned("cluster=homogeneous", "sync=asp", "runtime=local").to_json()
    config: dict = {"dataset": {"root": "here", "batch_size": 8}, "runtime": {"interface": "eth0"}}
    other: dict = {"dataset": {"root": "there", "batch_size": 8}, "runtime": {"interface": None}}
    config["run"], other["run"] = (
        {"dir": folder, "checkpoint_s": None} for folder in ("run", None)
    )
    assert settings_in_common(config, plan) == settings_in_common(other, plan)
    often = {**config, "run": {"dir": None, "checkpoint_s": 1.0}}
    assert settings_in_common(often, plan)["run.checkpoint_s"] == 1.0
    other["dataset"]["batch_size"] = 4
    assert settings_in_common(other, plan)["dataset.batch_size"] == 4


def test_a_master_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = JobMembership(1, 2, "127.0.0.1", port, None)
    with pytest.raises(
        AshlError,
        match=rf"the master 127.0.0.1:{port} \(MASTER_ADDR.* 0.01 s .* Connection refused; is",
    ):
        jobs.connect_store(job, 0.01)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"the port {port} \(MASTER_PORT\) is taken on .*; choose another"
        ):
            jobs.serve_store(JobMembership(0, 2, "127.0.0.1", port, None))


def test_the_port_beside_an_agent_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent listens at MASTER_PORT, so all processes of an attempt derive another port."""
    monkeypatch.setenv("ASHL_JOB_SECRET", "a word")
    agents = [member(rank)._replace(agent_store=True, attempt="1") for rank in (0, 1)]
    own, other = map(jobs.address_of, agents)
    assert own == other
    assert own.port in PORTS
    assert own != jobs.address_of(agents[0]._replace(attempt="2"))
    assert jobs.address_of(member(0)).port == 29500


# --- the interface
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_cards(monkeypatch) -> None:
    """A Debian machine: its own name is 127.0.1.1, and 10.0.0.7 is on eth1."""
    there = {
        "lo": ["127.0.0.1", "::1"],
        "docker0": [],
        "eth0": ["192.168.0.7"],
        "eth1": ["10.0.0.7"],
    }
    monkeypatch.setattr(interface, "addresses", lambda: there)


def test_an_interface_that_is_named(two_cards, monkeypatch) -> None:
    assert interface.find_configured(None) is None
    assert interface.find_configured("eth1") == Interface("eth1", "10.0.0.7", "runtime.interface")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert interface.find_configured(None) == Interface(
        "eth0,eth1", "192.168.0.7", "GLOO_SOCKET_IFNAME"
    )
    with pytest.raises(
        UsageError,
        match=r"runtime.interface=eth7: .* 'eth7' with an address; take one of lo, eth0, eth1",
    ):
        interface.find_configured("eth7")
    with pytest.raises(UsageError, match="no interface 'docker0' with an address"):
        interface.find_configured("docker0")


def test_the_interface_that_leads_to_the_master() -> None:
    for host in ("127.0.0.1", "127.0.1.1", "localhost"):
        found = interface.find_route(host)
        assert found is not None
        assert (found.name, found.is_loopback) == ("lo", True)
    assert interface.find_route("no.such.host.invalid") is None


def test_loopback_leads_to_no_other_machine(monkeypatch) -> None:
    lo, card = Interface("lo", "127.0.1.1"), Interface("eth0", "192.168.0.7")
    found = Interface("eth1", "10.0.0.7")
    routes = {"10.0.0.8": found, "10.9.9.9": None, "127.0.1.1": lo}
    monkeypatch.setattr(interface, "find_route", lambda host: routes[host])
    assert interface.replace_loopback(lo, ["127.0.1.1", "10.9.9.9", "10.0.0.8"]) == found
    assert interface.replace_loopback(lo, ["127.0.1.1"]) == lo
    assert interface.replace_loopback(card, ["10.0.0.8"]) == card


def test_an_interface_is_for_gloo_and_nccl(monkeypatch) -> None:
    for name in (interface.GLOO, interface.NCCL):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    interface.use_interface(None)
    assert interface.GLOO not in os.environ
    interface.use_interface(Interface("eth1", "10.0.0.7"))
    assert (os.environ[interface.GLOO], os.environ[interface.NCCL]) == ("eth1", "=eth1")
    monkeypatch.setenv(interface.NCCL, "ib0")
    interface.use_interface(Interface("eth1", "10.0.0.7", interface.GLOO))
    assert os.environ[interface.NCCL] == "ib0"
    interface.use_interface(Interface("eth1", "10.0.0.7", interface.KEY))
    assert os.environ[interface.NCCL] == "=eth1"

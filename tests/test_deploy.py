"""The files of docs/deploy parse, and start commands and keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from experiments.command import spelled_out
from experiments.vit_run import Config
from sfpo_jax.parallel._join import _find_place
from sfpo_jax.training import load_config

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "docs/deploy/vit_l.slurm"
JOBSET = ROOT / "docs/deploy/jobset.yaml"


def configured(command: list[str]):
    """The configuration of an experiment's command line."""
    assert command[:3] == ["python", "-m", "experiments.vit_l"]
    given = [str(ROOT / x) if x.startswith("configs/") else x for x in command[3:]]
    given = [x.replace("=configs", f"={ROOT}/configs") for x in given]
    return load_config(Config(), spelled_out(given), prog="x", description="x")


def test_the_slurm_file_asks_for_one_process_a_machine_and_time_to_save() -> None:
    text = SLURM.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(asked) == text.count("#SBATCH")
    assert asked["ntasks-per-node"] == "1"
    assert asked["signal"].startswith("TERM@")
    assert "requeue" in asked
    devices = re.search(r"JAX_LOCAL_DEVICE_IDS=([\d,]+)", text)
    assert devices
    assert len(devices[1].split(",")) == int(asked["gpus-per-node"])


def test_the_slurm_command_is_one_of_an_experiment() -> None:
    text = SLURM.read_text().replace("\\\n", " ")
    line = next(x for x in text.splitlines() if x.startswith("srun"))
    # The shell's variables, as they would be.
    line = re.sub(r"\$\{(DATA|RUN)[^}]*\}", "/data", line)
    command = shlex.split(line)
    config = configured(command[command.index("python") :])
    assert config.distributed.enable
    assert config.parallel.mesh.node == "hosts"


def test_slurm_says_who_is_who() -> None:
    jax_reads = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": "node[003-006]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "4",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in jax_reads.items():
            patch.setenv(name, value)
        place, devices = _find_place(None, None, None, {"JAX_LOCAL_DEVICE_IDS": "0,1"})
        assert (place.hosts, place.rank, devices) == (4, 2, [0, 1])
        assert place.coordinator.startswith("node003:")
        # A process for each GPU is what JAX takes SLURM's tasks for.
        assert _find_place(None, None, None, {})[1] == [0]


def documents():
    return {x["kind"]: x for x in yaml.safe_load_all(JOBSET.read_text())}


def test_the_jobset_runs_an_experiment_in_as_many_pods_as_it_completes() -> None:
    jobset = documents()["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 4
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert configured(container["command"]).distributed.enable
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_pods_may_read_what_jax_asks_for_and_only_they_reach_each_other() -> None:
    found = documents()
    name = found["ServiceAccount"]["metadata"]["name"]
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == name
    assert found["RoleBinding"]["subjects"][0]["name"] == name
    resources = {r for rule in found["Role"]["rules"] for r in rule["resources"]}
    assert resources == {"pods", "services", "jobs"}
    label = {"jobset.sigs.k8s.io/jobset-name": found["JobSet"]["metadata"]["name"]}
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == label
    (ingress,) = policy["ingress"]
    assert ingress["from"][0]["podSelector"]["matchLabels"] == label

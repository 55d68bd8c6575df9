"""Every configuration in examples/ is a right one."""

import subprocess

import pytest
import yaml

from shoal.config import configure
from shoal.models import build
from support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SHAPES = {
    "digits": ((1, 8, 8), 10),
    "cancer": ((30,), 2),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "adult": ((105,), 2),
    "lfw": ((3, 32, 32), 62),
    "heart": ((33,), 2),
    "insteval": ((5,), 1),
    "movielens": ((13,), 1),
    "shakespeare": ((80,), 68),
    "milton": ((80,), 68),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right(path):
    config = configure(path)
    shape, classes = SHAPES[config.data.name]
    if config.data.features == "none":
        build(config.model, shape, classes)


@pytest.mark.slow
def test_there_is_one_for_each_data_set():
    assert {configure(path).data.name for path in EXAMPLES} == set(SHAPES)


def test_the_slurm_script_is_right_bash_and_passes_on_what_it_is_given():
    script = ROOT / "examples" / "cluster" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().rstrip().endswith('-m shoal run "$@"')


def test_the_pytorchjob_is_right_yaml_with_one_command_for_all_machines():
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    for machine in (replicas["Master"], replicas["Worker"]):
        (container,) = machine["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][:4] == ["torchrun", "-m", "shoal", "run"]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in machine["template"]["spec"]["volumes"]}

"""The two lists of what to install, for pip and for uv, name the same versions."""

import re
import tomllib

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
GROUPS = PROJECT["dependency-groups"]


def listed(name: str) -> set[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {Requirement(line) for line in lines if line and not line.startswith(("#", "-r "))}


@pytest.mark.parametrize("group", ["cpu", "gpu"])
def test_uv_and_pip_install_the_same_versions(group):
    uv = [*PROJECT["project"]["dependencies"], *GROUPS[group]]
    assert {Requirement(line) for line in uv} == listed("requirements.txt")
    assert {Requirement(line) for line in GROUPS["dev"]} == listed("requirements-dev.txt")


def test_the_howto_names_the_same_versions():
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    named = re.findall(r"\b(torch|numpy|requests|tiktoken)==([\d.]+)", page)
    assert named
    for name, version in named:
        assert any(line.name == name and version in line.specifier for line in listed("requirements.txt")), name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14", "3.15"])
def test_each_python_gets_one_pytorch_and_one_numpy(python):
    for package in ("torch", "numpy"):
        found = [line for line in listed("requirements.txt") if line.name == package]
        assert sum(line.marker.evaluate({"python_version": python}) for line in found) == 1


def test_the_cpu_build_is_the_default_and_the_groups_exclude_each_other():
    uv = PROJECT["tool"]["uv"]
    assert uv["default-groups"] == ["cpu"] and not uv["package"]
    assert uv["conflicts"] == [[{"group": "cpu"}, {"group": "gpu"}]]
    (source,) = uv["sources"]["torch"]
    (index,) = uv["index"]
    assert source["index"] == index["name"] and source["group"] == "cpu" and index["explicit"]

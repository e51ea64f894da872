"""Renders deploy/helm/ringattn and reads what comes out."""

import os
import pathlib
import re
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/ringattn"
VARIANTS = sorted((CHART / "ci").glob("*.yaml"))
EXAMPLE = ROOT / "deploy/kubernetes/example"
HELM = os.environ.get("RINGATTN_HELM") or None
# The oldest that the chart names, and the one that tests/k8s runs.
VERSIONS = ("1.27", "1.34")


def helm(*words, check=True):
    done = subprocess.run([HELM, *map(str, words)], capture_output=True, text=True, timeout=60)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def template(*words, version=VERSIONS[-1], check=True):
    return helm("template", "ringattn", CHART, "--namespace", "ringattn", "--kube-version",
                f"{version}.0", *words, check=check)


def objects(text):
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(found, kind):
    return [one for one in found if one["kind"] == kind]


def one(found, kind, suffix=""):
    matching = [o for o in of_kind(found, kind) if o["metadata"]["name"].endswith(suffix)]
    assert len(matching) == 1, [o["metadata"]["name"] for o in matching]
    return matching[0]


def containers(found):
    """(object, container) of every pod that is made."""
    for workload in found:
        template_spec = workload.get("spec", {}).get("template", {}).get("spec")
        for container in (template_spec or {}).get("containers", []):
            yield workload, container


def command_line(container, environment):
    """Returns the text with $(NAME) replaced, as the kubelet does."""
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda m: environment[m.group(1)], word) for word in words]

#!/usr/bin/env python3
"""Lints and renders the Helm chart, and validates what it renders.

    ffi-tests/observe/chart.py [--kvtier TOOL]

Helm itself (version 4, by its Python package) lints and renders packaging/kubernetes/kvtier with several values.
kubernetes-validate compares each object with the schemas of Kubernetes, strictly. Further rules are checked here:
containers are confined, images have tags, selectors fit. The command lines of kvtier are given to the tool. Needs
the packages helm-python-sdk and kubernetes-validate; without them it prints SKIP and exits with 77.
"""

import argparse
import copy
import json
import pathlib
import subprocess
import sys
import warnings

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "packaging" / "kubernetes" / "kvtier"
# The oldest version that Chart.yaml accepts, and the newest one with a schema.
VERSIONS = ("1.25", None)
IMAGE = {"repository": "registry.example/kvtier"}
VLLM_IMAGE = {"repository": "registry.example/vllm-kvtier"}
ALL = {
    "image": IMAGE,
    "prepare": True,
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "annotations": False},
    "spans": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "nodeSelector": {"kvtier": "yes"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-node-critical",
    "vllm": {"enabled": True, "image": VLLM_IMAGE, "gpus": 2, "spec": "policy=qos(inner=s3fifo)",
             "args": ["--max-model-len=32768"],
             "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]},
}
CASES = {
    "the defaults": {"image": IMAGE},
    "everything": ALL,
    "vLLM on processors": {"image": IMAGE, "prepare": False, "vllm": {"enabled": True, "image": VLLM_IMAGE, "gpus": 0}},
}
# Values that the schema of the chart must refuse, and a word of the message.
WRONG = [({"user": 0}, "user"), ({"node": {"disk": "relative", "sockets": "/run/kvtier"}}, "disk"),
         ({"vllm": {"host": "64 G"}}, "host"), ({"spans": {"endpoint": "https://a"}}, "endpoint"),
         ({"metrics": {"timeout": 15}}, "timeout"), ({"metrics": {"serviceMonitor": {"interval": "1h"}}}, "interval")]
# Values, and a namespace, that the templates must refuse, and words of the message.
REFUSED = [({}, "llm", "image.repository is empty: build packaging/kubernetes/Dockerfile"),
           ({"image": IMAGE, "vllm": {"enabled": True}}, "llm", "vllm.image.repository is empty"),
           ({"image": IMAGE, "vllm": {"enabled": True, "image": VLLM_IMAGE}}, "n" * 63, "at most 67 are accepted"),
           ({"image": IMAGE, "metrics": {"timeout": 14, "serviceMonitor": {"enabled": True, "interval": "20s"}}}, "llm",
            "a scrape may take 29s")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtier", type=pathlib.Path, default=ROOT / "target" / "debug" / "kvtier")
    tool = parser.parse_args().kvtier
    if not tool.exists():
        raise SystemExit(f"{tool} is needed: cargo build, or --kvtier TOOL")
    warnings.simplefilter("ignore")
    try:
        import helm_python as helm
        import kubernetes_validate
        import yaml
    except ImportError as error:
        print(f"SKIP: {error.name} is not installed (Python packages helm-python-sdk, kubernetes-validate)")
        return 77
    faults = []
    for name, values in CASES.items():
        report = helm.lint(CHART, values, strict=True)
        bad = [m for m in report["messages"] if m["severity"] >= 2] + report["errors"]
        faults += [f"helm lint, {name}: {one}" for one in bad]
        with helm.Chart.load(CHART) as chart:
            rendered = chart.render(values, name="test", namespace="llm")
        objects = [one for path, text in rendered.items() if path.endswith(".yaml")
                   for one in yaml.safe_load_all(text) if one]
        print(f"{name}: {', '.join(one['kind'] for one in objects)}")
        for one in objects:
            where = f"{name}: {one['kind']} {one['metadata']['name']}"
            faults += [f"{where}: {fault}" for fault in [*schema(one, kubernetes_validate), *rules(one, tool)]]
        faults += [f"{name}: {fault}" for fault in selectors(objects)]
    for values, word in WRONG:
        try:
            with helm.Chart.load(CHART) as chart:
                chart.validate_schema(chart.merge_values(values))
            faults.append(f"the schema accepts {values}")
        except helm.HelmError as error:
            if word not in str(error):
                faults.append(f"{values}: {error}")
    for values, namespace, words in REFUSED:
        try:
            with helm.Chart.load(CHART) as chart:
                chart.render(values, name="test", namespace=namespace)
            faults.append(f"the templates accept {values} in {namespace}")
        except helm.HelmError as error:
            if words not in str(error):
                faults.append(f"{values}: {error}")
    faults += planted(kubernetes_validate)
    for fault in faults:
        print(f"FAULT: {fault}")
    newest = kubernetes_validate.latest_version()
    print(f"Helm {helm.helm_sdk_version()}; schemas of Kubernetes {VERSIONS[0]} and {newest}: {len(faults)} faults")
    return 1 if faults else 0


def schema(one, kubernetes_validate):
    """Faults of an object by the schemas of Kubernetes. A ServiceMonitor is defined by the operator."""
    if one["apiVersion"].startswith("monitoring.coreos.com/"):
        endpoints = one["spec"]["endpoints"]
        return [] if set(endpoints[0]) <= {"port", "path", "interval", "scrapeTimeout"} else ["unknown key"]
    faults = []
    for version in VERSIONS:
        version = version or kubernetes_validate.latest_version()
        try:
            kubernetes_validate.validate(copy.deepcopy(one), version, strict=True)
        except Exception as error:  # each way of saying that it is wrong
            faults.append(f"Kubernetes {version}: {error}")
    return faults


def rules(one, tool):
    """Faults by our own rules."""
    if one["kind"] not in ("DaemonSet", "StatefulSet"):
        return []
    pod = one["spec"]["template"]["spec"]
    faults = []
    if pod["securityContext"].get("runAsNonRoot") is not True or pod["securityContext"]["runAsUser"] == 0:
        faults.append("the pod may run as root")
    if pod.get("automountServiceAccountToken") is not False:
        faults.append("the pod has a token")
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod.get("initContainers", []) + pod["containers"]:
        name, security = container["name"], container["securityContext"]
        if not security["readOnlyRootFilesystem"] or security["allowPrivilegeEscalation"]:
            faults.append(f"{name} is not confined")
        allowed = ["CHOWN"] if name == "prepare" else []
        if security["capabilities"]["drop"] != ["ALL"] or security["capabilities"].get("add", []) != allowed:
            faults.append(f"{name} has capabilities")
        if ":" not in container["image"] or container["image"].endswith(":latest"):
            faults.append(f"{name}: an image needs a tag")
        if not {"cpu", "memory"} <= set(container["resources"]["requests"]) or "limits" not in container["resources"]:
            faults.append(f"{name} needs resources")
        if not {mount["name"] for mount in container["volumeMounts"]} <= volumes:
            faults.append(f"{name} mounts an unknown volume")
        faults += [f"{name}: {fault}" for fault in command(container, tool)]
    return faults


def command(container, tool):
    """Faults of a command line: those of kvtier are given to the tool, and specs are parsed by it."""
    line = container.get("command", [])
    if line[:1] == ["kvtier"]:
        # An address in use is the last thing that can be wrong.
        args = [arg.replace("0.0.0.0:", "192.0.2.1:") for arg in line[1:]]
        if "--otlp" in args:
            args += ["--every", "0"]
        said = subprocess.run([tool, *args], capture_output=True, text=True, timeout=60, check=False).stderr
        expected = "0.1 to 60 seconds" if "--otlp" in args else "cannot listen at 192.0.2.1"
        return [] if expected in said and said.count("error:") <= 1 else [said]
    if line[:1] == ["vllm"]:
        args = container["args"]
        options = json.loads(args[args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        spec = options["spec"].replace("$(POD_NAME)", "pod-0").replace("$(POD_NAMESPACE)", "llm")
        variables = {one["name"] for one in container["env"]}
        if not {"POD_NAME", "POD_NAMESPACE"} <= variables or "$(POD_NAMESPACE)" not in options["disk_path"]:
            return ["paths of the node need the pod's name and namespace"]
        said = subprocess.run([tool, "spec", spec], capture_output=True, text=True, timeout=60, check=False)
        return [] if said.returncode == 0 else [said.stdout + said.stderr]
    return [] if container["name"] == "prepare" else [f"unknown command {line}"]


def selectors(objects):
    """Faults of selectors: each selects the labels of a pod."""
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in objects if "template" in one.get("spec", {})]
    services = [one["metadata"]["labels"] for one in objects if one["kind"] == "Service"]
    faults = []
    for one in objects:
        spec = one["spec"]
        wanted = spec.get("selector", spec.get("podSelector", {}))
        wanted = wanted.get("matchLabels", wanted)
        among = services if one["kind"] == "ServiceMonitor" else pods
        if not any(wanted.items() <= labels.items() for labels in among):
            faults.append(f"{one['kind']} {one['metadata']['name']} selects nothing: {wanted}")
    return faults


def planted(kubernetes_validate):
    """The checks find what is wrong on purpose."""
    wrong = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "a"},
             "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {
                 "metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "a", "imagePolicy": "x"}]}}}}
    found = schema(wrong, kubernetes_validate)
    return [] if len(found) == len(VERSIONS) else ["an unknown key of a container is not found"]


if __name__ == "__main__":
    sys.exit(main())

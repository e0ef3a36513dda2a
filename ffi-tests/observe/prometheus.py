#!/usr/bin/env python3
"""Runs the dashboard and the alerts against a real Prometheus that scrapes real stores.

    ffi-tests/observe/prometheus.py [--kvtier TOOL] [--work DIR] [--scrapes N] [--picture FILE]

Starts two stores (`kvtier demo`), `kvtier metrics --serve` and Prometheus, and fails unless

- promtool accepts the alerting rules, and Prometheus evaluates each of them without an error,
- each query of docs/operations/grafana.json is answered, with at least one number unless IDLE lists it,
- a killed store has `kvtier_up 0` and the other one keeps its metrics.

--picture draws panels of the dashboard from Prometheus' answers. KVTIER_PROMETHEUS is a directory with the programs
prometheus and promtool; otherwise they are looked up in PATH (Debian's package prometheus). Without them it prints
SKIP and exits with 77.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

sys.dont_write_bytecode = True

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations"
# A longer wait is a hang.
PATIENCE_S = 300
# Queries without a number in a healthy run, and why. Everything else must have data.
IDLE = {
    "kvtier_policy_decision_seconds_bucket": "one decision of a policy in 16 is timed; a short run may have none",
    "kvtier_coded_raw_bytes_total": "the demo's cells do not become smaller, so nothing is encoded",
}
# Values of the dashboard's variables.
VARIABLES = {"$job": ".*", "$instance": ".*", "$store": ".*", "$__rate_interval": "15s", "$tokens_per_cell": "2"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtier", default=ROOT / "target" / "debug" / "kvtier")
    parser.add_argument("--work", help="folder for files; default a temporary one")
    parser.add_argument("--scrapes", type=int, default=45, help="scrapes before the dashboard is queried")
    parser.add_argument("--picture", help="SVG file of the dashboard")
    options = parser.parse_args()
    where = os.environ.get("KVTIER_PROMETHEUS")
    programs = {name: shutil.which(name, path=where) for name in ("prometheus", "promtool")}
    if None in programs.values():
        print("SKIP: the programs prometheus and promtool are not installed (Debian's package prometheus)")
        return 77
    with tempfile.TemporaryDirectory(prefix="kvtier-observe-", dir=options.work) as work:
        run = Run(options, programs, pathlib.Path(work))
        try:
            return run.check()
        finally:
            run.close()


class Run:
    """Stores, the exporter and Prometheus."""

    def __init__(self, options, programs, work):
        self.options, self.programs, self.work = options, programs, work
        self.processes = {}
        self.faults = []
        (work / "sockets").mkdir()
        (work / "remote").mkdir()

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, name, *args, **kwargs):
        log = open(self.work / f"{name}.log", "wb")
        kwargs.setdefault("stderr", log)
        self.processes[name] = subprocess.Popen([str(arg) for arg in args], stdout=log, **kwargs)
        return self.processes[name]

    def engine(self, name, host, more):
        spec = f"""host = "{host}"
copiers = 1
write = "back"
chunks = 65536
codec = "lz4"
{more}
[disk]
path = "{self.work / name}"
bytes = "256MiB"
segment = "4MiB"
"""
        config = self.work / f"{name}.toml"
        config.write_text(spec)
        self.start(name, self.options.kvtier, "demo", "--sessions", "16", "--linger", "3600", "--json", "--config",
                   config, "--control", self.work / "sockets" / f"{name}.sock")

    def begin(self):
        self.engine("engine-0", "24MiB", f"remote = 'dir(path=\"{self.work / 'remote'}\")'")
        self.engine("engine-1", "48MiB", "")
        exporter = self.start("exporter", self.options.kvtier, "metrics", "--serve", "0", "--socket",
                              self.work / "sockets", stderr=subprocess.PIPE)
        line = exporter.stderr.readline().decode()
        self.exporter = line.split("http://")[1].split("/")[0]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(OPERATIONS / "alerts.yaml")],
            "scrape_configs": [{"job_name": "kvtier", "static_configs": [{"targets": [self.exporter]}]}],
        }
        # JSON is YAML.
        (self.work / "prometheus.yml").write_text(json.dumps(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start("prometheus", self.programs["prometheus"], f"--config.file={self.work / 'prometheus.yml'}",
                   f"--storage.tsdb.path={self.work / 'tsdb'}", f"--web.listen-address=127.0.0.1:{self.port}")

    def api(self, path, **query):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            return json.load(error)

    def value(self, query):
        """The largest value of an instant query; None = there is none."""
        found = self.api("query", query=query)["data"]["result"]
        return max((float(one["value"][1]) for one in found), default=None)

    def until(self, what, is_so):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for name, process in self.processes.items():
                if process.poll() is not None and name not in getattr(self, "killed", ()):
                    log = (self.work / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise SystemExit(f"{name} has ended with {process.returncode}: {log}")
            try:
                if is_so():
                    return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        raise SystemExit(f"not within {PATIENCE_S} s: {what}")

    def check(self):
        for args in (["check", "rules", OPERATIONS / "alerts.yaml"],):
            said = subprocess.run([self.programs["promtool"], *args], capture_output=True, text=True, check=False)
            print(said.stdout.strip())
            if said.returncode != 0:
                self.faults.append(f"promtool: {said.stderr.strip()}")
        self.begin()
        self.began = time.time()
        enough = self.options.scrapes
        self.until("both stores are scraped",
                   lambda: (self.value("count(count_over_time(kvtier_up[1h]) >= %d)" % enough) or 0) >= 2)
        dashboard = json.loads((OPERATIONS / "grafana.json").read_text())
        answers = self.dashboard(dashboard)
        self.rules()
        if self.options.picture:
            from picture import draw

            pathlib.Path(self.options.picture).write_text(draw(dashboard, answers), encoding="utf-8")
        self.kill_one()
        for fault in self.faults:
            print(f"FAULT: {fault}")
        return 1 if self.faults else 0

    def dashboard(self, dashboard):
        """Asks each query; returns the answers by panel and query."""
        end = time.time()
        answers, idle, queries = {}, [], 0
        for panel in dashboard["panels"]:
            for place, target in enumerate(panel.get("targets", [])):
                queries += 1
                query = target["expr"]
                for name, value in VARIABLES.items():
                    query = query.replace(name, value)
                answer = self.api("query_range", query=query, start=self.began, end=end, step=1)
                title = f"{panel['title']} / {target.get('legendFormat')}"
                if answer["status"] != "success":
                    self.faults.append(f"{title}: {answer.get('error')}: {query}")
                    continue
                result = answer["data"]["result"]
                answers[panel["id"], place] = result
                has_data = any(math.isfinite(float(value)) for one in result for _, value in one["values"])
                if not has_data:
                    reason = next((reason for name, reason in IDLE.items() if name in query), None)
                    idle.append(f"{title}: {reason}")
                    if reason is None:
                        self.faults.append(f"{title} has no data: {query}")
        for one in idle:
            print(f"no data: {one}")
        print(f"dashboard: {queries} queries, {queries - len(idle)} with data")
        return answers

    def rules(self):
        self.until("all rules are evaluated", lambda: all(
            rule["health"] != "unknown" for rule in self.all_rules()))
        rules = self.all_rules()
        self.faults += [f"rule {rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
        active = sorted({rule["name"] for rule in rules if rule["state"] != "inactive"})
        print(f"alerts: {len(rules)} rules evaluated; pending or firing in this run: {', '.join(active) or 'none'}")

    def all_rules(self):
        groups = self.api("rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def kill_one(self):
        self.killed = ["engine-1"]
        self.processes["engine-1"].kill()
        self.until("the killed store is down", lambda: self.value('kvtier_up{store="engine-1"}') == 0)
        self.until("its alert is pending", lambda: any(
            rule["name"] == "KvtierStoreDown" and rule["state"] != "inactive" for rule in self.all_rules()))
        # The series of the killed store end; those of the other one go on.
        self.until("its metrics end", lambda: self.value('kvtier_chunks{store="engine-1"}') is None)
        if self.value('kvtier_up{store="engine-0"}') != 1 or not self.value('kvtier_chunks{store="engine-0"}'):
            self.faults.append("engine-0 has no metrics after engine-1 was killed")
        print("a killed store: kvtier_up 0, KvtierStoreDown pending, the other store still there")


if __name__ == "__main__":
    sys.exit(main())

"""lmdeploy's own Mooncake connector on the shim: both sides, with its lookups over ZMQ."""

from __future__ import annotations

import json
import sys
import threading
import types
from pathlib import Path
from typing import Any, Iterator

import pytest
from helpers import HERE, empty_packages, need

need("lmdeploy", "0.18.0", "torch", "zmq", "pydantic", "psutil", "transformers")
empty_packages("lmdeploy", ["lmdeploy", "lmdeploy.vl", "lmdeploy.pytorch.engine"])
for name, value in (("lmdeploy.tokenizer", {"Tokenizer": object}),
                    ("lmdeploy.pytorch.engine.model_agent", {"BatchedOutputs": object})):
    sys.modules.setdefault(name, types.ModuleType(name)).__dict__.update(value)
sys.path.insert(0, str(HERE.parents[2] / "lmdeploy" / "tests" / "engine"))
sys.path.insert(0, str(HERE.parents[2] / "lmdeploy"))

import harness  # noqa: E402
import kvtier_mooncake  # noqa: E402
import torch  # noqa: E402
from harness import BLOCK, Engine, bytes_of, fill, prompt, spoil  # noqa: E402


class FakeGpuTensor(torch.Tensor):
    """A CPU tensor that claims to be on a GPU, because the connector rejects others."""

    is_cuda = property(lambda self: True)


class Event:
    """An event without a stream: it is always complete."""

    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({
        "metadata_server": "P2PHANDSHAKE", "master_server_address": "none:1", "protocol": "tcp",
        "global_segment_size": "64MB", "kvtier": {"host_bytes": 64 << 20}}))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    from lmdeploy.pytorch.kv_connector.mooncake.store import worker

    monkeypatch.setattr(worker, "_get_local_hostname", lambda: "localhost")
    kvtier_mooncake.install()
    caches = {name: row.as_subclass(FakeGpuTensor)
              for name, row in harness.rows_of(8, 4, 24).items()}
    made = Engine({"mooncake_config_path": str(config), "model_name": "m",
                   "lookup_rpc_path": f"ipc://{tmp_path}/lookup.sock"},
                  connector="MooncakeStoreConnector", caches=[caches])
    yield made
    made.close()
    kvtier_mooncake.uninstall()


def test_evicted_blocks_are_loaded_when_a_prompt_resumes(engine: Any) -> None:
    rows = engine.caches[0]
    sequence = engine.admit(0, prompt(4))
    table = engine.table(sequence)[:4]
    fill(rows, table, 1)
    want = bytes_of(rows, table)
    engine.step([sequence], (4 * BLOCK,))
    engine.end(0)
    engine.settle()
    engine.admit(1, [5] * (8 * BLOCK - 1))  # fills the whole cache
    engine.end(1)
    spoil(rows)
    sequence = engine.admit(2, prompt(4, more=[9, 9, 9]))
    assert "WAITING_FOR_REMOTE_KVS" in engine.statuses
    assert sequence.num_history_ids == 4 * BLOCK
    assert bytes_of(rows, engine.table(sequence)[:4]) == want
    engine.end(2)


def test_shutdown_waits_for_transfers(engine: Any) -> None:
    sequence = engine.admit(0, prompt(4))
    fill(engine.caches[0], engine.table(sequence)[:4], 1)
    meta = engine.scheduler.build_connector_meta([sequence], (4 * BLOCK,))
    worker = engine.workers[0]
    worker.bind_connector_metadata(meta)
    worker.start_load_kv()
    worker.start_save_kv()
    closing = threading.Thread(target=worker.shutdown)  # drains transfers and closes the store
    closing.start()
    closing.join(600)
    assert not closing.is_alive()
    worker.shutdown()

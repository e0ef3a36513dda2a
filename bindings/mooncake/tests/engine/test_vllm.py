"""The parts of vLLM's Mooncake backends that import without its engine: the setup of stores, and
the store of the embedding connector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import empty_packages, imported, need

need("vllm", "0.33.0", "torch", "regex")
empty_packages("vllm", ["vllm", "vllm.distributed", "vllm.distributed.ec_transfer",
                        "vllm.distributed.ec_transfer.ec_connector",
                        "vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding"])
import kvtier_mooncake  # noqa: E402
import torch  # noqa: E402
from kvtier_mooncake import MooncakeDistributedStore, ReplicateConfig  # noqa: E402


def config_of(path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    module = imported("vllm.distributed.mooncake_store")
    file = path / "mooncake.json"
    file.write_text(json.dumps({"metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
                                "master_server_address": "none:1",
                                "global_segment_size": "64MB", **more}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    return module, module.MooncakeStoreConfig.load_from_config()


def test_vllm_sets_up_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for more in ({}, {"tenant_id": "them"},
                 {"mode": "standalone-store", "global_segment_size": 0,
                  "kvtier": {"host_bytes": 33 << 20}}):
        module, config = config_of(tmp_path, monkeypatch, **more)
        store = MooncakeDistributedStore()
        module.setup_mooncake_store(store, config, "localhost")
        assert store.put("k", b"v") == 0 and store.close() == 0
    kvtier_mooncake.configure(spec="store(hots=1)")
    with pytest.raises(RuntimeError, match="failed"):
        module.setup_mooncake_store(MooncakeDistributedStore(), config, "localhost")
    kvtier_mooncake.configure()


def test_the_embedding_store_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are put from a header and a tensor, and loaded into one buffer."""
    client = imported("vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding"
                      ".store_client")
    module, config = config_of(tmp_path, monkeypatch)
    store = MooncakeDistributedStore()
    module.setup_mooncake_store(store, config, "localhost")
    ours = client.MooncakeEmbeddingStoreClient(store, ReplicateConfig(), read_buffer_bytes=1 << 20)
    tensors = {f"image{at}": torch.randn(10 + at, 64) for at in range(5)}
    for key, tensor in tensors.items():
        ours.put_tensor(key, tensor)
    assert ours.batch_exists([*tensors, "other"]) == [True] * 5 + [False]
    specs = {key: client.TensorSpec(dtype=str(tensor.dtype), shape=tuple(tensor.shape),
                                    nbytes=tensor.nbytes)
             for key, tensor in tensors.items()}
    specs["other"] = client.TensorSpec(dtype="torch.float32", shape=(3, 64), nbytes=768)
    loaded = ours.load_tensors(specs, "cpu")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    ours.close()

"""A process with a NIXL agent. Reads one JSON command a line, and answers with one line."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))
from processes import serve  # noqa: E402

ANSWER_SECONDS = 300.0


class Agent:
    def __init__(self, params: Dict[str, str], name: str = "agent", plugin: str = "KVTIER",
                 others: Sequence[Dict[str, str]] = ()) -> None:
        self.name, self.plugin = name, plugin
        self.agent = nixl_agent(name, nixl_agent_config(backends=[]))
        self.agent.create_backend(plugin, params)
        self.next_id = 1
        self.others = [Agent(one, f"{name}{at}", plugin) for at, one in enumerate(others)]

    def others_see(self, keys: List[str]) -> Any:
        """How many of the objects each other agent of this process finds."""
        return [sum(found is not None for found in one.query(keys)) for one in self.others]

    def plugins(self) -> Any:
        return [sorted(self.agent.get_plugin_list()), self.agent.get_plugin_params(self.plugin),
                self.agent.get_plugin_mem_types(self.plugin)]

    def query(self, keys: List[str]) -> Any:
        return self.agent.query_memory([(0, 1, 0, key) for key in keys], self.plugin, "OBJ")

    def prepare(self, kind: str, keys: List[str], sizes: List[int], offset: int = 0,
                short: int = 0) -> Any:
        """Memory, and a transfer between it and objects. A write's bytes are those of `content`."""
        self.memory = [content(key, size) if kind == "WRITE" else np.full(size, 0xEE, np.uint8)
                       for key, size in zip(keys, sizes)]
        self.registered = self.agent.register_memory(
            [(one.ctypes.data, one.nbytes, 0, "") for one in self.memory], "DRAM")
        self.objects = self.agent.register_memory(
            [(offset, size, self.next_id + at, key)
             for at, (key, size) in enumerate(zip(keys, sizes))], "OBJ")
        self.next_id += len(keys)
        local = self.agent.get_xfer_descs(
            [(one.ctypes.data, one.nbytes - short, 0) for one in self.memory], "DRAM")
        self.handle = self.agent.initialize_xfer(kind, local, self.objects.trim(), self.name)

    def run(self) -> str:
        state = self.agent.transfer(self.handle)
        end = time.monotonic() + ANSWER_SECONDS
        while state == "PROC" and time.monotonic() < end:
            state = self.agent.check_xfer_state(self.handle)
        return str(state)

    def end(self) -> None:
        self.agent.release_xfer_handle(self.handle)
        self.agent.deregister_memory(self.objects)
        self.agent.deregister_memory(self.registered)

    def transfer(self, kind: str, keys: List[str], sizes: List[int], times: int = 1) -> Any:
        self.prepare(kind, keys, sizes)
        try:
            states = [self.run() for _ in range(times)]
            return {"states": states, "sums": [digest(one) for one in self.memory]}
        finally:
            self.end()

    def abandon(self, kind: str, keys: List[str], sizes: List[int]) -> Any:
        """Releases a transfer that has just been posted, and then clears its memory."""
        self.prepare(kind, keys, sizes)
        state = self.agent.transfer(self.handle)
        self.end()
        self.abandoned = self.memory
        for one in self.abandoned:
            one.fill(0)
        return str(state)

    def abandoned_is_zero(self) -> bool:
        """Whether nothing has written to the memory of the abandoned transfer."""
        return not any(one.any() for one in self.abandoned)

    def refused(self, **what: Any) -> Any:
        self.prepare(**what)
        return self.run()


def content(key: str, size: int) -> "np.ndarray[Any, Any]":
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def digest(memory: "np.ndarray[Any, Any]") -> str:
    return hashlib.sha256(memory.tobytes()).hexdigest()


if __name__ == "__main__":
    serve(Agent)
